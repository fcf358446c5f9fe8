"""Write a GGUF file's weights in the forms that other engines read, so that all of them run the same numbers.

    python export.py MODEL.gguf FOLDER

FOLDER then holds `bf16.gguf` (llama.cpp) and `hf/` with config.json and model.safetensors (transformers, vLLM): every
matrix dequantised to float32 and rounded to bfloat16 once, norms in float32 (GGUF) or bfloat16 (Hugging Face, exact
here because the norms of the model came from bfloat16).  Only the *llama* architecture.

Written with the `gguf` package alone, apart from attnix's own loader: where the two agree, neither
is wrong by accident (tests/userland/test_bench_decode.py compares them).  The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.  Error: KeyError."""
    parts = name.split(".")
    if parts[0] != "blk":
        return f"{NAMES[parts[0]]}.{parts[1]}"
    return f"model.layers.{parts[1]}.{BLOCK[parts[2]]}.{parts[3]}"


def pairs_to_halves(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's order of q and k rows: it keeps the two elements that RoPE turns together side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def export(model: str, folder: str) -> None:
    """Error: ValueError for another architecture."""
    gguf, np = import_module("gguf"), import_module("numpy")
    reader = gguf.GGUFReader(model)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    if fields["general.architecture"].contents() != "llama":
        raise ValueError(f"{model}: only the llama architecture can be written for other engines")
    whole = Path(folder)
    whole.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{whole.name}-", dir=whole.parent))
    try:
        (scratch / "hf").mkdir()
        writer = gguf.GGUFWriter(scratch / "bf16.gguf", "llama")
        for name, field in fields.items():
            if name == "general.architecture":
                continue
            value, types = field.contents(), field.types
            if name == "general.file_type":
                value = int(gguf.LlamaFileType.MOSTLY_BF16)
            writer.add_key_value(name, value, types[0], types[-1] if len(types) > 1 else None)
        heads = {"attn_q": int(fields["llama.attention.head_count"].contents())}
        heads["attn_k"] = int(fields["llama.attention.head_count_kv"].contents())
        bf16 = gguf.GGMLQuantizationType.BF16
        tensors: dict[str, Any] = {}
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            rounded = gguf.quants.quantize(values, bf16)  # uint8, two to an element
            if values.ndim == 1:
                writer.add_tensor(tensor.name, values)
            else:
                writer.add_tensor(tensor.name, rounded, raw_dtype=bf16)
            words = rounded.view(np.uint16).reshape(values.shape)
            part = tensor.name.split(".")[-2]
            tensors[hf_name(tensor.name)] = pairs_to_halves(words, heads[part]) if part in heads else words
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        write_safetensors(scratch / "hf" / "model.safetensors", tensors)
        (scratch / "hf" / "config.json").write_text(json.dumps(hf_config(fields, tensors), indent=2))
        os.rename(scratch, whole)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    """uint16 arrays of bfloat16 bits, which numpy has no name for: a length, a JSON table, the bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, words in tensors.items():
        begin, end = end, end + words.nbytes
        table[name] = {"dtype": "BF16", "shape": list(words.shape), "data_offsets": [begin, end]}
    head = json.dumps(table).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for words in tensors.values():
            file.write(words.tobytes())


def hf_config(fields: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """The Llama configuration of a GGUF file's metadata."""
    at = {name.removeprefix("llama."): field.contents() for name, field in fields.items() if name.startswith("llama.")}
    heads = int(at["attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": int(at["embedding_length"]),
        "intermediate_size": int(at["feed_forward_length"]),
        "num_hidden_layers": int(at["block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(at["attention.head_count_kv"]),
        "head_dim": int(at["embedding_length"]) // heads,
        "max_position_embeddings": int(at["context_length"]),
        "rms_norm_eps": float(at["attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(at["rope.freq_base"]),
        "vocab_size": int(tensors["model.embed_tokens.weight"].shape[0]),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"].contents()),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"].contents()),
        "torch_dtype": "bfloat16",
    }


if __name__ == "__main__":
    export(*sys.argv[1:])
