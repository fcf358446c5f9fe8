"""The journal on disk: a SQLite database in WAL mode, in the state directory.

One transaction per dispatcher turn that changed something, committed before the turn's answers are written.  The commit
is done right here, in the daemon's one thread: measured, it is 14 µs (p99 85 µs), less than it costs to hand it to
anybody.  That is `synchronous=NORMAL`: the pages are in the operating system's hands when a client hears of them, so
nothing is lost when the daemon is killed; a power cut may take the last turns and leaves what is before them whole.
`FULL` would wait for the disk in every turn (201 µs here, milliseconds on others), for all clients, which a cache of
conversations is not worth.  What does wait for the disk, the checkpoint, is done by a short-lived process beside us.

A journal that cannot be read is moved aside and boot goes on with a new one; ids then go on from the time of day, so that
none is given twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from attnix.kernel.calls import GenerateResult
from attnix.kernel.errors import Detail, E
from attnix.kernel.events import Restored
from attnix.kernel.journal import (
    ContextRecord,
    DropRecord,
    Generation,
    JournalRecord,
    LogRecord,
    MarkRecord,
    RestoredContext,
    ToolRecord,
)

from .ports import Failure

FORMAT: Final = 1
CHECKPOINT_BYTES: Final = 4 << 20  # of WAL, before somebody is sent to move it into the database
TRANSACTION_BYTES: Final = 16 << 10  # of WAL that a transaction takes besides its tokens: the pages that it touches
RETRY_S: Final = 1.0  # between attempts to write to a disk that refuses
MOST_UNSAVED: Final = 100_000  # records kept for a disk that refuses; after that the journal is off
_NOT_DAMAGE: Final = frozenset(
    {
        sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
    }
)  # fmt: skip
MOST_CHUNKS: Final = 32  # pieces of one log that a boot leaves as they are

_SCHEMA: Final = """
create table if not exists meta (key text primary key, value integer not null) without rowid;
create table if not exists contexts (
    cid integer primary key, uid integer not null, name text not null, detached integer not null, session text not null,
    model text not null, rest blob not null, sum integer not null);
create table if not exists tools (tool text primary key, durations blob not null, sum integer not null) without rowid;
create table if not exists chunks (
    cid integer not null, at integer not null, tokens blob not null, sum integer not null,
    primary key (cid, at)) without rowid;
