"""Hand-made cases for both cores: what must happen to shared, cut, stolen and copied blocks, worked out on paper.

Most of these once failed on the twin.  Blocks hold 4 tokens; block 0 of a prompt is called b0, and so on.
"""

from __future__ import annotations

from array import array
from typing import Final, TypeAlias

import pytest

from attnix.kernel.batch import SAMPLE, SEQ, SEQ_BYTES, unpack_seqs
from attnix.kernel.core import Core
from attnix.kernel.coreapi import CoreApi
from attnix.kernel.errors import Panic
from attnix.kernel.fsck import fsck_core
from attnix.kernel.geometry import RowLayout
from attnix.kernel.records import EVICT, LENGTH, NOROOM, OK, PREFILL, STOP, Counters, Plan
from attnix.kernel.twin import TwinCore

SECRET: Final = bytes(range(16))
ROOT: Final = b"r" * 16
SIZE: Final = 4
LAYOUT: Final = RowLayout(slots=6, entries=8)
Kind: TypeAlias = type[TwinCore] | type[Core]

pytestmark = pytest.mark.parametrize("kind", [TwinCore, Core])


def make(kind: Kind, *capacities: int, hash_bits: int = 128) -> CoreApi:
    rows = [memoryview(bytearray(LAYOUT.total_bytes)) for _ in capacities]
    return kind(SECRET, SIZE, LAYOUT, list(capacities), rows, hash_bits)


