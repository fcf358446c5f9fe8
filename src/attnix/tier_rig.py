"""Real driver processes without a kernel: what the studies and benchmarks of the memory hierarchy measure.

The rig plays the kernel's part by hand, as drivers/conformance_rig.py does for correctness: it fills page-table rows, names
blocks, sends passes and transfers through the daemon's own `Supervisor`, and takes the time until the answer is here.

    async with TierRig(model, hbm_frames=512, dram_frames=512, nvme=NvmeSpec(path, 512)) as rig:
        moved = await rig.transfer(HBM, "read", DRAM, pairs)       # hbm -> dram
        ns = await rig.prefill(0, tokens, start=0)

One HBM device 0, a dram device 1 and, if asked for, an nvme device 2.
"""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from attnix.boot_device import STUB_BYTES, Device
from attnix.drivers.accel.metadata import load_config
from attnix.drivers.accel.model import PageRows
from attnix.drivers.dram import DramSpec
from attnix.drivers.protocol import Probe
from attnix.drivers.spec import DriverSpec, driver_argv
from attnix.drivers.supervisor import Supervisor
from attnix.kernel.batch import SAMPLE, SEQ, Seq
from attnix.kernel.events import DriverDown, DriverGone, Event, Exec, ExecDone, ExecFailed, Transfer, TransferDone
from attnix.kernel.geometry import RowLayout
from attnix.kernel.params import STEP_TOKENS
from attnix.kernel.tag import Tag
from attnix.syscalls.paths import home_dir

HBM: Final = 0
DRAM: Final = 1
NVME: Final = 2
I32 = npt.NDArray[np.int32]
IDENTITY: Final = bytes(range(16))
_ROOT: Final = bytes(range(16, 32))
NO_GATE: Final = -1


class RigError(Exception):
    """A driver died, refused or failed; the message says which and why."""


class NvmeSpec(NamedTuple):
    """Where the nvme driver keeps its slots, and how many."""

    path: str
    frames: int
    settings: Mapping[str, Any] = {}  # more of its configuration


class Moved(NamedTuple):
    """One completed transfer: payload bytes, the daemon's clock around it, and the driver's own."""

    moved_bytes: int
    wall_ns: int
    driver_ns: int


