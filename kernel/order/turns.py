"""Who decodes in the next pass of one compute device, and how long it may take.

Alone, a group's passes take what its own contexts need.  With others it gets at least its share of the time, and where it
uses less than that, its decodes are not much later than alone: the prompts and decodes of others may lengthen its passes
by at most STRETCH of what their weights would let them take,

    pass <= alone * (1 + STRETCH * weights of the others / own weight).

Strict time sharing would allow STRETCH = 1; what is below comes from batching, since the fixed part of a pass is paid once
for all.  Whoever does not fit waits for a later pass: groups take turns by start-time fair queueing (share.py), the
contexts of a group one after the other.  Groups that have less than they were promised go before the others, which may not
lengthen their passes meanwhile (rates.py).  With one group there is no limit but that of `sched.max_running`, and the core's
own rotation picks.

A target for the time per token (sysctl `sched.tpot_ms`, generate's `tpot_ms`) limits a pass in the same way, but only its
prompts: leaving decodes out would make those late that are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ..batch import Seq
from ..context import Context
from ..cost import Decode
from ..rates import before, beside, waiting
from .pace import Pace
from .share import Share

if TYPE_CHECKING:
    from ..group import Group
    from ..machine import Machine

STRETCH: Final = 0.5
AIM: Final = 0.95  # of a target: what is predicted may be a little off
TOKEN_NS: Final = 1000.0  # what a token is taken to cost before anything has been measured; shares need no more
LEARN_EVERY: Final = 16  # passes, when nobody needs to know what decoding costs
_NEVER: Final = 1e18  # ns


class Turns:
    """benched  slots that decode and are left out of the next pass
    sharing  several groups have work here"""

    def __init__(self, machine: Machine, device: int) -> None:
        self._m = machine
        self._core = machine.core
        self._device = device
        self._share: Share[int] = Share()
        self.pace = Pace()
        self.benched: set[int] = set()
        self.sharing = False
        self._weights: dict[str, int] = {}
        self._groups: dict[str, Group] = {}
        self._late: frozenset[int] = frozenset()  # groups that have less than they were promised (rates.py) ...
        self._waits: dict[str, tuple[bool, bool]] = {}  # ... who waits for that: for another uid's, for a sibling's
        self._left_out: set[str] = set()
        self._targets: dict[int, int] = {}  # by slot: generations with a target of their own, in ns
        self._tokens: dict[int, int] = {}  # by slot: length of the log at the last pass, while groups share
        self._mean_tokens = 0.0  # the same, on average
        self._ran: dict[int, int] = {}  # by slot: number of the choice that let it decode last, while groups share
        self._choices = 0
        self._decode_ns = 0.0  # predicted, of those chosen
        self._limits: dict[str, float] = {}  # by group: ns of a pass in which it decodes

    # -- before a pass --------------------------------------------------------------------------------------------

    def aim(self, context: Context) -> None:
        """It decodes from now on, and whatever its slot was benched for is over."""
        self.benched.discard(context.slot)
        if context.job is not None and context.job.args.tpot_ms:
            self._targets[context.slot] = context.job.args.tpot_ms * 1_000_000

    def meet(self, queue: Iterable[Context], decoding: Mapping[int, Context]) -> None:
        """Who has work here now."""
        before = self.sharing
        self.sharing = len(self._m.groups) > 1
        if self.sharing:
            groups = {c.process.group for c in queue} | {c.process.group for c in decoding.values()}
            self._groups = {group.name: group for group in groups}
            self._weights = {group.name: group.weight for group in groups}
            self._late = self._m.groups.rates.late() if len(groups) > 1 else frozenset()
            self._waits = waiting(groups, self._late) if self._late else {}
            self.sharing = len(groups) > 1
            self._share.present({name: name in self._left_out for name in sorted(self._weights)})
        if before and not self.sharing:
            self._tokens, self._ran, self._limits = {}, {}, {}

    def line(self, jobs: Mapping[str, Sequence[tuple[int, float]]]) -> list[int]:
        """Jobs of several groups in one order.  jobs: by group (number, ns), in the order of its policy."""
        return self._merge(jobs)

    def _merge(self, items: Mapping[str, Sequence[tuple[int, float]]]) -> list[int]:
        """All, by shares; those that wait for what others were promised behind those that do not."""
        if not self._late:
            return self._share.merge(items, self._weights)
        ranks = {name: self._waits[name] for name in items}
        line: list[int] = []
        for rank in sorted(set(ranks.values())):
            line += self._share.merge({name: items[name] for name in items if ranks[name] == rank}, self._weights)
        return line

    def _behind(self, name: str, other: str) -> bool:
        """What `other` does waits for what `name` was promised."""
        return bool(self._late) and before(self._groups[name], self._groups[other], self._late)

    def choose(self, decoding: Mapping[int, Context], room: int, prompts: bool) -> int:
        """Bench those whose turn it is not; how many decode.  prompts: somebody has a prompt to compute besides."""
        if not self.sharing:
            self.release(decoding)
            return min(len(decoding), room)
        chosen = self._chosen(decoding, room, prompts)
        for slot in decoding:
            if slot in chosen and slot in self.benched:
                self._core.start_running(slot)
            elif slot not in chosen and slot not in self.benched:
                self._core.stop_running(slot)
        self.benched = decoding.keys() - chosen
        self._choices += 1
        self._ran.update(dict.fromkeys(chosen, self._choices))
        return len(chosen)

    def release(self, decoding: Mapping[int, Context]) -> None:
        """Nobody is benched."""
        if self.benched:
            for slot in sorted(self.benched & decoding.keys()):
                self._core.start_running(slot)
            self.benched = set()
        self.pace.begin(None)

    def _chosen(self, decoding: Mapping[int, Context], room: int, prompts: bool) -> set[int]:
        self._limits = {}
        fit = self._m.costs.decode[self._device].known()
        members: dict[str, list[tuple[int, float]]] = {}
        for slot in sorted(decoding, key=lambda slot: self._ran.get(slot, 0)):
            known = self._tokens.get(slot, self._mean_tokens)
            cost_ns = max(1.0, fit.one_ns(known)) if fit is not None else TOKEN_NS
            members.setdefault(decoding[slot].process.group.name, []).append((slot, cost_ns))
        limit_ns = _NEVER
        if fit is not None:
            others = beside(self._groups.values(), self._late)
            for name, mine in members.items():
                alone_ns = fit.k + sum(cost for _, cost in mine)
                most = STRETCH * alone_ns * others[name] / self._weights[name]
                self._limits[name] = alone_ns + most
                allowed_ns = alone_ns + (most / 2 if prompts else most)
                limit_ns = min(limit_ns, allowed_ns + 1.0)  # sums of the same round apart
        costs = {slot: cost for mine in members.values() for slot, cost in mine}
        spent_ns = fit.k if fit is not None else 0.0
        self._decode_ns = spent_ns + sum(costs.values())
        if len(decoding) <= room and self._decode_ns <= limit_ns:
            return set(decoding)
        chosen: set[int] = set()
        for slot in self._merge(members):
            if len(chosen) >= room or (chosen and spent_ns + costs[slot] > limit_ns):
                break
            chosen.add(slot)
            spent_ns += costs[slot]
        self._decode_ns = spent_ns
        return chosen

    def begin_chunks(self, decoding: Mapping[int, Context], decode: int, queue: Sequence[Context]) -> None:
        """How long those of the queue may make the pass in which `decode` contexts decode."""
        if not decode or not queue:
            self.pace.begin(None)
            return
        fit = self._m.costs.decode[self._device].known()
        target_ns = self._target_ns(decoding)
        if fit is None or (target_ns == _NEVER and not self._limits):
            self.pace.begin(None)
            return
        decode_ns = self._decode_ns if self.sharing else fit.ns(decode, self._mean_tokens * decode)
        slack = {}
        limits = sorted((limit, other) for other, limit in self._limits.items())
        for name in {context.process.group.name for context in queue}:
            theirs = (limit for limit, other in limits if other != name and not self._behind(name, other))
            slack[name] = min(AIM * target_ns, next(theirs, _NEVER)) - decode_ns
        self.pace.begin(slack)

    def _target_ns(self, decoding: Mapping[int, Context]) -> float:
        """The smallest target among those that decode."""
        if not decoding:
            return _NEVER
        for slot in [s for s in self._targets if s not in decoding]:
            del self._targets[slot]
        every = self._m.sysctl.tpot_ms * 1_000_000
        if every and len(self._targets) < len(decoding):
            return min(every, min(self._targets.values(), default=every))
        return min(self._targets.values(), default=_NEVER)

    def sent(self, decoding: Mapping[int, Context], queue: Iterable[Context], chunked: set[int]) -> None:
        """The pass has gone.  chunked: slots whose prompts are in it."""
        self.pace.sent()
        if self.sharing:
            self._left_out = {decoding[slot].process.group.name for slot in self.benched if slot in decoding}
            self._left_out |= {c.process.group.name for c in queue if c.slot not in chunked}
            if self._late:  # what it leaves to a sibling is no credit against other uids
                self._left_out = {n for n in self._left_out if n not in self._groups or not self._waits[n][True]}

    # -- after it -------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """Somebody needs to know what decoding costs, or nothing is known of it yet."""
        return (
            self.sharing
            or bool(self._m.sysctl.tpot_ms or self._targets)
            or self._m.costs.decode[self._device].known() is None
        )

    def decoded(self, contexts: int, cached: int, elapsed_ns: int) -> None:
        """A pass of decoding only has ended.  cached: tokens that its contexts had between them."""
        self._mean_tokens = cached / contexts
        self._m.costs.decode[self._device].seen(contexts, cached, elapsed_ns)

    def charge(self, seqs: Sequence[Seq], elapsed_ns: int) -> None:
        """What a pass cost, to the groups whose sequences were in it."""
        decode, prefill = self._m.costs.decode[self._device].known(), self._m.costs.prefill[self._device].known()
        parts: dict[str, float] = {}
        for q in seqs:
            context = self._m.by_slot.get(q.slot)
            if context is None:
                continue
            if q.ntokens == 1:
                part_ns = decode.one_ns(q.start) if decode is not None else TOKEN_NS
                self._tokens[q.slot] = q.start + 1
            elif prefill is not None:
                part_ns = prefill.ns(q.ntokens, q.start) - prefill.k
            else:
                part_ns = TOKEN_NS * q.ntokens
            name = context.process.group.name
            parts[name] = parts.get(name, 0.0) + max(1.0, part_ns)
        whole = sum(parts.values())
        for name, part_ns in sorted(parts.items()):
            if name in self._weights:
                service_ns = elapsed_ns * part_ns / whole if elapsed_ns else part_ns
                self._share.charge(name, service_ns, self._weights[name])


def decode_part_ns(fit: Decode | None, contexts: int, cached: int) -> float:
    """What decoding adds to a pass of prompts; 0 while that is unknown."""
    return fit.a * contexts + fit.b * cached if fit is not None else 0.0
