"""The state machine that drives the C core and its Python twin together: equal results, equal tables and equal rows.

Beside the two cores runs a model of the accelerator that moves *contents*: a frame is a list of digests, the digest at
position p depends on the digest at p - 1 (read through the page-table row, as attention does) and on the token.  So it
sees what no table shows: a block served before it was computed, a copy from a source that was overwritten, a shared
block written, something lost by a failed pass.  A failed pass leaves garbage in everything it was writing.
"""

from __future__ import annotations

import os
import struct
from array import array
from typing import Any, ClassVar, Final, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from attnix.kernel.batch import SAMPLE, SEQ, unpack_seqs
from attnix.kernel.core import Core
from attnix.kernel.coreapi import CoreApi
from attnix.kernel.fsck import fsck_core
from attnix.kernel.geometry import RowLayout
from attnix.kernel.records import EVICT, FILLING, NOROOM, OK, OWN_EVICT, OWN_NOROOM, PREFILL, VALID, Admit
from attnix.kernel.twin import TwinCore

T = TypeVar("T")
SECRET: Final = bytes(range(16))
SLOTS: Final = 6
WINDOW: Final = 24  # tokens in a row
CAPACITY: Final = 7  # frames of device 0; device 1 has one less
GARBAGE: Final = -1
TABLES: Final = ("counters", "block_table", "slots_used")
DEVICE_TABLES: Final = (
    "frame_table", "free_frames", "reclaimable_frames", "mapped_or_cached_frames", "wired_frames", "run_length",
    "run_slots", "flight_length",
)  # fmt: skip
SLOT_TABLES: Final = ("slot_row", "pagemap", "pending_copy", "slot_device", "is_running", "in_flight")
GROUPS: Final = {1: 0, 2: 1, 3: 1, 4: 0}  # number -> the group that contains it; nobody is 0
ROOTS: Final = {domain: bytes([domain]) * 16 for domain in (1, 2)}


PROMPTS: Final = ((0,) * 12, (0,) * 8 + (1,) * 4, (1, 0) * 6)
WEIGHTS: Final = {
    "open_slot": 6, "append": 4, "truncate": 2, "drop": 1, "close": 4, "fork": 6, "admit": 14, "evict": 3, "generate": 3,
    "start": 5, "stop": 1, "advance": 3, "plan": 8, "commit": 8, "fail_pass": 2, "lose": 1, "compute_some": 24,
    "cut_and_regrow": 6, "same_prompt": 6, "bound": 3, "regroup": 3, "restrict": 2, "disown": 1,
}  # fmt: skip
CALLS: Final = [name for name, weight in WEIGHTS.items() for _ in range(weight)]


def digest(before: int, token: int) -> int:
    return hash((before, token)) & 0xFFFFFFFFFFFF


class Cores:
    """Calls both cores and compares.  `twin` is what the model reads."""

    def __init__(self, devices: int, capacities: list[int], hash_bits: int, size: int, layout: RowLayout) -> None:
        self.rows = [[bytearray(layout.total_bytes) for _ in range(devices)] for _ in range(2)]
        views = [[memoryview(r) for r in rows] for rows in self.rows]
        self.each: list[CoreApi] = [
            TwinCore(SECRET, size, layout, capacities, views[0], hash_bits),
            Core(SECRET, size, layout, capacities, views[1], hash_bits),
        ]
        self.twin = self.each[0]

    def tick(self, now_ns: int) -> None:
        for core in self.each:
            core.now_ns = now_ns

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            results = [getattr(core, name)(*args) for core in self.each]
            assert results[0] == results[1], f"{name}{args}: twin {results[0]}, C core {results[1]}"
            return results[0]

        return call


