"""hbm <-> dram of a CUDA device, for bench_tiers.py: the driver's transfers, and what the device does of them, beside
cudaMemcpyAsync of the same bytes.

The driver is a process of its own, so what is measured of its device alone is done here with the driver's own parts
(drivers/accel/cuda): frames of the same shape in the same device's memory, the daemon's dram arena registered as pinned,
scattered frames copied by one launch.  cudaMemcpyAsync copies between the same two memories: as one piece, and frame by frame.
Those times are the device's own; of a whole transfer, with headers and checksums, the daemon's side.

On cuda-dry everything runs with CPU tensors, and no time is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from attnix.bench_attention import Timer
from attnix.drivers.accel.cuda.arena import StoredArena
from attnix.drivers.accel.cuda.frames import DeviceFrames
from attnix.drivers.accel.cuda.open import open_device
from attnix.drivers.memfd import map_shared
from attnix.drivers.stored import StoredFormat
from attnix.tier_rig import DRAM, HBM, IDENTITY, TierRig

_NOISE_BYTES: Final = 1 << 20

Verb = Literal["read", "write"]
DIRECTIONS: Final[tuple[tuple[Verb, str], ...]] = (("read", "hbm -> dram"), ("write", "dram -> hbm"))


class WrongCopy(Exception):
    """The copies are not what was copied; the message says which."""


class Case(NamedTuple):
    """Nanoseconds of ours and of a peer, turn by turn."""

    title: str
    peer: str
    ours_ns: list[float]
    theirs_ns: list[float]


class DeviceCopies:
    """Copies between frames of this process and the rig's dram arena.

    memory  "", or what is to be said of the arena: that it could not be pinned
    """

    def __init__(self, rig: TierRig, pairs: Sequence[tuple[int, int]], kind: Literal["cuda", "cuda-dry"]) -> None:
        self._device, self._ops = open_device(kind, 0, "fast", rig.config, rig.block_tokens)
        self._name = "cudaMemcpyAsync" if kind == "cuda" else "copy_"
        self._bare, self._stored = (np.array(side, np.int32) for side in zip(*pairs, strict=True))
        buffer = map_shared(rig.supervisor.arena_fd(DRAM))
        refused = self._device.register(buffer)
        self.memory = f", dram is not pinned ({refused})" if refused else ""
        self._arena = StoredArena(buffer, rig.frame_bytes, not refused)
        with self._device.computing():
            self._frames = DeviceFrames(
                rig.config, "bfloat16", rig.block_tokens, rig.hbm_frames, self._device, self._ops, rig.config.kv_heads
            )
            self._timer = Timer(self._device.torch_device)

    def ours(self, verb: Verb) -> Callable[[], None]:
        """A transfer's copies, as the driver has the device make them."""
        return lambda: self._arena.copies(verb, self._frames, self._bare, self._stored, self._device, self._ops)()

    def peers(self, verb: Verb) -> dict[str, Callable[[], Any]]:
        frames, payload = self._frames.bytes_, self._arena.payload
        n_bytes = len(self._bare) * frames.shape[1]
        flat = (frames.view(-1)[:n_bytes], torch.frombuffer(self._arena.buffer, dtype=torch.uint8)[:n_bytes])
        source, target = flat if verb == "read" else flat[::-1]
        each = [(frames[a], payload[b]) for a, b in zip(self._bare.tolist(), self._stored.tolist(), strict=True)]
        moves = each if verb == "read" else [(b, a) for a, b in each]

        def by_frames() -> None:
            for one, other in moves:
                other.copy_(one, non_blocking=True)

        return {
            f"{self._name} in one piece": lambda: target.copy_(source, non_blocking=True),
            f"{self._name} by frames": by_frames,
        }

    def check(self) -> None:
        """Random bytes down and up again.  Error: WrongCopy."""
        frames, payload = self._frames.bytes_, self._arena.payload
        there, stored = (torch.from_numpy(numbers).long() for numbers in (self._bare, self._stored))
        with self._device.computing():
            frames.random_(0, 256)
            want = frames.cpu()[there]
            self.ours("read")()
            self._device.mark().synchronize()
            if not torch.equal(payload[stored], want):
                raise WrongCopy("what came to dram is not what was in hbm")
            frames.zero_()
            self.ours("write")()
            if not torch.equal(frames.cpu()[there], want):
                raise WrongCopy("what came to hbm is not what was in dram")

    def turns(self, calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
        with self._device.computing():
            return self._timer.turns(calls, rounds)


async def hbm_dram_on_device(rig: TierRig, rounds: int, frames: int, kind: Literal["cuda", "cuda-dry"]) -> list[Case]:
    """Both directions: the copies alone, then whole transfers.  Error: WrongCopy, RigError."""
    draw = np.random.default_rng(2)
    hbm = draw.permutation(rig.hbm_frames)[:frames].tolist()
    dram = draw.permutation(rig.dram_frames)[:frames].tolist()
    pairs, blocks = list(zip(hbm, dram, strict=True)), range(frames)
    tags = rig.tags(blocks)
    copies = DeviceCopies(rig, pairs, kind)
    copies.check()
    found = []
    for verb, title in DIRECTIONS:
        times = copies.turns({"": copies.ours(verb), **copies.peers(verb)}, rounds)
        ours = times.pop("")
        found += [Case(f"{title}, copies alone{copies.memory}", peer, ours, theirs) for peer, theirs in times.items()]
    await _filled(rig, pairs, tags)
    for verb, title in DIRECTIONS:
        peer, call = next(iter(copies.peers(verb).items()))
        ours, theirs = [], []
        for turn in range(rounds + 1):
            if verb == "write":  # what the peer copied last lies over ours: sealed again, untimed
                await rig.transfer(HBM, "read", DRAM, pairs, blocks, tags)
            moved = await rig.transfer(HBM, verb, DRAM, pairs, blocks, tags)
            if turn:
                ours.append(float(moved.wall_ns))
                theirs += copies.turns({peer: call}, 1)[peer]
        found.append(Case(f"{title}, with checksums{copies.memory}", peer, ours, theirs))
    return found


async def _filled(rig: TierRig, pairs: Sequence[tuple[int, int]], tags: bytes) -> None:
    """Random bytes in the driver's frames, which no other process can write: sealed in dram, and loaded."""
    form = StoredFormat(rig.frame_bytes, rig.config.layers, rig.block_tokens, IDENTITY)
    noise = np.random.default_rng(1).bytes(_NOISE_BYTES)
    n_bytes = len(pairs) * rig.frame_bytes
    bare = (noise * -(-n_bytes // len(noise)))[:n_bytes]
    numbered = np.array([(n, dram) for n, (_, dram) in enumerate(pairs)], np.int32)
    with map_shared(rig.supervisor.arena_fd(DRAM)) as arena:
        form.seal(bare, arena, numbered.tobytes(), tags)
    await rig.transfer(HBM, "write", DRAM, pairs, range(len(pairs)), tags)
