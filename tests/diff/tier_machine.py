"""The state machine of core_machine.py with memory tiers: transfers move contents, late, in any order, or not at all.

A transfer under way is an `Item`.  Its content arrives at some moment (`arrive`), from then on a gated pass may use it; its
end is reported at that moment or later (`land`), as good, or as bad although it arrived (its driver died before it could
say so).  What a bad one leaves in its target is garbage.  The source must hold the same content for as long as the item is
under way: that is what wiring is for.

The order of calls at the end of a transfer is that of kernel/movers.py: `landed` for the targets, `unwire` for the sources,
then, for each transfer whose source was one of those that failed, another source or failure too.
"""

from __future__ import annotations

from array import array
from collections import deque
from itertools import takewhile
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import invariant

from attnix.kernel.batch import unpack_seqs
from attnix.kernel.errors import Panic
from attnix.kernel.params import MAX_DEVICES
from attnix.kernel.records import FILLING, LOADING, NO_COPY, PREFILL, VALID, Admit, Prefix
from attnix.kernel.twin import TwinCore

from .core_machine import CALLS, GARBAGE, ROOTS, CoreMachine, digest

WEIGHTS: Final = {
    "copy": 10, "save": 5, "arrive": 6, "land": 22, "source_again": 3, "skip_loading": 10, "swap_out": 10, "come_back": 12,
    "bury": 5, "forget": 2, "touch": 2, "learn": 3, "restart_tier": 2, "resize": 2, "look": 3,
}  # fmt: skip
TIER_CALLS: Final = CALLS + [name for name, weight in WEIGHTS.items() for _ in range(weight)]


class Item:
    """A frame's content on its way.  need: first tokens of it that count."""

    def __init__(self, block: int, source: tuple[int, int], target: tuple[int, int], need: int) -> None:
        self.block = block
        self.source = source
        self.target = target
        self.need = need
        self.arrived = False
        self.content: list[int] | None = None  # of the source when it was there first

    def __repr__(self) -> str:
        return f"<block {self.block}: {self.source} -> {self.target}, {self.need} tokens, arrived {self.arrived}>"


