"""System calls, one function each: check everything first (an `Errno` leaves nothing changed), then do it.

A function returns the result to send, or None when the answer comes later (wait, generate, forward, score) or was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from . import calls as c
from .batch import HISTORY, SEQ, Seq
from .context import Context, Job, JobKind
from .device import Device
from .domain import check_domain
from .errors import E, Errno
from .events import Halt, Syscall
from .fsck import fsck
from .ids import Cid, Pid, Slot
from .injected import Injected, count
from .look import alone, coarse_ms, context_row, own_tier_row, own_vmstat, tier_row, uname, vmstat
from .machine import Machine
from .params import MAX_FORK, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKENS, MAX_TARGET_MS, RETRY_MS
from .process import Connection, Process

Trap: TypeAlias = Callable[[Machine, Connection, Syscall, Any], "tuple[object, ...] | None"]

# -- finding things -------------------------------------------------------------------------------------------------


def contexts_of(m: Machine, connection: Connection) -> Iterator[Context]:
    for pid in sorted(connection.pids):
        yield from m.processes[pid].contexts.values()


def own_process(m: Machine, connection: Connection, pid: int) -> Process:
    """A process of this connection; 0 is its first.  EINVAL before hello, ENOENT, EACCES."""
    if not connection.pid:
        raise Errno(E.EINVAL, "say hello first: it gives this connection its process", call="hello")
    process = m.processes.get(Pid(pid or connection.pid))
    if process is None or process.zombie:
        raise Errno(E.ENOENT, f"no process {pid or connection.pid}", pid=pid)
    if process.conn != connection.conn:
        raise Errno(E.EACCES, f"process {pid} belongs to another connection", pid=pid)
    return process


def seen_process(m: Machine, connection: Connection, pid: int) -> Process:
    """A process of this uid, on any connection.  ENOENT, EACCES."""
    process = m.processes.get(Pid(pid or connection.pid))
    if process is None:
        raise Errno(E.ENOENT, f"no process {pid}", pid=pid)
    if process.uid != connection.uid and connection.uid != 0:
        raise Errno(E.EACCES, f"process {pid} belongs to another user", pid=pid)
    return process


class Named(Protocol):
    """Arguments that name a context."""

    @property
    def ctx(self) -> int: ...
    @property
    def cid(self) -> int: ...


def seen_context(m: Machine, connection: Connection, args: Named) -> Context:
    """By handle, or by cid within the uid.  EBADF, ESTALE, ENOENT."""
    if args.ctx:
        return connection.lookup(args.ctx)
    context = m.contexts.get(Cid(args.cid))
    if context is not None and connection.uid in (0, context.process.uid):
        return context
    raise Errno(E.ENOENT, f"no context {args.cid} of this user", cid=args.cid)


def administrator(m: Machine, connection: Connection, what: str) -> None:
    if connection.uid not in (0, m.config.owner_uid):
        raise Errno(E.EACCES, f"only the daemon's own user may {what}", uid=m.config.owner_uid)


def parked(m: Machine, context: Context, call: Syscall) -> bool:
    """A call that changes what is mapped waits for the pass in flight."""
    if not m.core.in_flight(context.slot):
        return False
    context.parked.append(call)
    m.unsettled.append(context)
    return True


def behind(context: Context, call: Syscall) -> bool:
    """A call on a context where others wait already does not overtake them."""
    if not context.parked or context.unparking:
        return False
    context.parked.append(call)
    return True


def log_to_be(context: Context, log: bytes) -> bytes:
    """The log when the calls that wait have had their turn.  EBUSY: one of them samples."""
    for call in context.parked:
        if isinstance(call.args, c.TruncateArgs):
            log = log[: 4 * max(0, call.args.length)]
        elif isinstance(call.args, (c.AppendArgs, c.ResumeArgs, c.InjectArgs, c.ForwardArgs)):
            log += call.args.tokens
        elif isinstance(call.args, c.GenerateArgs):
            raise Errno(
                E.EBUSY,
                "a generation waits its turn on this context: cancel it before you append",
                cid=context.cid,
                request=call.request,
            )
    return log


def quiet(context: Context, what: str) -> None:
    if context.job is not None and context.job.kind is not JobKind.PREFILL:
        raise Errno(
            E.EBUSY,
            f"a {context.job.kind.value} is running on this context: cancel it before you {what}",
            cid=context.cid,
            request=context.job.request,
        )


def awake(context: Context, what: str) -> None:
    """EBUSY: it waits for a tool, and no answer has come that only waits for the pass in flight."""
    wait = context.wait
    answered = not context.unparking and any(call.name == "resume" for call in context.parked)
    if wait is not None and not answered:
        message = f"context {context.cid} waits for {wait.tool!r} (wait {wait.number}): resume it before you {what}"
        raise Errno(E.EBUSY, message, cid=context.cid, wait=wait.number, tool=wait.tool)


def host_down(device: Device) -> Errno:
    return Errno(
        E.EHOSTDOWN,
        f"{device.name} is down for good ({device.gone}): see dmesg, mend it and boot again",
        device=device.name,
    )


def computable(m: Machine, context: Context) -> None:
    """EHOSTDOWN when the context's device will not come back."""
    if m.devices[context.device].gone:
        raise host_down(m.devices[context.device])


