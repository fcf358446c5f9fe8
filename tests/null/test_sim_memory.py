"""Simulated tiers: what is stored is what comes back, and everything else is refused."""

from __future__ import annotations

from array import array

import pytest

from attnix.drivers.sim_device import SimDevice
from attnix.drivers.sim_memory import SimTier
from attnix.kernel.errors import E
from attnix.kernel.events import Exec, ExecFailed, Transfer
from attnix.kernel.geometry import RowLayout
from attnix.kernel.tag import CHECKSUM_OFFSET, GATE_FAILED, GATES, TAG_OFFSET, Tag, gate_value, stored_bytes, unpack_tag

BLOCK = 4
LAYOUT = RowLayout(2, 2)
IDENTITY = bytes(range(16))
DRAM, TIER = 1, 2


def tag(n: int, flags: int = 0) -> bytes:
    tokens = array("i", [n, n + 1, n + 2, n + 3]).tobytes()
    return Tag(bytes([n] * 16), bytes(16), b"r" * 16, 4 * n, BLOCK, flags, b"uid:1000", tokens).pack(BLOCK)


def move(device: int, verb: str, pairs: list[tuple[int, int]], tags: list[bytes], arena: int = DRAM) -> Transfer:
    flat = array("i", [frame for pair in pairs for frame in pair]).tobytes()
    return Transfer(device, 7, verb, arena, flat, b"".join(tags), -1, 0)


class Machine:
    def __init__(self) -> None:
        self.gates = bytearray(8 * GATES)
        rows = bytearray(LAYOUT.total_bytes)
        self.hbm = SimDevice(4, LAYOUT, rows, BLOCK, layers=2, identity=IDENTITY, gates=self.gates)
        self.tier = SimTier(4, self.hbm.frame_bytes, BLOCK, layers=2, identity=IDENTITY)
        self.dram = bytearray(3 * self.tier.stored_bytes)
        for frame in range(4):
            self.hbm.frame(frame)[:] = bytes([0x10 + frame]) * self.hbm.frame_bytes


def test_a_block_goes_down_and_comes_back() -> None:
    m = Machine()
    assert m.tier.stored_bytes == 8192 == stored_bytes(32)
    down = m.hbm.transfer(move(0, "read", [(1, 0), (2, 2)], [tag(1), tag(2)]), m.dram)
    assert (down.seq, down.failed, down.moved_bytes) == (7, (), 64)
    out = m.tier.transfer(move(TIER, "write", [(3, 0), (0, 2)], [tag(1), tag(2)]), m.dram)
    assert (out.failed, m.tier.written_frames, sorted(m.tier.frames)) == ((), 2, [0, 3])
    m.dram[:] = bytes(len(m.dram))
    assert m.tier.transfer(move(TIER, "read", [(3, 1)], [tag(1)]), m.dram).failed == ()
    assert m.hbm.transfer(move(0, "write", [(3, 1)], [tag(1)]), m.dram).failed == ()
    assert m.hbm.frame(3) == m.hbm.frame(1) == b"\x11" * 32
    assert m.tier.transfer_direct(move(TIER, "read", [(0, 0)], [tag(2)], arena=0), m.hbm.arena).failed == ()
    assert m.hbm.frame(0) == b"\x12" * 32
    assert m.tier.transfer_direct(move(TIER, "write", [(0, 0)], [tag(2)], arena=0), m.hbm.arena).failed


def test_the_inventory_names_what_is_sound() -> None:
    m = Machine()
    m.hbm.transfer(move(0, "read", [(1, 0), (2, 2)], [tag(1), tag(2)]), m.dram)
    m.tier.transfer(move(TIER, "write", [(3, 0), (0, 2)], [tag(1), tag(2)]), m.dram)
    m.tier.frames[0][TAG_OFFSET] ^= 1
    found = m.tier.found(TIER, 2)
    assert found[:2] == (TIER, 2) and found.rows[:4] == (3).to_bytes(4, "little")
    assert unpack_tag(found.rows[4:], BLOCK) == unpack_tag(tag(1), BLOCK)


