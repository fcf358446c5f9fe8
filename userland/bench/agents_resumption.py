"""How soon a context speaks when its tool returns: `attnix bench agents --resumption`.

One context waits for a tool and then gets its result; nothing else runs at that moment.  Meanwhile its frames stayed in hbm,
or another context, which fits beside it only in part, ran and pushed it out to dram.  Then what counts is what the kernel was
told: an eta that is right leaves time to bring the context back before; one that is ten times too long, and none, do not.
That it left hbm is read off `stat`, or the measurement is an error.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from attnix.syscalls import Client, Context
from attnix.syscalls.records import pack_ids
from attnix.syscalls.types import ResumeArgs, ResumeResult

from .agents_workload import rounded
from .decode_engines import BenchError, booted
from .row import Row, time_row

BESIDE: Final = 1.5  # hbm holds so many contexts
RESULT_TOKENS: Final = 32
WAIT_S: Final = 1.0
OTHER_S: Final = 3600.0  # the other one is not expected back: it does not compete for being brought back
ROUNDS: Final = 7
WARM_ROUNDS: Final = 2
DRAM: Final = "1GiB"
STAYED: Final = "it stayed in hbm"
CASES: Final = (STAYED, "eta right", "eta ten times too long", "no eta")


class First(NamedTuple):
    """Seconds to the first token, and how many tokens were computed for it."""

    seconds: float
    computed: int


class Pair:
    """The context that is measured and the one that pushes it out."""

    def __init__(self, system: Client, tokens: int, vocab_tokens: int) -> None:
        self._draws: Final = random.Random("resumption")
        self._vocabulary: Final = range(64, vocab_tokens)
        self._tokens: Final = tokens
        self.system: Final = system
        self.measured: Final = self._made("measured")
        self.other: Final = self._made("other")
        self.other.wait_tool("other", eta=OTHER_S)

    def _made(self, name: str) -> Context:
        context = self.system.spawn(name).alloc_context()
        context.append(tokens=self.ids(self._tokens))
        context.generate(1, ignore_eos=True)
        return context

    def ids(self, count: int) -> list[int]:
        return self._draws.choices(self._vocabulary, k=count)

    def first(self, case: str) -> First:
        """One wait and what follows.  Error: BenchError when it stayed in hbm though it should not, or the reverse."""
        eta = {"no eta": None, "eta ten times too long": 10 * WAIT_S}.get(case, WAIT_S)
        self.measured.generate(1, ignore_eos=True)  # its turn: it is in hbm when it begins to wait
        self.measured.truncate(self._tokens)
        back = time.perf_counter() + WAIT_S
        self.measured.wait_tool(case, eta=eta)
        if case != STAYED:
            self.other.resume(tokens=self.ids(1))
            self.other.generate(1, ignore_eos=True)
            self.other.truncate(self._tokens)
            self.other.wait_tool("other", eta=OTHER_S)
        there = self.measured.stat().cached_tokens
        if (there < self._tokens) != (case != STAYED):
            raise BenchError(f"{there} of {self._tokens} tokens are in hbm where the case is: {case}")
        time.sleep(max(0.0, back - time.perf_counter()))
        before = self.measured.stat().usage.computed_tokens
        began = time.perf_counter()
        packed = pack_ids(self.ids(RESULT_TOKENS))
        resumed = self.system.submit("resume", ResumeArgs(self.measured.handle, 0, packed, more=True), ResumeResult)
        stream = self.measured.stream(1, ignore_eos=True)
        for _ in stream:
            break
        seconds = time.perf_counter() - began
        resumed.result()
        stream.result()
        computed = self.measured.stat().usage.computed_tokens - before
        self.measured.truncate(self._tokens)
        return First(seconds, computed)


def resumption(model: str, token_bytes: int, tokens: int, say: Callable[[str], None]) -> list[Row]:
    """Error: BenchError."""
    hbm = int(BESIDE * rounded(tokens) * token_bytes)
    found: dict[str, list[First]] = {case: [] for case in CASES}
    with (
        tempfile.TemporaryDirectory(prefix="attnix-resumption-") as directory,
        booted(model, directory, hbm, ["--dram", DRAM]) as ours,
    ):
        pair = Pair(ours.client, tokens, ours.uname.vocab_tokens)
        for number in range(WARM_ROUNDS + ROUNDS):
            for case in CASES:
                first = pair.first(case)
                if number >= WARM_ROUNDS:
                    found[case].append(first)
    for case, firsts in found.items():
        computed = sorted({first.computed for first in firsts})
        say(f"{case}: {', '.join(f'{first.seconds * 1e3:.1f}' for first in firsts)} ms, {computed} tokens computed")
    return rows({case: [first.seconds for first in firsts] for case, firsts in found.items()}, tokens)


def rows(seconds: Mapping[str, Sequence[float]], tokens: int) -> list[Row]:
    """Milliseconds, beside those of the context that stayed in hbm."""
    stayed = statistics.median(seconds[STAYED]) * 1e3
    made = []
    for case, each in seconds.items():
        mine = statistics.median(each) * 1e3
        title = f"first token after a tool, {tokens} tokens, {case}"
        if case == STAYED:
            made.append(Row("agents", title, mine, "ms", "none", None, None, None, None, len(each)))
        else:
            made.append(time_row("agents", title, mine, "ms", STAYED, stayed, len(each), None))
    return made
