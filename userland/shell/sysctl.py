"""`attnix sysctl`: read and set tunables."""

from __future__ import annotations

from typing import Annotated

import typer

from ..output import FromOption, JsonOption, SocketOption, look_at, print_json, show, table


def sysctl(
    setting: Annotated[
        str, typer.Argument(metavar="[NAME[=VALUE]]", help="One, a prefix `sched.`, or NAME=VALUE.")
    ] = "",
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """List tunables, show one, or set one with NAME=VALUE."""
    name, assigned, value = setting.partition("=")
    if assigned and not name:
        raise typer.BadParameter("write NAME=VALUE")
    with look_at(socket, "sysctl", source) as system:
        found = system.sysctl(name, value) if assigned else system.sysctl(name)
    if as_json:
        print_json(found)
        return
    made = table("NAME", ">VALUE", "~MEANING")
    for row in found.rows:
        made.add_row(row.name, str(row.value), row.meaning)
    show(made)
