"""The settings of a network tier: what the daemon passes in --config, checked once."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from attnix.kernel.tag import MAX_LAYERS, stored_bytes

from ..serve import ConfigError
from .lane import Address
from .resp import request

DEFAULT_PORT: Final = 6379

# Settings of this tier, with their defaults; those of the daemon are in drivers/protocol.py.
_DEFAULTS: Final[dict[str, Any]] = {
    "url": "",  # redis://[user:password@]host[:port][/database] or redis+unix:///path[?db=N]
    "password": "",  # instead of one in the url; both are on the driver's command line, where other users can read them
    "password_file": "",  # instead of either: a file whose first line is the password
    "ttl_s": 86_400.0,  # an object expires this long after it was last written; 0: never
    "max_object_bytes": 64 << 20,  # larger objects are neither stored nor received
    "deadline_ms": 200.0,  # a call may stand still this long, and take this long plus bytes / min_bytes_s
    "min_bytes_s": 50_000_000.0,  # a store slower than this is no use
    "window_bytes": 8 << 20,  # content asked for ahead of what has arrived
    "breaker_failures": 3,  # calls in a row
    "backoff_ms": 500.0,  # before the store is asked again; doubled each time, up to
    "backoff_cap_ms": 30_000.0,
}
_GIVEN: Final = frozenset(
    {
        "identity", "frame_bytes", "stored_bytes", "layers", "block_tokens", "capacity_frames",
        "dram_fd", "dram_device", "dram_frames", "gates_fd", "hbm_fds",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """One network tier.

    address_text  where the store is, for people: without any password
    host, port    of a TCP address; host is empty for a Unix socket
    path          of a Unix socket
    greeting      commands that open a connection: password, database
    dram_frames   stored frames in the dram arena; 0: as many as fit
    identity      16 bytes: digest of what decides what KV a token gets
    """

    address_text: str
    host: str
    port: int
    path: str
    greeting: tuple[bytes, ...]
    identity: bytes
    frame_bytes: int
    layers: int
    block_tokens: int
    capacity_frames: int
    dram_device: int
    dram_frames: int
    ttl_ms: int
    max_object_bytes: int
    deadline_ns: int
    min_bytes_s: float
    window_bytes: int
    breaker_failures: int
    backoff_ns: int
    backoff_cap_ns: int

    @property
    def stored_bytes(self) -> int:
        return stored_bytes(self.frame_bytes)


def parse_settings(config: dict[str, Any]) -> Settings:
    """Check a configuration.  Error: ConfigError, with a message that names the setting."""
    unknown = sorted(set(config) - set(_DEFAULTS) - _GIVEN)
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; this tier has {', '.join(_DEFAULTS)}")
    values: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = config.get(name, default)
        if isinstance(default, str):
            if not isinstance(value, str):  # not shown: it may be a password
                raise ConfigError(f"setting {name!r} must be a string")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"setting {name!r} must be a number, not {value!r}")
        elif value < 0 or (value == 0 and name != "ttl_s"):
            raise ConfigError(f"setting {name!r} must be positive, not {value!r}")
        values[name] = value
    numbers = {
        name: _positive(config, name) for name in ("frame_bytes", "layers", "block_tokens", "capacity_frames")
    }  # fmt: skip
    if numbers["layers"] > MAX_LAYERS or numbers["frame_bytes"] % numbers["layers"]:
        raise ConfigError(
            f"{numbers['frame_bytes']} bytes are not {numbers['layers']} equal layers, or too many of them"
        )
    wanted_bytes = stored_bytes(numbers["frame_bytes"])
    if config.get("stored_bytes", wanted_bytes) != wanted_bytes:
        raise ConfigError(f"stored_bytes is {config['stored_bytes']}; frames of this size take {wanted_bytes}")
    if wanted_bytes > values["max_object_bytes"]:
        raise ConfigError(
            f"an object has {wanted_bytes} bytes, more than max_object_bytes = {values['max_object_bytes']}"
        )
    dram_device = config.get("dram_device")
    if not isinstance(dram_device, int) or isinstance(dram_device, bool) or dram_device < 0:
        raise ConfigError(f"setting 'dram_device' must be a device number, not {dram_device!r}")
    host, port, path, user, password, database = _parse_url(values["url"])
    password = _read_password(values) or password
    greeting: list[bytes] = []
    if password:
        greeting.append(request(b"AUTH", *([user.encode()] if user else []), password.encode()))
    if database:
        greeting.append(request(b"SELECT", b"%d" % database))
    return Settings(
        address_text=f"redis+unix://{path}" if path else f"redis://{host}:{port}",
        host=host,
        port=port,
        path=path,
        greeting=tuple(greeting),
        identity=_identity(config),
        frame_bytes=numbers["frame_bytes"],
        layers=numbers["layers"],
        block_tokens=numbers["block_tokens"],
        capacity_frames=numbers["capacity_frames"],
        dram_device=dram_device,
        dram_frames=_positive(config, "dram_frames") if "dram_frames" in config else 0,
        ttl_ms=round(values["ttl_s"] * 1000),
        max_object_bytes=int(values["max_object_bytes"]),
        deadline_ns=round(values["deadline_ms"] * 1e6),
        min_bytes_s=float(values["min_bytes_s"]),
        window_bytes=int(values["window_bytes"]),
        breaker_failures=int(values["breaker_failures"]),
        backoff_ns=round(values["backoff_ms"] * 1e6),
        backoff_cap_ns=round(values["backoff_cap_ms"] * 1e6),
    )


def _positive(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"setting {name!r} must be a positive whole number, not {value!r}")
    return value


def _identity(config: dict[str, Any]) -> bytes:
    try:
        identity = bytes.fromhex(config["identity"])
    except (KeyError, TypeError, ValueError):
        identity = b""
    if len(identity) != 16:
        raise ConfigError("setting 'identity' must be 16 bytes in hex")
    return identity


def _read_password(values: dict[str, Any]) -> str:
    if not values["password_file"]:
        return str(values["password"])
    try:
        lines = Path(values["password_file"]).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"password_file: {error}") from error
    if not lines or not lines[0]:
        raise ConfigError(f"password_file {values['password_file']} has no password in its first line")
    return lines[0]


def _parse_url(url: str) -> tuple[str, int, str, str, str, int]:
    """(host, port, path, user, password, database) of a url; host or path is empty."""
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        if parts.scheme in ("redis", "valkey") and parts.hostname:
            return parts.hostname, port, "", user, password, int(parts.path.strip("/") or 0)
        if parts.scheme in ("redis+unix", "valkey+unix", "unix") and parts.path:
            database = int(parse_qs(parts.query).get("db", ["0"])[0])
            return "", 0, unquote(parts.path), user, password, database
    except ValueError as error:
        raise ConfigError(f"url cannot be read: {error}") from error
    raise ConfigError(
        f"url must be redis://[user:password@]host[:port][/database] or redis+unix:///path, "
        f"not one that begins with {parts.scheme + '://' if parts.scheme else 'no scheme'!r}"
    )


class Resolver:
    """Addresses of the store, never waited for: a name server that hangs must not hang the driver.

    Numbers and paths are known at once.  A name is looked up by a thread that `refresh` starts; until it has answered
    the last known addresses count, and there are none in the beginning.
    """

    def __init__(self, settings: Settings) -> None:
        self._host, self._port = settings.host, settings.port
        self._known: list[Address] = []
        self._thread: threading.Thread | None = None
        if settings.path:
            self._known = [(socket.AF_UNIX, settings.path)]
            self._is_fixed = True
            return
        try:
            self._known = self._look_up(socket.AI_NUMERICHOST)
            self._is_fixed = True
        except OSError:
            self._is_fixed = False
            self.refresh()

    def addresses(self) -> Sequence[Address]:
        if not self._known:
            self.refresh()
        return self._known

    def refresh(self) -> None:
        """Look the name up again, on the side."""
        if not self._is_fixed and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, daemon=True, name="resolver")
            self._thread.start()

    def wait(self, limit_s: float) -> None:
        """Wait for the lookup under way; only for the start of the driver."""
        if self._thread is not None:
            self._thread.join(limit_s)

    def _run(self) -> None:
        try:
            self._known = self._look_up(0)
        except OSError:
            return  # the last known ones may still be right

    def _look_up(self, flags: int) -> list[Address]:
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=flags)
        return [(family, where) for family, _, _, _, where in found]  # type: ignore[misc]
