"""The default: learn when blocks come back, and evict what is worth least per second that it stays.

A block that stays costs a frame for as long as it stays, and is worth what it would cost to have it back, if it is used.  So the
worth of a leaf is

    cost to have it back [ns]  x  the best over all horizons h of  P(used within h) / E[time until used or h]

given its class and its age (time since its last use).  The second factor is a Gittins index (Gittins 1979); without the choice of the
horizon it is the hit density of LHD (Beckmann, Chen, Cidon, NSDI 2018).  It can rise with age, as for a tool that takes its
time, or fall, as for a person who does not answer.  The worst of 64 sampled leaves goes, with the blocks above it that are like it.

**Estimation.**  Per class one hazard rate (uses per second of age) for each half octave of age: uses seen / time under
observation, so that blocks which have not come back yet count for as long as they have not.  Observed are a few blocks of each
turn, one per octave of distance from its end, *whether they are still resident or not*: what the policy evicts, it goes on learning
about.  Whenever more than RECORDS are under observation, the share of turns that are halves (chosen by their last key, as SHARDS does
with objects, Waldspurger et al., FAST 2015).

**Classes** form a tree: all, how the last turn ended (and which tool), how many blocks that turn added to what had been seen before,
whether the block was found 0, 1 or more times.  What a turn added tells most: of Mooncake's conversations, a turn that added at
most one block is followed by another within ten minutes in 52% of cases, one that added more than 16 in 21%.  A context may come
back after all of it was evicted, and has then added nothing: the last keys of ENDS turns are remembered for that.  Where a class has few
observations it takes the rates of the class above it, times the ratio of its uses to those that the rates above foretold,
weighted as CLASS_PRIOR observations; at the root stands a rate that falls
as 1/age, under which this policy is LRU.

**Etas.**  Where somebody said when a block will be wanted, its age counts from that moment; r seconds before it, the index
is 1 / (r + 1 / index at that moment).  How far etas can be trusted is thus learned like everything else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import exp
from typing import Final

from .cost import cost_ns
from .protocol import BlockView, Fact
from .sampled import SAMPLE, draw

FIRST_EDGE_NS: Final = 1_000_000_000
EDGES_NS: Final = tuple(int(FIRST_EDGE_NS * 2 ** (i / 2)) for i in range(25))  # 1 s .. 68 min
STARTS_NS: Final = (0, *EDGES_NS)
BUCKETS: Final = len(STARTS_NS)
WIDTHS_S: Final = tuple((b - a) / 1e9 for a, b in zip(STARTS_NS, (*EDGES_NS, 2 * EDGES_NS[-1]), strict=True))
FORGET_NS: Final = 2 * EDGES_NS[-1]
ROOT_RATES: Final = tuple(0.2 / (start / 1e9 + 1.0) for start in STARTS_NS)
ROOT_PRIOR: Final = 16.0  # observations
CLASS_PRIOR: Final = 32.0  # more, for the observations of one turn fare alike
RECORDS: Final = 16384
ENDS: Final = 16384
HITS: Final = 2  # that are told apart
UNKNOWN: Final = 15  # blocks added: nobody's turn ended on it yet
MEMORY: Final = 1 << 17  # observations of a class, in buckets passed; beyond, all halve
PRIORITY_DOUBLES: Final = 10  # points of `advise` priority that double a block's worth
LEAVES_A_DRAW: Final = 8  # of 64: the worst eighth


class Curve:
    """What is known of one class: uses and time under observation per bucket of age."""

    def __init__(self, above: Curve | None) -> None:
        self.above = above
        self.uses = [0.0] * BUCKETS
        self.risk_s = [0.0] * BUCKETS
        self.rates: tuple[float, ...] = ()
        self.index: tuple[float, ...] = ()
        self.seen = 0  # buckets passed when rates and index were worked out
        self.fresh = 0  # and since

    def enter(self, bucket: int) -> None:
        """A block reached this age: its time in the bucket counts in full until `use` gives some back."""
        curve: Curve | None = self
        while curve is not None:
            curve.risk_s[bucket] += WIDTHS_S[bucket]
            curve.fresh += 1
            curve = curve.above

    def use(self, bucket: int, age_ns: int) -> None:
        """It was used in the bucket that it had entered."""
        unspent_s = max(0.0, WIDTHS_S[bucket] - (age_ns - STARTS_NS[bucket]) / 1e9)
        curve: Curve | None = self
        while curve is not None:
            curve.risk_s[bucket] -= unspent_s
            curve.uses[bucket] += 1.0
            curve.fresh += 1
            curve = curve.above

    def at(self, bucket: int) -> float:
        """The index of a block of this age, per second.  Worked out anew when a quarter more has been seen."""
        if not self.index or self.fresh > 32 + self.seen // 4:
            self._work_out()
        return self.index[bucket]

    def _work_out(self) -> None:
        if self.above is None:
            prior, weight = ROOT_RATES, ROOT_PRIOR
        else:
            self.above.at(0)
            weight = CLASS_PRIOR
            expected = sum(risk * rate for risk, rate in zip(self.risk_s, self.above.rates, strict=True))
            ratio = (sum(self.uses) + weight) / (expected + weight)
            prior = tuple(rate * ratio for rate in self.above.rates)
        self.rates = tuple(
            (uses + weight * width * rate) / (risk + weight * width)
            for uses, risk, width, rate in zip(self.uses, self.risk_s, WIDTHS_S, prior, strict=True)
        )
        used = [1.0 - exp(-rate * width) for rate, width in zip(self.rates, WIDTHS_S, strict=True)]
        stay = [u / rate if rate > 1e-12 else width for u, rate, width in zip(used, self.rates, WIDTHS_S, strict=True)]
        index = []
        for bucket in range(BUCKETS):
            left, gain, spent, best = 1.0, 0.0, 0.0, 0.0
            for later in range(bucket, BUCKETS):
                gain += left * used[later]
                spent += left * stay[later]
                left -= left * used[later]
                best = max(best, gain / spent)
            index.append(best)
        self.index = tuple(index)
        self.seen += self.fresh
        self.fresh = 0
        if self.seen > MEMORY:
            self.seen //= 2
            self.uses = [uses / 2 for uses in self.uses]
            self.risk_s = [risk / 2 for risk in self.risk_s]


class Record:
    """A key under observation: its class, when its age began, the last key of its turn, the last bucket of age that it
    entered (-1: none yet)."""

    __slots__ = ("bucket", "curve", "since_ns", "turn")

    def __init__(self, since_ns: int, curve: Curve, turn: int) -> None:
        self.since_ns = since_ns
        self.curve = curve
        self.turn = turn
        self.bucket = -1

    def enter(self, bucket: int) -> None:
        while self.bucket < bucket:
            self.bucket += 1
            self.curve.enter(self.bucket)

    def use(self, now_ns: int) -> None:
        age_ns = max(0, now_ns - self.since_ns)
        self.enter(bisect_right(EDGES_NS, age_ns))
        self.curve.use(self.bucket, max(age_ns, STARTS_NS[self.bucket]))


class Learned:
    name = "learned"
    listens = True

    def __init__(self) -> None:
        self.calls = 0
        self.curves: dict[tuple[int, ...], Curve] = {}
        self.records: dict[int, Record] = {}
        self.share = 0  # turns whose last key ends in `share` bits 0 are observed
        self.added = bytearray()  # per block: how many its last turn added, in powers of four
        self.ends: OrderedDict[int, None] = OrderedDict()  # last keys of turns
        self.expected: list[tuple[int, int]] = []  # heap of (due, key): their age has not begun
        self.waiting: list[deque[tuple[int, int]]] = [
            deque() for _ in range(BUCKETS)
        ]  # (since, key), per bucket of age

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        found: dict[int, None] = {}
        for _ in range(1 + want // LEAVES_A_DRAW):
            self.calls += 1
            leaves, facts = draw(view, device, self.calls)
            worst = sorted(
                (self.worth(view, device, leaf, fact), fact.used_ns, leaf)
                for leaf, fact in zip(leaves, facts, strict=True)
                if leaf not in found
            )
            if len(leaves) == SAMPLE:
                del worst[LEAVES_A_DRAW:]
            self._take(view, device, worst, want, found)
            if len(found) >= want or len(leaves) < SAMPLE:
                break
        return list(found)

    def _take(
        self, view: BlockView, device: int, worst: list[tuple[float, int, int]], want: int, found: dict[int, None]
    ) -> None:
        """Fill `found` with the blocks worth least: what is above a leaf competes with the other leaves for its own worth."""
        above: dict[int, Sequence[int]] = {}  # block: itself and those above it, where those below it are found
        while worst and len(found) < want:
            worth, _, block = heappop(worst)
            chain = above.pop(block, None) or view.chain(device, block, want - len(found))
            facts = view.facts(chain)
            for place, fact in enumerate(facts):
                if place and (fact.used_ns, fact.hits) != (facts[0].used_ns, facts[0].hits):
                    dearer = self.worth(view, device, chain[place], fact)
                    if dearer > worth:
                        above[chain[place]] = chain[place:]
                        heappush(worst, (dearer, fact.used_ns, chain[place]))
                        break
                if len(found) == want:
                    break
                found[chain[place]] = None

    def worth(self, view: BlockView, device: int, block: int, fact: Fact) -> float:
        """Nanoseconds saved per second that the block stays."""
        curve = self._curve(block, fact)
        if fact.due_ns > view.now_ns:
            ahead_s = (fact.due_ns - view.now_ns) / 1e9
            index = 1.0 / (ahead_s + 1.0 / max(1e-9, curve.at(0)))
        else:
            age_ns = view.now_ns - max(fact.used_ns, fact.due_ns)
            index = curve.at(bisect_right(EDGES_NS, age_ns))
        advised: float = 2.0 ** ((fact.priority - 50) / PRIORITY_DOUBLES)
        return index * cost_ns(view, device, fact) * advised

    def inserted(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        self._came_back(view, blocks)
        self._note(blocks, UNKNOWN)

    def used(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        self._came_back(view, blocks)

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        now_ns = view.now_ns
        self._grow_older(now_ns)
        if not blocks:
            return
        keys = view.keys(blocks)
        self._note(blocks, (self._new(view, blocks, keys).bit_length() + 1) // 2)
        self.ends[keys[-1]] = None
        self.ends.move_to_end(keys[-1])
        if len(self.ends) > ENDS:
            self.ends.popitem(last=False)
        if keys[-1] & (1 << self.share) - 1:
            return
        places = [len(blocks) - 1, *(len(blocks) - 1 - (1 << i) for i in range((len(blocks) - 1).bit_length()))]
        for place, fact in zip(places, view.facts([blocks[place] for place in places]), strict=True):
            key = keys[place]
            record = Record(max(now_ns, fact.due_ns), self._curve(blocks[place], fact), keys[-1])
            self.records[key] = record
            if fact.due_ns > now_ns:
                heappush(self.expected, (fact.due_ns, key))
            else:
                self._begin(now_ns, key)
        if len(self.records) > RECORDS:
            self.share += 1
            mask = (1 << self.share) - 1
            self.records = {key: record for key, record in self.records.items() if not record.turn & mask}

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def _note(self, blocks: Sequence[int], added: int) -> None:
        table = self.added
        if blocks and (short := max(blocks) + 1 - len(table)) > 0:
            table.extend(bytes((UNKNOWN,)) * max(short, len(table)))
        for block in blocks:
            table[block] = added

    def _new(self, view: BlockView, blocks: Sequence[int], keys: Sequence[int]) -> int:
        """How many blocks at the end no turn had before."""
        seen = len(blocks)
        while seen and keys[seen - 1] not in self.ends:
            seen -= 1
        for fact in view.facts(blocks[seen:]):
            if not fact.hits:
                break
            seen += 1
        return len(blocks) - seen

    def _curve(self, block: int, fact: Fact) -> Curve:
        added = self.added[block] if block < len(self.added) else UNKNOWN
        path = (int(fact.due_ns > 0), fact.kind, added, min(HITS, fact.hits))
        curve = self.curves.get(path)
        if curve is None:
            above = self._curve_at(path[:1], None)
            for level in range(2, len(path) + 1):
                above = self._curve_at(path[:level], above)
            curve = above
        return curve

    def _curve_at(self, path: tuple[int, ...], above: Curve | None) -> Curve:
        curve = self.curves.get(path)
        if curve is None:
            curve = self.curves[path] = Curve(above)
        return curve

    def _begin(self, since_ns: int, key: int) -> None:
        self.records[key].enter(0)
        self.waiting[0].append((since_ns, key))

    def _came_back(self, view: BlockView, blocks: Sequence[int]) -> None:
        now_ns = view.now_ns
        self._grow_older(now_ns)
        records = self.records
        for key in view.keys(blocks):
            if key in records:
                records.pop(key).use(now_ns)

    def _grow_older(self, now_ns: int) -> None:
        """Blocks under observation enter the buckets of age that they have reached."""
        while self.expected and self.expected[0][0] <= now_ns:
            since_ns, key = heappop(self.expected)
            record = self.records.get(key)
            if record is not None and record.since_ns == since_ns:
                self._begin(since_ns, key)
        for bucket, edge_ns in enumerate((*EDGES_NS, FORGET_NS)):
            row = self.waiting[bucket]
            while row and row[0][0] + edge_ns <= now_ns:
                since_ns, key = row.popleft()
                record = self.records.get(key)
                if record is None or record.since_ns != since_ns:
                    continue  # it came back
                if bucket + 1 == BUCKETS:
                    del self.records[key]
                else:
                    record.enter(bucket + 1)
                    self.waiting[bucket + 1].append((since_ns, key))
