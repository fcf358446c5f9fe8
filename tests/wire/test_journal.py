"""The journal's file by itself: what is written is read, whatever is cut away from it, and damage is contained."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from array import array
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from attnix.kernel.calls import GenerateArgs, GenerateResult, Usage
from attnix.kernel.errors import E
from attnix.kernel.journal import ContextRecord, DropRecord, Generation, LogRecord, MarkRecord, ToolRecord
from attnix.simulated import ints
from attnix.syscalls import journal as journal_module
from attnix.syscalls.journal import JournalBusy, JournalFile


class Said(list[tuple[str, str]]):
    def __call__(self, level: str, text: str) -> None:
        self.append((level, text))


def opened(path: Path, model: str = "m", **options: Any) -> tuple[JournalFile, Said]:
    said = Said()
    return JournalFile(path, model, said, **options), said


def record(cid: int, name: str = "n", **more: Any) -> ContextRecord:
    return ContextRecord(cid, 1000, name, False, "digest", **more)


def write(path: Path, *records: Any, model: str = "m") -> None:
    file, said = opened(path, model)
    file.load()
    file.add(records)
    assert file.pending
    file.commit()
    file.close()
    assert [level for level, _ in said if level != "info"] == []


def test_what_was_written_is_read(tmp_path: Path) -> None:
    generation = Generation(GenerateArgs(5, 9, 0.5, seed=2**64 - 1, stop=("a", "b"), stop_tokens=ints([1])), 3)
    result = GenerateResult("stop", ints([1, 2]), "", Usage(1, 2, 3, 4, 5), 5)
    first, second = record(7, "é\u20ac", generation=generation), record(8, generation=generation, result=result)
    write(tmp_path, MarkRecord(11, 12), first, LogRecord(7, 0, ints([1, 2, 3])), second, LogRecord(8, 0, b""))
    file, said = opened(tmp_path)
    restored = file.load()
    file.close()
    assert (restored.pid, restored.cid, restored.boots, said) == (11, 12, 1, [])
    assert [c.record for c in restored.contexts] == [first, second]
    assert [c.log for c in restored.contexts] == [ints([1, 2, 3]), b""]


def test_group_and_domain_are_kept_and_older_journals_have_none(tmp_path: Path) -> None:
    first = record(7, group="uid:1000/a", domain="public")
    write(tmp_path, first, LogRecord(7, 0, b""), record(8), LogRecord(8, 0, b""))
    rest = msgspec.msgpack.encode((None, None))  # as version 0.3 wrote it
    checksum = zlib.crc32(msgspec.msgpack.encode((8, 1000, "n", 0, "digest", rest)))
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as db, db:
        db.execute("update contexts set rest = ?, sum = ? where cid = 8", (rest, checksum))
    file, said = opened(tmp_path)
    restored = file.load()
    file.close()
    assert [c.record for c in restored.contexts] == [first, record(8)] and said == []


def test_a_log_is_cut_and_grows_anywhere(tmp_path: Path) -> None:
    """Against a plain list, through every length at which a piece can be cut."""
    file, _ = opened(tmp_path)
    file.load()
    log: list[int] = []
    file.add((record(1),))
    for step in range(60):
        at = (step * 7) % (len(log) + 1)
        tokens = [step] * (step % 5)
        log = log[:at] + tokens
        file.add((LogRecord(1, at, ints(tokens)),))
        if step % 3 == 0:
            file.commit()
    file.commit()
    file.close()
    file, _ = opened(tmp_path)
    assert file.load().contexts[0].log == ints(log)
    file.close()


def test_many_pieces_become_one_at_boot(tmp_path: Path) -> None:
    write(tmp_path, record(1), *[LogRecord(1, n, ints([n])) for n in range(200)])
    for _ in range(2):
        file, said = opened(tmp_path)
        assert (file.load().contexts[0].log, said) == (ints(range(200)), [])
        file.close()
    db = sqlite3.connect(tmp_path / "journal.db")
    assert db.execute("select count(*) from chunks").fetchone() == (1,)
    db.close()


def test_a_killed_daemon_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    """A copy of the files at any moment, as they are when the process is gone, holds every commit before it."""
    file, _ = opened(tmp_path)
    file.load()
    for n in range(20):
        file.add((record(1), LogRecord(1, n, ints([n]))))
        file.commit()
        copy = tmp_path / f"copy{n}"
        copy.mkdir()
        for name in ("journal.db", "journal.db-wal"):
            (copy / name).write_bytes((tmp_path / name).read_bytes())
        other, said = opened(copy)
        assert (other.load().contexts[0].log, said) == (ints(range(n + 1)), [])
        other.close()
    file.close()


def test_a_torn_end_is_the_state_before_it(tmp_path: Path) -> None:
    """Power is cut: of the last transactions any part may be missing; what is read is one of the states that were."""
    file, _ = opened(tmp_path)
    file.load()
    for n in range(6):
        file.add((record(1), LogRecord(1, n, ints([n]))))
        file.commit()
    wal = (tmp_path / "journal.db-wal").read_bytes()
    main = (tmp_path / "journal.db").read_bytes()
    seen = set()
    for k, size in enumerate(range(len(wal), 32, -1777)):
        copy = tmp_path / f"cut{k}"
        copy.mkdir()
        (copy / "journal.db").write_bytes(main)
        (copy / "journal.db-wal").write_bytes(wal[:size])
        other, said = opened(copy)
        contexts = other.load().contexts
        other.close()
        log = contexts[0].log if contexts else b""
        assert log == ints(range(len(log) // 4)) and said == []
        seen.add(len(log) // 4)
    file.close()
    assert len(seen) > 3 and 6 in seen


@pytest.mark.parametrize("damage", ["garbage", "cut", "zeros", "zero page", "another format", "empty"])
def test_damage_is_moved_aside_whole(tmp_path: Path, damage: str) -> None:
    write(
        tmp_path,
        MarkRecord(50, 60),
        *[r for n in range(1, 9) for r in (record(n, f"n{n}"), LogRecord(n, 0, ints([n] * 700)))],
    )
    path = tmp_path / "journal.db"
    data = path.read_bytes()
    if damage == "another format":
        db = sqlite3.connect(path)
        db.execute("update meta set value = 99 where key = 'format'")
        db.commit()
        db.close()
    else:
        wrong = {"garbage": b"x" * 9999, "cut": data[: len(data) // 2], "zeros": bytes(len(data)), "empty": b""}
        path.write_bytes(wrong.get(damage, data[:8192] + bytes(8192) + data[16384:]))
    broken = path.read_bytes()
    file, said = opened(tmp_path)
    restored = file.load()
    assert restored.contexts == ()
    if damage == "empty":  # to SQLite an empty file is a new database
        assert said == []
    else:
        assert [level for level, _ in said] == ["error"] and "journal.db.damaged-1" in said[0][1]
        assert (tmp_path / "journal.db.damaged-1").read_bytes() == broken
        assert restored.cid >= 60, "no id is given twice"
    file.add((record(1), LogRecord(1, 0, ints([1]))))
    file.commit()
    file.close()
    file, said = opened(tmp_path)
    assert len(file.load().contexts) == 1 and said == []
    file.close()


def test_a_journal_that_cannot_be_opened_is_left_where_it_is(tmp_path: Path) -> None:
    """A full disk, or rights that changed, is no damage: nothing is moved, and boot says why it cannot go on."""
    (tmp_path / "journal.db").mkdir()
    with pytest.raises(OSError, match="cannot be used: unable to open database file"):
        opened(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["journal.db", "journal.lock"]
    (tmp_path / "journal.db").rmdir()
    file, _ = opened(tmp_path)  # the lock was given back
    file.close()


def test_one_damaged_context_does_not_take_the_others_along(tmp_path: Path) -> None:
    write(tmp_path, *[r for n in (1, 2, 3) for r in (record(n, f"n{n}"), LogRecord(n, 0, ints([n] * 8)))])
    db = sqlite3.connect(tmp_path / "journal.db")
    db.execute("update chunks set tokens = zeroblob(32) where cid = 2")
    db.commit()
    db.close()
    file, said = opened(tmp_path)
    assert [c.record.cid for c in file.load().contexts] == [1, 3]
    file.close()
    assert "context 2: token 0 is missing or damaged" in said[0][1]
    db = sqlite3.connect(tmp_path / "journal.db.damaged-1")
    assert db.execute("select count(*) from contexts").fetchone() == (3,), "the copy still has it"
    db.close()
    file, said = opened(tmp_path)
    assert len(file.load().contexts) == 2 and said == []
    file.close()


def test_dropped_contexts_and_other_models(tmp_path: Path) -> None:
    write(tmp_path, record(1), LogRecord(1, 0, ints([1])), record(2), LogRecord(2, 0, ints([2])))
    write(tmp_path, DropRecord(1), record(3), model="another")
    file, _ = opened(tmp_path, "another")
    assert [c.record.cid for c in file.load().contexts] == [3]
    file.close()
    file, said = opened(tmp_path)
    assert [c.record.cid for c in file.load().contexts] == [2]
    file.close()
    assert said == [("info", "journal: 1 contexts belong to other models and wait for them")]


def test_two_daemons_do_not_share_a_journal(tmp_path: Path) -> None:
    file, _ = opened(tmp_path)
    with pytest.raises(JournalBusy):
        opened(tmp_path)
    file.close()
    file, _ = opened(tmp_path)
    file.close()


def test_whether_it_can_be_written_is_found_out_by_writing(tmp_path: Path) -> None:
    """Also when nothing waits to be written, and at once when it can be again."""
    file, _ = opened(tmp_path, clock=lambda: 100.0)
    file.load()
    assert file.refusal() is None and file.written
    file._db.execute("pragma query_only = on")  # SQLITE_READONLY, as of a file that lost its rights
    for _ in range(2):
        why = file.refusal()
        assert why is not None and (why.code, why.detail["file"]) == (E.EIO, str(tmp_path / "journal.db"))
        assert "readonly" in str(why.detail["message"]) and "see that it may be written" in str(why.detail["message"])
    file.add((record(1), LogRecord(1, 0, ints([5]))))
    assert not file.written and not file.pending, "it refused a moment ago"
    file._db.execute("pragma query_only = off")
    assert file.refusal() is None and file.written
    file.close()
    file, _ = opened(tmp_path)
    assert file.load().contexts[0].log == ints([5])
    file.close()


def test_a_full_disk_is_told_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = opened(tmp_path)
    file.load()
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL

    def refuse(records: Any) -> None:
        raise full

    monkeypatch.setattr(file, "_write", refuse)
    why = file.refusal()
    assert why is not None and why.code == E.ENOSPC and "make room" in str(why.detail["message"])
    monkeypatch.undo()
    file.close()


def test_a_disk_that_refuses_is_tried_again_and_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    file, said = opened(tmp_path, clock=lambda: now[0])
    file.load()
    real = file._write

    def refuse(records: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(file, "_write", refuse)
    for n in range(3):
        file.add((record(1), LogRecord(1, n, ints([n]))))
        if file.pending:
            file.commit()
    assert [level for level, _ in said] == ["error"], "said once"
    assert not file.pending
    assert 0.9e9 < file.retry_ns < 1.1e9
    monkeypatch.setattr(file, "_write", real)
    now[0] += file.retry_ns / 1e9
    assert file.pending
    file.commit()
    assert file.retry_ns == 0
    assert [level for level, _ in said] == ["error", "info"]
    file.close()
    file, _ = opened(tmp_path)
    assert file.load().contexts[0].log == ints(range(3))
    file.close()


def test_the_write_ahead_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "CHECKPOINT_BYTES", 1 << 20)
    file, said = opened(tmp_path)
    file.load()
    largest = 0
    for n in range(400):
        file.add((record(1), LogRecord(1, 0, ints([n] * 8000))))
        file.commit()
        if file._checkpointer is not None:
            assert file._checkpointer.wait() == 0  # beside us; waited for here so that the bound can be checked
        largest = max(largest, os.path.getsize(tmp_path / "journal.db-wal"))
    file.close()
    assert largest < 4 << 20 and said == []
    assert not (tmp_path / "journal.db-wal").exists()


def test_what_is_known_of_tools_is_kept(tmp_path: Path) -> None:
    first, second = (
        ToolRecord("search", array("q", [5, 1 << 40]).tobytes()),
        ToolRecord("b\u20ac", array("q", [7]).tobytes()),
    )
    write(tmp_path, first, second, ToolRecord("gone", array("q", [1]).tobytes()))
    write(tmp_path, ToolRecord("gone", b""), first._replace(durations=array("q", [9]).tobytes()))
    file, said = opened(tmp_path)
    assert file.load().tools == (second, first._replace(durations=array("q", [9]).tobytes()))
    file.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as db:
        db.execute("update tools set durations = x'00' where tool = 'search'")
        db.commit()
    file, said = opened(tmp_path)
    assert file.load().tools == (second,)
    assert [level for level, _ in said] == ["warning"]
    file.close()


def test_a_journal_from_before_there_were_waits(tmp_path: Path) -> None:
    """No table of tools, and generations of two fields instead of three."""
    generation = Generation(GenerateArgs(5, 9, 0.5), 3)
    write(tmp_path, MarkRecord(1, 9), record(7, generation=generation), LogRecord(7, 0, ints([1, 2, 3, 4])))
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as db:
        db.execute("drop table tools")
        (rest,) = db.execute("select rest from contexts").fetchone()
        (args, start, injected), result, _group, _domain = msgpack.unpackb(rest)
        assert (start, injected) == (3, [])
        old = msgpack.packb(([args, start], result))
        assert isinstance(old, bytes)
        checksum = journal_module._context_sum(7, 1000, "n", 0, "digest", old)
        db.execute("update contexts set rest = ?, sum = ?", (old, checksum))
        db.commit()
    file, said = opened(tmp_path)
    restored = file.load()
    file.close()
    assert said == [] and restored.tools == ()
    assert restored.contexts[0].record.generation == generation