class TierMachine(CoreMachine):
    tiers = (5, 4)
    calls = TIER_CALLS

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Item] = []
        self.gated: set[int] = set()  # slots that count on what is not here yet
        self.doomed: set[int] = set()  # devices whose pass in flight will fail
        self.now_ns = 0

    # -- what the model knows -----------------------------------------------------------------------------------

    def tier_numbers(self) -> range:
        return range(self.devices, len(self.capacities))

    def frames(self, s: int) -> list[int]:
        return array("i", self.twin.pagemap(s)[0]).tolist()

    def state(self, device: int, f: int) -> int:
        return int(self.twin.frame_table(device)[0][f])

    def writer(self, device: int, f: int) -> Item | None:
        return next((item for item in self.items if item.target == (device, f)), None)

    def counted_on(self, s: int, arrived: bool = False) -> list[Item]:
        """Items that the slot has gone past.  arrived: also those whose content is here."""
        device, computed = self.twin.slot_device(s), self.twin.slot_row(s).computed
        below = self.frames(s)[: -(-computed // self.size)]
        writers = [self.writer(device, f) for f in below]
        return [item for item in writers if item is not None and (arrived or not item.arrived)]

    def coming(self, device: int, f: int) -> bool:
        item = self.writer(device, f)
        return item is not None and not item.arrived

    def may_write(self, device: int, f: int, offset: int) -> bool:
        """A gated pass goes on behind the first tokens that are being loaded."""
        item = self.writer(device, f)
        return item is not None and self.state(device, f) == LOADING and item.need <= offset

    def needed(self, device: int, f: int, offset: int) -> bool:
        read = [item for item in self.items if item.source == (device, f) and not item.arrived]
        return super().needed(device, f, offset) or any(offset < item.need for item in read)

    def wires(self) -> list[tuple[int, int]]:
        return [end for item in self.items for end in (item.source, item.target)]

    def orderly(self, device: int) -> bool:
        return False

    def ready(self, item: Item) -> bool:
        """Its source has its content (is not itself being written)."""
        return not item.arrived and self.writer(*item.source) is None

    def begin(self, block: int, source: tuple[int, int], target: tuple[int, int], need: int) -> Item:
        item = Item(block, source, target, need)
        if self.writer(*source) is None:
            item.content = self.contents[source[0]][source[1]][:need]
        assert self.writer(*target) is None, f"two transfers into {target}"
        assert self.state(*target) == LOADING
        self.contents[target[0]][target[1]] = [GARBAGE] * self.size
        self.items.append(item)
        return item

    # -- beginning ------------------------------------------------------------------------------------------------

    def admission(self, data: st.DataObject) -> tuple[int, ...]:
        mask = data.draw(st.sampled_from([0b11111111, 0b11111111, 0, 0b01010101, 0b10101010])) & -1 << self.devices
        return (mask & 0xFF, data.draw(st.sampled_from([0, 0, 0, 1, 2])), data.draw(st.sampled_from([0, 1, 1, 2, 3])))

    def loading(self, s: int, result: Admit) -> None:
        loads = self.cores.loads()
        assert isinstance(self.twin, TwinCore)
        assert len(loads) == 4 * result.loads
        self.cores.hit_blocks()
        device = self.twin.slot_device(s)
        for block, d, g, f in zip(*[iter(loads)] * 4, strict=True):
            assert d >= self.devices
            assert self.twin.copies_of(block)[d] == g
            assert f in self.frames(s)
            known = self.twin._pools[device].frames[f].known
            self.begin(block, (d, g), (device, f), known or self.size)

    def copy(self, data: st.DataObject) -> None:
        source = data.draw(st.integers(0, len(self.capacities) - 1))
        target = data.draw(st.integers(0, len(self.capacities) - 1))
        among = [b for b, f in enumerate(self.copies_on(source)) if f >= 0]
        if among:
            blocks = data.draw(st.lists(st.sampled_from(among), max_size=5, unique=True))
            if data.draw(st.integers(0, 5)) == 0:
                blocks.append(data.draw(st.integers(0, self.blocks() - 1)))
            self.begin_copy(source, target, blocks)

    def copies_on(self, device: int) -> array[int]:
        return self.block_columns()[2][device :: len(self.capacities)]

    def begin_copy(self, source: int, target: int, blocks: list[int]) -> list[Item]:
        room = self.twin.free_frames(target)
        begun = self.cores.begin_copy(source, target, blocks)
        assert len(begun) // 3 <= room
        facts = self.twin.describe(begun[::3])
        step = 48 + 4 * self.size
        items = []
        for k, (b, f, g) in enumerate(zip(*[iter(begun)] * 3, strict=True)):
            ntokens = array("i", facts[k * step + 40 : k * step + 44])[0]
            items.append(self.begin(b, (source, f), (target, g), ntokens))
        return items

    def save(self, data: st.DataObject) -> None:
        tiers = [d for d in self.tier_numbers() if self.capacities[d]]
        s = self.choose(data, self.idle())
        target = self.choose(data, tiers)
        if s is not None and target is not None:
            self.save_tail(s, target)

    def save_tail(self, s: int, target: int) -> None:
        begun = self.cores.save_tail(s, target)
        if begun:
            b, f, g = begun
            computed = self.twin.slot_row(s).computed
            assert self.twin.tail_of(s) == (b, computed)
            item = self.begin(b, (self.twin.slot_device(s), f), (target, g), computed % self.size)
            assert item.content == self.chain(s)[computed - item.need : computed], "what is saved is not the tail"

    # -- contents arrive, ends are reported -------------------------------------------------------------------------

    def arrive(self, data: st.DataObject) -> None:
        item = self.choose(data, [item for item in self.items if self.ready(item)])
        if item is not None:
            self.bring(item)

    def bring(self, item: Item) -> None:
        content = self.contents[item.source[0]][item.source[1]]
        if item.content is not None:
            assert content[: item.need] == item.content, f"frame {item.source} changed while it was being copied"
        self.contents[item.target[0]][item.target[1]] = content[:]
        item.arrived = True

    def land(self, data: st.DataObject) -> None:
        targets = sorted({item.target[0] for item in self.items})
        target = self.choose(data, targets)
        if target is None:
            return
        items = [item for item in self.items if item.target[0] == target]
        some = data.draw(st.permutations(items))[: data.draw(st.integers(1, 4))]
        fine = data.draw(st.integers(0, 4)) > 0
        self.end(data, [(item, fine or data.draw(st.booleans())) for item in some])

    def end(self, data: st.DataObject, verdicts: list[tuple[Item, bool]]) -> None:
        """Report these, all of one target; what cannot have arrived yet is left out, unless it failed."""
        verdicts = [(item, good) for item, good in verdicts if not good or item.arrived or self.ready(item)]
        if not verdicts:
            return
        target = verdicts[0][0].target[0]
        for item, good in verdicts:
            if good and not item.arrived:
                self.bring(item)
            if not good and not item.arrived:
                self.fails(item)
        for item, _ in verdicts:
            self.items.remove(item)
        self.cores.landed(target, [item.target[1] for item, _ in verdicts], bytes(good for _, good in verdicts))
        for item, _ in verdicts:
            self.cores.unwire(item.source[0], [item.source[1]])
        bad = {item.target for item, good in verdicts if not good}
        for item in [item for item in self.items if item.source in bad and not item.arrived]:
            self.next_source(data, item, True)
        self.after_landing()

    def fails(self, item: Item) -> None:
        """Nothing of it came: a pass in flight that waits for it will fail."""
        device = item.target[0]
        plan = self.plans.get(device)
        if plan is not None and any(item in self.counted_on(q.slot) for q in unpack_seqs(plan.seqs)):
            self.doomed.add(device)

    def after_landing(self) -> None:
        for s in self.logs:
            if self.twin.is_running(s) and self.twin.slot_row(s).computed < len(self.logs[s]) - 1:
                self.cores.stop_running(s)  # what it decoded on top of did not come
        self.gated = {s for s in self.gated if s in self.logs and self.counted_on(s, arrived=True)}

    def next_source(self, data: st.DataObject, item: Item, dead: bool) -> None:
        """Take the content from another device, or by way of one.  dead: its source will never have it."""
        copies = self.twin.copies_of(item.block)
        own = (item.source[0], item.target[0])
        others = [d for d, f in enumerate(copies) if f >= 0 and d not in own and self.state(d, f) in (VALID, LOADING)]
        others = [d for d in others if self.writer(d, copies[d]) or self.state(d, copies[d]) == VALID]
        stage = self.choose(data, [d for d in self.tier_numbers() if copies[d] < 0 and d not in own])
        if not others and not dead and stage is not None and self.begin_copy(item.source[0], stage, [item.block]):
            others = [stage]
        d = self.choose(data, others)
        if d is not None and data.draw(st.integers(0, 3)):
            f = self.twin.copies_of(item.block)[d]
            self.cores.wire(d, [f])
            self.cores.unwire(item.source[0], [item.source[1]])
            item.source = (d, f)
            item.content = None if self.writer(d, f) else self.contents[d][f][: item.need]
        elif dead:
            self.end(data, [(item, False)])

    def source_again(self, data: st.DataObject) -> None:
        item = self.choose(data, [item for item in self.items if item.target[0] < self.devices and not item.arrived])
        if item is not None:
            self.next_source(data, item, False)

    def finish_transfers(self, data: st.DataObject, device: int, good: bool) -> None:
        """End every transfer that touches this device."""
        for _ in range(99):
            touching = [item for item in self.items if device in (item.source[0], item.target[0])]
            if not touching:
                return
            able = [item for item in touching if self.ready(item) or item.arrived] if good else touching
            if not able:  # wait for a transfer that does not touch it
                able = [item for item in self.items if self.ready(item)]
            self.end(data, [(able[0], good)])
        raise AssertionError("transfers do not end")

    # -- passes -----------------------------------------------------------------------------------------------------

    def skip_loading(self, data: st.DataObject) -> None:
        able = [s for s in self.idle() if self.admitted(s) and self.twin.loading(s) and not self.twin.is_running(s)]
        s = self.choose(data, able)
        if s is not None:
            self.gated.add(s)
            self.cores.skip_loading(s)
            self.after_landing()

    def in_flight(self, device: int, plan: Any) -> None:
        super().in_flight(device, plan)
        for q in unpack_seqs(plan.seqs):
            assert q.slot in self.gated or not self.counted_on(q.slot), (
                f"slot {q.slot} computes on what has not come, and nobody knows"
            )

    def complete(self, data: st.DataObject, device: int) -> bool:
        """The pass waits for everything that it counts on, layer by layer."""
        if device in self.doomed:
            self.fail(data, device)
            return False
        for q in unpack_seqs(self.plans[device].seqs):
            for item in self.counted_on(q.slot):
                if not self.ready(item) or not data.draw(st.booleans()):
                    return False
                self.bring(item)
        return True

    def fail_pass(self, data: st.DataObject) -> None:
        device = self.choose(data, sorted(self.plans))
        if device is not None:
            self.fail(data, device)

    def fail(self, data: st.DataObject, device: int) -> None:
        self.doomed.discard(device)
        self.fail_on(data, device)
        self.after_landing()

    def close(self, data: st.DataObject) -> None:
        super().close(data)
        self.gated &= set(self.logs)

    def lose(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 3)):
            return
        device = data.draw(st.integers(0, self.devices - 1))
        self.finish_transfers(data, device, False)
        self.doomed.discard(device)
        self.lose_device(device)
        self.after_landing()

    # -- what programs do often ---------------------------------------------------------------------------------------

    def swap_out(self, data: st.DataObject) -> None:
        """Save a context's tail, copy its blocks to a tier, unmap it; the transfers go on by themselves."""
        s = self.choose(data, [s for s in self.idle() if self.twin.slot_row(s).computed])
        target = self.choose(data, [d for d in self.tier_numbers() if self.capacities[d]])
        if s is None or target is None:
            return
        self.save_tail(s, target)
        self.begin_copy(self.twin.slot_device(s), target, self.cores.row_blocks(s)[::-1])
        self.settle(data)
        self.cores.drop(s)
        self.after_landing()
        device = self.twin.slot_device(s)
        if data.draw(st.booleans()):
            self.make_room(device, self.twin.reclaimable_frames(device))

    def settle(self, data: st.DataObject) -> None:
        """Mostly, everything under way ends well."""
        if data.draw(st.integers(0, 3)):
            for _ in range(3):
                for target in sorted({item.target[0] for item in self.items}):
                    self.end(data, [(item, True) for item in self.items if item.target[0] == target])

    def come_back(self, data: st.DataObject) -> None:
        """Admit a context that has nothing mapped, and compute the rest, perhaps before its loads have landed."""
        s = self.choose(data, [s for s in self.idle() if self.logs[s] and not self.frames(s)])
        if s is None or not self.admit_slot(data, s):
            return
        device = self.twin.slot_device(s)
        if data.draw(st.booleans()):
            self.settle(data)
        elif self.twin.loading(s) and device not in self.plans:
            self.gated.add(s)
            self.cores.skip_loading(s)
            self.after_landing()
        if device in self.plans:
            return
        at = self.cores.advance(s)
        n = len(self.logs[s])
        if at.computed == n:
            record = PREFILL.pack(s, n - 1, 1, 0, -1, 0)
        elif at.ready:
            record = PREFILL.pack(s, at.computed, at.ready, 0, -1, 0)
        else:
            return
        plan = self.cores.plan(device, 1, record)
        if plan.sequences:
            self.in_flight(device, plan)
            if data.draw(st.booleans()) and self.complete(data, device):
                self.commit_device(data, device)

    def bury(self, data: st.DataObject) -> None:
        """Keep the last block of a context in a tier, and nothing of what is before it: its ancestors become ghosts."""
        s = self.choose(data, [s for s in self.idle() if len(self.cores.row_blocks(s)) > 1])
        target = self.choose(data, [d for d in self.tier_numbers() if self.twin.free_frames(d)])
        if s is None or target is None:
            return
        device = self.twin.slot_device(s)
        items = self.begin_copy(device, target, self.cores.row_blocks(s)[:1])
        self.end(data, [(item, True) for item in items])
        if data.draw(st.booleans()):
            self.cores.close_slot(s)
            del self.logs[s], self.domains[s]
        else:
            self.cores.drop(s)
        self.after_landing()
        self.make_room(device, self.twin.reclaimable_frames(device))

    def forget(self, data: st.DataObject) -> None:
        device = data.draw(st.integers(0, len(self.capacities) - 1))
        self.cores.forget_copies(device, data.draw(st.lists(st.integers(0, self.blocks() - 1), max_size=3)))
        s = self.choose(data, self.idle())
        if s is not None and data.draw(st.booleans()):
            self.cores.forget_tail(s)
            assert self.twin.tail_of(s) == (-1, 0)

    def touch(self, data: st.DataObject) -> None:
        device = data.draw(st.integers(0, len(self.capacities) - 1))
        blocks = data.draw(st.permutations(self.twin.oldest(device, 9)))[:3]
        self.cores.touch(device, blocks)
        assert self.twin.oldest(device, 99)[-len(blocks) :] == blocks or not blocks

    def learn(self, data: st.DataObject) -> None:
        self.now_ns += data.draw(st.integers(0, 9))
        self.cores.tick(self.now_ns)
        s = self.choose(data, self.idle())
        if s is not None:
            self.cores.note(s, data.draw(st.integers(0, 7)), data.draw(st.sampled_from([1, 2, 70000])), self.now_ns + 5)
            start = data.draw(st.integers(-1, 9))
            self.cores.prioritise(s, start, start + data.draw(st.integers(-1, 12)), data.draw(st.integers(0, 100)))

    # -- tiers come and go ----------------------------------------------------------------------------------------------

    def restart_tier(self, data: st.DataObject) -> None:
        """A tier's driver died; a new one says what it found, some of it wrong."""
        if data.draw(st.integers(0, 1)):
            return
        device = self.choose(data, list(self.tier_numbers()))
        if device is None:
            return
        self.finish_transfers(data, device, False)
        found = self.stored(device)
        contents = self.contents[device]
        self.cores.lose(device)
        assert self.twin.free_frames(device) == self.capacities[device]
        kept = data.draw(st.lists(st.sampled_from(found), unique=True)) if found else []
        kept.sort(key=lambda row: row[:2])
        self.cores.claim(device, [f for _, f, *_ in kept])
        held = set()
        for depth, f, domain, parent_key, tokens in kept:
            parent = self.twin.find_key(parent_key) if depth else -1
            wrong = data.draw(st.sampled_from([0, 0, 0, 1, 2]))
            if wrong == 1:
                tokens = array("i", [9] * self.size).tobytes()
                contents[f] = [GARBAGE] * self.size
            block = -1
            if parent >= 0 or not depth:
                at = self.expected(parent, *self.block_columns()[:2])[-1] if parent >= 0 else domain
                if wrong == 1:  # another block, whole in itself
                    contents[f] = self.digests(at, tokens)
                elif self.digests(at, tokens) != contents[f]:
                    wrong = 2  # the number of its parent's key is used for something else: only with weak keys
                if wrong < 2:
                    block = self.cores.adopt(device, f, domain, ROOTS[domain], parent, tokens)
            if block < 0:
                self.cores.unclaim(device, f)
            else:
                held.add(f)
        self.contents[device] = [c if f in held else [GARBAGE] * self.size for f, c in enumerate(contents)]
        self.after_landing()

    @staticmethod
    def digests(at: int, tokens: bytes) -> list[int]:
        return [at := digest(at, t) for t in array("i", tokens)]

    def stored(self, device: int) -> list[tuple[int, int, int, bytes, bytes]]:
        """(depth, frame, domain, key of the parent, tokens) of the whole blocks on a tier."""
        parent, domain, depth, _, indexed, keys, copies, _, _ = self.twin.block_table()
        parents, domains, depths = array("i", parent), array("i", domain), array("i", depth)
        rows = []
        for b, f in enumerate(array("i", copies)[device :: len(self.capacities)]):
            if f >= 0 and indexed[b] and self.state(device, f) == VALID:
                above = parents[b]
                key = keys[16 * above : 16 * above + 16] if above >= 0 else b""
                rows.append((depths[b], f, domains[b], key, self.twin.block_tokens_of(b)))
        return rows

    def resize(self, data: st.DataObject) -> None:
        """Detach a tier, attach one in its place, or a new one."""
        if data.draw(st.integers(0, 2)):
            return
        device = data.draw(st.sampled_from([*self.tier_numbers(), len(self.capacities)]))
        if device == MAX_DEVICES:
            return
        frames = data.draw(st.sampled_from([0, 1, 3, 6, 40]))
        if device < len(self.capacities):
            self.finish_transfers(data, device, data.draw(st.booleans()))
            if self.twin.free_frames(device) < self.capacities[device]:
                for core in self.cores.each:
                    try:
                        core.set_capacity(device, frames)
                        raise AssertionError("a tier with content was detached")
                    except Panic:
                        pass
            self.cores.lose(device)
            self.after_landing()
        else:
            self.capacities.append(0)
            self.contents.append([])
        self.cores.set_capacity(device, frames)
        self.capacities[device] = frames
        self.contents[device] = [[GARBAGE] * self.size for _ in range(frames)]

    # -- looking ----------------------------------------------------------------------------------------------------

    def look(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.integers(0, self.blocks() - 1), max_size=6))
        device = data.draw(st.integers(0, len(self.capacities) - 1))
        want = data.draw(st.integers(0, 4))
        self.cores.copied(blocks, data.draw(st.integers(0, 255)))
        self.cores.evictable(device, blocks, want)
        self.cores.sample(device, want, data.draw(st.integers(0, 2**64 - 1)))
        for b in blocks:
            chain = self.cores.chain(device, b, want)
            assert self.cores.evictable(device, chain, want) == chain
        refs = array("i", self.twin.frame_table(device)[1]).tolist()
        assert [self.cores.refs_of(device, f) for f in range(len(refs))] == refs
        for s in self.logs:
            held, frames = array("i", self.twin.frame_table(self.twin.slot_device(s))[3]), self.frames(s)
            assert self.cores.row_entries(s) == [number for f in frames for number in (held[f], f)]

    @invariant()
    def same_lists(self) -> None:
        everything = list(range(self.blocks()))
        self.cores.describe(everything)
        self.cores.facts(everything)
        keys = self.twin.block_table()[5]
        assert self.cores.key_heads(everything) == [
            int.from_bytes(keys[16 * b : 16 * b + 8], "little") for b in everything
        ]
        for s in self.logs:
            self.cores.row_blocks(s)
            self.cores.row_entries(s)
            self.check_prefix(s, self.cores.prefix(s))
            self.cores.loading(s)
            self.cores.tail_of(s)
            self.check_residency(s, self.cores.residency(s))
        assert self.cores.ghosts() == self.twin.counters().ghosts

    def check_prefix(self, s: int, found: Prefix) -> None:
        """It counts what the blocks of the log say one by one."""
        blocks = self.cores.log_blocks(s)
        own = self.cores.copied(blocks, 1 << self.twin.slot_device(s))
        any_valid = [state == 2 for state in self.cores.copied(blocks, 255)]
        device = self.twin.slot_device(s)
        states, _, _, _, _, fillers = self.twin.frame_table(device)
        filler = array("i", fillers)
        frames = [self.twin.copies_of(b)[device] for b in blocks]
        computed = [f >= 0 and states[f] == FILLING and filler[f] not in (s, -1) for f in frames]
        here = len(list(takewhile(lambda state: state == 2, own)))
        coming = len(list(takewhile(bool, own[here:])))
        promised = [bool(a or b) for a, b in zip(own, computed, strict=True)]
        awaited = len(list(takewhile(bool, promised[here + coming :])))
        stored = len(list(takewhile(bool, any_valid[here + coming + awaited :])))
        same = found == (here, coming, awaited, stored)
        assert same or self.twin.counters().collisions, "only broken keys may lead it further than the tokens agree"

    def check_residency(self, s: int, where: bytes) -> None:
        """What it says is there, is there."""
        chain, own, frames = self.chain(s), self.twin.slot_device(s), self.frames(s)
        counts, computed = self.counts(s), self.twin.slot_row(s).computed
        blocks = self.cores.log_blocks(s)
        tail, end = self.twin.tail_of(s)
        assert len(where) == -(-len(chain) // self.size)
        for i, d in enumerate(where):
            if d == NO_COPY or (i < len(frames) and d == own):
                continue
            whole = chain[i * self.size : (i + 1) * self.size]
            b = blocks[i] if i < len(blocks) else tail
            held = self.contents[d][self.twin.copies_of(b)[d]]
            assert held[: len(whole)] == whole or (
                b == tail and held[: end - i * self.size] == whole[: end - i * self.size]
            )
        assert counts or not computed

    @invariant()
    def tails_right(self) -> None:
        for s in self.logs:
            b, end = self.twin.tail_of(s)
            if b < 0:
                continue
            n = (end - 1) % self.size + 1
            for d, f in enumerate(self.twin.copies_of(b)):
                if f >= 0 and self.state(d, f) == VALID:
                    assert self.contents[d][f][:n] == self.chain(s)[end - n : end], (
                        f"saved tail of slot {s} on {d} is wrong"
                    )

    def teardown(self) -> None:
        for d in list(self.plans):
            self.cores.rollback(d)
        self.plans.clear()
        waiting = deque(self.items)
        while waiting:
            item = waiting.popleft()
            if item in self.items:
                self.items.remove(item)
                self.cores.landed(item.target[0], [item.target[1]], b"\0")
                self.cores.unwire(item.source[0], [item.source[1]])
        super().teardown()
