"""What people see of a dump, held in tests/golden/.  `UPDATE_GOLDEN=1` writes the files anew; read the difference.

dumps/hand.json is made of the records below, which are made by hand, and so are the numbers in its golden files: two contexts of
40 tokens in blocks of 16 that share two full blocks, frames of 360 KiB; a dram and an nvme tier below hbm.
dumps/agents.json was taken with `attnix dump --text` from a daemon with SmolLM2 and three tiers: one conversation forked into
others, of which two wait for tools, one that was demoted, one that was evicted, and a child in a group of its own.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import pytest
import typer

from attnix.syscalls.types import (
    ContextRow,
    DecisionRow,
    DmesgArgs,
    Empty,
    ExplainArgs,
    ExplainResult,
    GroupRow,
    GroupsArgs,
    GroupsResult,
    HelloResult,
    LimitRow,
    LookArgs,
    NameRow,
    NamesArgs,
    NamesResult,
    PagemapResult,
    ProcessRow,
    PsArgs,
    PsResult,
    ReadArgs,
    ReadResult,
    TierRow,
    TiersResult,
    Usage,
)
from attnix.userland import dumpfile
from attnix.userland.dumpfile import Answer, Dump
from attnix.userland.shell import group, stat

from .conftest import Attnix

FRAME = 360 << 10
SECOND = 1_000_000_000
_FILE = str.maketrans({":": "", "/": "-"})
GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def pagemap(cid: int, tail_frame: int) -> PagemapResult:
    ints = [array("i", values).tobytes() for values in ([7, 8, tail_frame], [0, 0, 0], [2, 2, 1], [1, 1, 0])]
    frames, shifts, sharers, hits = ints
    return PagemapResult(
        cid, "hbm0", 16, 40, frames, shifts, array("h", [16, 16, 8]).tobytes(), sharers, bytes([7, 7, 12]), hits,
        bytes([0b111, 0b101, 0b001]), array("i", [1_500, 61_000, -1]).tobytes(),
    )  # fmt: skip


# 40 tokens of 23,040 bytes; proportional: two frames halved and one whole, 2 frames of 368,640.
FIRST = ContextRow(11, 2, "idle", "hbm0", 40, 40, 3, 2, 40 * 23_040, 2 * FRAME, Usage(40, 0, 0, 5, 0))
SECOND_FORK = ContextRow(
    12, 3, "running", "hbm0", 40, 40, 3, 2, 40 * 23_040, 2 * FRAME, Usage(8, 32, 4, 3, 1, 16, 0, 8), 11
)
PROCESSES = (
    ProcessRow(1, 0, 1000, "attnix ps", "new", 0, (), 0, 0, 0, 5),
    ProcessRow(
        2, 0, 1000, "chat", "ready", 0, (FIRST,), 40 * 23_040, 2 * FRAME, 40, 75 * SECOND, FIRST.usage, "uid:1000"
    ),
    ProcessRow(
        3,
        2,
        1000,
        "[red]agent",
        "running",
        -5,
        (SECOND_FORK,),
        40 * 23_040,
        2 * FRAME,
        40,
        3 * SECOND,
        SECOND_FORK.usage,
        "uid:1000/batch",
    ),
)
STORED = 364 << 10  # a stored frame: 4 KiB of header and the same KV
TIERS = TiersResult(
    (
        TierRow(
            "hbm0", "hbm", "up", 2, 728, 700, 24, 4, 1, FRAME, 4242, 1, "learned", "cpu/avx512bf16/bfloat16",
            12 << 30, 11 << 30, 30_000, 5 << 20, 7 << 20, 0, 0, 2_345_678.0, 1_104.5, 21_500_000.0,
        ),
        TierRow("dram0", "dram", "up", 1, 4096, 4000, 96, 0, 0, STORED, 0, 0, "lru", "memfd"),
        TierRow(
            "nvme0", "nvme", "down", 3, 20_000, 19_000, 1000, 0, 0, STORED, 4243, 2, "s3fifo", "io_uring, direct",
            1200 << 20, 1 << 30, 85_000, 2 << 30, 3 << 30, 4, 1,
        ),
    )
)  # fmt: skip
DECISIONS = ExplainResult(
    (
        DecisionRow(7, 12_345_678_000, "evict", "hbm0", 11, 4, 4, "least likely to return of 64 sampled (0.02/s)"),
        DecisionRow(8, 12_400_000_000, "load", "nvme0", 12, 9, 1, "0.3 ms to load, 16 ms to compute"),
        DecisionRow(9, 12_500_000_000, "miss", "hbm0", 0, -1, 0, "no tier has it"),
    )
)


# The two contexts have four frames, two of them shared: the sub-group, whose context is the fork, pays for its tail alone.
GROUPS = GroupsResult(
    (
        GroupRow(
            "uid:1000", 1000, 100, 3,
            (LimitRow("hbm", 4, 0, 512), LimitRow("dram", 0, 0, 0), LimitRow("nvme", 0, 0, 0), LimitRow("contexts", 2, 0, 0),
             LimitRow("tokens_s", 0, 0, 0)),
            4 * FRAME, 48, 0,
        ),
        GroupRow(
            "uid:1000/batch", 1000, 25, 1,
            (LimitRow("hbm", 1, 0, 64), LimitRow("dram", 0, 0, 0), LimitRow("nvme", 0, 0, 0), LimitRow("contexts", 1, 0, 8),
             LimitRow("tokens_s", 120, 0, 200)),
            2 * FRAME, 8, 17,
        ),
    )
)  # fmt: skip


TEXT = b"caf\xc3\xa9 au lait, 40 tokens of one byte each"[:40]
HAND = Dump(
    "2026-11-30T03:00:00+00:00",
    HelloResult("attnix test", 4, 1, 1000),
    (
        Answer("ps", PsArgs(), PsResult(PROCESSES)),
        Answer("tiers", Empty(), TIERS),
        Answer("groups", GroupsArgs(), GROUPS),
        Answer("explain", ExplainArgs(), DECISIONS),
        Answer("explain", ExplainArgs(0, 99), ExplainResult(())),
        Answer("names", NamesArgs(), NamesResult((NameRow("morning", 11, 2, True, "idle", 40),))),
        Answer("dmesg", DmesgArgs(), (), (13, {"message": "only the daemon's own user may read it"})),
        *(Answer("pagemap", LookArgs(0, cid), pagemap(cid, frame)) for cid, frame in ((11, 9), (12, 10))),
        Answer("read", ReadArgs(0, 11), ReadResult(11, 0, array("i", list(TEXT)).tobytes(), TEXT, array("i", range(1, 41)).tobytes())),
    ),
)  # fmt: skip
DUMPS = GOLDEN / "dumps"
LINES = {
    "hand": (
        "ps", "ps -c", "ps -l", "ps -p 3", "pmap", "pmap 11", "pmap 11 --all", "free", "df", "stat 12", "tiers", "explain", "explain 99",
        "lsctx", "tree", "cat 11", "cat 11 --tokens", "ps --json", "pmap 11 --json", "free --json", "group ls",
        "group ls uid:1000/batch --json", "tree --json",
    ),
    "agents": (
        "ps -c", "lsctx", "tree", "pmap", "pmap 3", "pmap 4", "pmap 7", "cat 4", "cat 4 --json", "stat 4", "df", "free", "group ls", "names",
        "explain 4", "vmstat", "fsck", "uname", "dmesg", "sysctl sched.", "top",
    ),
}  # fmt: skip


def file_of(dump: str, line: str) -> Path:
    name = f"{line.replace(' ', '_').replace('--', '').translate(_FILE)}.txt"
    return GOLDEN / (name if dump == "hand" else f"{dump}_{name}")


def test_the_dump_made_by_hand_is_as_the_records_are(tmp_path: Path) -> None:
    dumpfile.write(tmp_path / "hand.json", HAND)
    if os.environ.get("UPDATE_GOLDEN"):
        (DUMPS / "hand.json").write_bytes((tmp_path / "hand.json").read_bytes())
    assert (tmp_path / "hand.json").read_text() == (DUMPS / "hand.json").read_text()
    assert dumpfile.read(DUMPS / "hand.json") == HAND


@pytest.mark.parametrize(("dump", "line"), [(dump, line) for dump, lines in LINES.items() for line in lines])
def test_golden(attnix: Attnix, dump: str, line: str) -> None:
    said = attnix(*line.split(), "--from", str(DUMPS / f"{dump}.json"))
    assert (said.err, said.status) == ("", 0)
    path = file_of(dump, line)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(said.out)
    assert said.out == path.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.glob("*.txt")} == {file_of(d, line).name for d in LINES for line in LINES[d]}


@pytest.mark.parametrize("line", ["group ls", "ps", "ps -c", "pmap", "free", "df", "pmap 11", "tiers", "explain"])
def test_it_fits_into_a_hundred_columns(line: str) -> None:
    assert max(map(len, file_of("hand", line).read_text().splitlines())) <= 96


def test_what_was_refused_then_is_refused_again(attnix: Attnix) -> None:
    said = attnix("dmesg", "--from", str(DUMPS / "hand.json"), "--json")
    assert (said.status, said.json["error"]["errno"]) == (1, "EACCES")


class FixedSystem:
    """A client that always sees the same."""

    asked: tuple[str, str, int, int] = ("", "", 0, 0)

    def __enter__(self) -> FixedSystem:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def tiers(self) -> TiersResult:
        return TIERS

    def setlimit(self, name: str, resource: str, soft: int, hard: int) -> GroupRow:
        self.asked = (name, resource, soft, hard)
        return GROUPS.rows[1]


@pytest.mark.parametrize(
    ("options", "soft", "hard"),
    [
        (["--hard", "64"], -1, 64),
        (["--hard", "1MiB"], -1, 2),  # 1,024 KiB: two frames of 360 KiB and a rest
        (["--soft", "1MiB"], 3, -1),
        (["--hard", "none", "--soft", "none"], 0, 0),
    ],
)
def test_amounts_of_a_limit(
    attnix: Attnix, monkeypatch: pytest.MonkeyPatch, options: list[str], soft: int, hard: int
) -> None:
    system = FixedSystem()
    monkeypatch.setattr(group, "call_system", lambda socket, name: system)
    assert attnix("group", "set", "uid:1000/batch", "hbm", *options).status == 0
    assert system.asked == ("uid:1000/batch", "hbm", soft, hard)


@pytest.mark.parametrize(
    "options",
    [
        ["hbm"],
        ["hbm", "--hard", "lots"],
        ["hbm", "--soft", "1.5"],
        ["contexts", "--hard", "1MiB"],
        ["hbm", "--hard", "1KiB"],
    ],
)
def test_amounts_that_are_none(attnix: Attnix, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    monkeypatch.setattr(group, "call_system", lambda socket, name: FixedSystem())
    assert attnix("group", "set", "uid:1000/batch", *options).status == 2


def test_stat_tells_what_a_context_waits_for() -> None:
    row = SECOND_FORK._replace(tool="weather", wait=7, due_ms=4_500, deadline_ms=59_000)
    assert stat.describe(row)[1] == ("waits for", "weather (wait 7), expected in 4.5 s, given up in 59 s")
    assert stat.describe(row._replace(due_ms=0, deadline_ms=-1))[1][1] == "weather (wait 7), overdue"
    assert stat.describe(row._replace(due_ms=-1, deadline_ms=-1))[1][1] == "weather (wait 7)"


def test_what_is_no_amount_is_told_what_would_be() -> None:
    with pytest.raises(typer.BadParameter, match=r"'lots' is no amount .*: write frames"):
        group.amount("lots", 4096, up=False)
    with pytest.raises(typer.BadParameter, match=r"'lots' is no amount .*: write a whole number or none"):
        group.amount("lots", 0, up=False)
