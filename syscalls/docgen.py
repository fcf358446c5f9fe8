"""Writes what is made from the ABI table: `docs/syscalls.md` and the client stubs `syscalls/stubs.py`.

python -m attnix.syscalls.docgen            write both
python -m attnix.syscalls.docgen --check    exit 1 and say so when either is out of date
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any, Final

from attnix.kernel import calls, params
from attnix.kernel.errors import E

from . import abi

ROOT: Final = Path(__file__).resolve().parent.parent
DOCS: Final = ROOT / "docs" / "syscalls.md"
STUBS: Final = ROOT / "syscalls" / "stubs.py"

# The pleasant client takes or returns objects in these, so they are kept apart from the calls that it simply inherits.
OBJECT_CALLS: Final = ("alloc_context", "spawn", "open", "snapshot", "restore")

_WIDTH: Final = 120  # the formatter's line length

_ERRNO_MEANING: Final[dict[str, str]] = {
    "ENOENT": "there is no such process, context, name or child",
    "EIO": "a device or worker failed and no retry helped",
    "E2BIG": "more than can ever fit; both numbers are in the detail",
    "EBADF": "not a handle of this connection",
    "EAGAIN": "not now: try again after `retry_after_ms`",
    "ENOMEM": "not enough frames or slots (`wanted`, `free`, `reclaimable`)",
    "EACCES": "it belongs to another uid",
    "EBUSY": "the object is in use in a way that excludes this call; by whom is in the detail",
    "EEXIST": "the name is taken",
    "ENODEV": "no such device, or it cannot do this",
    "EINVAL": "an argument is wrong; `field` names it",
    "ENOSPC": "the file system or device is full",
    "ENOSYS": "this version or this configuration has no such call",
    "ECORRUPT": "stored content failed its checksum or identity check",
    "ETIMEDOUT": "the time that the caller gave is over",
    "EHOSTDOWN": "the device's driver is down and not coming back",
    "ESTALE": "the handle was released",
    "EDQUOT": "the group's limit is reached",
    "ECANCELED": "cancelled by the caller, or the system is going down",
}


def _fields(record: type[abi.Record]) -> list[tuple[str, str, str]]:
    """(name, type, default or "") of each field."""
    defaults: dict[str, Any] = getattr(record, "_field_defaults", {})
    annotations: dict[str, str] = {name: _spelled(kind) for name, kind in record.__annotations__.items()}
    return [(name, kind, _literal(defaults[name]) if name in defaults else "") for name, kind in annotations.items()]


def _literal(value: object) -> str:
    return repr(value).replace("'", '"')  # as ruff would write it; no default holds a quote


def _spelled(annotation: object) -> str:
    if isinstance(annotation, typing.ForwardRef):  # NamedTuple keeps string annotations so
        return annotation.__forward_arg__
    return str(annotation)


def _field_comments(record: type[abi.Record]) -> dict[str, str]:
    """The trailing comment of each field's line: the source is where the meaning of a field is written."""
    comments: dict[str, str] = {}
    for line in inspect.getsource(record).splitlines():
        name, colon, rest = line.strip().partition(":")
        if colon and name.isidentifier() and "  # " in rest:
            comments[name] = rest.split("  # ", 1)[1].strip()
    return comments


def _is_record(kind: object) -> bool:
    return isinstance(kind, type) and hasattr(kind, "_fields")


def _nested(record: type[abi.Record], seen: list[type[abi.Record]]) -> None:
    """Collect into `seen` the records that a record's fields hold, depth first."""
    for kind in typing.get_type_hints(record).values():
        for part in (kind, *typing.get_args(kind)):
            if _is_record(part) and part not in seen:
                seen.append(part)
                _nested(part, seen)


def _table(record: type[abi.Record]) -> list[str]:
    comments = _field_comments(record)
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    for name, kind, default in _fields(record):
        kind, default = f"`{kind}`".replace("|", "\\|"), f"`{default}`" if default else ""
        lines.append(f"| `{name}` | {kind} | {default} | {comments.get(name, '').replace('|', chr(92) + '|')} |")
    return lines


