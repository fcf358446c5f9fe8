"""`ps`, `pmap`, `free`, `stat` over fixed records: what people see, held in tests/golden/.

The records are made by hand, and so are the numbers in the golden files: two contexts of 40 tokens in blocks of 16
that share two full blocks, frames of 360 KiB.  `UPDATE_GOLDEN=1` writes the files anew; read the difference.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnix.syscalls.types import ContextRow, PagemapResult, ProcessRow, PsResult, TierRow, TiersResult, Usage
from attnix.userland.shell import free, pmap, ps, stat

from .conftest import Attnix

FRAME = 360 << 10
SECOND = 1_000_000_000
GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def pagemap(cid: int, tail_frame: int) -> PagemapResult:
    ints = [array("i", values).tobytes() for values in ([7, 8, tail_frame], [0, 0, 0], [2, 2, 1], [1, 1, 0])]
    frames, shifts, sharers, hits = ints
    return PagemapResult(
        cid, "hbm0", 16, 40, frames, shifts, array("h", [16, 16, 8]).tobytes(), sharers, bytes([7, 7, 12]), hits
    )


# 40 tokens of 23,040 bytes; proportional: two frames halved and one whole, 2 frames of 368,640.
FIRST = ContextRow(11, 2, "idle", "hbm0", 40, 40, 3, 2, 40 * 23_040, 2 * FRAME, Usage(40, 0, 0, 5, 0))
SECOND_FORK = ContextRow(12, 3, "running", "hbm0", 40, 40, 3, 2, 40 * 23_040, 2 * FRAME, Usage(8, 32, 4, 3, 1), 11)
PROCESSES = (
    ProcessRow(1, 0, 1000, "attnix ps", "new", 0, (), 0, 0, 0, 5),
    ProcessRow(2, 0, 1000, "chat", "ready", 0, (FIRST,), 40 * 23_040, 2 * FRAME, 40, 75 * SECOND, FIRST.usage),
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
    ),
)
TIERS = TiersResult((TierRow("hbm0", "hbm", "up", 2, 728, 700, 24, 4, 1, FRAME, 4242, 1),))


class FixedSystem:
    """A client that always sees the same."""

    server = SimpleNamespace(pid=1)

    def __enter__(self) -> FixedSystem:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ps(self, pid: int = 0) -> PsResult:
        return PsResult(tuple(row for row in PROCESSES if pid in (0, row.pid)))

    def tiers(self) -> TiersResult:
        return TIERS

    def stat(self, ctx: int, cid: int) -> ContextRow:
        return {11: FIRST, 12: SECOND_FORK}[cid]

    def pagemap(self, ctx: int, cid: int) -> PagemapResult:
        return pagemap(cid, {11: 9, 12: 10}[cid])


@pytest.fixture(autouse=True)
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ps, pmap, free, stat):
        monkeypatch.setattr(module, "call_system", lambda socket, name: FixedSystem())


@pytest.mark.parametrize(
    "line",
    ["ps", "ps -c", "ps -p 3", "pmap", "pmap 11", "free", "stat 12", "ps --json", "pmap 11 --json", "free --json"],
)
def test_golden(attnix: Attnix, line: str) -> None:
    said = attnix(*line.split())
    assert (said.err, said.status) == ("", 0)
    path = GOLDEN / f"{line.replace(' ', '_').replace('--', '')}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(said.out)
    assert said.out == path.read_text()


@pytest.mark.parametrize("name", ["ps.txt", "pmap.txt", "free.txt", "pmap_11.txt"])
def test_it_fits_into_eighty_columns_or_a_hundred(name: str) -> None:
    assert max(map(len, (GOLDEN / name).read_text().splitlines())) <= 96
