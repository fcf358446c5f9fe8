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

GROUPS: Final = ("session and process", "context", "compute", "waiting", "memory", "system")


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


_PROCESS, _CONTEXT, _COMPUTE, _WAITING, _MEMORY, _SYSTEM = GROUPS
_HANDLE: Final = "EBADF ESTALE"

CALLS: Final[tuple[Call, ...]] = (
    _call(1, "hello", _PROCESS, c.HelloArgs, c.HelloResult, "EEXIST EACCES EBUSY", """
        Say who is calling and which ABI version it speaks; learn the server's, and the uid that the socket proved.  It
        gives the connection its own process, named `client`; calls that need one are EINVAL before it, calls that only
        look work without it.  Once per connection (EEXIST).  A version that this server does not speak is EINVAL.  The
        result carries a session token, which is a secret.  A later connection that gives it back as `session` takes
        over the session's named and detached contexts, in its own new process and under new handles, also after the
        daemon died and came back.  A token that nobody was given, or another uid's, or one whose session kept nothing
        is EACCES; one whose connection still lives is EBUSY.
        """),
    _call(2, "spawn", _PROCESS, c.SpawnArgs, c.SpawnResult, f"{_HANDLE} ENOENT EACCES ENOMEM EDQUOT", """
        Make a child process of the connection's own.  With `fork_of` it starts with a fork of that context, and the
        result names the child's context by handle and by cid.  `group` puts it into a sub-group of the caller's uid, and
        `domain` has it share prefixes with that domain; both go to its children.
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
        Set the nice value of a process, from -20 (first) to 19 (last), and how willingly it is ended when memory runs
        out, from -1000 (never) to 1000 (first).  Below 0 only by the daemon's own user.
        """),
    _call(9, "setlimit", _PROCESS, c.SetlimitArgs, c.GroupRow, "EACCES EBUSY", """
        Set a limit of a group, or its weight; the result is the group as it is then.  `hard` is never exceeded, `soft` is
        what no other group can take away.  A uid's own group is set by the daemon's user, its sub-groups by the uid,
        within what the uid has; one that is not there yet is made.  A limit below what the group has makes it give up
        what is idle; when that is not enough, nothing changes (EBUSY says what it uses).
        """, since=3),
    _call(10, "groups", _PROCESS, c.GroupsArgs, c.GroupsResult, "ENOENT EACCES E2BIG", """
        Groups with their limits and what they use: each frame is charged to one group, the one whose context first
        needed it.
        """, since=3),
    _call(20, "alloc_context", _CONTEXT, c.AllocContextArgs, c.AllocContextResult, "ENOENT EACCES ENODEV ENOMEM EDQUOT", """
        Make an empty context in a process.  The handle is valid on this connection only; the cid names it in `ps` and
        to calls that only look.  It takes no frames until something is appended.
        """),
    _call(21, "fork", _CONTEXT, c.ForkArgs, c.ForkResult, f"{_HANDLE} ENOMEM EDQUOT", """
        Make `n` contexts with the same log, all or none.  Full blocks are shared and the partial tail is copied when
        somebody writes to it, so a fork costs page-table entries, not KV.
        """),
    _call(22, "append", _CONTEXT, c.AppendArgs, c.AppendResult, f"{_HANDLE} EBUSY E2BIG ENOMEM EDQUOT ENOSYS EIO EHOSTDOWN", """
        Add tokens to a context's log and start computing them; the answer does not wait for the computation.  With `more`
        nothing starts before the next call on the context, which computes them in the same pass as its own answer.  Exactly
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
    _call(30, "publish", _CONTEXT, c.PublishArgs, c.Empty, f"{_HANDLE} EEXIST ENOSPC EIO", """
        Give a context a name within the caller's uid, or another one.  From now on it outlives its connection, its
        process and the daemon: its tokens are journaled, and its KV is found again by key or computed again.  A
        generation on it goes on without its client.  A name that another context has is EEXIST, or with `replace`
        taken from it; that one goes when nobody holds it.  It is answered when it is on record; while the journal cannot be
        written it is ENOSPC (the disk is full) or EIO, and the context has no name.
        """, since=2),
    _call(31, "open", _CONTEXT, c.OpenArgs, c.OpenResult, "ENOENT EBUSY ENOMEM EDQUOT", """
        A handle to a named context of the caller's uid.  It moves into the caller's process; when another connection
        holds it, that is EBUSY.  With `fork` the handle is to a private copy and the context itself stays where it is.
        """, since=2),
    _call(32, "unlink", _CONTEXT, c.UnlinkArgs, c.Empty, "ENOENT", """
        Take a name away.  The context goes when nobody holds it: now, or when its connection ends.
        """, since=2),
    _call(33, "snapshot", _CONTEXT, c.SnapshotArgs, c.SnapshotResult, f"{_HANDLE} EBUSY ENOSPC EIO ENOSYS", """
        Write contexts into one file of the state directory, whole or not at all; an earlier snapshot of that name stays
        until the new one is complete.  A context that generates is EBUSY.  Without a state directory it is ENOSYS.
        """, since=2),
    _call(34, "restore", _CONTEXT, c.RestoreArgs, c.RestoreResult, "ENOENT ECORRUPT ENOMEM EDQUOT E2BIG EIO ENOSYS", """
        Make new contexts, in the caller's process, of those in a snapshot of the caller's uid: all or none.  A file
        that is damaged, or was made under another identity (`field` names what differs), is ECORRUPT.
        """, since=2),
    _call(35, "names", _CONTEXT, c.NamesArgs, c.NamesResult, "E2BIG", """
        The named and detached contexts of the caller's uid, by name, and who holds them.
        """, since=2),
    _call(36, "detach", _CONTEXT, c.CtxArgs, c.Empty, f"{_HANDLE} ENOSPC EIO", """
        Let a context outlive its connection without a name: the same session takes it over with `hello`, anybody of the
        uid with `open` by cid.  ENOSPC, EIO: as `publish`.
        """, since=2),
    _call(37, "read", _CONTEXT, c.ReadArgs, c.ReadResult, f"{_HANDLE} ENOENT EACCES E2BIG", """
        The tokens of a context's log and, where there is a tokenizer, the bytes that they stand for.  Changes nothing.
        """, since=4),
    _call(40, "generate", _COMPUTE, c.GenerateArgs, c.GenerateResult,
          f"{_HANDLE} EBUSY E2BIG EAGAIN ENOMEM EDQUOT ENODEV EIO EHOSTDOWN ENOSYS", """
        Sample up to `max_tokens` tokens into the context.  With `stream`, notifications of kind `tokens` carry token ids
        and text that is always valid UTF-8 and never shows any part of a stop string; the reply carries the whole
        again.  Ends with a reason: `stop`, `length` (also at the window), `cancelled` or `killed`; on a named or detached
        context also `suspended`, when the system goes down: `reattach` goes on with it.  Once the first token is out it never ends in an errno.  A context that generates refuses other writers with EBUSY.  Stop strings
        need a tokenizer (ENOSYS without one).  `tpot_ms` limits how long prompts may make the passes that it decodes in;
        under `sched.policy` `deadline` a generation that would miss a target is EAGAIN with `retry_after_ms`.
        """),
    _call(41, "forward", _COMPUTE, c.ForwardArgs, c.ForwardResult, f"{_HANDLE} EBUSY E2BIG EDQUOT ENOMEM ENODEV EIO EHOSTDOWN", """
        The `top_k` most likely next tokens and their log-probabilities; the context stays as it is.  With `allowed` they
        are the most likely among the tokens that it names, and their log-probabilities are what they are without it.
        `tokens` are appended first, and are computed in the pass that answers.
        Beam search, constrained decoding and speculation are programs over this.
        """),
    _call(42, "score", _COMPUTE, c.ScoreArgs, c.ScoreResult, f"{_HANDLE} EBUSY E2BIG EDQUOT ENOMEM ENODEV EIO EHOSTDOWN", """
        The log-probability of each of `tokens` as the continuation of the context, which stays as it is.
        """),
    _call(43, "cancel", _COMPUTE, c.CancelArgs, c.Empty, "ENOENT", """
        End a request outstanding on this connection.  A generation ends with reason `cancelled` and keeps its tokens;
        forward, score and wait end with ECANCELED.  The request's own reply comes once in any case.
        """),
    _call(44, "inject", _COMPUTE, c.InjectArgs, c.InjectResult, f"{_HANDLE} ENOENT EACCES EBUSY E2BIG ENOSYS EIO EHOSTDOWN", """
        Deliver tokens into a running generation, an interrupt: they stand in the log behind the token of the pass in
        flight, and everything sampled after that has seen them.  The generation goes on as it was asked for; its result
        says where they stand.  Without a generation it is EBUSY when the context waits or computes something else, and
        like `append` when it is idle.
        """, since=3),
    _call(45, "reattach", _COMPUTE, c.ReattachArgs, c.GenerateResult,
          f"{_HANDLE} ENOENT EBUSY E2BIG EDQUOT ENOMEM ENODEV EIO EHOSTDOWN", """
        Go on with a generation on a named or detached context that lost its client, or the daemon under it.  `tokens`
        is what the caller has of it; the stream goes on behind them, and the reply carries the whole.  What the system
        has must agree with them (EINVAL names the first that differs); where the daemon died before it wrote them
        down, they are taken as they are, and the rest is sampled with the same seed at the same positions.  One that
        has ended is answered at once, until something else is done with the context.  Log-probabilities of tokens
        from before a crash are not known any more.  Without such a generation it is ENOENT; one that another request
        waits for is EBUSY.
        """, since=2),
    _call(50, "wait_tool", _WAITING, c.WaitToolArgs, c.WaitToolResult, f"{_HANDLE} EBUSY", """
        The context waits for a tool: it takes no part in scheduling, and its KV is kept, demoted or dropped by what it costs
        until the answer is expected, `eta_ms` from now or when this tool has usually answered.  Before that it is brought
        back.  Answers at once.  The wait ends by `resume`, or at its deadline: then the context is as before the call,
        and a notification of kind `wait` says so.
        """, since=3),
    _call(51, "resume", _WAITING, c.ResumeArgs, c.ResumeResult, f"{_HANDLE} ENOENT EACCES E2BIG ENOMEM EDQUOT ENOSYS EIO EHOSTDOWN", """
        End a wait with the tool's answer, which is appended.  A wait that has ended already (answered, past its deadline,
        from before a restart) is ESTALE, and nothing is appended; a context that never waited is EINVAL.  `more` as of `append`.
        """, since=3),
    _call(52, "pressure", _WAITING, c.PressureArgs, c.PressureResult, "", """
        How short frames are: the share of time in which some, or all, of the contexts with work waited for frames; to one of
        several users, of its own.  With a threshold this connection is told (`pressure`) when a window goes above it.
        """, since=3),
    _call(60, "pin", _MEMORY, c.PinArgs, c.Empty, f"{_HANDLE} ENOENT EACCES EBUSY ENOMEM EDQUOT EAGAIN ENODEV EHOSTDOWN", """
        Keep a context's blocks in hbm until `unpin` or for `duration_ms`, within the share of the pool that sysctl allows
        (EDQUOT).
        """, since=2),
    _call(61, "unpin", _MEMORY, c.LookArgs, c.Empty, f"{_HANDLE} EACCES EBUSY ENOENT", """
        End a `pin`.
        """, since=2),
    _call(62, "advise", _MEMORY, c.AdviseArgs, c.Empty, f"{_HANDLE} ENOENT EACCES EBUSY", """
        Say what is known about the future of a range of tokens: `willneed` brings it up, `dontneed` makes it the first to
        go, `cold` lowers and `normal` restores what eviction thinks of it, `priority` ranks it.  Advice never changes a
        result.
        """, since=2),
    _call(63, "prefetch", _MEMORY, c.PrefetchArgs, c.MovedResult, f"{_HANDLE} EACCES EBUSY ENOENT ENOMEM ENODEV ETIMEDOUT EHOSTDOWN EIO", """
        Bring a context's blocks up to `tier` and answer when they are there.  It never delays a load that somebody waits
        for; past its deadline it is ETIMEDOUT and what has come stays.
        """, since=2),
    _call(64, "demote", _MEMORY, c.DemoteArgs, c.MovedResult, f"{_HANDLE} EACCES EBUSY ENOENT ENOMEM ENODEV ENOSPC EHOSTDOWN EIO ETIMEDOUT", """
        Copy a context's blocks down to `tier` and give their faster frames back.  Nothing is lost, and the context may be
        used at any time.
        """, since=2),
    _call(65, "evict", _MEMORY, c.LookArgs, c.MovedResult, f"{_HANDLE} ENOENT EACCES EBUSY", """
        Give a context's frames back in every tier, without copying anything: it is computed again when it is used.
        """, since=2),
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
    _call(84, "trace", _SYSTEM, c.TraceArgs, c.Empty, "ENOENT EACCES", """
        Be told (`syscall`) of each system call of the connection that holds a process, with its answer and how long that took.
        Only of processes of the caller's uid.  A tracer that does not read loses notifications, and nobody waits for it.
        """, since=4),
    _call(85, "explain", _SYSTEM, c.ExplainArgs, c.ExplainResult, f"{_HANDLE} ENOENT EACCES E2BIG", """
        Why something was evicted, kept, loaded, missed or computed again: the decisions about one context or block, with
        the numbers that decided, oldest first.
        """, since=2),
    _call(86, "dmesg", _SYSTEM, c.DmesgArgs, c.DmesgResult, "EACCES", """
        The kernel's log after entry number `since`, oldest first.  While several uids are served only the daemon's own user
        may read it (EACCES).
        """),
    _call(87, "fsck", _SYSTEM, c.Empty, c.FsckResult, "EACCES", """
        Check every invariant of DESIGN.md §3 now, and name the ones that do not hold.
        """),
    _call(88, "attach_tier", _SYSTEM, c.AttachTierArgs, c.AttachTierResult,
          "EACCES EEXIST ENODEV ENOMEM ENOSPC EIO EHOSTDOWN ETIMEDOUT EBUSY ENOSYS", """
        Start the driver of another tier and use it, while serving.  Answers when the driver is up.
        """, since=2),
    _call(89, "detach_tier", _SYSTEM, c.DetachTierArgs, c.Empty, "EACCES ENODEV EBUSY EIO EHOSTDOWN ETIMEDOUT ENOSPC ENOSYS", """
        Drain a tier and stop its driver.  What has no copy elsewhere moves first, or is computed again when it is used.
        """, since=2),
    _call(90, "shutdown", _SYSTEM, c.Empty, c.Empty, "EACCES", """
        Stop the system: this call is answered, what is outstanding elsewhere ends (`killed` or ECANCELED; `suspended`
        on named and detached contexts), drivers stop.
        """),
    _call(91, "sleep", _SYSTEM, c.Empty, c.Empty, "EACCES EBUSY ENOMEM ENODEV ENOSPC EIO EHOSTDOWN ETIMEDOUT ENOSYS", """
        Give all of hbm back and keep every context in the other tiers; what runs waits until `wake`.
        """, since=2),
    _call(92, "wake", _SYSTEM, c.Empty, c.Empty, "EACCES EBUSY ENOMEM ENODEV EIO EHOSTDOWN ETIMEDOUT ENOSYS", """
        End a `sleep`: take hbm again and go on.
        """, since=2),
    _call(93, "health", _SYSTEM, c.HealthArgs, c.HealthResult, "", """
        What a diagnosis needs beside `vmstat`, `tiers` and `ps`: the counters of the last two minutes, how recent prompts began
        (to their own uid only), how fast links were at first, how right etas were, who holds the frames, which policies lost
        their places, and which drivers died.  While several uids are served, only the daemon's own user is told more than its own
        prompts.
        """, since=4),
    _call(94, "frames", _SYSTEM, c.FramesArgs, c.FramesResult, "ENODEV", """
        The frames of a device, so many from `start` on: state, the oldest context that has the content, how many share it, how long
        ago somebody wanted it, and the block's number.  Of other uids' frames only their own user and the daemon's are told more
        than that they are taken.
        """, since=4),
)  # fmt: skip

BY_NUMBER: Final = {call.number: call for call in CALLS}
BY_NAME: Final = {call.name: call for call in CALLS}
assert len(BY_NUMBER) == len(BY_NAME) == len(CALLS)

RESERVED: Final[dict[int, str]] = {24: "cut", 28: "map", 29: "unmap"}
assert not RESERVED.keys() & BY_NUMBER.keys()

NOTIFICATIONS: Final[dict[str, type[Record]]] = {
    "tokens": c.TokensNote,
    "wait": c.WaitNote,
    "pressure": c.PressureNote,
    "oom": c.OomNote,
    "syscall": c.SyscallNote,
}
