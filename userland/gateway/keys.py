"""API keys: who may call, in which group and domain, and how much.

    [[key]]
    name = "alice"                  # shown by `attnix ps`
    key = "sk-alice-..."            # or sha256 = "..." of it
    group = "alice"                 # sub-group of the gateway's uid that pays for it; the name unless given
    domain = "alice"                # who shares its prefixes; the group unless given
    requests_per_minute = 60        # of the group, all its keys together; none unless given
    concurrent = 8                  # the same
    operator = false                # may see the whole machine: /metrics, and all of the dashboard
    [key.limits]                    # of the group, as `attnix group set`
    hbm_frames = 100
    tokens_s = 500
    contexts = 64
    weight = 200

The gateway has one uid on the daemon's socket, so what it can keep apart are that uid's own sub-groups and sub-domains:
`uid:N/alice`.  Keys of different domains never find each other's prefixes.  What is limited is a group: each of its keys may
say so, and those that do say the same.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
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
_RATES: Final = ("requests_per_minute", "concurrent")
_FIELDS: Final = {"name", "key", "sha256", "group", "domain", "operator", *_RATES, "limits"}


class BadKeys(Exception):
    """The file cannot be used, and why."""


@dataclass
class Quota:
    """What the keys of one group may ask of this gateway together; 0: any number.

    requests_per_minute  a token bucket that holds one minute's worth
    concurrent           requests at a time
    """

    requests_per_minute: int = 0
    concurrent: int = 0
    running: int = 0
    _left: float = 0.0
    _at_s: float | None = None

    def enter(self, now_s: float) -> None:
        """A request begins; `leave` when it ends.  Error: ApiError 429, and nothing has begun."""
        if self.concurrent and self.running >= self.concurrent:
            message = f"{self.running} requests of this key's group run already, which is its limit"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=1)
        if self.requests_per_minute:
            most, rate = float(self.requests_per_minute), self.requests_per_minute / 60
            self._left = most if self._at_s is None else min(most, self._left + (now_s - self._at_s) * rate)
            self._at_s = now_s
            if self._left < 1:
                message = f"this key's group may make {self.requests_per_minute} requests a minute"
                wait_s = (1 - self._left) / rate
                raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s)
            self._left -= 1
        self.running += 1

    def leave(self) -> None:
        self.running -= 1


@dataclass
class Key:
    """One caller.  group and domain are "" for the gateway's own.

    limits    what its row says of its group, as it is named there
    operator  it may see what concerns everybody
    """

    name: str
    digest: bytes = b""
    group: str = ""
    domain: str = ""
    operator: bool = False
    limits: dict[str, int] = field(default_factory=dict)
    quota: Quota = field(default_factory=Quota)


class Keys:
    """All callers.  Without a file there is one, which needs no key."""

    def __init__(self, keys: list[Key] | None) -> None:
        self._open = keys is None
        self.keys = [Key("local", operator=True)] if keys is None else keys
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
        groups: dict[str, dict[str, int]] = {}
        for key in keys:
            said = groups.setdefault(key.group, {})
            for what, number in key.limits.items():
                if said.setdefault(what, number) != number:
                    raise BadKeys(f"{path}: keys of the group {key.group} differ in {what}: {said[what]} and {number}")
        quotas = {name: Quota(*(said.get(what, 0) for what in _RATES)) for name, said in groups.items()}
        for key in keys:
            key.quota = quotas[key.group]
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

    def sharing(self, group: str) -> frozenset[str]:
        """Names of a group's keys."""
        return frozenset(key.name for key in self.keys if key.group == group)

    def follow(self, before: Keys) -> frozenset[str]:
        """Take over from other keys: what their groups have running, and have had in this minute, goes on counting.

        Returns the names of those that are gone, or belong to another group or domain now.
        """
        self.uid = before.uid
        quotas = {key.group: key.quota for key in before.keys}
        for key in self.keys:
            quota = quotas.get(key.group)
            if quota is not None and quota is not key.quota:
                quota.requests_per_minute, quota.concurrent = key.quota.requests_per_minute, key.quota.concurrent
                key.quota = quota
        places = {key.name: (key.group, key.domain) for key in self.keys}
        return frozenset(key.name for key in before.keys if places.get(key.name) != (key.group, key.domain))

    async def apply(self, client: AsyncClient, before: Keys | None = None) -> None:
        """Set the groups' limits on a daemon that has just been connected, or after other keys.  Error: AttnixError."""
        assert client.server is not None
        self.uid = client.server.uid
        wanted = self._limits()
        lifted = dict.fromkeys(() if before is None else before._limits().keys() - wanted.keys(), 0)
        for (group, what), number in {**lifted, **wanted}.items():
            await client.setlimit(self.full(group), _LIMITS[what], -1, number)

    def _limits(self) -> dict[tuple[str, str], int]:
        return {(key.group, what): key.limits[what] for key in self.keys for what in _LIMITS if what in key.limits}

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
    numbers = {what: row[what] for what in _RATES if what in row} | limits
    for what, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise BadKeys(f"{where}: {what} is a number of 0 or more, not {number!r}")
    operator = row.get("operator", False)
    if not isinstance(operator, bool):
        raise BadKeys(f"{where}: operator is true or false, not {operator!r}")
    return Key(name, bytes.fromhex(digest), group, domain, operator, numbers)


def read_keys(path: str) -> Keys:
    """The callers that a file names; with no path, whoever can connect."""
    return Keys.load(str(Path(path).expanduser())) if path else Keys(None)
