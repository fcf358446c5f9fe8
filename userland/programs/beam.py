"""Beam search, over fork, forward and release.

A beam is a context.  Each step asks every beam for its likeliest next tokens (`forward`, which appends the beam's last one in
the same pass), ranks all continuations by their log-probability, forks the beams that have several good ones and releases
those that have none: no KV is copied or computed twice.  What ends a beam, when the search stops and how lengths are weighed is as in transformers' `generate`
(`num_beams`, `length_penalty`, `early_stopping`; version 5), whose results it gives (tests/model/test_beam_search.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from attnix.syscalls import Context
from attnix.syscalls.client import as_bytes, as_pairs
from attnix.syscalls.records import unpack_ids
from attnix.syscalls.types import MAX_LOGPROBS, ForwardArgs, ForwardResult

from .at_once import together
from .child import child_of

EarlyStopping: TypeAlias = Literal[True, False, "never"]


class Hypothesis(NamedTuple):
    """A finished beam.

    tokens  what follows the prompt, with the stop token where it ended with one
    score   sum of log-probabilities / len(tokens) ** length_penalty
    reason  stop | length
    """

    tokens: tuple[int, ...]
    score: float
    reason: str


class _Beam(NamedTuple):
    """context: with its tokens, but for the last one"""

    context: Context
    tokens: tuple[int, ...]
    logprob: float


class _Step(NamedTuple):
    """A beam and a token that may follow it."""

    beam: _Beam
    token: int
    logprob: float  # of the whole


def beam_search(
    context: Context,
    width: int = 4,
    max_tokens: int = 64,
    *,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    stop_tokens: Sequence[int] | None = None,
) -> list[Hypothesis]:
    """The `width` likeliest continuations of `context` that a beam search finds, best first; `context` stays as it is.

    max_tokens      longest continuation; less where the window ends
    length_penalty  0: none; above: longer ones gain; below: shorter ones
    early_stopping  True: end with `width` finished; False: when the best beam, were it to end now, is no better than the
                    worst finished one; "never": the same, were it to end at its most favourable length
    stop_tokens     what ends a continuation; None: the model's own
    Error: ValueError for what cannot be searched; the system's own errors.  Nothing is left behind either way.
    """
    uname = context.client.uname()
    stops = frozenset(unpack_ids(uname.stop_tokens) if stop_tokens is None else stop_tokens)
    wanted = max(2, 1 + len(stops)) * width  # so that `width` go on even when every stop token is among them
    if width < 1 or max_tokens < 1:
        raise ValueError(f"width {width} and max_tokens {max_tokens} must be at least 1")
    if wanted > min(MAX_LOGPROBS, uname.vocab_tokens):
        most = min(MAX_LOGPROBS, uname.vocab_tokens)
        raise ValueError(
            f"{width} beams with {len(stops)} stop tokens need {wanted} continuations, and forward gives {most}: "
            f"take a width of at most {most // max(2, 1 + len(stops))}"
        )
    room = min(max_tokens, uname.window_tokens - context.stat().tokens)
    if room < 1:
        raise ValueError(f"the context fills the window of {uname.window_tokens} tokens: truncate it first")
    finished: list[Hypothesis] = []
    with child_of(context, "beam search") as root:
        beams = [_Beam(root, (), 0.0)]
        for length in range(1, room + 1):
            steps = _likeliest(beams, wanted)
            ends = ["stop" if step.token in stops else "length" if length == room else "" for step in steps]
            # Continuations beyond the first `width` are only there to go on with: they may not end here.
            finished += [
                Hypothesis((*step.beam.tokens, step.token), step.logprob / length**length_penalty, end)
                for step, end in zip(steps[:width], ends, strict=False)
                if end
            ]
            finished = sorted(finished, key=lambda one: -one.score)[:width]
            going_on = [step for step, end in zip(steps, ends, strict=True) if not end][:width]
            if not going_on or _settled(finished, width, going_on[0], length, room, length_penalty, early_stopping):
                break
            beams = _advance(beams, going_on)
    return finished


def _likeliest(beams: Sequence[_Beam], n: int) -> list[_Step]:
    """The n likeliest continuations of all beams.  Asked for in one go, so that they share a pass of the model."""
    asked = [ForwardArgs(b.context.handle, n, tokens=as_bytes(b.tokens[-1:])) for b in beams]
    answers = together(beams[0].context.client, "forward", asked, ForwardResult)
    steps = [
        _Step(beam, token, beam.logprob + logprob)
        for beam, answer in zip(beams, answers, strict=True)
        for token, logprob in as_pairs(answer)
    ]
    return sorted(steps, key=lambda step: -step.logprob)[:n]


def _settled(
    finished: Sequence[Hypothesis],
    width: int,
    best: _Step,
    length: int,
    room: int,
    penalty: float,
    early: EarlyStopping,
) -> bool:
    """Whether the search is over, with beams that could go on."""
    if len(finished) < width:
        return False
    hoped = best.logprob / (room if early == "never" and penalty > 0 else length) ** penalty
    return early is True or hoped <= finished[-1].score


def _advance(beams: Sequence[_Beam], steps: Sequence[_Step]) -> list[_Beam]:
    """Take the steps: a beam's last one in its own context, those before it in forks; a beam without any is released."""
    after: list[_Beam] = []
    for beam in beams:
        mine = [step for step in steps if step.beam is beam]
        if not mine:
            beam.context.release()
            continue
        contexts = [*(beam.context.fork(len(mine) - 1) if len(mine) > 1 else ()), beam.context]
        for step, context in zip(mine, contexts, strict=True):
            after.append(_Beam(context, (*beam.tokens, step.token), step.logprob))
    return sorted(after, key=lambda beam: -beam.logprob)
