"""What a model is, from metadata alone: no tensors and no torch, so that boot can read it in the daemon's process."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from attnix.gguf_header import GgufError, read_header

from .config import ModelConfig
from .gguf_config import config_from_gguf
from .hf_config import config_from_hf
from .model_files import ModelError, ModelFiles, find_files, read_json

MAX_HEAD_DIM: Final = 256


class Metadata(NamedTuple):
    """files     where it lies
    storage   how the weights are stored, e.g. "bfloat16" or "Q4_1, Q8_0, F32"; the most bytes first
    weights   number of scalars
    """

    files: ModelFiles
    storage: str
    weights: int


def load_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Geometry of the model at `path`: a Hugging Face directory or a GGUF file (milliseconds).  Error: ModelError."""
    return config_of(find_files(path))


def config_of(files: ModelFiles) -> ModelConfig:
    """The same for files already found; geometries that the forward pass cannot compute are refused here."""
    if files.layout == "hf":
        config = config_from_hf(read_json(files.path / "config.json"), files.path / "config.json")
    else:
        try:
            config = config_from_gguf(read_header(files.path))
        except GgufError as error:
            raise ModelError(str(error)) from error
    if config.o_bias:
        raise ModelError(f"{files.path}: a bias on the attention's output projection is not supported")
    if config.head_dim > MAX_HEAD_DIM:
        raise ModelError(f"{files.path}: head_dim {config.head_dim} exceeds {MAX_HEAD_DIM}")
    return config
