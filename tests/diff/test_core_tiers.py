"""Hand-made cases of memory tiers for both cores: what must happen to copies, saved tails and transfers, worked out on paper.

Blocks hold 4 tokens; block 0 of a prompt is called b0, and so on.  Device 0 computes, the others are tiers.
"""

from __future__ import annotations

from array import array
from typing import Final, TypeAlias

import pytest

from attnix.kernel.core import Core
from attnix.kernel.coreapi import CoreApi
from attnix.kernel.errors import Panic
from attnix.kernel.fsck import fsck_core
from attnix.kernel.geometry import RowLayout
from attnix.kernel.records import BLOCKED_BY_LOAD, LOADING, NO_COPY, OK, PREFILL, VALID, Plan
from attnix.kernel.twin import TwinCore

SECRET: Final = bytes(range(16))
ROOT: Final = b"r" * 16
SIZE: Final = 4
ALL: Final = 0xFE  # every tier, as a mask of sources
Kind: TypeAlias = type[TwinCore] | type[Core]

pytestmark = pytest.mark.parametrize("kind", [TwinCore, Core])


def ints(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


class Bench:
    """A core, and the transfers that somebody would have to make."""

    def __init__(self, kind: Kind, *capacities: int, size: int = SIZE, entries: int = 8) -> None:
        self.size = size
        self.capacities = list(capacities)
        layout = RowLayout(slots=6, entries=entries)
        self.core: CoreApi = kind(SECRET, size, layout, list(capacities), [memoryview(bytearray(layout.total_bytes))])
        self.flying: list[tuple[int, int, int, int]] = []  # source, frame, target, frame

    def open(self, *tokens: int, sources: int = 0, first_load: int = 0, partial: int = 0) -> int:
        s = self.core.open_slot(0, 1, ROOT)
        self.core.append(s, ints(*tokens))
        self.admit(s, sources, first_load, partial)
        return s

    def admit(self, s: int, sources: int = ALL, first_load: int = 0, partial: int = 0) -> int:
        """Number of loads."""
        result = self.core.admit(s, 0, sources, first_load, partial)
        assert result.status == OK
        loads = self.core.loads()
        for k in range(0, len(loads), 4):
            self.flying.append((loads[k + 1], loads[k + 2], 0, loads[k + 3]))
        return result.loads

    def copy(self, source: int, target: int, blocks: list[int]) -> int:
        begun = self.core.begin_copy(source, target, blocks)
        self.flying += [(source, begun[k + 1], target, begun[k + 2]) for k in range(0, len(begun), 3)]
        return len(begun) // 3

    def save(self, s: int, target: int = 1) -> bool:
        begun = self.core.save_tail(s, target)
        if begun:
            self.flying.append((0, begun[1], target, begun[2]))
        return bool(begun)

    def land(self, good: bool = True, only: int | None = None) -> None:
        """End the transfers under way, or number `only` of them."""
        ending = self.flying[:] if only is None else [self.flying[only]]
        for move in ending:
            self.flying.remove(move)
            self.core.landed(move[2], [move[3]], bytes([good]))
            self.core.unwire(move[0], [move[1]])
        self.sound()

    def compute(self, s: int, most: int = 100) -> None:
        at = self.core.advance(s)
        assert self.plan(s, min(at.ready, most)).status == OK
        self.core.commit(0, b"", b"")

    def plan(self, s: int, count: int) -> Plan:
        return self.core.plan(0, 1, PREFILL.pack(s, self.core.advance(s).computed, count, 0, -1, 0))

    def frames(self, s: int) -> list[int]:
        return array("i", self.core.pagemap(s)[0]).tolist()

    def state(self, device: int, f: int) -> int:
        return self.core.frame_table(device)[0][f]

    def swap_out(self, s: int, target: int = 1) -> None:
        self.save(s, target)
        self.copy(0, target, self.core.row_blocks(s)[::-1])
        self.land()
        self.core.drop(s)
        self.clear()

    def clear(self) -> None:
        """Evict all that can go from hbm."""
        while self.core.evict(0, self.core.oldest(0, 99)):
            pass

    def sound(self) -> None:
        wires = [end for a, f, b, g in self.flying for end in ((a, f), (b, g))]
        assert fsck_core(self.core, self.capacities, self.size, wires) == []


def test_a_saved_tail_survives_drop_and_comes_back(kind: Kind) -> None:
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(10))
    bench.compute(a)
    bench.swap_out(a)
    assert bench.core.free_frames(0) == 6 and bench.core.residency(a) == bytes([1, 1, 1])
    assert bench.core.tail_of(a)[1] == 10
    assert bench.admit(a) == 3
    assert bench.core.advance(a) == (0, 0, BLOCKED_BY_LOAD)
    bench.land()
    assert bench.core.advance(a) == (10, 0, -1), "nothing is computed again"
    assert bench.core.slot_row(a).computed_total == 10
    bench.core.close_slot(a)
    bench.sound()
    assert bench.core.free_frames(1) == 4, "the tail goes with its context, whole blocks stay"


