"""API keys: who may call, in which group and domain, and how much.

    [[key]]
    name = "alice"                  # shown by `attnix ps`
    key = "sk-alice-..."            # or sha256 = "..." of it
    group = "alice"                 # sub-group of the gateway's uid that pays for it; the name unless given
    domain = "alice"                # who shares its prefixes; the group unless given
    requests_per_minute = 60        # none unless given
    concurrent = 8
    [key.limits]                    # of the group, as `attnix group set`
    hbm_frames = 100
    tokens_s = 500
    contexts = 64
    weight = 200

The gateway has one uid on the daemon's socket, so what it can keep apart are that uid's own sub-groups and sub-domains:
`uid:N/alice`.  Keys of different domains never find each other's prefixes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from attnix.syscalls import AsyncClient

from .errors import ApiError

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,24}")
_LIMITS: Final = {
    "hbm_frames": "hbm", "dram_frames": "dram", "nvme_frames": "nvme",
    "tokens_s": "tokens_s", "contexts": "contexts", "weight": "weight",
}  # fmt: skip
_FIELDS: Final = {"name", "key", "sha256", "group", "domain", "requests_per_minute", "concurrent", "limits"}


class BadKeys(Exception):
    """The file cannot be used, and why."""


@dataclass
class Key:
    """One caller.  group and domain are "" for the gateway's own."""

    name: str
    digest: bytes = b""
    group: str = ""
    domain: str = ""
    requests_per_minute: int = 0
    concurrent: int = 0
    limits: dict[str, int] = field(default_factory=dict)
    running: int = 0
    _tokens: float = 0.0
    _at_s: float = 0.0

    def enter(self) -> None:
        """A request begins; `leave` when it ends.  Error: ApiError 429."""
        if self.concurrent and self.running >= self.concurrent:
            message = f"{self.running} requests of this key run already, which is its limit"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=1)
        if self.requests_per_minute:
            rate, now = self.requests_per_minute / 60, time.monotonic()
            most = float(self.requests_per_minute)
            self._tokens = min(most, self._tokens + (now - self._at_s) * rate) if self._at_s else most
            self._at_s = now
            if self._tokens < 1:
                message = f"this key may make {self.requests_per_minute} requests a minute"
                wait_s = (1 - self._tokens) / rate
                raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s)
            self._tokens -= 1
        self.running += 1

    def leave(self) -> None:
        self.running -= 1


class Keys:
    """All callers.  Without a file there is one, which needs no key."""

    def __init__(self, keys: list[Key] | None) -> None:
        self._open = keys is None
        self.keys = [Key("local")] if keys is None else keys
        self.uid = 0

    @staticmethod
    def load(path: str) -> Keys:
        """Error: BadKeys."""
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                if stat.S_ISREG(mode) and mode & 0o077:
                    raise BadKeys(f"{path} can be read by others (mode {mode & 0o777:o}): chmod 600 it")
                content = tomllib.load(file)
        except OSError as error:
            raise BadKeys(f"{path} cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadKeys(f"{path} is no TOML: {error}") from None
        rows = content.get("key")
        if not isinstance(rows, list) or not rows:
            raise BadKeys(f"{path} has no [[key]]")
        keys = [_key(row, f"{path}, key {number}") for number, row in enumerate(rows, 1)]
        for what in ("name", "digest"):
            if len({getattr(key, what) for key in keys}) < len(keys):
                raise BadKeys(f"{path} has two keys of one {'name' if what == 'name' else 'value'}")
        return Keys(keys)

    def of(self, authorization: str, x_api_key: str) -> Key:
        """Who calls.  Error: ApiError 401."""
        if self._open:
            return self.keys[0]
        scheme, _, bearer = authorization.partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else x_api_key
        if not given:
            raise ApiError(401, "no API key was given: send it as `Authorization: Bearer KEY`", code="invalid_api_key")
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        found = [key for key in self.keys if hmac.compare_digest(key.digest, digest)]
        if not found:
            raise ApiError(401, "this API key is not known here", code="invalid_api_key")
        return found[0]

    async def apply(self, client: AsyncClient) -> None:
        """Set the groups' limits on a daemon that has just been connected."""
        assert client.server is not None
        self.uid = client.server.uid
        for key in self.keys:
            for resource, hard in key.limits.items():
                soft = -1
                await client.setlimit(self.full(key.group), resource, soft, hard)

    def full(self, name: str) -> str:
        """A sub-group's or sub-domain's whole name; "" stays the uid's own."""
        return f"uid:{self.uid}/{name}" if name else ""


def _key(row: Any, where: str) -> Key:
    if not isinstance(row, dict):
        raise BadKeys(f"{where} is no table")
    unknown = sorted(set(row) - _FIELDS)
    if unknown:
        raise BadKeys(f"{where} has unknown fields: {', '.join(unknown)}")
    name: Any = row.get("name")
    group: Any = row.get("group", name)
    domain: Any = row.get("domain", group)
    for what, value in (("name", name), ("group", group), ("domain", domain)):
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise BadKeys(f"{where}: {what} is 1 to 24 letters, digits, dots, dashes or underscores, not {value!r}")
    secret, digest = row.get("key"), row.get("sha256")
    if (secret is None) == (digest is None):
        raise BadKeys(f"{where} has one of key and sha256")
    if isinstance(secret, str) and len(secret) >= 8:
        digest = hashlib.sha256(secret.encode()).hexdigest()
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-fA-F]{64}", digest):
        raise BadKeys(f"{where}: key is text of 8 characters or more, sha256 is 64 hexadecimal digits")
    limits = row.get("limits", {})
    if not isinstance(limits, dict) or set(limits) - set(_LIMITS):
        raise BadKeys(f"{where}: limits are {', '.join(_LIMITS)}")
    numbers = {
        "requests_per_minute": row.get("requests_per_minute", 0),
        "concurrent": row.get("concurrent", 0),
        **limits,
    }
    for what, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise BadKeys(f"{where}: {what} is a number of 0 or more, not {number!r}")
    return Key(
        name, bytes.fromhex(digest), group, domain, numbers["requests_per_minute"], numbers["concurrent"],
        {_LIMITS[what]: limits[what] for what in limits},
    )  # fmt: skip


def read_keys(path: str) -> Keys:
    """The callers that a file names; with no path, whoever can connect."""
    return Keys.load(str(Path(path).expanduser())) if path else Keys(None)
