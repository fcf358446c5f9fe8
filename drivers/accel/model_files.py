"""Which files make a model: a Hugging Face directory or a GGUF file.

Exception
└── ValueError
    └── ModelError    the model cannot be served; the message names the file, what is wrong and what to do
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

Layout = Literal["hf", "gguf"]

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"


class ModelError(ValueError):
    """The model cannot be served."""


class ModelFiles(NamedTuple):
    """layout; the weight files in the order of their names; what to call the model."""

    layout: Layout
    path: Path
    weights: tuple[Path, ...]
    name: str


def find_files(path: str | os.PathLike[str]) -> ModelFiles:
    """Tell a Hugging Face directory (safetensors) from a GGUF file and list its weight files.  Error: ModelError."""
    path = Path(path)
    if path.is_dir():
        return ModelFiles("hf", path, _safetensors(path), path.resolve().name)
    if not path.exists():
        raise ModelError(f"{path} does not exist; `attnix pull` fetches a model")
    if path.suffix == ".safetensors":
        raise ModelError(
            f"{path} is one file of a Hugging Face model: name its directory, which also holds config.json"
        )
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is neither a GGUF file (it begins with {magic!r}) nor a Hugging Face directory")
    return ModelFiles("gguf", path, (path,), path.stem)


def _safetensors(path: Path) -> tuple[Path, ...]:
    if not (path / "config.json").exists():
        raise ModelError(f"{path} has no config.json: it is not a Hugging Face model directory")
    if (path / SINGLE_FILE).exists():
        return (path / SINGLE_FILE,)
    if (path / INDEX_FILE).exists():
        shards = sorted({path / name for name in read_json(path / INDEX_FILE)["weight_map"].values()})
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing:
            raise ModelError(f"{path} lacks {', '.join(missing)}, named by {INDEX_FILE}: the download is incomplete")
        return tuple(shards)
    if list(path.glob("pytorch_model*.bin")):
        raise ModelError(f"{path} holds pickled weights (.bin), which can run code: convert them to safetensors")
    raise ModelError(f"{path} has no {SINGLE_FILE}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.  Error: ModelError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value
