"""Best of n and self-consistency against a real daemon; what they should find is worked out from the simulated model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attnix import programs as public
from attnix.drivers.sim_model import SamplingChoice, reference_scores, reference_tokens
from attnix.syscalls import Client, Context, SyscallError, connect
from attnix.userland import programs
from attnix.userland.programs import Sample, Vote, best_of_n, last_number, self_consistency
from attnix.userland.programs.child import child_of

from .conftest import Serve

PROMPT = list(b"What is 6 x 7?")
TOKENS = 8


@pytest.fixture
def context(serve: Serve) -> Iterator[Context]:
    with connect(serve(), name="test") as system, system.alloc_context() as made:
        made.append(tokens=PROMPT)
        yield made
        assert made.stat().tokens == len(PROMPT)
        assert left(system) == (1, 1), "contexts or processes are left"


def left(system: Client) -> tuple[int, int]:
    """Contexts and processes that there are."""
    return system.vmstat().counters["contexts"], len(system.ps().processes)


def expected(seed: int, temperature: float) -> tuple[list[int], float]:
    """What one sample must be, and its mean log-probability."""
    tokens = reference_tokens(PROMPT, TOKENS, choice=SamplingChoice(temperature, seed=seed))
    scores = reference_scores([*PROMPT, *tokens], len(PROMPT))
    return tokens, sum(scores) / len(scores)


def test_best_of_n_ranks_by_mean_logprob(context: Context) -> None:
    ranked = best_of_n(context, 6, TOKENS, seed=30, temperature=1.5)
    samples = sorted((expected(30 + n, 1.5) for n in range(6)), key=lambda one: -one[1])
    assert [list(one.sample.tokens) for one in ranked] == [tokens for tokens, _ in samples]
    assert [one.score for one in ranked] == pytest.approx([score for _, score in samples], abs=1e-5)
    assert len({one.score for one in ranked}) == 6, "the samples are one and the same"


def test_best_of_n_by_the_caller_s_score(context: Context) -> None:
    ranked = best_of_n(context, 5, TOKENS, score=lambda sample: -sum(sample.tokens))
    sums = sorted(sum(expected(n, 1.0)[0]) for n in range(5))
    assert [sum(one.sample.tokens) for one in ranked] == sums
    assert [one.score for one in ranked] == [-each for each in sums]


def test_equal_scores_stay_in_the_order_of_their_seeds(context: Context) -> None:
    ranked = best_of_n(context, 4, TOKENS, score=lambda sample: 0.0)
    assert [list(one.sample.tokens) for one in ranked] == [expected(n, 1.0)[0] for n in range(4)]


def test_the_prompt_is_computed_once(context: Context) -> None:
    context.forward(1)
    before = context.client.vmstat().counters["computed_tokens"]
    best_of_n(context, 8, TOKENS)
    computed = context.client.vmstat().counters["computed_tokens"] - before
    assert computed <= 8 * TOKENS, "eight answers cost no more than their own tokens"


def test_an_empty_answer_ranks_last() -> None:
    assert Sample("", (), (), "stop").mean_logprob == float("-inf")
    assert Sample("ab", (1, 2), (-1.0, -3.0), "stop").mean_logprob == -2.0


def test_self_consistency_is_the_majority(context: Context) -> None:
    """The length of the text modulo 3 is its answer, and 2 is none."""

    def extract(text: str) -> int | None:
        answer = len(text) % 3
        return None if answer == 2 else answer

    vote = self_consistency(context, extract, 9, TOKENS, temperature=1.0, seed=7)
    answers = [extract(sample.text) for sample in vote.samples]
    counts = {answer: answers.count(answer) for answer in (0, 1)}
    assert [list(sample.tokens) for sample in vote.samples] == [expected(7 + n, 1.0)[0] for n in range(9)]
    assert dict(vote.votes) == {answer: n for answer, n in counts.items() if n}
    assert vote.answer is not None and counts[vote.answer] == max(counts.values())


def test_self_consistency_without_an_answer_and_with_a_tie(context: Context) -> None:
    nothing: Vote[str] = self_consistency(context, lambda text: None, 3, TOKENS)
    assert (nothing.answer, nothing.votes, len(nothing.samples)) == (None, (), 3)
    names = iter("abba")
    assert self_consistency(context, lambda text: next(names), 4, TOKENS).votes == (("a", 2), ("b", 2))


@pytest.mark.parametrize(
    ("text", "number"),
    [("6 x 7 is 42.", 42.0), ("1,234.5 apples", 1234.5), ("from 3 to -7", -7.0), ("2, 3, 4", 4.0), ("none", None)],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_nothing_is_left_when_it_fails(context: Context) -> None:
    """The fixture counts."""
    with pytest.raises(ZeroDivisionError):
        best_of_n(context, 3, TOKENS, score=lambda sample: 1 / 0)
    with pytest.raises(SyscallError, match="fork makes"):
        best_of_n(context, 2000, TOKENS)
    with pytest.raises(SyscallError, match="ENOMEM"):
        best_of_n(context, 200, TOKENS)
    with pytest.raises(SyscallError, match="top_p"):
        best_of_n(context, 3, TOKENS, top_p=-1.0)
    with pytest.raises(ValueError, match="at least one"):
        best_of_n(context, 0, TOKENS)


def test_nothing_is_left_when_it_is_killed(context: Context) -> None:
    """As with `attnix kill`, while the samples are judged."""

    def kill(sample: Sample) -> float:
        with child_of(context, "judge"):
            (pid,) = [row.pid for row in context.client.ps().processes if row.name == "judge"]
            context.client.kill(pid, 9)
        return 0.0

    assert len(best_of_n(context, 2, TOKENS, score=kill)) == 2


def test_attnix_programs_is_the_same() -> None:
    assert public.__all__ == programs.__all__
    for name in public.__all__:
        assert getattr(public, name) is getattr(programs, name)
