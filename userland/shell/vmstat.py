"""`attnix vmstat`: counters since boot, or what happens, every so many seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import typer

from attnix.syscalls.client import LONGEST_S
from attnix.syscalls.types import PressureResult, TierRow

from ..errors import CommandError
from ..output import FromOption, JsonOption, SocketOption, System, look_at, print_json, show, table

_HEADER_EVERY: Final = 20  # lines


class Sample(NamedTuple):
    """What the system counted until a moment, on any clock."""

    at_s: float
    counters: Mapping[str, int]
    tiers: tuple[TierRow, ...]
    pressure: PressureResult


class Rates(NamedTuple):
    """Between two samples.  Names as they are shown; per second, but for what is a state."""

    run: int  # contexts with work
    tool: int  # contexts that wait for a tool
    free: int  # frames of hbm
    cache: int
    comp: float  # tokens computed
    gen: float  # tokens generated
    hit: float  # full blocks of prompts found in hbm
    load: float  # blocks loaded from slower tiers
    fault: float
    evict: float
    preempt: float
    calls: float
    some: int  # permille of the last 10 s in which somebody waited for frames


def vmstat(
    interval: Annotated[
        float, typer.Argument(metavar="[SECONDS]", help="A line every so often; 0: the counters.", min=0, max=LONGEST_S)
    ] = 0,
    lines: Annotated[int, typer.Argument(metavar="[COUNT]", help="So many lines; 0: until Ctrl-C.", min=0)] = 0,
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """Print the kernel's counters, by name; with SECONDS, what happens per second, a line each time.

    A counter of events is there from its first one on.  Of the lines: RUN contexts have work and TOOL wait for a tool; FREE and
    CACHE are frames of hbm; COMP and GEN are tokens computed and generated per second, HIT full blocks that prompts found in hbm and
    LOAD those loaded from slower tiers, FAULT, EVICT and PREEMPT such events, CALLS system calls; SOME% is the share of the last ten seconds in which
    somebody waited for frames.  12k are 12,000 and more.  With --json every line is a document.
    """
    if source and interval:
        raise CommandError(f"vmstat {interval:g} needs a running system: {source} is a dump, which is only looked at")
    with look_at(socket, "vmstat", source) as system:
        if interval:
            _watch(system, interval, lines, as_json)
            return
        found = system.vmstat()
    if as_json:
        print_json(found)
        return
    made = table("COUNTER", ">VALUE")
    for name, value in sorted(found.counters.items()):
        made.add_row(name, f"{value:,}")
    show(made)


def _watch(system: System, interval: float, lines: int, as_json: bool) -> None:
    try:
        for number, rates in enumerate(watched(system, interval, time.monotonic, time.sleep)):
            if as_json:
                print_json({name: round(value, 1) for name, value in rates._asdict().items()})
            else:
                if number % _HEADER_EVERY == 0:
                    print(_line(_HEADS))
                print(_line([_short(round(value)) for value in (*rates[:-1], rates.some / 10)]), flush=True)
            if number + 1 == lines:
                return
    except KeyboardInterrupt:  # that is how it is ended
        sys.stdout.write("\n" if sys.stdout.isatty() else "")


def watched(
    system: System, interval: float, clock: Callable[[], float], pause: Callable[[float], None]
) -> Iterator[Rates]:
    """Rates, one every `interval` seconds.  The first is of the first interval, not since boot."""
    before = sample(system, clock())
    while True:
        pause(max(0.0, before.at_s + interval - clock()))
        after = sample(system, clock())
        yield between(before, after)
        before = after


def sample(system: System, at_s: float) -> Sample:
    return Sample(at_s, system.vmstat().counters, system.tiers().tiers, system.pressure())


def between(before: Sample, after: Sample) -> Rates:
    """Counters that were not there yet were 0; a system that was booted anew in between starts from 0."""
    seconds = max(1e-3, after.at_s - before.at_s)
    fresh = after.counters.get("syscalls", 0) < before.counters.get("syscalls", 0)

    def per_s(*names: str) -> float:
        was = 0 if fresh else sum(before.counters.get(name, 0) for name in names)
        return (sum(after.counters.get(name, 0) for name in names) - was) / seconds

    hbm = [row for row in after.tiers if row.tier == "hbm"]
    now = after.counters
    loads = [name for name in now if name.startswith("loaded_blocks_")]
    return Rates(
        now.get("contexts_with_work", 0), now.get("contexts_in_tool_wait", 0), sum(row.free_frames for row in hbm),
        sum(row.reclaimable_frames for row in hbm), per_s("computed_tokens"), per_s("generated_tokens"), per_s("lookup_hits"),
        per_s(*loads), per_s("faults"), per_s("evictions"), per_s("preemptions"), per_s("syscalls"), after.pressure.some_permille[0],
    )  # fmt: skip


_HEADS: Final = (*(name.upper() for name in Rates._fields[:-1]), "SOME%")


def _short(number: int) -> str:
    """At most five characters: thousands and millions of what is longer."""
    for unit in ("", "k", "M"):
        if number < (10_000 if unit else 100_000):
            break
        number //= 1000
    return f"{number}{unit}"


def _line(cells: Sequence[str]) -> str:
    """All columns, on 80 of a terminal's."""
    return " ".join(cell.rjust(max(5, len(head))) for cell, head in zip(cells, _HEADS, strict=True))
