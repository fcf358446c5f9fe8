"""`attnix help`: a command and the system calls that it is made of, or a system call by its name."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from attnix.syscalls.abi import BY_NAME, COMMON_ERRNOS, Call

from ..output import JsonOption, print_json, show

# Of commands that are not called as the one call that they make.
CALLS: Final[Mapping[str, tuple[str, ...]]] = {
    "cat": ("read", "pagemap"), "df": ("tiers",), "dump": ("ps", "pagemap", "tiers", "vmstat", "explain", "health", "read"), "free": ("tiers",),
    "group": ("groups", "setlimit"), "group ls": ("groups", "tiers"), "group set": ("setlimit", "tiers"), "lsctx": ("ps", "names"), "nice": ("setpriority", "ps"), "pmap": ("pagemap", "tiers", "ps"),
    "doctor": ("health", "vmstat", "tiers", "sysctl", "uname", "pressure"), "trace": ("trace", "ps", "health", "explain"),
    "strace": ("trace",), "top": ("ps", "tiers", "vmstat", "pressure", "kill", "setpriority"), "tree": ("ps", "pagemap"),
    "vmstat": ("vmstat", "tiers", "pressure"), "run": ("alloc_context", "append", "generate"), "chat": ("alloc_context", "append", "generate"),
    "snapshot": ("open", "snapshot"), "restore": ("restore", "publish", "detach"), "publish": ("open", "publish"),
    "agent": ("wait_tool", "resume", "generate"), "batch": ("fork", "append", "generate"),
}  # fmt: skip


def help_(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="A command (`group ls` is one, too) or a system call."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a command does and which system calls it makes; of a system call its manual.  Without NAME list both."""
    root = context.find_root()
    commands: dict[str, Any] = getattr(root.command, "commands", {})
    *groups, last = names or [""]
    for name in groups:
        commands = getattr(commands.get(name), "commands", {})
    what = " ".join([*groups, last])
    if not what:
        _list(commands, as_json)
        return
    command, call = commands.get(last), BY_NAME.get(what.replace("-", "_"))
    if command is None and call is None:
        raise typer.BadParameter(f"there is neither a command nor a system call {what!r}: `attnix help` lists both")
    made = [BY_NAME[name] for name in CALLS.get(what, (call.name,) if call else ())]
    if as_json:
        about = None if command is None else {"usage": _usage(root, what, command), "help": command.help or ""}
        print_json({"command": about, "calls": [_plain(each) for each in made]})
        return
    if command is not None:
        with type(context)(command, info_name=what, parent=root) as inner:
            text = command.get_help(inner)
        if text:  # typer's own formatter prints instead
            print(text)
    for each in made:
        show(manual(each))


def _list(commands: Mapping[str, Any], as_json: bool) -> None:
    rows = {name: command.get_short_help_str(90) for name, command in sorted(commands.items())}
    if as_json:
        print_json({"commands": rows, "calls": sorted(BY_NAME)})
        return
    for name, about in rows.items():
        show(f"{name:<12} {about}")
    show("\nSystem calls (`attnix help CALL`, docs/syscalls.md):")
    for line in textwrap.wrap(" ".join(sorted(BY_NAME)), 96):
        show(f"  {line}")


def manual(call: Call) -> str:
    """Its entry in the ABI table."""
    arguments = ", ".join(_field(call.args, name) for name in getattr(call.args, "_fields", ()))
    results = ", ".join(getattr(call.result, "_fields", ()))
    errnos = ", ".join(sorted(errno.name for errno in call.errnos - COMMON_ERRNOS)) or "none of its own"
    lines = [
        f"{call.name} ({call.number}), since ABI version {call.since}",
        f"  {call.name}({arguments}) -> ({results})",
    ]
    lines += [f"  {line}" for line in textwrap.wrap(call.manual, 94)]
    return "\n".join([*lines, f"  errnos: {errnos}", ""])


def _field(record: Any, name: str) -> str:
    defaults = getattr(record, "_field_defaults", {})
    return f"{name}={defaults[name]!r}" if name in defaults else name


def _usage(root: Any, name: str, command: Any) -> str:
    with type(root)(command, info_name=name, parent=root) as inner:
        pieces = command.collect_usage_pieces(inner)
    return " ".join(["attnix", name, *pieces])


def _plain(call: Call) -> dict[str, Any]:
    return {
        "name": call.name, "number": call.number, "since": call.since, "manual": call.manual,
        "args": list(getattr(call.args, "_fields", ())), "result": list(getattr(call.result, "_fields", ())),
        "errnos": sorted(errno.name for errno in call.errnos),
    }  # fmt: skip
