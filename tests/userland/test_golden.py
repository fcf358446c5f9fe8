"""`ps`, `pmap`, `free`, `stat` over fixed records: what people see, held in tests/golden/.

The records are made by hand, and so are the numbers in the golden files: two contexts of 40 tokens in blocks of 16
that share two full blocks, frames of 360 KiB; a dram and an nvme tier below hbm.  `UPDATE_GOLDEN=1` writes the files anew; read the difference.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from attnix.syscalls.types import (
    ContextRow,
    DecisionRow,
    ExplainResult,
    GroupRow,
    GroupsResult,
    LimitRow,
    PagemapResult,
    ProcessRow,
    PsResult,
    TierRow,
    TiersResult,
    Usage,
)
from attnix.userland.shell import explain, free, group, pmap, ps, stat, tiers

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
        bytes([0b111, 0b101, 0b001]),
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


class FixedSystem:
    """A client that always sees the same."""

    server = SimpleNamespace(pid=1)
    asked: tuple[str, str, int, int] = ("", "", 0, 0)

    def __enter__(self) -> FixedSystem:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ps(self, pid: int = 0) -> PsResult:
        return PsResult(tuple(row for row in PROCESSES if pid in (0, row.pid)))

    def tiers(self) -> TiersResult:
        return TIERS

    def groups(self, name: str = "") -> GroupsResult:
        return GroupsResult(tuple(row for row in GROUPS.rows if name in ("", row.name)))

    def setlimit(self, name: str, resource: str, soft: int, hard: int) -> GroupRow:
        self.asked = (name, resource, soft, hard)
        return GROUPS.rows[1]

    def explain(self, ctx: int, cid: int, block: int) -> ExplainResult:
        return {(0, -1): DECISIONS, (99, -1): ExplainResult(())}[cid, block]

    def stat(self, ctx: int, cid: int) -> ContextRow:
        return {11: FIRST, 12: SECOND_FORK}[cid]

    def pagemap(self, ctx: int, cid: int) -> PagemapResult:
        return pagemap(cid, {11: 9, 12: 10}[cid])


@pytest.fixture(autouse=True)
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ps, pmap, free, stat, tiers, explain, group):
        monkeypatch.setattr(module, "call_system", lambda socket, name: FixedSystem())


@pytest.mark.parametrize(
    "line",
    [
        "ps", "ps -c", "ps -p 3", "pmap", "pmap 11", "free", "stat 12", "tiers", "explain", "explain 99",
        "ps --json", "pmap 11 --json", "free --json", "group ls", "group ls uid:1000/batch --json",
    ],
)  # fmt: skip
def test_golden(attnix: Attnix, line: str) -> None:
    said = attnix(*line.split())
    assert (said.err, said.status) == ("", 0)
    path = GOLDEN / f"{line.replace(' ', '_').replace('--', '').translate(_FILE)}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(said.out)
    assert said.out == path.read_text()


@pytest.mark.parametrize(
    "name", ["group_ls.txt", "ps.txt", "pmap.txt", "free.txt", "pmap_11.txt", "tiers.txt", "explain.txt"]
)
def test_it_fits_into_eighty_columns_or_a_hundred(name: str) -> None:
    assert max(map(len, (GOLDEN / name).read_text().splitlines())) <= 96


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
def test_amounts_that_are_none(attnix: Attnix, options: list[str]) -> None:
    assert attnix("group", "set", "uid:1000/batch", *options).status == 2


def test_stat_tells_what_a_context_waits_for() -> None:
    row = FixedSystem().stat(0, 12)._replace(tool="weather", wait=7, due_ms=4_500, deadline_ms=59_000)
    assert stat.describe(row)[1] == ("waits for", "weather (wait 7), expected in 4.5 s, given up in 59 s")
    assert stat.describe(row._replace(due_ms=0, deadline_ms=-1))[1][1] == "weather (wait 7), overdue"
    assert stat.describe(row._replace(due_ms=-1, deadline_ms=-1))[1][1] == "weather (wait 7)"


def test_what_is_no_amount_is_told_what_would_be() -> None:
    with pytest.raises(typer.BadParameter, match=r"'lots' is no amount .*: write frames"):
        group.amount("lots", 4096, up=False)
    with pytest.raises(typer.BadParameter, match=r"'lots' is no amount .*: write a whole number or none"):
        group.amount("lots", 0, up=False)
