"""Best of n and self-consistency against a real daemon; what they should find is worked out from the simulated model."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from attnix import programs as public
from attnix.drivers.sim_model import reference_distribution, reference_scores, reference_tokens
from attnix.kernel.errors import E
from attnix.syscalls import Client, Context, SyscallError, connect
from attnix.syscalls.exceptions import TryAgain
from attnix.syscalls.records import unpack_ids
from attnix.userland import programs
from attnix.userland.programs import Sample, SamplingOptions, Vote, best_of_n, last_number, self_consistency
from attnix.userland.programs.child import child_of
from attnix.userland.programs.choice import Choice
from attnix.userland.programs.samples import draw

from .conftest import Serve, serving

PROMPT = list(b"What is 6 x 7?")
TOKENS = 8


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("daemon")) as start:
        yield start(pass_ms=2)


@pytest.fixture
def context(daemon: str) -> Iterator[Context]:
    with connect(daemon, name="test") as system, system.alloc_context() as made:
        made.append(tokens=PROMPT)
        yield made
        assert made.stat().tokens == len(PROMPT)
        end = time.monotonic() + 60
        while left(system) != (1, 1):  # what a pass still computes goes when it ends
            assert time.monotonic() < end, f"contexts or processes are left: {left(system)}"


def left(system: Client) -> tuple[int, int]:
    """Contexts and processes that there are."""
    return system.vmstat().counters["contexts"], len(system.ps().processes)


def expected(seed: int, temperature: float) -> tuple[list[int], float]:
    """What one sample must be, and its mean log-probability: at each token one number of Python's generator, on the model's
    own distribution."""
    numbers, tokens = Random(seed), list[int]()
    for _ in range(TOKENS):
        ids, logprobs = reference_distribution([*PROMPT, *tokens]).top(128)
        tokens += numbers.choices(ids, [math.exp(each / temperature) for each in logprobs])
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
    assert computed <= 8 * TOKENS + 1, "eight answers cost no more than their own tokens, and the last one's query"


def test_all_samples_run_in_the_same_passes(serve: Serve) -> None:
    """Eight are asked in one piece, so none of a round begins alone: one pass a token, and one more where
    answers that are still alike wait for a block that one of them fills.  One after another would be 64."""
    with connect(serve(pass_ms=20), name="test") as system, system.alloc_context() as context:
        context.append(tokens=PROMPT)
        context.forward(1)
        before = system.vmstat().counters["passes"]
        best_of_n(context, 8, TOKENS)
        assert system.vmstat().counters["passes"] - before <= TOKENS + 1


PIECES = [f"{token:02x}" for token in range(256)]
GREEDY = reference_tokens(PROMPT, 24)
SAID = "".join(PIECES[token] for token in GREEDY)


OPTIONS: list[SamplingOptions] = [
    {},
    {"ignore_eos": True},
    {"stop_tokens": GREEDY[2:3]},
    {"stop_tokens": GREEDY[4:5], "ignore_eos": True},
    {"stop": SAID[6:9]},
    {"stop": SAID[5:8]},  # in the middle of a token
    {"stop": [SAID[9:12], SAID[7:10], SAID[8:10]]},
    {"stop": SAID[:1]},
    {"stop": "neither"},
]


def test_greedy_answers_are_what_generate_says(serve: Serve) -> None:
    """Ended by the model's own stop token, one of the caller's, a stop string, or the window."""
    path = serve(pieces=PIECES, window_tokens=36, stop_tokens=[GREEDY[10]])
    with connect(path, name="test") as system, system.alloc_context() as context:
        context.append(tokens=PROMPT)
        for options in OPTIONS:
            (fork,) = context.fork()
            said = fork.generate(40, logprobs=1, **options)
            fork.release()
            for sample in draw(context, 2, 40, options):
                assert (list(sample.tokens), sample.text) == (unpack_ids(said.tokens), said.text), options
                assert sample.reason == said.reason
                assert sample.logprobs == pytest.approx([own for own, _, _ in said.logprobs])
        (cut,) = draw(context, 1, 1, {"ignore_eos": True})
        assert (cut.tokens, cut.reason) == ((GREEDY[0],), "length")
        (none,) = draw(context, 1, 0, {})
        assert none == Sample("", (), (), "length")


def test_stop_strings_need_a_tokenizer(serve: Serve) -> None:
    with connect(serve(pieces=None), name="test") as system, system.alloc_context() as context:
        context.append(tokens=PROMPT)
        with pytest.raises(ValueError, match="need a tokenizer"):
            best_of_n(context, 2, TOKENS, stop="x")
        assert [one.sample.text for one in best_of_n(context, 2, TOKENS)] == ["", ""]


class Refused:
    """A call that the system has no time for."""

    def result(self) -> Any:
        raise TryAgain(E.EAGAIN, {"message": "later", "retry_after_ms": 2}, "forward")


def test_half_drawn_answers_outlast_a_refusal(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second forward is refused, also when it is made again.  (The kernel refuses them where a context has lost its frames.)"""
    asked, tries = list[str](), list[int]()

    def sometimes(self: Client, name: str, args: list[tuple[Any, ...]], result: type[Any]) -> list[Any]:
        answers: list[Any] = []
        for one in args:
            if name == "forward":
                asked.append(name)
            refused = name == "forward" and len(asked) % 2 == 0
            answers.append(Refused() if refused else self.submit(name, one, result))
        return answers

    def soon(error: SyscallError, number: int) -> float:
        tries.append(number)
        return 0.002

    monkeypatch.setattr("attnix.userland.programs.at_once.delay_before", soon)
    monkeypatch.setattr(Client, "submit_all", sometimes)
    ranked = best_of_n(context, 4, TOKENS, score=lambda sample: 0.0)
    assert [list(one.sample.tokens) for one in ranked] == [expected(n, 1.0)[0] for n in range(4)]
    assert max(tries) > 1 and len(tries) == len(asked) // 2
    monkeypatch.setattr("attnix.userland.programs.at_once.PATIENCE_S", 0.0)
    with pytest.raises(TryAgain):
        best_of_n(context, 4, TOKENS)


