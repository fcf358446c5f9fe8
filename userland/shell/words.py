"""What the shell completes and how it takes a line apart: nothing here runs anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

# By the metavar or the name of an argument, or the name of an option: what stands there.
KINDS: Final[Mapping[str, str]] = {
    "PID": "pid", "PID...": "pid", "[PID]...": "pid", "--pid": "pid", "CTX": "cid", "[CTX]": "cid", "CTX...": "cid",
    "which": "name", "published": "name", "prefix": "name", "[NAME[=VALUE]]": "sysctl", "GROUP": "group", "[GROUP]": "group",
    "RESOURCE": "resource", "FILE": "file", "--from": "file", "--tier": "tier", "--signal": "signal", "[NAME]...": "manual",
    "DEVICE": "device",
}  # fmt: skip
_REDIRECTS: Final = "|><"
_JOINTS: Final = (";", "&&", "||")
_DESCRIPTOR: Final = re.compile(r"(?<!\S)[0-9]+$")  # before an operator: the 2 of `2> f` is no argument


class Line(NamedTuple):
    """words go to attnix, `rest` with its operator to the system's shell: `ps | grep x > f` is (("ps",), "| grep x > f")."""

    words: tuple[str, ...]
    rest: str


def statements(line: str) -> list[tuple[str, str]]:
    """(joint before it, statement) of each: `a; b && c` is [("", "a"), (";", "b"), ("&&", "c")].  A comment is left out.
    Error: ValueError for what a shell of ours does not do."""
    found: list[tuple[str, str]] = []
    joint, start, skip = "", 0, -1
    end = len(line)
    for at in _bare(line):
        if at <= skip:
            continue
        if line[at] == "#" and (at == 0 or line[at - 1].isspace()):
            end = at
            break
        here = next((each for each in _JOINTS if line.startswith(each, at)), "")
        if here:
            found.append((joint, line[start:at].strip()))
            joint, start, skip = here, at + len(here), at + len(here) - 1
        elif line[at] == "&" and line[at - 1 : at] not in (">", "<"):
            raise ValueError("a command cannot go to the background: open another shell")
    found.append((joint, line[start:end].strip()))
    return found


def split(statement: str) -> Line:
    """Error: ValueError when a quote is not closed."""
    at = next((at for at in _bare(statement) if statement[at] in _REDIRECTS), len(statement))
    if statement[at : at + 1] in (">", "<") and (number := _DESCRIPTOR.search(statement[:at])):
        at = number.start()
    return Line(tuple(shlex.split(statement[:at])), statement[at:].strip())


def _bare(text: str) -> Iterator[int]:
    """Where the characters are that neither quotes nor a backslash protect."""
    quote = ""
    escaped = False
    for at, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            yield at


class Wanted(NamedTuple):
    """What may stand where the cursor is.

    typed   the part of it that is there; as it stands in the line, with quotes and backslashes, that takes `columns`
    kinds   of values
    names   commands or options, each with what typer knows of it
    """

    typed: str
    kinds: tuple[str, ...]
    names: Mapping[str, Any]
    columns: int


def wanted(text: str, commands: Mapping[str, Any]) -> Wanted | None:
    """None behind an operator: there the system's shell is spoken to."""
    try:
        text = statements(text)[-1][1] + " " * text[-1:].isspace()
        if split(text).rest:
            return None
        words = shlex.split(text)
    except ValueError:  # inside quotes
        return None
    begun = max((at + 1 for at in _bare(text) if text[at].isspace()), default=0)
    columns = len(text) - begun
    typed = words.pop() if columns else ""
    if words[:1] == ["attnix"]:  # out of habit
        words = words[1:]
    if not words:
        return Wanted(typed, (), {**commands, "exit": None}, columns)
    command = commands.get(words[0])
    rest = words[1:]
    inner = getattr(command, "commands", None)
    if inner is not None:  # group ls
        if not rest:
            return Wanted(typed, (), inner, columns)
        command, rest = inner.get(rest[0]), rest[1:]
    if command is None:
        return Wanted(typed, (), {}, columns)
    return Wanted(typed, *_argument(command, rest, typed), columns)


def _argument(command: Any, rest: Sequence[str], typed: str) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Kinds and names."""
    options = {
        name: p for p in command.params if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)
    }
    before = options.get(rest[-1]) if rest else None
    if before is not None and not before.is_flag:
        return _kinds(*before.opts, before.metavar), {}
    if typed.startswith("-"):
        return (), {**options, "--help": None}
    given = _positional(rest, options)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    if given >= len(arguments) and not (arguments and arguments[-1].nargs == -1):
        return (), {}
    argument = arguments[min(given, len(arguments) - 1)]
    return _kinds(argument.metavar, argument.name), {}


def _kinds(*names: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(KINDS[name] for name in names if name is not None and name in KINDS))


def _positional(rest: Sequence[str], options: Mapping[str, Any]) -> int:
    found = 0
    words = iter(rest)
    for word in words:
        if word.startswith("-") and len(word) > 1:
            option = options.get(word)
            if option is not None and not option.is_flag:
                next(words, None)
        else:
            found += 1
    return found


def matching(typed: str, found: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """(text, meaning) of what begins as typed, in order, once each."""
    seen: set[str] = set()
    for text, meaning in found:
        if text.startswith(typed) and text not in seen:
            seen.add(text)
            yield text, meaning
