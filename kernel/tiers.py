"""The memory hierarchy of one machine: which device is below which, who may take what, and what became of transfers.

Devices are numbered fast to slow: compute devices (tier hbm), then dram, then the slower tiers.  Copies move along these
hops, each made by one driver (kernel/movers.py):

    hbm <-> dram      by the accel          dram <-> nvme, remote      by the tier's own driver
    nvme -> hbm       by a tier driver that announced `direct`; otherwise by way of dram

A device that is down keeps its copies in the books until its driver is reaped and comes back to say what survived, but
nothing is read from it or written to it meanwhile, and no block counts as safe because of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .cost import Costs
from .decisions import Decisions
from .domain import known_domain
from .errors import E
from .evict.view import KernelView
from .evictor import Evictor
from .ids import Cid
from .movers import Item, Movers
from .tag import PRIVATE, tag_bytes, unpack_tag

if TYPE_CHECKING:
    from .context import Context
    from .device import Device
    from .group import Group
    from .machine import Machine


class Tiers:
    """One per machine.  exists: there is any tier besides hbm."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._core = machine.core
        self.computes = sum(1 for d in machine.devices if d.tier == "hbm")
        self.decisions = Decisions()
        self.evictors: list[Evictor] = []
        self._domains: dict[int, tuple[bytes, bytes]] = {}  # by number: name, root

    def begin(self) -> None:
        """Second half of construction: what needs the machine whole."""
        m = self._m
        m.costs = Costs(self.computes, m.config.kv.frame_bytes(m.config.block_tokens), m.config.block_tokens)
        m.view = KernelView(m)
        m.movers = Movers(m)
        self.evictors = [Evictor(m, d, m.sysctl.policy_of(d.tier)) for d in m.devices]
        for device in m.devices:
            device.up = device.tier == "dram"

    @property
    def exist(self) -> bool:
        return len(self._m.devices) > self.computes

    # -- the order of things --------------------------------------------------------------------------------------

    @property
    def stage(self) -> Device | None:
        """The dram that transfers between hbm and slower tiers go through."""
        for device in self._m.devices[self.computes :]:
            if device.tier == "dram" and device.up:
                return device
        return None

    def _takes(self, device: Device) -> bool:
        return device.up and not device.read_only and not device.draining and not device.removed and device.capacity > 0

    def below(self, index: int) -> Device | None:
        """The device that blocks leaving `index` are copied to, one hop away; None: nowhere."""
        device = self._m.devices[index]
        if device.tier == "hbm":
            stage = self.stage
            return stage if stage is not None and self._takes(stage) else None
        if device.tier != "dram":
            return None  # between two tiers with drivers of their own there is no hop
        for lower in self._m.devices[index + 1 :]:
            if lower.tier != "dram" and self._takes(lower):
                return lower
        return None

    def keepers(self, device: Device) -> int:
        """Bit mask of the slower devices whose copy makes one on `device` needless."""
        if not self.exist:
            return 0
        first = max(device.index + 1, self.computes) if device.tier == "hbm" else device.index + 1
        return self._mask(first)

    def sources(self, device: Device) -> int:
        """Bit mask of the devices that hbm frames of `device` may be loaded from."""
        return self._mask(self.computes) if self.exist and self.stage is not None else 0

    def _mask(self, first: int) -> int:
        mask = 0
        for d in self._m.devices[first:]:
            if d.up and not d.removed:
                mask |= 1 << d.index
        return mask

    def lacking(self, blocks: Sequence[int], devices: int) -> list[int]:
        """Those of `blocks` that no device of the bit mask has, or is getting."""
        return [b for b, state in zip(blocks, self._core.copied(blocks, devices), strict=True) if not state]

    def readable(self, index: int) -> bool:
        device = self._m.devices[index]
        return device.up and device.tier != "hbm"

    def one_hop(self, source: int, target: int) -> bool:
        a, b = self._m.devices[source], self._m.devices[target]
        return a.tier == "dram" or b.tier == "dram" or (a.direct and b.tier == "hbm")

    def gated(self, source: int, target: int) -> bool:
        """A load between the two reports its progress layer by layer, and passes may follow it."""
        a, b = self._m.devices[source], self._m.devices[target]
        follows = a.direct or (a.tier == "dram" and b.layered)
        return follows and b.tier == "hbm" and bool(self._m.sysctl.gates)

    def link_of(self, source: int, target: int) -> tuple[int, str]:
        """(device, verb) whose measured cost is that of this hop, or of the slowest hop between the two."""
        a, b = self._m.devices[source], self._m.devices[target]
        if a.tier not in ("hbm", "dram"):
            return a.index, "read"
        if b.tier not in ("hbm", "dram"):
            return b.index, "write"
        return (a.index, "read") if a.tier == "hbm" else (b.index, "write")

    def partial_tokens(self, device: Device) -> int:
        """Fewest first tokens of a known block that are worth a copy of it; 0: never."""
        least = self._m.sysctl.partial_tokens
        if not least:
            return 0
        fit = self._m.costs.prefill[device.index].known()
        copy_ns = self._m.costs.link(device.index, "read").ns(self._m.costs.frame_bytes)
        if fit is None or not copy_ns or fit.a <= 0:
            return least
        return max(least, int(copy_ns / fit.a) + 1)

    def shrink(self, group: Group, device: Device, frames: int) -> int:
        """Let a group have no more than so many frames there, as far as nothing runs on them; how many it has then."""
        number = group.number
        if self._core.account(device.index, number).used > frames and device.tier == "hbm":
            self._m.schedulers[device.index].pager.own_idle(
                number, self._core.account(device.index, number).used - frames
            )
            self._core.disown(device.index, number)
        more = self._core.account(device.index, number).used - frames
        if more > 0:
            self.evictors[device.index].drop(more, number)
        return self._core.account(device.index, number).used

    def pinned(self, context: Context) -> bool:
        return context.pinned_until_ns > self._m.now_ns

    def apply(self, sysctl: str) -> None:
        """A sysctl was set."""
        if sysctl.startswith("evict."):
            for device, evictor in zip(self._m.devices, self.evictors, strict=True):
                name = self._m.sysctl.policy_of(device.tier)
                if evictor.policy.name != name or evictor.fault:
                    evictor.use(name)

    # -- names of domains, for tags -------------------------------------------------------------------------------

    def know_domain(self, number: int, name: str, root: bytes) -> None:
        if self.exist:
            self._domains[number] = (name.encode()[:63], root)

    def forget_domain(self, number: int) -> None:
        self._domains.pop(number, None)

    def domain_named(self, number: int) -> tuple[bytes, bytes]:
        return self._domains.get(number, (b"", bytes(16)))

    # -- what became of transfers ---------------------------------------------------------------------------------

    def decide(
        self, what: str, device: Device, cid: int, blocks: Sequence[int], why: str, keys: Sequence[int] | None = None,
        plain: str = "",
    ) -> None:  # fmt: skip
        """keys: CoreApi.key_heads of the blocks, for those that are gone already.  plain: see Decision."""
        heads = self._core.key_heads(blocks) if keys is None else keys
        self.decisions.add(self._m.now_ns, what, device.name, cid, tuple(blocks), why, tuple(heads), plain)

    def failed(self, carrier: Device, items: list[Item], codes: dict[int, int], seq: int) -> None:
        """Items of transfer `seq` failed: count them, say so, and deal with a full tier."""
        m = self._m
        corrupt = sum(1 for code in codes.values() if code == E.ECORRUPT)
        carrier.errors += len(codes)
        carrier.corrupt += corrupt
        m.count("transfer_errors", len(codes))
        m.count("corrupt_copies", corrupt)
        names = sorted({E(code).name if code in E._value2member_map_ else str(code) for code in codes.values()})
        one = items[next(iter(codes))]
        a, b = m.devices[one.source], m.devices[one.target]
        m.log(
            "warning",
            f"{carrier.name}: {len(codes)} of {len(items)} frames from {a.name} to {b.name} failed: {', '.join(names)}",
        )
        full = [items[k] for k, code in codes.items() if code == E.ENOSPC]
        if full and b is carrier:
            self._full(carrier, full, seq)

    def _full(self, device: Device, items: list[Item], seq: int) -> None:
        """ENOSPC: evict and try once more; again before a later write has gone well, and the tier takes nothing new, and
        what it holds can be read."""
        m = self._m
        if device.read_only or seq <= device.full_seq:
            return  # it was under way when that was found out
        if device.full_seq:
            device.read_only = True
            m.log("error", f"{device.name} is full (ENOSPC) though {len(items)} of its frames were freed: it is read-only from now "
                           f"on; make room on its file system and attach it again")  # fmt: skip
            return
        device.full_seq = device.transfer_seq
        m.count("enospc_retries")
        self.evictors[device.index].free(len(items))

    def landed(self, target: int, good: list[Item], seq: int) -> None:
        """Blocks have a copy on `target` now, brought by transfer `seq` of who carried them."""
        device = self._m.devices[target]
        if good and seq > device.full_seq:  # (a device that meets ENOSPC carries what is written to it)
            device.full_seq = 0
        policy = self.evictors[target].policy
        if policy.listens and good:
            policy.inserted(self._m.view, target, [item.block for item in good])

    def loaded(self, cid: int, target: int, good: list[Item]) -> None:
        """Blocks came to `target` for a context; those that came to hbm are hits of the tier that they came from."""
        m = self._m
        if m.devices[target].tier != "hbm":
            return
        context = m.contexts.get(Cid(cid))
        tails = {m.core.tail_of(context.slot)[0]} if context is not None else set()
        for item in good:
            tier = m.devices[item.origin].tier
            m.count(f"loaded_blocks_{tier}")
            if context is not None:
                size = m.config.block_tokens
                tokens = m.core.tail_of(context.slot)[1] % size if item.block in tails else size
                context.tier_hits[tier] = context.tier_hits.get(tier, 0) + tokens

    # -- drivers come and go --------------------------------------------------------------------------------------

    def tier_up(self, device: Device, arena: str) -> None:
        """A tier's driver is up.  What it kept is what it found, unless its arena is said to be as it was."""
        if arena == "lost" or device.found:
            self._core.lose(device.index)
            self._m.prefetches.lost(device.index)
            adopted = self._adopt(device)
            if adopted or device.found:
                self._m.log("info", f"{device.name}: {adopted} blocks found from before")
        device.found = b""

    def _adopt(self, device: Device) -> int:
        m = self._m
        size = m.config.block_tokens
        step = 4 + tag_bytes(size)
        rows = []
        seen: set[int] = set()
        for at in range(0, len(device.found) - step + 1, step):
            (frame,) = array("i", device.found[at : at + 4])
            try:
                tag = unpack_tag(device.found[at + 4 : at + step], size)
            except ValueError:
                continue
            if 0 <= frame < device.capacity and frame not in seen and tag.ntokens == size and not tag.flags & PRIVATE:
                seen.add(frame)
                rows.append((tag.depth, frame, tag))
        rows.sort(key=lambda row: row[:2])
        self._core.claim(device.index, [frame for _, frame, _ in rows])
        adopted: list[int] = []
        for _, frame, tag in rows:
            block = -1
            name = tag.domain.decode("utf-8", "replace")
            if known_domain(name) and len(tag.tokens) == 4 * size:
                number, root = m.domains.of(name)
                parent = -1 if tag.depth == 0 else self._core.find_key(tag.parent)
                above = tag.parent if tag.depth else root
                right = root == tag.root and self._core.hash(above + tag.tokens) == tag.key
                if right and (parent >= 0 or tag.depth == 0):
                    owner = m.groups.owner_of(name)
                    block = self._core.adopt(device.index, frame, number, root, parent, tag.tokens, owner)
            if block < 0:
                self._core.unclaim(device.index, frame)
            else:
                adopted.append(block)
        self._core.touch(device.index, adopted[::-1])  # leaves are the oldest
        return len(adopted)

    def tier_down(self, device: Device) -> None:
        """Its process is reaped: what it was moving is lost, and nothing of it can be read until it is back."""
        self._m.movers.fail_all(device, int(E.EHOSTDOWN))

    def tier_gone(self, device: Device) -> None:
        """It will not come back: forget its copies."""
        self.tier_down(device)
        self._core.lose(device.index)
        self._m.prefetches.lost(device.index)

    # -- writing down before it is needed -------------------------------------------------------------------------

    def turn_ended(self, context: Context, kind: int, due_ns: int = 0) -> None:
        """A job of this context ended: remember why, tell the policies, and write through if that is asked."""
        m = self._m
        context.turns += 1
        if context.hint is not None:
            (kind, due_ns), context.hint = context.hint, None
        core = self._core
        index = context.device
        policy = self.evictors[index].policy
        core.note(context.slot, kind, context.turns, due_ns)
        if policy.listens:
            blocks = core.row_blocks(context.slot)[::-1]
            known = min(context.told_blocks, len(blocks))
            if known < len(blocks):
                policy.inserted(m.view, index, blocks[known:])
            context.told_blocks = len(blocks)
            if blocks:
                policy.ended(m.view, index, blocks)
        for evictor in self.evictors[self.computes :]:
            if evictor.policy.listens:
                log = core.log_blocks(context.slot)
                held = [b for b, state in zip(log, core.copied(log, 1 << evictor.index), strict=True) if state]
                if held:
                    evictor.policy.ended(m.view, evictor.index, held)
        self.keep_up(context)

    def keep_up(self, context: Context) -> None:
        """It has computed something: copy it down, if it has a name or that is asked for."""
        if self.exist and context.kept is not None:
            self._m.errands.save(context)
        elif self.exist and self._m.sysctl.write != "back":
            self.write_through(context)

    def write_through(self, context: Context) -> None:
        """Copy what the context has in hbm to dram, and on to the slower tiers, while it stays where it is."""
        m, index = self._m, context.device
        below = self.below(index)
        if below is None or m.core.in_flight(context.slot):
            return
        blocks = self._core.row_blocks(context.slot)  # a leaf first, so that it is older there than its parent
        if m.sysctl.write == "selective":
            facts = m.view.facts(blocks)
            blocks = [b for b, fact in zip(blocks, facts, strict=True) if fact.hits >= m.sysctl.selective_hits]
        lower = self.below(below.index)
        states = self._core.copied(blocks, 1 << below.index)
        todo = [b for b, state in zip(blocks, states, strict=True) if not state]
        if lower is not None:
            self._further(below, lower, [b for b, state in zip(blocks, states, strict=True) if state == 2])
        room = self.evictors[below.index].room(len(todo))

        def onward(good: list[Item], bad: list[tuple[Item, int]]) -> None:
            if lower is not None and lower.up:
                self._further(below, lower, [item.block for item in good])

        m.count("written_through", m.movers.copy(index, below.index, todo[:room], "through", context.cid, onward))

    def _further(self, source: Device, target: Device, blocks: list[int]) -> None:
        todo = self.lacking(blocks, 1 << target.index)
        room = self.evictors[target.index].room(len(todo))
        self._m.movers.copy(source.index, target.index, todo[:room], "through")

    def ahead(self) -> None:
        """Once a step: begin to copy away what will have to go soon."""
        for device in self._m.devices[: self.computes + 1]:
            if device.up:
                low = max(1, device.capacity * self._m.sysctl.watermark_permille // 1000)
                self.evictors[device.index].ahead(low)
