"""System calls on names, sessions and snapshots.  As in traps.py: check everything, then do it."""

from __future__ import annotations

from array import array

from . import calls as c
from .context import Context
from .errors import Detail, E, Errno
from .events import Prime, ReadSnapshot, SnapshotRead, SnapshotWritten, Syscall, WriteSnapshot
from .ids import Cid, Slot
from .machine import Machine
from .names import Kept, sampled
from .params import MAX_NAME_CHARS, MAX_SNAPSHOT_CONTEXTS
from .process import Connection
from .snapshot import SnapshotEntry
from .traps import (
    Trap,
    aim_generation,
    awake,
    begin_generation,
    behind,
    check_room,
    check_tokens,
    computable,
    new_slots,
    own_process,
    quiet,
    roomiest,
)

MAX_NAME_BYTES = 200  # of UTF-8: a name becomes a file's name


def check_name(name: str) -> None:
    """EINVAL: empty, too long, or with characters that a file name or a terminal could not take."""
    good = (
        0 < len(name) <= MAX_NAME_CHARS
        and len(name.encode(errors="replace")) <= MAX_NAME_BYTES
        and name.isprintable()
        and "/" not in name
        and not name.startswith(".")
    )
    if not good:
        raise Errno(
            E.EINVAL,
            f"a name is 1..{MAX_NAME_CHARS} printable characters (at most {MAX_NAME_BYTES} bytes), without '/' and not "
            "beginning with a dot",
            field="name",
        )


def publish(m: Machine, connection: Connection, call: Syscall, args: c.PublishArgs) -> c.Empty:
    context = connection.lookup(args.ctx)
    check_name(args.name)
    names = m.names
    try:
        other: Context | None = names.named(context.process.uid, args.name)
    except Errno:
        other = None
    if other is not None and other is not context:
        if not args.replace:
            raise Errno(
                E.EEXIST, f"{args.name!r} names context {other.cid}: use `replace`, or unlink it", cid=other.cid
            )
        names.unlink(other)
    if absent := names.absent(context.process.uid, args.name):
        if not args.replace:
            text = f"{args.name!r} names context {absent}, which does not fit (slots or window)"
            raise Errno(E.EEXIST, f"{text}: use `replace`, or unlink it", cid=absent)
        names.unlink_absent(context.process.uid, args.name)
    names.publish(context, args.name)
    m.errands.save(context)
    return c.Empty()


def open_(m: Machine, connection: Connection, call: Syscall, args: c.OpenArgs) -> c.OpenResult | None:
    process = own_process(m, connection, 0)
    context = m.names.named(connection.uid, args.name) if args.name else m.contexts.get(Cid(args.cid))
    if context is None or context.kept is None or context.process.uid != connection.uid or context.dying:
        raise Errno(E.ENOENT, f"no named or detached context {args.cid} of this user", cid=args.cid)
    length = m.core.slot_row(context.slot).tokens
    if args.fork:
        if behind(context, call):
            return None
        m.groups.check_contexts(process.group)
        slot = new_slots(m, context, 1)[0]
        made = m.new_context(process, Slot(slot), context.device, context.cid, domain=context.domain)
        return c.OpenResult(connection.add(made), made.cid, length)
    if m.names.held(context):
        if context.process.conn == connection.conn:
            return c.OpenResult(context.handle, context.cid, length, context.kept.phase)
        raise Errno(
            E.EBUSY,
            f"process {context.process.pid} holds context {context.cid}: open it with `fork` for a copy of your own",
            pid=context.process.pid,
            cid=context.cid,
        )
    handle = m.names.take(connection, process, context)
    return c.OpenResult(handle, context.cid, length, context.kept.phase)


def unlink(m: Machine, connection: Connection, call: Syscall, args: c.UnlinkArgs) -> c.Empty:
    if m.names.absent(connection.uid, args.name):
        m.names.unlink_absent(connection.uid, args.name)
    else:
        m.names.unlink(m.names.named(connection.uid, args.name))
    return c.Empty()


def names(m: Machine, connection: Connection, call: Syscall, args: c.NamesArgs) -> c.NamesResult:
    rows = []
    for context in m.names.of_uid(connection.uid):
        kept = context.kept
        if kept is not None and kept.name.startswith(args.prefix):
            state = "suspended" if kept.phase == "suspended" else context.state()
            held, tokens = m.names.held(context), m.core.slot_row(context.slot).tokens
            rows.append(c.NameRow(kept.name, context.cid, context.process.pid, held, state, tokens))
    return c.NamesResult(tuple(rows))


