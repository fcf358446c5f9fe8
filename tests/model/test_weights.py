"""Hugging Face directories: one file or shards, every configuration spelling, what is refused; and the fingerprint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from attnix.drivers.accel.config import RopeScaling
from attnix.drivers.accel.cuda.weights import as_tensor
from attnix.drivers.accel.hf_config import config_from_hf
from attnix.drivers.accel.identity import fingerprint
from attnix.drivers.accel.metadata import load_config
from attnix.drivers.accel.model_files import ModelError, find_files
from attnix.drivers.accel.weights import expected_shapes, load_model, open_model

Tiny = Callable[[str], tuple[Path, Any]]
FAMILIES = ["llama", "llama-tied", "llama3-rope", "mistral", "qwen2", "qwen3"]

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 256,
}  # fmt: skip


def copy_of(path: Path, to: Path) -> Path:
    shutil.copytree(path, to)
    return to


def change_config(path: Path, **changes: Any) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | changes))


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_those_of_the_model(tiny_model: Tiny, name: str) -> None:
    path, model = tiny_model(name)
    config, weights, metadata = load_model(path)
    theirs = model.state_dict()
    tied = model.config.tie_word_embeddings
    assert set(weights) == set(theirs) - ({"lm_head.weight"} if tied else set()) == set(expected_shapes(config))
    for key, array in weights.items():
        assert torch.equal(as_tensor(array), theirs[key]), key
    assert metadata.weights == sum(parameter.numel() for parameter in model.parameters())
    assert metadata.storage == "F32" and config == load_config(path)


def test_conversion_on_reading(tiny_model: Tiny) -> None:
    path, model = tiny_model("llama")
    _, weights, _ = open_model(path, "bfloat16")
    for name, theirs in model.state_dict().items():
        assert torch.equal(as_tensor(weights[name]), theirs.to(torch.bfloat16))
    with pytest.raises(KeyError):
        weights["model.layers.9.mlp.up_proj.weight"]


def test_shards(tiny_model: Tiny, tmp_path: Path) -> None:
    path, model = tiny_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="60kB")
    assert len(find_files(tmp_path).weights) > 2
    _, whole, _ = load_model(path)
    _, sharded, _ = load_model(tmp_path)
    assert set(whole) == set(sharded) and all(np.array_equal(whole[name], sharded[name]) for name in whole)
    find_files(tmp_path).weights[1].unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-.*incomplete"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "storage"), [(torch.float16, "F16"), (torch.bfloat16, "BF16"), (torch.float64, "F64")]
)
def test_stored_in_other_widths(tiny_model: Tiny, tmp_path: Path, dtype: torch.dtype, storage: str) -> None:
    path, model = tiny_model("llama")
    copy = copy_of(path, tmp_path / "copy")
    stored = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(stored, copy / "model.safetensors")
    for read_as in (None, "float32", "bfloat16"):
        _, weights, metadata = load_model(copy, read_as)
        assert metadata.storage == storage
        for name, tensor in stored.items():
            assert torch.equal(
                as_tensor(weights[name]), tensor if read_as is None else tensor.to(getattr(torch, read_as))
            )


# -- config.json --------------------------------------------------------------------------------------------------


def parse(**changes: Any) -> Any:
    return config_from_hf(LLAMA | changes, Path("config.json"))


def test_both_spellings_of_rope() -> None:
    scaling = {
        "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    expected = RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    old = parse(rope_theta=500000.0, rope_scaling=scaling | {"rope_type": "llama3"})
    new = parse(rope_parameters=scaling | {"rope_type": "llama3", "rope_theta": 500000.0})
    assert old == new and old.rope_scaling == expected and old.rope_theta == 500000.0
    assert parse(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == RopeScaling("linear", 2.0)
    assert parse(rope_scaling=None).rope_scaling is None


def test_defaults() -> None:
    config = parse()
    assert (config.head_dim, config.norm_eps, config.rope_theta, config.tied) == (16, 1e-6, 10000.0, False)
    assert parse(num_key_value_heads=None).kv_heads == 4 and parse(head_dim=None).head_dim == 16


def test_sliding_windows() -> None:
    assert parse(sliding_window=8).sliding_window is None  # Llama has none
    assert parse(model_type="mistral", sliding_window=8).sliding_window == 8
    assert parse(model_type="mistral", sliding_window=None).sliding_window is None
    qwen = {"model_type": "qwen2", "sliding_window": 8}
    assert parse(**qwen, use_sliding_window=False).sliding_window is None
    assert parse(**qwen, use_sliding_window=True, max_window_layers=0).sliding_window == 8
    assert parse(**qwen, use_sliding_window=True, max_window_layers=28).sliding_window is None
    with pytest.raises(ModelError, match="only some layers"):
        parse(**qwen, use_sliding_window=True, max_window_layers=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "'gemma2' is not supported .*llama, mistral, qwen2, qwen3"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq are not supported: use float weights"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "multiple of kv_heads"),
        ({"hidden_size": "many"}, "invalid literal"),
    ],
)
def test_refused_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(**changes)


def test_a_missing_number_is_named() -> None:
    raw = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    with pytest.raises(ModelError, match="does not say intermediate_size"):
        config_from_hf(raw, Path("config.json"))


def test_an_output_bias_is_refused(tiny_model: Tiny, tmp_path: Path) -> None:
    copy = copy_of(tiny_model("llama")[0], tmp_path / "m")
    change_config(copy, attention_bias=True)
    with pytest.raises(ModelError, match="output projection"):
        load_config(copy)


# -- broken directories -------------------------------------------------------------------------------------------


def test_broken_directories(tiny_model: Tiny, tmp_path: Path) -> None:
    path = copy_of(tiny_model("llama")[0], tmp_path / "m")
    file = path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read.*truncated"):
        open_model(path)
    file.unlink()
    with pytest.raises(ModelError, match=r"has no model.safetensors"):
        open_model(path)
    (path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickled"):
        open_model(path)
    (path / "config.json").write_text("{")
    file.write_bytes(whole)
    with pytest.raises(ModelError, match="not valid JSON"):
        open_model(path)
    (path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config.json"):
        open_model(path)
    with pytest.raises(ModelError, match="name its directory"):
        open_model(file)
    with pytest.raises(ModelError, match="does not exist"):
        open_model(tmp_path / "nowhere")


def test_tensors_that_do_not_fit(tiny_model: Tiny, tmp_path: Path) -> None:
    path, model = tiny_model("llama")
    copy = copy_of(path, tmp_path / "m")
    state = model.state_dict()

    def save(changes: dict[str, Any]) -> None:
        safetensors.torch.save_file(
            {name: t for name, t in (state | changes).items() if t is not None}, copy / "model.safetensors"
        )

    save({"model.layers.0.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"lacks 1 of \d+ tensors, the first is model.layers.0.mlp.up_proj.weight"):
        open_model(copy)
    save({"model.norm.weight": torch.ones(65)})
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \(65,\), the geometry says \(64,\)"):
        open_model(copy)
    save({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
    with pytest.raises(ModelError, match=r"q_proj.bias, for which a llama model like this has no place"):
        open_model(copy)
    save({"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(ModelError, match="I8; only float weights"):
        open_model(copy)
    save({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})  # a buffer of old checkpoints
    open_model(copy)


# -- fingerprint --------------------------------------------------------------------------------------------------


def test_fingerprint_is_of_the_content(tiny_model: Tiny, tmp_path: Path) -> None:
    path = tiny_model("llama")[0]
    config = load_config(path)
    first = fingerprint(find_files(path).weights, config, None)
    copy = copy_of(path, tmp_path / "elsewhere")
    assert fingerprint(find_files(copy).weights, config, None) == first
    assert fingerprint(find_files(copy).weights, config, None, threads=7) == first
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert fingerprint([file], config, None) != first
    assert fingerprint(find_files(path).weights, load_config(tiny_model("llama-tied")[0]), None) != first


def test_order_and_size_of_files_count(tiny_model: Tiny, tmp_path: Path) -> None:
    config = load_config(tiny_model("llama")[0])
    a, b, joined = (tmp_path / name for name in ("a", "b", "joined"))
    for file, content in ((a, b"one"), (b, b"two"), (joined, b"onetwo")):
        file.write_bytes(content)
    digests = {fingerprint(files, config, None) for files in ([a, b], [b, a], [joined], [a])}
    assert len(digests) == 4


def test_kept_digest_serves_only_the_same_state_of_the_file(tiny_model: Tiny, tmp_path: Path) -> None:
    config = load_config(tiny_model("llama")[0])
    file, cache = tmp_path / "weights", tmp_path / "cache"
    file.write_bytes(np.random.default_rng(0).bytes(20 << 20))
    first = fingerprint([file], config, cache)
    (kept,) = cache.iterdir()
    assert os.stat(cache).st_mode & 0o077 == 0
    kept.write_text("0" * 64)  # show that it is used
    assert fingerprint([file], config, cache) != first
    kept.write_text("nonsense")
    assert fingerprint([file], config, cache) == first
    state = os.stat(file)
    with open(file, "r+b") as opened:
        opened.write(b"\0\1\2\3")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))  # the same size and modification time again
    assert fingerprint([file], config, cache) == fingerprint([file], config, None) != first
