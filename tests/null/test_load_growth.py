"""What is learnt of generated lengths, and the growth reserve made of it; expected values worked out by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attnix.kernel.growth import Lengths, Need, bin_of, last_of, reserve


def learnt(*lengths: tuple[int, bool]) -> Lengths:
    """Each 20 times over: forgetting within so few is below 1%."""
    made = Lengths()
    for _ in range(20):
        for tokens, cut in lengths:
            made.seen(tokens, cut)
    return made


@given(st.integers(0, 1 << 20))
def test_bins_are_an_eighth_of_an_octave_wide_at_most(tokens: int) -> None:
    last = last_of(bin_of(tokens))
    assert tokens <= last and last - tokens <= max(0, tokens // 8)
    assert bin_of(last + 1) == bin_of(tokens) + 1


def test_bins_by_hand() -> None:
    assert [bin_of(n) for n in (0, 15, 16, 17, 18, 31, 32, 35, 36)] == [0, 15, 16, 16, 17, 23, 24, 24, 25]


def test_nothing_is_expected_before_enough_has_been_seen() -> None:
    made = Lengths()
    for _ in range(16):  # weighted: a little less than 16 of them
        assert made.more(0, 100, 0.5) == 0
        made.seen(10, False)
    assert made.more(0, 100, 0.5) == 0
    made.seen(10, False)
    assert made.more(0, 100, 0.5) == 10


def test_quantiles_of_a_known_history() -> None:
    """4, 8, 12 and 15 tokens, equally often."""
    made = learnt((4, False), (8, False), (12, False), (15, False))
    assert [made.more(0, 100, q) for q in (0.2, 0.45, 0.7, 0.9)] == [4, 8, 12, 15]
    # Of those that have 5 already, a third each ends at 8, 12 and 15.
    assert [made.more(5, 100, q) for q in (0.3, 0.6, 0.9)] == [3, 7, 10]
    assert made.more(0, 6, 0.9) == 6  # never more than it may
    assert made.more(6, 6, 0.9) == 0


def test_what_was_cut_off_does_not_count_as_short() -> None:
    """Half are cut at 4; of those that went on, half end at 8 and half at 12.  Kaplan-Meier: P(longer than 4) is 1, of the
    two of four at risk at 8 one ends: P(longer than 8) = 1/2.  Taken as ends, the median would be 4."""
    made = learnt((4, True), (4, True), (8, False), (12, False))
    assert made.more(0, 100, 0.45) == 8
    assert made.more(0, 100, 0.9) == 12


def test_those_that_never_end_by_themselves_are_expected_to_get_as_long_as_the_longest() -> None:
    made = learnt((32, True))
    assert made.more(0, 32, 0.5) == 32
    assert made.more(0, 1000, 0.5) == 32
    assert made.more(40, 1000, 0.5) == 40  # older than all: as long again


def test_what_was_long_ago_is_forgotten() -> None:
    made = learnt((12, False))
    for _ in range(5000):  # 0.998 ** 5000 is 0.00005
        made.seen(3, False)
    assert made.more(0, 100, 0.999) == 3


def test_the_worst_moment_by_hand() -> None:
    """Blocks of 1, so a context of m more tokens grows by m - 1 frames.  A holds 2 and gets 9 more, B holds 5 and gets 5, C
    joins with 3 and gets none.

    Now 10.  Before B ends: A and B have 2 + 4 and 5 + 4 = 15, C has gone.  When A ends: 10.  So 5 must be left.
    If C gets 5 too, all three are there before B ends: 6 + 9 + 7 = 22, so 12 more than now.  If C gets 2, the three have
    3 + 6 + 4 = 13 before it ends, which is less than 15."""
    a, b = Need(2, 0, 9), Need(5, 0, 5)
    assert reserve([a, b], Need(3, 0, 0), 1) == 5
    assert reserve([a, b], Need(3, 0, 5), 1) == 12
    assert reserve([a, b], Need(3, 0, 2), 1) == 5
    assert reserve([], Need(3, 0, 9), 1) == 8
    assert reserve([Need(50, 0, 2)], Need(1, 0, 31), 1) == 2  # what the large one gives back is enough for the rest


def test_room_in_last_blocks_counts() -> None:
    """Blocks of 16.  33 more tokens: 32 need a place, 16 of them have one, and on average half a block is begun in vain."""
    assert reserve([], Need(3, 16, 33), 16) == 2
    assert reserve([], Need(3, 0, 33), 16) == 3
    assert reserve([Need(3, 8, 33)] * 9, Need(3, 8, 33), 16) == 20  # 24 each: one or two blocks


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), max_size=8),
    st.tuples(st.integers(0, 20), st.integers(0, 50)),
)
def test_the_reserve_is_what_a_simulation_of_it_needs(active: list[tuple[int, int]], joining: tuple[int, int]) -> None:
    """Blocks of 1: everybody gets a token per tick, and a frame for the one before it; at its end it gives all back."""
    everyone = [*active, joining]
    held = sum(frames for frames, _ in everyone)
    ticks = range(1, max(m for _, m in everyone) + 1)
    worst = max((sum(frames + tick - 1 for frames, more in everyone if more >= tick) for tick in ticks), default=0)
    needs = [Need(frames, 0, more) for frames, more in everyone]
    assert reserve(needs[:-1], needs[-1], 1) == max(0, worst - held)