def detach(m: Machine, connection: Connection, call: Syscall, args: c.CtxArgs) -> c.Empty:
    context = connection.lookup(args.ctx)
    m.names.keep(context).detached = True
    m.errands.save(context)
    return c.Empty()


# -- going on with a generation -------------------------------------------------------------------------------------


def reattach(m: Machine, connection: Connection, call: Syscall, args: c.ReattachArgs) -> c.GenerateResult | None:
    context = connection.lookup(args.ctx)
    kept = context.kept
    check_tokens(m, args.tokens)
    if kept is not None and kept.phase == "running" and kept.generation is not None:
        _adopt(m, connection, call, context, kept.generation.args, args)
        return None
    if kept is not None and kept.phase == "suspended":
        _resume(m, connection, call, context, kept, args)
        return None
    if kept is not None and kept.result is not None:
        _check_agrees(args.tokens, kept.result.tokens, ended=True)
        generation = c.GenerateArgs(args.ctx) if kept.asked is None else kept.asked
        _prime(m, connection, call, generation, args, (0, 0), kept.result.tokens, kept.result.logprobs)
        return kept.result
    raise Errno(E.ENOENT, f"no generation on context {context.cid} lost its client", cid=context.cid)


def _adopt(
    m: Machine, connection: Connection, call: Syscall, context: Context, generation: c.GenerateArgs, args: c.ReattachArgs
) -> None:  # fmt: skip
    """It runs: its tokens go to this request from now on."""
    job = context.job
    if job is None:
        return
    have = sampled(m, context, job.start, job.injected)
    _check_agrees(args.tokens, have, ended=True)
    was = m.names.adopt(context, job, connection, call.request)
    aim_generation(m, connection, call, context, generation, job.start, job.injected)
    _prime(m, connection, call, generation, args, was, have, tuple(job.logprobs[: len(have) // 4]))


def _resume(
    m: Machine, connection: Connection, call: Syscall, context: Context, kept: Kept, args: c.ReattachArgs
) -> None:  # fmt: skip
    """It stopped with the daemon: what the client has beyond the journal is forced, the rest is sampled again."""
    if kept.generation is None:
        return
    generation, start, ranges = kept.generation
    quiet(context, "reattach")
    awake(context, "reattach")
    computable(m, context)
    have = sampled(m, context, start, ranges)
    _check_agrees(args.tokens, have, ended=False)
    length = m.core.slot_row(context.slot).tokens
    check_room(m, context, length + max(0, len(args.tokens) - len(have)) // 4)
    if behind(context, call):
        return
    forced = args.tokens[len(have) :]
    if forced:
        m.core.append(context.slot, forced)
    m.names.resumed(context, length)
    _prime(m, connection, call, generation, args, (0, 0), have + forced, ())
    begin_generation(m, connection, call, context, generation, start, ranges)


def _check_agrees(theirs: bytes, ours: bytes, *, ended: bool) -> None:
    """EINVAL: the client's tokens are not the beginning of ours (or, of a generation that may be behind, go on from it)."""
    n = min(len(theirs), len(ours))
    if theirs[:n] != ours[:n]:
        pairs = zip(array("i", theirs[:n]), array("i", ours[:n]), strict=True)
        at = next(i for i, (a, b) in enumerate(pairs) if a != b)
        raise Errno(E.EINVAL, f"token {at} of this generation is another one here", field="tokens", at=at)
    if ended and len(theirs) > len(ours):
        raise Errno(
            E.EINVAL,
            f"{len(theirs) // 4} tokens were given and this generation has {len(ours) // 4}",
            field="tokens",
            at=len(ours) // 4,
        )


def _prime(
    m: Machine, connection: Connection, call: Syscall, generation: c.GenerateArgs, args: c.ReattachArgs,
    was: tuple[int, int], tokens: bytes, logprobs: tuple[tuple[float, bytes, bytes], ...],
) -> None:  # fmt: skip
    asked = generation._replace(stream=args.stream)
    m.emit(Prime(connection.conn, call.request, was, asked, tokens, len(args.tokens) // 4, logprobs, False))


# -- snapshots ------------------------------------------------------------------------------------------------------


def snapshot(m: Machine, connection: Connection, call: Syscall, args: c.SnapshotArgs) -> None:
    check_name(args.name)
    if not 1 <= len(args.ctxs) <= MAX_SNAPSHOT_CONTEXTS or len(set(args.ctxs)) != len(args.ctxs):
        raise Errno(E.EINVAL, f"a snapshot holds 1..{MAX_SNAPSHOT_CONTEXTS} different contexts", field="ctxs")
    contexts = [connection.lookup(handle) for handle in args.ctxs]
    for context in contexts:
        quiet(context, "snapshot")
        if context.parked:
            n = len(context.parked)
            text = f"{n} calls wait for their turn on context {context.cid}: let them end first"
            raise Errno(E.EBUSY, text, cid=context.cid, calls=n)
    entries = tuple(
        SnapshotEntry(
            context.cid,
            context.kept.name if context.kept else "",
            m.core.read_log(context.slot, 0, m.core.slot_row(context.slot).tokens),
        )
        for context in contexts
    )
    m.snapshots[connection.conn, call.request] = c.SnapshotResult(
        len(entries), sum(len(e.tokens) // 4 for e in entries), 0, 0
    )
    identity = m.config.identity
    effect = WriteSnapshot(
        connection.conn, call.request, connection.uid, args.name, identity, m.config.kv.token_bytes, entries
    )
    m.emit(effect)


def snapshot_written(m: Machine, event: SnapshotWritten) -> None:
    result = m.snapshots.pop((event.conn, event.request), None)
    if result is None:
        return
    if event.code:
        m.reply(event.conn, event.request, event.code, event.detail)
    else:
        m.reply(event.conn, event.request, 0, result._replace(file_bytes=event.file_bytes))


def restore(m: Machine, connection: Connection, call: Syscall, args: c.RestoreArgs) -> None:
    own_process(m, connection, 0)
    check_name(args.name)
    m.emit(ReadSnapshot(connection.conn, call.request, connection.uid, args.name))


def snapshot_read(m: Machine, event: SnapshotRead) -> None:
    """The file was read, or could not be.  The connection may be gone by now."""
    connection = m.connections.get(event.conn)
    if connection is None:
        return
    try:
        if event.code:
            raise Errno(E(event.code), str(event.detail.get("message", "")), **_rest(event.detail))
        result = _restored(m, connection, event)
    except Errno as error:
        m.reply(event.conn, event.request, error.code, error.detail)
        return
    m.reply(event.conn, event.request, 0, result)


def _rest(detail: Detail) -> Detail:
    return {key: value for key, value in detail.items() if key != "message"}


def _restored(m: Machine, connection: Connection, event: SnapshotRead) -> c.RestoreResult:
    process = own_process(m, connection, 0)
    here, there = dict(m.config.identity), dict(event.identity)
    for field in [*here, *(f for f in there if f not in here)]:
        if here.get(field) != there.get(field):
            raise Errno(
                E.ECORRUPT,
                f"the snapshot was made with {field} {there.get(field)!r}, and this system has {here.get(field)!r}: its KV "
                "would be wrong here",
                field=field,
                stored=str(there.get(field)),
                running=str(here.get(field)),
            )
    for entry in event.entries:
        check_tokens(m, entry.tokens)
        if len(entry.tokens) // 4 > m.config.window_tokens:
            raise Errno(
                E.E2BIG,
                f"context {entry.cid} of the snapshot has {len(entry.tokens) // 4} tokens and the window is "
                f"{m.config.window_tokens}",
                wanted=len(entry.tokens) // 4,
                limit=m.config.window_tokens,
            )
    m.groups.check_contexts(process.group, len(event.entries))
    made: list[Context] = []
    for entry in event.entries:
        device = roomiest(m)
        slot = m.core.open_slot(device, *m.domain_of(process))
        if slot < 0:
            for context in made:
                m.release(context)
            raise Errno(
                E.ENOMEM,
                f"{len(event.entries)} contexts need as many slots and {len(made)} are free: release some",
                wanted=len(event.entries),
                free=len(made),
            )
        if entry.tokens:
            m.core.append(slot, entry.tokens)
        made.append(m.new_context(process, Slot(slot), device, Cid(0)))
    return c.RestoreResult(tuple(connection.add(x) for x in made), tuple(x.cid for x in made))


TRAPS: dict[str, Trap] = {
    "publish": publish,
    "open": open_,
    "unlink": unlink,
    "names": names,
    "detach": detach,
    "reattach": reattach,
    "snapshot": snapshot,
    "restore": restore,
}