def test_the_tail_of_a_fork_is_saved_once_and_lasts_as_long_as_either(kind: Kind) -> None:
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(6))
    bench.compute(a)
    bench.save(a)
    (b,) = bench.core.fork(a, 1)
    tail = bench.core.tail_of(a)[0]
    assert bench.core.tail_of(b) == (tail, 6) and not bench.save(b), "it is saved already"
    bench.land()
    bench.core.close_slot(a)
    bench.core.drop(b)
    bench.clear()
    assert bench.core.residency(b) == bytes([NO_COPY, 1])
    bench.core.append(b, ints(7))
    bench.admit(b)
    bench.core.close_slot(b)
    bench.land()
    assert bench.core.free_frames(1) == 6 and bench.core.free_frames(0) == 6


def test_a_log_that_grew_past_its_tail_loads_it_and_computes_the_rest(kind: Kind) -> None:
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(6))
    bench.compute(a)
    bench.swap_out(a)
    bench.core.append(a, ints(*range(6, 11)))
    assert bench.admit(a) == 2, "b0 and the two tokens of b1"
    bench.land()
    assert bench.core.advance(a) == (6, 5, -1)
    bench.compute(a)
    assert bench.core.slot_row(a)[:2] == (11, 11)
    bench.sound()


def test_a_log_may_grow_while_its_tail_is_loading(kind: Kind) -> None:
    """The frame becomes that of a whole block, which others may find and wait for."""
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(6))
    bench.compute(a)
    bench.swap_out(a)
    bench.admit(a)
    bench.core.append(a, ints(6, 7, 8))
    assert bench.admit(a) == 0
    b = bench.open(*range(8))
    assert bench.frames(b) == bench.frames(a)[:2]
    bench.land()
    assert bench.core.advance(b)[:2] == (4, 0), "a goes on behind the two tokens"
    assert bench.core.advance(a) == (6, 3, -1)
    bench.compute(a)
    assert bench.core.advance(b) == (8, 0, -1)
    bench.sound()


def test_a_load_that_fails_is_computed_and_nobody_is_stuck(kind: Kind) -> None:
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(9))
    bench.compute(a)
    bench.swap_out(a)
    bench.admit(a)
    b = bench.open(*range(8))
    assert bench.core.advance(b) == (0, 0, BLOCKED_BY_LOAD)
    bench.land(good=False)
    assert bench.core.advance(b) == (0, 8, -1), "who looks first fills it"
    assert bench.core.advance(a) == (0, 0, b)
    bench.compute(b)
    assert bench.core.advance(a) == (8, 1, -1)
    bench.sound()


