"""The whole kernel beside policy_lab's block-level simulator: another program that counts the same hits."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from attnix.kernel.evict import registry
from attnix.kernel.evict.lru import Lru
from attnix.policy_lab import KINDS, Tape, optimum, run
from attnix.traces import Request

from .paper import BLOCK, replay, request


def tree_of_prompts(seed: int, count: int = 400) -> list[Request]:
    """Prompts that branch off earlier ones, popular ones more often; far enough apart never to overlap."""
    draw = random.Random(seed)
    paths: list[list[int]] = [[0]]
    popularity = [1.0 / (rank + 1) for rank in range(60)]
    weights = list(accumulate(popularity))
    fresh = 1
    requests = []
    for at in range(count):
        if len(paths) < 60 or draw.random() < 0.3:
            stem = draw.choice(paths)
            stem = stem[: draw.randrange(len(stem)) + 1] if len(stem) < 12 else stem[:2]
            more = draw.randrange(1, 6)
            path = [*stem, *range(fresh, fresh + more)]
            fresh += more
            if len(paths) < 60:
                paths.append(path)
            else:
                paths[draw.randrange(60)] = path
        else:
            path = draw.choices(paths, cum_weights=weights[: len(paths)])[0]
        requests.append(request(100_000 * at, path, BLOCK * len(path), 1))
    return requests


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("frames", [24, 60, 120])
def test_lru_finds_what_the_labs_lru_finds(seed: int, frames: int) -> None:
    """Within 2 points: a frame of the kernel's is taken by the running answer, and the lab evicts 32 blocks at a time."""
    requests = tree_of_prompts(seed)
    tape = Tape(requests, BLOCK)
    lab = run(tape, Lru(), frames, KINDS)
    ours = replay(requests, frames, check=False)
    assert ours.hit_ratio == pytest.approx(lab.hit_ratio, abs=0.02)
    assert ours.bound_hit_ratio == pytest.approx(optimum(tape, [frames])[0], abs=1e-6)
    assert 0.05 < ours.hit_ratio <= ours.bound_hit_ratio < 1


def test_with_room_for_everything_nothing_is_lost() -> None:
    requests = tree_of_prompts(4)
    result = replay(requests, 10_000, check=False)
    assert result.hit_ratio == pytest.approx(result.bound_hit_ratio, abs=1e-6)
    assert result.recomputed_tokens == 0


@pytest.mark.parametrize("policy", registry.BUILT_IN)
def test_no_policy_beats_belady(policy: str) -> None:
    """Prompts one after the other and the same order for all: MIN finds at least as much, with one tier and with two."""
    pytest.importorskip(f"attnix.kernel.evict.{policy}")
    requests = tree_of_prompts(5, 200)
    for dram in (0, 40):
        result = replay(requests, 40, dram=dram, policy=policy, check=False)
        assert 0.05 < result.hit_ratio <= result.bound_hit_ratio < 1
