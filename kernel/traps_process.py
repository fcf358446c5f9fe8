"""System calls about the session and its processes: hello, spawn, exit, kill, wait, ps, getrusage, setpriority."""

from __future__ import annotations

from . import calls as c
from .domain import check_domain
from .errors import E, Errno
from .events import Syscall
from .group import Group, parse_name
from .ids import Pid
from .look import process_row
from .machine import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Machine
from .params import (
    ABI_VERSION,
    MAX_NAME_CHARS,
    MAX_PROCESSES,
    NICE_MAX,
    NICE_MIN,
    OOM_ADJ_AS_IS,
    OOM_ADJ_FIRST,
    OOM_ADJ_NEVER,
    RETRY_MS,
)
from .process import Connection
from .traps import Trap, administrator, behind, forked, no_slots, own_process, seen_process, unhold
from .waiting import Waiter


def hello(m: Machine, connection: Connection, call: Syscall, args: c.HelloArgs) -> c.HelloResult:
    if not 1 <= args.version <= ABI_VERSION:
        raise Errno(E.EINVAL, f"client speaks ABI {args.version}, this system {ABI_VERSION}", version=ABI_VERSION)
    if connection.pid:
        raise Errno(E.EEXIST, "this connection has said hello already", pid=connection.pid)
    session = m.names.session(connection, args.session)
    process = m.new_process(connection, Pid(0), args.client[:MAX_NAME_CHARS], 0)
    connection.pid = process.pid
    kept = m.names.join(connection, args.session, session, process)
    name = "attnix " + m.config.version
    return c.HelloResult(name, ABI_VERSION, process.pid, connection.uid, connection.token, kept)


def spawn(m: Machine, connection: Connection, call: Syscall, args: c.SpawnArgs) -> c.SpawnResult | None:
    parent = own_process(m, connection, 0)
    if not NICE_MIN <= args.nice <= NICE_MAX or len(args.name) > MAX_NAME_CHARS:
        text = f"nice is {NICE_MIN}..{NICE_MAX} and a name at most {MAX_NAME_CHARS} characters"
        raise Errno(E.EINVAL, text, field="name" if NICE_MIN <= args.nice <= NICE_MAX else "nice")
    left = MAX_PROCESSES - len(m.processes)
    if left <= MAX_PROCESSES // 2 and (mine := m.groups.processes_of(connection.uid)) >= left:
        # As many as are left for everybody else: nobody can take all (Groups.check_room).
        text = f"uid {connection.uid} has {mine} processes and no more are left for others: end some, and wait for those that have ended"
        raise Errno(E.EAGAIN, text, limit=mine, retry_after_ms=RETRY_MS)
    source = connection.lookup(args.fork_of) if args.fork_of else None
    if args.domain:
        check_domain(m, connection.uid, args.domain)
    group = named_group(m, connection, args.group) if args.group else parent.group
    if source:
        m.groups.check_contexts(group)
    if source and behind(source, call):
        return None
    slot = m.core.fork(source.slot, 1) if source else None
    if source and not slot:
        raise no_slots(m)
    process = m.new_process(connection, parent.pid, args.name, args.nice, group, args.domain)
    if source is None or slot is None:
        return c.SpawnResult(process.pid)
    context = forked(m, process, source, slot[0])
    return c.SpawnResult(process.pid, connection.add(context), context.cid)


def named_group(m: Machine, connection: Connection, name: str) -> Group:
    """A group of this uid, made when it is new.  EINVAL, EACCES, EAGAIN."""
    if parse_name(name)[0] != connection.uid:
        raise Errno(
            E.EACCES, f"group {name} is another user's: yours are uid:{connection.uid} and its sub-groups", group=name
        )
    m.groups.check_room(name)
    return m.groups.named(name)


def exit_(m: Machine, connection: Connection, call: Syscall, args: c.ExitArgs) -> c.Empty:
    m.end_process(own_process(m, connection, args.pid), args.code, "exited")
    return c.Empty()


