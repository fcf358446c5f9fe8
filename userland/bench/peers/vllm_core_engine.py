"""vLLM's KV block manager and scheduler alone, without a model: what admission and a decode step cost there.

The same cases as attnix/bench_core.py: 4,096-token prompts in blocks of 16, prefix caching on, `allocate_slots` and
`Scheduler` called as the engine's core loop calls them.  A prompt's block keys are part of admitting it here too; they
are computed when the `Request` is made.  `fork` has no counterpart.  Every method returns the seconds of one operation.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

BLOCK = 16
PROMPT = 4096
BLOCKS = PROMPT // BLOCK
CONTEXT_TOKENS = 100
STEPS = 32
REPEATS = 9  # as in attnix/bench_core.py
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32000,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip


def prompt(number: int) -> list[int]:
    first = number * 7919 % 30000
    tokens = list(range(first, first + PROMPT))
    tokens[0] = number
    return tokens


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        vllm = import_module("vllm")
        self.version = f"vllm {vllm.__version__}"
        self._request = import_module("vllm.v1.request").Request
        self._params = vllm.SamplingParams(max_tokens=4000, ignore_eos=True)
        self._utils = import_module("vllm.v1.core.kv_cache_utils")
        hashing = import_module("vllm.utils.hashing")
        self._utils.init_none_hash(hashing.sha256)
        self._hasher = self._utils.get_request_block_hasher(BLOCK, hashing.sha256)
        self._pools: dict[int, _Pool] = {}
        self._running: dict[int, _Running] = {}
        self._made = 0

    def request(self, tokens: list[int]) -> Any:
        self._made += 1
        return self._request(str(self._made), tokens, self._params, None, block_hasher=self._hasher)

    def kv_config(self, blocks: int) -> Any:
        torch = import_module("torch")
        kv = import_module("vllm.v1.kv_cache_interface")
        spec = kv.FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
        return kv.KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[kv.KVCacheGroupSpec(["layer"], spec)]
        )

    def pool(self, kind: str, frames: int, case: str, turn: int) -> float:
        if frames not in self._pools:
            self._pools[frames] = _Pool(self, frames)
        measure: Callable[[int], float] = getattr(self._pools[frames], case)
        return median(measure(turn * REPEATS + i) for i in range(REPEATS))

    def whole_step(self, kind: str, n: int, turn: int) -> float:
        if n not in self._running:
            self._running[n] = _Running(self, n)
        return self._running[n].step()


class _Pool:
    """A block manager whose blocks all hold cached prompts (one block is its own)."""

    def __init__(self, engine: Engine, frames: int) -> None:
        manager = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
        self._engine = engine
        self._manager = manager(
            engine.kv_config(frames + 1), max_model_len=8192, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )
        self._oldest = self._next = 0
        for _ in range(frames // BLOCKS):
            self._finish(self._new(self._next))
        gc.collect()
        gc.freeze()  # as vLLM's own core process does when it is up

    def _new(self, number: int) -> Any:
        return self._admit(self._engine.request(prompt(number)))

    def _admit(self, request: Any) -> Any:
        cached, hit, *_ = self._manager.get_computed_blocks(request)
        blocks = self._manager.allocate_slots(request, PROMPT - hit, hit, cached)
        if blocks is None:
            raise RuntimeError("vLLM found no room")
        return request

    def _finish(self, request: Any) -> None:
        self._manager.free(request)
        self._next += 1

    def admit_hit(self, turn: int) -> float:
        tokens = prompt(self._oldest + 1 + turn * 31 % (self._next - self._oldest - 1))
        began = perf_counter()
        request = self._engine.request(tokens)
        cached, hit, *_ = self._manager.get_computed_blocks(request)
        self._manager.allocate_slots(request, PROMPT - hit, hit, cached)
        took = perf_counter() - began
        if hit < PROMPT - BLOCK:
            raise RuntimeError(f"a cached prompt hit only {hit} tokens")
        self._manager.free(request)
        return took

    def admit_miss(self, turn: int) -> float:
        tokens = prompt(self._next)
        began = perf_counter()
        request = self._admit(self._engine.request(tokens))
        took = perf_counter() - began
        self._finish(request)
        self._oldest += 1
        return took

    def allocate(self, turn: int) -> float:
        request = self._engine.request(prompt(self._next))
        began = perf_counter()
        self._admit(request)
        took = perf_counter() - began
        self._finish(request)
        self._oldest += 1
        return took

    def free(self, turn: int) -> float:
        request = self._new(self._next - 1)
        began = perf_counter()
        self._manager.free(request)
        return perf_counter() - began


class _Running:
    """n running requests of about a hundred tokens: schedule() and update_from_output()."""

    def __init__(self, engine: Engine, n: int) -> None:
        self._n = n
        self._outputs = import_module("vllm.v1.outputs")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(TINY))
            arguments = import_module("vllm.engine.arg_utils").EngineArgs(
                model=folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=8192, block_size=BLOCK,
                max_num_seqs=n, max_num_batched_tokens=n * CONTEXT_TOKENS + 8192, enable_prefix_caching=True,
                async_scheduling=False,
            )  # fmt: skip
            config = arguments.create_engine_config()
        blocks = n * 300 + 1
        config.cache_config.num_gpu_blocks = blocks
        structured = import_module("vllm.v1.structured_output").StructuredOutputManager(config)
        scheduler = import_module("vllm.v1.core.sched.scheduler").Scheduler
        self._scheduler = scheduler(config, engine.kv_config(blocks), structured, BLOCK)
        for i in range(n):
            self._scheduler.add_request(engine.request([i] * (CONTEXT_TOKENS - i % BLOCK)))
        for _ in range(4):
            self._once()
        gc.collect()
        gc.freeze()  # as vLLM's own core process does when it is up

    def _once(self) -> float:
        began = perf_counter()
        scheduled = self._scheduler.schedule()
        middle = perf_counter()
        names = list(scheduled.num_scheduled_tokens)
        output = self._outputs.ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names),
        )  # fmt: skip
        again = perf_counter()
        self._scheduler.update_from_output(scheduled, output)
        return middle - began + perf_counter() - again

    def step(self) -> float:
        took = [self._once() for _ in range(STEPS)]  # they are alike; the least is the one nobody disturbed
        if len(self._scheduler.running) != self._n:
            raise RuntimeError(f"vLLM runs {len(self._scheduler.running)} of {self._n} requests")
        return min(took)
