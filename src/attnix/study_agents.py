"""The measuring half of `attnix study agents`: ten thousand agents with long contexts, most of them waiting for a tool.

    python -m attnix.study_agents [--agents 10000] [--tokens 50000] ...         one JSON document on stdout

The kernel, the tiers and the device are those of `attnix replay` (docs/replay.md): the daemon's kernel under a simulated
clock.  Each agent begins with a prompt of `tokens`, of which `head` are everybody's (a system prompt), and calls `calls`
tools; a tool's time is drawn from an exponential distribution, and so long on average that most agents wait at any time.
What is measured for real is the kernel: the time of each step on this machine, and the memory of the process, which holds
every token log.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import sys
from array import array
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

import numpy as np

from attnix.kernel.events import Effect, Event
from attnix.kernel.evict.protocol import KIND_TOOL, KIND_TURN
from attnix.kernel.tag import stored_bytes
from attnix.replay.engine import Frames, Replay, Waits
from attnix.replay.profile import PROFILES, Profile
from attnix.replay.workload import Session, Turn, Workload

SEED: Final = 10


class Plan(NamedTuple):
    """tokens: of a first prompt, `head_tokens` of them shared by all.  Times in seconds: agents begin within `start_s`, a
    tool takes `tool_s` on average.  eta: as replay/engine.py Waits."""

    agents: int
    tokens: int
    head_tokens: int
    calls: int
    result_tokens: int
    answer_tokens: int
    start_s: float
    tool_s: float
    eta: str
    block_tokens: int


def agents(plan: Plan, seed: int = SEED) -> Workload:
    draw = random.Random(seed)
    size = plan.block_tokens
    head = np.arange(plan.head_tokens // size, dtype=np.int64)
    none = head[:0]
    unnamed = len(head) * size
    sessions = []
    for agent in range(plan.agents):
        session = Session(round(draw.uniform(0, plan.start_s) * 1e9))
        for call in range(plan.calls + 1):
            tokens = plan.result_tokens if call else plan.tokens
            pause_ns = round(draw.expovariate(1 / plan.tool_s) * 1e9) if call else 0
            kind = KIND_TOOL if call < plan.calls else KIND_TURN
            blocks = none if call else head
            number = agent * (plan.calls + 1) + call
            session.turns.append(Turn(number, blocks, unnamed, tokens, plan.answer_tokens, pause_ns, kind, "job"))
            unnamed += tokens - len(blocks) * size
        sessions.append(session)
    return Workload("agents", size, sessions, len(head), len(head), True, follows=True)


def frames_of(profile: Profile, block_tokens: int, dram_bytes: int = -1, nvme_bytes: int = -1) -> Frames:
    """Of the profile's tiers; -1: as large as the profile has it."""
    frame = profile.kv.frame_bytes(block_tokens)
    dram = profile.dram_bytes if dram_bytes < 0 else dram_bytes
    nvme = profile.nvme_bytes if nvme_bytes < 0 else nvme_bytes
    return Frames(profile.hbm_bytes // frame, dram // stored_bytes(frame), nvme // stored_bytes(frame))


class Watch:
    """Stands in front of a kernel: how long its steps take here, and how many agents wait, weighted by simulated time."""

    def __init__(self, run: Replay) -> None:
        self._kernel = run.kernel
        self._step = run.kernel.step
        self.ns = array("q")
        self.most_waiting = 0
        self._waited = 0
        self._last_ns = 0
        run.kernel.step = self.step  # type: ignore[method-assign]

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        waiting = self._kernel.machine.lifetimes.waiting
        self.most_waiting = max(self.most_waiting, waiting)
        self._waited += waiting * (now_ns - self._last_ns)
        self._last_ns = now_ns
        began = perf_counter_ns()
        effects = self._step(event, now_ns)
        self.ns.append(perf_counter_ns() - began)
        return effects

    @property
    def mean_waiting(self) -> float:
        return self._waited / max(1, self._last_ns)


def study(plan: Plan, profile: Profile, frames: Frames, policy: str) -> dict[str, Any]:
    workload = agents(plan)
    run = Replay(workload, profile, frames, "lru", waits=Waits(policy, plan.eta), slots=plan.agents + 1)
    watch = Watch(run)
    gc.collect()
    gc.freeze()
    began = perf_counter_ns()
    result = run.run()
    took_s = (perf_counter_ns() - began) / 1e9
    steps = sorted(watch.ns)
    new = plan.tokens + plan.calls * plan.result_tokens
    counters = result.counters
    size = workload.block_tokens
    return {
        "plan": plan._asdict(),
        "profile": profile.name,
        "frames": frames.by_tier(),
        "block_tokens": size,
        "finished": len(run.jobs_s),
        "requests": result.requests,
        "refused": result.refused,
        "waiting": {"most": watch.most_waiting, "mean": round(watch.mean_waiting, 1)},
        "tokens": {
            "prompt": result.prompt_tokens,
            "new": plan.agents * new,
            "computed": counters.get("computed_tokens", 0),
            "recomputed": result.recomputed_tokens,
            "loaded": {
                tier: counters.get(f"loaded_blocks_{tier}", 0) * size for tier in frames.by_tier() if tier != "hbm"
            },
            "stateless": stateless_tokens(plan),
        },
        "job_s": result.as_json()["job_s"],
        "tool_ttft_s": result.as_json()["tool_ttft_s"],
        "busy": result.busy,
        "makespan_s": result.makespan_s,
        "kernel": {
            "steps": len(steps),
            "mean_us": round(sum(steps) / len(steps) / 1e3, 1),
            "p50_us": steps[len(steps) // 2] / 1e3,
            "p99_us": steps[len(steps) * 99 // 100] / 1e3,
            "max_us": steps[-1] / 1e3,
            "share_of_simulated_time": round(sum(steps) / 1e9 / result.makespan_s, 6),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "log_bytes": 4 * plan.agents * new,
        },
        "took_s": round(took_s, 1),
        "counters": counters,
    }


def stateless_tokens(plan: Plan) -> int:
    """Prompt tokens that a server computes which keeps nothing between requests: the whole log at each, where an answer
    leaves all but its stop token."""
    each = plan.result_tokens + plan.answer_tokens - 1
    return plan.agents * sum(plan.tokens + call * each for call in range(plan.calls + 1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="attnix.study_agents")
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=50_000, help="of a first prompt")
    parser.add_argument("--head", type=int, default=2048, help="of them, shared by all")
    parser.add_argument("--calls", type=int, default=2, help="tool calls of an agent")
    parser.add_argument("--result-tokens", type=int, default=200)
    parser.add_argument("--answer-tokens", type=int, default=100)
    parser.add_argument("--block-tokens", type=int, default=2048)
    parser.add_argument("--start-s", type=float, default=100_000.0, help="agents begin within so long")
    parser.add_argument("--tool-s", type=float, default=100_000.0, help="mean of a tool's time")
    parser.add_argument("--eta", default="", choices=("", "exact", "noisy"), help="what a wait says of it")
    parser.add_argument("--policy", default="", help="wait.policy")
    parser.add_argument("--profile", default="h100-8b", choices=sorted(PROFILES))
    parser.add_argument("--dram-bytes", type=int, default=-1, help="default: the profile's")
    parser.add_argument("--nvme-bytes", type=int, default=-1)
    a = parser.parse_args()
    plan = Plan(
        a.agents, a.tokens, a.head, a.calls, a.result_tokens, a.answer_tokens, a.start_s, a.tool_s, a.eta,
        a.block_tokens,
    )  # fmt: skip
    profile = PROFILES[a.profile]
    json.dump(
        study(plan, profile, frames_of(profile, a.block_tokens, a.dram_bytes, a.nvme_bytes), a.policy), sys.stdout
    )
    print()


if __name__ == "__main__":
    main()
