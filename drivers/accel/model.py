"""The paged forward pass of the Llama family on CPU: one C call per pass, over all layers.

A pass is described by kernel/batch.py's records.  Frames are `[F, L, 2, Hkv, P, D]` (frame-major, 0 = K, 1 = V, keys
rotated at their home position; int8 with float32 scales [2, Hkv, P] after each layer); page-table rows are read in place,
in shared memory.  The compute is in `cpu/csrc/` (start with forward.c).  All products run there at every number of rows:
with weights packed once the C kernels reach the multiply peak of the core from four rows up, above torch's, and need no
second copy of the weights.

Numerics: on this engine `fast` and `invariant` run the same code.  Every sum has one fixed order that depends on the
row alone (see engine.h), which costs nothing here, so a row's logits are the same to the bit whatever else is in the
batch, however its prefill is chunked and wherever its blocks lie.  They differ between instruction sets.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from attnix.kernel.batch import SEQ_BYTES
from attnix.kernel.geometry import RowLayout

from .config import Array, Dtype, KvDtype, ModelConfig
from .cpu._cpu import ffi, lib
from .cpu.ops import DTYPE_CODES, Isa, chosen_isa
from .weights import converted

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Numerics = Literal["fast", "invariant"]

_QKV: Final = 0
_O: Final = 1
_GATE_UP: Final = 2
_DOWN: Final = 3
_HEAD: Final = 4
_EMBED: Final = 5

_NORM_ATTN: Final = 0
_NORM_FFN: Final = 1
_NORM_Q: Final = 2
_NORM_K: Final = 3
_BIAS_QKV: Final = 4
_NORM_OUT: Final = 5

_LOAD: Final = 13
_LATE: Final = 14
NO_GATES: Final = np.empty((0, 2), np.int64)
GATE_LIMIT_NS: Final = 30_000_000_000

PHASES: Final = ("other", "norm", "qkv", "keys", "attend", "o", "ffn", "head", "wait")


class Refusal(enum.IntEnum):
    """Why a pass was refused; the numbers are engine.h's."""

    NOTREADY = 1  # weights missing or no arena attached
    SLOT = 2  # detail: sequence
    STALE = 3  # the row's generation differs: it was released; detail: sequence
    ENTRIES = 4  # detail: sequence
    COUNT = 5  # counts outside 0..P, or they do not cover start + ntokens; detail: sequence
    FRAME = 6  # detail: sequence
    TOKEN = 7  # token id, or token_offset not the running sum of ntokens; detail: token or sequence
    POSITION = 8  # start, ntokens or the window; detail: sequence
    WANT = 9  # detail: index in `want`
    COPY = 10  # detail: index in `copies`
    NOMEM = 11
    GATE = 12  # a gate or ticket that cannot be; detail: index in `gates`


class PassRefused(Exception):
    """The engine checked the whole pass first and did nothing."""

    def __init__(self, reason: Refusal, detail: int) -> None:
        super().__init__(f"pass refused: {reason.name.lower()} at {detail}")
        self.reason = reason
        self.detail = detail


class LoadFailed(Exception):
    """A load that the pass waited for failed or did not come in time.

    The pass ended between two layers: the KV that it was to write and the targets of its copies are undefined, as after
    the death of a driver.  Nothing else has changed, and the same pass may be run again.
    """

    def __init__(self, code: int, gate: int) -> None:
        super().__init__(f"the load at gate {gate} {'failed' if code == _LOAD else 'did not come in time'}")
        self.gate = gate


@dataclass(frozen=True, slots=True)
class PageRows:
    """Page-table rows of one accel as arrays over shared memory (DESIGN.md section 10, item 3).

    frame, shift  [slots, N]  i32
    count         [slots, N]  i16
    generation    [slots]     u32
    """

    frame: I32
    shift: I32
    count: npt.NDArray[np.int16]
    generation: npt.NDArray[np.uint32]

    @classmethod
    def over(cls, buffer: Any, layout: RowLayout) -> PageRows:
        """View a memfd's mapping (anything with the buffer interface) that has this layout."""
        n, shape = layout.slots * layout.entries, (layout.slots, layout.entries)
        return cls(
            np.frombuffer(buffer, np.int32, n, layout.frame_offset).reshape(shape),
            np.frombuffer(buffer, np.int32, n, layout.shift_offset).reshape(shape),
            np.frombuffer(buffer, np.int16, n, layout.count_offset).reshape(shape),
            np.frombuffer(buffer, np.uint32, layout.slots, layout.generation_offset),
        )


def rotary_frequencies(config: ModelConfig) -> F32:
    """[D / 2] f32: theta^(-2i/D) and its scaling, computed in float32 as the reference does."""
    d = config.head_dim
    powers = np.arange(0, d, 2, dtype=np.float32) / np.float32(d)
    # Powers rounded once, from double: torch's own in float32 are these but for a last bit now and then, numpy's are not.
    frequencies = np.float32(1) / (config.rope_theta ** powers.astype(np.float64)).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / np.float32(scaling.factor)
    elif scaling is not None:
        # turns a frequency makes within the original window: few = long wavelength = stretch by factor
        turns = scaling.original_window * frequencies / (2 * math.pi)
        spread = scaling.high_freq_factor - scaling.low_freq_factor
        keep = ((turns - scaling.low_freq_factor) / spread).clip(0.0, 1.0)
        frequencies = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    assert frequencies.dtype == np.float32
    return frequencies