"""
_CHECKPOINT: Final = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('pragma wal_checkpoint(passive)')"

Log = Callable[[str, str], None]  # (level, text)

_encode: Final = msgspec.msgpack.Encoder().encode
_Rest = tuple[Generation | None, GenerateResult | None, str, str]
_decode_whole: Final = msgspec.msgpack.Decoder(_Rest).decode
_decode_short: Final = msgspec.msgpack.Decoder(tuple[Generation | None, GenerateResult | None]).decode


def _decode(rest: bytes) -> _Rest:
    """Group and domain are not there in what was written before there were any."""
    try:
        return _decode_whole(rest)
    except msgspec.ValidationError:
        return (*_decode_short(rest), "", "")


class JournalBusy(Exception):
    """Another daemon keeps this journal."""


class _Damaged(Exception):
    """What was read cannot have been written so."""


class _Asked(NamedTuple):
    """Something to write, to see whether it can be."""


_ASKED: Final = _Asked()
_REMEDY: Final = "make room on its file system and see that it may be written, or give another --state-dir"


class JournalFile:
    """Owns `directory`/journal.db from construction to `close`.

    model  digest of what gives token ids their meaning: contexts of other models stay in the file and are not loaded
    clock  seconds that only grow
    Error: JournalBusy; OSError when the directory cannot be used.
    """

    def __init__(
        self, directory: Path, model: str, log: Log, *, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._path: Final = directory / "journal.db"
        self._model: Final = model
        self._log: Final = log
        self._clock = clock
        self._lock = _take_lock(directory / "journal.lock")
        self._unsaved: list[JournalRecord] = []
        self._refused_at = 0.0  # when the disk last refused; 0: it does not
        self._why = ""  # it refused
        self._refusal_code = 0
        self._off = False
        self._wal_bytes = 0
        self._checkpointer: subprocess.Popen[bytes] | None = None
        self.commits = 0
        self._ids_from = 0  # a journal was lost: no id below this is free
        self._db: sqlite3.Connection
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    # -- boot -----------------------------------------------------------------------------------------------------

    def load(self) -> Restored:
        """What is on record, for the kernel to begin with.  A context that cannot be read is left out and said."""
        try:
            return self._load()
        except sqlite3.DatabaseError as error:
            _raise_unless_damage(error, self._path)
            self._move_aside(str(error))
            return self._load()

    def _load(self) -> Restored:
        db = self._db
        meta = dict(db.execute("select key, value from meta"))
        boots, pid, cid = meta.get("boots", 0), meta.get("pid", 0), meta.get("cid", 0)
        pid, cid = max(pid, self._ids_from), max(cid, self._ids_from)
        contexts: list[RestoredContext] = []
        wrong: list[str] = []
        for row in db.execute("select * from contexts where model = ? order by cid", (self._model,)).fetchall():
            try:
                contexts.append(self._context(row))
            except _Damaged as error:
                wrong.append(str(error))
        if wrong:
            copy = self._copy_aside()
            self._log("error", f"journal: {len(wrong)} contexts are damaged and left out ({wrong[0]}); see {copy}")
            for row in db.execute("select cid from contexts where model = ?", (self._model,)).fetchall():
                if row[0] not in {c.record.cid for c in contexts}:
                    self._write([DropRecord(row[0])])
        (others,) = db.execute("select count(*) from contexts where model <> ?", (self._model,)).fetchone()
        if others:
            self._log("info", f"journal: {others} contexts belong to other models and wait for them")
        self._set_meta(boots=boots + 1, format=FORMAT, pid=pid, cid=cid)
        return Restored(pid, cid, boots, tuple(contexts), self._tools())

    def _tools(self) -> tuple[ToolRecord, ...]:
        """What was learnt of tools.  What is damaged is learnt again."""
        rows = self._db.execute("select tool, durations, sum from tools order by tool").fetchall()
        good = tuple(
            ToolRecord(tool, durations)
            for tool, durations, checksum in rows
            if isinstance(durations, bytes) and checksum == _tool_sum(tool, durations)
        )
        if len(good) < len(rows):
            self._log("warning", f"journal: the durations of {len(rows) - len(good)} tools are damaged and forgotten")
        return good

    def _context(self, row: tuple[Any, ...]) -> RestoredContext:
        cid, uid, name, detached, session, _, rest, checksum = row
        if checksum != _context_sum(cid, uid, name, detached, session, rest):
            raise _Damaged(f"context {cid}: wrong checksum")
        try:
            generation, result, group, domain = _decode(rest)
        except (msgspec.MsgspecError, ValueError) as error:
            raise _Damaged(f"context {cid}: {error}") from None
        log = bytearray()
        chunks = self._db.execute("select at, tokens, sum from chunks where cid = ? order by at", (cid,)).fetchall()
        for at, tokens, checksum in chunks:
            if at != len(log) // 4 or len(tokens) % 4 or checksum != _chunk_sum(cid, at, tokens):
                raise _Damaged(f"context {cid}: token {len(log) // 4} is missing or damaged")
            log += tokens
        if len(chunks) > MOST_CHUNKS:
            self._write([LogRecord(cid, 0, bytes(log))])
        record = ContextRecord(cid, uid, name, bool(detached), session, generation, result, group, domain)
        return RestoredContext(record, bytes(log))

    def _open(self) -> None:
        try:
            self._connect()
        except sqlite3.DatabaseError as error:
            _raise_unless_damage(error, self._path)
            self._move_aside(str(error))

    def _connect(self) -> None:
        before = os.umask(0o177)
        try:
            db = self._db = sqlite3.connect(self._path, isolation_level=None, timeout=10.0)
            db.execute("pragma journal_mode = wal")
        finally:
            os.umask(before)
        db.execute("pragma synchronous = normal")
        db.execute("pragma wal_autocheckpoint = 0")
        problems = db.execute("pragma quick_check(1)").fetchone()
        if problems != ("ok",):
            raise sqlite3.DatabaseError(str(problems[0]))
        db.executescript(_SCHEMA)
        found = db.execute("select value from meta where key = 'format'").fetchone()
        if found and found[0] != FORMAT:
            raise sqlite3.DatabaseError(f"it has format {found[0]} and this attnix reads {FORMAT}")

    def _move_aside(self, why: str) -> None:
        """Out of the way, whole, for somebody to look at; a new one takes its place."""
        with contextlib.suppress(sqlite3.Error, AttributeError, TypeError, ValueError):
            self._ids_from = max(
                value for key, value in self._db.execute("select * from meta") if key in ("pid", "cid")
            )
        if not self._ids_from:
            self._ids_from = int(time.time())
        with contextlib.suppress(sqlite3.Error, AttributeError):
            self._db.close()
        aside = self._aside()
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{self._path}{suffix}", f"{aside}{suffix}")
        self._log(
            "error",
            f"journal: {self._path} cannot be read ({why}); it was moved to {aside}, and named contexts are gone",
        )
        self._connect()

    def _aside(self) -> Path:
        number = 1
        while (aside := self._path.with_name(f"journal.db.damaged-{number}")).exists():
            number += 1
        return aside

    def _copy_aside(self) -> Path:
        aside = self._aside()
        with contextlib.closing(sqlite3.connect(aside)) as copy, contextlib.suppress(sqlite3.Error):
            self._db.backup(copy)
        return aside

    # -- serving --------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether there is something that `commit` should write now."""
        return bool(self._unsaved) and (not self._refused_at or self._clock() - self._refused_at > RETRY_S)

    @property
    def retry_ns(self) -> int:
        """0, or the time until a disk that refused may be asked again."""
        if not self._unsaved or not self._refused_at:
            return 0
        return max(1, int((self._refused_at + RETRY_S - self._clock()) * 1e9) + 1_000_000)

    @property
    def written(self) -> bool:
        """Whether all that was added is on record."""
        return not self._unsaved and not self._off

    def refusal(self) -> Failure | None:
        """Why nothing can be put on record now, of which the disk was just asked; None: it can.

        Only a write tells: a full disk, a directory that was made read-only and one that is gone look like any other until then.
        """
        if not self._off:
            self._commit(asked=True)
        if not self._refused_at:
            return None
        full = self._refusal_code & 0xFF == sqlite3.SQLITE_FULL
        detail: Detail = {
            "message": f"nothing can be put on record now: {self._why}; {_REMEDY}",
            "file": str(self._path),
        }
        return Failure(E.ENOSPC if full else E.EIO, detail)

    def add(self, records: tuple[JournalRecord, ...]) -> None:
        """Part of this turn's transaction."""
        if not self._off:
            self._unsaved.extend(records)

    def commit(self) -> None:
        """Write what was added.  A disk that refuses is tried again later; nothing is lost meanwhile, unless we die."""
        self._commit(asked=False)

    def _commit(self, *, asked: bool) -> None:
        """asked: something is written even when nothing was added."""
        try:
            self._write([*self._unsaved, *([_ASKED] if asked else [])])
        except sqlite3.Error as error:
            self._refusal_code = getattr(error, "sqlite_errorcode", 0)
            self._why = f"the journal {self._path} cannot be written ({error})"
            if not self._refused_at:
                self._log("error", f"journal: it cannot be written ({error}); tried again every {RETRY_S:g} s")
            self._refused_at = self._clock()
            if len(self._unsaved) > MOST_UNSAVED:
                self._off = True
                self._unsaved.clear()
                self._log("error", "journal: given up; named contexts will not outlive this daemon")
            return
        if self._refused_at:
            self._log("info", "journal: it can be written again, and nothing is missing in it")
            self._refused_at = 0.0
        self._unsaved = []
        self.commits += 1
        if self._wal_bytes > CHECKPOINT_BYTES:
            self._checkpoint()

    def _write(self, records: Sequence[JournalRecord | _Asked]) -> None:
        db = self._db
        db.execute("begin immediate")
        try:
            for record in records:
                if isinstance(record, LogRecord):
                    self._write_log(record)
                elif isinstance(record, ContextRecord):
                    cid, uid, name, detached, session, generation, result, group, domain = record
                    rest = _encode((generation, result, group, domain))
                    checksum = _context_sum(cid, uid, name, detached, session, rest)
                    row = (cid, uid, name, detached, session, self._model, rest, checksum)
                    db.execute("insert or replace into contexts values (?, ?, ?, ?, ?, ?, ?, ?)", row)
                elif isinstance(record, DropRecord):
                    db.execute("delete from contexts where cid = ?", (record.cid,))
                    db.execute("delete from chunks where cid = ?", (record.cid,))
                elif isinstance(record, ToolRecord):
                    self._write_tool(record)
                elif isinstance(record, MarkRecord):
                    self._set_meta(pid=record.pid, cid=record.cid)
                elif isinstance(record, _Asked):
                    self._set_meta(asked=self.commits)
            db.execute("commit")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("rollback")
            raise
        self._wal_bytes += TRANSACTION_BYTES

    def _write_log(self, record: LogRecord) -> None:
        cid, at, tokens = record
        db = self._db
        db.execute("delete from chunks where cid = ? and at >= ?", (cid, at))
        last = db.execute(
            "select at, tokens from chunks where cid = ? and at < ? order by at desc limit 1", (cid, at)
        ).fetchone()  # fmt: skip
        if last is not None and last[0] + len(last[1]) // 4 > at:  # the cut goes through a piece
            self._put(cid, last[0], last[1][: 4 * (at - last[0])])
        if tokens:
            self._put(cid, at, tokens)
            self._wal_bytes += len(tokens)

    def _write_tool(self, record: ToolRecord) -> None:
        """No durations: the tool is forgotten."""
        tool, durations = record
        if not durations:
            self._db.execute("delete from tools where tool = ?", (tool,))
            return
        row = (tool, durations, _tool_sum(tool, durations))
        self._db.execute("insert or replace into tools values (?, ?, ?)", row)
        self._wal_bytes += len(durations)

    def _put(self, cid: int, at: int, tokens: bytes) -> None:
        row = (cid, at, tokens, _chunk_sum(cid, at, tokens))
        self._db.execute("insert or replace into chunks values (?, ?, ?, ?)", row)

    def _set_meta(self, **values: int) -> None:
        self._db.executemany("insert or replace into meta values (?, ?)", list(values.items()))

    def _checkpoint(self) -> None:
        """Passive: it waits for nobody, and nobody for it."""
        if self._checkpointer is not None and self._checkpointer.poll() is None:
            return
        command = [sys.executable, "-I", "-S", "-c", _CHECKPOINT, str(self._path)]
        try:
            self._checkpointer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError as error:
            self._log("warning", f"journal: no process for its checkpoint: {error}")
        self._wal_bytes = 0

    def close(self) -> None:
        """Write what is left, and leave one file."""
        if self._unsaved:
            self.commit()
        if self._checkpointer is not None:
            self._checkpointer.wait()
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("pragma wal_checkpoint(truncate)")
        self._db.close()
        os.close(self._lock)


def _raise_unless_damage(error: sqlite3.DatabaseError, path: Path) -> None:
    """A file that cannot be opened, read or written now (a full disk) is no damaged one: leave it where it is.

    Error: OSError.
    """
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None and code & 0xFF in _NOT_DAMAGE:
        raise OSError(f"the journal {path} cannot be used: {error}; {_REMEDY}") from error


def _context_sum(cid: int, uid: int, name: str, detached: int, session: str, rest: bytes) -> int:
    return zlib.crc32(_encode((cid, uid, name, int(detached), session, rest)))


def _tool_sum(tool: str, durations: bytes) -> int:
    return zlib.crc32(durations, zlib.crc32(tool.encode(errors="surrogatepass")))


def _chunk_sum(cid: int, at: int, tokens: bytes) -> int:
    return zlib.crc32(tokens, zlib.crc32(cid.to_bytes(8, "little") + at.to_bytes(8, "little")))


def _take_lock(path: Path) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise JournalBusy(f"another attnix keeps the journal in {path.parent}") from None
    return lock
