"""How every command speaks: one JSON document with `--json`, tables for people else, and errors on standard error.

Exit status: 0 done, 1 the system said no (or is not there), 2 the command line was wrong, 130 interrupted before it was done.
"""

from __future__ import annotations

import codecs
import json
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TextIO, TypeAlias

import typer
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from attnix.syscalls import AttnixError, Client, SyscallError, connect
from attnix.syscalls.exceptions import ConnectionLost
from attnix.syscalls.types import E

from .dumpfile import SavedSystem
from .errors import CommandError, Interrupted, WrongUsage
from .visible import in_json, visible

SocketOption: TypeAlias = Annotated[
    str, typer.Option("--socket", metavar="PATH", help="Daemon's socket (default: $ATTNIX_SOCKET, or the usual place).")
]
FromOption: TypeAlias = Annotated[
    str, typer.Option("--from", metavar="FILE", help="Look at a dump that `attnix dump` made, not at a running system.")
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

# Record fields that travel as packed arrays.
_PACKED: Final = {  # one letter of `array` each
    "frames": "i",
    "shifts": "i",
    "counts": "h",
    "sharers": "i",
    "flags": "B",
    "hits": "i",
    "copies": "B",
    "ages": "i",
    "ends": "i",
}
_PIPE_COLUMNS: Final = 10_000  # a pipe has no edge: nothing is cut off or broken into lines for it
PATIENCE_S: Final = 60.0  # longer than a daemon that lives takes to answer what only looks
_LEAST_TEXT: Final = 12  # columns that a table leaves a text, however narrow the terminal is

System: TypeAlias = Client | SavedSystem  # what a command that only looks may look at


def call_system(socket: str, name: str) -> Client:
    """A connection for one command.  Error: ConnectionLost, which says `attnix boot` when there is no daemon."""
    return connect(socket or None, name=f"attnix {name}")


def look_at(socket: str, name: str, source: str) -> System:
    """The same for a command that only looks, which a daemon answers at once if it answers at all; or the dump that --from
    names.  Error: CommandError when that is no dump."""
    if source:
        return SavedSystem(Path(source))
    return connect(socket or None, name=f"attnix {name}", timeout=PATIENCE_S)


def plain(value: Any, field: str = "") -> Any:
    """A record as JSON can hold it: objects by field name, packed arrays as lists."""
    if isinstance(value, bytes):
        if field == "text":  # bytes of tokens, which need not end at a character
            return value.decode("utf-8", "replace")
        return array(_PACKED.get(field, "i"), value).tolist()
    names = getattr(value, "_fields", None)
    if names is not None:
        return {name: plain(item, name) for name, item in zip(names, value, strict=True)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def is_utf8(stream: TextIO) -> bool:
    """Whether it takes every character."""
    return codecs.lookup(getattr(stream, "encoding", None) or "utf-8").name == "utf-8"


def print_json(value: Any) -> None:
    """One document, one line feed; records are allowed inside."""
    indent = 2 if sys.stdout.isatty() else None
    document = json.dumps(plain(value), ensure_ascii=not is_utf8(sys.stdout), indent=indent)
    sys.stdout.write(f"{in_json(document)}\n")
    sys.stdout.flush()


def console(stderr: bool = False) -> Console:
    """Where text for people goes.  Into a pipe: no colours, and a width that does not depend on the caller.

    Names come from other programs, so nothing in them is taken as markup.
    """
    file = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr, highlight=False, markup=False, emoji=False, width=None if file.isatty() else _PIPE_COLUMNS
    )


def show(what: RenderableType, to: Console | None = None) -> None:
    """Print a table or a line, without the blanks that pad a table's last column."""
    to = to or console()
    columns = _fitted(what, to) if isinstance(what, Table) and to.is_terminal else None
    with to.capture() as captured:
        to.print(_Visible(what, columns), soft_wrap=isinstance(what, str | Text), crop=columns is None)
    to.file.write("".join(f"{line.rstrip(' ')}\n" for line in captured.get().splitlines()))
    to.file.flush()


class _Visible:
    """Whatever is printed, with what would steer the terminal shown: of the text, since the colours are ours."""

    def __init__(self, what: RenderableType, columns: int | None = None) -> None:
        self._what = what
        self._columns = columns  # the width, where it is not the terminal's

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._columns is not None:
            options = options.update(width=self._columns)
        for text, style, control in console.render(self._what, options):
            yield Segment(visible(text), style, control)


def _fitted(made: Table, to: Console) -> int:
    """Give every column its width on this terminal; what all take, which may be more than it has: it breaks the lines then.

    A part of a number is another number, so those are whole.  The space between gives way first, then what may wrap, then texts.
    """
    widths = [max(to.measure(cell).maximum for cell in (each.header, *each.cells)) for each in made.columns]
    gap = made.padding[1]
    over = sum(widths) + gap * (len(widths) - 1) - to.width
    if over > 0 and gap > 1:
        made.padding = (0, 1, 0, 0)
        over, gap = over - (gap - 1) * (len(widths) - 1), 1
    over = _narrowed(made, widths, over, wrapped=True)
    _narrowed(made, widths, over, wrapped=False)
    for column, width in zip(made.columns, widths, strict=True):
        column.width = width
    return max(to.width, sum(widths) + gap * len(widths))


def _narrowed(made: Table, widths: list[int], over: int, *, wrapped: bool) -> int:
    """Take what is too much from the widest texts; what is left of it."""
    texts = [i for i, each in enumerate(made.columns) if each.justify == "left" and each.no_wrap != wrapped]
    while over > 0 and (wide := [i for i in texts if widths[i] > _LEAST_TEXT]):
        widths[max(wide, key=widths.__getitem__)] -= 1
        over -= 1
    return over


def table(*columns: str) -> Table:
    """A plain table.  A column name that starts with `>` is a column of numbers; one that starts with `~` may wrap."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        justify: JustifyMethod = "right" if column.startswith(">") else "left"
        wraps = column.startswith("~")
        made.add_column(
            column.lstrip(">~"), justify=justify, no_wrap=not wraps, overflow="fold" if wraps else "ellipsis"
        )
    return made


def say_error(error: Exception, as_json: bool) -> None:
    """Tell what went wrong; with `--json` also as a document on standard output."""
    if as_json:
        print_json({"error": describe_error(error)})
    print(visible(f"attnix: {error}"), file=sys.stderr)


def describe_error(error: Exception) -> dict[str, Any]:
    """kind, message and, of system calls, errno, call and the detail's fields."""
    if isinstance(error, CommandError) and isinstance(error.__cause__, AttnixError):
        return describe_error(error.__cause__)  # said by a command that has an exit status of its own for it
    if isinstance(error, SyscallError):
        try:
            errno = E(error.errno).name
        except ValueError:
            errno = str(error.errno)
        return {
            "kind": "syscall",
            "message": str(error),
            "errno": errno,
            "call": error.call,
            "detail": dict(error.detail),
        }
    if isinstance(error, ConnectionLost):
        return {"kind": "connection", "message": str(error), "detail": dict(error.detail)}
    return {"kind": "usage" if isinstance(error, WrongUsage) else "command", "message": str(error)}


def cid_number(text: str | int) -> int:
    """A context as commands name it.  A default, which is a number already, stays what it is."""
    try:
        cid = int(text)
    except ValueError:
        cid = 0
    if cid < 1 and not isinstance(text, int):
        raise typer.BadParameter(
            f"{text!r} is no cid: `attnix ps -c` shows the number of each context, `attnix names` of those with a name"
        )
    return cid


__all__ = [
    "AttnixError",
    "CommandError",
    "FromOption",
    "Interrupted",
    "JsonOption",
    "SocketOption",
    "System",
    "call_system",
    "cid_number",
    "console",
    "describe_error",
    "is_utf8",
    "look_at",
    "plain",
    "print_json",
    "say_error",
    "show",
    "table",
]
