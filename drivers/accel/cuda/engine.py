"""The CUDA engine: an accel's frames and passes on one device.  docs/cuda.md draws what runs on which stream.

A pass: check it on the host -> lay its inputs down and send them -> wait for loads it must not overtake -> copies on write
-> layers (a graph, or eagerly, behind gates layer by layer) -> draw -> bring the results back, and only then wait for the
device: once a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from attnix.kernel.batch import SEQ_BYTES
from attnix.kernel.tag import GATES
from attnix.kernels_gpu.shapes import Rope

from ...stored import Gates
from ..config import Array, Dtype, KvDtype, ModelConfig
from ..engine import Arena, Pass, Results, Seqs, Want
from ..model import F32, GATE_LIMIT_NS, I32, I64, NO_GATES, Numerics, PageRows, PassRefused, Refusal
from .carrier import DeviceCarrier
from .checks import check_records, check_rest, read_table
from .device import Device
from .drawing import Drawing, Laid, Rows
from .forward import BeforeLayer, Network, Work
from .frames import DeviceFrames, resolved
from .gating import GateWait
from .graphs import Bucket, DecodeGraphs, bucket_of
from .inputs import Split, Staging, put_sequences, split
from .ops import Ops
from .pages import DevicePages
from .weights import DeviceWeights, Shard, load_weights

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HEAD_ROWS: Final = 256  # rows of logits at a time: a vocabulary of 128k makes 128 MB of them


class Attached(NamedTuple):
    """What passes run on."""

    frames: DeviceFrames
    pages: DevicePages
    rows: PageRows
    block_tokens: int


class CudaEngine:
    """A model on a device.  Error at construction: ValueError: a model that the kernels cannot run, or weights that do not
    fit their shapes; MemoryError: no room on the device."""

    arena: Arena = "lost"

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Array],
        device: Device,
        ops: Ops,
        *,
        kv_dtype: KvDtype = "bfloat16",
        dtype: Dtype = "bfloat16",
        numerics: Numerics = "fast",
        threads: int = 0,
        mirror: bool = False,
        shard: Shard = Shard(),  # noqa: B008 (immutable)
    ) -> None:
        if config.o_bias:
            raise ValueError("a bias on the attention output projection is not supported")
        self.config, self.threads = config, max(1, threads)
        self.kv_dtype: KvDtype = kv_dtype
        self.numerics: Numerics = numerics
        self._device, self._ops, self._has_mirror = device, ops, mirror
        with device.computing():
            self._weights: DeviceWeights = load_weights(config, weights, device.torch_device, DTYPES[dtype], shard)
            self._rope = Rope.of(self._weights.inv_freq, config.window + 1)
            self._network = Network(config, self._weights, ops, self._rope)
        device.mark().synchronize()
        self._staging = Staging(device)
        self._drawing = Drawing(device)
        self._graphs = DecodeGraphs(device)
        self._frames: DeviceFrames | None = None
        self._memory: Attached | None = None
        self._gates: Gates | None = None
        self._carrier: DeviceCarrier | None = None
        self.waited_ns = 0

    @property
    def engine(self) -> str:
        return self._device.name

    @property
    def compiles(self) -> bool:
        return not self._device.interpreted

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._graphs.counters)

    def frame_bytes(self, block_tokens: int) -> int:
        return self.config.frame_bytes(block_tokens, self.kv_dtype) * self._weights.kv_heads // self.config.kv_heads

    def attach(self, arena: Any, rows: PageRows, block_tokens: int, capacity: int) -> None:
        """The frames are allocated at the first call, and stay; arena is their mirror, if there is one, or comes from `scratch`."""
        slots, entries = rows.frame.shape
        with self._device.computing():
            frames = arena if isinstance(arena, DeviceFrames) else self._frames
            if frames is None:
                size = memoryview(arena).nbytes if self._has_mirror else 0  # pyright: ignore[reportArgumentType]
                if self._has_mirror and size < capacity * self.frame_bytes(block_tokens):
                    raise ValueError(f"{capacity} frames do not fit a mirror of {size} bytes")
                frames = self._frames = self._allocated(block_tokens, capacity, arena if self._has_mirror else None)
            pages = DevicePages(slots, entries, self._device.torch_device)
        self._device.mark().synchronize()  # other streams will touch the frames
        self._memory = Attached(frames, pages, rows, block_tokens)
        self._graphs.forget()

    def scratch(self, block_tokens: int, frames: int) -> DeviceFrames:
        """The frames that are there, which nobody else uses yet; others only where those are too few."""
        held = self._frames
        if held is not None and held.capacity >= frames:
            return held
        with self._device.computing():
            return self._allocated(block_tokens, frames, None)

    def _allocated(self, block_tokens: int, capacity: int, mirror: Any) -> DeviceFrames:
        return DeviceFrames(
            self.config, self.kv_dtype, block_tokens, capacity, self._device, self._ops, self._weights.kv_heads, mirror
        )

    def attach_gates(self, gates: Any) -> None:
        self._gates = Gates(gates)

    def carrier(self, dram: Any, device: int, gates: Any) -> DeviceCarrier:
        memory = self._attached
        self._carrier = DeviceCarrier(
            memory.frames, memory.block_tokens, dram, device, gates, self._device, self._ops, self.threads
        )
        return self._carrier

    def drop(self, frames: Sequence[int]) -> None:
        held = self._attached.frames
        if self._carrier is not None:
            self._carrier.settle(np.array(frames, np.int64))
        held.pull()
        with self._device.computing():
            held.drop(frames)
            self._device.mark().synchronize()
        held.show()

    def forward(
        self, seqs: Seqs, tokens: I32, copies: I32, want: I32, gates: I64 = NO_GATES, gate_limit_ns: int = GATE_LIMIT_NS
    ) -> F32:
        work = Pass(seqs, tokens, copies, Want(want, np.empty(0, np.int64), []), [None] * len(seqs), gates)
        with self._device.computing():
            rows, _ = self._run(work, gate_limit_ns)
            parts = [rows(at, min(at + _HEAD_ROWS, want.size)).cpu() for at in range(0, want.size, _HEAD_ROWS)]
            self._device.mark().synchronize()
        self._attached.frames.show()
        found: F32 = torch.cat(parts).numpy() if parts else np.empty((0, self.config.vocab), np.float32)
        return found

    def compute(self, work: Pass) -> Results:
        with self._device.computing():
            try:
                rows, laid = self._run(work, GATE_LIMIT_NS)
                results = self._drawing.finish(work, laid, rows, _HEAD_ROWS)
            finally:
                # A pass that failed between two layers left work behind: nothing may be begun before it is over.
                self._device.mark().synchronize()
        self._attached.frames.show()
        return results._replace(waited_ns=self.waited_ns)

    # -- a pass -------------------------------------------------------------------------------------------------------

    @property
    def _attached(self) -> Attached:
        if self._memory is None:
            raise PassRefused(Refusal.NOTREADY, 0)
        return self._memory

    def _run(self, work: Pass, limit_ns: int) -> tuple[Rows, Laid]:
        """Everything up to logits that the device may still be computing."""
        memory, seqs, self.waited_ns = self._attached, work.seqs, 0
        if seqs.dtype.itemsize != SEQ_BYTES:
            raise ValueError(f"a sequence record is {SEQ_BYTES} bytes, not {seqs.dtype.itemsize}")
        copies, gates = work.copies.reshape(-1, 2), work.gates.reshape(-1, 2)
        check_records(seqs, work.tokens, memory.rows, self.config.window, self.config.vocab)
        table = read_table(seqs, memory.rows, memory.block_tokens, memory.frames.capacity)
        gate_count = 0 if self._gates is None else GATES
        check_rest(copies, work.want.rows, gates, work.tokens.size, memory.frames.capacity, gate_count)
        wait = (
            None if self._gates is None else GateWait(self._gates, gates, self.config.layers, limit_ns, self._carrier)
        )
        is_open = wait is None or wait.is_open
        if self._carrier is not None:
            used = np.concatenate([table.frame.ravel(), copies.ravel()]).astype(np.int64)
            self._carrier.settle(used, [(int(gate), int(ticket)) for gate, ticket in gates])
        memory.frames.pull()

        pairs = resolved((int(a), int(b)) for a, b in copies)
        apart = not {a for a, _ in pairs} & {b for _, b in pairs}
        changes = memory.pages.changes(seqs["slot"], table)
        parts = split(seqs)
        decodes = is_open and not len(parts.prefill)
        is_shifted = bool(table.shift.any())
        bucket: Bucket | None = None
        if decodes:
            bucket = bucket_of(len(parts.decode), table.frame.shape[1], memory.pages.entries, is_shifted)
        rows = len(seqs) if bucket is None else bucket.sequences
        words = 6 * rows + 2 * rows + work.tokens.size + work.want.rows.size + changes.size + 2 * len(pairs) + 256
        staging = self._staging
        staging.reserve(words + self._drawing.words(work))
        on_device = self._lay(work, parts, bucket, is_shifted)
        wanted = on_device.want if bucket is None else staging.put(work.want.rows)
        there = staging.put(changes).view(4, -1)
        copied = staging.put(np.array(pairs, np.int32)).view(-1, 2)
        laid = self._drawing.lay(work, staging)
        staging.send()

        memory.pages.apply(changes, there)
        if is_open:
            before: BeforeLayer | None = None
            if pairs:
                memory.frames.copy(copied, apart)
        else:
            assert wait is not None
            gate = wait  # never None, for the closure

            def when_there(layer: int) -> None:
                try:
                    gate.layer(layer)
                finally:
                    self.waited_ns = gate.waited_ns
                if pairs:
                    memory.frames.copy(copied, apart, layer, 1)

            before = when_there
        network, views, pages = self._network, memory.frames.views, memory.pages.table
        if bucket is None:
            hidden = network.hidden(on_device, views, pages, before)
            return (lambda a, b: network.logits(hidden[a:b])), laid
        logits = self._graphs.run(
            bucket, staging.address, lambda: network.logits(network.hidden(on_device, views, pages))
        )
        return (lambda a, b: logits.index_select(0, wanted[a:b])), laid

    def _lay(self, work: Pass, parts: Split, bucket: Bucket | None, is_shifted: bool) -> Work:
        """The tensors of the layers.  In a bucket their places depend on its size alone, and all rows are wanted."""
        put, seqs = self._staging.put, work.seqs
        if bucket is not None:
            decode = put_sequences(self._staging, seqs, parts.decode, bucket.sequences, bucket.entries)
            tokens = np.zeros(bucket.sequences, np.int32)
            tokens[: work.tokens.size] = work.tokens
            return Work(put(tokens), put(np.arange(bucket.sequences, dtype=np.int32)), decode, None, is_shifted)
        decode_part = put_sequences(self._staging, seqs, parts.decode) if len(parts.decode) else None
        prefill_part = put_sequences(self._staging, seqs, parts.prefill) if len(parts.prefill) else None
        return Work(put(work.tokens), put(work.want.rows), decode_part, prefill_part, is_shifted)
