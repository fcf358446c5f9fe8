"""The measuring half of `attnix bench tiers`: how fast the driver processes move frames, against what the machine can do.

    python -m attnix.bench_tiers [--model NAME] [--dir DIR] [--rounds N] [--device D]        one JSON document on stdout

hbm <-> dram is the accel driver's, with headers, checksums and their verification.  On the CPU the peer copies the same bytes
between the same two arenas with memcpy and checks nothing: frame by frame, and as one piece (which may bypass the caches),
each by as many threads as there are cores, or by one where that is faster.  On a CUDA device: bench_tiers_device.py.

dram <-> nvme is the nvme driver's; the peer is fio on the same file system with direct=1, the same block size and the same
number of bytes.  fio checks nothing either.  Ours and the peer's take turns; times are the daemon's side of a transfer.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from attnix.boot import resolve_model
from attnix.boot_device import DEVICE_VARIABLE, DEVICES, Device, choose
from attnix.drivers.memfd import advise_huge_pages, map_shared
from attnix.kernel.tag import HEADER_BYTES, stored_bytes
from attnix.tier_rig import DRAM, HBM, NVME, NvmeSpec, RigError, TierRig

ROUNDS: Final = 7
HBM_FRAMES: Final = 256  # of one transfer between hbm and dram: 4,096 tokens in blocks of 16; of a device's:
DEVICE_FRAMES: Final = {"cuda": 1024, "cuda-dry": 16}  # some milliseconds of a bus
NVME_FRAMES: Final = 1024  # of one transfer between dram and nvme: a third of a second at 1.2 GB/s
FIO_DEPTH: Final = 32


class Pairs(NamedTuple):
    """One case: nanoseconds of ours and theirs, turn by turn, for `frames` frames of `frame_bytes` payload each.

    peer_bytes  bytes that the peer moved in that time (with headers where they travel)
    missing     why there are no `theirs`
    """

    case: str
    peer: str
    frames: int
    frame_bytes: int
    peer_bytes: int
    ours_ns: list[float]
    theirs_ns: list[float]
    missing: str = ""


class Copies:
    """memcpy between the two arenas, in this process.  Not timed before every page is mapped here."""

    def __init__(self, rig: TierRig, pairs: Sequence[tuple[int, int]]) -> None:
        self._frame, self._stored = rig.frame_bytes, stored_bytes(rig.frame_bytes)
        self._pairs = pairs
        self._maps = [map_shared(rig.supervisor.arena_fd(device)) for device in (HBM, DRAM)]
        for mapping in self._maps:
            advise_huge_pages(mapping)
        self._hbm, self._dram = (np.frombuffer(mapping, np.uint8) for mapping in self._maps)
        self._bases = [view.ctypes.data for view in (self._hbm, self._dram)]
        self._memcpy: Callable[..., Any] = ctypes.CDLL(None).memcpy  # releases the interpreter lock
        self._memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._memcpy.restype = ctypes.c_void_p

    def frame_by_frame(self, up: bool) -> Callable[[int, int], None]:
        """Copy the frames of the same pairs, payload only."""
        moves = []
        for hbm, dram in self._pairs:
            at = (self._bases[0] + hbm * self._frame, self._bases[1] + dram * self._stored + HEADER_BYTES)
            moves.append(at if up else at[::-1])

        def run(first: int, last: int) -> None:
            for to, source in moves[first:last]:
                self._memcpy(to, source, self._frame)

        return run

    def whole(self, up: bool) -> Callable[[int, int], None]:
        """Copy as many bytes from the start of one arena to the start of the other."""
        to, source = self._bases if up else self._bases[::-1]

        def run(first: int, last: int) -> None:
            self._memcpy(to + first * self._frame, source + first * self._frame, (last - first) * self._frame)

        return run

    def best_ns(self, run: Callable[[int, int], None]) -> float:
        """The faster of one thread and one per core."""
        count = len(self._pairs)
        return min(timed(run, count, threads) for threads in {1, len(os.sched_getaffinity(0))})

    def close(self) -> None:
        del self._hbm, self._dram
        for mapping in self._maps:
            mapping.close()


def timed(run: Callable[[int, int], None], count: int, threads: int) -> float:
    parts = [(count * i // threads, count * (i + 1) // threads) for i in range(threads)]
    helpers = [threading.Thread(target=run, args=part) for part in parts[1:]]
    began = perf_counter_ns()
    for helper in helpers:
        helper.start()
    run(*parts[0])
    for helper in helpers:
        helper.join()
    return perf_counter_ns() - began


class Fio:
    """fio over one file.  `ns` is the time that its own clock gives for the bytes."""

    def __init__(self, path: str, block_bytes: int, frames: int) -> None:
        self._path, self._block, self._frames = path, block_bytes, frames
        self.engine = ""
        self.missing = ""
        program = shutil.which("fio")
        if program is None:
            self.missing = "fio is not installed"
            return
        self._program = program
        for engine in ("io_uring", "libaio", "psync"):  # a kernel may refuse the first ones
            self.engine = engine
            try:
                self.ns("write")  # lays the file out: extents that were never written would cost more
            except BenchError as error:
                self.missing = str(error)
            else:
                self.missing = ""
                return

    def ns(self, verb: str) -> float:
        """verb: write | read | randread.  Error: BenchError."""
        command = [
            self._program, "--name=peer", f"--filename={self._path}", f"--rw={verb}", f"--bs={self._block}", "--direct=1",
            f"--size={self._block * self._frames}", f"--ioengine={self.engine}", f"--iodepth={FIO_DEPTH}", "--thread",
            "--overwrite=1", "--randrepeat=0", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        try:
            job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
            side = job["write" if verb == "write" else "read"]
            if done.returncode or job["error"] or side["io_bytes"] != self._block * self._frames:
                raise ValueError
            return float(side["io_bytes"]) / float(side["bw_bytes"]) * 1e9
        except (ValueError, KeyError, IndexError, ZeroDivisionError):
            raise BenchError(f"fio failed ({done.returncode}): {(done.stderr or done.stdout).strip()[:200]}") from None


class BenchError(Exception):
    """A peer cannot be measured; the message says why."""


async def hbm_dram(rig: TierRig, rounds: int, frames: int) -> list[Pairs]:
    """Both directions, each against both ways to copy."""
    draw = np.random.default_rng(2)
    hbm = draw.permutation(rig.hbm_frames)[:frames].tolist()
    dram = draw.permutation(rig.dram_frames)[:frames].tolist()
    pairs, blocks = list(zip(hbm, dram, strict=True)), range(frames)
    tags = rig.tags(blocks)
    copies = Copies(rig, pairs)
    found = []
    try:
        for verb, case, up in (("read", "hbm -> dram", False), ("write", "dram -> hbm", True)):
            for peer, run in (
                ("memcpy by frames", copies.frame_by_frame(up)),
                ("memcpy in one piece", copies.whole(up)),
            ):
                ours: list[float] = []
                theirs: list[float] = []
                for turn in range(rounds + 1):
                    # what the peer copied last may lie over ours: sealed again, untimed, before it is read back
                    if up:
                        await rig.transfer(HBM, "read", DRAM, pairs, blocks, tags)
                    moved = await rig.transfer(HBM, verb, DRAM, pairs, blocks, tags)
                    copied = copies.best_ns(run)
                    if turn:
                        ours.append(moved.wall_ns)
                        theirs.append(copied)
                found.append(Pairs(case, peer, frames, rig.frame_bytes, frames * rig.frame_bytes, ours, theirs))
    finally:
        copies.close()
    return found


async def dram_nvme(rig: TierRig, rounds: int, frames: int, folder: str) -> list[Pairs]:
    """Writes in order, reads in order, reads scattered over the file."""
    draw = np.random.default_rng(3)
    dram = draw.permutation(rig.dram_frames)[:frames].tolist()
    order = list(range(frames))
    scattered = draw.permutation(frames).tolist()
    tags = rig.tags(order)
    width = len(tags) // frames
    block = stored_bytes(rig.frame_bytes)
    fio = Fio(os.path.join(folder, "fio"), block, frames)
    await _stored(rig, frames)
    cases = (("dram -> nvme", "write", "write", order), ("nvme -> dram", "read", "read", order))
    found = []
    for case, verb, theirs_verb, slots in (*cases, ("nvme -> dram, scattered", "read", "randread", scattered)):
        pairs = [(slot, dram[slot]) for slot in slots]
        named = b"".join(tags[slot * width : (slot + 1) * width] for slot in slots)
        ours: list[float] = []
        theirs: list[float] = []
        missing = fio.missing
        for turn in range(rounds + 1):
            moved = await rig.transfer(NVME, verb, DRAM, pairs, slots, named)
            if turn:
                ours.append(moved.wall_ns)
            if not missing:
                try:
                    took = await asyncio.to_thread(fio.ns, theirs_verb)
                except BenchError as error:
                    missing = str(error)
                else:
                    theirs += [took] if turn else []
        peer = f"fio {fio.engine}, depth {FIO_DEPTH}, direct"
        found.append(Pairs(case, peer, frames, rig.frame_bytes, frames * block, ours, theirs, missing))
    return found


async def _stored(rig: TierRig, frames: int) -> None:
    """Every dram frame sealed with the tag of ... its place in the transfers of `dram_nvme`: through hbm, a batch at a time."""
    draw = np.random.default_rng(3)
    dram = draw.permutation(rig.dram_frames)[:frames].tolist()
    for first in range(0, frames, rig.hbm_frames):
        blocks = range(first, min(first + rig.hbm_frames, frames))
        pairs = [(n, dram[block]) for n, block in enumerate(blocks)]
        await rig.transfer(HBM, "read", DRAM, pairs, blocks)


async def bench(
    model: str, directory: str, rounds: int, hbm_frames: int, nvme_frames: int, device: Device = "cpu"
) -> dict[str, object]:
    """hbm_frames 0: the device's own number.  Error: BenchError, RigError."""
    with tempfile.TemporaryDirectory(prefix="attnix-tiers-", dir=directory or None) as folder:
        nvme = NvmeSpec(os.path.join(folder, "slots"), nvme_frames)
        hbm_frames = hbm_frames or (HBM_FRAMES if device == "cpu" else DEVICE_FRAMES[device])
        async with TierRig(
            model, hbm_frames=hbm_frames + 16, dram_frames=max(hbm_frames, nvme_frames) + 16, nvme=nvme, device=device
        ) as rig:
            if device == "cpu":
                fill(rig)
                found = await hbm_dram(rig, rounds, hbm_frames)
            else:
                found = await _on_device(rig, rounds, hbm_frames, device)
            found += await dram_nvme(rig, rounds, nvme_frames, folder)
            engines = {name: rig.probes[number].engine for name, number in (("hbm", HBM), ("nvme", NVME))}
    return {"engines": engines, "cases": [each._asdict() for each in found]}


