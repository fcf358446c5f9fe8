"""Writes the part of docs/shell.md that is made from the commands.

python -m attnix.userland.shell.manual            write it
python -m attnix.userland.shell.manual --check    exit 1 when it is out of date
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .help import CALLS

DOCS: Final = Path(__file__).resolve().parents[2] / "docs" / "shell.md"
MARK: Final = "<!-- what follows is made from the commands by `python -m attnix.userland.shell.manual`; do not edit -->"
_PANELS: Final = ("Inspector", "Memory", "Contexts that last")
_SAME: Final = ("--json", "--socket", "--from", "--help")


def render(head: str) -> str:
    """`head` is what people wrote; the rest comes from the commands."""
    from ..cli import command

    commands: dict[str, Any] = command().commands
    lines = [head.rstrip(), "", MARK, ""]
    for panel in _PANELS:
        lines += [f"## {panel}", ""]
        for name, found in sorted(commands.items()):
            if getattr(found, "rich_help_panel", None) == panel:
                lines += _section(name, found)
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(name: str, command: Any) -> Iterator[str]:
    inner: Any = getattr(command, "commands", None) or {}
    for sub, found in sorted(inner.items()):
        yield from _one(f"{name} {sub}", found)
    if not inner:
        yield from _one(name, command)


def _one(name: str, command: Any) -> Iterator[str]:
    arguments = " ".join(_metavar(p) for p in command.params if p.param_type_name == "argument")
    looks = any("--from" in p.opts for p in command.params)
    yield f"### {name}"
    yield ""
    yield f"    attnix {f'{name} {arguments}'.strip()}"
    yield ""
    yield from inspect.cleandoc(command.help or "").splitlines()
    yield ""
    options: list[Any] = [p for p in command.params if p.opts[0] not in _SAME and getattr(p, "help", None)]
    if options:
        yield "| | |"
        yield "|---|---|"
        for p in options:
            yield f"| {_spelled(p)} | {p.help} |".replace("NAME=VALUE]]", "NAME=VALUE]")
        yield ""
    calls = ", ".join(f"`{each}`" for each in CALLS.get(name) or CALLS.get(name.split()[0]) or _own(name))
    if calls:
        yield f"System calls: {calls}.{' Also on a dump.' if looks else ''}"
        yield ""


def _own(name: str) -> tuple[str, ...]:
    from attnix.syscalls.abi import BY_NAME

    call = name.replace("-", "_")
    return (call,) if call in BY_NAME else ()


def _spelled(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_metavar(parameter)}`"
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.opts[0].lstrip('-').upper()}"
    return names + value


def _metavar(parameter: Any) -> str:
    if parameter.metavar:
        return str(parameter.metavar)
    name = str(parameter.name).upper()
    return name if parameter.required else f"[{name}]"


def main(arguments: list[str]) -> int:
    """Write or check; the exit status."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    text = DOCS.read_text(encoding="utf-8")
    made = render(text.partition(MARK)[0])
    if made == text:
        return 0
    if arguments:
        print(f"{DOCS} is out of date: run python -m attnix.userland.shell.manual", file=sys.stderr)
        return 1
    DOCS.write_text(made, encoding="utf-8")
    print(f"wrote {DOCS}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
