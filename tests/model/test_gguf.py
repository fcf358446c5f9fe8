"""GGUF files written with the gguf package: every supported kind, every architecture, and files that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from attnix.drivers.accel.config import RopeScaling
from attnix.drivers.accel.gguf_config import llama3_factors, scaling_of_factors
from attnix.drivers.accel.metadata import load_config
from attnix.drivers.accel.model_files import ModelError
from attnix.drivers.accel.weights import converted, load_model, open_model
from attnix.gguf_header import GgufError, read_header
from attnix.syscalls.text import ChatMessage, load_text

Tiny = Callable[[str], tuple[Path, Any]]

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[module]}.{suffix}"


def interleave(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp's order of a head's rows: 0, D/2, 1, D/2 + 1, ... (it rotates neighbours)."""
    size = weight.shape[0] // heads
    order = [
        head * size + half * (size // 2) + pair for head in range(heads) for pair in range(size // 2) for half in (0, 1)
    ]
    return weight[order]


def write(
    path: Path,
    model: Any,
    kind: Kind = Kind.F32,
    *,
    leave_out: str = "",
    fields: dict[str, Any] | None = None,
    factors: npt.NDArray[np.float32] | None = None,
) -> dict[str, npt.NDArray[np.float32]]:
    """Write a transformers model; matrices in `kind`.  Returns what each tensor then is, after the loss of quantising."""
    config = model.config
    arch = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (fields or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    stored: dict[str, npt.NDArray[np.float32]] = {}
    for name, parameter in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or gguf_name(name) == leave_out:
            continue
        values = parameter.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if arch == "llama" and heads:
            values = interleave(values, heads)
        used = kind if values.ndim == 2 else Kind.F32
        raw = gguf.quants.quantize(values, used)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=used)
        after = gguf.quants.dequantize(raw, used)
        stored[name] = deinterleave(after, heads) if arch == "llama" and heads else after
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def deinterleave(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    size = weight.shape[0] // heads
    back = [head * size + 2 * pair + half for head in range(heads) for half in (0, 1) for pair in range(size // 2)]
    return weight[back]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda k: k.name)
def test_every_kind_reads_back_as_gguf_dequantises_it(tiny_model: Tiny, tmp_path: Path, kind: Kind) -> None:
    _, model = tiny_model("llama")
    stored = write(tmp_path / "m.gguf", model, kind)
    config, weights, metadata = load_model(tmp_path / "m.gguf")
    assert set(weights) == set(stored) and config.vocab == 300 and not config.tied
    for name, tensor in weights.items():
        np.testing.assert_array_equal(converted(tensor, "float32"), stored[name], err_msg=name)
    assert metadata.storage.split(", ")[0] == kind.name
    # and it is the model, up to what this kind loses per block of 32
    limit = {Kind.F32: 0, Kind.F16: 1e-3, Kind.BF16: 1e-2, Kind.Q8_0: 1e-2, Kind.Q4_0: 0.15, Kind.Q4_1: 0.1}[kind]
    for name, parameter in model.state_dict().items():
        error = np.abs(converted(weights[name], "float32") - parameter.numpy()).max() / parameter.abs().max()
        assert error <= limit, name


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_every_architecture_gives_the_logits_of_its_hf_directory(
    tiny_model: Tiny, tmp_path: Path, engine: Any, name: str
) -> None:
    path, model = tiny_model(name)
    write(tmp_path / "m.gguf", model)
    tokens = np.random.default_rng(2).integers(0, 300, 40).tolist()
    np.testing.assert_allclose(engine(tmp_path / "m.gguf").logits(0, tokens), engine(path).logits(0, tokens), atol=1e-4)
    assert load_config(tmp_path / "m.gguf").tied == ("tied" in name or name == "qwen2")


def test_rope_factors_of_llama3(tiny_model: Tiny, tmp_path: Path, engine: Any) -> None:
    """transformers computes the scaled frequencies; the file holds only the quotients, as llama.cpp's converter writes them."""
    path, model = tiny_model("llama3-rope")
    plain = 1 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert factors.max() == pytest.approx(8) and factors.min() == pytest.approx(1)
    write(tmp_path / "m.gguf", model, factors=factors, fields={"llama.rope.scaling.original_context_length": 64})
    assert load_config(tmp_path / "m.gguf").rope_scaling == load_config(path).rope_scaling
    tokens = np.random.default_rng(2).integers(0, 300, 150).tolist()
    np.testing.assert_allclose(engine(tmp_path / "m.gguf").logits(0, tokens), engine(path).logits(0, tokens), atol=1e-4)


@pytest.mark.parametrize(
    ("scaling", "theta"),
    [
        (RopeScaling("llama3", 8.0, 1.0, 4.0, 8192), 500000.0),  # Llama 3.1
        (RopeScaling("llama3", 32.0, 1.0, 4.0, 8192), 500000.0),  # Llama 3.2
        (RopeScaling("llama3", 8.0, 2.0, 6.0, 8192), 500000.0),
    ],
)
def test_scaling_is_found_from_its_factors(scaling: RopeScaling, theta: float) -> None:
    factors = llama3_factors(scaling, theta, 128).astype(np.float32)
    found = scaling_of_factors(factors, theta, 8192)
    assert found is not None
    np.testing.assert_allclose(llama3_factors(found, theta, 128), factors, rtol=1e-4)
    assert scaling_of_factors(factors[::-1].copy(), theta, 8192) is None


# -- K quants: the gguf package cannot write them, so the blocks are made of random bytes --------------------------


def q4_k_by_hand(block: bytes) -> list[float]:
    """One super-block of 256: d, dmin (float16), eight 6-bit scales and minima in 12 bytes, 4-bit values (ggml, block_q4_K)."""
    d, dmin = np.frombuffer(block[:4], "<f2").astype(np.float64)
    s, q = block[4:16], block[16:]
    out = []
    for group in range(8):
        if group < 4:
            scale, minimum = s[group] & 63, s[group + 4] & 63
        else:
            scale = (s[group + 4] & 15) | (s[group - 4] >> 6) << 4
            minimum = (s[group + 4] >> 4) | (s[group] >> 6) << 4
        for i in range(32):
            byte = q[group // 2 * 32 + i]
            out.append(d * scale * (byte >> 4 if group % 2 else byte & 15) - dmin * minimum)
    return out


def q6_k_by_hand(block: bytes) -> list[float]:
    """One super-block of 256: low 4 bits, high 2 bits, sixteen int8 scales, d (float16) (ggml, block_q6_K)."""
    low, high = block[:128], block[128:192]
    scales = np.frombuffer(block[192:208], np.int8).astype(int)
    d = float(np.frombuffer(block[208:210], "<f2")[0])
    out = []
    for half in range(2):
        for quarter in range(4):
            for i in range(32):
                byte = low[half * 64 + (quarter % 2) * 32 + i]
                nibble = byte >> 4 if quarter >= 2 else byte & 15
                top = high[half * 32 + i] >> (2 * quarter) & 3
                out.append(d * scales[half * 8 + quarter * 2 + i // 16] * ((nibble | top << 4) - 32))
    return out


@pytest.mark.parametrize(("kind", "by_hand"), [(Kind.Q4_K, q4_k_by_hand), (Kind.Q6_K, q6_k_by_hand)])
def test_k_quants(tmp_path: Path, kind: Kind, by_hand: Callable[[bytes], list[float]]) -> None:
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(1)
    blocks = generator.integers(0, 256, (512, block_bytes), np.uint8)
    scale = np.array([0.01], "<f2").view(np.uint8)
    for offset in (0, 2) if kind is Kind.Q4_K else (208,):
        blocks[:, offset : offset + 2] = scale
    path = tmp_path / "k.gguf"
    _write_bare(path, blocks, kind)
    _, weights, _ = load_model(path)
    read = weights["model.embed_tokens.weight"]
    assert read.shape == (512, 256)
    np.testing.assert_allclose(read, [by_hand(bytes(block)) for block in blocks], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(read, gguf.quants.dequantize(blocks, kind))


def _write_bare(path: Path, embedding: npt.NDArray[np.uint8], kind: Kind) -> None:
    """A model of one layer, hidden 256, whose embedding is the given blocks."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(256, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((256, 256), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- refused ------------------------------------------------------------------------------------------------------


def test_truncated_file_names_the_tensor(tiny_model: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, tiny_model("llama")[1])
    whole = path.read_bytes()
    path.write_bytes(whole[:-5000])
    with pytest.raises(ModelError, match=r"truncated: \S+ ends at byte"):
        open_model(path)


def test_any_cut_or_flip_of_the_header_is_one_clear_error(tiny_model: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, tiny_model("llama")[1])
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(400):
        damaged = bytearray(whole[: int(generator.integers(1, 3000))])
        if generator.random() < 0.5:
            damaged = bytearray(whole)
            damaged[int(generator.integers(0, 2500))] ^= int(generator.integers(1, 256))
        path.write_bytes(damaged)
        try:
            open_model(path)  # a flip in a name, say, of a field that is not used may go unseen
        except ModelError as error:
            assert str(path) in str(error)


def test_missing_tensor(tiny_model: Tiny, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", tiny_model("llama")[1], leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"lacks 1 of \d+ tensors, the first is model.layers.1.mlp.up_proj.weight"):
        open_model(tmp_path / "m.gguf")


def test_unsupported_kind_is_named_with_what_to_do(tiny_model: Tiny, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", tiny_model("llama")[1], Kind.Q5_0)
    with pytest.raises(ModelError, match=r"Q5_0, which is not supported.*Q4_K.*Q8_0 or Q4_K_M"):
        open_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported"),
        ({"split.count": 2}, "split over several files"),
        ({"llama.rope.dimension_count": 8}, "rotary sizes differ"),
    ],
)
def test_unsupported_metadata(tiny_model: Tiny, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write(tmp_path / "m.gguf", tiny_model("llama")[1], fields=fields)
    with pytest.raises(ModelError, match=message):
        load_config(tmp_path / "m.gguf")


def test_unsupported_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'gemma3' is not supported"):
        load_config(tmp_path / "m.gguf")


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="neither a GGUF file"):
        load_config(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="does not exist"):
        load_config(tmp_path / "absent.gguf")
    with pytest.raises(GgufError, match="not a GGUF file"):
        read_header(tmp_path / "m.gguf")


# -- the real file ------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_header_equals_the_gguf_packages(smollm2: Path) -> None:
    header, reader = read_header(smollm2), gguf.GGUFReader(smollm2)
    assert {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
    } == header.fields
    assert {tensor.name: (tensor.data_offset, tuple(tensor.shape[::-1].tolist())) for tensor in reader.tensors} == {
        name: (entry.offset, entry.shape) for name, entry in header.tensors.items()
    }


@pytest.mark.model
def test_smollm2_geometry(smollm2: Path) -> None:
    """As in config.json of HuggingFaceTB/SmolLM2-135M-Instruct."""
    config = load_config(smollm2)
    assert (config.layers, config.hidden, config.intermediate) == (30, 576, 1536)
    assert (config.heads, config.kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab, config.window, config.rope_theta, config.tied) == (49152, 8192, 100000.0, True)


@pytest.mark.model
def test_smollm2_knows_the_capital_of_france(smollm2: Path, backend: Any) -> None:
    """The equality tests put our own reading of the file into transformers; only a sensible answer shows that it is right."""
    text = load_text(smollm2)
    prompt = text.append_messages([ChatMessage("user", "What is the capital of France?")], [], 0)
    (answer,) = backend(smollm2, slots=1).greedy([prompt], 12)
    assert "The capital of France is Paris" in text.decode(answer)