def ints(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def frames(core: CoreApi, s: int) -> list[int]:
    return array("i", core.pagemap(s)[0]).tolist()


def opened(core: CoreApi, *tokens: int, device: int = 0, domain: int = 1) -> int:
    s = core.open_slot(device, domain, ROOT)
    core.append(s, ints(*tokens))
    assert core.admit(s, 0).status == OK
    return s


def chunk(core: CoreApi, s: int, most: int = 100, flags: int = 0) -> Plan:
    """Plan what slot s may compute next (its last token again if nothing is left)."""
    total = core.slot_row(s).tokens
    at = core.advance(s)
    start, count = (at.computed, min(at.ready, most)) if at.computed < total else (total - 1, 1)
    return core.plan(core.slot_device(s), 1, PREFILL.pack(s, start, count, flags, -1, 0))


def compute(core: CoreApi, s: int, most: int = 100) -> None:
    assert chunk(core, s, most).status == OK
    core.commit(core.slot_device(s), b"", b"")


def sound(core: CoreApi, *capacities: int) -> None:
    assert fsck_core(core, list(capacities), SIZE) == []


def test_a_cut_block_with_a_copy_pending_keeps_its_content(kind: Kind) -> None:
    """The tail of a fork is regrown to a full block (so it can be found), then cut again before the copy was made."""
    core = make(kind, 8)
    a = opened(core, 1, 1, 1, 1, 2, 2)
    compute(core, a)
    core.fork(a, 1)
    core.append(a, ints(3, 3))
    core.admit(a, 0)
    assert core.pending_copy(a) >= 0
    core.truncate(a, 6)
    assert core.admit(a, 0).status == OK
    plan = chunk(core, a)
    (seq,) = unpack_seqs(plan.seqs)
    copied = array("i", plan.copies).tolist()[1::2]
    assert seq.write_from <= 4 or frames(core, a)[1] in copied, "reads tokens 4 and 5 from a frame that nobody wrote"
    sound(core, 8)


def test_a_full_block_that_is_needed_in_part_is_not_written(kind: Kind) -> None:
    core = make(kind, 8)
    a = opened(core, *range(8))
    b = opened(core, *range(8))
    for _ in range(2):
        assert core.advance(b).blocked_by == a
        core.steal(b)
        compute(core, b)
    core.truncate(a, 6)
    core.admit(a, 0)
    assert core.advance(a)[:2] == (6, 0)


def test_a_private_block_that_is_cut_and_regrown_is_computed_again(kind: Kind) -> None:
    """Every key collides, so the second block is private; VALID it must not stay when its tokens change."""
    core = make(kind, 8, hash_bits=0)
    opened(core, 1, 1, 1, 1)
    b = opened(core, 2, 2, 2, 2)
    compute(core, b)
    core.truncate(b, 2)
    core.append(b, ints(3, 3))
    core.admit(b, 0)
    assert core.advance(b)[:2] == (2, 2)


def test_the_source_of_a_pending_copy_is_not_written(kind: Kind) -> None:
    """After a fork one side waits for its copy; the other, alone on the frame now, cuts it and writes other tokens."""
    core = make(kind, 8)
    a = opened(core, 1, 1, 1, 1, 2, 2)
    compute(core, a)
    (b,) = core.fork(a, 1)
    core.append(a, ints(3))
    core.admit(a, 0)
    source = core.pending_copy(a)
    assert source == frames(core, b)[1]
    core.truncate(b, 5)
    core.append(b, ints(9))
    assert core.admit(b, 0).status == OK
    assert frames(core, b)[1] != source
    sound(core, 8)


def test_a_pending_copy_gives_way_to_a_block_that_was_filled_meanwhile(kind: Kind) -> None:
    core = make(kind, 8)
    a = opened(core, 1, 1, 1, 1, 2, 2)
    compute(core, a)
    core.fork(a, 1)
    core.append(a, ints(3, 3))
    core.admit(a, 0)
    whole = frames(core, a)[1]
    c = opened(core, 1, 1, 1, 1, 2, 2, 3, 3)
    assert core.advance(c).blocked_by == a
    core.steal(c)
    compute(core, c)
    assert core.advance(a).computed == 8
    core.truncate(a, 7)
    core.append(a, ints(9))
    core.admit(a, 0)
    assert core.pending_copy(a) == whole, "token 6 lies only in the block that the other slot computed"
    sound(core, 8)


def test_cutting_a_log_that_was_never_mapped(kind: Kind) -> None:
    core = make(kind, 8)
    a = opened(core, 1, 1, 1, 1)
    core.append(a, ints(*range(12)))
    core.truncate(a, 10)
    assert core.slot_row(a)[:3] == (10, 0, 1)


def test_a_cut_filler_that_regrows_to_the_same_tokens(kind: Kind) -> None:
    core = make(kind, 3)
    a = opened(core, *range(8))
    core.truncate(a, 6)
    core.append(a, ints(6, 7))
    assert core.admit(a, 0).status == OK
    sound(core, 3)
    compute(core, a)
    assert core.slot_row(a).computed == 8


def test_a_cut_filler_leaves_the_block_to_those_who_wait(kind: Kind) -> None:
    core = make(kind, 8)
    a = opened(core, *range(4))
    compute(core, a, most=2)
    b = opened(core, *range(4))
    core.truncate(a, 3)
    assert core.advance(b) == (0, 4, -1)
    core.admit(a, 0)
    assert core.advance(a)[:2] == (0, 3)
    assert frames(core, a) != frames(core, b)
    sound(core, 8)


def test_who_steals_a_block_takes_what_was_computed_of_it(kind: Kind) -> None:
    """Both would otherwise rely on the same positions, and a failed pass of one would ruin them for the other."""
    core = make(kind, 8)
    a = opened(core, *range(6))
    compute(core, a, most=2)
    b = opened(core, *range(6))
    assert core.advance(b) == (0, 0, a)
    core.steal(b)
    assert core.advance(b)[:2] == (0, 6)
    assert core.slot_row(a).computed == 0
    assert core.advance(a) == (0, 0, b)


def test_stealing_from_a_pass_in_flight_is_a_panic(kind: Kind) -> None:
    core = make(kind, 8)
    a = opened(core, *range(4))
    b = opened(core, *range(4))
    chunk(core, a)
    with pytest.raises(Panic, match="I4"):
        core.steal(b)


def test_a_chunk_in_a_tail_that_was_forked_meanwhile_copies_it_first(kind: Kind) -> None:
    core = make(kind, 8)
    a = opened(core, 1, 2, 3)
    compute(core, a, most=2)
    (b,) = core.fork(a, 1)
    shared = frames(core, b)[0]
    plan = chunk(core, a)
    assert array("i", plan.copies).tolist() == [shared, frames(core, a)[0]]
    assert frames(core, a)[0] != shared
    core.commit(0, b"", b"")
    sound(core, 8)


def test_drop_leaves_the_decode_set(kind: Kind) -> None:
    core = make(kind, 8)
    a = opened(core, 1, 2, 3)
    compute(core, a)
    core.start_running(a)
    core.drop(a)
    assert core.run_slots(0) == [] and not core.is_running(a)
    assert core.plan(0, 4, b"").sequences == 0


def test_misses_are_blocks_and_count_once(kind: Kind) -> None:
    core = make(kind, 4)
    a = opened(core, *range(16))
    while core.slot_row(a).computed < 16:
        compute(core, a)
    core.close_slot(a)
    assert core.reclaimable_frames(0) == 4
    b = core.open_slot(0, 1, ROOT)
    core.append(b, ints(0, 1, 2, 3, 9, 9, 9, 9, 9))
    result = core.admit(b, 0)
    assert (result.status, result.shortage_frames, result.mapped_frames) == (EVICT, 2, 1)
    assert core.evict(0, core.oldest(0, 2)) == 2
    assert core.admit(b, 0)[:4] == (OK, 0, 0, 2)
    counters: Counters = core.counters()
    assert (counters.lookup_hits, counters.lookup_misses, counters.evictions) == (1, 5, 2)


def test_a_partial_tail_makes_room_for_the_block_that_replaces_it(kind: Kind) -> None:
    """Three frames: b0, a's own partial tail, and a cached b1.  b1 replaces the tail, whose frame then holds b2."""
    core = make(kind, 3)
    a = opened(core, 0, 1, 2, 3, 4, 5)
    compute(core, a)
    b = core.open_slot(0, 1, ROOT)
    core.append(b, ints(*range(8)))
    assert core.admit(b, 0).status == OK
    compute(core, b)
    core.close_slot(b)
    core.append(a, ints(6, 7, 8, 9))
    assert core.admit(a, 0)[:2] == (OK, 0)
    assert core.free_frames(0) == 0 and core.reclaimable_frames(0) == 0
    sound(core, 3)


def test_a_fork_of_a_slot_whose_copy_is_pending_shares_the_source(kind: Kind) -> None:
    """The new frame holds nothing before the next pass; the content lies where the copy will come from."""
    core = make(kind, 8)
    a = opened(core, 1, 1, 1, 1, 2, 2)
    compute(core, a)
    core.fork(a, 1)
    core.append(a, ints(3))
    core.admit(a, 0)
    source = core.pending_copy(a)
    assert source >= 0 and frames(core, a)[1] != source
    (c,) = core.fork(a, 1)
    assert frames(core, c)[1] == source and core.slot_row(c).computed == 6
    assert array("h", core.pagemap(c)[2]).tolist() == [4, 2]
    sound(core, 8)


def test_cached_blocks_that_a_prompt_hits_are_not_room_for_the_rest_of_it(kind: Kind) -> None:
    """Three frames, all cached: b0, b1 of the prompt and one other.  The hits cannot be evicted for its own tail."""
    core = make(kind, 3)
    for tokens in ((*range(8),), (9, 9, 9, 9)):
        s = opened(core, *tokens)
        compute(core, s)
        core.close_slot(s)
    assert core.reclaimable_frames(0) == 3
    a = core.open_slot(0, 1, ROOT)
    core.append(a, ints(*range(13)))
    assert core.admit(a, 0)[:4] == (NOROOM, 1, 0, 0)
    core.truncate(a, 12)
    assert core.admit(a, 0)[:3] == (EVICT, 1, 2)
    assert core.evict(0, core.oldest(0, 3)) == 1
    assert core.admit(a, 0).status == OK
    sound(core, 3)


def test_two_slots_that_fork_one_tail_each_end_with_their_own(kind: Kind) -> None:
    core = make(kind, 8)
    a = opened(core, 1, 1, 1, 1, 2)
    compute(core, a)
    b, c = core.fork(a, 2)
    for s, token in ((b, 7), (c, 8), (a, 9)):
        core.set_generation(s, bytes(SEQ_BYTES), b"", 10, 32, 0, 0)
        core.append(s, ints(token))
        core.start_running(s)
    plan = core.plan(0, 8, b"")
    own = {frames(core, s)[1] for s in (a, b, c)}
    assert len(own) == 3
    assert set(array("i", plan.copies).tolist()[::2]) == {1} and len(plan.copies) // 8 >= 2
    core.commit(0, ints(5, 5, 5), bytes(12))
    assert core.wired_frames(0) == 0
    sound(core, 8)


def test_a_copy_of_a_block_on_each_device(kind: Kind) -> None:
    """One block, a copy on two devices: each is freed alone, and the block goes with the last."""
    core = make(kind, 4, 4)
    a = opened(core, *range(8), device=0)
    b = opened(core, *range(8), device=1)
    for s in (a, b):
        compute(core, s)
        core.close_slot(s)
    assert core.counters().indexed == 2
    key = core.hash(ROOT + ints(0, 1, 2, 3))
    block = core.find_key(key)
    assert core.key_heads([block, block]) == [int.from_bytes(key[:8], "little")] * 2
    sound(core, 4, 4)
    assert core.evict(0, [block]) == 0, "it has a child there"
    assert core.evict(0, core.oldest(0, 4)) == 2
    assert core.find_key(key) == block
    sound(core, 4, 4)
    assert core.evict(1, core.oldest(1, 4)) == 2
    assert core.find_key(key) == -1
    sound(core, 4, 4)


def test_a_constant_key_function_shares_nothing(kind: Kind) -> None:
    core = make(kind, 8, hash_bits=0)
    a = opened(core, *range(8))
    b = opened(core, 4, 5, 6, 7, 0, 1, 2, 3)
    other_domain = opened(core, *range(8), domain=2)
    assert len({*frames(core, a), *frames(core, b), *frames(core, other_domain)}) == 6
    assert core.counters().collisions >= 3
    same = opened(core, *range(8))
    assert frames(core, same)[0] == frames(core, a)[0] and frames(core, same)[1] != frames(core, a)[1]


def test_the_ring_keeps_release_order_through_reuse(kind: Kind) -> None:
    """Released, taken back and released again many times: far more entries than the ring has room for."""
    core = make(kind, 3)
    slots = [opened(core, i, i, i, i) for i in range(3)]
    for s in slots:
        compute(core, s)
        core.close_slot(s)
    blocks = core.oldest(0, 9)
    for turn in range(40):
        core.close_slot(opened(core, *[turn % 3] * 4))
    assert core.oldest(0, 9) == [blocks[1], blocks[2], blocks[0]], "39 % 3 == 0 came last, 1 before 2 before it"
    assert core.oldest(0, 2) == [blocks[1], blocks[2]]


def test_a_refused_call_names_what_is_wrong(kind: Kind) -> None:
    core = make(kind, 4)
    a = opened(core, 1, 2, 3)
    compute(core, a)
    for s in (-1, 5, 6, 1 << 20):
        for call in (core.close_slot, core.drop, core.slot_row, core.pagemap, core.advance, core.steal, core.discard):
            with pytest.raises(ValueError, match="is not open"):
                call(s)
        with pytest.raises(ValueError, match="is not open"):
            core.admit(s, 0)
        with pytest.raises(ValueError, match="is not open"):
            core.row_entries(s)
    for device in (-1, 1):
        with pytest.raises(ValueError, match="does not exist"):
            core.plan(device, 1, b"")
        with pytest.raises(ValueError, match="does not exist"):
            core.frame_table(device)
        with pytest.raises(ValueError, match="does not exist"):
            core.refs_of(device, 0)
    for f in (-1, 4):
        with pytest.raises(ValueError, match="does not exist"):
            core.refs_of(0, f)
    with pytest.raises(ValueError, match="key_heads names a block that does not exist"):
        core.key_heads([0, 1 << 20])
    with pytest.raises(ValueError):
        core.append(a, b"abc")
    with pytest.raises(ValueError):
        core.evict(0, [4])
    with pytest.raises(ValueError):
        core.open_slot(0, 1, b"short")
    with pytest.raises(ValueError):
        core.set_generation(a, bytes(95), b"", 1, 1, 0, 0)
    core.append(a, ints(*range(40)))
    with pytest.raises(ValueError, match="do not fit"):
        core.admit(a, 0)
    sound(core, 4)


def test_broken_requirements_are_panics(kind: Kind) -> None:
    core = make(kind, 8)
    a = opened(core, *range(6))
    record = PREFILL.pack(a, 0, 6, 0, -1, 0)
    with pytest.raises(Panic, match="twice"):
        core.plan(0, 4, record * 2)
    with pytest.raises(Panic, match="cannot compute"):
        core.plan(0, 4, PREFILL.pack(a, 2, 4, 0, -1, 0))
    b = opened(core, *range(6))
    with pytest.raises(Panic, match="I5"):
        core.plan(0, 4, PREFILL.pack(b, 0, 6, 0, -1, 0))
    core.start_running(a)
    with pytest.raises(Panic, match="decodes with 0 of 6"):
        core.plan(0, 4, b"")
    core.stop_running(a)
    assert core.plan(0, 4, record).sequences == 1
    for call in (core.close_slot, core.drop):
        with pytest.raises(Panic, match="I4"):
            call(a)
    with pytest.raises(Panic, match="in flight"):
        core.plan(0, 4, b"")
    with pytest.raises(Panic, match="another number"):
        core.commit(0, ints(1), bytes(4))
    core.commit(0, b"", b"")
    core.append(b, ints(1))
    with pytest.raises(Panic, match="mapped"):
        core.advance(b)


def test_noroom_counts_what_is_missing_and_touches_nothing(kind: Kind) -> None:
    core = make(kind, 4)
    opened(core, *range(8))
    b = core.open_slot(0, 1, ROOT)
    core.append(b, ints(*range(100, 116)))
    before = core.frame_table(0), core.block_table(), core.slot_row(b)
    assert core.admit(b, 1)[:4] == (NOROOM, 3, 0, 0)
    assert before == (core.frame_table(0), core.block_table(), core.slot_row(b))


def test_a_generation_ends_by_stop_and_by_length(kind: Kind) -> None:
    core = make(kind, 8)
    template = SEQ.pack(*[0] * 7, 8, 0.5, 0.9, 0.1, 40, 2**64 - 1, 1.1, 0.2, 0.3, 5, 0, 3, 77, 0, 0)
    a = opened(core, 1, 2, 3)
    b = opened(core, 4, 5)
    core.set_generation(a, template, ints(50, 60), 10, 32, 7, 70)
    core.set_generation(b, bytes(SEQ_BYTES), b"", 2, 32, 8, 80)
    records = PREFILL.pack(a, 0, 3, SAMPLE, -1, 0) + PREFILL.pack(b, 0, 2, SAMPLE, -1, 0)
    plan = core.plan(0, 8, records)
    assert (plan.sequences, plan.samples, plan.histories) == (2, 2, 1)
    seq = unpack_seqs(plan.seqs)[0]
    assert (seq.slot, seq.start, seq.ntokens, seq.write_from, seq.entries, seq.flags) == (a, 0, 3, 0, 1, SAMPLE | 8)
    assert (seq.top_k, seq.seed, seq.logprobs, seq.prompt_tokens, seq.context) == (40, 2**64 - 1, 5, 3, 77)
    lps = array("f", [-0.25, -0.5]).tobytes()
    done = core.commit(0, ints(9, 8), lps)
    assert done.tokens == ints(9, 8) and done.logprobs == lps and done.kept == ints(0, 1) and done.finished == ()
    assert array("q", done.streams).tolist() == [7, 70, 8, 80]
    assert core.run_slots(0) == [a, b]
    core.plan(0, 8, b"")
    done = core.commit(0, ints(60, 6), bytes(8))
    assert done.finished == ((a, STOP), (b, LENGTH)) and done.tokens == ints(6) and done.kept == ints(1)
    assert core.read_log(a, 0, 32) == ints(1, 2, 3, 9) and core.read_log(b, 0, 32) == ints(4, 5, 8, 6)
    assert core.run_length(0) == 0
