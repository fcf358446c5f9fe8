"""What is learnt about tools: how long they take, and how right those are who say how long it will take.

Per tool the latest durations are kept, and over all tools together, since a tool that was called twice is better
described by all the others (CacheTTL, arXiv 2511.02230, uses a tool's own once there are a hundred).  A caller's eta is
trusted as far as etas of that tool were right before: what is kept is the ratio of what it took to what was said, so an
eta that is always half of the truth is as good as a right one, and one that says nothing is not used.

Each uid's are its own (`OfUids`): what a wait is told of a tool would tell how long others waited for theirs.

All durations are ns.  Nothing here reads a clock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple

from .journal import ToolRecord
from .params import MAX_WAIT_MS

MOST_TOOLS: Final = 256  # names kept, the least recently called goes first
OWN_SAMPLES: Final = 256  # durations kept of one tool
POOLED_SAMPLES: Final = 1024
RATIOS: Final = 64
DISTRIBUTION: Final = 100  # durations from which a tool is described by its own alone
BELIEVED: Final = 3  # durations from which a tool's own median counts
JUDGED: Final = 8  # etas from which they are compared with what was learnt
_BEHIND: Final = "\x1f"  # between uid and name in the journal
_FARTHEST: Final = 64.0  # an eta that is wrong by more than this says nothing about the next
_LONGEST_NS: Final = MAX_WAIT_MS * 1_000_000  # what is foretold is no longer than what could be said, and fits 64 bits


class Sample:
    """The latest `most` numbers, in the order in which they came and by size."""

    __slots__ = ("_latest", "_most", "_sorted")

    def __init__(self, most: int) -> None:
        self._most = most
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        if len(self._latest) == self._most:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._latest.append(value)
        insort(self._sorted, value)

    @property
    def by_size(self) -> Sequence[float]:
        return self._sorted

    @property
    def latest(self) -> Sequence[float]:
        """Oldest first."""
        return self._latest

    def quantile(self, permille: int) -> float:
        """The smallest value that so many permille are not above.  Requires: not empty."""
        return self._sorted[max(0, -(-permille * len(self._sorted) // 1000) - 1)]

    def median(self) -> float:
        return self.quantile(500)

    def spread(self) -> float:
        """Distance of the quartiles, in medians: how little one value says about the next."""
        middle = self.median()
        return (self.quantile(750) - self.quantile(250)) / middle if middle > 0 else float("inf")

    def beyond(self, value: float) -> float:
        """The median of those above `value`; twice `value` when there is none: what took that long takes as long again."""
        first = bisect_right(self._sorted, value)
        above = len(self._sorted) - first
        return self._sorted[first + (above - 1) // 2] if above else 2 * value


class Tool:
    """number: in the order in which the kernel has first heard of tools, from 0."""

    __slots__ = ("absent", "absurd", "calls", "durations", "name", "number", "ratios", "written")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.durations = Sample(OWN_SAMPLES)
        self.ratios = Sample(RATIOS)  # actual duration / eta
        self.calls = 0  # that were learnt from
        self.absurd = 0  # etas that were wrong by more than _FARTHEST
        self.absent = 0  # answers that found no frame of their context
        self.written = 0  # of them, those that the journal knows of


class Forecast(NamedTuple):
    """What is expected of one call when it begins.

    expected_ns   the median; -1: nobody knows
    early_ns      one call in ten is back before that
    distribution  durations by size, for a time to live; empty: nothing is known
    by_eta        it rests on the caller's eta
    """

    expected_ns: int
    early_ns: int
    distribution: Sequence[float]
    by_eta: bool


class Tools:
    """All tools that one uid has named.  numbers: of those that are new; they may be shared with other uids'."""

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._tools: OrderedDict[str, Tool] = OrderedDict()
        self._pooled = Sample(POOLED_SAMPLES)
        self._ratios = Sample(POOLED_SAMPLES)
        self._numbers = count() if numbers is None else numbers
        self.dropped: list[str] = []  # names that went since somebody looked

    def __len__(self) -> int:
        return len(self._tools)

    def named(self, name: str) -> Tool:
        """Made when it is first heard of."""
        tool = self._tools.get(name)
        if tool is None:
            tool = self._tools[name] = Tool(name, next(self._numbers))
            if len(self._tools) > MOST_TOOLS:
                oldest, _ = self._tools.popitem(last=False)
                self.dropped.append(oldest)
        else:
            self._tools.move_to_end(name)
        return tool

    def learn(self, name: str, took_ns: int, eta_ns: int = -1) -> Tool:
        """A call has taken so long; eta_ns: what its caller had said, -1: nothing."""
        tool = self.named(name)
        tool.calls += 1
        tool.durations.add(took_ns)
        self._pooled.add(took_ns)
        if eta_ns > 0:
            ratio = took_ns / eta_ns
            if 1 / _FARTHEST <= ratio <= _FARTHEST:
                tool.ratios.add(ratio)
                self._ratios.add(ratio)
            else:
                tool.absurd += 1
        return tool

    def heard(self) -> list[Tool]:
        """All, the one that was heard of last at the end."""
        return list(self._tools.values())

    # -- what is expected -----------------------------------------------------------------------------------------

    def forecast(self, name: str, eta_ns: int = -1) -> Forecast:
        """Of a call that begins now."""
        tool = self.named(name)
        if eta_ns >= 0 and self._trusted(tool):
            ratios = self._ratios_of(tool)
            if ratios is None:
                return Forecast(eta_ns, eta_ns, (float(eta_ns),), True)
            scaled = [min(eta_ns * ratio, _LONGEST_NS) for ratio in ratios.by_size]
            likely_ns, early_ns = (min(int(eta_ns * r), _LONGEST_NS) for r in (ratios.median(), ratios.quantile(100)))
            return Forecast(likely_ns, early_ns, scaled, True)
        likely = self._durations_of(tool, BELIEVED)
        if likely is None:
            return Forecast(-1, -1, (), False)
        tails = self._durations_of(tool, DISTRIBUTION)
        distribution = tails.by_size if tails is not None else ()
        return Forecast(int(likely.median()), int(likely.quantile(100)), distribution, False)

    def remaining_ns(self, name: str, elapsed_ns: int, eta_ns: int = -1) -> int:
        """Until a call that began so long ago is back, of those that took longer than that.  -1: nobody knows."""
        tool = self._tools.get(name)
        if tool is None:
            return -1
        if eta_ns > 0 and self._trusted(tool):
            ratios = self._ratios_of(tool)
            if ratios is not None:
                return int(eta_ns * ratios.beyond(elapsed_ns / eta_ns)) - elapsed_ns
            return eta_ns - elapsed_ns if elapsed_ns < eta_ns else elapsed_ns
        likely = self._durations_of(tool, BELIEVED)
        return -1 if likely is None else int(likely.beyond(elapsed_ns)) - elapsed_ns

    def _ratios_of(self, tool: Tool) -> Sample | None:
        """None: too few etas were ever judged."""
        return next((sample for sample in (tool.ratios, self._ratios) if len(sample) >= JUDGED), None)

    def _durations_of(self, tool: Tool, enough: int) -> Sample | None:
        """Its own from `enough` on, all tools' before that.  None: there is none."""
        if len(tool.durations) >= enough:
            return tool.durations
        return self._pooled if len(self._pooled) else None

    def _trusted(self, tool: Tool) -> bool:
        """Whether its callers' etas say more than its own durations do."""
        if len(tool.ratios) < JUDGED or len(tool.durations) < JUDGED:
            return True
        return tool.ratios.spread() <= tool.durations.spread()

    # -- keeping it -----------------------------------------------------------------------------------------------

    def due_for_journal(self, tool: Tool) -> bool:
        """Its first calls are written down one by one, later ones by the sixteen: a crash loses little of what is known."""
        return tool.calls - tool.written >= min(16, max(1, tool.written // 2))

    def packed(self, tool: Tool) -> bytes:
        """Its durations, int64, oldest first."""
        tool.written = tool.calls
        return array("q", (int(ns) for ns in tool.durations.latest)).tobytes()

    def unwritten(self) -> list[Tool]:
        return [tool for tool in self._tools.values() if tool.calls > tool.written]

    def restore(self, name: str, durations: bytes) -> None:
        """What was packed before a restart."""
        for took_ns in array("q", durations[: len(durations) // 8 * 8]):
            tool = self.learn(name, max(0, took_ns))
            tool.written = tool.calls


class OfUids:
    """The tools of every uid, and how they are written down: the owner's by their names, others' behind their uid.  A tool's name
    is printable, so the two cannot be confused."""

    def __init__(self, owner_uid: int) -> None:
        self._owner_uid = owner_uid
        self._numbers = count()
        self._tools: dict[int, Tools] = {}

    def of(self, uid: int) -> Tools:
        """Made when it is first asked for."""
        tools = self._tools.get(uid)
        if tools is None:
            tools = self._tools[uid] = Tools(self._numbers)
        return tools

    def heard(self) -> list[Tool]:
        """Everybody's, uid by uid."""
        return [tool for tools in self._tools.values() for tool in tools.heard()]

    def record(self, uid: int, name: str, durations: bytes) -> ToolRecord:
        """durations: empty where the tool is forgotten."""
        return ToolRecord(name if uid == self._owner_uid else f"{uid}{_BEHIND}{name}", durations)

    def restore(self, record: ToolRecord) -> None:
        uid, behind, name = record.tool.rpartition(_BEHIND)
        self.of(int(uid) if behind else self._owner_uid).restore(name, record.durations)

    def unwritten(self) -> tuple[ToolRecord, ...]:
        """What was learnt since it was written down last."""
        return tuple(
            self.record(uid, tool.name, tools.packed(tool))
            for uid, tools in self._tools.items()
            for tool in tools.unwritten()
        )
