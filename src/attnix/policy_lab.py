"""A block-level cache simulator for eviction policies: minutes of tuning instead of a replay through the whole kernel.

    python -m attnix.policy_lab ../shared/traces/mooncake_conversation.jsonl.gz --capacity 1%,5%,20% --policy lru,learned

One tier, no time but the trace's own, every block alike.  A request finds the longest resident prefix of its blocks,
then all its other blocks are computed and kept; what does not fit pushes others out, 32 at a time, each a leaf when it
goes.  The *token hit ratio* is tokens in found blocks / input tokens of all requests.  A request longer than the cache keeps
its first blocks.  Capacities in % are of the distinct blocks of the trace.

**The optimum** is Belady's MIN with bypass over the block accesses (Belady 1966; bypass: a block that is not worth
it need not be kept).  It is a true upper bound for every policy here: blocks are of equal size and equal worth, so MIN is
optimal without the leaf-first rule, and the rule costs it nothing, since a block is never used without its parent and
so is never wanted before it (ties go deepest first).  Only bypass makes it a bound rather than a policy: it may drop a block
in the middle of the request that uses it.

Hints, what a policy is told beyond uses:
    blind   nothing
    kinds   what the kernel sees by itself: the turn's number and whether it ended in a tool call, of which tool.  Not when a
            session is over, though a client that releases its contexts would say so
    eta     also when the tool will answer, exactly
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Final

import numpy as np
from numpy.typing import NDArray

from attnix.kernel.evict import registry
from attnix.kernel.evict.protocol import (
    KIND_FIRST_TOOL,
    KIND_NONE,
    KIND_TOOL,
    KIND_TOOLS,
    KIND_TURN,
    EvictionPolicy,
    Fact,
)
from attnix.plugins import register_policies
from attnix.traces import TOOL, TURN, Request, load

BLIND: Final = "blind"
KINDS: Final = "kinds"
ETA: Final = "eta"
BATCH: Final = 32  # victims asked for at once
REBUILD_NS: Final = 1_000_000  # of any block: the lab counts tokens, not time
DEVICE: Final = 0
NEVER: Final = np.iinfo(np.int64).max

Blocks = NDArray[np.int32]


class Tape:
    """A trace in memory, as arrays.

    paths   blocks of each request, renumbered from 0 in order of first use
    parent  int32 [distinct], -1 for first blocks
    depth   int32 [distinct] tokens before it
    """

    def __init__(self, requests: Iterable[Request], block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.paths: list[Blocks] = []
        self.requests: list[Request] = []
        self.input_tokens = 0
        number: dict[int, int] = {}
        parent: list[int] = []
        depth: list[int] = []
        for request in requests:
            if request.blocks is None:
                raise ValueError("this trace has lengths only: there is nothing to hit")
            last = -1
            path = []
            for place, name in enumerate(request.blocks):
                block = number.get(name)
                if block is None:
                    block = number[name] = len(parent)
                    parent.append(last)
                    depth.append(place * block_tokens)
                path.append(block)
                last = block
            self.paths.append(np.array(path, dtype=np.int32))
            self.requests.append(request._replace(blocks=None))
            self.input_tokens += request.input_tokens
        self.parent = parent
        self.depth = np.array(depth, dtype=np.int32)
        self.distinct = len(parent)


@dataclass
class Outcome:
    """hit_ratio: tokens of found blocks / input tokens.  victims_us: mean time of a call to `victims`."""

    policy: str
    hints: str
    capacity_frames: int
    hit_ratio: float
    seconds: float
    victims_us: float


class Cache:
    """The resident blocks of one device, and the BlockView of them."""

    def __init__(self, tape: Tape, policy: EvictionPolicy, capacity_frames: int) -> None:
        self.now_ns = 0
        self.policy = policy
        self.capacity = capacity_frames
        self.parent = tape.parent
        self.depth = tape.depth
        n = tape.distinct
        self.resident = np.zeros(n, dtype=np.bool_)
        self.used_ns = np.zeros(n, dtype=np.int64)
        self.due_ns = np.zeros(n, dtype=np.int64)
        self.hits = np.zeros(n, dtype=np.int32)
        self.kind = np.zeros(n, dtype=np.int8)
        self.turn = np.zeros(n, dtype=np.int32)
        self.held = [0] * n  # resident children, and 1 while a request uses the block: 0 makes it a reclaimable leaf
        self.count = 0
        self.leaves: list[int] = []
        self.leaf_at = [-1] * n
        self.order: list[tuple[int, int, int]] = []  # heap of (last use, -depth, leaf), with stale entries
        self.spent_ns = 0
        self.calls = 0

    # -- BlockView

    def oldest(self, device: int, want: int) -> Sequence[int]:
        found: list[int] = []
        popped = []
        gone: dict[int, int] = {}
        while len(found) < want and self.order:
            entry = heappop(self.order)
            block = entry[2]
            if block in gone and gone[block] < 0:
                continue  # twice in the heap
            if not self.resident[block] or self.held[block] - gone.get(block, 0) or entry[0] != self.used_ns[block]:
                continue
            popped.append(entry)
            found.append(block)
            gone[block] = -1
            above = self.parent[block]
            if above >= 0:
                gone[above] = gone.get(above, 0) + 1
                if self.held[above] == gone[above]:
                    heappush(self.order, self._rank(above))
        for entry in popped:
            heappush(self.order, entry)
        return found

    def sample(self, device: int, want: int, seed: int) -> Sequence[int]:
        leaves = self.leaves
        n = len(leaves)
        if n <= want:
            return list(leaves)
        chosen: dict[int, None] = {}
        state = seed & 0xFFFFFFFFFFFFFFFF
        while len(chosen) < want:
            state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
            chosen[(state >> 33) * n >> 31] = None
        return [leaves[i] for i in chosen]

    def evictable(self, device: int, blocks: Sequence[int], want: int) -> Sequence[int]:
        found: list[int] = []
        gone: dict[int, int] = {}
        for block in blocks:
            if len(found) == want:
                break
            if self.resident[block] and self.held[block] == gone.get(block, 0):
                found.append(block)
                gone[self.parent[block]] = gone.get(self.parent[block], 0) + 1
        return found

    def chain(self, device: int, leaf: int, want: int) -> Sequence[int]:
        found: list[int] = []
        children = 0
        while leaf >= 0 and len(found) < want and self.resident[leaf] and self.held[leaf] == children:
            found.append(leaf)
            leaf = self.parent[leaf]
            children = 1
        return found

    def keys(self, blocks: Sequence[int]) -> Sequence[int]:
        return [(block + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF for block in blocks]

    def facts(self, blocks: Sequence[int]) -> Sequence[Fact]:
        at = np.array(blocks, dtype=np.int64)
        held = self.held
        columns = (
            self.used_ns[at].tolist(), self.due_ns[at].tolist(), self.depth[at].tolist(), self.hits[at].tolist(),
            self.kind[at].tolist(), self.turn[at].tolist(), [held[b] for b in blocks],
        )  # fmt: skip
        return [Fact._make((*row, 0, 50)) for row in zip(*columns, strict=True)]

    def rebuild_ns(self, depth: int) -> int:
        return REBUILD_NS

    def reload_ns(self, device: int) -> int:
        return 0

    def capacity_frames(self, device: int) -> int:
        return self.capacity

    def reclaimable_frames(self, device: int) -> int:
        return self.count

    # -- what happens

    def serve(self, path: Blocks, now_ns: int, end_ns: int, kind: int, turn: int, due_ns: int) -> int:
        """One request; -> blocks found."""
        self.now_ns = now_ns
        policy = self.policy
        path = path[: self.capacity]
        if not len(path):
            return 0
        here = self.resident[path]
        found = len(path) if here.all() else int(here.argmin())
        old, new = path[:found], path[found:]
        if found:
            self._hold(int(old[-1]))
            self.hits[old] += 1
            if policy.listens:
                policy.used(self, DEVICE, old.tolist())
        if len(new):
            self._make_room(len(new))
            self.resident[new] = True
            self.hits[new] = 0
            self.count += len(new)
            numbers = new.tolist()
            for block in numbers[:-1]:
                self.held[block] = 1
            self.held[numbers[-1]] = 0
            if policy.listens:
                policy.inserted(self, DEVICE, numbers)
        self.now_ns = end_ns
        self.used_ns[path] = end_ns
        self.due_ns[path] = due_ns
        self.kind[path] = kind
        self.turn[path] = turn
        if found and not len(new):
            self._release(int(old[-1]))  # else the hold has become that of the child
        if len(new):
            self._release(int(new[-1]), holds=0)
        if policy.listens:
            policy.ended(self, DEVICE, path.tolist())
        return found

    def _make_room(self, frames: int) -> None:
        while (short := self.count + frames - self.capacity) > 0:
            want = min(short, BATCH)
            start = perf_counter_ns()
            victims = self.policy.victims(self, DEVICE, want)
            self.spent_ns += perf_counter_ns() - start
            self.calls += 1
            gone: list[int] = []
            for block in victims:
                if len(gone) < want and self._evict(block):
                    gone.append(block)
            if len(gone) < want:  # as the kernel does
                gone += [block for block in self.oldest(DEVICE, want - len(gone)) if self._evict(block)]
            if not gone:
                raise RuntimeError("nothing can be evicted")
            if self.policy.listens:
                self.policy.removed(self, DEVICE, gone)

    def _rank(self, block: int) -> tuple[int, int, int]:
        return int(self.used_ns[block]), -int(self.depth[block]), block

    def _hold(self, block: int) -> None:
        self.held[block] += 1
        if self.held[block] == 1:
            self._drop_leaf(block)

    def _release(self, block: int, holds: int = 1) -> None:
        self.held[block] -= holds
        if not self.held[block]:
            self._add_leaf(block)

    def _add_leaf(self, block: int) -> None:
        self.leaf_at[block] = len(self.leaves)
        self.leaves.append(block)
        heappush(self.order, self._rank(block))

    def _drop_leaf(self, block: int) -> None:
        place = self.leaf_at[block]
        last = self.leaves.pop()
        if last != block:
            self.leaves[place] = last
            self.leaf_at[last] = place
        self.leaf_at[block] = -1

    def _evict(self, block: int) -> bool:
        if self.leaf_at[block] < 0:
            return False
        self._drop_leaf(block)
        self.resident[block] = False
        self.count -= 1
        above = self.parent[block]
        if above >= 0:
            self._release(above)
        return True


def run(tape: Tape, policy: EvictionPolicy, capacity_frames: int, hints: str = KINDS) -> Outcome:
    """The whole trace through one policy."""
    cache = Cache(tape, policy, capacity_frames)
    kinds = {TURN: KIND_TURN, TOOL: KIND_TOOL}
    tools: dict[str, int] = {}
    found = 0
    start = perf_counter()
    for request, path in zip(tape.requests, tape.paths, strict=True):
        now_ns = int(request.time_ms * 1e6)
        end_ns = now_ns + int(request.service_ms * 1e6)
        kind, turn, due_ns = KIND_NONE, 0, 0
        if hints != BLIND:
            kind, turn = kinds.get(request.ends, KIND_NONE), request.turn
            if request.tool:
                place = tools.setdefault(request.tool, len(tools))
                kind = KIND_FIRST_TOOL + place if place < KIND_TOOLS else KIND_TOOL
        if hints == ETA and request.tool_ms >= 0:
            due_ns = end_ns + int(request.tool_ms * 1e6)
        found += cache.serve(path, now_ns, end_ns, kind, turn, due_ns)
    seconds = perf_counter() - start
    ratio = found * tape.block_tokens / max(1, tape.input_tokens)
    return Outcome(policy.name, hints, capacity_frames, ratio, seconds, cache.spent_ns / 1e3 / max(1, cache.calls))


def optimum(tape: Tape, capacities: Sequence[int]) -> list[float]:
    """Belady's MIN with bypass per capacity in frames (see the head of this file): token hit ratios no policy can exceed."""
    soon = np.full(tape.distinct, NEVER, dtype=np.int64)
    runs: list[
        list[tuple[int, int, int]]
    ] = []  # per request: (next request, first, end) of blocks wanted again together
    for number in range(len(tape.paths) - 1, -1, -1):
        path = tape.paths[number]
        later = soon[path]
        cuts = [0, *(np.flatnonzero(np.diff(later)) + 1).tolist(), len(path)] if len(path) else [0]
        runs.append([(int(later[a]), a, b) for a, b in pairwise(cuts) if later[a] != NEVER])
        soon[path] = number
    runs.reverse()
    return [_belady(tape, runs, capacity) for capacity in capacities]