def test_a_load_that_fails_takes_back_what_was_counted_on(kind: Kind) -> None:
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(8))
    bench.compute(a)
    bench.swap_out(a)
    bench.core.append(a, ints(8, 9))
    bench.admit(a)
    bench.core.skip_loading(a)
    assert bench.core.advance(a) == (8, 2, -1)
    assert bench.plan(a, 2).status == OK
    bench.land(good=False, only=1)
    bench.core.rollback(0)
    assert bench.core.slot_row(a).computed == 4, "b0 may still come"
    bench.land()
    assert bench.core.advance(a) == (4, 6, -1)
    bench.compute(a)
    bench.sound()


def test_a_pass_behind_gates_may_come_back_before_its_loads_are_reported(kind: Kind) -> None:
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(6))
    bench.compute(a)
    bench.swap_out(a)
    bench.core.append(a, ints(6, 7))
    bench.admit(a)
    bench.core.skip_loading(a)
    bench.compute(a)
    assert bench.core.slot_row(a).computed == 8 and bench.state(0, bench.frames(a)[1]) == LOADING
    bench.land()
    assert bench.state(0, bench.frames(a)[1]) == VALID, "the load and the pass have filled it together"
    bench.sound()


def test_a_child_does_not_count_on_what_its_parent_waits_for_behind_gates(kind: Kind) -> None:
    bench = Bench(kind, 8, 6)
    a = bench.open(*range(6))
    bench.compute(a)
    bench.swap_out(a)
    bench.admit(a)
    bench.core.skip_loading(a)
    assert bench.core.slot_row(a).computed == 6
    (b,) = bench.core.fork(a, 1)
    assert bench.core.slot_row(b).computed == 0
    bench.land(good=False)
    assert bench.admit(b) == 1, "the saved tail is the child's too"
    assert bench.core.advance(b) == (0, 4, -1)
    bench.land()
    bench.compute(b)
    assert bench.core.advance(b) == (6, 0, -1)
    bench.sound()


def test_a_block_whose_parent_is_nowhere_is_found_when_the_parent_is_back(kind: Kind) -> None:
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(8))
    bench.compute(a)
    b1 = bench.core.row_blocks(a)[0]
    bench.copy(0, 1, [b1])
    bench.land()
    bench.core.close_slot(a)
    bench.clear()
    assert bench.core.ghosts() == 1 and bench.core.free_frames(0) == 6
    a = bench.open(*range(9), sources=ALL)
    assert [move[0] for move in bench.flying] == [1], "b1 is loaded"
    assert bench.core.ghosts() == 0
    assert bench.core.advance(a) == (0, 4, -1)
    bench.compute(a)
    bench.land()
    assert bench.core.advance(a) == (8, 1, -1)
    bench.core.close_slot(a)
    bench.clear()
    bench.core.evict(1, [b1])
    assert bench.core.ghosts() == 0 and bench.core.find_key(bench.core.hash(ROOT + ints(0, 1, 2, 3))) == -1
    bench.sound()


def test_too_many_ghosts_take_what_continues_them_along(kind: Kind) -> None:
    """16 + 40 frames have 120 blocks.  Each round leaves one block in the tier and nine ghosts before it."""
    bench = Bench(kind, 16, 40, size=1, entries=16)
    for k in range(30):
        a = bench.open(100 + k, *range(9))
        bench.compute(a)
        bench.copy(0, 1, bench.core.row_blocks(a)[:1])
        bench.land()
        bench.core.close_slot(a)
        bench.clear()
        ghosts = bench.core.ghosts()
        assert ghosts == 9 * (40 - bench.core.free_frames(1))
        assert ghosts <= 108, "twelve rounds fill the 120 blocks"
    assert 40 - 12 <= bench.core.free_frames(1) < 40
    bench.sound()


def partial(bench: Bench) -> tuple[int, int]:
    """Slot a has computed 0..7; slot b begins like it for six tokens."""
    a = bench.open(*range(8))
    bench.compute(a)
    bench.core.close_slot(a)
    b = bench.open(0, 1, 2, 3, 4, 5, 9, 9, 9, partial=1)
    return b, bench.core.pending_copy(b)


