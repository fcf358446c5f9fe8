"""The accel driver, as the daemon starts it, with a tiny random Llama: it conforms in both numerics, with the CPU engine and
with the CUDA engine in a dry run (docs/cuda.md), whose frames the suite sees in a mirror.

ATTNIX_TEST_DEVICE=cuda: with the CUDA engine on the device instead, and a model whose heads its kernels have;
ATTNIX_CUDA_DRY=interpreter: the dry runs alone, with those kernels and that model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from attnix.drivers.conformance import CHECKS, MIN_ENTRIES, MIN_FRAMES, MIN_SLOTS, Rig, check_driver
from attnix.drivers.faulty import Fault, FaultPlan
from attnix.drivers.spec import DriverSpec, driver_argv
from attnix.kernel.geometry import KvShape, RowLayout

LAYOUT = RowLayout(MIN_SLOTS, MIN_ENTRIES)
ON_DEVICE = os.environ.get("ATTNIX_TEST_DEVICE", "cpu") == "cuda"
INTERPRETED = os.environ.get("ATTNIX_CUDA_DRY") == "interpreter"
BLOCK_TOKENS, HEAD_DIM = (16, 64) if ON_DEVICE or INTERPRETED else (8, 16)
LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, VOCAB = 2, 32, 48, 4, 2, 256
CASES = [
    ("invariant", "float32", "cpu"), ("fast", "float32", "cpu"), ("fast", "bfloat16", "cpu"),
    ("invariant", "float32", "cuda-dry"), ("fast", "bfloat16", "cuda-dry"),
]  # fmt: skip
if INTERPRETED:
    CASES = [case for case in CASES if case[2] == "cuda-dry"]
if ON_DEVICE:
    CASES = [("invariant", "float32", "cuda"), ("invariant", "bfloat16", "cuda"), ("fast", "bfloat16", "cuda")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with weights large enough that attention looks somewhere and logits differ."""
    path = tmp_path_factory.mktemp("tiny")
    random = np.random.default_rng(11)

    def weight(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return random.normal(0.0, 0.4, shape).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN),
        "model.norm.weight": 1 + weight(HIDDEN),
        "lm_head.weight": weight(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": 1 + weight(HIDDEN),
            prefix + "post_attention_layernorm.weight": 1 + weight(HIDDEN),
            prefix + "self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
            prefix + "mlp.gate_proj.weight": weight(MLP, HIDDEN),
            prefix + "mlp.up_proj.weight": weight(MLP, HIDDEN),
            prefix + "mlp.down_proj.weight": weight(HIDDEN, MLP),
        }
    save_file(tensors, path / "model.safetensors")
    config = {
        "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": MLP,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "eos_token_id": 0, "bos_token_id": 1,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def start_accel(model: Path, numerics: str, dtype: str, device: str = "cpu", plan: FaultPlan | None = None) -> Rig:
    element_bytes = {"float32": 4, "bfloat16": 2}[dtype]
    frame_bytes = KvShape(LAYERS, KV_HEADS, HEAD_DIM, element_bytes).frame_bytes(BLOCK_TOKENS)
    spec = DriverSpec(
        device=0,
        name="accel",
        argv=driver_argv("attnix.drivers.accel"),
        config={
            "model": str(model),
            "slots": LAYOUT.slots,
            "entries": LAYOUT.entries,
            "block_tokens": BLOCK_TOKENS,
            "dtype": dtype,
            "kv_dtype": dtype,
            "numerics": numerics,
            "device": device,
            "mirror": device != "cpu",
        },
        arena_bytes=MIN_FRAMES * frame_bytes,
        rows_bytes=LAYOUT.total_bytes,
        environment={} if plan is None else plan.environment(),
    )
    return Rig(spec, LAYOUT, BLOCK_TOKENS, deadline_s=60.0)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def rig(request: pytest.FixtureRequest, model: Path) -> Iterator[Rig]:
    rig = start_accel(model, *request.param)
    yield rig
    rig.close()


@pytest.mark.parametrize("name", CHECKS)
def test_accel_conforms(name: str, rig: Rig) -> None:
    CHECKS[name](rig)


def test_faults_reach_the_driver_that_ships(model: Path) -> None:
    """ATTNIX_DRIVER_FAULTS works on accel too, and the suite sees what it does."""
    plans = [FaultPlan({(1, 0): Fault.FLIP, (1, 1): Fault.TWICE}, seed=1), None]
    report = check_driver(lambda: start_accel(model, "invariant", "float32", "cpu", plans.pop(0)))
    assert [finding.check for finding in report.findings] == ["each_pass_is_answered_once_and_in_order"]