@pytest.mark.parametrize("at", [0, 12, 32, TAG_OFFSET + 5, TAG_OFFSET + 130, CHECKSUM_OFFSET, 4096, 4096 + 31])
def test_every_flipped_bit_is_found(at: int) -> None:
    m = Machine()
    m.hbm.transfer(move(0, "read", [(1, 0)], [tag(1)]), m.dram)
    m.tier.transfer(move(TIER, "write", [(0, 0)], [tag(1)]), m.dram)
    m.tier.frames[0][at] ^= 4
    before = bytes(m.dram)
    assert m.tier.transfer(move(TIER, "read", [(0, 1)], [tag(1)]), m.dram).failed == ((0, E.ECORRUPT),)
    assert bytes(m.dram) == before and m.tier.corrupt == 1
    m.dram[at] ^= 4
    assert m.hbm.transfer(move(0, "write", [(2, 0)], [tag(1)]), m.dram).failed == ((0, E.ECORRUPT),)
    assert m.hbm.corrupt == 1


def test_the_wrong_block_is_found_and_the_others_arrive() -> None:
    m = Machine()
    m.hbm.transfer(move(0, "read", [(1, 0), (2, 1)], [tag(1), tag(2)]), m.dram)
    mixed = move(0, "write", [(0, 0), (3, 1)], [tag(3), tag(2)])
    assert m.hbm.transfer(mixed, m.dram).failed == ((0, E.ECORRUPT),)
    assert m.hbm.frame(3) == b"\x12" * 32
    assert m.tier.transfer(move(TIER, "write", [(0, 0)], [tag(2)]), m.dram).failed == ((0, E.ECORRUPT),)
    assert m.tier.transfer(move(TIER, "read", [(1, 0)], [tag(2)]), m.dram).failed == ((0, E.ENOENT),)
    assert m.tier.transfer(move(TIER, "read", [(9, 0)], [tag(2)]), m.dram).failed == ((0, E.EINVAL),)
    assert m.tier.transfer(move(TIER, "write", [(0, 9)], [tag(2)]), m.dram).failed == ((0, E.EINVAL),)


def test_planned_faults_and_what_a_transfer_takes() -> None:
    tier = SimTier(4, 32, BLOCK, latency_ns=5, read_bytes_s=8192, fault=lambda verb, frame: E.ENOSPC if frame else 0)
    effect = move(TIER, "write", [(0, 0), (1, 0)], [tag(1), tag(1)])
    hbm = SimDevice(1, LAYOUT, bytearray(LAYOUT.total_bytes), BLOCK)
    dram = bytearray(tier.stored_bytes)
    hbm.transfer(move(0, "read", [(0, 0)], [tag(1)]), dram)
    done = tier.transfer(effect, dram)
    assert (done.failed, done.moved_bytes, done.elapsed_ns) == (((1, E.ENOSPC),), 8192, 5)
    assert tier.transfer_ns(move(TIER, "read", [(0, 0)], [tag(1)])) == 5 + 1_000_000_000


def test_a_pass_behind_a_gate() -> None:
    m = Machine()
    gate, ticket = 5, 9
    behind = Exec(0, 1, b"", b"", b"", (), array("q", [gate, ticket]).tobytes())
    assert not m.hbm.is_open(behind) and isinstance(m.hbm.execute(behind), ExecFailed)
    m.hbm.transfer(move(0, "read", [(1, 0)], [tag(1)]), m.dram)
    load = move(0, "write", [(2, 0)], [tag(1)])._replace(gate=gate, ticket=ticket)
    m.hbm.transfer(load, m.dram)
    assert m.hbm.gates is not None and m.hbm.gates.load(gate) == gate_value(ticket, 2)
    assert m.hbm.is_open(behind) and not isinstance(m.hbm.execute(behind), ExecFailed)
    m.hbm.transfer(load._replace(tags=tag(2), ticket=10), m.dram)
    assert m.hbm.gates.load(gate) == gate_value(10, GATE_FAILED)
    later = behind._replace(gates=array("q", [gate, 10]).tobytes())
    assert m.hbm.is_open(later) and isinstance(m.hbm.execute(later), ExecFailed)
