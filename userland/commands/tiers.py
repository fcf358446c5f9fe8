"""Commands that add a memory device to a running system and take one away: attach-tier, detach-tier."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..output import JsonOption, SocketOption, call_system, print_json, show
from ..units import parse_size


def attach_tier(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="nvme, remote or sim.")],
    size: Annotated[str, typer.Argument(metavar="SIZE", help="How much it may hold: 4GiB.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="For its driver: path=FILE, url=redis://...")
    ] = None,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Start the driver of a new tier while the system serves, and print the device's name."""
    size_bytes, given = bytes_of(size), settings_of(settings or [])
    with call_system(socket, "attach-tier") as system:
        attached = system.attach_tier(kind, size_bytes, json.dumps(given))
    if as_json:
        print_json(attached)
    else:
        show(attached.device)


def detach_tier(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="As `attnix tiers` shows it: nvme0.")],
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Drain a tier (what only it holds moves elsewhere), then stop its driver."""
    with call_system(socket, "detach-tier") as system:
        system.detach_tier(device)
    if as_json:
        print_json({"detached": device})


def bytes_of(text: str) -> int:
    """Error: typer.BadParameter."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def settings_of(given: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value that is a JSON number, true or false is one, everything else is text."""
    made: dict[str, Any] = {}
    for setting in given:
        name, assigned, value = setting.partition("=")
        if not assigned or not name:
            raise typer.BadParameter(f"{setting!r} is not NAME=VALUE")
        try:
            made[name] = json.loads(value)
        except ValueError:
            made[name] = value
    return made
