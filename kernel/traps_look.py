"""System calls that look inside: pagemap, read, trace.  None of them changes anything."""

from __future__ import annotations

from array import array

from . import calls as c
from .context import Context
from .errors import E, Errno
from .events import Syscall, Trace
from .look import alone
from .look_frames import own_numbers
from .machine import Machine
from .process import Connection
from .records import FACT
from .traps import Trap, seen_context, seen_process

_LONGEST_MS = 2**31 - 1
_WHAT = ("syscalls", "none")


def pagemap(m: Machine, connection: Connection, call: Syscall, args: c.LookArgs) -> c.PagemapResult:
    context = seen_context(m, connection, args)
    tokens = m.core.slot_row(context.slot).tokens
    name = m.devices[context.device].name
    frames, shifts, counts, sharers, flags, hits = m.core.pagemap(context.slot)
    if not alone(m, connection.uid):
        numbers = own_numbers(m, context.device, connection.uid)
        frames = array("i", [numbers.get(f, -1) for f in array("i", frames)]).tobytes()
    return c.PagemapResult(
        context.cid, name, m.config.block_tokens, tokens, frames, shifts, counts, sharers, flags, hits,
        *_blocks(m, context),
    )  # fmt: skip


def _blocks(m: Machine, context: Context) -> tuple[bytes, bytes]:
    """copies, ages: per logical block which devices hold it, as bits, and ms since it was last wanted.  The row's blocks first,
    then what lies in slower tiers only."""
    facts = list(FACT.iter_unpack(m.core.facts(m.core.log_blocks(context.slot))))
    tail, end = m.core.tail_of(context.slot)
    if tail >= 0 and len(facts) == end // m.config.block_tokens:
        facts += FACT.iter_unpack(m.core.facts([tail]))
    entries = m.core.slot_row(context.slot).entries
    missing = max(0, entries - len(facts))
    ages = array("i", [_age_ms(m, fact[0]) for fact in facts] + [-1] * missing).tobytes()
    if not m.tiers.exist:
        return b"", ages
    where = bytearray(fact[9] for fact in facts) + bytes(missing)
    for i in range(entries):
        where[i] |= 1 << context.device
    return bytes(where), ages


def _age_ms(m: Machine, used_ns: int) -> int:
    return min(_LONGEST_MS, max(0, m.now_ns - used_ns) // 1_000_000) if used_ns else -1


def read(m: Machine, connection: Connection, call: Syscall, args: c.ReadArgs) -> c.ReadResult:
    context = seen_context(m, connection, args)
    length = m.core.slot_row(context.slot).tokens
    end = length if args.end < 0 else min(args.end, length)
    if args.start < 0 or (args.end >= 0 and args.start > args.end):
        raise Errno(E.EINVAL, f"tokens {args.start} to {args.end} are no range", field="start")
    return c.ReadResult(context.cid, args.start, m.core.read_log(context.slot, min(args.start, end), end))


def trace(m: Machine, connection: Connection, call: Syscall, args: c.TraceArgs) -> c.Empty:
    if args.what not in _WHAT:
        raise Errno(E.EINVAL, f"what is to be told of is one of {', '.join(_WHAT)}, not {args.what!r}", field="what")
    process = seen_process(m, connection, args.pid)
    if process.conn not in m.connections:
        raise Errno(E.ENOENT, f"process {args.pid} has no client now", pid=args.pid)
    m.emit(Trace(connection.conn, process.conn, args.pid or process.pid, args.what))
    return c.Empty()


TRAPS: dict[str, Trap] = {"pagemap": pagemap, "read": read, "trace": trace}