def unhold(m: Machine, context: Context) -> None:
    """Its job goes on, if nothing else holds it; one that nothing had held (SIGCONT of a process that runs) stays where it is."""
    scheduler = m.schedulers[context.device]
    job = context.job
    if job is not None and not m.held(context) and not job.ending and context.slot not in scheduler.decoding:
        scheduler.add(context)


def no_text(text: str, messages: Sequence[c.Message] = ()) -> None:
    """EINVAL: it did not go through the daemon."""
    if text or messages:
        raise Errno(E.EINVAL, "the kernel takes tokens: the daemon turns text into them", field="text")


def check_tokens(m: Machine, tokens: bytes) -> int:
    """Number of ids.  EINVAL: not int32s, or an id outside the vocabulary."""
    if len(tokens) % 4:
        text = f"tokens are little-endian int32: {len(tokens)} bytes is not a multiple of 4"
        raise Errno(E.EINVAL, text, field="tokens", bytes=len(tokens))
    if tokens:
        low, high = m.core.token_range(tokens)
        if low < 0 or high >= m.config.vocab_tokens:
            bad = low if low < 0 else high
            raise Errno(E.EINVAL, f"token {bad} is outside the vocabulary of {m.config.vocab_tokens}", token=bad)
    return len(tokens) // 4


def check_room(m: Machine, context: Context, tokens: int) -> None:
    """E2BIG with both numbers when a log of `tokens` can never fit."""
    window = m.config.window_tokens
    if tokens > window:
        raise Errno(
            E.E2BIG,
            f"{tokens} tokens do not fit the model's window of {window}: truncate first",
            wanted=tokens,
            limit=window,
        )
    device = m.devices[context.device]
    most, group = m.groups.most_frames(context.process.group, device)
    limit = most * m.config.block_tokens
    if tokens > limit and group is not None:
        raise Errno(
            E.EDQUOT,
            f"{tokens} tokens need {-(-tokens // m.config.block_tokens)} frames and group {group.name} may have {most} of "
            f"{device.tier}: have its limit raised (`attnix group set`), or truncate",
            wanted=tokens,
            limit=limit,
            used=m.core.account(device.index, group.number).used,
            group=group.name,
            resource=device.tier,
        )
    if tokens > limit:
        raise Errno(
            E.E2BIG,
            f"{tokens} tokens need {-(-tokens // m.config.block_tokens)} frames and {device.name} has {device.capacity}: "
            f"boot with a larger --hbm",
            wanted=tokens,
            limit=limit,
        )


# -- contexts -------------------------------------------------------------------------------------------------------


