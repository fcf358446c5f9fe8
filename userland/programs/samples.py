"""Several answers to one prompt, over fork, forward, append and kill.

Each answer is a fork of the prompt.  In a round all of them are asked at once for their likeliest next tokens (`forward`, which
appends the token drawn before in the same pass), and what comes next is drawn here (choice.py).  In the end `read` spells
them, and killing the process that they are in gives everything back.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from attnix.syscalls import Context
from attnix.syscalls.client import as_bytes, as_pairs
from attnix.syscalls.records import unpack_ids
from attnix.syscalls.types import AppendArgs, AppendResult, ForwardArgs, ForwardResult, ReadArgs, ReadResult

from .at_once import together
from .child import child_of
from .choice import Choice, SamplingOptions


class Sample(NamedTuple):
    """One answer.

    logprobs  of each token, under the model itself: temperature and filters do not change them
    reason    stop | length
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str

    @property
    def mean_logprob(self) -> float:
        """What the model thinks of it, whatever its length; -inf for an empty one."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else float("-inf")


class _Answer:
    """One that is under way.  likeliest: what may come next; reason: "" while it goes on."""

    def __init__(self, context: Context, likeliest: Sequence[tuple[int, float]], seed: int) -> None:
        self.context = context
        self.likeliest = likeliest
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text = self.reason = ""
        self._random = Random(seed)

    def take(self, choice: Choice, stops: frozenset[int]) -> None:
        """Draw the next token.  One that ends the answer is no part of it."""
        token, logprob = choice.pick(self.likeliest, self._random)
        if token in stops:
            self.reason = "stop"
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def spell(self, read: ReadResult, stops: Sequence[bytes]) -> None:
        """Take its text.  At a stop string it ends: before the one that is complete first, the longest of several.

        The token that holds the last characters before that one stays, as in `generate`.
        Error: ValueError where there are stop strings and no tokenizer.
        """
        if stops and read.tokens and not read.ends:
            raise ValueError("stop strings need a tokenizer, and the system has none")
        found = [(read.text.find(stop) + len(stop), read.text.find(stop)) for stop in stops if stop in read.text]
        cut = min(found)[1] if found else len(read.text)
        self.text = read.text[:cut].decode(errors="replace")
        if found:
            self.reason = "stop"
            keep = sum(end < cut for end in unpack_ids(read.ends)) + (cut > 0)
            del self.tokens[keep:], self.logprobs[keep:]


def draw(context: Context, n: int, max_tokens: int, options: SamplingOptions) -> list[Sample]:
    """`n` answers; `context` stays as it is.

    options  the i-th answer is drawn with `seed` + i; without a temperature all are the same
    Error: ValueError and TypeError for what cannot be drawn; the system's own errors.  Nothing is left behind either way.
    """
    if n < 1 or max_tokens < 0:
        raise ValueError(f"{n} samples of {max_tokens} tokens: ask for at least one, of none or more")
    choice, client = Choice.of(options), context.client
    stop, seed = options.get("stop", ()), options.get("seed", 0)
    strings = [each.encode() for each in ((stop,) if isinstance(stop, str) else stop)]
    uname, start = client.uname(), context.stat().tokens
    own = b"" if options.get("ignore_eos") else uname.stop_tokens
    stops = frozenset(unpack_ids(as_bytes(options.get("stop_tokens", b"")) + own))
    room = min(max_tokens, uname.window_tokens - start)

    def spell(answers: Sequence[_Answer]) -> None:
        asked = [ReadArgs(answer.context.handle, start=start) for answer in answers]
        for answer, read in zip(answers, together(client, "read", asked, ReadResult), strict=True):
            answer.spell(read, strings)

    with child_of(context, "samples") as root:
        likeliest = root.forward(choice.top_k)  # before the forks, and so for all of them: the prompt is computed once
        forks = [*(root.fork(n - 1) if n > 1 else ()), root]
        going = answers = [_Answer(fork, likeliest, seed + number) for number, fork in enumerate(forks)]
        for length in range(1, room + 1):
            for answer in going:
                answer.take(choice, stops)
            going = [answer for answer in going if not answer.reason]
            if length == room or not going:
                break
            asked = [ForwardArgs(a.context.handle, choice.top_k, tokens=as_bytes(a.tokens[-1:])) for a in going]
            for answer, said in zip(going, together(client, "forward", asked, ForwardResult), strict=True):
                answer.likeliest = as_pairs(said)
            if strings:
                spell(going)
                going = [answer for answer in going if not answer.reason]
        last = [AppendArgs(a.context.handle, as_bytes(a.tokens[-1:]), more=True) for a in going if a.tokens]
        together(client, "append", last, AppendResult)  # only what is in a log can be read
        spell(answers)
    return [Sample(a.text, tuple(a.tokens), tuple(a.logprobs), a.reason or "length") for a in answers]
