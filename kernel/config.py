"""What the kernel is told at boot and never changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .geometry import KvShape, RowLayout
from .params import BLOCK_TOKENS, MAX_CONTEXTS


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """One compute device and its hbm frames, or one tier."""

    name: str  # hbm0
    tier: str  # hbm | dram | nvme | remote | sim
    capacity_frames: int


class GroupLimit(NamedTuple):
    """As `setlimit` takes it."""

    group: str
    resource: str
    soft: int
    hard: int


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """devices: compute devices (tier hbm) first, then the tiers, fastest first.

    identity is everything that decides what KV a token gets, as (tag, value): part of every block key.
    """

    devices: tuple[DeviceConfig, ...]
    kv: KvShape
    window_tokens: int
    vocab_tokens: int
    identity: tuple[tuple[str, str], ...]
    block_tokens: int = BLOCK_TOKENS
    max_contexts: int = MAX_CONTEXTS
    stop_tokens: tuple[int, ...] = ()
    owner_uid: int = 0  # who may shut down and set sysctls
    version: str = "0"
    model: str = ""
    fingerprint: str = ""
    architecture: str = ""
    kv_dtype: str = "float32"
    numerics: str = "fast"
    tokenizer: str = ""
    daemon_pid: int = 0
    sharing: str = "uid"  # who shares prefixes: "uid" | "none" (every context alone: the stateless baseline)
    sysctl: dict[str, int | str] = field(default_factory=dict)
    limits: tuple[GroupLimit, ...] = ()  # of groups, from the start; what contains a group before it

    @property
    def layout(self) -> RowLayout:
        return RowLayout(self.max_contexts, -(-self.window_tokens // self.block_tokens))


def encode_identity(identity: tuple[tuple[str, str], ...], domain: str) -> bytes:
    """Unambiguous bytes of identity and domain: every part is tagged and length-prefixed, so no two differ only in where a
    boundary lies ("a","b|c" and "a|b","c" stay apart)."""
    out = bytearray(b"attnix-key-1")
    for tag, value in (*identity, ("domain", domain)):
        for part in (tag.encode(), value.encode()):
            out += len(part).to_bytes(4, "little") + part
    return bytes(out)