async def _on_device(rig: TierRig, rounds: int, frames: int, device: Literal["cuda", "cuda-dry"]) -> list[Pairs]:
    from attnix.bench_tiers_device import WrongCopy, hbm_dram_on_device

    try:
        cases = await hbm_dram_on_device(rig, rounds, frames, device)
    except WrongCopy as wrong:
        raise BenchError(str(wrong)) from wrong
    size = rig.frame_bytes
    return [Pairs(case.title, case.peer, frames, size, frames * size, case.ours_ns, case.theirs_ns) for case in cases]


def fill(rig: TierRig) -> None:
    """Random bytes in every hbm frame: zeros could be compressed or deduplicated below us."""
    with map_shared(rig.supervisor.arena_fd(HBM)) as arena:
        noise = np.random.default_rng(1).bytes(1 << 20)
        for at in range(0, len(arena), len(noise)):
            arena[at : at + len(noise)] = noise[: len(arena) - at]


def main() -> None:
    parser = argparse.ArgumentParser(prog="attnix.bench_tiers")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dir", default="", help="file system to measure (default: the temporary directory's)")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--hbm-frames", type=int, default=0, help="of one transfer (default: the device's own number)")
    parser.add_argument("--nvme-frames", type=int, default=NVME_FRAMES)
    parser.add_argument("--device", default=os.environ.get(DEVICE_VARIABLE, "auto"), choices=DEVICES)
    o = parser.parse_args()
    try:
        device, _ = choose(o.device, 1)
        found = asyncio.run(bench(resolve_model(o.model), o.dir, o.rounds, o.hbm_frames, o.nvme_frames, device))
    except (BenchError, RigError, MemoryError, ValueError) as error:
        sys.exit(f"attnix bench tiers: {error}")
    json.dump(found, sys.stdout)
    print()


if __name__ == "__main__":
    main()