# -- drawing by itself ----------------------------------------------------------------------------------------------

HALVES = [(10, 0.5), (11, 0.25), (12, 0.125), (13, 0.125)]  # token, probability


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"temperature": 1.0}, {10: 1 / 2, 11: 1 / 4, 12: 1 / 8, 13: 1 / 8}),
        ({"temperature": 0.5}, {10: 16 / 22, 11: 4 / 22, 12: 1 / 22, 13: 1 / 22}),  # squares: 16, 4, 1 and 1 of 64
        ({"temperature": 1.0, "top_p": 0.75}, {10: 2 / 3, 11: 1 / 3}),
        ({"temperature": 1.0, "top_p": 0.76}, {10: 4 / 7, 11: 2 / 7, 12: 1 / 7}),
        ({"temperature": 1.0, "min_p": 0.5}, {10: 2 / 3, 11: 1 / 3}),
        ({"temperature": 1.0, "min_p": 0.51}, {10: 1.0}),
        ({"temperature": 1.0, "top_p": 1e-6}, {10: 1.0}),
        ({}, {10: 1.0}),
    ],
)
def test_shares_of_what_is_drawn(options: SamplingOptions, shares: dict[int, float]) -> None:
    n, choice, random = 4000, Choice.of(options), Random(1)
    drawn = Counter(choice.pick([(token, math.log(share)) for token, share in HALVES], random)[0] for _ in range(n))
    assert set(drawn) == set(shares)
    for token, share in shares.items():
        assert drawn[token] == pytest.approx(n * share, abs=1 + 4 * math.sqrt(n * share * (1 - share)))


def test_how_many_tokens_are_asked_for() -> None:
    asked = [Choice.of({"temperature": 1.0, "top_k": k}).top_k for k in (0, 1, 40, 128, 1000)]
    assert asked == [128, 1, 40, 128, 128], "forward tells 128 at most"
    assert Choice.of({"top_k": 40}).top_k == 1, "greedy"


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
    with pytest.raises(ValueError, match=r"top_p is 1e-6\.\.1"):
        best_of_n(context, 3, TOKENS, top_p=-1.0)
    with pytest.raises(TypeError, match="without repetition_penalty"):
        best_of_n(context, 3, TOKENS, repetition_penalty=1.5)  # type: ignore[call-arg]
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
