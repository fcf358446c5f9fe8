"""Commands that move a context between tiers: prefetch, demote, evict, pin, unpin.

They name a context by its cid, as `attnix ps -c` shows it, or by its name, whoever holds it; the kernel allows it within one uid.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from attnix.syscalls import Client
from attnix.syscalls.types import MovedResult

from ..output import CommandError, JsonOption, SocketOption, call_system, cid_number, print_json, show
from ..units import count
from .durable import WHICH


def name_or_cid(text: str) -> str:
    """As it is.  Error: typer.BadParameter for a number that is no cid."""
    return str(cid_number(text)) if text.isdecimal() else text


ContextArgument: TypeAlias = Annotated[str, typer.Argument(metavar="CTX", help=WHICH, parser=name_or_cid)]


def prefetch(
    which: ContextArgument,
    tier: Annotated[str, typer.Option("--tier", "-t", help="Bring it up to this tier.")] = "hbm",
    deadline_ms: Annotated[int, typer.Option("--deadline-ms", help="Give up after so long; 0: never.", min=0)] = 0,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Bring a context's blocks up to a faster tier, and wait until they are there.  Exit status 1 when some are not."""
    with call_system(socket, "prefetch") as system:
        moved = system.prefetch(0, tier, deadline_ms, cid_of(system, which))
    tell(moved, tier, as_json)


def demote(
    which: ContextArgument,
    tier: Annotated[str, typer.Option("--tier", "-t", help="Copy it down to this tier.")] = "dram",
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Copy a context's blocks down to a slower tier and give the faster frames back.  Exit status 1 when some stay."""
    with call_system(socket, "demote") as system:
        moved = system.demote(0, tier, cid_of(system, which))
    tell(moved, tier, as_json)


def evict(which: ContextArgument, as_json: JsonOption = False, socket: SocketOption = "") -> None:
    """Give a context's frames back in every tier; its log stays, so what is wanted again is computed again."""
    with call_system(socket, "evict") as system:
        moved = system.evict(0, cid_of(system, which))
    tell(moved, "", as_json)


def cid_of(system: Client, which: str) -> int:
    """Of a number, itself; of a name, the context that has it.  Nothing is opened: it stays with whoever holds it.
    Error: CommandError."""
    if which.isdecimal():
        return int(which)
    found = [row.cid for row in system.names(which).rows if row.name == which]
    if not found:
        raise CommandError(f"nothing is named {which!r}: `attnix names` lists what is, `attnix ps -c` every context")
    if len(found) > 1:  # root sees those of all users
        raise CommandError(f"{which!r} names several users' contexts, cids {', '.join(map(str, found))}: give the cid")
    return found[0]


def tell(moved: MovedResult, tier: str, as_json: bool) -> None:
    """What happened.  Error: typer.Exit 1 when a block could not be moved."""
    if as_json:
        print_json(moved)
    elif tier:
        show(f"{_blocks(moved.moved_blocks)} moved, {count(moved.resident_blocks)} in {tier} now")
    else:
        show(f"{_blocks(moved.moved_blocks)} evicted, {count(moved.resident_blocks)} left")
    if moved.failed_blocks:
        if not as_json:
            show(f"{_blocks(moved.failed_blocks)} could not be moved: `attnix explain` and `attnix dmesg` say why")
        raise typer.Exit(1)


def _blocks(number: int) -> str:
    return f"{count(number)} block{'' if number == 1 else 's'}"


def pin(
    which: ContextArgument,
    duration_ms: Annotated[
        int, typer.Option("--duration-ms", help="For so long; 0: as long as sysctl pin.max_ms allows.", min=0)
    ] = 0,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Keep a context in hbm until `unpin` or for a time.  Bounded: a share of the pool, and a deadline."""
    with call_system(socket, "pin") as system:
        cid = cid_of(system, which)
        system.pin(0, duration_ms, cid)
    if as_json:
        print_json({"pinned": cid})


def unpin(which: ContextArgument, as_json: JsonOption = False, socket: SocketOption = "") -> None:
    """Let a pinned context leave hbm again."""
    with call_system(socket, "unpin") as system:
        cid = cid_of(system, which)
        system.unpin(0, cid)
    if as_json:
        print_json({"unpinned": cid})
