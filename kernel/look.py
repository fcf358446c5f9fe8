"""What the inspector sees: rows made from kernel state, changing nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .calls import ContextRow, ProcessRow, TierRow, UnameResult
from .oom import score
from .params import ABI_VERSION

if TYPE_CHECKING:
    from .context import Context
    from .device import Device
    from .machine import Machine
    from .process import Process


def context_row(m: Machine, context: Context) -> ContextRow:
    row = m.core.slot_row(context.slot)
    token_bytes = m.config.kv.token_bytes
    frame_bytes = m.config.kv.frame_bytes(m.config.block_tokens)
    return ContextRow(
        context.cid, context.process.pid, context.state(), m.devices[context.device].name, row.tokens, row.computed,
        row.entries, row.shared, row.computed * token_bytes, row.share_millionths * frame_bytes // 1_000_000,
        m.usage(context), context.parent, *_waits(m, context),
    )  # fmt: skip


def _waits(m: Machine, context: Context) -> tuple[str, int, int, int]:
    """tool, wait, due_ms, deadline_ms"""
    wait = context.wait
    if wait is None:
        return ("", 0, -1, -1)
    due_ms, deadline_ms = (max(0, at - m.now_ns) // 1_000_000 if at else -1 for at in (wait.due_ns, wait.deadline_ns))
    return (wait.tool, wait.number, due_ms, deadline_ms)


def process_row(m: Machine, process: Process) -> ProcessRow:
    rows = tuple(context_row(m, c) for c in process.contexts.values())
    return ProcessRow(
        process.pid, process.parent, process.uid, process.name, process.state.value, process.nice, rows,
        sum(r.kv_bytes for r in rows), sum(r.proportional_bytes for r in rows), sum(r.tokens for r in rows),
        m.now_ns - process.born_ns, m.usage_of(process), process.group.name, score(m, process), process.oom_score_adj,
    )  # fmt: skip


def administers(m: Machine, uid: int) -> bool:
    return uid in (0, m.config.owner_uid)


def alone(m: Machine, uid: int) -> bool:
    """It may see counts of the whole machine: it administers it, or nobody else has been served since boot, whom they could tell
    about.  That others have gone does not count: sums, samples and the log still tell what they did."""
    return administers(m, uid) or m.uids <= {uid}


def coarse_ms(m: Machine, uid: int, ms: int) -> int:
    """A time worked out from what everybody does: for one of several uids in whole seconds, rounded up.  To the millisecond it
    would tell how much of their prompts the others find in the cache."""
    return ms if alone(m, uid) else -(-ms // 1000) * 1000


def hbm_frames(m: Machine, uid: int) -> tuple[int, int]:
    """(free, reclaimable) over all compute devices, as `tiers` shows them to this uid."""
    computes = m.devices[: m.tiers.computes]
    rows = [tier_row(m, d) if alone(m, uid) else own_tier_row(m, d, uid) for d in computes]
    return sum(row.free_frames for row in rows), sum(row.reclaimable_frames for row in rows)


def own_tier_row(m: Machine, device: Device, uid: int) -> TierRow:
    """What a device looks like to one of several uids: what others use of it looks free, and how fast it is for them is not said."""
    row = tier_row(m, device)
    used, reclaimable, _, hard = m.core.account(device.index, m.groups.of_uid(uid).number)
    capacity = min(row.capacity_frames, hard or row.capacity_frames)
    return row._replace(
        capacity_frames=capacity, free_frames=max(0, capacity - used), reclaimable_frames=reclaimable,
        mapped_frames=used - reclaimable, wired_frames=0, restarts=0, read_bytes_s=0, write_bytes_s=0, latency_ns=0, read_bytes=0,
        write_bytes=0, errors=0, corrupt=0, prefill_token_ns=0.0, prefill_pair_ns=0.0, prefill_pass_ns=0.0,
    )  # fmt: skip


def own_vmstat(m: Machine, uid: int) -> dict[str, int]:
    """Of what the kernel counts, what is about this uid alone."""
    mine = [p for p in m.processes.values() if p.uid == uid]
    counts = {
        "processes": len(mine),
        "contexts": sum(len(p.contexts) for p in mine),
        "connections": sum(1 for c in m.connections.values() if c.uid == uid),
        "computed_tokens": m.core.served(m.groups.of_uid(uid).number),
    }
    for device in m.devices:
        if not device.removed:
            account = m.core.account(device.index, m.groups.of_uid(uid).number)
            counts[f"{device.name}_used_frames"] = account.used
            counts[f"{device.name}_reclaimable_frames"] = account.reclaimable
    return dict(sorted(counts.items()))


def tier_row(m: Machine, device: Device) -> TierRow:
    free = m.core.free_frames(device.index)
    reclaimable = m.core.reclaimable_frames(device.index)
    read, write = m.costs.link(device.index, "read"), m.costs.link(device.index, "write")
    state = "up" if device.up else "asleep" if m.asleep and device.tier == "hbm" else "down"
    if device.up and (device.read_only or device.draining):
        state = "draining" if device.draining else "read-only"
    fit = m.costs.prefill[device.index].known() if device.tier == "hbm" else None
    return TierRow(
        device.name, device.tier, state, device.epoch, device.capacity, free, reclaimable,
        device.capacity - free - reclaimable, m.core.wired_frames(device.index),
        m.config.kv.frame_bytes(m.config.block_tokens), device.driver_pid, device.restarts,
        m.tiers.evictors[device.index].policy.name, device.engine, int(read.bytes_s), int(write.bytes_s),
        int(read.latency_ns), read.moved_bytes, write.moved_bytes, device.errors, device.corrupt, *(fit or ()),
    )  # fmt: skip


def uname(m: Machine) -> UnameResult:
    """Nothing in it ever changes: always the same object, so that the daemon need not encode it again."""
    if m.uname is None:
        m.uname = _uname(m)
    return m.uname


def _uname(m: Machine) -> UnameResult:
    c = m.config
    stops = b"".join(t.to_bytes(4, "little") for t in c.stop_tokens)
    return UnameResult(
        "attnix", c.version, ABI_VERSION, c.model, c.fingerprint, c.architecture, c.vocab_tokens, c.window_tokens,
        c.block_tokens, c.kv.frame_bytes(c.block_tokens), c.kv.token_bytes, c.kv_dtype, c.numerics, c.tokenizer, stops,
        tuple(d.name for d in m.devices if d.tier == "hbm"), c.daemon_pid,
    )  # fmt: skip


def admitted_limit(m: Machine) -> int:
    """Contexts that the thrash guard lets run on the device that it limits most; 0: on none."""
    return min((s.guard.limit for s in m.schedulers if s.guard.limit), default=0)


def vmstat(m: Machine) -> dict[str, int]:
    """Everything the kernel counts, since boot."""
    counts = dict(m.counters)
    counts["syscalls"] = m.syscalls
    counts.update(m.core.counters()._asdict())
    for device in m.devices:
        if device.removed:
            continue
        counts[f"{device.name}_free_frames"] = m.core.free_frames(device.index)
        counts[f"{device.name}_reclaimable_frames"] = m.core.reclaimable_frames(device.index)
        counts[f"{device.name}_restarts"] = device.restarts
    counts["admitted_limit"] = admitted_limit(m)
    counts["contexts"] = len(m.contexts)
    counts["processes"] = len(m.processes)
    counts["connections"] = len(m.connections)
    counts["contexts_with_work"] = sum(len(s.queue) + len(s.decoding) for s in m.schedulers)
    counts["contexts_in_tool_wait"] = m.lifetimes.waiting
    return dict(sorted(counts.items()))
