"""Transfers: who carries what, in which order, and what happens when it arrived or did not.

A *move* is one Transfer effect and what the kernel wants to know when it is back.  Every frame of a move is wired from
the moment it is planned until its TransferDone, or its driver's death, is seen (I4); every item ends in exactly one of
`landed` good or `landed` bad, so nothing hangs on one message.

A device runs few moves at a time, and takes what somebody waits for before demotions and prefetches: a fault waits for
what is under way, and that is little.  Among those that wait, the context goes first that has been served least, so that
a long one does not hold up a short one.  A load whose source is not in reach of the target in one hop, or is itself still
arriving, is a chain: its last hop is planned when the one before has landed.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from .errors import E
from .events import Transfer, TransferDone
from .tag import GATES, PRIVATE, TAG_HEAD

if TYPE_CHECKING:
    from .device import Device
    from .machine import Machine

BATCH: Final = 256  # items of one demand transfer
BEHIND: Final = 64  # items of a transfer that nobody waits for: what a fault may have to wait behind
FOLLOW: Final = 0.5  # a pass follows a load through gates if computing takes at least this share of loading
_NOTHING_CAME: Final = frozenset({E.EIO, E.ETIMEDOUT})  # the device's fault, as against what a frame holds, or room
AT_ONCE: Final = 2  # transfers of one device under way: one runs while the next is there already


class Item(NamedTuple):
    """One frame's content on its way.  block: whose content it is at the source (its tag)."""

    block: int
    source: int  # device
    source_frame: int
    target: int
    target_frame: int
    origin: int  # device that it came from on its first hop


class Hop(NamedTuple):
    """The next item of a chain, which begins when the one before it has landed."""

    item: Item
    demand: bool
    cid: int


class Move:
    """Items that go together.  then(good items, failed items with errno) runs when all of them have ended."""

    __slots__ = (
        "broken", "cid", "demand", "gate", "items", "over", "proven", "seq", "then", "ticket", "why",
    )  # fmt: skip

    def __init__(self, items: list[Item], why: str, cid: int, demand: bool, then: Then | None) -> None:
        self.items = items
        self.why = why  # load | demote | save | promote
        self.cid = cid
        self.demand = demand  # somebody waits for it
        self.then = then
        self.seq = 0  # 0: not sent yet
        self.over = False
        self.broken = False  # a pass that followed it has failed
        self.proven = False  # a pass has followed it through its gate to the last layer: all of it has landed
        self.gate = -1
        self.ticket = 0


Then = Callable[[list[Item], list[tuple[Item, int]]], None]


