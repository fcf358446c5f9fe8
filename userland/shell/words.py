"""What the shell completes and how it takes a line apart: nothing here runs anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

# By the metavar of an argument, or the name of an option: what stands there.
KINDS: Final[Mapping[str, str]] = {
    "PID": "pid", "PID...": "pid", "--pid": "pid", "CTX": "cid", "[CTX]": "cid", "CTX...": "cid", "[NAME[=VALUE]]": "sysctl",
    "GROUP": "group", "RESOURCE": "resource", "FILE": "file", "--from": "file", "--tier": "tier", "--signal": "signal",
    "[NAME]": "command", "DEVICE": "device", "--policy": "policy",
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
    """What may stand where the cursor is.  typed: the part of it that is there."""

    typed: str
    kinds: tuple[str, ...]  # of values
    names: tuple[str, ...]  # commands or options


def wanted(text: str, commands: Mapping[str, Any]) -> Wanted | None:
    """None behind an operator: there the system's shell is spoken to."""
    try:
        text = statements(text)[-1][1] + " " * text[-1:].isspace()
        if split(text).rest:
            return None
        words = shlex.split(text)
    except ValueError:  # inside quotes
        return None
    typed = "" if not text or text[-1].isspace() else words.pop() if words else ""
    if not words:
        return Wanted(typed, (), tuple(sorted([*commands, "exit"])))
    command = commands.get(words[0])
    if command is None:
        return Wanted(typed, (), ())
    rest = words[1:]
    inner = getattr(command, "commands", None)
    if inner is not None:  # group ls
        if not rest:
            return Wanted(typed, (), tuple(sorted(inner)))
        command, rest = inner.get(rest[0]), rest[1:]
        if command is None:
            return Wanted(typed, (), ())
    return _argument(command, rest, typed)


def _argument(command: Any, rest: Sequence[str], typed: str) -> Wanted:
    options = {
        name: p for p in command.params if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)
    }
    before = options.get(rest[-1]) if rest else None
    if before is not None and not before.is_flag:
        kinds = {KINDS[name] for name in (*before.opts, str(before.metavar)) if name in KINDS}
        return Wanted(typed, tuple(kinds), ())
    if typed.startswith("-"):
        return Wanted(typed, (), tuple(sorted([*options, "--help"])))
    given = _positional(rest, options)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    if not arguments:
        return Wanted(typed, (), ())
    argument = arguments[min(given, len(arguments) - 1)]
    if given >= len(arguments) and argument.nargs != -1:
        return Wanted(typed, (), ())
    kind = KINDS.get(str(argument.metavar), "")
    return Wanted(typed, (kind,) if kind else (), ())


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


Values = Callable[[str], Iterable[tuple[str, str]]]
