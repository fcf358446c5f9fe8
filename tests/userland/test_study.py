"""The fragmentation study's facts; expected values are worked out here from the lengths, not by the study."""

from __future__ import annotations

import json
from array import array

import pytest

from attnix import study_fragmentation as f
from attnix.study_attention import attention
from attnix.userland.commands.study import measured

from .conftest import Attnix

SEEDS = (1, 2, 3)


def by_method(seed: int) -> dict[tuple[str, int], f.Placement]:
    return {(row.method, row.block_tokens): row for row in f.placements(seed)}


@pytest.mark.parametrize("seed", SEEDS)
def test_reservation_of_the_window_admits_pool_over_window_and_wastes_more_than_it_uses(seed: int) -> None:
    row = by_method(seed)["max-length", 0]
    lengths = [request.tokens for request in f.requests(seed)]
    assert row.admitted == 32_768 // 4_096 == 8
    assert (row.used, row.reserved) == (sum(lengths[:8]), 32_768)
    assert row.waste > row.used


@pytest.mark.parametrize("seed", SEEDS)
def test_exact_fit_refuses_although_enough_is_free_in_total_and_pages_never_do(seed: int) -> None:
    rows = by_method(seed)
    exact = rows["exact fit", 0]
    assert exact.refused_in_spite > 0
    assert exact.waste == 0
    paged = [row for (method, _), row in rows.items() if method == "paged"]
    assert [row.refused_in_spite for row in paged] == [0] * len(f.BLOCK_SIZES)
    assert rows["paged", 16].mean_used > exact.mean_used


@pytest.mark.parametrize("seed", SEEDS)
def test_pages_of_16_admit_more_than_reservation_and_pages_of_1_waste_nothing(seed: int) -> None:
    rows = by_method(seed)
    assert rows["paged", 16].admitted > rows["max-length", 0].admitted
    assert rows["paged", 1].waste == 0
    lengths = [request.tokens for request in f.requests(seed)]
    for size in f.BLOCK_SIZES:
        row = rows["paged", size]
        blocks = [-(-length // size) for length in lengths]
        assert sum(blocks[: row.admitted]) <= 32_768 // size < sum(blocks[: row.admitted + 1])
        assert row.waste == sum(blocks[: row.admitted]) * size - sum(lengths[: row.admitted])
        assert row.table_bytes == 10 * sum(blocks[: row.admitted])


def test_exact_fit_by_hand() -> None:
    """Four quarters; the first and third leave: half the pool is free, and no hole holds more than a quarter."""
    pool = f.ExactFit()
    places = [pool.enter(f.Request(n, 8_192, 1)) for n in range(4)]
    assert places == [0, 8_192, 16_384, 24_576]
    pool.leave(0)
    pool.leave(16_384)
    assert pool.free_tokens() == 16_384
    assert pool.enter(f.Request(5, 8_193, 1)) is None
    pool.leave(8_192)  # three quarters in one piece
    assert pool.enter(f.Request(6, 24_576, 1)) == 0
    assert pool.enter(f.Request(7, 1, 1)) is None


@pytest.mark.parametrize("size", f.BLOCK_SIZES)
def test_sharing_finds_the_whole_blocks_of_every_prefix(size: int) -> None:
    row = f.sharing(1, size)
    prefixes = [prefix for prefix, _ in f.shared_prompts(1)]
    assert row.possible == sum(prefixes) > 0
    assert row.hit == sum(prefix // size * size for prefix in prefixes)
    blocks = sum(-(-len(prompt) // size) for _, prompt in f.shared_prompts(1))
    assert row.held == blocks * size - row.hit


def test_control_without_common_prefixes_nothing_is_found() -> None:
    pool = f.Paged(16)
    first, second = f.requests(1)[:2]
    for request in (first, second):
        start = request.number * f.WINDOW_TOKENS
        _, found = pool.admit(array("i", range(start, start + request.tokens)))
        assert found == 0


def test_every_request_that_left_gave_its_frames_back() -> None:
    pool = f.Paged(16)
    f.churn(pool, f.requests(2), steps=150)
    for slot in pool.core.slots_used():
        pool.leave(slot)
    assert pool.free_tokens() == 32_768
    assert pool.core.reclaimable_frames(0) == 0


def test_attention_is_measured_at_every_block_size() -> None:
    rows = attention(1, (1, 16, 64), pool_tokens=2_048, context_tokens=1_024, rounds=3)
    assert [(row.block_tokens, row.contexts) for row in rows] == [(1, 2), (16, 2), (64, 2)]
    assert all(row.token_ns > 0 for row in rows)


def test_the_command_prints_the_table_and_the_document(attnix: Attnix) -> None:
    document = json.loads(measured("attnix.study_fragmentation", "--seed", "3", "--no-attention"))
    assert document["placements"] == [json.loads(json.dumps(row._asdict())) for row in f.placements(3)]
    said = attnix("study", "fragmentation", "--seed", "3", "--no-attention")
    assert (said.err, said.status) == ("", 0)
    lines = [line.split() for line in said.out.splitlines()]
    assert ["max-length", "8"] in [words[:2] for words in lines]
    assert max(map(len, said.out.splitlines())) <= 125


def test_overload_prints_a_row_per_load_and_how_much_is_left_at_the_last(attnix: Attnix) -> None:
    flags = [
        "--profile",
        "laptop",
        "--seconds",
        "5",
        "--prompt-tokens",
        "200",
        "--output-tokens",
        "10",
        "--contexts",
        "8",
        "--step-tokens",
        "256",
    ]
    said = attnix("study", "overload", *flags)
    assert (said.err, said.status) == ("", 0)
    lines = said.out.splitlines()
    loads = [line.split()[0] for line in lines if line.split() and line.split()[0].endswith("x")]
    assert loads == ["0.5x", "1x", "2x", "4x"] * 3
    assert sum("of the best goodput" in line for line in lines) == 3
    said = attnix("study", "overload", *flags, "--control", "boot", "--load", "1", "--sysctl", "sched.max_queue=1")
    assert said.status == 0 and sum("1x" in line.split() for line in said.out.splitlines()) == 1
    assert max(map(len, lines)) <= 125
