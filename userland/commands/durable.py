"""Commands about contexts that outlive their programs: names, publish, unlink, snapshot, restore; and sleep, wake."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import typer
from rich.table import Table

from attnix.syscalls import Client
from attnix.syscalls.types import NameRow, OpenResult

from ..output import FromOption, JsonOption, SocketOption, call_system, look_at, print_json, show, table
from ..units import count, size

WHICH: Final = "Its name, or its cid as `attnix names` and `attnix ps -c` show it."
LASTING: Final = "Its name, or its cid, as `attnix names` shows them."
WhichArgument: TypeAlias = Annotated[str, typer.Argument(metavar="CTX", help=LASTING)]


def names(
    prefix: Annotated[str, typer.Argument(metavar="[PREFIX]", help="Only names that begin so.")] = "",
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """List the named and detached contexts of this uid, and whether a program holds them now."""
    with look_at(socket, "names", source) as system:
        found = system.names(prefix)
    if as_json:
        print_json(found)
    else:
        show(name_table(found.rows))


def name_table(rows: tuple[NameRow, ...]) -> Table:
    made = table("NAME", ">CID", ">PID", "HELD", "STATE", ">TOKENS")
    for row in rows:
        held = "yes" if row.held else "-"
        made.add_row(row.name or "(detached)", str(row.cid), str(row.pid), held, row.state, count(row.tokens))
    return made


def publish(
    which: WhichArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name it gets.")],
    replace: Annotated[bool, typer.Option("--replace", help="Take the name from the context that has it.")] = False,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Give a named or detached context that nobody holds a name, or another one.

    What a program holds it publishes itself; a private copy of that is `attnix snapshot` and `attnix restore --as`.
    """
    with call_system(socket, "publish") as system:
        opened = opened_context(system, which, fork=False)
        system.publish(opened.ctx, name, replace)
    if as_json:
        print_json({"name": name, "cid": opened.cid})


def unlink(
    published: Annotated[str, typer.Argument(metavar="NAME", help="As `attnix names` shows it.")],
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Take a name away; its context goes when nobody holds it."""
    with call_system(socket, "unlink") as system:
        system.unlink(published)
    if as_json:
        print_json({"unlinked": published})


def snapshot(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the snapshot.")],
    which: Annotated[list[str], typer.Argument(metavar="CTX...", help=LASTING)],
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Write contexts, as they are now, into one file of the state directory.  Whoever holds them is not disturbed."""
    with call_system(socket, "snapshot") as system:
        forks = tuple(opened_context(system, each, fork=True).ctx for each in which)
        made = system.sys.snapshot(name, forks)
    if as_json:
        print_json(made)
    else:
        kv = f", {size(made.kv_bytes)} of KV" if made.kv_bytes else ""
        contexts = "1 context" if made.contexts == 1 else f"{count(made.contexts)} contexts"
        show(f"{contexts}, {count(made.tokens)} tokens, {size(made.file_bytes)}{kv}")


def restore(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the snapshot.")],
    as_name: Annotated[
        str, typer.Option("--as", metavar="NAME", help="Publish them as NAME, or NAME.0, NAME.1, ... when several.")
    ] = "",
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Make new contexts of those in a snapshot; without --as they are detached, to be opened by cid."""
    with call_system(socket, "restore") as system:
        made = system.sys.restore(name)
        for number, ctx in enumerate(made.ctxs):
            if as_name:
                system.publish(ctx, as_name if len(made.ctxs) == 1 else f"{as_name}.{number}")
            else:
                system.detach(ctx)
    if as_json:
        print_json({"cids": made.cids})
    else:
        show("cid " + ", ".join(map(str, made.cids)))


def sleep(as_json: JsonOption = False, socket: SocketOption = "") -> None:
    """Give all of hbm back and keep every context in the other tiers, until `attnix wake`.  Generations wait for that."""
    with call_system(socket, "sleep") as system:
        system.sleep()
    if as_json:
        print_json({"asleep": True})


def wake(as_json: JsonOption = False, socket: SocketOption = "") -> None:
    """End a sleep."""
    with call_system(socket, "wake") as system:
        system.wake()
    if as_json:
        print_json({"asleep": False})


def opened_context(system: Client, which: str, fork: bool) -> OpenResult:
    """A handle by name, or by cid when it is a number."""
    cid = int(which) if which.isdecimal() else 0
    return system.sys.open("" if cid else which, fork, cid)
