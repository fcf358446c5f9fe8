"""Hugging Face transformers: forward passes over a dynamic KV cache, argmax between them, no `generate` overhead."""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        self._torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        self._torch.set_num_threads(settings["threads"])
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(settings["hf"], dtype=self._torch.bfloat16, attn_implementation="sdpa").eval()
        self._cache: Any = None
        self._next: Any = None
        self.version = f"transformers {transformers.__version__}, torch {self._torch.__version__}"

    def prefill(self, prompts: list[list[int]]) -> tuple[float, list[int]]:
        self.close()
        began = time.perf_counter()
        self._run(self._torch.tensor(prompts))
        seconds = time.perf_counter() - began
        self._length, self._firsts = len(prompts[0]), self._next
        return seconds, self._firsts[:, 0].tolist()

    def decode(self, steps: int) -> tuple[float, list[list[int]]]:
        if self._cache.get_seq_length() > self._length:
            self._cache.crop(self._length - self._cache.get_seq_length())  # back to the end of the prompt
        self._next = self._firsts
        tokens = []
        began = time.perf_counter()
        for _ in range(steps):
            self._run(self._next)
            tokens.append(self._next)
        seconds = time.perf_counter() - began
        return seconds, self._torch.cat(tokens, 1).tolist()

    def close(self) -> None:
        self._cache = None

    def _run(self, ids: Any) -> None:
        with self._torch.inference_mode():
            out = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        self._next = out.logits[:, -1].argmax(-1, keepdim=True)
