"""The CUDA engine with the kernels it ships with: on the device where there is one, else in Triton's interpreter.

Against the CPU engine on the same weights; and in invariant numerics to the bit against itself: a row's logits are the same in
a batch, in chunks, alone, on cached KV and as a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attnix.drivers.accel.config import KvDtype, ModelConfig
from attnix.drivers.accel.cuda.device import CudaDevice, Device, DryDevice
from attnix.drivers.accel.cuda.engine import CudaEngine
from attnix.drivers.accel.cuda.triton_ops import TritonOps
from attnix.drivers.accel.model import Model, Numerics, PageRows
from attnix.drivers.accel.weights import expected_shapes
from attnix.kernel.batch import SEQ_FIELDS

F32 = npt.NDArray[np.float32]
BLOCK, ENTRIES, SLOTS, CAPACITY = 16, 8, 6, 48
SHAPE = ModelConfig(
    "qwen3", 2, 64, 96, 2, 1, 64, 97, 128, 1e-5, 10000.0, qk_norm=True, qkv_bias=True
)  # layers, hidden, mlp, heads, KV heads, head dim, vocabulary, window


def weights() -> dict[str, F32]:
    generator = torch.Generator().manual_seed(3)
    made = {}
    for name, shape in expected_shapes(SHAPE).items():
        values = torch.randn(shape, generator=generator)
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.2
        made[name] = (1 + 0.2 * values if "norm" in name else values * scale * 1.5).numpy()
    return made


def on_device() -> Device:
    return CudaDevice(0) if torch.cuda.is_available() else DryDevice()


class Pages:
    """A model and rows, filled as the kernel would; the CPU engine's frames are its own."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows = PageRows(
            np.full((SLOTS, ENTRIES), -1, np.int32), np.zeros((SLOTS, ENTRIES), np.int32),
            np.zeros((SLOTS, ENTRIES), np.int16), np.ones(SLOTS, np.uint32),
        )  # fmt: skip
        self.free = list(np.random.default_rng(1).permutation(CAPACITY))
        self.lengths = [0] * SLOTS
        arena = np.zeros(CAPACITY * model.frame_bytes(BLOCK), np.uint8)
        model.attach(arena, self.rows, BLOCK, CAPACITY)

    def run(self, parts: Sequence[tuple[int, Sequence[int]]]) -> F32:
        """Append tokens to slots, all in one pass; logits of every token."""
        seqs = np.zeros(len(parts), np.dtype(SEQ_FIELDS))
        for seq, (slot, tokens) in zip(seqs, parts, strict=True):
            start, end = self.lengths[slot], self.lengths[slot] + len(tokens)
            self.lengths[slot] = end
            seq["slot"], seq["generation"], seq["start"], seq["write_from"] = slot, 1, start, start
            seq["ntokens"], seq["entries"] = len(tokens), -(-end // BLOCK)
            for entry in range(-(-end // BLOCK)):
                if self.rows.frame[slot, entry] < 0:
                    self.rows.frame[slot, entry] = self.free.pop()
                self.rows.count[slot, entry] = min(BLOCK, end - entry * BLOCK)
        seqs["token_offset"] = np.cumsum(seqs["ntokens"]) - seqs["ntokens"]
        flat = np.array([token for _, some in parts for token in some], np.int32)
        logits: F32 = self.model.forward(seqs, flat, np.empty((0, 2), np.int32), np.arange(flat.size, dtype=np.int32))
        return logits


def pages(numerics: Numerics = "invariant", kv_dtype: KvDtype = "float32") -> tuple[Pages, Pages]:
    """(the CPU engine, the CUDA engine)"""
    dtype: Any = "bfloat16" if kv_dtype == "bfloat16" else "float32"
    cpu = Model(SHAPE, weights(), kv_dtype=kv_dtype, dtype=dtype, numerics=numerics, threads=1)
    cuda = CudaEngine(
        SHAPE, weights(), on_device(), TritonOps(numerics), kv_dtype=kv_dtype, dtype=dtype, numerics=numerics
    )
    return Pages(cpu), Pages(cuda)


TEXT = [int(token) for token in np.random.default_rng(5).integers(0, 97, 60)]


def through(rig: Pages) -> F32:
    """A prompt, a chunk beside another's prompt, and single tokens of both: every token's logits."""
    parts = [rig.run([(0, TEXT[:20])]), rig.run([(0, TEXT[20:37]), (1, TEXT[:18])])]
    parts += [rig.run([(0, TEXT[at : at + 1]), (1, TEXT[at - 19 : at - 18])]) for at in (37, 38, 39)]
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("numerics", "kv_dtype", "relative"),
    [("invariant", "float32", 1e-4), ("fast", "float32", 1e-4), ("fast", "int8", 0.02), ("fast", "bfloat16", 0.05)],
)
def test_logits_are_those_of_the_cpu_engine(numerics: Numerics, kv_dtype: KvDtype, relative: float) -> None:
    cpu, cuda = pages(numerics, kv_dtype)
    expected, got = through(cpu), through(cuda)
    assert np.abs(expected).max() > 1
    assert np.abs(got - expected).max() <= relative * np.abs(expected).max()
    if kv_dtype == "float32":
        assert (got.argmax(1) == expected.argmax(1)).all()


def test_relocated_runs_and_shared_blocks() -> None:
    """A row that maps another's first block, and one whose middle block comes from elsewhere."""
    cpu, cuda = pages()
    found = []
    for rig in (cpu, cuda):
        rig.run([(0, TEXT[:33])])
        rig.rows.frame[1, 0], rig.rows.count[1, 0] = rig.rows.frame[0, 0], 16
        rig.rows.frame[1, 1], rig.rows.count[1, 1], rig.rows.shift[1, 1] = rig.rows.frame[0, 1], 9, 5
        rig.lengths[1] = 25
        rig.rows.frame[1, 2] = rig.free.pop()
        seqs = np.zeros(1, np.dtype(SEQ_FIELDS))
        seqs["slot"], seqs["generation"], seqs["start"], seqs["write_from"], seqs["ntokens"] = 1, 1, 25, 25, 4
        seqs["entries"], rig.rows.count[1, 2] = 3, 4
        rows = np.arange(4, dtype=np.int32)
        found.append(rig.model.forward(seqs, np.array(TEXT[40:44], np.int32), np.empty((0, 2), np.int32), rows))
    assert np.abs(found[1] - found[0]).max() <= 1e-4 * np.abs(found[0]).max()


def test_a_row_s_bits_are_its_own_in_invariant_numerics() -> None:
    """Whole, in chunks, beside others, and token by token (that is: prefill, prefill on cached KV, decode in a bucket)."""
    _, cuda = pages()
    whole = cuda.run([(0, TEXT[:40])])
    chunks = np.concatenate([cuda.run([(1, TEXT[:7])]), cuda.run([(2, TEXT[9:30]), (1, TEXT[7:36])])[21:]])
    assert np.array_equal(chunks, whole[:36])
    steps = [cuda.run([(1, TEXT[36:37])]), cuda.run([(2, TEXT[1:2]), (1, TEXT[37:38]), (3, TEXT[5:6])])[1:2]]
    steps += [cuda.run([(1, TEXT[38:39])]), cuda.run([(1, TEXT[39:40])])]
    assert np.array_equal(np.concatenate(steps), whole[36:])
    assert cuda.model.counters["captured_graphs"] == 1 and cuda.model.counters["replayed_passes"] == 2
