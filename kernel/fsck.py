"""fsck: every invariant of DESIGN.md §3 that this version has something to check for.

Run after every step in tests, and by system call in production.  It reads tables and recounts everything from the
page tables up; it shares no counter with what it checks.  A problem names its invariant.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .records import FREE, LOADING, VALID

if TYPE_CHECKING:
    from .coreapi import CoreApi
    from .machine import Machine


def fsck(m: Machine) -> list[str]:
    problems = fsck_core(m.core, [d.capacity for d in m.devices], m.config.block_tokens, m.movers.wires())
    problems += _contexts(m)
    problems += _writes(m)
    problems += m.names.problems()
    problems += m.lifetimes.problems()
    problems += m.interrupts.problems()
    problems += _groups(m)
    return problems


def _groups(m: Machine) -> list[str]:
    """I8, of what is counted by name."""
    problems: list[str] = []
    for group in m.groups:
        contexts = sum(1 for c in m.contexts.values() if c.process.group.within(group.number))
        processes = sum(1 for p in m.processes.values() if p.group is group)
        if (contexts, processes) != (group.contexts, group.processes):
            problems.append(
                f"I8: group {group.name} has {contexts} contexts and {processes} processes, and counts {group.contexts} and "
                f"{group.processes}"
            )
        limit = group.hard("contexts")
        if limit and contexts > limit:
            problems.append(f"I8: group {group.name} has {contexts} contexts and may have {limit}")
    return problems


def fsck_core(
    core: CoreApi, capacities: list[int], block_tokens: int, wires: Sequence[tuple[int, int]] = ()
) -> list[str]:
    """I1-I6 and I8, over the tables of the core.  wires: (device, frame), once per transfer under way that reads or writes it."""
    problems: list[str] = []
    parents, domains, depths, _, indexed, keys, copies_raw, children_raw, family_raw = core.block_table()
    parent, depth, copies = array("i", parents), array("i", depths), array("i", copies_raw)
    children, family = array("i", children_raw), array("i", family_raw)
    devices = len(capacities)
    named: list[Counter[int]] = [Counter() for _ in capacities]
    wired: list[Counter[int]] = [Counter() for _ in capacities]
    tails: Counter[int] = Counter()
    for d, f in wires:
        wired[d][f] += 1
    flying = 0
    for s in core.slots_used():
        d = core.slot_device(s)
        frames, _, counts_raw, _, _, _ = core.pagemap(s)
        counts = array("h", counts_raw)
        row = core.slot_row(s)
        named[d].update(array("i", frames))
        if core.pending_copy(s) >= 0:
            wired[d][core.pending_copy(s)] += 1
        tails[core.tail_of(s)[0]] += 1
        covered = sum(counts)
        if core.tail_of(s)[1] > row.tokens:
            problems.append(f"I7: slot {s} has a saved tail that ends at {core.tail_of(s)[1]} of {row.tokens} tokens")
        if row.computed > covered and row.computed > 0:
            problems.append(f"I7: slot {s} has {row.computed} tokens computed but only {covered} mapped")
        if covered > row.tokens or row.computed > row.tokens:
            problems.append(f"I7: slot {s} maps {covered} tokens, computed {row.computed}, of a log of {row.tokens}")
        if any(count != block_tokens for count in counts[:-1]):
            problems.append(f"slot {s}: an entry that is not the last holds less than a block")
        flying += core.in_flight(s)
    if flying > sum(core.flight_length(d) for d in range(devices)):
        problems.append("I4: a slot is in flight without a pass")
    owners: Counter[int] = Counter()
    for d, capacity in enumerate(capacities):
        problems += _frames(core, d, capacity, devices, indexed, copies, named[d], wired[d], owners, tails)
    kin = array("i", bytes(len(children_raw)))  # [blocks, devices], as children
    family_of = array("i", bytes(4 * len(parent)))
    owned = array("i", bytes(4 * len(parent)))  # copies that each block names
    for b, (above, known) in enumerate(zip(parent, indexed, strict=True)):
        first = b * devices
        for k in range(first, first + devices):
            if copies[k] >= 0:
                owned[b] += 1
                if known and above >= 0:
                    kin[above * devices + k - first] += 1
        if known and above >= 0:
            family_of[above] += 1
    if kin != children or family_of != family[::2]:
        for b, (counted, has) in enumerate(zip(family[::2], family_of, strict=True)):
            mine = slice(b * devices, (b + 1) * devices)
            if children[mine] != kin[mine] or counted != has:
                problems.append(f"block {b} counts children {children[mine].tolist()}, {counted} in all, and has {has}")
    for b, has in enumerate(owned):
        if family[2 * b + 1] != tails[b]:
            problems.append(f"block {b} is the saved tail of {tails[b]} slots and counts {family[2 * b + 1]}")
        if has != owners[b]:
            problems.append(f"I2: block {b} names {has} copies, {owners[b]} frames name it")
        if indexed[b]:
            if not has and not family[2 * b]:
                problems.append(f"I2: block {b} can be found, has no copy and nothing continues it: leaked")
            if core.find_key(keys[16 * b : 16 * b + 16]) != b:
                problems.append(f"I6: block {b} is indexed but its key does not find it")
            if parent[b] >= 0 and (not indexed[parent[b]] or depth[parent[b]] + block_tokens != depth[b]):
                problems.append(f"I6: block {b} has parent {parent[b]}, which is not the block before it")
            if len(core.block_tokens_of(b)) != 4 * block_tokens:
                problems.append(f"I6: block {b} is indexed without its tokens")
    _ = domains
    for d in range(devices):
        problems += _accounts(core, d)
    return problems


def _accounts(core: CoreApi, d: int) -> list[str]:
    """I8: what each group is charged is what it owns, and no more than it may."""
    problems: list[str] = []
    above = core.group_tree()
    used: Counter[int] = Counter()
    reclaimable: Counter[int] = Counter()
    state, _, _, _, stamp_raw, _ = core.frame_table(d)
    for f, (owner, stamp) in enumerate(zip(array("H", core.frame_owners(d)), array("Q", stamp_raw), strict=True)):
        if owner and (state[f] == FREE or owner >= len(above)):
            problems.append(f"I8: frame {f} of device {d} is charged to group {owner}, which cannot be")
            continue
        while owner:
            used[owner] += 1
            reclaimable[owner] += stamp > 0
            owner = above[owner]
    for g in range(1, len(above)):
        account = core.account(d, g)
        if (account.used, account.reclaimable) != (used[g], reclaimable[g]):
            problems.append(
                f"I8: group {g} owns {used[g]} frames of device {d}, {reclaimable[g]} of them reclaimable, and is charged "
                f"{account.used} and {account.reclaimable}"
            )
        if account.hard and used[g] > account.hard:
            problems.append(f"I8: group {g} owns {used[g]} frames of device {d} and may have {account.hard}")
    return problems


def _frames(
    core: CoreApi, d: int, capacity: int, devices: int, indexed: bytes, copies: array[int],
    named: Counter[int], wired: Counter[int], owners: Counter[int], saved: Counter[int],
) -> list[str]:  # fmt: skip
    problems: list[str] = []
    state, refs_raw, wired_raw, block_raw, stamp_raw, _ = core.frame_table(d)
    refs, wired_now, block = array("i", refs_raw), array("i", wired_raw), array("i", block_raw)
    stamp = array("Q", stamp_raw)
    free = reclaimable = 0
    for f in range(capacity):
        if state[f] == FREE:
            free += 1
            if refs[f] or wired_now[f] or block[f] >= 0 or stamp[f] or named[f]:
                problems.append(f"I1: free frame {f} of device {d} is in use (refs {refs[f]}, block {block[f]})")
            continue
        b = block[f]
        if b < 0 or copies[b * devices + d] != f:
            problems.append(f"I2: frame {f} of device {d} says block {b}, which does not name it")
            continue
        owners[b] += 1
        if refs[f] != named[f]:
            problems.append(f"I3: frame {f} of device {d} counts {refs[f]} references, page tables hold {named[f]}")
        if wired_now[f] != wired[f]:
            problems.append(f"I4: frame {f} of device {d} counts {wired_now[f]} wirings, {wired[f]} are needed")
        if stamp[f]:
            reclaimable += 1
            if refs[f] or state[f] != VALID or not (indexed[b] or saved[b]):
                problems.append(f"I1: frame {f} of device {d} is reclaimable but mapped or not cache")
        elif refs[f] == 0 and wired_now[f] == 0:
            problems.append(f"I1: frame {f} of device {d} is neither mapped, free nor reclaimable: leaked")
        if state[f] == LOADING and not wired_now[f]:
            problems.append(f"I4: frame {f} of device {d} is loading and no transfer writes it")
    if free != core.free_frames(d):
        problems.append(f"I1: device {d} has {free} free frames, the free list {core.free_frames(d)}")
    if reclaimable != core.reclaimable_frames(d):
        problems.append(
            f"I1: device {d} has {reclaimable} reclaimable frames, the count says {core.reclaimable_frames(d)}"
        )
    return problems


def _writes(m: Machine) -> list[str]:
    """I5: no position that a pass in flight writes can be read through another context's page table.

    Exempt are blocks still being filled: who maps one waits until it is valid.  Two contexts may name one partial tail,
    and its owner may go on writing behind what the other has of it.
    """
    problems: list[str] = []
    size = m.config.block_tokens
    for device in m.devices:
        if device.flight is None:
            continue
        readers: dict[int, list[tuple[int, int]]] = {}
        for context in m.contexts_of(device.index):
            frames, _, counts, _, _, _ = m.core.pagemap(context.slot)
            for frame, count in zip(array("i", frames), array("h", counts), strict=True):
                readers.setdefault(frame, []).append((context.slot, count))
        state = m.core.frame_table(device.index)[0]
        for q in device.flight_seqs():
            mine = array("i", m.core.pagemap(q.slot)[0])
            first = max(q.write_from, q.start)
            if first >= q.start + q.ntokens:
                continue  # computes for its logits only
            for i in range(first // size, -(-(q.start + q.ntokens) // size)):
                offset = max(0, first - i * size)
                others = [s for s, count in readers.get(mine[i], []) if s != q.slot and count > offset]
                if others and (state[mine[i]] == VALID or not m.core.pagemap(q.slot)[4][i] & 2):
                    problems.append(f"I5: slot {q.slot} writes frame {mine[i]}, which slots {others} read")
    return problems


def _contexts(m: Machine) -> list[str]:
    problems: list[str] = []
    used = set(m.core.slots_used())
    held = {c.slot for c in m.contexts.values()}
    if used != held:
        problems.append(f"slots {sorted(used ^ held)} and contexts do not match")
    working = {c.cid for c in m.contexts.values() if c.job is not None}
    if working != m.working.keys():
        problems.append(f"contexts {sorted(working ^ m.working.keys())} are wrong about having a job")
    if unlisted := [c.cid for c in m.contexts.values() if m.tiers.pinned(c) and c.cid not in m.pins]:
        problems.append(f"contexts {unlisted} are pinned and not among the pins")
    problems += m.errands.problems()
    for context in m.contexts.values():
        if context.process.contexts.get(context.cid) is not context:
            problems.append(f"context {context.cid} is not in process {context.process.pid}")
        job = context.job
        resting = context in m.schedulers[context.device].idle
        if (job is not None and resting) or (job is None and not resting and m.core.slot_row(context.slot).entries):
            problems.append(f"context {context.cid} holds frames that cannot be taken, or may lose those it uses")
        if context.dying and not m.core.in_flight(context.slot):
            problems.append(f"context {context.cid} should be gone")
        if context.parked and not m.core.in_flight(context.slot):
            problems.append(f"I9: calls wait for a pass of context {context.cid}, which has none")
        if job is None:
            continue
        asking = m.connections.get(job.conn)  # it may have given the context back, and another has it now
        asked = asking.requests.get(job.request) if asking else m.names.orphan(job.conn, job.request)
        if job.request and asked is not context and (asking or not job.ending):
            problems.append(f"I9: request {job.request} of context {context.cid} would get no reply")
        scheduler = m.schedulers[context.device]
        queued = context in scheduler.queue
        if queued is not context.queued:
            problems.append(f"context {context.cid} is wrong about being queued")
        decoding = scheduler.decoding.get(context.slot) is context
        if queued and decoding:
            problems.append(f"context {context.cid} is queued and decoding")
        if not queued and not decoding and not m.held(context) and not job.ending:
            problems.append(f"context {context.cid} has a job that nobody will run")
        if (queued or decoding) and m.held(context):
            problems.append(f"context {context.cid} is held and will be run")
    for scheduler in m.schedulers:
        problems += scheduler.idle.problems()
        device = scheduler.device
        state = m.devices[device]
        # A transfer is to end, a timer to fire, or there are more requests to come: the scheduler looks again then.
        waits = m.movers.moving() or m.lifetimes.settles(device) or m.plugged
        if state.up and state.flight is None and (scheduler.queue or scheduler.decoding) and not waits:
            problems.append(
                f"device {device} is idle but {len(scheduler.queue)} contexts are queued: they would wait for ever"
            )
        if set(scheduler.decoding) - scheduler.benched != set(m.core.run_slots(device)):
            problems.append(f"decode set of device {device} differs between scheduler and core")
    return problems