class Model:
    """Weights packed for this machine, and the pass over frames and page-table rows that `attach` names.

    weights  Hugging Face names -> arrays (weights.py), q and k in the rotate-half layout; not kept after this
    kv_dtype of the frames; dtype: of the packed weights; threads: 0 = one per core this process may use
    numerics accepted so that callers say what they need; see the module's text
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Array],
        *,
        kv_dtype: KvDtype = "float32",
        dtype: Dtype = "float32",
        numerics: Numerics = "fast",
        threads: int = 0,
    ) -> None:
        if config.o_bias:
            raise ValueError("a bias on the attention output projection is not supported")
        if config.head_dim > 256:
            raise ValueError(f"head_dim {config.head_dim} exceeds 256")
        self.config = config
        self.kv_dtype: KvDtype = kv_dtype
        self.numerics: Numerics = numerics
        self.isa: Isa = chosen_isa()
        self.threads = threads if threads > 0 else len(os.sched_getaffinity(0))
        shape = ffi.new("ax_shape *")
        shape.layers, shape.hidden, shape.intermediate = config.layers, config.hidden, config.intermediate
        shape.heads, shape.kv_heads, shape.head_dim = config.heads, config.kv_heads, config.head_dim
        shape.vocab, shape.window, shape.sliding_window = config.vocab, config.window, config.sliding_window or 0
        shape.tied, shape.qkv_bias, shape.qk_norm = config.tied, config.qkv_bias, config.qk_norm
        shape.dtype, shape.kv_dtype, shape.norm_eps = DTYPE_CODES[dtype], DTYPE_CODES[kv_dtype], config.norm_eps
        frequencies = rotary_frequencies(config)
        pointer = lib.ax_new(shape, ffi.cast("float *", ffi.from_buffer(frequencies)), self.threads, self.isa)
        if pointer == ffi.NULL:
            raise MemoryError("no memory for the model")
        self._engine: Any = ffi.gc(pointer, lib.ax_free)
        self._load(weights)
        self._held: tuple[Any, ...] = ()  # buffers whose addresses the engine has
        self._gates: Any = None

    @property
    def engine(self) -> str:
        """What computes, for `probe`: for example "cpu/avx512bf16"."""
        return f"cpu/{self.isa.name.lower()}"

    def frame_bytes(self, block_tokens: int) -> int:
        return self.config.frame_bytes(block_tokens, self.kv_dtype)

    def attach(self, arena: Any, rows: PageRows, block_tokens: int, capacity: int) -> None:
        """Use these frames and rows from now on.  arena: a writable buffer of >= capacity frames, which stays mapped.

        Error: ValueError when the buffer or the rows do not fit.
        """
        frames = ffi.from_buffer("uint8_t[]", arena, require_writable=True)
        if len(frames) < capacity * self.frame_bytes(block_tokens):
            raise ValueError(f"{capacity} frames of {self.frame_bytes(block_tokens)} bytes do not fit {len(frames)}")
        slots, entries = rows.frame.shape
        for name, dtype in (("frame", "i4"), ("shift", "i4"), ("count", "i2")):
            array = getattr(rows, name)
            if array.shape != (slots, entries) or array.dtype != np.dtype(dtype) or not array.flags.c_contiguous:
                raise ValueError(f"page-table rows: bad array {name}")
        if rows.generation.shape != (slots,) or rows.generation.dtype != np.uint32:
            raise ValueError("page-table rows: bad array generation")
        views = [ffi.from_buffer(array) for array in (rows.frame, rows.shift, rows.count, rows.generation)]
        lib.ax_attach(
            self._engine,
            frames,
            capacity,
            block_tokens,
            ffi.cast("int32_t *", views[0]),
            ffi.cast("int32_t *", views[1]),
            ffi.cast("int16_t *", views[2]),
            ffi.cast("uint32_t *", views[3]),
            slots,
            entries,
        )
        self._held = (frames, rows, views)

    def attach_gates(self, gates: Any) -> None:
        """Shared memory through which loads report their progress: a buffer of whole int64, which stays mapped."""
        values = ffi.from_buffer("int64_t[]", gates)
        lib.ax_attach_gates(self._engine, values, len(values))
        self._gates = values

    def forward(
        self,
        seqs: npt.NDArray[Any],
        tokens: I32,
        copies: I32,
        want: I32,
        gates: I64 = NO_GATES,
        gate_limit_ns: int = GATE_LIMIT_NS,
    ) -> F32:
        """One pass.

        seqs    [S]     records of kernel/batch.py; token_offset must be the running sum of ntokens
        tokens  [T]     i32
        copies  [n, 2]  i32  (source, destination) frames, copied whole and in order before anything else
        want    [w]     i32  token rows whose logits are wanted
        gates   [g, 2]  i64  (gate, ticket): loads into frames that the pass uses, which it does not overtake: a layer
                             runs when they have brought it (kernel/tag.py)
        gate_limit_ns        how long the pass may wait for them, all together
        ->      [w, vocab] f32

        Error: PassRefused, and nothing was done; LoadFailed.
        """
        if seqs.dtype.itemsize != SEQ_BYTES:
            raise ValueError(f"a sequence record is {SEQ_BYTES} bytes, not {seqs.dtype.itemsize}")
        seqs = np.ascontiguousarray(seqs)
        tokens, copies, want = (np.ascontiguousarray(a, np.int32) for a in (tokens, copies, want))
        gates = np.ascontiguousarray(gates, np.int64)
        logits = np.empty((want.size, self.config.vocab), np.float32)
        code = lib.ax_forward(
            self._engine,
            ffi.from_buffer(seqs),
            seqs.size,
            ffi.from_buffer("int32_t[]", tokens),
            tokens.size,
            ffi.from_buffer("int32_t[]", copies),
            copies.size // 2,
            ffi.from_buffer("int32_t[]", want),
            want.size,
            ffi.from_buffer("int64_t[]", gates),
            gates.size // 2,
            gate_limit_ns,
            ffi.from_buffer("float[]", logits),
        )
        if code in (_LOAD, _LATE):
            raise LoadFailed(code, lib.ax_error_detail(self._engine))
        if code != 0:
            raise PassRefused(Refusal(code), lib.ax_error_detail(self._engine))
        return logits

    @property
    def waited_ns(self) -> int:
        """Of the last pass: nanoseconds that it spent waiting for loads."""
        return int(lib.ax_waited_ns(self._engine))

    @property
    def shared_tokens(self) -> int:
        """Of the last pass: KV positions, summed over its rows, that were read for several sequences at once."""
        return int(lib.ax_shared_tokens(self._engine))

    def phase_ns(self) -> dict[str, int]:
        """Nanoseconds spent per kind of phase since the last call, as the first thread saw them."""
        ns = ffi.new("int64_t[]", len(PHASES))
        lib.ax_phase_ns(self._engine, ns)
        return dict(zip(PHASES, ns, strict=True))

    def _load(self, weights: Mapping[str, Array]) -> None:
        c = self.config
        q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self._matrix(_HEAD, 0, weights["model.embed_tokens.weight" if c.tied else "lm_head.weight"], c.vocab, c.hidden)
        if not c.tied:
            self._matrix(_EMBED, 0, weights["model.embed_tokens.weight"], c.vocab, c.hidden)
        self._vector(_NORM_OUT, 0, weights["model.norm.weight"], c.hidden)
        for layer in range(c.layers):
            at = f"model.layers.{layer}."
            attn = at + "self_attn."
            first = 0
            for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
                self._matrix(_QKV, layer, weights[f"{attn}{name}.weight"], rows, c.hidden, first)
                first += rows
            self._matrix(_O, layer, weights[attn + "o_proj.weight"], c.hidden, q_rows)
            self._matrix(_GATE_UP, layer, weights[at + "mlp.gate_proj.weight"], c.intermediate, c.hidden)
            self._matrix(_GATE_UP, layer, weights[at + "mlp.up_proj.weight"], c.intermediate, c.hidden, 16)
            self._matrix(_DOWN, layer, weights[at + "mlp.down_proj.weight"], c.hidden, c.intermediate)
            self._vector(_NORM_ATTN, layer, weights[at + "input_layernorm.weight"], c.hidden)
            self._vector(_NORM_FFN, layer, weights[at + "post_attention_layernorm.weight"], c.hidden)
            if c.qk_norm:
                self._vector(_NORM_Q, layer, weights[attn + "q_norm.weight"], c.head_dim)
                self._vector(_NORM_K, layer, weights[attn + "k_norm.weight"], c.head_dim)
            if c.qkv_bias:
                three = [converted(weights[f"{attn}{name}.bias"], "float32") for name in ("q_proj", "k_proj", "v_proj")]
                self._vector(_BIAS_QKV, layer, np.concatenate(three), q_rows + 2 * kv_rows)

    def _matrix(self, which: int, layer: int, weight: Array, rows: int, columns: int, first: int = 0) -> None:
        if weight.shape != (rows, columns):
            raise ValueError(f"a weight is {weight.shape} where the config says {(rows, columns)}")
        held: Dtype = "bfloat16" if weight.dtype == np.uint16 else "float32"
        source = ffi.from_buffer(np.require(converted(weight, held), requirements=("C", "A")))
        if lib.ax_load_matrix(self._engine, which, layer, source, DTYPE_CODES[held], rows, first) != 0:
            raise MemoryError("no memory for a weight matrix")

    def _vector(self, which: int, layer: int, values: Array, n: int) -> None:
        if values.shape != (n,):
            raise ValueError(f"a weight is {values.shape} where the config says {(n,)}")
        # It has a name since a cast pointer keeps nothing alive.
        held = np.require(converted(values, "float32"), requirements=("C", "A"))
        if lib.ax_load_vector(self._engine, which, layer, ffi.cast("float *", ffi.from_buffer(held)), n) != 0:
            raise MemoryError("no memory for a weight vector")