def test_the_source_of_a_partial_hit_is_no_victim(kind: Kind) -> None:
    bench = Bench(kind, 6, 6)
    b, source = partial(bench)
    assert source >= 0 and bench.core.reclaimable_frames(0) == 0
    assert bench.core.advance(b) == (6, 3, -1)
    plan = bench.plan(b, 3)
    assert plan.copies == ints(source, bench.frames(b)[1])
    bench.core.rollback(0)
    assert bench.core.pending_copy(b) == source, "the copy may not have been made"
    assert bench.plan(b, 3).copies == plan.copies
    bench.core.commit(0, b"", b"")
    assert bench.core.pending_copy(b) == -1 and bench.core.reclaimable_frames(0) == 1
    counters = bench.core.counters()
    assert (counters.partial_hits, counters.partial_tokens) == (1, 2)
    bench.sound()


def test_a_partial_hit_that_is_given_up_or_stolen_leaves_nothing(kind: Kind) -> None:
    bench = Bench(kind, 8, 6)
    b, source = partial(bench)
    c = bench.open(0, 1, 2, 3, 4, 5, 9, 9)
    assert bench.core.advance(c) == (4, 0, b)
    bench.core.steal(c)
    assert bench.core.pending_copy(b) == -1
    assert bench.core.advance(c) == (4, 4, -1), "the copy was never made"
    bench.core.close_slot(c)
    bench.core.close_slot(b)
    bench.clear()
    b, source = partial(bench)
    assert source >= 0
    bench.core.truncate(b, 5)
    assert bench.core.pending_copy(b) == -1
    bench.admit(b)
    assert bench.core.advance(b) == (4, 1, -1)
    bench.sound()


def test_two_contexts_begin_like_the_same_block(kind: Kind) -> None:
    bench = Bench(kind, 8, 6)
    b, source = partial(bench)
    c = bench.open(0, 1, 2, 3, 4, 5, 6, 8, 8, partial=1)
    assert bench.core.pending_copy(c) == source
    assert bench.core.advance(c) == (7, 2, -1) and bench.core.advance(b) == (6, 3, -1)
    record = PREFILL.pack(b, 6, 3, 0, -1, 0) + PREFILL.pack(c, 7, 2, 0, -1, 0)
    plan = bench.core.plan(0, 2, record)
    assert plan.copies == ints(source, bench.frames(b)[1], source, bench.frames(c)[1])
    bench.core.commit(0, b"", b"")
    assert bench.core.reclaimable_frames(0) == 1
    bench.sound()


def test_a_partial_hit_in_a_tier_is_loaded(kind: Kind) -> None:
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(8))
    bench.compute(a)
    bench.swap_out(a)
    b = bench.open(0, 1, 2, 3, 4, 5, 9, 9, 9, sources=ALL, partial=1)
    assert len(bench.flying) == 2
    bench.land()
    assert bench.core.advance(b) == (6, 3, -1)
    bench.compute(b)
    bench.sound()


def test_a_block_that_is_being_copied_away_stays_until_that_is_done(kind: Kind) -> None:
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(4))
    bench.compute(a)
    bench.copy(0, 1, bench.core.row_blocks(a))
    bench.core.close_slot(a)
    bench.core.evict(0, bench.core.oldest(0, 9))
    assert bench.core.free_frames(0) == 5, "it is being read"
    bench.land(only=0)
    bench.clear()
    b = bench.open(*range(5), sources=ALL)
    assert len(bench.flying) == 1 and bench.state(0, bench.frames(b)[0]) == LOADING
    block = array("i", bench.core.frame_table(0)[3])[bench.frames(b)[0]]
    assert bench.core.copied([block], 1) == b"\1" and bench.core.copied([block], 2) == b"\2"
    bench.land()
    assert bench.core.advance(b) == (4, 1, -1)
    bench.sound()


