"""System calls about waiting for tools: wait_tool, resume, inject."""

from __future__ import annotations

from typing import TypeAlias

from . import calls as c
from .context import Context, JobKind
from .errors import E, Errno
from .events import Syscall
from .lifetimes import MS
from .machine import Machine
from .params import MAX_NAME_CHARS, MAX_WAIT_MS
from .process import Connection
from .traps import Trap, awake, behind, check_room, check_tokens, computable, extend, no_text, quiet, seen_context

TextArgs: TypeAlias = "c.AppendArgs | c.ResumeArgs | c.InjectArgs"  # of the calls that bring text into a log


def _target(m: Machine, connection: Connection, args: c.ResumeArgs | c.InjectArgs) -> Context:
    """By handle or cid.  EBADF, ESTALE, ENOENT."""
    context = seen_context(m, connection, args)
    if context.dying:
        raise Errno(E.ENOENT, f"no context {args.cid} of this user", cid=args.cid)
    return context


def written(m: Machine, connection: Connection, args: TextArgs) -> Context:
    """The context that the call would write to now.  Errno: what the call would say."""
    if isinstance(args, c.AppendArgs):
        context = connection.lookup(args.ctx)
        quiet(context, "append")
        awake(context, "append")
        return context
    context = _target(m, connection, args)
    if isinstance(args, c.ResumeArgs):
        m.lifetimes.check(context, args.wait)
    else:
        _takes(context)
    return context


# -- waiting for a tool ---------------------------------------------------------------------------------------------


def wait_tool(m: Machine, connection: Connection, call: Syscall, args: c.WaitToolArgs) -> c.WaitToolResult | None:
    context = connection.lookup(args.ctx)
    if not 0 < len(args.tool) <= MAX_NAME_CHARS or not args.tool.isprintable():
        raise Errno(E.EINVAL, f"a tool has a name of 1..{MAX_NAME_CHARS} printable characters", field="tool")
    for field, ms in (("eta_ms", args.eta_ms), ("deadline_ms", args.deadline_ms)):
        if not -1 <= ms <= MAX_WAIT_MS:
            raise Errno(E.EINVAL, f"{field} is 0..{MAX_WAIT_MS}, or -1: not given", field=field, limit=MAX_WAIT_MS)
    quiet(context, "wait for a tool")
    awake(context, "wait for another")
    if behind(context, call):
        return None
    eta_ns, deadline_ns = (ms * MS if ms >= 0 else -1 for ms in (args.eta_ms, args.deadline_ms))
    return m.lifetimes.begin(context, args.tool, eta_ns, deadline_ns)


def resume(m: Machine, connection: Connection, call: Syscall, args: c.ResumeArgs) -> c.ResumeResult | None:
    context = _target(m, connection, args)
    no_text(args.text, args.messages)
    m.lifetimes.check(context, args.wait)
    computable(m, context)
    n = check_tokens(m, args.tokens)
    if behind(context, call):
        return None
    check_room(m, context, m.core.slot_row(context.slot).tokens + n)
    waited_ns = m.lifetimes.answered(context)
    return c.ResumeResult(extend(m, context, args.tokens, args.more), n, waited_ns // MS)


# -- interrupting a generation --------------------------------------------------------------------------------------


def _takes(context: Context) -> None:
    """EBUSY: nothing can be injected into it now."""
    awake(context, "inject")
    if context.job is not None and context.job.kind in (JobKind.FORWARD, JobKind.SCORE):
        message = f"a {context.job.kind.value} is running on this context: cancel it before you inject"
        raise Errno(E.EBUSY, message, cid=context.cid, request=context.job.request)


def inject(m: Machine, connection: Connection, call: Syscall, args: c.InjectArgs) -> c.InjectResult | None:
    context = _target(m, connection, args)
    no_text(args.text)
    _takes(context)
    computable(m, context)
    n = check_tokens(m, args.tokens)
    if behind(context, call):
        return None
    length = m.core.slot_row(context.slot).tokens
    if context.job is None or context.job.kind is JobKind.PREFILL or not n:
        check_room(m, context, length + n)
        if n:
            m.schedulers[context.device].backlog.check(context, n)
        return c.InjectResult(extend(m, context, args.tokens), n)
    check_room(m, context, length + n + m.interrupts.waiting_tokens(context))
    m.interrupts.add(context, call.conn, call.request, args.tokens)
    return None


TRAPS: dict[str, Trap] = {"wait_tool": wait_tool, "resume": resume, "inject": inject}
