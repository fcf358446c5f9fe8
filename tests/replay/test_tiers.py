"""The hierarchy under replay: what leaves hbm is loaded instead of computed, and the numbers say from where."""

from __future__ import annotations

import pytest

from attnix.replay.engine import Frames, Replay
from attnix.replay.metrics import Result
from attnix.replay.profile import Link
from attnix.replay.workload import from_requests
from attnix.traces import Request

from .paper import BLOCK, PROFILE, US, K, prefill, replay, request, us
from .test_against_the_lab import tree_of_prompts

FRAME_BYTES = PROFILE.kv.frame_bytes(BLOCK)


def there_and_back() -> list[Request]:
    """A B C A: two full blocks each and one token more; with 5 frames of hbm, A's blocks are gone when it comes again."""
    return [request(5000 * i, [2 * n, 2 * n + 1], 9, 1) for i, n in enumerate([0, 1, 2, 0])]


@pytest.mark.parametrize(
    ("tiers", "found_in"), [({"dram": 10}, "dram"), ({"dram": 2, "nvme": 10}, "nvme")], ids=["dram", "nvme"]
)
def test_what_was_demoted_is_loaded_and_not_computed(tiers: dict[str, int], found_in: str) -> None:
    alone = replay(there_and_back(), 5)
    assert alone.recomputed_tokens == 8
    result = replay(there_and_back(), 5, dram=tiers["dram"], nvme=tiers.get("nvme", 0))
    assert result.hit_tokens == {"hbm": 0, **dict.fromkeys(tiers, 0), found_in: 8}
    assert (result.computed_tokens, result.recomputed_tokens) == (28, 0)
    assert result.bound_hit_ratio == pytest.approx(8 / 36, abs=1e-6)
    assert result.moved_bytes["hbm0_write"] == 2 * FRAME_BYTES
    assert result.moved_bytes.get("nvme0_read", 0) == (2 * FRAME_BYTES if found_in == "nvme" else 0)
    assert result.moved_bytes["hbm0_read"] >= 2 * FRAME_BYTES
    # C waits for one frame to be copied away before its only pass: its prompt and its first token are in it.
    assert us(result.ttft_s.p50) * US == 10 * US + K + prefill(9)


def test_loads_take_the_time_of_their_bytes() -> None:
    """The same with a link a thousand times slower, and told not to prefer computing: the last answer is late by that much."""
    quick = replay(there_and_back(), 5, dram=10)
    slow = _with_slow_promotion(there_and_back())
    assert slow.hit_tokens == quick.hit_tokens
    loading = 9 * US + 2 * FRAME_BYTES * 1_000_000_000 // 64_000
    assert us(slow.makespan_s) * US - us(quick.makespan_s) * US == loading - 11 * US


def _with_slow_promotion(requests: list[Request]) -> Result:
    """The kernel is not told how slow the link is, and has seen nothing of it before the one load of this trace."""
    run = Replay(from_requests("paper", requests, BLOCK), PROFILE, Frames(5, 10), "lru", check=True)
    link = run.links[0, "write"]
    link.link = Link(64e3, 9 * US)
    return run.run()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_hierarchy_finds_what_one_tier_of_its_size_would(seed: int) -> None:
    """Between the share that hbm alone finds and the bound for all frames together."""
    requests = tree_of_prompts(seed, 150)
    alone = replay(requests, 40, check=False)
    result = replay(requests, 40, dram=40, nvme=80, check=False)
    assert alone.hit_ratio < result.hit_ratio <= result.bound_hit_ratio
    assert result.recomputed_tokens < alone.recomputed_tokens
    assert result.hit_tokens["dram"] > 0 and result.hit_tokens["nvme"] > 0
    assert sum(result.hit_tokens.values()) + result.computed_tokens >= result.prompt_tokens
    again = replay(requests, 40, dram=40, nvme=80, check=False)
    assert again.as_json() == result.as_json()


def test_every_step_of_a_crowded_hierarchy_passes_fsck() -> None:
    """Forty prompts that come faster than they are answered, in 24 frames over 8 over 40: demoted, loaded, dropped."""
    requests = [r._replace(time_ms=r.time_ms / 100) for r in tree_of_prompts(3, 40)]
    result = replay(requests, 24, dram=8, nvme=40)
    assert result.requests == 40
    assert result.hit_tokens["nvme"] > 0
    assert result.moved_bytes["nvme0_write"] > 0