def kill(m: Machine, connection: Connection, call: Syscall, args: c.KillArgs) -> c.Empty:
    process = seen_process(m, connection, args.pid)
    if process.zombie:
        raise Errno(E.ENOENT, f"process {args.pid} has ended already", pid=args.pid)
    if args.signal in (SIGTERM, SIGKILL):
        m.end_process(process, 128 + args.signal, "killed")
    elif args.signal == SIGSTOP:
        process.stopped = True
        for context in process.contexts.values():
            m.schedulers[context.device].hold(context)
    elif args.signal == SIGCONT:
        stopped, process.stopped = process.stopped, False
        for context in (
            process.contexts.values() if stopped else ()
        ):  # else it runs already, and would be queued besides
            unhold(m, context)
    else:
        raise Errno(E.EINVAL, f"signal {args.signal}: use 15 TERM, 9 KILL, 19 STOP or 18 CONT", signal=args.signal)
    return c.Empty()


def wait(m: Machine, connection: Connection, call: Syscall, args: c.WaitArgs) -> c.WaitResult | None:
    parent = own_process(m, connection, 0)
    if not (args.pid in parent.children if args.pid else parent.children):
        raise Errno(E.ENOENT, f"no child process {args.pid or ''}".strip() + " to wait for", pid=args.pid)
    ended = parent.ended.get(Pid(args.pid)) if args.pid else next(iter(parent.ended.values()), None)
    if ended is not None:
        return m.reap(parent, ended)
    if args.timeout_ms == 0:
        raise Errno(E.EAGAIN, "no child has ended yet", retry_after_ms=RETRY_MS)
    at_ns = m.now_ns + args.timeout_ms * 1_000_000 if args.timeout_ms > 0 else 0
    m.waiters.add(Waiter(connection.conn, call.request, parent, Pid(args.pid), at_ns), m.now_ns)
    return None


def ps(m: Machine, connection: Connection, call: Syscall, args: c.PsArgs) -> c.PsResult:
    if args.pid:
        return c.PsResult((process_row(m, seen_process(m, connection, args.pid)),))
    everyone = connection.uid == 0
    return c.PsResult(tuple(process_row(m, p) for p in m.processes.values() if everyone or p.uid == connection.uid))


def getrusage(m: Machine, connection: Connection, call: Syscall, args: c.GetrusageArgs) -> c.Usage:
    return m.usage_of(seen_process(m, connection, args.pid))


def setpriority(m: Machine, connection: Connection, call: Syscall, args: c.SetpriorityArgs) -> c.Empty:
    process = seen_process(m, connection, args.pid)
    if not NICE_MIN <= args.nice <= NICE_MAX:
        raise Errno(E.EINVAL, f"nice is {NICE_MIN}..{NICE_MAX}, not {args.nice}", nice=args.nice)
    if not OOM_ADJ_AS_IS <= args.oom_score_adj <= OOM_ADJ_FIRST:
        raise Errno(
            E.EINVAL,
            f"oom_score_adj is {OOM_ADJ_NEVER}..{OOM_ADJ_FIRST}, not {args.oom_score_adj}",
            oom_score_adj=args.oom_score_adj,
        )
    if OOM_ADJ_AS_IS < args.oom_score_adj < min(0, process.oom_score_adj):
        administrator(m, connection, "make a process less likely to be ended than others")
    if args.oom_score_adj != OOM_ADJ_AS_IS:
        process.oom_score_adj = args.oom_score_adj
    process.nice = args.nice
    for scheduler in m.schedulers:
        scheduler.reorder()
    return c.Empty()


TRAPS: dict[str, Trap] = {
    "hello": hello,
    "spawn": spawn,
    "exit": exit_,
    "kill": kill,
    "wait": wait,
    "ps": ps,
    "getrusage": getrusage,
    "setpriority": setpriority,
}
