"""A typed method for every system call.  Made by `python -m attnix.syscalls.docgen`; do not edit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from attnix.kernel.calls import (
    AdviseArgs,
    AllocContextArgs,
    AllocContextResult,
    AppendArgs,
    AppendResult,
    AttachTierArgs,
    AttachTierResult,
    CancelArgs,
    ContextRow,
    CtxArgs,
    DemoteArgs,
    DetachTierArgs,
    DmesgArgs,
    DmesgResult,
    Empty,
    ExitArgs,
    ExplainArgs,
    ExplainResult,
    ForkArgs,
    ForkResult,
    ForwardArgs,
    ForwardResult,
    FramesArgs,
    FramesResult,
    FsckResult,
    GenerateArgs,
    GenerateResult,
    GetrusageArgs,
    GroupRow,
    GroupsArgs,
    GroupsResult,
    HealthArgs,
    HealthResult,
    HelloArgs,
    HelloResult,
    InjectArgs,
    InjectResult,
    KillArgs,
    LookArgs,
    Message,
    MovedResult,
    NamesArgs,
    NamesResult,
    OpenArgs,
    OpenResult,
    PagemapResult,
    PinArgs,
    PrefetchArgs,
    PressureArgs,
    PressureResult,
    PsArgs,
    PsResult,
    PublishArgs,
    ReadArgs,
    ReadResult,
    ReattachArgs,
    RestoreArgs,
    RestoreResult,
    ResumeArgs,
    ResumeResult,
    ScoreArgs,
    ScoreResult,
    SetlimitArgs,
    SetpriorityArgs,
    SnapshotArgs,
    SnapshotResult,
    SpawnArgs,
    SpawnResult,
    SysctlArgs,
    SysctlResult,
    TiersResult,
    TraceArgs,
    TruncateArgs,
    TruncateResult,
    UnameResult,
    UnlinkArgs,
    Usage,
    VmstatResult,
    WaitArgs,
    WaitResult,
    WaitToolArgs,
    WaitToolResult,
)

from .abi import Record

R = TypeVar("R", bound=tuple[Any, ...])


class SyncPlainCalls(ABC):
    """The blocking calls whose results need no object around them."""

    @abstractmethod
    def _invoke(self, name: str, args: Record, result: type[R]) -> R: ...

    def hello(self, client: str, version: int, session: str = "") -> HelloResult:
        """Say who is calling and which ABI version it speaks; learn the server's, and the uid that the socket proved.
        It gives the connection its own process, named `client`; calls that need one are EINVAL before it, calls
        that only look work without it. Once per connection (EEXIST). A version that this server does not speak is
        EINVAL. The result carries a session token, which is a secret. A later connection that gives it back as
        `session` takes over the session's named and detached contexts, in its own new process and under new
        handles, also after the daemon died and came back. A token that nobody was given, or another uid's, or one
        whose session kept nothing is EACCES; one whose connection still lives is EBUSY.
        """
        return self._invoke("hello", HelloArgs(client, version, session), HelloResult)

    def exit(self, pid: int = 0, code: int = 0) -> None:
        """End a process of this connection with an exit code. Its contexts are released, its generations end with
        reason `killed`, and it stays a zombie until its parent waits for it.
        """
        self._invoke("exit", ExitArgs(pid, code), Empty)

    def kill(self, pid: int, signal: int = 15) -> None:
        """Send a signal: SIGSTOP (19) takes a process off the device until SIGCONT (18); SIGTERM (15) and SIGKILL (9)
        end it, release its contexts and end its generations with reason `killed`. Only processes of the caller's
        uid.
        """
        self._invoke("kill", KillArgs(pid, signal), Empty)

    def wait(self, pid: int = 0, timeout_ms: int = -1) -> WaitResult:
        """Wait until a child process has ended, take its exit code and usage, and let its pid go. `timeout_ms` of 0
        only looks and is EAGAIN when none has ended; no child at all is ENOENT.
        """
        return self._invoke("wait", WaitArgs(pid, timeout_ms), WaitResult)

    def ps(self, pid: int = 0) -> PsResult:
        """List processes with their contexts, or one process. Shows what the caller's uid may see. Memory is counted
        twice: `kv_bytes` is all live KV, `proportional_bytes` divides each shared frame by its sharers.
        """
        return self._invoke("ps", PsArgs(pid), PsResult)

    def getrusage(self, pid: int = 0) -> Usage:
        """What a process has cost so far, its released contexts included."""
        return self._invoke("getrusage", GetrusageArgs(pid), Usage)

    def setpriority(self, pid: int, nice: int, oom_score_adj: int = -1001) -> None:
        """Set the nice value of a process, from -20 (first) to 19 (last), and how willingly it is ended when memory
        runs out, from -1000 (never) to 1000 (first). Below 0 only by the daemon's own user.
        """
        self._invoke("setpriority", SetpriorityArgs(pid, nice, oom_score_adj), Empty)

    def setlimit(self, group: str, resource: str, soft: int = -1, hard: int = -1) -> GroupRow:
        """Set a limit of a group, or its weight; the result is the group as it is then. `hard` is never exceeded,
        `soft` is what no other group can take away. A uid's own group is set by the daemon's user, its sub-groups
        by the uid, within what the uid has; one that is not there yet is made. A limit below what the group has
        makes it give up what is idle; when that is not enough, nothing changes (EBUSY says what it uses).
        """
        return self._invoke("setlimit", SetlimitArgs(group, resource, soft, hard), GroupRow)

    def groups(self, name: str = "") -> GroupsResult:
        """Groups with their limits and what they use: each frame is charged to one group, the one whose context first
        needed it.
        """
        return self._invoke("groups", GroupsArgs(name), GroupsResult)

    def fork(self, ctx: int, n: int = 1) -> ForkResult:
        """Make `n` contexts with the same log, all or none. Full blocks are shared and the partial tail is copied when
        somebody writes to it, so a fork costs page-table entries, not KV.
        """
        return self._invoke("fork", ForkArgs(ctx, n), ForkResult)

    def append(
        self, ctx: int, tokens: bytes = b"", text: str = "", messages: tuple[Message, ...] = (), more: bool = False
    ) -> AppendResult:
        """Add tokens to a context's log and start computing them; the answer does not wait for the computation. With
        `more` nothing starts before the next call on the context, which computes them in the same pass as its own
        answer. Exactly one of `tokens`, `text` (tokenized as plain text: nothing in it can become a special token)
        and `messages` (the model's chat template, continuing the messages appended and generated so far). Past the
        window is E2BIG with both numbers. Without a tokenizer, `text` and `messages` are ENOSYS; EIO says the text
        worker could not do it.
        """
        return self._invoke("append", AppendArgs(ctx, tokens, text, messages, more), AppendResult)

    def truncate(self, ctx: int, length: int) -> TruncateResult:
        """Cut the log to its first `length` tokens. Whole blocks past the cut are let go, and a block that others
        share is not touched.
        """
        return self._invoke("truncate", TruncateArgs(ctx, length), TruncateResult)

    def release(self, ctx: int) -> None:
        """Give a context back. Its full blocks stay as cache until their frames are needed, what still runs on it is
        cancelled, and the handle is stale from now on.
        """
        self._invoke("release", CtxArgs(ctx), Empty)

    def stat(self, ctx: int = 0, cid: int = 0) -> ContextRow:
        """One context's state, size, sharing and usage, named by handle or, from any connection of its uid, by cid."""
        return self._invoke("stat", LookArgs(ctx, cid), ContextRow)

    def pagemap(self, ctx: int = 0, cid: int = 0) -> PagemapResult:
        """One context's page table as arrays, an entry per logical block: frame, shift, count, sharers, flags, hits."""
        return self._invoke("pagemap", LookArgs(ctx, cid), PagemapResult)

    def publish(self, ctx: int, name: str, replace: bool = False) -> None:
        """Give a context a name within the caller's uid, or another one. From now on it outlives its connection, its
        process and the daemon: its tokens are journaled, and its KV is found again by key or computed again. A
        generation on it goes on without its client. A name that another context has is EEXIST, or with `replace`
        taken from it; that one goes when nobody holds it. It is answered when it is on record; while the journal
        cannot be written it is ENOSPC (the disk is full) or EIO, and the context has no name.
        """
        self._invoke("publish", PublishArgs(ctx, name, replace), Empty)

    def unlink(self, name: str) -> None:
        """Take a name away. The context goes when nobody holds it: now, or when its connection ends."""
        self._invoke("unlink", UnlinkArgs(name), Empty)

    def names(self, prefix: str = "") -> NamesResult:
        """The named and detached contexts of the caller's uid, by name, and who holds them."""
        return self._invoke("names", NamesArgs(prefix), NamesResult)

    def detach(self, ctx: int) -> None:
        """Let a context outlive its connection without a name: the same session takes it over with `hello`, anybody of
        the uid with `open` by cid. ENOSPC, EIO: as `publish`.
        """
        self._invoke("detach", CtxArgs(ctx), Empty)

    def read(self, ctx: int = 0, cid: int = 0, start: int = 0, end: int = -1) -> ReadResult:
        """The tokens of a context's log and, where there is a tokenizer, the bytes that they stand for. Changes
        nothing.
        """
        return self._invoke("read", ReadArgs(ctx, cid, start, end), ReadResult)

    def generate(
        self,
        ctx: int,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logprobs: int = 0,
        stop: tuple[str, ...] = (),
        stop_tokens: bytes = b"",
        ignore_eos: bool = False,
        stream: bool = True,
        ttft_ms: int = 0,
        tpot_ms: int = 0,
    ) -> GenerateResult:
        """Sample up to `max_tokens` tokens into the context. With `stream`, notifications of kind `tokens` carry token
        ids and text that is always valid UTF-8 and never shows any part of a stop string; the reply carries the
        whole again. Ends with a reason: `stop`, `length` (also at the window), `cancelled` or `killed`; on a named
        or detached context also `suspended`, when the system goes down: `reattach` goes on with it. Once the first
        token is out it never ends in an errno. A context that generates refuses other writers with EBUSY. Stop
        strings need a tokenizer (ENOSYS without one). `tpot_ms` limits how long prompts may make the passes that it
        decodes in; under `sched.policy` `deadline` a generation that would miss a target is EAGAIN with
        `retry_after_ms`.
        """
        args = GenerateArgs(
            ctx,
            max_tokens,
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logprobs,
            stop,
            stop_tokens,
            ignore_eos,
            stream,
            ttft_ms,
            tpot_ms,
        )
        return self._invoke("generate", args, GenerateResult)

    def forward(self, ctx: int, top_k: int = 20, allowed: bytes = b"", tokens: bytes = b"") -> ForwardResult:
        """The `top_k` most likely next tokens and their log-probabilities; the context stays as it is. With `allowed`
        they are the most likely among the tokens that it names, and their log-probabilities are what they are
        without it. `tokens` are appended first, and are computed in the pass that answers. Beam search, constrained
        decoding and speculation are programs over this.
        """
        return self._invoke("forward", ForwardArgs(ctx, top_k, allowed, tokens), ForwardResult)

    def score(self, ctx: int, tokens: bytes) -> ScoreResult:
        """The log-probability of each of `tokens` as the continuation of the context, which stays as it is."""
        return self._invoke("score", ScoreArgs(ctx, tokens), ScoreResult)

    def cancel(self, request: int) -> None:
        """End a request outstanding on this connection. A generation ends with reason `cancelled` and keeps its
        tokens; forward, score and wait end with ECANCELED. The request's own reply comes once in any case.
        """
        self._invoke("cancel", CancelArgs(request), Empty)

    def inject(self, ctx: int, tokens: bytes = b"", text: str = "", cid: int = 0) -> InjectResult:
        """Deliver tokens into a running generation, an interrupt: they stand in the log behind the token of the pass
        in flight, and everything sampled after that has seen them. The generation goes on as it was asked for; its
        result says where they stand. Without a generation it is EBUSY when the context waits or computes something
        else, and like `append` when it is idle.
        """
        return self._invoke("inject", InjectArgs(ctx, tokens, text, cid), InjectResult)

    def reattach(self, ctx: int, tokens: bytes = b"", stream: bool = True) -> GenerateResult:
        """Go on with a generation on a named or detached context that lost its client, or the daemon under it.
        `tokens` is what the caller has of it; the stream goes on behind them, and the reply carries the whole. What
        the system has must agree with them (EINVAL names the first that differs); where the daemon died before it
        wrote them down, they are taken as they are, and the rest is sampled with the same seed at the same
        positions. One that has ended is answered at once, until something else is done with the context. Log-
        probabilities of tokens from before a crash are not known any more. Without such a generation it is ENOENT;
        one that another request waits for is EBUSY.
        """
        return self._invoke("reattach", ReattachArgs(ctx, tokens, stream), GenerateResult)

    def wait_tool(self, ctx: int, tool: str, eta_ms: int = -1, deadline_ms: int = -1) -> WaitToolResult:
        """The context waits for a tool: it takes no part in scheduling, and its KV is kept, demoted or dropped by what
        it costs until the answer is expected, `eta_ms` from now or when this tool has usually answered. Before that
        it is brought back. Answers at once. The wait ends by `resume`, or at its deadline: then the context is as
        before the call, and a notification of kind `wait` says so.
        """
        return self._invoke("wait_tool", WaitToolArgs(ctx, tool, eta_ms, deadline_ms), WaitToolResult)

    def resume(
        self,
        ctx: int,
        wait: int = 0,
        tokens: bytes = b"",
        text: str = "",
        messages: tuple[Message, ...] = (),
        cid: int = 0,
        more: bool = False,
    ) -> ResumeResult:
        """End a wait with the tool's answer, which is appended. A wait that has ended already (answered, past its
        deadline, from before a restart) is ESTALE, and nothing is appended; a context that never waited is EINVAL.
        `more` as of `append`.
        """
        return self._invoke("resume", ResumeArgs(ctx, wait, tokens, text, messages, cid, more), ResumeResult)

    def pressure(self, threshold_permille: int = -1, window_ms: int = 2000) -> PressureResult:
        """How short frames are: the share of time in which some, or all, of the contexts with work waited for frames;
        to one of several users, of its own. With a threshold this connection is told (`pressure`) when a window
        goes above it.
        """
        return self._invoke("pressure", PressureArgs(threshold_permille, window_ms), PressureResult)

    def pin(self, ctx: int, duration_ms: int = 0, cid: int = 0) -> None:
        """Keep a context's blocks in hbm until `unpin` or for `duration_ms`, within the share of the pool that sysctl
        allows (EDQUOT).
        """
        self._invoke("pin", PinArgs(ctx, duration_ms, cid), Empty)

    def unpin(self, ctx: int = 0, cid: int = 0) -> None:
        """End a `pin`."""
        self._invoke("unpin", LookArgs(ctx, cid), Empty)

    def advise(
        self,
        ctx: int,
        advice: str,
        start: int = 0,
        end: int = -1,
        priority: int = 50,
        duration_ms: int = 0,
        cid: int = 0,
    ) -> None:
        """Say what is known about the future of a range of tokens: `willneed` brings it up, `dontneed` makes it the
        first to go, `cold` lowers and `normal` restores what eviction thinks of it, `priority` ranks it. Advice
        never changes a result.
        """
        self._invoke("advise", AdviseArgs(ctx, advice, start, end, priority, duration_ms, cid), Empty)

    def prefetch(self, ctx: int, tier: str = "hbm", deadline_ms: int = 0, cid: int = 0) -> MovedResult:
        """Bring a context's blocks up to `tier` and answer when they are there. It never delays a load that somebody
        waits for; past its deadline it is ETIMEDOUT and what has come stays.
        """
        return self._invoke("prefetch", PrefetchArgs(ctx, tier, deadline_ms, cid), MovedResult)

    def demote(self, ctx: int, tier: str = "dram", cid: int = 0) -> MovedResult:
        """Copy a context's blocks down to `tier` and give their faster frames back. Nothing is lost, and the context
        may be used at any time.
        """
        return self._invoke("demote", DemoteArgs(ctx, tier, cid), MovedResult)

    def evict(self, ctx: int = 0, cid: int = 0) -> MovedResult:
        """Give a context's frames back in every tier, without copying anything: it is computed again when it is used."""
        return self._invoke("evict", LookArgs(ctx, cid), MovedResult)

    def uname(self) -> UnameResult:
        """What runs here: versions, model, fingerprint, geometry, numerics, devices, and where the tokenizer file is
        for clients that tokenize themselves.
        """
        return self._invoke("uname", Empty(), UnameResult)

    def tiers(self) -> TiersResult:
        """Every memory device: its state, epoch, driver, and its frames by what they are used for."""
        return self._invoke("tiers", Empty(), TiersResult)

    def vmstat(self) -> VmstatResult:
        """Counters since boot, by name."""
        return self._invoke("vmstat", Empty(), VmstatResult)

    def sysctl(self, name: str = "", value: str | int | float | None = None) -> SysctlResult:
        """Read a tunable by name, list those under a prefix that ends in a dot (or all, with the empty name), or set
        one.
        """
        return self._invoke("sysctl", SysctlArgs(name, value), SysctlResult)

    def trace(self, pid: int, what: str = "syscalls") -> None:
        """Be told (`syscall`) of each system call of the connection that holds a process, with its answer and how long
        that took. Only of processes of the caller's uid. A tracer that does not read loses notifications, and
        nobody waits for it.
        """
        self._invoke("trace", TraceArgs(pid, what), Empty)

    def explain(self, ctx: int = 0, cid: int = 0, block: int = -1) -> ExplainResult:
        """Why something was evicted, kept, loaded, missed or computed again: the decisions about one context or block,
        with the numbers that decided, oldest first.
        """
        return self._invoke("explain", ExplainArgs(ctx, cid, block), ExplainResult)

    def dmesg(self, since: int = 0) -> DmesgResult:
        """The kernel's log after entry number `since`, oldest first. While several uids are served only the daemon's
        own user may read it (EACCES).
        """
        return self._invoke("dmesg", DmesgArgs(since), DmesgResult)

    def fsck(self) -> FsckResult:
        """Check every invariant of DESIGN.md §3 now, and name the ones that do not hold."""
        return self._invoke("fsck", Empty(), FsckResult)

    def attach_tier(self, kind: str, size_bytes: int, settings: str = "{}") -> AttachTierResult:
        """Start the driver of another tier and use it, while serving. Answers when the driver is up."""
        return self._invoke("attach_tier", AttachTierArgs(kind, size_bytes, settings), AttachTierResult)

    def detach_tier(self, device: str) -> None:
        """Drain a tier and stop its driver. What has no copy elsewhere moves first, or is computed again when it is
        used.
        """
        self._invoke("detach_tier", DetachTierArgs(device), Empty)

    def shutdown(self) -> None:
        """Stop the system: this call is answered, what is outstanding elsewhere ends (`killed` or ECANCELED;
        `suspended` on named and detached contexts), drivers stop.
        """
        self._invoke("shutdown", Empty(), Empty)

    def sleep(self) -> None:
        """Give all of hbm back and keep every context in the other tiers; what runs waits until `wake`."""
        self._invoke("sleep", Empty(), Empty)

    def wake(self) -> None:
        """End a `sleep`: take hbm again and go on."""
        self._invoke("wake", Empty(), Empty)

    def health(self, heads: int = 64) -> HealthResult:
        """What a diagnosis needs beside `vmstat`, `tiers` and `ps`: the counters of the last two minutes, how recent
        prompts began (to their own uid only), how fast links were at first, how right etas were, who holds the
        frames, which policies lost their places, and which drivers died. While several uids are served, only the
        daemon's own user is told more than its own prompts.
        """
        return self._invoke("health", HealthArgs(heads), HealthResult)

    def frames(self, device: str, start: int = 0, most: int = 16384) -> FramesResult:
        """The frames of a device, so many from `start` on: state, the oldest context that has the content, how many
        share it, how long ago somebody wanted it, and the block's number. Of other uids' frames only their own user
        and the daemon's are told more than that they are taken.
        """
        return self._invoke("frames", FramesArgs(device, start, most), FramesResult)


class SyncCalls(SyncPlainCalls):
    """Every system call, blocking, on bare handles."""

    def spawn(self, name: str = "", nice: int = 0, fork_of: int = 0, group: str = "", domain: str = "") -> SpawnResult:
        """Make a child process of the connection's own. With `fork_of` it starts with a fork of that context, and the
        result names the child's context by handle and by cid. `group` puts it into a sub-group of the caller's uid,
        and `domain` has it share prefixes with that domain; both go to its children.
        """
        return self._invoke("spawn", SpawnArgs(name, nice, fork_of, group, domain), SpawnResult)

    def alloc_context(self, pid: int = 0, device: str = "", domain: str = "") -> AllocContextResult:
        """Make an empty context in a process. The handle is valid on this connection only; the cid names it in `ps`
        and to calls that only look. It takes no frames until something is appended.
        """
        return self._invoke("alloc_context", AllocContextArgs(pid, device, domain), AllocContextResult)

    def open(self, name: str = "", fork: bool = False, cid: int = 0) -> OpenResult:
        """A handle to a named context of the caller's uid. It moves into the caller's process; when another connection
        holds it, that is EBUSY. With `fork` the handle is to a private copy and the context itself stays where it
        is.
        """
        return self._invoke("open", OpenArgs(name, fork, cid), OpenResult)

    def snapshot(self, name: str, ctxs: tuple[int, ...]) -> SnapshotResult:
        """Write contexts into one file of the state directory, whole or not at all; an earlier snapshot of that name
        stays until the new one is complete. A context that generates is EBUSY. Without a state directory it is
        ENOSYS.
        """
        return self._invoke("snapshot", SnapshotArgs(name, ctxs), SnapshotResult)

    def restore(self, name: str) -> RestoreResult:
        """Make new contexts, in the caller's process, of those in a snapshot of the caller's uid: all or none. A file
        that is damaged, or was made under another identity (`field` names what differs), is ECORRUPT.
        """
        return self._invoke("restore", RestoreArgs(name), RestoreResult)


class AsyncPlainCalls(ABC):
    """The asynchronous calls whose results need no object around them."""

    @abstractmethod
    async def _invoke(self, name: str, args: Record, result: type[R]) -> R: ...

    async def hello(self, client: str, version: int, session: str = "") -> HelloResult:
        """Say who is calling and which ABI version it speaks; learn the server's, and the uid that the socket proved.
        It gives the connection its own process, named `client`; calls that need one are EINVAL before it, calls
        that only look work without it. Once per connection (EEXIST). A version that this server does not speak is
        EINVAL. The result carries a session token, which is a secret. A later connection that gives it back as
        `session` takes over the session's named and detached contexts, in its own new process and under new
        handles, also after the daemon died and came back. A token that nobody was given, or another uid's, or one
        whose session kept nothing is EACCES; one whose connection still lives is EBUSY.
        """
        return await self._invoke("hello", HelloArgs(client, version, session), HelloResult)

    async def exit(self, pid: int = 0, code: int = 0) -> None:
        """End a process of this connection with an exit code. Its contexts are released, its generations end with
        reason `killed`, and it stays a zombie until its parent waits for it.
        """
        await self._invoke("exit", ExitArgs(pid, code), Empty)

    async def kill(self, pid: int, signal: int = 15) -> None:
        """Send a signal: SIGSTOP (19) takes a process off the device until SIGCONT (18); SIGTERM (15) and SIGKILL (9)
        end it, release its contexts and end its generations with reason `killed`. Only processes of the caller's
        uid.
        """
        await self._invoke("kill", KillArgs(pid, signal), Empty)

    async def wait(self, pid: int = 0, timeout_ms: int = -1) -> WaitResult:
        """Wait until a child process has ended, take its exit code and usage, and let its pid go. `timeout_ms` of 0
        only looks and is EAGAIN when none has ended; no child at all is ENOENT.
        """
        return await self._invoke("wait", WaitArgs(pid, timeout_ms), WaitResult)

    async def ps(self, pid: int = 0) -> PsResult:
        """List processes with their contexts, or one process. Shows what the caller's uid may see. Memory is counted
        twice: `kv_bytes` is all live KV, `proportional_bytes` divides each shared frame by its sharers.
        """
        return await self._invoke("ps", PsArgs(pid), PsResult)

    async def getrusage(self, pid: int = 0) -> Usage:
        """What a process has cost so far, its released contexts included."""
        return await self._invoke("getrusage", GetrusageArgs(pid), Usage)

    async def setpriority(self, pid: int, nice: int, oom_score_adj: int = -1001) -> None:
        """Set the nice value of a process, from -20 (first) to 19 (last), and how willingly it is ended when memory
        runs out, from -1000 (never) to 1000 (first). Below 0 only by the daemon's own user.
        """
        await self._invoke("setpriority", SetpriorityArgs(pid, nice, oom_score_adj), Empty)

    async def setlimit(self, group: str, resource: str, soft: int = -1, hard: int = -1) -> GroupRow:
        """Set a limit of a group, or its weight; the result is the group as it is then. `hard` is never exceeded,
        `soft` is what no other group can take away. A uid's own group is set by the daemon's user, its sub-groups
        by the uid, within what the uid has; one that is not there yet is made. A limit below what the group has
        makes it give up what is idle; when that is not enough, nothing changes (EBUSY says what it uses).
        """
        return await self._invoke("setlimit", SetlimitArgs(group, resource, soft, hard), GroupRow)

    async def groups(self, name: str = "") -> GroupsResult:
        """Groups with their limits and what they use: each frame is charged to one group, the one whose context first
        needed it.
        """
        return await self._invoke("groups", GroupsArgs(name), GroupsResult)

    async def fork(self, ctx: int, n: int = 1) -> ForkResult:
        """Make `n` contexts with the same log, all or none. Full blocks are shared and the partial tail is copied when
        somebody writes to it, so a fork costs page-table entries, not KV.
        """
        return await self._invoke("fork", ForkArgs(ctx, n), ForkResult)

    async def append(
        self, ctx: int, tokens: bytes = b"", text: str = "", messages: tuple[Message, ...] = (), more: bool = False
    ) -> AppendResult:
        """Add tokens to a context's log and start computing them; the answer does not wait for the computation. With
        `more` nothing starts before the next call on the context, which computes them in the same pass as its own
        answer. Exactly one of `tokens`, `text` (tokenized as plain text: nothing in it can become a special token)
        and `messages` (the model's chat template, continuing the messages appended and generated so far). Past the
        window is E2BIG with both numbers. Without a tokenizer, `text` and `messages` are ENOSYS; EIO says the text
        worker could not do it.
        """
        return await self._invoke("append", AppendArgs(ctx, tokens, text, messages, more), AppendResult)

    async def truncate(self, ctx: int, length: int) -> TruncateResult:
        """Cut the log to its first `length` tokens. Whole blocks past the cut are let go, and a block that others
        share is not touched.
        """
        return await self._invoke("truncate", TruncateArgs(ctx, length), TruncateResult)

    async def release(self, ctx: int) -> None:
        """Give a context back. Its full blocks stay as cache until their frames are needed, what still runs on it is
        cancelled, and the handle is stale from now on.
        """
        await self._invoke("release", CtxArgs(ctx), Empty)

    async def stat(self, ctx: int = 0, cid: int = 0) -> ContextRow:
        """One context's state, size, sharing and usage, named by handle or, from any connection of its uid, by cid."""
        return await self._invoke("stat", LookArgs(ctx, cid), ContextRow)

    async def pagemap(self, ctx: int = 0, cid: int = 0) -> PagemapResult:
        """One context's page table as arrays, an entry per logical block: frame, shift, count, sharers, flags, hits."""
        return await self._invoke("pagemap", LookArgs(ctx, cid), PagemapResult)

    async def publish(self, ctx: int, name: str, replace: bool = False) -> None:
        """Give a context a name within the caller's uid, or another one. From now on it outlives its connection, its
        process and the daemon: its tokens are journaled, and its KV is found again by key or computed again. A
        generation on it goes on without its client. A name that another context has is EEXIST, or with `replace`
        taken from it; that one goes when nobody holds it. It is answered when it is on record; while the journal
        cannot be written it is ENOSPC (the disk is full) or EIO, and the context has no name.
        """
        await self._invoke("publish", PublishArgs(ctx, name, replace), Empty)

    async def unlink(self, name: str) -> None:
        """Take a name away. The context goes when nobody holds it: now, or when its connection ends."""
        await self._invoke("unlink", UnlinkArgs(name), Empty)

    async def names(self, prefix: str = "") -> NamesResult:
        """The named and detached contexts of the caller's uid, by name, and who holds them."""
        return await self._invoke("names", NamesArgs(prefix), NamesResult)

    async def detach(self, ctx: int) -> None:
        """Let a context outlive its connection without a name: the same session takes it over with `hello`, anybody of
        the uid with `open` by cid. ENOSPC, EIO: as `publish`.
        """
        await self._invoke("detach", CtxArgs(ctx), Empty)

    async def read(self, ctx: int = 0, cid: int = 0, start: int = 0, end: int = -1) -> ReadResult:
        """The tokens of a context's log and, where there is a tokenizer, the bytes that they stand for. Changes
        nothing.
        """
        return await self._invoke("read", ReadArgs(ctx, cid, start, end), ReadResult)

    async def generate(
        self,
        ctx: int,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logprobs: int = 0,
        stop: tuple[str, ...] = (),
        stop_tokens: bytes = b"",
        ignore_eos: bool = False,
        stream: bool = True,
        ttft_ms: int = 0,
        tpot_ms: int = 0,
    ) -> GenerateResult:
        """Sample up to `max_tokens` tokens into the context. With `stream`, notifications of kind `tokens` carry token
        ids and text that is always valid UTF-8 and never shows any part of a stop string; the reply carries the
        whole again. Ends with a reason: `stop`, `length` (also at the window), `cancelled` or `killed`; on a named
        or detached context also `suspended`, when the system goes down: `reattach` goes on with it. Once the first
        token is out it never ends in an errno. A context that generates refuses other writers with EBUSY. Stop
        strings need a tokenizer (ENOSYS without one). `tpot_ms` limits how long prompts may make the passes that it
        decodes in; under `sched.policy` `deadline` a generation that would miss a target is EAGAIN with
        `retry_after_ms`.
        """
        args = GenerateArgs(
            ctx,
            max_tokens,
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logprobs,
            stop,
            stop_tokens,
            ignore_eos,
            stream,
            ttft_ms,
            tpot_ms,
        )
        return await self._invoke("generate", args, GenerateResult)

    async def forward(self, ctx: int, top_k: int = 20, allowed: bytes = b"", tokens: bytes = b"") -> ForwardResult:
        """The `top_k` most likely next tokens and their log-probabilities; the context stays as it is. With `allowed`
        they are the most likely among the tokens that it names, and their log-probabilities are what they are
        without it. `tokens` are appended first, and are computed in the pass that answers. Beam search, constrained
        decoding and speculation are programs over this.
        """
        return await self._invoke("forward", ForwardArgs(ctx, top_k, allowed, tokens), ForwardResult)

    async def score(self, ctx: int, tokens: bytes) -> ScoreResult:
        """The log-probability of each of `tokens` as the continuation of the context, which stays as it is."""
        return await self._invoke("score", ScoreArgs(ctx, tokens), ScoreResult)

    async def cancel(self, request: int) -> None:
        """End a request outstanding on this connection. A generation ends with reason `cancelled` and keeps its
        tokens; forward, score and wait end with ECANCELED. The request's own reply comes once in any case.
        """
        await self._invoke("cancel", CancelArgs(request), Empty)

    async def inject(self, ctx: int, tokens: bytes = b"", text: str = "", cid: int = 0) -> InjectResult:
        """Deliver tokens into a running generation, an interrupt: they stand in the log behind the token of the pass
        in flight, and everything sampled after that has seen them. The generation goes on as it was asked for; its
        result says where they stand. Without a generation it is EBUSY when the context waits or computes something
        else, and like `append` when it is idle.
        """
        return await self._invoke("inject", InjectArgs(ctx, tokens, text, cid), InjectResult)

    async def reattach(self, ctx: int, tokens: bytes = b"", stream: bool = True) -> GenerateResult:
        """Go on with a generation on a named or detached context that lost its client, or the daemon under it.
        `tokens` is what the caller has of it; the stream goes on behind them, and the reply carries the whole. What
        the system has must agree with them (EINVAL names the first that differs); where the daemon died before it
        wrote them down, they are taken as they are, and the rest is sampled with the same seed at the same
        positions. One that has ended is answered at once, until something else is done with the context. Log-
        probabilities of tokens from before a crash are not known any more. Without such a generation it is ENOENT;
        one that another request waits for is EBUSY.
        """
        return await self._invoke("reattach", ReattachArgs(ctx, tokens, stream), GenerateResult)

    async def wait_tool(self, ctx: int, tool: str, eta_ms: int = -1, deadline_ms: int = -1) -> WaitToolResult:
        """The context waits for a tool: it takes no part in scheduling, and its KV is kept, demoted or dropped by what
        it costs until the answer is expected, `eta_ms` from now or when this tool has usually answered. Before that
        it is brought back. Answers at once. The wait ends by `resume`, or at its deadline: then the context is as
        before the call, and a notification of kind `wait` says so.
        """
        return await self._invoke("wait_tool", WaitToolArgs(ctx, tool, eta_ms, deadline_ms), WaitToolResult)

    async def resume(
        self,
        ctx: int,
        wait: int = 0,
        tokens: bytes = b"",
        text: str = "",
        messages: tuple[Message, ...] = (),
        cid: int = 0,
        more: bool = False,
    ) -> ResumeResult:
        """End a wait with the tool's answer, which is appended. A wait that has ended already (answered, past its
        deadline, from before a restart) is ESTALE, and nothing is appended; a context that never waited is EINVAL.
        `more` as of `append`.
        """
        return await self._invoke("resume", ResumeArgs(ctx, wait, tokens, text, messages, cid, more), ResumeResult)

    async def pressure(self, threshold_permille: int = -1, window_ms: int = 2000) -> PressureResult:
        """How short frames are: the share of time in which some, or all, of the contexts with work waited for frames;
        to one of several users, of its own. With a threshold this connection is told (`pressure`) when a window
        goes above it.
        """
        return await self._invoke("pressure", PressureArgs(threshold_permille, window_ms), PressureResult)

    async def pin(self, ctx: int, duration_ms: int = 0, cid: int = 0) -> None:
        """Keep a context's blocks in hbm until `unpin` or for `duration_ms`, within the share of the pool that sysctl
        allows (EDQUOT).
        """
        await self._invoke("pin", PinArgs(ctx, duration_ms, cid), Empty)

    async def unpin(self, ctx: int = 0, cid: int = 0) -> None:
        """End a `pin`."""
        await self._invoke("unpin", LookArgs(ctx, cid), Empty)

    async def advise(
        self,
        ctx: int,
        advice: str,
        start: int = 0,
        end: int = -1,
        priority: int = 50,
        duration_ms: int = 0,
        cid: int = 0,
    ) -> None:
        """Say what is known about the future of a range of tokens: `willneed` brings it up, `dontneed` makes it the
        first to go, `cold` lowers and `normal` restores what eviction thinks of it, `priority` ranks it. Advice
        never changes a result.
        """
        await self._invoke("advise", AdviseArgs(ctx, advice, start, end, priority, duration_ms, cid), Empty)

    async def prefetch(self, ctx: int, tier: str = "hbm", deadline_ms: int = 0, cid: int = 0) -> MovedResult:
        """Bring a context's blocks up to `tier` and answer when they are there. It never delays a load that somebody
        waits for; past its deadline it is ETIMEDOUT and what has come stays.
        """
        return await self._invoke("prefetch", PrefetchArgs(ctx, tier, deadline_ms, cid), MovedResult)

    async def demote(self, ctx: int, tier: str = "dram", cid: int = 0) -> MovedResult:
        """Copy a context's blocks down to `tier` and give their faster frames back. Nothing is lost, and the context
        may be used at any time.
        """
        return await self._invoke("demote", DemoteArgs(ctx, tier, cid), MovedResult)

    async def evict(self, ctx: int = 0, cid: int = 0) -> MovedResult:
        """Give a context's frames back in every tier, without copying anything: it is computed again when it is used."""
        return await self._invoke("evict", LookArgs(ctx, cid), MovedResult)

    async def uname(self) -> UnameResult:
        """What runs here: versions, model, fingerprint, geometry, numerics, devices, and where the tokenizer file is
        for clients that tokenize themselves.
        """
        return await self._invoke("uname", Empty(), UnameResult)

    async def tiers(self) -> TiersResult:
        """Every memory device: its state, epoch, driver, and its frames by what they are used for."""
        return await self._invoke("tiers", Empty(), TiersResult)

    async def vmstat(self) -> VmstatResult:
        """Counters since boot, by name."""
        return await self._invoke("vmstat", Empty(), VmstatResult)

    async def sysctl(self, name: str = "", value: str | int | float | None = None) -> SysctlResult:
        """Read a tunable by name, list those under a prefix that ends in a dot (or all, with the empty name), or set
        one.
        """
        return await self._invoke("sysctl", SysctlArgs(name, value), SysctlResult)

    async def trace(self, pid: int, what: str = "syscalls") -> None:
        """Be told (`syscall`) of each system call of the connection that holds a process, with its answer and how long
        that took. Only of processes of the caller's uid. A tracer that does not read loses notifications, and
        nobody waits for it.
        """
        await self._invoke("trace", TraceArgs(pid, what), Empty)

    async def explain(self, ctx: int = 0, cid: int = 0, block: int = -1) -> ExplainResult:
        """Why something was evicted, kept, loaded, missed or computed again: the decisions about one context or block,
        with the numbers that decided, oldest first.
        """
        return await self._invoke("explain", ExplainArgs(ctx, cid, block), ExplainResult)

    async def dmesg(self, since: int = 0) -> DmesgResult:
        """The kernel's log after entry number `since`, oldest first. While several uids are served only the daemon's
        own user may read it (EACCES).
        """
        return await self._invoke("dmesg", DmesgArgs(since), DmesgResult)

    async def fsck(self) -> FsckResult:
        """Check every invariant of DESIGN.md §3 now, and name the ones that do not hold."""
        return await self._invoke("fsck", Empty(), FsckResult)

    async def attach_tier(self, kind: str, size_bytes: int, settings: str = "{}") -> AttachTierResult:
        """Start the driver of another tier and use it, while serving. Answers when the driver is up."""
        return await self._invoke("attach_tier", AttachTierArgs(kind, size_bytes, settings), AttachTierResult)

    async def detach_tier(self, device: str) -> None:
        """Drain a tier and stop its driver. What has no copy elsewhere moves first, or is computed again when it is
        used.
        """
        await self._invoke("detach_tier", DetachTierArgs(device), Empty)

    async def shutdown(self) -> None:
        """Stop the system: this call is answered, what is outstanding elsewhere ends (`killed` or ECANCELED;
        `suspended` on named and detached contexts), drivers stop.
        """
        await self._invoke("shutdown", Empty(), Empty)

    async def sleep(self) -> None:
        """Give all of hbm back and keep every context in the other tiers; what runs waits until `wake`."""
        await self._invoke("sleep", Empty(), Empty)

    async def wake(self) -> None:
        """End a `sleep`: take hbm again and go on."""
        await self._invoke("wake", Empty(), Empty)

    async def health(self, heads: int = 64) -> HealthResult:
        """What a diagnosis needs beside `vmstat`, `tiers` and `ps`: the counters of the last two minutes, how recent
        prompts began (to their own uid only), how fast links were at first, how right etas were, who holds the
        frames, which policies lost their places, and which drivers died. While several uids are served, only the
        daemon's own user is told more than its own prompts.
        """
        return await self._invoke("health", HealthArgs(heads), HealthResult)

    async def frames(self, device: str, start: int = 0, most: int = 16384) -> FramesResult:
        """The frames of a device, so many from `start` on: state, the oldest context that has the content, how many
        share it, how long ago somebody wanted it, and the block's number. Of other uids' frames only their own user
        and the daemon's are told more than that they are taken.
        """
        return await self._invoke("frames", FramesArgs(device, start, most), FramesResult)


class AsyncCalls(AsyncPlainCalls):
    """Every system call, asynchronous, on bare handles."""

    async def spawn(
        self, name: str = "", nice: int = 0, fork_of: int = 0, group: str = "", domain: str = ""
    ) -> SpawnResult:
        """Make a child process of the connection's own. With `fork_of` it starts with a fork of that context, and the
        result names the child's context by handle and by cid. `group` puts it into a sub-group of the caller's uid,
        and `domain` has it share prefixes with that domain; both go to its children.
        """
        return await self._invoke("spawn", SpawnArgs(name, nice, fork_of, group, domain), SpawnResult)

    async def alloc_context(self, pid: int = 0, device: str = "", domain: str = "") -> AllocContextResult:
        """Make an empty context in a process. The handle is valid on this connection only; the cid names it in `ps`
        and to calls that only look. It takes no frames until something is appended.
        """
        return await self._invoke("alloc_context", AllocContextArgs(pid, device, domain), AllocContextResult)

    async def open(self, name: str = "", fork: bool = False, cid: int = 0) -> OpenResult:
        """A handle to a named context of the caller's uid. It moves into the caller's process; when another connection
        holds it, that is EBUSY. With `fork` the handle is to a private copy and the context itself stays where it
        is.
        """
        return await self._invoke("open", OpenArgs(name, fork, cid), OpenResult)

    async def snapshot(self, name: str, ctxs: tuple[int, ...]) -> SnapshotResult:
        """Write contexts into one file of the state directory, whole or not at all; an earlier snapshot of that name
        stays until the new one is complete. A context that generates is EBUSY. Without a state directory it is
        ENOSYS.
        """
        return await self._invoke("snapshot", SnapshotArgs(name, ctxs), SnapshotResult)

    async def restore(self, name: str) -> RestoreResult:
        """Make new contexts, in the caller's process, of those in a snapshot of the caller's uid: all or none. A file
        that is damaged, or was made under another identity (`field` names what differs), is ECORRUPT.
        """
        return await self._invoke("restore", RestoreArgs(name), RestoreResult)