class CoreMachine(RuleBasedStateMachine):
    devices = 1  # that compute
    tiers: ClassVar[tuple[int, ...]] = ()  # frames of each tier
    hash_bits = 128
    size = 4  # tokens per block
    calls: ClassVar[list[str]] = CALLS

    def __init__(self) -> None:
        super().__init__()
        self.layout = RowLayout(SLOTS, WINDOW // self.size)
        self.capacities = [CAPACITY - d for d in range(self.devices)] + list(self.tiers)
        self.cores: Any = Cores(self.devices, self.capacities[:], self.hash_bits, self.size, self.layout)
        self.twin = self.cores.twin
        self.logs: dict[int, list[int]] = {}
        self.domains: dict[int, int] = {}
        self.contents = [[[GARBAGE] * self.size for _ in range(frames)] for frames in self.capacities]
        for group, above in GROUPS.items():
            self.cores.define_group(group, above)
        self.plans: dict[int, Any] = {}
        self.frozen: dict[int, dict[int, bytes]] = {}

    # One rule, so that hypothesis does not leave kinds of calls out of whole examples (its swarm testing): what finds
    # something here are long sequences of all kinds, with more work than destruction in them.
    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        getattr(self, data.draw(st.sampled_from(self.calls)))(data)

    # -- what the model knows -----------------------------------------------------------------------------------

    def chain(self, s: int) -> list[int]:
        at = self.domains[s]
        return [at := digest(at, t) for t in self.logs[s]]

    def row(self, s: int, i: int) -> tuple[int, int]:
        """(frame, count) of a row entry, from the shared buffer."""
        rows = self.cores.rows[0][self.twin.slot_device(s)]
        at = s * self.layout.entries + i
        (frame,) = struct.unpack_from("<i", rows, self.layout.frame_offset + 4 * at)
        (count,) = struct.unpack_from("<h", rows, self.layout.count_offset + 2 * at)
        return frame, count

    def idle(self) -> list[int]:
        return [s for s in self.logs if not self.twin.in_flight(s)]

    def counts(self, s: int) -> list[int]:
        return array("h", self.twin.pagemap(s)[2]).tolist()

    def admitted(self, s: int) -> bool:
        return sum(self.counts(s)) >= len(self.logs[s])

    def snapshot(self) -> list[object]:
        tables: list[object] = [self.twin.block_table(), [bytes(r) for r in self.cores.rows[0]]]
        tables += [self.twin.frame_table(d) for d in range(len(self.capacities))]
        return tables + [(self.twin.slot_row(s), self.twin.pagemap(s)) for s in self.logs]

    # -- slots ---------------------------------------------------------------------------------------------------

    def open_slot(self, data: st.DataObject) -> None:
        domain = data.draw(st.sampled_from([1, 1, 1, 2]))
        s = self.cores.open_slot(data.draw(st.integers(0, self.devices - 1)), domain, ROOTS[domain])
        assert (s < 0) == (len(self.logs) == SLOTS)
        if s >= 0:
            tokens = data.draw(st.sampled_from(PROMPTS))[: data.draw(st.integers(0, 12))]
            self.logs[s] = list(tokens)
            self.domains[s] = domain
            self.cores.set_group(s, data.draw(st.sampled_from([0, 1, 2, 2, 3, 4])))
            self.cores.append(s, array("i", tokens).tobytes())

    def append(self, data: st.DataObject) -> None:
        s = self.choose(data, [s for s in self.idle() if len(self.logs[s]) < WINDOW - 1])
        if s is None:
            return
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))[: WINDOW - 1 - len(self.logs[s])]
        self.cores.stop_running(s)
        assert self.cores.append(s, array("i", tokens).tobytes()) == len(self.logs[s]) + len(tokens)
        self.logs[s] += tokens

    def truncate(self, data: st.DataObject) -> None:
        s = self.choose(data, self.idle())
        if s is not None:
            length = max(0, len(self.logs[s]) - data.draw(st.integers(1, 6)))
            self.cores.truncate(s, length)
            del self.logs[s][length:]
            if not length:
                self.cores.stop_running(s)

    def drop(self, data: st.DataObject) -> None:
        s = self.choose(data, self.idle())
        if s is not None:
            self.cores.drop(s)

    def close(self, data: st.DataObject) -> None:
        s = self.choose(data, self.idle())
        if s is not None:
            self.cores.close_slot(s)
            del self.logs[s], self.domains[s]

    def fork(self, data: st.DataObject) -> None:
        s = self.choose(data, list(self.logs))
        if s is not None:
            for c in self.cores.fork(s, data.draw(st.integers(1, 3))):
                self.logs[c] = self.logs[s][:]
                self.domains[c] = self.domains[s]

    # -- frames --------------------------------------------------------------------------------------------------

    def admit(self, data: st.DataObject) -> None:
        s = self.choose(data, [s for s in self.idle() if not self.admitted(s)] or self.idle())
        if s is not None:
            self.admit_slot(data, s, data.draw(st.sampled_from([0, 0, 1, 2])), data.draw(st.integers(0, 3)) == 0)

    def admit_slot(self, data: st.DataObject, s: int, reserve: int = 0, give_up: bool = False) -> bool:
        device = self.twin.slot_device(s)
        before = self.snapshot()
        extra = self.admission(data)
        result: Admit = self.cores.admit(s, reserve, *extra)
        if result.status in (NOROOM, OWN_NOROOM):
            assert self.snapshot() == before, "a refused admission changed something"
            return False
        for _ in range(4):  # the limits of two levels, and the device's own
            if result.status not in (EVICT, OWN_EVICT):
                break
            if give_up or not self.room_for(device, result):
                return False
            result = self.cores.admit(s, reserve, *extra)
        if result.status in (NOROOM, OWN_NOROOM):
            return False  # what was evicted for one limit may have been what another counted on
        assert result.status == OK, f"admit after EVICT: {result}"
        assert self.admitted(s)
        if result.new_frames:
            self.reserved(device, reserve, s)
        self.loading(s, result)
        return True

    def admission(self, data: st.DataObject) -> tuple[int, ...]:
        """sources, first_load, partial_tokens."""
        return (0, 0, data.draw(st.sampled_from([0, 0, 1, 2])))

    def reserved(self, device: int, reserve: int, s: int) -> None:
        had = self.twin.free_frames(device) + self.twin.reclaimable_frames(device)
        if self.twin.pending_copy(s) >= 0:
            had += 1  # the source of a partial hit comes back when it is copied
        assert had >= reserve

    def loading(self, s: int, result: Admit) -> None:
        assert not result.loads and not self.cores.loads()

    def room_for(self, device: int, result: Any) -> bool:
        """As the kernel does it: among the group's own blocks at its limit, else not among what others are guaranteed."""
        own = result.status == OWN_EVICT
        guarantees = any(self.twin.account(device, g).soft for g in GROUPS)
        if not own and not guarantees:
            return self.make_room(device, result.shortage_frames)
        self.cores.restrict(result.group, result.group if own else 0)
        kept = {g: self.twin.account(device, g) for g in GROUPS}
        short: int = result.shortage_frames
        while short > 0 and (victims := self.cores.evictable(device, self.cores.oldest(device, 99), short)):
            done: int = self.cores.evict(device, victims)
            if not done:
                break
            short -= done
        for g, before in kept.items():
            now = self.twin.account(device, g).used
            inside = result.group in (g, *(x for x, above in GROUPS.items() if above == g))
            foreign = GROUPS[g] and GROUPS[g] not in (result.group, GROUPS.get(result.group))
            assert inside or foreign or now >= min(before.used, before.soft), f"group {g} is below its guarantee"
            assert not own or inside or now == before.used or GROUPS[g] == result.group, "others paid"
        self.cores.unrestrict()
        return short <= 0

    def bound(self, data: st.DataObject) -> None:
        """A limit that is not below what the group has, as the kernel sees to, and any guarantee."""
        device = data.draw(st.integers(0, len(self.capacities) - 1))
        group = data.draw(st.integers(1, 4))
        used = self.twin.account(device, group).used
        hard = data.draw(st.sampled_from([0, 0, 1, 3, 5]))
        self.cores.set_bounds(device, group, data.draw(st.sampled_from([0, 0, 1, 2])), max(hard, used) if hard else 0)

    def regroup(self, data: st.DataObject) -> None:
        s = self.choose(data, list(self.logs))
        if s is not None:
            self.cores.set_group(s, data.draw(st.integers(0, 4)))

    def restrict(self, data: st.DataObject) -> None:
        """Everything that looks for victims, with a restriction."""
        device = data.draw(st.integers(0, len(self.capacities) - 1))
        self.cores.restrict(data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4)))
        blocks = self.cores.oldest(device, 99)
        self.cores.evictable(device, blocks, 3)
        self.cores.sample(device, 3, data.draw(st.integers(0, 99)))
        for b in blocks[:2]:
            self.cores.chain(device, b, 4)
        if data.draw(st.booleans()):
            self.cores.evict(device, blocks)
        self.cores.unrestrict()
        self.cores.owners(device, blocks)
        assert self.cores.group_tree() == [0, *GROUPS.values()]

    def disown(self, data: st.DataObject) -> None:
        self.cores.disown(data.draw(st.integers(0, len(self.capacities) - 1)), data.draw(st.integers(0, 4)))

    @invariant()
    def accounts(self) -> None:
        """Equal in both cores, and never above a limit."""
        for d in range(len(self.capacities)):
            owners = array("H", self.cores.frame_owners(d))
            for g in GROUPS:
                account = self.cores.account(d, g)
                assert account.used == sum(1 for o in owners if o and g in (o, GROUPS[o])), "I8"
                assert not account.hard or account.used <= account.hard, f"group {g} is over its limit on {d}"
                self.cores.spare_frames(d, g)
        for g in GROUPS:
            self.cores.served(g)

    def make_room(self, device: int, shortage: int) -> bool:
        """False: frames that could go are being copied."""
        while shortage > 0:
            victims = self.cores.evictable(device, self.twin.oldest(device, 99), shortage)
            assert self.cores.evict(device, victims) == len(victims), "evictable says what evict takes"
            if not victims:
                wired = array("i", self.twin.frame_table(device)[2])
                assert any(wired), "reclaimable frames cannot be evicted, and nothing holds them"
                return False
            shortage -= len(victims)
        return True

    def evict(self, data: st.DataObject) -> None:
        device = data.draw(st.integers(0, len(self.capacities) - 1))
        blocks = self.cores.oldest(device, data.draw(st.integers(0, 4)))
        wild = data.draw(st.booleans())
        if wild:
            blocks = data.draw(st.lists(st.integers(0, self.blocks() - 1), max_size=4))
        done = self.cores.evict(device, blocks)
        assert wild or done == len(blocks) or not self.orderly(device), "the oldest blocks are always leaves"

    def orderly(self, device: int) -> bool:
        """Nobody but the slots themselves says in which order blocks of this device are used."""
        return True

    def blocks(self) -> int:
        return len(self.twin.block_table()[0]) // 4

    # -- generations and passes ----------------------------------------------------------------------------------

    def generate(self, data: st.DataObject) -> None:
        s = self.choose(data, self.idle())
        if s is not None:
            stop = data.draw(st.sampled_from([b"", b"", array("i", [1]).tobytes()]))
            most = data.draw(st.integers(1, 9))
            template = SEQ.pack(*[0] * 7, most % 2 * 8, 0.5, 1.0, 0.0, 3, 2**63 + s, 1.25, 0.0, 0.0, 2, 0, 5, s, 0, 0)
            self.cores.set_generation(s, template, stop, most, WINDOW, s, 1000 + s)

    def start(self, data: st.DataObject) -> None:
        able = [s for s in self.idle() if self.logs[s] and self.twin.slot_row(s).computed >= len(self.logs[s]) - 1]
        s = self.choose(data, [s for s in able if len(self.logs[s]) <= WINDOW and self.covers(s)])
        if s is not None:
            self.cores.start_running(s)

    def covers(self, s: int) -> bool:
        """Its row holds what is computed (it does unless an admission was given up half-way)."""
        return sum(self.counts(s)) >= self.twin.slot_row(s).computed

    def stop(self, data: st.DataObject) -> None:
        s = self.choose(data, list(self.logs))
        if s is not None:
            self.cores.stop_running(s)
            if data.draw(st.booleans()):
                self.cores.discard(s)

    def advance(self, data: st.DataObject) -> None:
        s = self.choose(data, [s for s in self.idle() if self.admitted(s)])
        if s is None:
            return
        at = self.cores.advance(s)
        filler = at.blocked_by
        if (
            data.draw(st.booleans())
            and filler >= 0
            and not self.twin.in_flight(filler)
            and not self.twin.is_running(filler)
        ):
            self.cores.steal(s)
            assert self.cores.advance(s).ready > 0

    def plan(self, data: st.DataObject) -> None:
        device = self.choose(data, [d for d in range(self.devices) if d not in self.plans])
        if device is None:
            return
        most = data.draw(st.integers(1, 5))
        chunks = self.chunks(data, device, data.draw(st.integers(1, 9)))
        for _ in range(6):  # limits of several groups, and the device's own
            plan = self.cores.plan(device, most, b"".join(chunks))
            if plan.status == OK:
                break
            assert not plan.sequences and not plan.seqs
            if plan.status in (EVICT, OWN_EVICT):
                if not self.room_for(device, plan):
                    return
            else:
                return
        assert plan.status == OK, "plan after EVICT"
        if plan.sequences:
            self.in_flight(device, plan)

    def chunks(self, data: st.DataObject, device: int, budget: int) -> list[bytes]:
        chunks = []
        for s in self.idle():
            n = len(self.logs[s])
            if self.twin.slot_device(s) != device or self.twin.is_running(s) or not n or not self.admitted(s):
                continue
            if not data.draw(st.integers(0, 3)):
                continue
            at = self.cores.advance(s)
            flags = SAMPLE if self.logs[s] and n < WINDOW and data.draw(st.booleans()) else 0
            if at.computed == n:
                chunks.append(PREFILL.pack(s, n - 1, 1, flags, -1, 0))
            elif at.ready:
                count = min(at.ready, budget)
                left = n - at.computed - count
                chunks.append(PREFILL.pack(s, at.computed, count, 0 if left else flags, -1, left))
        return chunks

    # -- what programs do often, in one go, so that deep states are reached within a few dozen rules ------------------

    def compute_some(self, data: st.DataObject) -> None:
        """One pass with one chunk, there and back; frames first where they are missing."""
        able = [s for s in self.idle() if len(self.logs[s]) > self.twin.slot_row(s).computed]
        able = [s for s in able if not self.twin.is_running(s)]
        s = self.choose(data, [s for s in able if self.twin.slot_device(s) not in self.plans])
        if s is None:
            return
        device = self.twin.slot_device(s)
        if not self.admitted(s) and not self.admit_slot(data, s):
            return
        at = self.cores.advance(s)
        if at.blocked_by >= 0 and data.draw(st.booleans()) and not self.twin.is_running(at.blocked_by):
            self.cores.steal(s)
            at = self.cores.advance(s)
        if at.ready == 0:
            return
        count = min(at.ready, data.draw(st.sampled_from([1, 2, 3, 5, 9, 9, 9])))
        plan = self.cores.plan(device, 1, PREFILL.pack(s, at.computed, count, 0, -1, 0))
        if plan.status == OK:
            self.in_flight(device, plan)
            if data.draw(st.integers(0, 4)) and self.complete(data, device):
                self.commit_device(data, device)

    def cut_and_regrow(self, data: st.DataObject) -> None:
        cut = data.draw(st.integers(0, 7))
        tokens = data.draw(st.lists(st.integers(0, 1), max_size=5))
        s = self.choose(data, [s for s in self.idle() if len(self.logs[s]) > cut and not self.twin.is_running(s)])
        if s is None:
            return
        keep = len(self.logs[s]) - cut
        tokens = tokens[: WINDOW - 1 - keep]
        self.cores.truncate(s, keep)
        self.cores.append(s, array("i", tokens).tobytes())
        self.logs[s][keep:] = tokens
        self.admit_slot(data, s, give_up=True)

    def same_prompt(self, data: st.DataObject) -> None:
        """Another context with the tokens of one that is there."""
        cut = data.draw(st.integers(0, 5))
        s = self.choose(data, [s for s in self.logs if len(self.logs[s]) > cut])
        if s is None or len(self.logs) == SLOTS:
            return
        twin = self.cores.open_slot(self.twin.slot_device(s), self.domains[s], ROOTS[self.domains[s]])
        self.domains[twin] = self.domains[s]
        self.logs[twin] = self.logs[s][: min(len(self.logs[s]) - cut, WINDOW - 1)]
        self.cores.append(twin, array("i", self.logs[twin]).tobytes())
        self.admit_slot(data, twin, give_up=True)

    def in_flight(self, device: int, plan: Any) -> None:
        self.plans[device] = plan
        self.frozen[device] = {q.slot: self.entries_of(q) for q in unpack_seqs(plan.seqs)}
        self.check_writes(device, plan)

    def entries_of(self, q: Any) -> bytes:
        return b"".join(struct.pack("<ih", *self.row(q.slot, i)) for i in range(q.entries))

    def check_writes(self, device: int, plan: Any) -> None:
        """I5: what this pass writes, nobody else can see, and no pending copy still needs."""
        state, _, _, block, _, _ = self.twin.frame_table(device)
        indexed = self.twin.block_table()[4]
        users: dict[int, list[tuple[int, int, int]]] = {}
        for s in self.logs:
            if self.twin.slot_device(s) == device:
                for i, f in enumerate(array("i", self.twin.pagemap(s)[0])):
                    users.setdefault(f, []).append((s, i, self.counts(s)[i]))
        for q in unpack_seqs(plan.seqs):
            for p in range(max(q.start, q.write_from), q.start + q.ntokens):
                f = self.row(q.slot, p // self.size)[0]
                assert state[f] == FILLING or self.may_write(device, f, p % self.size), f"pass writes full frame {f}"
                assert not self.needed(device, f, p % self.size), f"pass writes frame {f}, which a copy still needs"
                for s, i, count in users[f]:
                    if s == q.slot:
                        continue
                    assert indexed[array("i", block)[f]], f"pass writes frame {f}, private but shared"
                    assert count == self.size and self.twin.slot_row(s).computed <= i * self.size

    def may_write(self, device: int, f: int, offset: int) -> bool:
        """Though it is not FILLING."""
        return False

    def needed(self, device: int, f: int, offset: int) -> bool:
        """Somebody will copy this position from frame f."""
        here = [s for s in self.logs if self.twin.slot_device(s) == device]
        return any(self.twin.pending_copy(s) == f for s in here)

    def compute(self, device: int, order: list[int] | None) -> list[int]:
        """What the accelerator does; returns its samples.  order: of the sequences, they must not depend on each other."""
        plan = self.plans[device]
        contents = self.contents[device]
        copies = array("i", plan.copies)
        for src, dst in zip(copies[::2], copies[1::2], strict=True):
            contents[dst] = contents[src][:]
        seqs = unpack_seqs(plan.seqs)
        tokens = array("i", plan.tokens)
        samples: dict[int, int] = {}
        for k in order or range(len(seqs)):
            q = seqs[k]
            assert self.entries_of(q) == self.frozen[device][q.slot], "entries of a slot in flight changed"
            before = self.domains[q.slot]
            if q.start:
                f, count = self.row(q.slot, (q.start - 1) // self.size)
                assert count > (q.start - 1) % self.size
                before = contents[f][(q.start - 1) % self.size]
            for j in range(q.ntokens):
                p = q.start + j
                before = digest(before, tokens[q.token_offset + j])
                f, count = self.row(q.slot, p // self.size)
                assert count > p % self.size
                if p >= q.write_from:
                    contents[f][p % self.size] = before
                assert contents[f][p % self.size] == self.chain(q.slot)[p] == before, (
                    f"slot {q.slot} reads wrong KV at {p}"
                )
            samples[k] = before >> 20 & 1
        return [samples[k] for k, q in enumerate(seqs) if q.flags & SAMPLE]

    def commit(self, data: st.DataObject) -> None:
        device = self.choose(data, sorted(self.plans))
        if device is not None and self.complete(data, device):
            self.commit_device(data, device)

    def complete(self, data: st.DataObject, device: int) -> bool:
        """The pass in flight could come to its end."""
        return True

    def commit_device(self, data: st.DataObject, device: int) -> None:
        plan = self.plans[device]
        samples = self.compute(device, data.draw(st.permutations(range(plan.sequences))))
        del self.plans[device], self.frozen[device]
        lps = array("f", [-0.5 * (i + 1) for i in range(len(samples))]).tobytes()
        before = {s: self.twin.slot_row(s).tokens for s in self.logs}
        result = self.cores.commit(device, array("i", samples).tobytes(), lps)
        sampled = [q.slot for q in unpack_seqs(plan.seqs) if q.flags & SAMPLE]
        grown = [s for s in self.logs if self.twin.slot_row(s).tokens > before[s]]
        kept = array("i", result.kept).tolist()
        assert sorted(sampled[k] for k in kept) == sorted(grown)
        for k in kept:
            self.logs[sampled[k]].append(samples[k])

    def fail_pass(self, data: st.DataObject) -> None:
        """The pass fails after everything, something or nothing of it was done; what it was writing is garbage."""
        device = self.choose(data, sorted(self.plans))
        if device is not None:
            self.fail_on(data, device)

    def fail_on(self, data: st.DataObject, device: int) -> None:
        reach = data.draw(st.integers(0, 3))
        plan = self.plans.pop(device)
        contents = self.contents[device]
        if reach:
            for dst in array("i", plan.copies)[1::2]:
                contents[dst] = [GARBAGE] * self.size
            for q in unpack_seqs(plan.seqs):
                for p in range(max(q.start, q.write_from), q.start + q.ntokens):
                    if reach > 1 or data.draw(st.booleans()):
                        contents[self.row(q.slot, p // self.size)[0]][p % self.size] = GARBAGE
        del self.frozen[device]
        assert self.cores.rollback(device) == [q.slot for q in unpack_seqs(plan.seqs)]

    def lose(self, data: st.DataObject) -> None:
        """The driver died and its frames with it."""
        if data.draw(st.integers(0, 3)):
            return
        self.lose_device(data.draw(st.integers(0, self.devices - 1)))

    def lose_device(self, device: int) -> None:
        self.plans.pop(device, None)
        self.frozen.pop(device, None)
        self.contents[device] = [[GARBAGE] * self.size for _ in self.contents[device]]
        self.cores.lose(device)
        assert self.twin.free_frames(device) == self.capacities[device]

    # -- what must always hold -----------------------------------------------------------------------------------

    @invariant()
    def same_tables(self) -> None:
        for name in TABLES:
            getattr(self.cores, name)()
        for name in DEVICE_TABLES:
            for d in range(len(self.capacities)):
                getattr(self.cores, name)(d)
        for d, frames in enumerate(self.capacities):
            self.cores.oldest(d, frames)
        for s in self.logs:
            for name in SLOT_TABLES:
                getattr(self.cores, name)(s)
            assert self.cores.read_log(s, 0, WINDOW) == array("i", self.logs[s]).tobytes()
            for i in range(len(self.logs[s]) // self.size):
                self.cores.key_of(s, i)
        for b in range(self.blocks()):
            self.cores.block_tokens_of(b)
        assert self.cores.rows[0] == self.cores.rows[1], "page-table rows differ"

    @invariant()
    def sound(self) -> None:
        problems = fsck_core(self.twin, self.capacities, self.size, self.wires())
        assert not problems, problems

    def wires(self) -> list[tuple[int, int]]:
        return []

    @invariant()
    def contents_right(self) -> None:
        """Every token that counts as computed has its KV where the slot will read it; so has every block in the cache."""
        for s in self.logs:
            chain = self.chain(s)
            computed = self.twin.slot_row(s).computed
            pending = self.twin.pending_copy(s)
            assert isinstance(self.twin, TwinCore)
            entry = self.twin._slots[
                s
            ].pending_entry  # it need not be where `computed` is: a partial hit comes after whole ones
            device = self.twin.slot_device(s)
            contents = self.contents[device]
            frames = array("i", self.twin.pagemap(s)[0])
            for p in range(computed):
                f = pending if p // self.size == entry else frames[p // self.size]
                if not self.coming(device, f):
                    assert contents[f][p % self.size] == chain[p], f"slot {s} has lost the KV of token {p} (frame {f})"
        parents, domains, frames_of, indexed = self.block_columns()
        for d in range(len(self.capacities)):
            state = self.twin.frame_table(d)[0]
            for b in range(len(parents)):
                f = frames_of[b * len(self.capacities) + d]
                if f >= 0 and indexed[b] and state[f] == VALID:
                    assert self.contents[d][f] == self.expected(b, parents, domains), (
                        f"block {b} in frame {f} of device {d} is not what it says"
                    )

    def block_columns(self) -> tuple[array[int], array[int], array[int], bytes]:
        parent, domain, _, _, indexed, _, copies, _, _ = self.twin.block_table()
        return array("i", parent), array("i", domain), array("i", copies), indexed

    def expected(self, b: int, parents: array[int], domains: array[int]) -> list[int]:
        """What an indexed block holds."""
        at = self.expected(parents[b], parents, domains)[-1] if parents[b] >= 0 else domains[b]
        return [at := digest(at, t) for t in array("i", self.twin.block_tokens_of(b))]

    def coming(self, device: int, f: int) -> bool:
        """The content of frame f is on its way, and passes that need it will wait."""
        return False

    def teardown(self) -> None:
        """I10: every frame comes back."""
        for d in list(self.plans):
            self.cores.rollback(d)
        for s in list(self.logs):
            self.cores.close_slot(s)
        for d, frames in enumerate(self.capacities):
            self.make_room(d, self.twin.reclaimable_frames(d))
            assert self.cores.free_frames(d) == frames
            assert self.cores.wired_frames(d) == 0
        assert self.cores.counters().ghosts == 0 and not any(self.block_columns()[3])

    @staticmethod
    def choose(data: st.DataObject, among: list[T]) -> T | None:
        return data.draw(st.sampled_from(among)) if among else None


EXAMPLES: Final = int(os.environ.get("ATTNIX_EXAMPLES", "60"))


def run(machine: type[CoreMachine], examples: int = EXAMPLES, **attributes: object) -> None:
    """Random runs of a machine with these class attributes."""
    run_state_machine_as_test(
        type("Machine", (machine,), attributes),
        settings=settings(
            max_examples=examples, stateful_step_count=60, deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )  # fmt: skip
