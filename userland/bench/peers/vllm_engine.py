"""vLLM's CPU build, its engine driven step by step in this process: no server, no tokenizer, no text.

In one process it is at its best on few cores; the worker process that it starts otherwise takes time from the engine.
Prefix caching is on, as by default: prompts are new each time, so it only saves the second prefill before a decode.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(-(-settings["kv_bytes"] // 2**30)))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._vllm: Any = import_module("vllm")
        self._torch: Any = import_module("torch")
        self._llm = self._vllm.LLM(
            settings["hf"], dtype="bfloat16", skip_tokenizer_init=True, max_model_len=settings["window"], seed=0
        )
        self._engine = self._llm.llm_engine
        self._names: list[str] = []
        self._prompts: list[list[int]] = []
        self._made = 0
        self.version = f"vllm-cpu {self._vllm.__version__}, torch {self._torch.__version__}"

    def prefill(self, prompts: list[list[int]]) -> tuple[float, list[int]]:
        self.close()
        self._prompts = prompts
        began = time.perf_counter()
        self._add(1)
        firsts = dict[str, int]()
        while self._engine.has_unfinished_requests():
            for out in self._engine.step():
                firsts[out.request_id] = out.outputs[0].token_ids[0]
        seconds = time.perf_counter() - began
        ordered = [firsts[name] for name in self._names]
        self._names = []
        return seconds, ordered

    def decode(self, steps: int) -> tuple[float, list[list[int]]]:
        self.close()
        self._add(steps + len(self._prompts) + 8)  # room for those that start before the last one does
        while any(not self._outputs.get(name) for name in self._names):
            self._step()
        before = {name: len(self._outputs[name]) for name in self._names}
        began = time.perf_counter()
        for _ in range(steps):
            self._step()
        seconds = time.perf_counter() - began
        tokens = [self._outputs[name][before[name] :] for name in self._names]
        if any(len(one) != steps for one in tokens):
            raise RuntimeError(f"{steps} steps gave {sorted({len(one) for one in tokens})} tokens")
        return seconds, [self._outputs[name][1 : steps + 1] for name in self._names]

    def close(self) -> None:
        if self._names:
            self._engine.abort_request(self._names)
            self._engine.step()
            self._names = []

    def _add(self, max_tokens: int) -> None:
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._outputs: dict[str, list[int]] = {}
        for prompt in self._prompts:
            self._made += 1
            self._names.append(str(self._made))
            self._engine.add_request(self._names[-1], {"prompt_token_ids": prompt}, params)

    def _step(self) -> None:
        for out in self._engine.step():
            self._outputs[out.request_id] = list(out.outputs[0].token_ids)
