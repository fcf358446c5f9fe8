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
    """A tenth of the full size with all ten tools: 80,000 prompt tokens computed again for 500 new ones.

    Here no token stops it: an answer of 30 is 30 tokens in the log, the last of them computed with what follows.  That both
    sides answer with the same tokens is checked by the study.
    """
    tokens, tools, result, answer = 8000, 10, 50, 30
    flags = ["--real", "--tokens", str(tokens), "--tools", str(tools), "--result-tokens", str(result)]
    command = [sys.executable, "-m", "attnix.study_loop", *flags, "--answer-tokens", str(answer)]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    ours, theirs = found["sides"]["attnix"], found["sides"]["stateless"]
    assert found["new_tokens"] == 500
    whole = [tokens + turn * (result + answer) for turn in range(1, tools + 1)]
    once = tools * (
        1 + result + answer - 1
    )  # the last token of the answer before, the tool's, the answer's but its last
    assert once <= ours["after_tools"] <= once + tools
    everything = sum(n + answer - 1 for n in whole)
    assert everything <= theirs["after_tools"] <= everything + tools
    generated = (tools + 1) * answer
    assert (ours["requests"], ours["generated_tokens"]) == (theirs["requests"], theirs["generated_tokens"])
    assert (ours["requests"], ours["generated_tokens"]) == (tools + 1, generated)
    assert ours["computed_tokens"] - ours["after_tools"] <= tokens + answer, "the prompt: once"
