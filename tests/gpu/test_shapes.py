"""Views of frames against the CPU engine, which writes them; the running sums of a batch; the package without triton."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attnix.drivers.accel.config import KvDtype, ModelConfig
from attnix.drivers.accel.model import Model, PageRows
from attnix.kernel.batch import SEQ_FIELDS
from attnix.kernels_gpu import reference
from attnix.kernels_gpu.shapes import Batch, Frames, PageTable

CONFIG = ModelConfig("llama", 2, 64, 80, 4, 2, 32, 97, 64, 1e-5, 10000.0)
TOKENS = np.arange(21, dtype=np.int32) * 4
FRAMES = (3, 1)


def weights() -> dict[str, npt.NDArray[np.float32]]:
    draw = torch.Generator().manual_seed(0)
    c = CONFIG
    shapes = {"model.embed_tokens.weight": (c.vocab, c.hidden), "lm_head.weight": (c.vocab, c.hidden)}
    for layer in range(c.layers):
        at = f"model.layers.{layer}."
        for name, rows in (("q_proj", c.heads), ("k_proj", c.kv_heads), ("v_proj", c.kv_heads)):
            shapes[f"{at}self_attn.{name}.weight"] = (rows * c.head_dim, c.hidden)
        shapes[at + "self_attn.o_proj.weight"] = (c.hidden, c.heads * c.head_dim)
        shapes[at + "mlp.gate_proj.weight"] = shapes[at + "mlp.up_proj.weight"] = (c.intermediate, c.hidden)
        shapes[at + "mlp.down_proj.weight"] = (c.hidden, c.intermediate)
    made = {name: (torch.randn(shape, generator=draw) / 8).numpy() for name, shape in shapes.items()}
    norms = ["model.norm.weight"]
    norms += [
        f"model.layers.{i}.{n}.weight" for i in range(c.layers) for n in ("input_layernorm", "post_attention_layernorm")
    ]
    return made | {name: np.ones(c.hidden, np.float32) for name in norms}


def written_by_the_cpu_engine(kv_dtype: KvDtype) -> Frames:
    """An arena in which the CPU engine has put the KV of 21 tokens: 16 in frame 3, 5 in frame 1."""
    model = Model(CONFIG, weights(), kv_dtype=kv_dtype, numerics="invariant", threads=1)
    arena = np.zeros((4, model.frame_bytes(16)), np.uint8)
    frame, count = np.full((1, 4), -1, np.int32), np.zeros((1, 4), np.int16)
    frame[0, :2], count[0, :2] = FRAMES, (16, 5)
    rows = PageRows(frame, np.zeros((1, 4), np.int32), count, np.ones(1, np.uint32))
    model.attach(arena.reshape(-1), rows, 16, 4)
    seq = np.zeros(1, np.dtype(SEQ_FIELDS))
    seq["generation"], seq["ntokens"], seq["entries"] = 1, TOKENS.size, 2
    model.forward(seq, TOKENS, np.zeros((0, 2), np.int32), np.array([20], np.int32))
    return Frames.over(torch.from_numpy(arena), kv_dtype, layers=2, kv_heads=2, block_tokens=16, head_dim=32)


def test_frames_are_those_of_the_cpu_engine() -> None:
    """Layer 0's KV depends on no attention: int8 frames hold what the rule makes of float32's, scales and all."""
    wide, narrow = written_by_the_cpu_engine("float32"), written_by_the_cpu_engine("int8")
    assert wide.scale is None and narrow.scale is not None
    for frame, n in zip(FRAMES, (16, 5), strict=True):
        elements, scale = reference.quantise_int8(wide.kv[frame, 0, :, :, :n])
        assert elements.abs().amax() == 127
        assert torch.equal(narrow.scale[frame, 0, :, :, :n], scale)
        assert torch.equal(narrow.kv[frame, 0, :, :, :n], elements)
        assert not narrow.kv[frame, :, :, :, n:].any() and not narrow.scale[frame, :, :, :, n:].any()
    bf16 = written_by_the_cpu_engine("bfloat16")
    assert torch.equal(bf16.kv[3, 0], wide.kv[3, 0].bfloat16())


def test_an_arena_of_another_geometry_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold frames of 4352 bytes"):
        Frames.over(torch.zeros(2, 4096, dtype=torch.uint8), "int8", layers=1, kv_heads=2, block_tokens=16, head_dim=64)


@pytest.mark.parametrize(
    ("value", "elements", "scale"),
    [([1.0, -2.0], [64, -127], 2 / 127), ([0.0, 0.0], [0, 0], 0.0), ([float("inf"), 1.0], [0, 0], float("nan"))],
)
def test_quantise_int8_by_hand(value: list[float], elements: list[int], scale: float) -> None:
    made, scales = reference.quantise_int8(torch.tensor(value))
    assert made.tolist() == elements
    assert float(scales) == pytest.approx(scale, rel=1e-6, nan_ok=True)


def test_first_is_the_running_sum_of_counts() -> None:
    count = torch.tensor([[16, 3, 0, 16, 9], [7, 16, 16, 0, 0]], dtype=torch.int16)
    pages = PageTable(torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32), count)
    slot, entries, start, ntokens = (
        torch.tensor(v, dtype=torch.int32) for v in ([1, 0, 0], [2, 4, 0], [20, 30, 0], [3, 5, 0])
    )
    batch = Batch.of(pages, slot, entries, start, ntokens, max_entries=4)
    assert batch.first.tolist() == [[0, 7, 23, 23, 23], [0, 16, 19, 19, 35], [0, 0, 0, 0, 0]]
    assert batch.row.tolist() == [0, 3, 8]
    assert batch.first.dtype == batch.row.dtype == torch.int32


def test_without_triton_the_package_imports_and_a_call_says_what_is_missing() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
import attnix.kernels_gpu
from attnix.kernels_gpu import copy_frames, matmul, paged_decode, paged_prefill, reference, rmsnorm, rope_write, silu_mul
try:
    matmul.matmul(torch.zeros(2, 4), torch.zeros(3, 4))
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "triton is not installed" in done.stdout