class Movers:
    """All transfers of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._core = machine.core
        self._flying: list[dict[int, Move]] = [{} for _ in machine.devices]
        self._waiting: list[tuple[deque[Move], deque[Move]]] = [(deque(), deque()) for _ in machine.devices]
        self._served: list[Counter[int]] = [Counter() for _ in machine.devices]  # items by cid, since nobody waited
        self._chained: dict[tuple[int, int], list[Hop]] = {}  # (device, frame) still loading -> next hops
        self._staged: deque[Hop] = deque()  # loads that wait for a dram frame to come through, those on demand first
        self._arriving: set[tuple[int, int]] = set()  # (device, frame) that a move writes
        self._gates = deque(range(GATES))  # free ones: the one used longest ago is used next
        self._over: list[int] = []  # gates of ended moves that a pass in flight may still look at
        self._ticket = 0
        # Transfers, and loads that were given up: what waits for any of them looks again when it has grown.
        self.ended = 0

    def add_device(self) -> None:
        self._flying.append({})
        self._waiting.append((deque(), deque()))
        self._served.append(Counter())

    # -- planning -------------------------------------------------------------------------------------------------

    def copy(self, source: int, target: int, blocks: Sequence[int], why: str, cid: int = 0, then: Then | None = None,
             demand: bool = False) -> int:  # fmt: skip
        """Copy these blocks between two devices that are one hop apart, as many as fit; how many were begun."""
        begun = self._core.begin_copy(source, target, blocks)
        items = [
            Item(begun[k], source, begun[k + 1], target, begun[k + 2], source) for k in range(0, len(begun), 3)
        ]  # fmt: skip
        self.send(items, why, cid, demand, then)
        return len(items)

    def send(self, items: list[Item], why: str, cid: int, demand: bool, then: Then | None) -> None:
        """Queue wired items of one source and one target, in batches."""
        if not items:
            return
        carrier = self._carrier(items[0].source, items[0].target)
        size = BATCH if demand else BEHIND
        for k in range(0, len(items), size):
            move = Move(items[k : k + size], why, cid, demand, then)
            self._waiting[carrier.index][0 if demand else 1].append(move)
            self._arriving.update((item.target, item.target_frame) for item in move.items)
        self.pump(carrier)

    def save(self, begun: Sequence[int], source: int, target: int, cid: int) -> None:
        """The tail of a context that leaves hbm (CoreApi.save_tail)."""
        if begun:
            self.send([Item(begun[0], source, begun[1], target, begun[2], source)], "save", cid, True, None)

    def load(self, loads: Sequence[int], target: int, cid: int, demand: bool, compute_ns: float = -1.0) -> list[Move]:
        """Bring what an admission found elsewhere (CoreApi.loads) into its hbm frames.  The moves that have a gate.

        demand      somebody waits for it; otherwise it is a prefetch
        compute_ns  what the context has to compute on top, below 0: unknown.  Where that is little, there is nothing to hide
                    a load behind, and whole frames through dram come faster than layers straight into hbm
        """
        direct: dict[int, list[Item]] = {}
        arriving: set[tuple[int, int]] = set()
        for k in range(0, len(loads), 4):
            block, source, source_frame, frame = loads[k : k + 4]
            item = Item(block, source, source_frame, target, frame, source)
            if (source, source_frame) in self._arriving:
                self._chained.setdefault((source, source_frame), []).append(Hop(item, demand, cid))
                arriving.add((source, source_frame))
            elif self._m.tiers.one_hop(source, target):
                direct.setdefault(source, []).append(item)
            else:
                self._staged.append(Hop(item, demand, cid))
        gated: list[Move] = []
        for source, items in direct.items():
            gates = demand and len(items) > 1 and self._m.tiers.gated(source, target)
            if gates and 0 <= compute_ns < FOLLOW * self._load_ns(source, target, len(items)):
                if self._m.devices[source].tier == "dram":  # there is no other way, and it is one hop
                    self.send(items, "load", cid, demand, None)
                    continue
                self._staged.extend(Hop(item, demand, cid) for item in items)
                continue
            move = self._gated(items, cid) if gates else None
            if move is not None:
                gated.append(move)
            else:
                self.send(items, "load", cid, demand, None)
        if demand:
            self._urge(arriving)
            self._demand_first()
        self.stage()
        return gated

    def _load_ns(self, source: int, target: int, frames: int) -> float:
        costs = self._m.costs
        return costs.link(*self._m.tiers.link_of(source, target)).ns(frames * costs.frame_bytes)

    def _demand_first(self) -> None:
        """Staged loads in order of service: stable, so that each context's stay in theirs."""
        self._staged = deque(sorted(self._staged, key=lambda hop: not hop.demand))

    def _gated(self, items: list[Item], cid: int) -> Move | None:
        """One move for all, with a gate that its pass can follow layer by layer."""
        self.reuse_gates()
        if not self._gates:
            return None
        move = Move(items, "load", cid, True, None)
        move.gate = self._gates.popleft()
        self._ticket += 1
        move.ticket = self._ticket
        carrier = self._carrier(items[0].source, items[0].target)
        self._waiting[carrier.index][0].append(move)
        self._arriving.update((item.target, item.target_frame) for item in items)
        self.pump(carrier)
        return move

    def stage(self) -> None:
        """Bring staged loads into dram, as far as it has room: their last hop follows by itself."""
        stage = self._m.tiers.stage
        if not self._staged or stage is None:
            return
        room = self._m.tiers.evictors[stage.index].room(min(len(self._staged), BATCH))
        spare = max(1, stage.capacity // 4)  # frames that prefetches leave to those that will wait
        batches: dict[tuple[int, int, bool], list[Item]] = {}
        limited, held = (
            self._m.groups.limited(stage),
            deque[Hop](),
        )  # held back by limits of their own, and nobody else by them
        while self._staged:
            item, demand, cid = self._staged[0]
            frame = self._core.copies_of(item.block)[stage.index]
            if frame < 0:
                if limited and self._m.tiers.evictors[item.source].over_limit(stage, [item.block]):
                    held.append(self._staged.popleft())
                    continue
                enough = room > (0 if demand or not self.moving() else spare)
                begun = self._core.begin_copy(item.source, stage.index, [item.block]) if enough else []
                if not begun:
                    break
                room -= 1
                frame = begun[2]
                batches.setdefault((item.source, cid, demand), []).append(
                    Item(item.block, item.source, begun[1], stage.index, frame, item.source)
                )
            self._staged.popleft()
            self._core.unwire(item.source, [item.source_frame])
            self._core.wire(stage.index, [frame])
            onward = item._replace(source=stage.index, source_frame=frame)
            self._chained.setdefault((stage.index, frame), []).append(Hop(onward, demand, cid))
        self._staged.extendleft(reversed(held))
        for (_, cid, demand), items in batches.items():
            self.send(items, "load", cid, demand, None)
        landed = [key for key in self._chained if key[0] == stage.index and key not in self._arriving]
        if landed:
            self._onward(landed, True)
        if self._staged and not self.moving():  # there never will be room: limits and guarantees of dram are in the way
            staged, self._staged = self._staged, deque()
            self._m.count("abandoned_loads", self._abandoned([hop.item for hop in staged]))

    # -- sending --------------------------------------------------------------------------------------------------

    def _carrier(self, source: int, target: int) -> Device:
        """The device whose driver makes the copy: the slower end, unless that is passive dram."""
        a, b = self._m.devices[source], self._m.devices[target]
        for device in (b, a):
            if device.tier not in ("hbm", "dram"):
                return device
        return a if a.tier == "hbm" else b

    def pump(self, device: Device) -> None:
        flying = self._flying[device.index]
        first, later = self._waiting[device.index]
        while (first or later) and len(flying) < AT_ONCE:
            move = self._next(device.index) if first else later.popleft()
            if not device.up:
                self._end(device, move, [(k, int(E.EHOSTDOWN)) for k in range(len(move.items))])
                continue
            self._emit(device, move)

    def _next(self, device: int) -> Move:
        """Of what somebody waits for: the first move of the context that has been served least since nobody waited."""
        first, served = self._waiting[device][0], self._served[device]
        if len(first) == 1:
            served.clear()
            return first.popleft()
        at = min(range(len(first)), key=lambda k: (served[first[k].cid], k))
        move = first[at]
        del first[at]
        served[move.cid] += len(move.items)
        return move

    # -- changes of mind ------------------------------------------------------------------------------------------

    def urge(self, device: int, frames: Iterable[int]) -> None:
        """Somebody waits for these frames now: what brings them is no prefetch any more, and overtakes those that are."""
        self._urge({(device, frame) for frame in frames} & self.unfinished())

    def _urge(self, wanted: set[tuple[int, int]]) -> None:
        if not wanted:
            return
        for hops in (*self._chained.values(), self._staged):
            for k, hop in enumerate(hops):
                if not hop.demand and (hop.item.target, hop.item.target_frame) in wanted:
                    hops[k] = hop._replace(demand=True)
        self._demand_first()
        wanted |= {key for key, hops in self._chained.items() if any(hop.demand for hop in hops)}
        for first, later in self._waiting:
            urged = [mv for mv in later if any((i.target, i.target_frame) in wanted for i in mv.items)]
            for move in urged:
                later.remove(move)
                move.demand = True
                first.append(move)

    def unfinished(self) -> set[tuple[int, int]]:
        """(device, frame) of everything that is to be written by a transfer which has not ended."""
        return self._arriving | {(hop.item.target, hop.item.target_frame) for hop in self._chains()}

    def abandon(self, cid: int) -> None:
        """Nobody waits for this context's loads and prefetches any more: those that have not begun never will, unless
        their frames are of use to another context.  What is under way lands as cache."""
        if not any(queue for queues in self._waiting for queue in queues) and not self._staged and not self._chained:
            return

        def unwanted(item: Item, why: str) -> bool:
            if (item.target, item.target_frame) in self._chained:
                return False
            if self._m.devices[item.target].tier != "hbm":
                return why in ("load", "prefetch")
            return not self._core.refs_of(item.target, item.target_frame)

        dropped = 0
        for key, hops in list(self._chained.items()):
            dead = [hop for hop in hops if hop.cid == cid and unwanted(hop.item, "load")]
            dropped += self._abandoned([hop.item for hop in dead])
            self._chained[key] = [hop for hop in hops if hop not in dead]
            if not self._chained[key]:
                del self._chained[key]
        dead = [hop for hop in self._staged if hop.cid == cid and unwanted(hop.item, "load")]
        self._staged = deque(hop for hop in self._staged if hop not in dead)
        dropped += self._abandoned([hop.item for hop in dead])
        for queues in self._waiting:
            for queue in queues:
                for move in [mv for mv in queue if mv.cid == cid and mv.then is None]:
                    out = [item for item in move.items if unwanted(item, move.why)]
                    self._arriving.difference_update((item.target, item.target_frame) for item in out)
                    dropped += self._abandoned(out)
                    gone = set(out)
                    move.items = [item for item in move.items if item not in gone]
                    if not move.items:
                        move.over = True
                        queue.remove(move)
                        if move.gate >= 0:
                            self._gates.append(move.gate)
        self._m.count("abandoned_loads", dropped)

    def _abandoned(self, items: list[Item]) -> int:
        self.ended += len(items)
        for item in items:
            self._m.prefetches.gone(item.target, [item.block], "abandoned")
        for item in items:
            self._core.landed(item.target, [item.target_frame], b"\0")
            self._core.unwire(item.source, [item.source_frame])
        return len(items)

    # -- on the wire ----------------------------------------------------------------------------------------------

    def _emit(self, device: Device, move: Move) -> None:
        one = move.items[0]
        outward = one.source == device.index
        verb, arena = ("read", one.target) if outward else ("write", one.source)
        pairs = array("i")
        for item in move.items:
            pairs.extend((item.source_frame, item.target_frame) if outward else (item.target_frame, item.source_frame))
        device.transfer_seq += 1
        move.seq = device.transfer_seq
        self._flying[device.index][move.seq] = move
        tags = self.tags([item.block for item in move.items])
        self._m.count("transfers")
        self._m.emit(
            Transfer(device.index, move.seq, verb, arena, pairs.tobytes(), tags, move.gate, move.ticket)
        )  # fmt: skip

    def tags(self, blocks: Sequence[int]) -> bytes:
        """Packed tags (kernel/tag.py) of blocks as they are now."""
        size = 4 * self._m.config.block_tokens
        step = 48 + size
        raw = self._core.describe(blocks)
        out = bytearray()
        for at in range(0, len(raw), step):
            domain, depth, n, private = array("i", raw[at + 32 : at + 48])
            name, root = self._m.tiers.domain_named(domain)
            key, parent = raw[at : at + 16], raw[at + 16 : at + 32]
            if private:
                key = self._core.hash(b"tail" + raw[at + 32 : at + step])
            elif depth == 0:
                parent = root
            out += (
                TAG_HEAD.pack(key, parent, root, depth, n, PRIVATE if private else 0, 0, name)
                + raw[at + 48 : at + step]
            )
        return bytes(out)

    # -- ends -----------------------------------------------------------------------------------------------------

    def done(self, event: TransferDone) -> None:
        device = self._m.devices[event.device]
        move = self._flying[device.index].pop(event.seq, None)
        if move is None:
            self._m.count("late_completions")
            return
        outward = move.items[0].source == device.index
        good = len(move.items) - len({k for k, _ in event.failed})
        link = self._m.costs.link(device.index, "read" if outward else "write")
        link.seen(event.moved_bytes, event.elapsed_ns, good)
        failed = [(k, code) for k, code in event.failed if 0 <= k < len(move.items)]
        self._end(device, move, failed)
        self.pump(device)
        self.stage()

    def fail_all(self, device: Device, code: int) -> None:
        """Its driver is reaped: nothing that it was moving will arrive, and nothing that it was reading is read any more."""
        flying = self._flying[device.index]
        lost = list(flying.values())
        flying.clear()
        for queue in self._waiting[device.index]:
            lost.extend(queue)
            queue.clear()
        for move in lost:
            self._end(device, move, [] if move.proven else [(k, code) for k in range(len(move.items))])
        stranded = [hop for hop in self._staged if hop.item.source == device.index]
        self._staged = deque(hop for hop in self._staged if hop.item.source != device.index)
        for hop in stranded:
            self._give_up(hop)
        self.stage()

    def _end(self, device: Device, move: Move, failed: list[tuple[int, int]]) -> None:
        codes = dict(failed)
        device.mute = (
            device.mute + 1 if len(codes) == len(move.items) and _NOTHING_CAME.issuperset(codes.values()) else 0
        )
        move.over = True
        self.ended += 1
        if move.gate >= 0:
            self._over.append(move.gate)
            self.reuse_gates()
        if failed:
            self._m.tiers.failed(device, move.items, codes, move.seq)
        again = [item for k, item in enumerate(move.items) if k in codes and self._elsewhere(move, item)]
        bad = [(item, codes[k]) for k, item in enumerate(move.items) if k in codes and item not in again]
        good = [item for k, item in enumerate(move.items) if k not in codes]
        source, target = move.items[0].source, move.items[0].target
        self._arriving.difference_update((target, item.target_frame) for item in move.items)
        self._core.landed(
            target,
            [i.target_frame for i in good] + [i.target_frame for i, _ in bad],
            b"\1" * len(good) + b"\0" * len(bad),
        )
        self._core.unwire(source, [item.source_frame for item in move.items])
        if codes:
            self._drop_wrong(device, [(move.items[k], code) for k, code in codes.items()])
        self._m.prefetches.gone(target, [item.block for item, _ in bad], "failed")
        self._onward([(target, i.target_frame) for i in good], True)
        self._onward([(target, i.target_frame) for i, _ in bad], False)
        self._m.tiers.landed(target, good, move.seq)
        if move.why == "load":
            self._m.tiers.loaded(move.cid, target, good)
        if again:
            self._retry(again, move.cid, move.demand)
        if move.then is not None:
            move.then(good, bad)

    def reuse_gates(self) -> None:
        """Gates of ended moves are free when no pass is in flight: a larger ticket there would hide that a load failed."""
        if self._over and not any(device.flight for device in self._m.devices):
            self._gates.extend(self._over)
            self._over.clear()

    def _elsewhere(self, move: Move, item: Item) -> bool:
        """A load that failed may come from another copy."""
        target = self._m.devices[item.target]
        if move.why != "load" or move.gate >= 0 or target.tier != "hbm" or not target.up:
            return False  # (what passes have followed through a gate fails with them, and is computed)
        return any(
            frame >= 0 and d not in (item.source, item.target) and self._m.tiers.readable(d)
            for d, frame in enumerate(self._core.copies_of(item.block))
        )

    def _retry(self, items: Iterable[Item], cid: int, demand: bool) -> None:
        loads: list[int] = []
        for item in items:
            for d, frame in enumerate(self._core.copies_of(item.block)):
                if frame >= 0 and d not in (item.source, item.target) and self._m.tiers.readable(d):
                    self._core.wire(d, [frame])
                    loads += (item.block, d, frame, item.target_frame)
                    break
            else:
                self._core.landed(item.target, [item.target_frame], b"\0")
        self._m.count("loads_retried", len(loads) // 4)
        self.load(loads, next(iter(items)).target, cid, demand)

    def _drop_wrong(self, carrier: Device, failed: list[tuple[Item, int]]) -> None:
        """A copy with other content, or that its own driver cannot read, is no copy."""
        for item, code in failed:
            lost = code == E.ECORRUPT or (item.source == carrier.index and code in (E.ENOENT, E.EIO))
            if not lost or self._m.devices[item.source].tier == "hbm":
                continue
            if self._core.copies_of(item.block)[item.source] == item.source_frame:
                self._core.forget_copies(item.source, [item.block])
                self._m.prefetches.gone(item.source, [item.block], "failed")

    def _onward(self, frames: Iterable[tuple[int, int]], good: bool) -> None:
        """The next hop of what landed; what did not come will not go on."""
        hops: dict[tuple[int, int, int, bool], list[Item]] = {}
        dead: list[Hop] = []
        for key in frames:
            for hop in self._chained.pop(key, ()):
                if good:
                    hops.setdefault((hop.item.source, hop.item.target, hop.cid, hop.demand), []).append(hop.item)
                else:
                    dead.append(hop)
        for (_, _, cid, demand), items in hops.items():
            self.send(items, "load", cid, demand, None)
        for hop in dead:
            self._give_up(hop)

    def _give_up(self, hop: Hop) -> None:
        """Its source will never have the content: another copy has, or nobody."""
        item = hop.item
        self.ended += 1
        self._core.unwire(item.source, [item.source_frame])
        if self._elsewhere(Move([item], "load", hop.cid, hop.demand, None), item):
            self._retry([item], hop.cid, hop.demand)
        else:
            self._core.landed(item.target, [item.target_frame], b"\0")

    # -- looking --------------------------------------------------------------------------------------------------

    def _moves(self) -> Iterable[Move]:
        for d in range(len(self._flying)):
            yield from self._flying[d].values()
            for queue in self._waiting[d]:
                yield from queue

    def carries(self, blocks: set[int]) -> bool:
        """A transfer of one of these blocks is under way or waits: its frames may not be let go before it has ended."""
        return any(item.block in blocks for move in self._moves() for item in move.items) or any(
            item.block in blocks for item, _, _ in self._chains()
        )

    def busy(self, device: int) -> bool:
        """Transfers touch this device's frames."""
        return any(device in (i.source, i.target) for move in self._moves() for i in move.items[:1]) or any(
            device in (hop.item.source, hop.item.target) for hop in self._chains()
        )

    def moving(self) -> bool:
        """Some transfer has not ended: an event is to come."""
        return any(self._flying) or any(a or b for a, b in self._waiting)

    def idle(self) -> bool:
        """Nothing is under way, and nothing waits."""
        return not (self.moving() or self._chained or self._staged)

    def _chains(self) -> Iterable[Hop]:
        for waiting in self._chained.values():
            yield from waiting
        yield from self._staged

    def wires(self) -> list[tuple[int, int]]:
        """(device, frame), once per reason to be wired: for fsck."""
        found: list[tuple[int, int]] = []
        items = [item for move in self._moves() for item in move.items] + [hop.item for hop in self._chains()]
        for item in items:
            found.append((item.source, item.source_frame))
            found.append((item.target, item.target_frame))
        return found
