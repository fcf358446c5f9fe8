"""The ABI: one table that numbers, types, documents and bounds every system call.

Dispatch, the client stubs, `docs/syscalls.md`, shell help and the wire fuzzer are all made from `CALLS`.  A call is a
number, a record of arguments, a record of results (both in kernel/calls.py) and the errnos it may return; an errno
that is not listed here is a bug, which the daemon writes to dmesg and the tests turn into a failure.

Numbers are grouped in steps so that a later call lands beside its kin; `RESERVED` names the ones that DESIGN.md §6
promises and this version answers with ENOSYS.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from attnix.kernel import calls as c
from attnix.kernel.errors import E

Record: TypeAlias = tuple[object, ...]

# Any call: wrong arguments (EINVAL), too many requests outstanding (EAGAIN), the system is going down (ECANCELED).
COMMON_ERRNOS: Final = frozenset({E.EINVAL, E.EAGAIN, E.ECANCELED})

GROUPS: Final = ("session and process", "context", "compute", "system")


class Call(NamedTuple):
    """One system call.

    args, result  records of kernel/calls.py; positional on the wire, fields with defaults may be left out at the end
    errnos        every errno it may return, COMMON_ERRNOS included
    since         the ABI version that brought it
    manual        one paragraph: what it does, and what it leaves behind
    """

    number: int
    name: str
    group: str
    args: type[Record]
    result: type[Record]
    errnos: frozenset[E]
    since: int
    manual: str


def _call(
    number: int,
    name: str,
    group: str,
    args: type[Record],
    result: type[Record],
    errnos: str,
    manual: str,
    since: int = 1,
) -> Call:
    declared = frozenset(E[errno] for errno in errnos.split())
    return Call(number, name, group, args, result, declared | COMMON_ERRNOS, since, " ".join(manual.split()))


_PROCESS, _CONTEXT, _COMPUTE, _SYSTEM = GROUPS
_HANDLE: Final = "EBADF ESTALE"

CALLS: Final[tuple[Call, ...]] = (
    _call(1, "hello", _PROCESS, c.HelloArgs, c.HelloResult, "EEXIST", """
        Say who is calling and which ABI version it speaks; learn the server's, and the uid that the socket proved.  It
        gives the connection its own process, named `client`; calls that need one are EINVAL before it, calls that only
        look work without it.  Once per connection (EEXIST).  A version that this server does not speak is EINVAL.
        """),
    _call(2, "spawn", _PROCESS, c.SpawnArgs, c.SpawnResult, f"{_HANDLE} ENOENT ENOMEM", """
        Make a child process of the connection's own.  With `fork_of` it starts with a fork of that context, and the
        result names the child's context by handle and by cid.
        """),
    _call(3, "exit", _PROCESS, c.ExitArgs, c.Empty, "ENOENT EACCES", """
        End a process of this connection with an exit code.  Its contexts are released, its generations end with
        reason `killed`, and it stays a zombie until its parent waits for it.
        """),
    _call(4, "kill", _PROCESS, c.KillArgs, c.Empty, "ENOENT EACCES", """
        Send a signal: SIGSTOP (19) takes a process off the device until SIGCONT (18); SIGTERM (15) and SIGKILL (9) end
        it, release its contexts and end its generations with reason `killed`.  Only processes of the caller's uid.
        """),
    _call(5, "wait", _PROCESS, c.WaitArgs, c.WaitResult, "ENOENT EACCES ETIMEDOUT", """
        Wait until a child process has ended, take its exit code and usage, and let its pid go.  `timeout_ms` of 0 only
        looks and is EAGAIN when none has ended; no child at all is ENOENT.
        """),
    _call(6, "ps", _PROCESS, c.PsArgs, c.PsResult, "ENOENT EACCES E2BIG", """
        List processes with their contexts, or one process.  Shows what the caller's uid may see.  Memory is counted
        twice: `kv_bytes` is all live KV, `proportional_bytes` divides each shared frame by its sharers.
        """),
    _call(7, "getrusage", _PROCESS, c.GetrusageArgs, c.Usage, "ENOENT EACCES", """
        What a process has cost so far, its released contexts included.
        """),
    _call(8, "setpriority", _PROCESS, c.SetpriorityArgs, c.Empty, "ENOENT EACCES", """
        Set the nice value of a process, from -20 (first) to 19 (last).
        """),
    _call(20, "alloc_context", _CONTEXT, c.AllocContextArgs, c.AllocContextResult, "ENOENT EACCES ENODEV ENOMEM", """
        Make an empty context in a process.  The handle is valid on this connection only; the cid names it in `ps` and
        to calls that only look.  It takes no frames until something is appended.
        """),
    _call(21, "fork", _CONTEXT, c.ForkArgs, c.ForkResult, f"{_HANDLE} ENOMEM", """
        Make `n` contexts with the same log, all or none.  Full blocks are shared and the partial tail is copied when
        somebody writes to it, so a fork costs page-table entries, not KV.
        """),
    _call(22, "append", _CONTEXT, c.AppendArgs, c.AppendResult, f"{_HANDLE} EBUSY E2BIG ENOMEM ENOSYS EIO EHOSTDOWN", """
        Add tokens to a context's log and start computing them; the answer does not wait for the computation.  Exactly
        one of `tokens`, `text` (tokenized as plain text: nothing in it can become a special token) and `messages` (the
        model's chat template, continuing the messages appended and generated so far).  Past the window is E2BIG with
        both numbers.  Without a tokenizer, `text` and `messages` are ENOSYS; EIO says the text worker could not do it.
        """),
    _call(23, "truncate", _CONTEXT, c.TruncateArgs, c.TruncateResult, f"{_HANDLE} EBUSY", """
        Cut the log to its first `length` tokens.  Whole blocks past the cut are let go, and a block that others share
        is not touched.
        """),
    _call(25, "release", _CONTEXT, c.CtxArgs, c.Empty, _HANDLE, """
        Give a context back.  Its full blocks stay as cache until their frames are needed, what still runs on it is
        cancelled, and the handle is stale from now on.
        """),
    _call(26, "stat", _CONTEXT, c.LookArgs, c.ContextRow, f"{_HANDLE} ENOENT EACCES", """
        One context's state, size, sharing and usage, named by handle or, from any connection of its uid, by cid.
        """),
    _call(27, "pagemap", _CONTEXT, c.LookArgs, c.PagemapResult, f"{_HANDLE} ENOENT EACCES E2BIG", """
        One context's page table as arrays, an entry per logical block: frame, shift, count, sharers, flags, hits.
        """),
    _call(40, "generate", _COMPUTE, c.GenerateArgs, c.GenerateResult,
          f"{_HANDLE} EBUSY E2BIG ENOMEM ENODEV EIO EHOSTDOWN ENOSYS", """
        Sample up to `max_tokens` tokens into the context.  With `stream`, notifications of kind `tokens` carry token ids
        and text that is always valid UTF-8 and never shows any part of a stop string; the reply carries the whole
        again.  Ends with a reason: `stop`, `length` (also at the window), `cancelled` or `killed`.  Once the first token
        is out it never ends in an errno.  A context that generates refuses other writers with EBUSY.  Stop strings
        need a tokenizer (ENOSYS without one).
        """),
    _call(41, "forward", _COMPUTE, c.ForwardArgs, c.ForwardResult, f"{_HANDLE} EBUSY E2BIG ENOMEM ENODEV EIO EHOSTDOWN", """
        The `top_k` most likely next tokens and their log-probabilities; the context stays as it is.  Beam search,
        constrained decoding and speculation are programs over this.
        """),
    _call(42, "score", _COMPUTE, c.ScoreArgs, c.ScoreResult, f"{_HANDLE} EBUSY E2BIG ENOMEM ENODEV EIO EHOSTDOWN", """
        The log-probability of each of `tokens` as the continuation of the context, which stays as it is.
        """),
    _call(43, "cancel", _COMPUTE, c.CancelArgs, c.Empty, "ENOENT", """
        End a request outstanding on this connection.  A generation ends with reason `cancelled` and keeps its tokens;
        forward, score and wait end with ECANCELED.  The request's own reply comes once in any case.
        """),
    _call(80, "uname", _SYSTEM, c.Empty, c.UnameResult, "", """
        What runs here: versions, model, fingerprint, geometry, numerics, devices, and where the tokenizer file is for
        clients that tokenize themselves.
        """),
    _call(81, "tiers", _SYSTEM, c.Empty, c.TiersResult, "", """
        Every memory device: its state, epoch, driver, and its frames by what they are used for.
        """),
    _call(82, "vmstat", _SYSTEM, c.Empty, c.VmstatResult, "", """
        Counters since boot, by name.
        """),
    _call(83, "sysctl", _SYSTEM, c.SysctlArgs, c.SysctlResult, "ENOENT EACCES", """
        Read a tunable by name, list those under a prefix that ends in a dot (or all, with the empty name), or set one.
        """),
    _call(86, "dmesg", _SYSTEM, c.DmesgArgs, c.DmesgResult, "EACCES", """
        The kernel's log after entry number `since`, oldest first.
        """),
    _call(87, "fsck", _SYSTEM, c.Empty, c.FsckResult, "EACCES", """
        Check every invariant of DESIGN.md §3 now, and name the ones that do not hold.
        """),
    _call(90, "shutdown", _SYSTEM, c.Empty, c.Empty, "EACCES", """
        Stop the system: this call is answered, what is outstanding elsewhere ends (`killed` or ECANCELED), drivers stop.
        """),
)  # fmt: skip

BY_NUMBER: Final = {call.number: call for call in CALLS}
BY_NAME: Final = {call.name: call for call in CALLS}
assert len(BY_NUMBER) == len(BY_NAME) == len(CALLS)

RESERVED: Final[dict[int, str]] = {
    9: "setlimit",
    24: "cut",
    28: "map",
    29: "unmap",
    30: "publish",
    31: "open",
    32: "unlink",
    33: "snapshot",
    34: "restore",
    44: "inject",
    50: "wait_tool",
    51: "resume",
    60: "pin",
    61: "unpin",
    62: "advise",
    63: "prefetch",
    64: "demote",
    65: "evict",
    84: "trace",
    85: "explain",
    88: "attach_tier",
    89: "detach_tier",
}
assert not RESERVED.keys() & BY_NUMBER.keys()

NOTIFICATIONS: Final[dict[str, type[Record]]] = {"tokens": c.TokensNote}
