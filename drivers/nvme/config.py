"""Settings of a file tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..serve import ConfigError
from ..stored import StoredFormat

ENGINES: Final = ("auto", "uring", "threads")
SYNCS: Final = ("none", "batch")
# What the daemon adds for every tier driver and this one has no use for.
_IGNORED: Final = frozenset({"dram_fd", "dram_frames"})


class NvmeConfig(NamedTuple):
    """The driver's settings, as they come in --config.

    path             the file; its folder must exist
    capacity_frames  slots in it
    frame_bytes, layers, block_tokens, identity   the format of stored frames (drivers/stored.py); identity in hex
    dram_device      device number of the arena that --arena is
    hbm_fds          descriptors of hbm arenas by device number, for direct reads
    gates_fd         descriptor of the gates; -1: there are none, and no direct reads
    engine           auto | uring | threads
    fsync            none | batch: with "batch" a write is answered once it would survive a power failure
    depth            operations under way at once
    lock_wait_ms     how long another holder of the file may take to go: a killed predecessor's operations still end
    allow_shrink     with too little space on the file system: take what there is instead of refusing
    """

    path: str
    capacity_frames: int
    frame_bytes: int
    layers: int
    block_tokens: int
    identity: str
    dram_device: int
    hbm_fds: Mapping[str, int] = {}
    gates_fd: int = -1
    engine: str = "auto"
    fsync: str = "none"
    depth: int = 64
    allow_shrink: bool = False
    lock_wait_ms: int = 5000
    stored_bytes: int = 0  # said by the daemon: must be what the format gives

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> NvmeConfig:
        """Check names, types and choices.  Error: ConfigError, which names the setting."""
        given = {name: value for name, value in raw.items() if name not in _IGNORED}
        for name, value in given.items():
            if name not in cls._fields:
                raise ConfigError(f"unknown setting {name!r}; there are {', '.join(cls._fields)}")
            kind = _TYPES.get(name, int)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ConfigError(f"setting {name!r} must be {kind.__name__}, not {value!r}")
        missing = [name for name in cls._fields if name not in given and name not in cls._field_defaults]
        if missing:
            raise ConfigError(f"setting {missing[0]!r} is required")
        config = cls(**given)
        for name, choices in (("engine", ENGINES), ("fsync", SYNCS)):
            if getattr(config, name) not in choices:
                raise ConfigError(
                    f"setting {name!r} must be one of {', '.join(choices)}, not {getattr(config, name)!r}"
                )
        if not config.path or config.capacity_frames < 1 or not 1 <= config.depth <= 1024:
            raise ConfigError("path must be given, capacity_frames positive, depth between 1 and 1024")
        if any(not name.isdigit() or not isinstance(fd, int) for name, fd in config.hbm_fds.items()):
            raise ConfigError(f"setting 'hbm_fds' must be descriptors by device number, not {config.hbm_fds!r}")
        return config

    def format(self) -> StoredFormat:
        """Error: ConfigError."""
        try:
            made = StoredFormat(self.frame_bytes, self.layers, self.block_tokens, bytes.fromhex(self.identity))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.stored_bytes not in (0, made.stored_bytes):
            raise ConfigError(f"stored_bytes is {self.stored_bytes}; frames of this size take {made.stored_bytes}")
        return made


_TYPES: Final[dict[str, type]] = {
    "path": str,
    "identity": str,
    "engine": str,
    "fsync": str,
    "hbm_fds": dict,
    "allow_shrink": bool,
}