def test_a_source_that_is_itself_arriving(kind: Kind) -> None:
    bench = Bench(kind, 6, 6, 6)
    a = bench.open(*range(4))
    bench.compute(a)
    (block,) = bench.core.row_blocks(a)
    bench.swap_out(a, target=2)
    bench.copy(2, 1, [block])
    b = bench.open(*range(4), sources=ALL)
    (_, load) = bench.flying
    assert load[0] == 1 and bench.state(1, load[1]) == LOADING
    bench.land(only=0)
    bench.land(only=0)
    assert bench.core.advance(b)[:2] == (4, 0)
    bench.sound()


def test_a_copy_that_failed_is_no_source(kind: Kind) -> None:
    """Its frame is kept by a load that was to follow; the next admission takes the other copy."""
    bench = Bench(kind, 8, 6, 6)
    a = bench.open(*range(4))
    bench.compute(a)
    (block,) = bench.core.row_blocks(a)
    bench.swap_out(a, target=2)
    bench.copy(2, 1, [block])
    dead = bench.core.copies_of(block)[1]
    bench.core.wire(1, [dead])
    bench.core.landed(1, [dead], b"\0")
    b = bench.open(*range(4), sources=ALL)
    assert bench.flying[-1][0] == 2
    bench.core.unwire(1, [dead])
    bench.core.unwire(2, [bench.flying.pop(0)[1]])
    assert bench.core.free_frames(1) == 6
    bench.land()
    assert bench.core.advance(b)[:2] == (4, 0)
    bench.sound()


def test_a_frame_that_a_transfer_uses_outlives_its_context(kind: Kind) -> None:
    """I4: closed while its tail is being saved and its block loaded."""
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(6))
    bench.compute(a)
    bench.save(a)
    f = bench.frames(a)[1]
    bench.core.close_slot(a)
    bench.sound()
    assert bench.state(0, f) != 0
    others = [bench.open(*range(100 + 4 * k, 104 + 4 * k)) for k in range(4)]
    assert all(f not in bench.frames(s) for s in others)
    bench.land()
    assert bench.state(0, f) == 0 and bench.core.free_frames(1) == 6, "nobody will come back to the tail"
    with pytest.raises(Panic, match="I4"):
        bench.core.unwire(0, [f])


def test_the_tail_of_a_block_that_others_wait_for_is_not_saved(kind: Kind) -> None:
    """Whoever fills it next writes it from its first token, while the transfer would read it."""
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(4))
    bench.compute(a, most=2)
    assert not bench.save(a)
    bench.sound()


def test_what_landed_last_is_not_older_than_its_children(kind: Kind) -> None:
    """A context closed while it was loading: its blocks become cache as they land, parents first."""
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(16))
    bench.compute(a)
    bench.swap_out(a)
    bench.admit(a)
    bench.core.close_slot(a)
    bench.core.landed(0, [move[3] for move in bench.flying], b"\1" * 4)
    for move in bench.flying:
        bench.core.unwire(1, [move[1]])
    bench.flying.clear()
    bench.sound()
    assert bench.core.evict(0, bench.core.oldest(0, 1)) == 1
    assert bench.core.evict(0, bench.core.oldest(0, 3)) == 3


def test_adoption_believes_nothing_that_does_not_fit(kind: Kind) -> None:
    bench = Bench(kind, 6, 6)
    core = bench.core
    core.claim(1, [0, 1, 2, 3])
    with pytest.raises(ValueError, match="claim"):
        core.claim(1, [3])
    with pytest.raises(ValueError, match="claim"):
        core.claim(1, [4, 4])
    b0 = core.adopt(1, 0, 1, ROOT, -1, ints(0, 1, 2, 3))
    b1 = core.adopt(1, 1, 1, ROOT, b0, ints(4, 5, 6, 7))
    assert b0 >= 0 and b1 >= 0
    assert core.adopt(1, 2, 1, ROOT, -1, ints(0, 1, 2, 3)) == -1, "there is one already"
    nobody = next(b for b in range(20) if b not in (b0, b1))
    assert core.adopt(1, 2, 1, ROOT, nobody, ints(8, 9, 10, 11)) == -1, "its parent is not known"
    assert core.adopt(1, 2, 2, ROOT, -1, ints(0, 1, 2, 3)) == -1, "the key is another domain's"
    with pytest.raises(Panic, match="adopt"):
        core.adopt(1, 2, 1, ROOT, -1, ints(1))
    core.unclaim(1, 2)
    core.unclaim(1, 3)
    with pytest.raises(Panic, match="unclaim"):
        core.unclaim(1, 3)
    bench.sound()
    a = bench.open(*range(9), sources=ALL)
    bench.land()
    assert core.advance(a) == (8, 1, -1)
    assert core.facts([b1])[24:28] == ints(0)[:4]