def render_docs() -> str:
    """The whole of docs/syscalls.md."""
    out = [
        "# System calls",
        "",
        "Made from the table in `syscalls/abi.py` by `python -m attnix.syscalls.docgen`; do not edit.",
        "",
        f"ABI version {params.ABI_VERSION}. {len(abi.CALLS)} calls.",
        "",
        "## On the wire",
        "",
        textwrap.dedent(
            f"""\
            A Unix stream socket. Each message is a 4-byte little-endian length and then one MessagePack array:

                request        [id, number, args]        id: 1 .. 2^63-1, not outstanding on this connection
                reply          [id, 0, result]           or [id, errno, detail]
                notification   [0, kind, payload]        kind is a string
                complaint      [0, errno, detail]        to a message that had no usable id

            `args`, `result` and `payload` are arrays with the fields of the tables below, in order; fields at the end that have a
            default may be left out. `detail` is a map and always has `message`. Arrays of token ids travel as `bin`,
            little-endian int32. A message is at most {params.MAX_MESSAGE_BYTES >> 20} MiB, and a connection has at most
            {params.MAX_REQUESTS} requests outstanding.

            What is wrong is answered, once, and the connection goes on: a message over the limit (E2BIG; it is skipped), bytes that
            are not MessagePack or not an array of three (EINVAL), an unknown number (ENOSYS), a field of the wrong type (EINVAL with
            `field`), an id that is outstanding (EINVAL under id 0 with `request`, so that it cannot be taken for the answer to the
            first). The answer carries the message's id where one could be read, else 0. Only a length of {16 * params.MAX_MESSAGE_BYTES >> 20} MiB or more, which
            no sender can mean, is lost framing: it is answered with `closing` in the detail, and the connection closes.

            Requests of one connection are taken in order, so they can be pipelined. A client that shuts down its sending side still
            gets its answers; one that closes has everything it held released at once, its generations included. More than
            {params.MAX_UNREAD_BYTES >> 20} MiB unread by a client pauses its generations until it reads on."""
        ),
        "",
        "## Words",
        "",
        "```",
        inspect.cleandoc(calls.__doc__ or "").split("\n\n")[-1],
        "```",
        "",
        "## Errnos",
        "",
        "Every error means that nothing was done.",
        "",
        "| errno | number | meaning |",
        "|---|---|---|",
        *[f"| {e.name} | {int(e)} | {_ERRNO_MEANING[e.name]} |" for e in E],
        "",
        "Every call may return " + ", ".join(sorted(e.name for e in abi.COMMON_ERRNOS)) + ".",
        "",
    ]
    nested: list[type[abi.Record]] = []
    for group in abi.GROUPS:
        out += [f"## {group[0].upper()}{group[1:]}", ""]
        for call in abi.CALLS:
            if call.group == group:
                out += _call_section(call)
                _nested(call.args, nested)
                _nested(call.result, nested)
    out += ["## Notifications", ""]
    for kind, record in abi.NOTIFICATIONS.items():
        out += [f"### {kind}", "", inspect.cleandoc(record.__doc__ or ""), "", *_table(record), ""]
    results = {call.result for call in abi.CALLS}
    out += ["## Records inside records", ""]
    for record in nested:
        if record not in results:
            out += [f"### {record.__name__}", "", *_table(record), ""]
    out += ["## Reserved", "", "Numbers that a later version fills; ENOSYS until then.", ""]
    out += [", ".join(f"{name} ({number})" for number, name in sorted(abi.RESERVED.items())) + "."]
    return "\n".join(out) + "\n"


def _call_section(call: abi.Call) -> list[str]:
    out = [f"### {call.name} ({call.number})", "", call.manual, ""]
    if _fields(call.args):
        out += ["Arguments:", "", *_table(call.args), ""]
    if _fields(call.result):
        out += [f"Result (`{call.result.__name__}`):", "", *_table(call.result), ""]
    errnos = sorted(e.name for e in call.errnos - abi.COMMON_ERRNOS)
    out += [f"Errnos: {', '.join(errnos) if errnos else 'only the common ones'}. Since version {call.since}.", ""]
    return out