class TierRig:
    """See the module's text.

    model         path of the weights
    device        what the accel computes on
    frame_bytes   of bare KV; stored_bytes of the same in any other tier (after start)
    probes        of the accel and the nvme driver (after start)
    """

    def __init__(
        self, model: str, *, hbm_frames: int, dram_frames: int, nvme: NvmeSpec | None = None, block_tokens: int = 16,
        window_tokens: int = 4096, threads: int = 0, device: Device = "cpu",
    ) -> None:  # fmt: skip
        self.config = load_config(model)
        self.block_tokens = block_tokens
        self.frame_bytes = self.config.frame_bytes(block_tokens, "bfloat16")
        self.hbm_frames = hbm_frames
        self.dram_frames = dram_frames
        self.layout = RowLayout(8, -(-window_tokens // block_tokens))
        self.probes: dict[int, Probe] = {}
        self.said: list[tuple[str, str]] = []
        self._nvme = nvme
        self._waiting: dict[tuple[type, int, int], asyncio.Future[Any]] = {}
        self._seq = 0
        hbm_bytes = hbm_frames * self.frame_bytes
        accel = DriverSpec(
            device=HBM,
            name="hbm0",
            argv=driver_argv("attnix.drivers.accel"),
            config={
                "model": model,
                "slots": self.layout.slots,
                "entries": self.layout.entries,
                "block_tokens": block_tokens,
                "threads": threads or len(os.sched_getaffinity(0)),
                "cache_dir": str(home_dir() / "digests"),
            }
            | ({} if device == "cpu" else {"device": device, "frames": hbm_frames}),
            # as attnix.boot does: in a device's own memory frames leave the arena a stub
            arena_bytes=hbm_bytes if device == "cpu" else STUB_BYTES,
            rows_bytes=self.layout.total_bytes,
            arena="kept" if device == "cpu" else "lost",
            device_bytes=0 if device == "cpu" else hbm_bytes,
        )
        dram = DramSpec(DRAM, "dram0", dram_frames, self.frame_bytes)
        self.supervisor = Supervisor(
            [accel], self._on_event, lambda level, text: self.said.append((level, text)), dram=dram
        )
        self.rows = PageRows.over(self.supervisor.rows(HBM), self.layout)

    async def __aenter__(self) -> Self:
        (self.probes[HBM],) = await self.supervisor.start()
        try:
            self.supervisor.set_identity(IDENTITY)
            if self._nvme is not None:
                self.probes[NVME] = await self.supervisor.start_tier(self._nvme_spec(self._nvme))
        except BaseException:
            await self.supervisor.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self.rows  # views of what is unmapped now
        await self.supervisor.close()

    def _nvme_spec(self, nvme: NvmeSpec) -> DriverSpec:
        config = {
            "path": nvme.path,
            "capacity_frames": nvme.frames,
            "frame_bytes": self.frame_bytes,
            "layers": self.config.layers,
            "block_tokens": self.block_tokens,
            "identity": IDENTITY.hex(),
        }
        return DriverSpec(
            device=NVME, name="nvme0", argv=driver_argv("attnix.drivers.nvme"), config=config | dict(nvme.settings),
            arena_bytes=0, rows_bytes=0, tier="nvme", arena="lost",
        )  # fmt: skip

    # -- answers --------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if isinstance(event, ExecDone | ExecFailed):
            self._settle((Exec, event.device, event.seq), event)
        elif isinstance(event, TransferDone):
            self._settle((Transfer, event.device, event.seq), event)
        elif isinstance(event, DriverDown | DriverGone):
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(RigError(f"the driver of device {event.device} is down: {event.reason}"))

    def _settle(self, key: tuple[type, int, int], event: Event) -> None:
        future = self._waiting.pop(key, None)
        if future is not None and not future.done():
            future.set_result(event)

    def _expect(self, kind: type, device: int) -> tuple[int, asyncio.Future[Any]]:
        self._seq += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[kind, device, self._seq] = future
        return self._seq, future

    # -- transfers ------------------------------------------------------------------------------------------------

    def tags(self, blocks: Sequence[int]) -> bytes:
        """Packed tags of full blocks whose names follow from their numbers."""
        size = self.block_tokens
        made = []
        for block in blocks:
            key, parent = block.to_bytes(16, "little"), max(0, block - 1).to_bytes(16, "little")
            tokens = array("i", range(size)).tobytes()
            made.append(Tag(key, parent, _ROOT, block * size, size, 0, b"rig", tokens).pack(size))
        return b"".join(made)

    async def transfer(
        self, device: int, verb: str, arena: int, pairs: Sequence[tuple[int, int]], blocks: Sequence[int], tags: bytes = b"",
        gate: int = NO_GATE, ticket: int = 0,
    ) -> Moved:  # fmt: skip
        """Move pairs (frame of `device`, frame of `arena`) and wait.  Error: RigError when any item failed."""
        tags = tags or self.tags(blocks)
        packed = array("i", [frame for pair in pairs for frame in pair]).tobytes()
        seq, future = self._expect(Transfer, device)
        began = time.perf_counter_ns()
        self.supervisor.transfer(Transfer(device, seq, verb, arena, packed, tags, gate, ticket))
        done: TransferDone = await future
        wall = time.perf_counter_ns() - began
        if done.failed:
            raise RigError(
                f"{verb} of device {device}: {len(done.failed)} of {len(pairs)} failed, first {done.failed[0]}"
            )
        return Moved(done.moved_bytes, wall, done.elapsed_ns)

    # -- passes ---------------------------------------------------------------------------------------------------

    def map(self, slot: int, frames: I32) -> None:
        """Give a context these frames, all full."""
        self.rows.frame[slot] = -1
        self.rows.frame[slot, : len(frames)] = frames
        self.rows.count[slot, : len(frames)] = self.block_tokens

    async def prefill(
        self, slot: int, tokens: I32, start: int = 0, gates: Sequence[tuple[int, int]] = (), write_from: int = -1
    ) -> list[tuple[int, int, int]]:
        """Compute positions [start, len(tokens)) in passes of the kernel's default size; the last one samples a token.

        gates  (gate, ticket) of loads that the first pass must not overtake
        ->     (tokens, tokens before them, nanoseconds until the answer) of each pass
        """
        passes = []
        end = len(tokens)
        for at in range(start, end, STEP_TOKENS):
            count = min(STEP_TOKENS, end - at)
            flags = SAMPLE if at + count == end else 0
            entries = -(-(at + count) // self.block_tokens)
            generation = int(self.rows.generation[slot])
            record = Seq(
                slot, generation, at, count, max(at, write_from), entries, 0, flags, 0.0, 1.0, 0.0, 0, 0, 1.0, 0.0, 0.0, 0,
                0, 0, slot + 1, end - at - count, 0,
            )  # fmt: skip
            held = array("q", [number for pair in gates for number in pair]).tobytes() if at == start else b""
            chunk = tokens[at : at + count].astype(np.int32).tobytes()
            seq, future = self._expect(Exec, HBM)
            began = time.perf_counter_ns()
            self.supervisor.exec(Exec(HBM, seq, SEQ.pack(*record), chunk, b"", (), held))
            done: ExecDone | ExecFailed = await future
            if isinstance(done, ExecFailed):
                raise RigError(f"a pass of {count} tokens failed: {done.reason}")
            passes.append((count, at, time.perf_counter_ns() - began))
        return passes
