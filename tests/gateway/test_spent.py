"""Where a prompt's tokens were: `usage` and `/metrics` say it per tier, and the tiers and what was computed add up to the prompt."""

from __future__ import annotations

import pytest

from attnix.syscalls.types import Usage
from attnix.userland.gateway.plan import Plan
from attnix.userland.gateway.turns import _spent

PROMPT = 100


@pytest.mark.parametrize(
    ("keep", "usage", "expected"),
    [
        (0, Usage(), (0, 0, 0, 0, 100)),
        (0, Usage(hit_tokens=64), (64, 0, 0, 0, 36)),
        (0, Usage(hit_tokens=64, dram_tokens=16, nvme_tokens=32), (16, 16, 32, 0, 36)),
        # 64 tokens were in dram, and preempted and loaded twice more: they are no more than 64 of the prompt.
        (0, Usage(hit_tokens=192, dram_tokens=192), (0, 99, 0, 0, 1)),
        (64, Usage(hit_tokens=192, dram_tokens=192), (0, 64, 0, 0, 36)),
        (64, Usage(hit_tokens=128, dram_tokens=48, nvme_tokens=64, remote_tokens=16), (0, 48, 16, 0, 36)),
        (80, Usage(recomputed_tokens=16, remote_tokens=32), (32, 0, 0, 32, 36)),
    ],
)
def test_the_tiers_and_what_was_computed_are_the_prompt(keep: int, usage: Usage, expected: tuple[int, ...]) -> None:
    told = _spent(usage, Plan(keep, [], [], bool(keep), 0, ()), PROMPT, []).tiers()
    names = ("hbm_tokens", "dram_tokens", "nvme_tokens", "remote_tokens", "computed_tokens")
    assert tuple(told[name] for name in names) == expected
    assert sum(expected) == PROMPT