def _belady(tape: Tape, runs: list[list[tuple[int, int, int]]], capacity: int) -> float:
    resident = np.zeros(tape.distinct, dtype=np.bool_)
    heap: list[tuple[int, int, int, int]] = []  # (-next request, -first, request, end)
    count = found = 0
    for number, path in enumerate(tape.paths):
        here = int(resident[path].sum())
        found += here
        resident[path] = False
        count -= here
        for later, first, end in runs[number]:
            resident[path[first:end]] = True
            count += end - first
            heappush(heap, (-later, -first, number, end))
        while count > capacity:
            later, first, source, end = heappop(heap)
            keep = max(-first, end - (count - capacity))
            resident[tape.paths[source][keep:end]] = False
            count -= end - keep
            if keep > -first:
                heappush(heap, (later, first, source, keep))
    return found * tape.block_tokens / max(1, tape.input_tokens)


def capacity_of(text: str, distinct: int) -> int:
    """ "5%" of the distinct blocks, or a number of frames; at least one."""
    if text.endswith("%"):
        return max(1, round(distinct * float(text[:-1]) / 100))
    return max(1, int(text))


def main(argv: Sequence[str] | None = None, echo: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser(prog="python -m attnix.policy_lab", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", default="1%,2%,5%,10%,20%,50%")
    parser.add_argument("--policy", default="lru,learned")
    parser.add_argument("--hints", default=KINDS, help=f"any of {BLIND},{KINDS},{ETA}")
    parser.add_argument("--concurrency", type=float, default=16.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object per result, a line each")
    args = parser.parse_args(argv)
    for complaint in register_policies():
        print(complaint, file=sys.stderr)
    trace = load(args.trace, concurrency=args.concurrency, seed=args.seed)
    tape = Tape(trace.requests(), trace.block_tokens)
    capacities = [capacity_of(text, tape.distinct) for text in args.capacity.split(",")]
    best = optimum(tape, capacities)
    if args.json:
        for capacity, ratio in zip(capacities, best, strict=True):
            echo(json.dumps({"policy": "optimum", "capacity_frames": capacity, "hit_ratio": ratio}))
    else:
        echo(
            f"{args.trace.name}: {len(tape.paths):,} requests, {tape.distinct:,} distinct blocks of {tape.block_tokens}"
        )
        echo(f"{'% of tokens hit':22}" + "".join(f"{text:>9}" for text in args.capacity.split(",")))
        echo(f"{'optimum':22}" + "".join(f"{100 * ratio:9.2f}" for ratio in best))
    for name in args.policy.split(","):
        for hints in args.hints.split(","):
            row = [run(tape, registry.make(name), capacity, hints) for capacity in capacities]
            if args.json:
                for outcome in row:
                    echo(json.dumps(vars(outcome)))
            else:
                mean_us = sum(o.victims_us for o in row) / len(row)
                took = sum(o.seconds for o in row)
                ratios = "".join(f"{100 * o.hit_ratio:9.2f}" for o in row)
                echo(f"{name + ' (' + hints + ')':22}{ratios}   {mean_us:6.0f} us/call {took:6.1f} s")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
