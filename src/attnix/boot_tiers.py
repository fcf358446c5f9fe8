"""What `attnix boot` and `attach_tier` say about memory tiers, turned into drivers.

    --dram 2GiB                       one arena in shared memory; every other tier stages through it
    --nvme 16GiB[@/path/to/file]      a file of fixed slots, in the state directory unless a path is given
    --remote redis://host[,64GiB]     a Redis or Valkey server

Each tier below dram is a driver process: `TierDrivers` makes its specification at boot and while serving.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from attnix.drivers.dram import DramSpec, frames_in
from attnix.drivers.spec import DriverSpec, driver_argv
from attnix.kernel.config import encode_identity
from attnix.kernel.events import AttachTier
from attnix.kernel.tag import stored_bytes

MODULES: Final = {"nvme": "attnix.drivers.nvme", "remote": "attnix.drivers.remote", "sim": "attnix.drivers.sim_tier"}
LEAST_STAGING_FRAMES: Final = 4  # of dram, when something slower stages through it
_REMOTE_DEFAULT_BYTES: Final = 4 << 30
_DRAM_DEFAULT_BYTES: Final = 256 << 20
_UNITS: Final = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip


class TierRequest(NamedTuple):
    """One tier below dram that boot was asked for."""

    kind: str
    size_bytes: int
    settings: dict[str, Any]


def parse_bytes(text: str) -> int:
    """`256MiB`, `2GiB`, `1000000`.  Error: ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)?\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size: write 256MiB, 2GiB or a number of bytes")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def parse_nvme(text: str) -> TierRequest:
    """`SIZE[@PATH]`.  Error: ValueError."""
    size, _, path = text.partition("@")
    return TierRequest("nvme", parse_bytes(size), {"path": os.path.abspath(path)} if path else {})


def parse_remote(text: str) -> TierRequest:
    """`URL[,SIZE]`.  The size bounds what we keep track of; the store has limits of its own.  Error: ValueError."""
    url, comma, size = text.partition(",")
    if "://" not in url:
        raise ValueError(f"{url!r} is not a URL: write redis://host:6379 or redis+unix:///path")
    return TierRequest("remote", parse_bytes(size) if comma else _REMOTE_DEFAULT_BYTES, {"url": url})


def parse_sim_tier(text: str) -> TierRequest:
    """`SIZE[,JSON]`: a simulated tier with settings of its own (drivers/sim_tier.py).  Error: ValueError."""
    size, comma, settings = text.partition(",")
    return TierRequest("sim", parse_bytes(size), parse_settings(settings) if comma else {})


def parse_settings(text: str) -> dict[str, Any]:
    """The JSON object that a tier's driver gets.  Error: ValueError."""
    try:
        settings = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"settings are not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"settings are a JSON object, not {text}")
    return settings


def default_dram_bytes(hbm_bytes: int, tiers: Sequence[TierRequest], limit_bytes: int) -> int:
    """None without a slower tier; with one, twice the hbm but no more than a quarter of the machine."""
    return min(max(2 * hbm_bytes, _DRAM_DEFAULT_BYTES), limit_bytes // 4) if tiers else 0


def identity_digest(identity: tuple[tuple[str, str], ...]) -> bytes:
    """16 bytes for the headers of stored frames: KV of another model, dtype, engine or geometry never passes for ours."""
    return hashlib.sha256(encode_identity(identity, "")).digest()[:16]


class TierDrivers:
    """Makes the specifications of tiers for one model.

    identity  set once the accels have said what they hold; no driver below dram can be made before
    """

    def __init__(self, state_dir: Path, frame_bytes: int, layers: int, block_tokens: int) -> None:
        self.identity = b""
        self._state_dir = state_dir
        self._frame_bytes = frame_bytes
        self._layers = layers
        self._block_tokens = block_tokens

    def dram(self, device: int, size_bytes: int, stages: bool) -> DramSpec:
        """The dram tier.  stages: something slower stages through it.  Error: ValueError, too small."""
        least = LEAST_STAGING_FRAMES if stages else 1
        frames = frames_in(size_bytes, self._frame_bytes)
        if frames < least:
            size = stored_bytes(self._frame_bytes)
            raise ValueError(f"--dram {size_bytes} bytes holds {frames} frames of {size}: it must hold {least} or more")
        return DramSpec(device, "dram0", frames, self._frame_bytes)

    def spec(self, device: int, name: str, request: TierRequest) -> DriverSpec:
        """The driver of a tier below dram.  Error: ValueError."""
        frames = frames_in(request.size_bytes, self._frame_bytes)
        if frames < 1:
            size = stored_bytes(self._frame_bytes)
            raise ValueError(f"{name}: {request.size_bytes} bytes do not hold one frame of {size}")
        return self._spec(device, name, request.kind, frames, request.settings)

    def attached(self, effect: AttachTier) -> DriverSpec:
        """The driver of a tier that is attached while serving.  Error: ValueError."""
        return self._spec(
            effect.device, effect.name, effect.kind, effect.capacity_frames, parse_settings(effect.settings)
        )

    def _spec(self, device: int, name: str, kind: str, frames: int, settings: dict[str, Any]) -> DriverSpec:
        module = MODULES.get(kind)
        if module is None:
            raise ValueError(f"no tier of kind {kind!r}; there are {', '.join(MODULES)}")
        if len(self.identity) != 16:
            raise ValueError(f"{name}: the accels have not said yet what model they hold")
        given: dict[str, Any] = {
            "frame_bytes": self._frame_bytes,
            "stored_bytes": stored_bytes(self._frame_bytes),
            "layers": self._layers,
            "block_tokens": self._block_tokens,
            "identity": self.identity.hex(),
            "capacity_frames": frames,
        }
        reserved = sorted(set(given) & set(settings))
        if reserved:
            raise ValueError(f"{name}: {reserved[0]} is not a setting")
        if kind == "nvme":
            settings = {"path": str(self._state_dir / f"{name}.frames")} | settings
        return DriverSpec(
            device=device, name=name, argv=driver_argv(module), config=given | settings,
            arena_bytes=0, rows_bytes=0, arena="lost", tier=kind,
        )  # fmt: skip


def name_tiers(requests: Sequence[TierRequest]) -> list[str]:
    """nvme0, nvme1, remote0, ... in order."""
    counts: dict[str, int] = {}
    names: list[str] = []
    for request in requests:
        number = counts[request.kind] = counts.get(request.kind, -1) + 1
        names.append(f"{request.kind}{number}")
    return names