def no_slots(m: Machine, wanted: int = 1) -> Errno:
    most, free = m.config.max_contexts, m.config.max_contexts - len(m.core.slots_used())
    there = (
        f"all {most} context slots are taken"
        if not free
        else f"{free} of {most} context slots are free, {wanted} wanted"
    )
    return Errno(
        E.ENOMEM, f"{there}: release some", wanted=wanted, free=free, reclaimable=0, limit=most, retry_after_ms=RETRY_MS
    )


def alloc_context(m: Machine, connection: Connection, call: Syscall, args: c.AllocContextArgs) -> c.AllocContextResult:
    process = own_process(m, connection, args.pid)
    if args.device:
        named = [d for d in m.devices[: m.tiers.computes] if d.name == args.device]
        if not named:
            names = ", ".join(d.name for d in m.devices[: m.tiers.computes])
            raise Errno(E.ENODEV, f"no compute device {args.device!r}: there is {names}", device=args.device)
        device = named[0].index
    else:
        device = roomiest(m)
    if args.domain:
        check_domain(m, connection.uid, args.domain)
    m.groups.check_contexts(process.group)
    number, root = m.domain_of(process, args.domain)
    slot = m.core.open_slot(device, number, root)
    if slot < 0:
        raise no_slots(m)
    context = m.new_context(process, Slot(slot), device, Cid(0), domain=args.domain)
    return c.AllocContextResult(connection.add(context), context.cid)


def roomiest(m: Machine) -> int:
    """The compute device with the most frames available per context; one of several, so load spreads.

    One that is down has no contexts left sooner or later, and must not look roomy for that.  Of equals (contexts that come
    one after the other leave nothing but cache behind) the one whose turn is longest ago.
    """
    computes = m.devices[: m.tiers.computes]
    if len(computes) == 1:
        return 0
    there = [d for d in computes if not d.gone] or computes
    there = [d for d in there if d.up] or there
    here = [0] * len(computes)
    for context in m.contexts.values():
        here[context.device] += 1

    def rank(device: Device) -> tuple[float, int]:
        room = m.core.free_frames(device.index) + m.core.reclaimable_frames(device.index)
        return room / (here[device.index] + 1), -device.chosen

    best = max(there, key=rank)
    best.chosen = 1 + max(d.chosen for d in computes)
    return best.index


def forked(m: Machine, process: Process, source: Context, slot: int) -> Context:
    return m.new_context(process, Slot(slot), source.device, source.cid, domain=source.domain)


def new_slots(m: Machine, source: Context, n: int) -> list[int]:
    """`n` forks of a context's slot, all or none (ENOMEM)."""
    slots = m.core.fork(source.slot, n)
    if not slots:
        raise no_slots(m, n)
    return slots


def fork(m: Machine, connection: Connection, call: Syscall, args: c.ForkArgs) -> c.ForkResult | None:
    source = connection.lookup(args.ctx)
    if not 1 <= args.n <= MAX_FORK:
        raise Errno(E.EINVAL, f"fork makes 1..{MAX_FORK} contexts, not {args.n}", n=args.n)
    if behind(source, call):
        return None
    m.groups.check_contexts(source.process.group, args.n)
    slots = new_slots(m, source, args.n)
    children = [forked(m, source.process, source, slot) for slot in slots]
    return c.ForkResult(tuple(connection.add(x) for x in children), tuple(x.cid for x in children))


def append(m: Machine, connection: Connection, call: Syscall, args: c.AppendArgs) -> c.AppendResult | None:
    context = connection.lookup(args.ctx)
    no_text(args.text, args.messages)
    quiet(context, "append")
    awake(context, "append")
    computable(m, context)
    n = check_tokens(m, args.tokens)
    if behind(context, call):
        return None
    check_room(m, context, m.core.slot_row(context.slot).tokens + n)
    if n:
        m.schedulers[context.device].backlog.check(context, n)
    return c.AppendResult(extend(m, context, args.tokens, args.more), n)


