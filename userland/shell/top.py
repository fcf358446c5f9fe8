"""`attnix top`: who uses what, live; the display is top_app.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import typer
from rich.table import Table

from attnix.syscalls.client import LONGEST_S
from attnix.syscalls.types import PressureResult, ProcessRow, TierRow

from ..output import FromOption, JsonOption, SocketOption, System, look_at, print_json, show, table
from ..units import age, count, size
from .vmstat import Rates, Sample, between, sample
from .waits import soonest

SORTS: Final = ("tokens_s", "kv", "pss", "tokens", "age", "pid")


class Seen(NamedTuple):
    """One look.  rates: since the look before, None of the first.  tokens_s: by pid."""

    sample: Sample
    processes: tuple[ProcessRow, ...]
    rates: Rates | None
    tokens_s: Mapping[int, float]


def top(
    interval: Annotated[
        float, typer.Option("--interval", "-i", help="Seconds between two looks.", min=0.1, max=LONGEST_S)
    ] = 1.0,
    sort: Annotated[str, typer.Option("--sort", "-s", help=f"By {', '.join(SORTS)}.")] = SORTS[0],
    once: Annotated[bool, typer.Option("--once", help="Print two looks' difference as text and end.")] = False,
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """Show processes by what they use, with tokens per second, hit rates per tier and pressure, live.

    A tier's hit rate is its share of all blocks that admissions looked for, in the last ten looks; with the blocks that were computed,
    the shares add up to 100%.  Text tells them since boot.

    Keys: t k p n a i sort by tokens/s, KV, PSS, tokens, age, pid; arrows choose a process, x ends it, z stops it and lets it go on,
    + and - make it nicer or less nice, q leaves.  With --once, --json, --from or without a terminal: text, once.
    """
    if sort not in SORTS:
        raise typer.BadParameter(f"--sort is one of {', '.join(SORTS)}, not {sort!r}")
    with look_at(socket, "top", source) as system:
        if not (once or as_json or source) and sys.stdin.isatty() and sys.stdout.isatty():
            from .top_app import TopApp

            TopApp(system, interval, sort).run()
            return
        seen = look(system, None)
        if not source:
            time.sleep(interval)
            seen = look(system, seen)
    if as_json:
        print_json(_plain(seen))
        return
    for line in summary(seen):
        show(line)
    show("")
    show(process_table(ordered(seen, sort), seen))


def look(system: System, before: Seen | None) -> Seen:
    """What is there now, and what has happened since `before`."""
    at_s = time.monotonic()
    now = sample(system, at_s)
    own = system.server.pid
    processes = tuple(row for row in system.ps().processes if row.pid != own)
    if before is None:
        return Seen(now, processes, None, {})
    seconds = max(1e-3, at_s - before.sample.at_s)
    was = {row.pid: row.usage for row in before.processes}
    done = {
        row.pid: row.usage.computed_tokens - (was[row.pid].computed_tokens if row.pid in was else 0)
        for row in processes
    }
    return Seen(now, processes, between(before.sample, now), {pid: max(0, n) / seconds for pid, n in done.items()})


def hit_rates(
    tiers: Sequence[TierRow], counters: Mapping[str, int], since: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Of the blocks that admissions looked for, the share found in each tier; in all since `since`, or since boot.

    What each was found in or not is counted when it is looked for, so the shares and what was computed add up to 1.  {}: nothing
    was looked for.
    """

    def grown(name: str) -> int:
        return counters.get(name, 0) - (since.get(name, 0) if since else 0)

    looked = sum(map(grown, ("lookup_hits", "fault_blocks", "lookup_misses")))
    if looked <= 0:
        return {}
    found = {row.tier: grown(f"found_blocks_{row.tier}") for row in tiers}
    if "hbm" in found:  # on the device that looked; what another one had was loaded
        found["hbm"] += grown("lookup_hits")
    return {tier: blocks / looked for tier, blocks in found.items()}


