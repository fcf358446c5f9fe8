"""A dump: what a system answered to the calls that only look, in one file, and a system made of such a file.

The file is JSON, a call a line: {"attnix_dump": 1, "at": ..., "server": [...], "calls": [{"call", "args", "result"}, ...]},
records as arrays in the ABI's order (syscalls/records.py reads older and newer ones), bytes as {"b64": "..."}.  A call that
was refused is there with its error, and is refused again.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar, cast

from attnix.syscalls import SyscallError
from attnix.syscalls.abi import BY_NAME, Record
from attnix.syscalls.exceptions import NotFound, syscall_error
from attnix.syscalls.records import build, trimmed
from attnix.syscalls.stubs import SyncPlainCalls
from attnix.syscalls.types import (
    DmesgArgs,
    DmesgResult,
    E,
    ExplainArgs,
    ExplainResult,
    GroupsArgs,
    GroupsResult,
    HealthArgs,
    HelloResult,
    LookArgs,
    NamesArgs,
    NamesResult,
    PagemapResult,
    PsArgs,
    PsResult,
    ReadArgs,
    ReadResult,
    SysctlArgs,
    SysctlResult,
)

from .errors import CommandError

VERSION: Final = 1
_MARK: Final = "attnix_dump"
_GZIP: Final = b"\x1f\x8b"
# What a dump of this version always has an answer of.
_LOOKS: Final = frozenset({
    "dmesg", "explain", "fsck", "groups", "health", "names", "pressure", "ps", "sysctl", "tiers", "uname", "vmstat",
})  # fmt: skip
R = TypeVar("R", bound=tuple[Any, ...])


class Answer(NamedTuple):
    """One call of a dump.  error: (errno, detail) of a call that was refused, None of one that was not."""

    call: str
    args: Record
    result: Record
    error: tuple[int, Mapping[str, Any]] | None = None


class Dump(NamedTuple):
    """at: UTC, as text."""

    at: str
    server: HelloResult
    answers: tuple[Answer, ...]


def take(at: str, server: HelloResult, asked: Iterable[tuple[str, Callable[[], Any], Record]]) -> Dump:
    """Ask, and keep the answers, refusals too.  A context that ends meanwhile is left out.  asked: (call, ask, args)."""
    answers = []
    for call, ask, args in asked:
        try:
            answers.append(Answer(call, args, ask()))
        except NotFound:
            continue
        except SyscallError as error:
            answers.append(Answer(call, args, (), (error.errno, dict(error.detail))))
    return Dump(at, server._replace(session="", contexts=()), tuple(answers))


def write(path: Path, dump: Dump) -> int:
    """Whole or not at all; how many bytes.  For this user alone: it says what others do.  Error: CommandError."""
    lines = [json.dumps(_answer_json(answer), ensure_ascii=False) for answer in dump.answers]
    head = json.dumps({_MARK: VERSION, "at": dump.at, "server": _plain(dump.server)})[:-1]
    text = f'{head}, "calls": [\n' + ",\n".join(lines) + "\n]}\n"
    if path.is_symlink() and (path.is_file() or not path.exists()):  # /dev/stdout into a file is one, too
        raise CommandError(f"{path} is a link, and what is replaced would be the link: name the file itself")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe takes it, and stays what it is
            path.write_text(text, encoding="utf-8")
            return len(text.encode())
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from error
    return len(text.encode())


def read(path: Path) -> Dump:
    """Error: CommandError when it is no dump, or not one that this version can read."""
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP):  # as it is sent from one machine to another
            data = gzip.decompress(data)
        document = json.loads(data.decode(), parse_constant=_no_number)
    except gzip.BadGzipFile as error:
        raise CommandError(f"{path} is no dump, or only a part of one: {error}") from error
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError, EOFError, zlib.error) as error:
        raise CommandError(f"{path} is no dump, or only a part of one: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get(_MARK), int):
        raise CommandError(f"{path} is no dump: `attnix dump FILE` makes one")
    if document[_MARK] != VERSION:
        raise CommandError(f"{path} is a dump of version {document[_MARK]}; this attnix reads version {VERSION}")
    try:
        server = build(HelloResult, _packed(document["server"]))
        return Dump(str(document["at"]), server, tuple(_answer(each) for each in document["calls"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CommandError(f"{path} is damaged: {error}") from error


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _answer_json(answer: Answer) -> dict[str, Any]:
    said: dict[str, Any] = {"call": answer.call, "args": _plain(trimmed(answer.args))}
    if answer.error is None:
        said["result"] = _plain(answer.result)
    else:
        said["error"] = [answer.error[0], dict(answer.error[1])]
    return said


def _answer(said: dict[str, Any]) -> Answer:
    call = BY_NAME[said["call"]]
    args = build(call.args, _packed(said["args"]))
    if "error" in said:
        errno, detail = said["error"]
        return Answer(call.name, args, (), (int(errno), dict(detail)))
    result = build(call.result, _packed(said["result"]))
    if not _fits(result):
        raise ValueError(f"an answer of {call.name} has columns that do not fit together")
    return Answer(call.name, args, result)


def _fits(result: Any) -> bool:
    """Packed arrays as a system sends them: whoever reads them counts on it."""
    match result:
        case PagemapResult():
            blocks = len(result.flags)
            wide = (result.frames, result.shifts, result.sharers, result.hits)
            counted = all(len(column) == 4 * blocks for column in wide) and len(result.counts) == 2 * blocks
            return counted and len(result.ages) % 4 == 0 and result.block_tokens > 0
        case ReadResult():
            return len(result.tokens) % 4 == 0 and len(result.ends) in (0, len(result.tokens))
    return True


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"b64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {"map": dict(value)}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _packed(value: Any) -> Any:
    if isinstance(value, list):
        return [_packed(each) for each in value]
    if isinstance(value, dict):
        return value["map"] if "map" in value else base64.b64decode(value["b64"], validate=True)
    return value


class SavedSystem(SyncPlainCalls):
    """A system that always answers what the dump says.  What acts, and what it was not asked then, is a CommandError."""

    def __init__(self, path: Path) -> None:
        dump = read(path)
        self.path: Final = str(path)
        self.at: Final = dump.at
        self.server: Final = dump.server
        self._answers: Final = {(answer.call, tuple(trimmed(answer.args))): answer for answer in dump.answers}

    def has(self, name: str, args: Record) -> bool:
        """Whether exactly that was asked then."""
        return (name, tuple(trimmed(args))) in self._answers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def _invoke(self, name: str, args: Record, result: type[R]) -> R:
        return cast(R, self._answer(name, args))

    def _answer(self, name: str, args: Record) -> Record:
        """As it was asked then, or out of the answer to a wider question."""
        found = self._answers.get((name, tuple(trimmed(args))))
        if found is not None:
            if found.error is not None:
                raise syscall_error(found.error[0], dict(found.error[1]), name)
            return found.result
        return self._narrowed(name, args)

    def _narrowed(self, name: str, args: Record) -> Record:
        """Error: NotFound, as the system would say, or CommandError."""
        match args:
            case PsArgs(pid) if pid:
                rows = [row for row in self.ps().processes if row.pid == pid]
                return PsResult((*rows,)) if rows else self._absent(name, f"no process {pid}")
            case LookArgs(_, cid) if name == "stat":
                contexts = [c for row in self.ps().processes for c in row.contexts if c.cid == cid]
                return contexts[0] if contexts else self._absent(name, f"no context {cid} of this user")
            case LookArgs(_, cid) if name == "pagemap":
                return self._absent(name, f"no context {cid} of this user")
            case ReadArgs(_, cid, start, end) if (start, end) == (0, -1):
                self.stat(0, cid)
                raise CommandError(f"{self.path} has no text: it was made without `attnix dump --text`")
            case ReadArgs(_, cid, start, end):
                return _part(self.read(0, cid), start, end)
            case SysctlArgs(setting, None):
                found = [r for r in self.sysctl().rows if r.name == setting or _listed(r.name, setting)]
                return SysctlResult((*found,)) if found else self._absent(name, f"no tunable {setting}")
            case GroupsArgs(group) if group:
                groups = [row for row in self.groups().rows if row.name == group]
                return GroupsResult((*groups,)) if groups else self._absent(name, f"no group {group}")
            case NamesArgs(prefix) if prefix:
                return NamesResult(tuple(row for row in self.names().rows if row.name.startswith(prefix)))
            case HealthArgs(heads) if heads:  # what prompts began with is in a dump with text only
                return self.health(0)
            case DmesgArgs(since) if since:
                return DmesgResult(tuple(row for row in self.dmesg().rows if row.number > since))
            case ExplainArgs(_, cid, block) if cid or block >= 0:
                rows_ = [r for r in self.explain().rows if cid in (0, r.cid)]
                return ExplainResult(
                    tuple(r for r in rows_ if block < 0 or r.block <= block < r.block + max(1, r.blocks))
                )
        if name in _LOOKS and not (isinstance(args, SysctlArgs) and args.value is not None):
            raise CommandError(f"{self.path} has no answer of {name}: another version of attnix took it")
        raise CommandError(f"{name} needs a running system: {self.path} is a dump, which is only looked at")

    def _absent(self, name: str, message: str) -> Record:
        raise syscall_error(int(E.ENOENT), {"message": f"{message} in {self.path}"}, name)


def _listed(name: str, prefix: str) -> bool:
    return prefix.endswith(".") and name.startswith(prefix)


def _part(whole: ReadResult, start: int, end: int) -> ReadResult:
    length = len(whole.tokens) // 4
    end = length if end < 0 else min(end, length)
    ends = [0, *memoryview(whole.ends).cast("i")] if whole.ends else []
    text = whole.text[ends[start] : ends[end]] if ends else b""
    moved = b"".join((at - ends[start]).to_bytes(4, "little") for at in ends[start + 1 : end + 1])
    return ReadResult(whole.cid, start, whole.tokens[4 * start : 4 * end], text, moved)