def extend(m: Machine, context: Context, tokens: bytes, more: bool = False) -> int:
    """Tokens join the log of a context that samples nothing; the log's length.  They are computed, unless `more` calls on it
    follow, whose pass takes them along.  Requires: checked."""
    length = m.core.slot_row(context.slot).tokens
    if tokens:
        m.names.rewritten(context, length)
        length = m.core.append(context.slot, tokens)
        m.lifetimes.used_again(context)
        if more and context.job is None:
            context.last_request = (0, 0)  # as where a job starts
        else:
            m.start(context, context.job or Job(JobKind.PREFILL, m.next_order()))
    return length


def truncate(m: Machine, connection: Connection, call: Syscall, args: c.TruncateArgs) -> c.TruncateResult | None:
    context = connection.lookup(args.ctx)
    quiet(context, "truncate")
    if behind(context, call):
        return None
    length = m.core.slot_row(context.slot).tokens
    if not 0 <= args.length <= length:
        raise Errno(E.EINVAL, f"length {args.length} is not within 0..{length}", length=args.length, tokens=length)
    if parked(m, context, call):
        return None
    m.core.truncate(context.slot, args.length)
    context.reached = min(context.reached, args.length)
    m.names.rewritten(context, args.length)
    context.admitted = False  # a block that was still being filled may have been given up with its end
    context.last_request = (0, 0)
    return c.TruncateResult(args.length)


def release(m: Machine, connection: Connection, call: Syscall, args: c.CtxArgs) -> c.Empty:
    context = connection.lookup(args.ctx)
    if not m.names.stays(context, "cancelled"):
        m.release(context)
    return c.Empty()


def stat(m: Machine, connection: Connection, call: Syscall, args: c.LookArgs) -> c.ContextRow:
    return context_row(m, seen_context(m, connection, args))


# -- compute --------------------------------------------------------------------------------------------------------


def _begin(m: Machine, connection: Connection, call: Syscall, context: Context, job: Job) -> None:
    """Run `job` on `context`; it takes the place of a prefill that nobody waits for."""
    if context.job is not None:
        job.follows(context.job)
    connection.requests[call.request] = context
    m.lifetimes.used_again(context)
    m.heads.asked(context)
    m.start(context, job)


def generate(m: Machine, connection: Connection, call: Syscall, args: c.GenerateArgs) -> None:
    context = connection.lookup(args.ctx)
    quiet(context, "generate")
    awake(context, "generate")
    computable(m, context)
    if behind(context, call):
        return
    _check_sampling(args)
    check_tokens(m, args.stop_tokens)
    if len(_stops(m, args)) > 4 * MAX_STOP_TOKENS:
        raise Errno(E.EINVAL, f"at most {MAX_STOP_TOKENS} stop tokens, the model's own included", limit=MAX_STOP_TOKENS)
    length = m.core.slot_row(context.slot).tokens
    if length == 0:
        raise Errno(E.EINVAL, "the context is empty: append a prompt first", field="ctx", cid=context.cid)
    if length - 1 > m.groups.most_frames(context.process.group, m.devices[context.device])[0] * m.config.block_tokens:
        check_room(m, context, length)  # a limit was set after it had become so long (the last token needs no frame)
    _in_time(m, context, args)
    m.schedulers[context.device].backlog.check(context)
    m.names.began(context, args, length)
    begin_generation(m, connection, call, context, args, length)