def summary(seen: Seen) -> list[str]:
    """The lines above the table."""
    rates, counters = seen.rates, seen.sample.counters
    processes, contexts = len(seen.processes), sum(len(row.contexts) for row in seen.processes)
    lines = [
        f"{processes} process{'es' * (processes != 1)}, {contexts} context{'s' * (contexts != 1)}, "
        f"{counters.get('contexts_with_work', 0)} with work, {counters.get('contexts_in_tool_wait', 0)} wait for tools"
    ]
    if rates is not None:
        lines.append(
            f"{rates.comp:,.0f} tokens/s computed, {rates.gen:,.0f} generated; per second {rates.evict:,.1f} evictions, "
            f"{rates.load:,.1f} loads, {rates.preempt:,.1f} preemptions"
        )
    for row in seen.sample.tiers:
        used = row.capacity_frames - row.free_frames - row.reclaimable_frames
        lines.append(f"{row.device:<8} {bar(used, row.reclaimable_frames, row.capacity_frames)} {_share(row, used)}")
    found = hit_rates(seen.sample.tiers, counters)
    if found:
        shares = ", ".join(f"{share:.0%} {tier}" for tier, share in found.items())
        lines.append(f"blocks looked for since boot: {shares}, {1 - sum(found.values()):.0%} computed")
    lines.append(pressure_text(seen.sample.pressure))
    return lines


def bar(used: int, cache: int, capacity: int, columns: int = 30) -> str:
    """`#####===.....`: used, cache, free."""
    if not capacity:
        return "." * columns
    first = -(-used * columns // capacity)
    second = min(columns - first, -(-cache * columns // capacity))
    return "#" * first + "=" * second + "." * (columns - first - second)


def _share(row: TierRow, used: int) -> str:
    sizes = [size(frames * row.frame_bytes) for frames in (used, row.reclaimable_frames, row.capacity_frames)]
    return f"{sizes[0]} used, {sizes[1]} cache of {sizes[2]}" + ("" if row.state == "up" else f", {row.state}")


def pressure_text(seen: PressureResult) -> str:
    some, full = (
        "/".join(f"{each / 10:.1f}" for each in shares) for shares in (seen.some_permille, seen.full_permille)
    )
    limit = f"; the thrash guard lets {seen.admitted_limit} contexts run" if seen.admitted_limit else ""
    return f"waited for frames (10/60/300 s): somebody {some}%, everybody {full}%{limit}"


def ordered(seen: Seen, sort: str) -> list[ProcessRow]:
    """Most first, but for pid; equals by pid."""
    keys: dict[str, Callable[[ProcessRow], float]] = {
        "tokens_s": lambda row: -seen.tokens_s.get(row.pid, 0.0), "kv": lambda row: -row.kv_bytes,
        "pss": lambda row: -row.proportional_bytes, "tokens": lambda row: -row.tokens, "age": lambda row: -row.age_ns,
        "pid": lambda row: row.pid,
    }  # fmt: skip
    return sorted(seen.processes, key=lambda row: (keys[sort](row), row.pid))


COLUMNS: Final = (
    ">PID", "GROUP", "NAME", "STATE", ">NI", ">CTX", ">TOK/S", ">TOKENS", ">KV", ">PSS", ">AGE", "TOOL", ">UNTIL"
)  # fmt: skip


def cells(row: ProcessRow, seen: Seen) -> tuple[str, ...]:
    """One line of the table."""
    group = row.group.removeprefix("uid:") or str(row.uid)
    return (
        str(row.pid), group, row.name or "-", row.state, str(row.nice), str(len(row.contexts)),
        count(round(seen.tokens_s.get(row.pid, 0.0))), count(row.tokens), size(row.kv_bytes), size(row.proportional_bytes),
        age(row.age_ns), *soonest(row.contexts),
    )  # fmt: skip


def process_table(rows: Sequence[ProcessRow], seen: Seen) -> Table:
    made = table(*COLUMNS)
    for row in rows:
        made.add_row(*cells(row, seen))
    return made


def _plain(seen: Seen) -> dict[str, object]:
    return {
        "processes": seen.processes, "tokens_s": {str(pid): round(n, 1) for pid, n in seen.tokens_s.items()},
        "rates": None if seen.rates is None else {name: round(n, 2) for name, n in seen.rates._asdict().items()},
        "hit_rates": hit_rates(seen.sample.tiers, seen.sample.counters), "tiers": seen.sample.tiers,
        "pressure": seen.sample.pressure,
    }  # fmt: skip
