"""The agents of `attnix bench agents` through vLLM's CPU build: one engine, stepped in this process, no server, no text.

Prefix caching is on, in blocks of 128 tokens as its CPU platform chooses or of 32 as that also recommends; the cache has as
many as fit the budget.
Its KV offloading refuses to run here ("CPU Offloading is currently only supported on CUDA-alike and XPU GPUs",
v1/kv_offload/cpu/spec.py), so what does not fit is computed again.
"""

from __future__ import annotations

import heapq
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
        torch: Any = import_module("torch")
        config = import_module("transformers").AutoConfig.from_pretrained(settings["hf"])
        token_bytes = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 2
        size = settings["block_tokens"]
        blocks = settings["kv_bytes"] // (size * token_bytes)
        self._llm = self._vllm.LLM(
            settings["hf"], dtype="bfloat16", skip_tokenizer_init=True, max_model_len=settings["window"], seed=0,
            block_size=size, num_gpu_blocks_override=blocks + 1, enable_prefix_caching=True,
            max_num_seqs=settings["agents"],
        )  # fmt: skip
        self._engine = self._llm.llm_engine
        self._made = self._scheduled = self._preempted = 0
        scheduler = self._engine.engine_core.engine_core.scheduler
        scheduler.schedule = self._count(scheduler.schedule)
        self.version = f"vllm-cpu {self._vllm.__version__}, torch {torch.__version__}, {blocks} blocks of {size}"

    def warm(self, ids: list[int]) -> None:
        self._add(ids, 4)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def run(self, system: list[int], agents: list[Any]) -> dict[str, Any]:
        """All agents at once; a turn is [ids, answer, tool, wait_s].  Seconds by this process's clock."""
        logs = [list(system) for _ in agents]
        at = [0] * len(agents)
        asked = [0.0] * len(agents)
        firsts: list[list[float]] = [[] for _ in agents]
        tokens: list[list[list[int]]] = [[] for _ in agents]
        jobs = [0.0] * len(agents)
        prompt_tokens = cached = 0
        running: dict[str, int] = {}
        seen: set[str] = set()
        before = self._scheduled
        began = time.perf_counter()
        due = [(began, agent) for agent in range(len(agents))]
        while due or running:
            now = time.perf_counter()
            while due and due[0][0] <= now:
                back, agent = heapq.heappop(due)
                ids, answer, _tool, _wait = agents[agent][at[agent]]
                logs[agent] += ids
                asked[agent] = back  # it is the engine that keeps the agent waiting while it steps
                running[self._add(logs[agent], answer)] = agent
            if not running:
                time.sleep(max(0.0, due[0][0] - time.perf_counter()))
                continue
            for out in self._engine.step():
                agent, now = running[out.request_id], time.perf_counter()
                got = out.outputs[0].token_ids
                if out.request_id not in seen and got:
                    seen.add(out.request_id)
                    firsts[agent].append(now - asked[agent])
                    cached += out.num_cached_tokens
                    prompt_tokens += len(logs[agent]) - out.num_cached_tokens
                if not out.finished:
                    continue
                del running[out.request_id]
                answer, wait = agents[agent][at[agent]][1], agents[agent][at[agent]][3]
                if len(got) != answer:
                    raise RuntimeError(f"agent {agent} got {len(got)} tokens, not {answer}")
                logs[agent] += got
                tokens[agent].append(list(got))
                at[agent] += 1
                if at[agent] < len(agents[agent]):
                    heapq.heappush(due, (now + wait, agent))
                else:
                    jobs[agent] = now - began
        notes = {"cached_tokens": cached, "asked_prompt_tokens": prompt_tokens, "preemptions": self._preempted}
        answers = sum(turn[1] - 1 for turns in agents for turn in turns)
        returns = [first for one in firsts for first in one[1:]]
        return {
            "jobs": jobs, "burst": [one[0] for one in firsts], "returns": returns,
            "prompt_tokens": self._scheduled - before - answers, "tokens": tokens, "notes": notes,
        }  # fmt: skip

    def _count(self, schedule: Any) -> Any:
        """What is preempted and computed again is in no request's own numbers, so the scheduler's are counted."""

        def counted(*operands: Any, **named: Any) -> Any:
            scheduled = schedule(*operands, **named)
            self._scheduled += scheduled.total_num_scheduled_tokens
            self._preempted += len(scheduled.preempted_req_ids or ())
            return scheduled

        return counted

    def _add(self, ids: list[int], answer: int) -> str:
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        self._made += 1
        self._engine.add_request(str(self._made), {"prompt_token_ids": list(ids)}, params)
        return str(self._made)