def _in_time(m: Machine, context: Context, args: c.GenerateArgs) -> None:
    """EAGAIN: the scheduling policy says that a target of this generation would be missed."""
    late = m.schedulers[context.device].late(context, args)
    if late is not None:
        after_ms, ttft_ms, tpot_ms = (coarse_ms(m, context.process.uid, -(-ns // 1_000_000)) for ns in late)
        raise Errno(
            E.EAGAIN,
            f"its targets (ttft_ms {args.ttft_ms}, tpot_ms {args.tpot_ms}) would be missed now: it could have ttft_ms {ttft_ms}, "
            f"tpot_ms {tpot_ms}; ask for that, or try again in {after_ms} ms",
            retry_after_ms=after_ms, ttft_ms=ttft_ms, tpot_ms=tpot_ms,
        )  # fmt: skip


def begin_generation(
    m: Machine, connection: Connection, call: Syscall, context: Context, args: c.GenerateArgs, start: int,
    injected: Injected = (),
) -> None:  # fmt: skip
    """Sample into a context whose log has length `start`, or is longer by what this generation has already."""
    job = Job(JobKind.GENERATE, m.next_order(), connection.conn, call.request)
    job.args = args
    job.start, job.injected = start, injected
    # It has sampled before: it ends in a reason.
    job.begun = m.core.slot_row(context.slot).tokens - start > count(injected)
    left = aim_generation(m, connection, call, context, args, start, injected)
    _begin(m, connection, call, context, job)
    if left <= 0:
        m.finish(context, "length")


def aim_generation(
    m: Machine, connection: Connection, call: Syscall, context: Context, args: c.GenerateArgs, start: int,
    injected: Injected = (),
) -> int:  # fmt: skip
    """What the core needs to sample for this request; how many tokens it still may."""
    length = m.core.slot_row(context.slot).tokens
    device = m.devices[context.device]
    most_frames, _ = m.groups.most_frames(context.process.group, device)
    limit = min(m.config.window_tokens, most_frames * m.config.block_tokens + 1)
    template = _template(context, args, start)
    most = min(
        args.max_tokens - (length - start - count(injected)), limit
    )  # more than the log can hold is no more than any number
    m.core.set_generation(
        context.slot, template, _stops(m, args), max(0, most), limit, connection.conn, call.request
    )  # fmt: skip
    return min(most, limit - length)


def _stops(m: Machine, args: c.GenerateArgs) -> bytes:
    """int32 ids that end it."""
    own = b"" if args.ignore_eos else b"".join(t.to_bytes(4, "little") for t in m.config.stop_tokens)
    return args.stop_tokens + own


def _check_sampling(args: c.GenerateArgs) -> None:
    checks = (
        (args.max_tokens >= 0, "max_tokens", args.max_tokens, ">= 0"),
        (0.0 <= args.temperature <= 100.0, "temperature", args.temperature, "0..100"),
        (args.top_k >= 0, "top_k", args.top_k, ">= 0 (0: off)"),
        (1e-6 <= args.top_p <= 1.0, "top_p", args.top_p, "1e-6..1 (1: off)"),
        (0.0 <= args.min_p < 1.0, "min_p", args.min_p, "0 (off) to below 1"),
        (0 <= args.seed < 1 << 64, "seed", args.seed, "0..2**64-1"),
        (0.01 <= args.repetition_penalty <= 100.0, "repetition_penalty", args.repetition_penalty, "0.01..100 (1: off)"),
        (-100.0 <= args.presence_penalty <= 100.0, "presence_penalty", args.presence_penalty, "-100..100"),
        (-100.0 <= args.frequency_penalty <= 100.0, "frequency_penalty", args.frequency_penalty, "-100..100"),
        (0 <= args.logprobs <= MAX_LOGPROBS, "logprobs", args.logprobs, f"0..{MAX_LOGPROBS}"),
        (0 <= args.ttft_ms <= MAX_TARGET_MS, "ttft_ms", args.ttft_ms, f"0 (no target)..{MAX_TARGET_MS}"),
        (0 <= args.tpot_ms <= MAX_TARGET_MS, "tpot_ms", args.tpot_ms, f"0 (no target)..{MAX_TARGET_MS}"),
        (len(args.stop) <= MAX_STOP_STRINGS, "stop", len(args.stop), f"at most {MAX_STOP_STRINGS} strings"),
        (
            all(0 < len(s) <= MAX_STOP_CHARS for s in args.stop),
            "stop",
            "a string",
            f"1..{MAX_STOP_CHARS} characters each",
        ),
    )
    for good, name, value, allowed in checks:
        if not good:
            raise Errno(E.EINVAL, f"{name} is {allowed}, not {value}", field=name)


def _template(context: Context, args: c.GenerateArgs, prompt_tokens: int) -> bytes:
    """The sampling half of this generation's records in every pass."""
    penalties = args.repetition_penalty != 1.0 or args.presence_penalty != 0.0 or args.frequency_penalty != 0.0
    seq = Seq(
        0, 0, 0, 0, 0, 0, 0, HISTORY if penalties else 0, args.temperature, args.top_p, args.min_p,
        min(args.top_k, 0x7FFFFFFF), args.seed, args.repetition_penalty, args.presence_penalty, args.frequency_penalty,
        args.logprobs, -1, prompt_tokens, context.cid, 0, 0,
    )  # fmt: skip
    return SEQ.pack(*seq)


def forward(m: Machine, connection: Connection, call: Syscall, args: c.ForwardArgs) -> None:
    context = connection.lookup(args.ctx)
    quiet(context, "forward")
    awake(context, "forward")
    computable(m, context)
    if not 1 <= args.top_k <= MAX_LOGPROBS:
        raise Errno(E.EINVAL, f"top_k is 1..{MAX_LOGPROBS}, not {args.top_k}", field="top_k")
    _check_allowed(m, args.allowed)
    n = check_tokens(m, args.tokens)
    if behind(context, call):
        return
    before = m.core.slot_row(context.slot).tokens
    length = before + n
    if length == 0:
        raise Errno(E.EINVAL, "the context is empty: append a prompt first", field="ctx", cid=context.cid)
    check_room(m, context, length)
    if n:
        m.schedulers[context.device].backlog.check(context, n)
        m.names.rewritten(context, before)
        m.core.append(context.slot, args.tokens)
    template = _template(context, c.GenerateArgs(args.ctx, logprobs=args.top_k), length)
    m.core.set_generation(context.slot, template, b"", 0, 0, connection.conn, call.request)
    job = Job(JobKind.FORWARD, m.next_order(), connection.conn, call.request)
    job.allowed = args.allowed
    _begin(m, connection, call, context, job)


def _check_allowed(m: Machine, allowed: bytes) -> None:
    vocab = m.config.vocab_tokens
    if allowed and len(allowed) != -(-vocab // 8):
        raise Errno(
            E.EINVAL, f"allowed has a bit for each of {vocab} tokens: {-(-vocab // 8)} bytes, not {len(allowed)}",
            field="allowed",
        )  # fmt: skip
    if allowed and not int.from_bytes(allowed, "little") & ((1 << vocab) - 1):
        raise Errno(E.EINVAL, "allowed names no token of the vocabulary", field="allowed")


def score(m: Machine, connection: Connection, call: Syscall, args: c.ScoreArgs) -> None:
    """Runs on a scratch fork, so the context itself never changes."""
    source = connection.lookup(args.ctx)
    awake(source, "score")
    computable(m, source)
    n = check_tokens(m, args.tokens)
    if behind(source, call):
        return
    length = m.core.slot_row(source.slot).tokens
    if n == 0 or length == 0:
        text = "score needs a context that is not empty and at least one token"
        raise Errno(E.EINVAL, text, field="tokens" if length else "ctx", cid=source.cid)
    check_room(m, source, length + n)
    m.schedulers[source.device].backlog.check_new(source, n)
    m.groups.check_contexts(source.process.group)
    slots = m.core.fork(source.slot, 1)
    if not slots:
        raise no_slots(m)
    context = forked(m, source.process, source, slots[0])
    m.core.append(context.slot, args.tokens)
    job = Job(JobKind.SCORE, m.next_order(), connection.conn, call.request)
    job.start = job.scored = length
    _begin(m, connection, call, context, job)


def cancel(m: Machine, connection: Connection, call: Syscall, args: c.CancelArgs) -> c.Empty:
    waiter = m.waiters.find(connection.conn, args.request)
    if waiter is not None:
        m.answer(waiter, E.ECANCELED, {"message": "wait was cancelled"})
        return c.Empty()
    context = connection.requests.get(args.request)
    if context is None and (
        _unwait(m, connection, args.request)
        or m.errands.cancel(connection.conn, args.request)
        or m.interrupts.cancel(connection.conn, args.request)
    ):
        return c.Empty()
    if context is None or context.job is None:
        raise Errno(E.ENOENT, f"request {args.request} is not running on this connection", request=args.request)
    m.finish(context, "cancelled")
    return c.Empty()


def _unwait(m: Machine, connection: Connection, request: int) -> bool:
    """Cancel a call that waits for its turn on its context.  False: there is none of that id."""
    for context in dict.fromkeys((*contexts_of(m, connection), *m.unsettled)):  # also those that it named by cid
        for waiting in context.parked:
            if (waiting.conn, waiting.request) == (connection.conn, request):
                context.parked.remove(waiting)
                m.reply(waiting.conn, waiting.request, E.ECANCELED, {"message": f"{waiting.name} was cancelled"})
                return True
    return False


# -- system ---------------------------------------------------------------------------------------------------------


def uname_(m: Machine, connection: Connection, call: Syscall, args: c.Empty) -> c.UnameResult:
    return uname(m)


def tiers(m: Machine, connection: Connection, call: Syscall, args: c.Empty) -> c.TiersResult:
    devices = [d for d in m.devices if not d.removed]
    if alone(m, connection.uid):
        return c.TiersResult(tuple(tier_row(m, d) for d in devices))
    return c.TiersResult(tuple(own_tier_row(m, d, connection.uid) for d in devices))


def vmstat_(m: Machine, connection: Connection, call: Syscall, args: c.Empty) -> c.VmstatResult:
    return c.VmstatResult(vmstat(m) if alone(m, connection.uid) else own_vmstat(m, connection.uid))


def sysctl(m: Machine, connection: Connection, call: Syscall, args: c.SysctlArgs) -> c.SysctlResult:
    if args.value is not None:
        administrator(m, connection, "set a sysctl")
        m.sysctl.set(args.name, args.value)
        m.tiers.apply(args.name)
        if args.name == "sched.policy":
            for scheduler in m.schedulers:
                scheduler.use(m.sysctl.order)
        m.log("info", f"{args.name} = {args.value}")
    return c.SysctlResult(m.sysctl.rows(args.name))


def fsck_(m: Machine, connection: Connection, call: Syscall, args: c.Empty) -> c.FsckResult:
    problems = tuple(fsck(m))
    if not alone(m, connection.uid):
        group = m.groups.of_uid(connection.uid)
        used = sum(m.core.account(d.index, group.number).used for d in m.devices)
        return c.FsckResult(problems, used, group.contexts)
    blocks = sum(m.core.mapped_or_cached_frames(d.index) for d in m.devices)
    return c.FsckResult(problems, blocks, len(m.contexts))


def dmesg(m: Machine, connection: Connection, call: Syscall, args: c.DmesgArgs) -> c.DmesgResult:
    if not alone(m, connection.uid):
        raise Errno(
            E.EACCES,
            "the log names what all users do: once others have been served, only the daemon's own user reads it",
            uid=m.config.owner_uid,
        )
    return c.DmesgResult(m.dmesg.since(args.since))


def shutdown(m: Machine, connection: Connection, call: Syscall, args: c.Empty) -> None:
    administrator(m, connection, "shut the system down")
    m.log("info", f"shutdown by uid {connection.uid}")
    m.reply(connection.conn, call.request, 0, c.Empty())
    m.emit(Halt())


TRAPS: dict[str, Trap] = {
    "alloc_context": alloc_context,
    "fork": fork,
    "append": append,
    "truncate": truncate,
    "release": release,
    "stat": stat,
    "generate": generate,
    "forward": forward,
    "score": score,
    "cancel": cancel,
    "uname": uname_,
    "tiers": tiers,
    "vmstat": vmstat_,
    "sysctl": sysctl,
    "fsck": fsck_,
    "dmesg": dmesg,
    "shutdown": shutdown,
}