def render_stubs() -> str:
    """The whole of syscalls/stubs.py: a typed method per call, once blocking and once asynchronous."""
    names = {call.args.__name__ for call in abi.CALLS} | {call.result.__name__ for call in abi.CALLS}
    nested: list[type[abi.Record]] = []
    for call in abi.CALLS:
        _nested(call.args, nested)
    names |= {record.__name__ for record in nested}
    out = [
        '"""A typed method for every system call.  Made by `python -m attnix.syscalls.docgen`; do not edit."""',
        "",
        "from __future__ import annotations",
        "",
        "from abc import ABC, abstractmethod",
        "from typing import Any, TypeVar",
        "",
        "from attnix.kernel.calls import (",
        *[f"    {name}," for name in sorted(names)],
        ")",
        "",
        "from .abi import Record",
        "",
        'R = TypeVar("R", bound=tuple[Any, ...])',
        "",
    ]
    plain = [call for call in abi.CALLS if call.name not in OBJECT_CALLS]
    makers = [call for call in abi.CALLS if call.name in OBJECT_CALLS]
    for word, define, wait in (("Sync", "def", ""), ("Async", "async def", "await ")):
        said = "blocking" if word == "Sync" else "asynchronous"
        out += [
            "",
            f"class {word}PlainCalls(ABC):",
            f'    """The {said} calls whose results need no object around them."""',
            "",
            "    @abstractmethod",
            f"    {define} _invoke(self, name: str, args: Record, result: type[R]) -> R: ...",
            "",
            *[line for call in plain for line in _method(call, define, wait)],
            "",
            f"class {word}Calls({word}PlainCalls):",
            f'    """Every system call, {said}, on bare handles."""',
            "",
            *[line for call in makers for line in _method(call, define, wait)],
        ]
    return "\n".join(out).rstrip("\n") + "\n"


def _method(call: abi.Call, define: str, wait: str) -> list[str]:
    fields = _fields(call.args)
    parameters = ["self"] + [f"{name}: {kind}" + (f" = {default}" if default else "") for name, kind, default in fields]
    returns = "None" if call.result is calls.Empty else call.result.__name__
    signature = _wrapped(f"    {define} {call.name}(", parameters, f") -> {returns}:")
    doc = textwrap.wrap(call.manual.replace("\\", "\\\\"), 108)
    made = f"{call.args.__name__}({', '.join(name for name, _, _ in fields)})"
    start = f"{wait}self._invoke(" if returns == "None" else f"return {wait}self._invoke("
    body = f'        {start}"{call.name}", {made}, {call.result.__name__})'
    if len(body) > _WIDTH:
        made = _wrapped(f"        args = {call.args.__name__}(", [name for name, _, _ in fields], ")")
        body = f'{made}\n        {start}"{call.name}", args, {call.result.__name__})'
    lines = [signature]
    if len(doc) == 1:
        lines += [f'        """{doc[0]}"""']
    else:
        lines += [f'        """{doc[0]}', *[f"        {line}" for line in doc[1:]], '        """']
    return [*lines, body, ""]


def _wrapped(head: str, items: list[str], tail: str) -> str:
    """`head item, item tail` as the formatter would lay it out: on one line, with the items on a line, or one a line."""
    one = f"{head}{', '.join(items)}{tail}"
    if len(one) <= _WIDTH:
        return one
    indent = " " * (len(head) - len(head.lstrip()))
    inner = f"{indent}    {', '.join(items)}"
    if len(inner) > _WIDTH:
        inner = "\n".join(f"{indent}    {item}," for item in items)
    return f"{head}\n{inner}\n{indent}{tail}"


def main(arguments: list[str]) -> int:
    """Write or check the generated files; the exit status."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    stale = 0
    for path, wanted in ((DOCS, render_docs()), (STUBS, render_stubs())):
        if path.exists() and path.read_text() == wanted:
            continue
        if arguments:
            print(f"{path} is out of date: run python -m attnix.syscalls.docgen", file=sys.stderr)
            stale = 1
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted)
            print(f"wrote {path}")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