def test_eight_devices_and_not_nine(kind: Kind) -> None:
    bench = Bench(kind, 6, 2)
    core = bench.core
    for device in range(2, 8):
        core.set_capacity(device, device)
        bench.capacities.append(device)
    for device in (0, 8, 9, -1):
        with pytest.raises(ValueError, match="tier"):
            core.set_capacity(device, 1)
    a = bench.open(*range(8))
    bench.compute(a)
    blocks = core.row_blocks(a)[::-1]
    for device in range(1, 8):
        assert bench.copy(device - 1, device, blocks) == 2
        bench.land()
    assert core.copied(blocks, 0x80) == b"\2\2" and core.facts(blocks)[38::40] == b"\xff\xff"
    core.drop(a)
    bench.clear()
    for device in range(1, 7):
        core.forget_copies(device, blocks)
    assert core.residency(a) == b"\7\7"
    with pytest.raises(Panic, match="in use"):
        core.set_capacity(7, 0)
    assert bench.admit(a) == 2
    bench.land()
    assert core.advance(a)[:2] == (8, 0)
    core.lose(7)
    core.set_capacity(7, 0)
    bench.capacities[7] = 0
    bench.sound()


def test_who_waits_for_a_partial_hit_does_not_count_on_a_copy_that_was_never_made(kind: Kind) -> None:
    bench = Bench(kind, 8, 6)
    b, source = partial(bench)
    c = bench.open(0, 1, 2, 3, 4, 5, 9, 9)
    assert source >= 0 and bench.core.advance(c) == (4, 0, b)
    bench.core.drop(b)
    assert bench.core.advance(c) == (4, 4, -1)
    bench.sound()


def test_a_log_that_is_cut_before_its_tail_loses_it(kind: Kind) -> None:
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(6))
    bench.compute(a)
    bench.swap_out(a)
    bench.core.truncate(a, 5)
    assert bench.core.tail_of(a) == (-1, 0) and bench.core.free_frames(1) == 5
    bench.core.append(a, ints(9, 9))
    assert bench.admit(a) == 1
    bench.land()
    assert bench.core.advance(a) == (4, 3, -1)
    bench.sound()


def test_every_block_looked_for_is_a_hit_a_load_or_a_miss(kind: Kind) -> None:
    """b0, b1 and b2 are below.  Computing b0 and loading the others: one miss, two loads.  Who comes later finds all three here."""
    bench = Bench(kind, 6, 6)
    a = bench.open(*range(12))
    bench.compute(a)
    bench.swap_out(a)
    before = bench.core.counters()
    assert (before.lookup_hits, before.lookup_misses) == (0, 3)
    b = bench.open(*range(12), sources=ALL, first_load=1)
    assert len(bench.flying) == 2
    after = bench.core.counters()
    assert (after.lookup_hits, after.lookup_misses) == (0, 4)
    c = bench.open(*range(12), sources=ALL)
    assert len(bench.flying) == 2
    last = bench.core.counters()
    assert (last.lookup_hits, last.lookup_misses) == (3, 4)
    bench.land()
    bench.core.close_slot(b)
    bench.core.close_slot(c)
    bench.sound()
