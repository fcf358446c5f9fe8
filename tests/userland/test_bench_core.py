"""`attnix bench core` runs, counts what it says it counts, and says so when a peer is missing.  No test of speed."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from attnix.bench_core import BLOCK, PROMPT_BLOCKS, Decoding, Engine, FullPool, WholeStep
from attnix.kernel.core import Core
from attnix.userland.bench.core import Missing, Server, cases, run
from attnix.userland.bench.report import table
from attnix.userland.bench.row import Row


def test_a_full_pool_does_what_each_case_says() -> None:
    pool = FullPool(Core, 16 * PROMPT_BLOCKS)
    core = pool.core
    assert (core.free_frames(0), core.reclaimable_frames(0)) == (0, 16 * PROMPT_BLOCKS)
    before = core.counters()
    for turn in range(3):
        pool.admit_hit(turn)
    assert core.counters().lookup_hits - before.lookup_hits == 3 * PROMPT_BLOCKS
    assert core.counters().evictions == before.evictions
    pool.admit_miss(0)
    assert core.counters().evictions - before.evictions == PROMPT_BLOCKS
    assert core.counters().lookup_misses - before.lookup_misses == PROMPT_BLOCKS
    for case in (pool.allocate, pool.free, pool.fork, pool.evict_block, pool.keys):
        assert case(1) > 0
        assert core.slots_used() == []
        assert core.free_frames(0) + core.reclaimable_frames(0) == 16 * PROMPT_BLOCKS


def test_every_decoding_context_takes_part_in_every_step() -> None:
    decoding = Decoding(Core, 8)
    before = [decoding.core.slot_row(s).generated_total for s in range(8)]
    for turn in range(80):  # long enough that the logs are cut back on the way
        decoding.step(turn)
    assert [decoding.core.slot_row(s).generated_total - b for s, b in enumerate(before)] == [80 * 32] * 8
    assert decoding.core.slot_row(0).tokens < 512 * BLOCK // 4


def test_a_whole_step_takes_tokens_and_gives_the_next_pass() -> None:
    kernel = WholeStep(Core, 8)
    before = kernel.kernel.machine.counters["generated_tokens"]
    kernel.step(0)
    assert kernel.kernel.machine.counters["generated_tokens"] - before == 32 * 8
    assert kernel.exec is not None and len(kernel.exec.tokens) == 4 * 8
    assert kernel.kernel.fsck() == []


def test_rows_and_a_missing_peer() -> None:
    said: list[str] = []
    rows = run(said.append, rounds=1, only="whole decode step, 64", peers_python="/nowhere/python")
    assert any("vLLM is missing" in text for text in said)
    assert [(r.peer, r.ratio is None) for r in rows] == [("python twin", False), ("vllm (missing)", True)]
    assert (
        rows[0].ours > 0
        and rows[0].theirs is not None
        and rows[0].ratio == pytest.approx(rows[0].theirs / rows[0].ours)
    )


def test_a_measuring_process_that_fails_is_missing_not_silent() -> None:
    with pytest.raises(Missing, match="status 3"):
        Server([sys.executable, "-c", "raise SystemExit(3)"])


def test_every_case_names_something_that_exists() -> None:
    for case in cases():
        assert hasattr(FullPool if case.case else Engine, case.case or case.method)
    assert len({case.title for case in cases()}) == len(cases())


def test_the_command_prints_json_rows() -> None:
    command = [sys.executable, "-m", "attnix.userland.bench.core", "--json", "--rounds", "1", "--python", "/nowhere"]
    done = subprocess.run([*command, "--only", "plan and commit, 64"], capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout)
    assert list(row) == list(Row._fields)
    assert (row["bench"], row["peer"], row["unit"]) == ("core", "python twin", "us")


def test_the_table_shows_every_number_once() -> None:
    rows = [
        Row("core", "case a", 12.34, "us", "p", 1234.5, 100.04, 6.17, 0.5, 7),
        Row("core", "b", 1, "us", "-", None, None, None, None, 7),
    ]
    out = io.StringIO()
    Console(file=out, width=140).print(table(rows))
    for text in ("case a", "12.3", "1,234", "100", "6.17", "50%", "1.00"):
        assert text in out.getvalue()
