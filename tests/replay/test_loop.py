"""The ten-tool loop: what the device computes is what is new, or everything again; numbers worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from attnix.study_loop import Loop, simulated


def test_in_simulation_at_full_size() -> None:
    """A stop token is not in the log, so an answer of 30 leaves 29 there; the last token of a prompt that one pass holds runs
    twice, because `append` starts it before `generate` comes."""
    loop = Loop(80_000, 10, 50, 30)
    ours, theirs = simulated(loop, "h100-8b", False), simulated(loop, "h100-8b", True)
    assert ours.after_tools == 10 * (50 + 29 + 1)
    assert theirs.after_tools == sum(80_000 + turn * (50 + 29) + 29 for turn in range(1, 11)) == 804_635
    assert ours.computed_tokens - ours.after_tools == theirs.computed_tokens - theirs.after_tools == 80_000 + 29
    assert ours.generated_tokens == theirs.generated_tokens == 11 * 30
    assert ours.seconds < theirs.seconds / 10


@pytest.mark.e2e
def test_for_real_on_a_tiny_random_model() -> None:
    """Here no token stops it: an answer of 6 is 6 tokens in the log, the last of them computed with what follows.  That both
    sides answer with the same tokens is checked by the study."""
    flags = ["--real", "--tokens", "400", "--tools", "3", "--result-tokens", "20", "--answer-tokens", "6"]
    command = [sys.executable, "-m", "attnix.study_loop", *flags]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    ours, theirs = found["sides"]["attnix"], found["sides"]["stateless"]
    whole = [400 + turn * (20 + 6) for turn in (1, 2, 3)]
    assert 3 * (1 + 20 + 5) <= ours["after_tools"] <= 3 * (1 + 20 + 5 + 1)
    assert sum(n + 5 for n in whole) <= theirs["after_tools"] <= sum(n + 5 + 1 for n in whole)
    assert (ours["requests"], ours["generated_tokens"]) == (theirs["requests"], theirs["generated_tokens"]) == (4, 24)
