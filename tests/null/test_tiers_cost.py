"""What things cost: the fit finds the numbers that made its data, and the split is the one that trying all would choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnix.kernel.cost import Costs, Link, Prefill, PrefillFit, split

PASSES = [(1, 64), (16, 0), (100, 0), (512, 0), (512, 512), (300, 1024), (40, 2000), (7, 3), (256, 4096)]


def fit_of(truth: Prefill, passes: list[tuple[int, int]]) -> Prefill | None:
    fit = PrefillFit()
    for tokens, cached in passes:
        fit.seen(tokens, tokens * (cached + tokens / 2), int(truth.ns(tokens, cached)))
    return fit.known()


@pytest.mark.parametrize("truth", [Prefill(90_000, 11, 2_000_000), Prefill(2_500, 0.5, 40_000), Prefill(1_000, 0, 0)])
def test_the_fit_recovers_the_numbers_that_made_its_data(truth: Prefill) -> None:
    found = fit_of(truth, PASSES * 3)
    assert found is not None
    assert found.a == pytest.approx(truth.a, rel=1e-3)
    assert found.b == pytest.approx(truth.b, rel=1e-3, abs=1e-3)
    assert found.k == pytest.approx(truth.k, rel=2e-3, abs=truth.a)


def test_nothing_is_known_before_enough_was_seen() -> None:
    fit = PrefillFit()
    for n in range(3):
        assert fit.known() is None, f"after {n} passes"
        fit.seen(64, 64 * 32, 1000)
    assert fit.known() is None  # the oldest of three weighs a little less than one
    fit.seen(64, 64 * 32, 1000)
    assert fit.known() is not None


def test_older_passes_are_forgotten() -> None:
    """A machine that becomes three times slower is believed after a few hundred passes."""
    before, after = Prefill(1000, 1, 10_000), Prefill(3000, 3, 30_000)
    fit = PrefillFit()
    for truth, rounds in ((before, 30), (after, 60)):
        for tokens, cached in PASSES * rounds:
            fit.seen(tokens, tokens * (cached + tokens / 2), int(truth.ns(tokens, cached)))
    known = fit.known()
    assert known is not None
    assert known.ns(512, 512) == pytest.approx(after.ns(512, 512), rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 8192), st.integers(1, 10**10)), min_size=4, max_size=40))
def test_no_part_is_ever_negative_whatever_is_measured(seen: list[tuple[int, int, int]]) -> None:
    fit = PrefillFit()
    for tokens, cached, elapsed_ns in seen:
        fit.seen(tokens, tokens * (cached + tokens / 2), elapsed_ns)
    known = fit.known()
    assert known is not None
    assert min(known) >= 0
    assert known.ns(10, 10) > 0
    assert known.ns(0, 1000) == 0


def test_passes_of_one_size_still_give_a_usable_estimate() -> None:
    """Three unknowns and one equation: what comes out must at least say what that size costs."""
    found = fit_of(Prefill(1000, 0, 5000), [(64, 0)] * 20)
    assert found is not None
    assert found.ns(64, 0) == pytest.approx(69_000, rel=0.01)


def test_a_link_learns_bandwidth_from_many_frames_and_latency_from_one() -> None:
    link = Link()
    assert link.ns(1000) == 0
    for _ in range(40):
        link.seen(1_000_000, 1_000_000, 10)  # 1 GB/s
        link.seen(1000, 51_000, 1)  # of which 1 us is the bytes' own time
    assert link.bytes_s == pytest.approx(1e9)
    assert link.latency_ns == pytest.approx(50_000)
    assert link.ns(2_000_000) == pytest.approx(2_050_000)
    moves, moved = link.moves, link.moved_bytes
    link.seen(0, 100, 1)
    link.seen(100, 0, 1)
    assert (link.moves, link.moved_bytes) == (moves, moved) == (80, 40 * 1_001_000), (
        "a failed transfer measures nothing"
    )


def test_one_frame_alone_is_not_counted_twice() -> None:
    """All that is known is what one frame took: two take twice that, and none of it is latency as well."""
    link = Link()
    link.seen(1000, 50_000, 1)
    assert link.ns(1000) == pytest.approx(50_000)
    link.seen(1000, 50_000, 1)
    assert link.ns(1000) == pytest.approx(50_000)


# -- the split ------------------------------------------------------------------------------------------------------


def test_the_split_of_a_prompt_by_hand() -> None:
    """a = 100 ns, b = 10 ns a pair, blocks of 4 tokens: block i takes 4*100 + 10*4*(4i + 2) = 480 + 160 i ns to compute and
    1,000 to load.  So 0..3 (480, 640, 800, 960) are computed and from 4 (1,120) on they are loaded."""
    choice = split(Prefill(100, 10, 0), Link(32e6), 10, 0, 4, 32)
    assert choice.first_load == 4
    assert choice.compute_ns == pytest.approx(480 + 640 + 800 + 960)
    assert choice.load_ns == pytest.approx(6000)
    assert choice.all_load_ns == pytest.approx(10_000)
    assert choice.all_compute_ns == pytest.approx(10 * 480 + 160 * 45)
    # Behind 8 cached tokens the same blocks lie deeper: 800, 960, then 1,120.
    assert split(Prefill(100, 10, 0), Link(32e6), 8, 8, 4, 32).first_load == 2
    # A start-up cost of 1,000 ns eats what computing four blocks saves (1,120 - 1,000 remains), one of 1,200 more.
    assert split(Prefill(100, 10, 1000), Link(32e6), 10, 0, 4, 32).first_load == 4
    assert split(Prefill(100, 10, 1200), Link(32e6), 10, 0, 4, 32).first_load == 0


def test_without_measurements_everything_is_loaded() -> None:
    assert split(None, Link(32e6), 10, 0, 4, 32).first_load == 0
    assert split(Prefill(1, 0, 0), Link(), 10, 0, 4, 32).first_load == 0


@given(
    a=st.floats(0, 5000), b=st.floats(0, 100), k=st.floats(0, 1e5), bytes_s=st.floats(1e3, 1e9),
    latency_ns=st.floats(0, 1e5), blocks=st.integers(1, 40), cached=st.integers(0, 40), size=st.sampled_from([1, 4, 16]),
)  # fmt: skip
def test_the_split_is_the_best_of_all(
    a: float, b: float, k: float, bytes_s: float, latency_ns: float, blocks: int, cached: int, size: int
) -> None:
    prefill, link, frame_bytes = Prefill(a, b, k), Link(bytes_s, latency_ns), 8 * size

    def total_ns(head: int) -> float:
        tail = blocks - head
        return prefill.ns(head * size, cached) + (link.ns(tail * frame_bytes) if tail else 0.0)

    choice = split(prefill, link, blocks, cached, size, frame_bytes)
    assert 0 <= choice.first_load <= blocks
    assert choice.compute_ns + choice.load_ns == pytest.approx(total_ns(choice.first_load))
    assert total_ns(choice.first_load) <= min(map(total_ns, range(blocks + 1))) * (1 + 1e-9) + 1e-6


def test_what_a_block_costs_to_rebuild_grows_with_its_depth() -> None:
    costs = Costs(1, 32, 4)
    assert costs.rebuild_ns(0, 100) == 0, "unknown"
    truth = Prefill(1000, 2, 50_000)
    for tokens, cached in PASSES * 3:
        costs.prefill[0].seen(tokens, tokens * (cached + tokens / 2), int(truth.ns(tokens, cached)))
    assert costs.rebuild_ns(0, 0) == pytest.approx(4 * 1000 + 2 * 4 * 2, rel=0.01)
    assert costs.rebuild_ns(0, 1000) == pytest.approx(4 * 1000 + 2 * 4 * 1002, rel=0.01)
    assert costs.rebuild_ns(7, 0) == 0, "a tier computes nothing"
