"""A typed method for every system call.  Made by `python -m attnix.syscalls.docgen`; do not edit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from attnix.kernel.calls import (
    AllocContextArgs,
    AllocContextResult,
    AppendArgs,
    AppendResult,
    CancelArgs,
    ContextRow,
    CtxArgs,
    DmesgArgs,
    DmesgResult,
    Empty,
    ExitArgs,
    ForkArgs,
    ForkResult,
    ForwardArgs,
    ForwardResult,
    FsckResult,
    GenerateArgs,
    GenerateResult,
    GetrusageArgs,
    HelloArgs,
    HelloResult,
    KillArgs,
    LookArgs,
    Message,
    PagemapResult,
    PsArgs,
    PsResult,
    ScoreArgs,
    ScoreResult,
    SetpriorityArgs,
    SpawnArgs,
    SpawnResult,
    SysctlArgs,
    SysctlResult,
    TiersResult,
    TruncateArgs,
    TruncateResult,
    UnameResult,
    Usage,
    VmstatResult,
    WaitArgs,
    WaitResult,
)

from .abi import Record

R = TypeVar("R", bound=tuple[Any, ...])


class SyncPlainCalls(ABC):
    """The blocking calls whose results need no object around them."""

    @abstractmethod
    def _invoke(self, name: str, args: Record, result: type[R]) -> R: ...

    def hello(self, client: str, version: int) -> HelloResult:
        """Say who is calling and which ABI version it speaks; learn the server's, and the uid that the socket proved.
        It gives the connection its own process, named `client`; calls that need one are EINVAL before it, calls
        that only look work without it. Once per connection (EEXIST). A version that this server does not speak is
        EINVAL.
        """
        return self._invoke("hello", HelloArgs(client, version), HelloResult)

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

    def setpriority(self, pid: int, nice: int) -> None:
        """Set the nice value of a process, from -20 (first) to 19 (last)."""
        self._invoke("setpriority", SetpriorityArgs(pid, nice), Empty)

    def fork(self, ctx: int, n: int = 1) -> ForkResult:
        """Make `n` contexts with the same log, all or none. Full blocks are shared and the partial tail is copied when
        somebody writes to it, so a fork costs page-table entries, not KV.
        """
        return self._invoke("fork", ForkArgs(ctx, n), ForkResult)

    def append(self, ctx: int, tokens: bytes = b"", text: str = "", messages: tuple[Message, ...] = ()) -> AppendResult:
        """Add tokens to a context's log and start computing them; the answer does not wait for the computation.
        Exactly one of `tokens`, `text` (tokenized as plain text: nothing in it can become a special token) and
        `messages` (the model's chat template, continuing the messages appended and generated so far). Past the
        window is E2BIG with both numbers. Without a tokenizer, `text` and `messages` are ENOSYS; EIO says the text
        worker could not do it.
        """
        return self._invoke("append", AppendArgs(ctx, tokens, text, messages), AppendResult)

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
    ) -> GenerateResult:
        """Sample up to `max_tokens` tokens into the context. With `stream`, notifications of kind `tokens` carry token
        ids and text that is always valid UTF-8 and never shows any part of a stop string; the reply carries the
        whole again. Ends with a reason: `stop`, `length` (also at the window), `cancelled` or `killed`. Once the
        first token is out it never ends in an errno. A context that generates refuses other writers with EBUSY.
        Stop strings need a tokenizer (ENOSYS without one).
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
        )
        return self._invoke("generate", args, GenerateResult)

    def forward(self, ctx: int, top_k: int = 20) -> ForwardResult:
        """The `top_k` most likely next tokens and their log-probabilities; the context stays as it is. Beam search,
        constrained decoding and speculation are programs over this.
        """
        return self._invoke("forward", ForwardArgs(ctx, top_k), ForwardResult)

    def score(self, ctx: int, tokens: bytes) -> ScoreResult:
        """The log-probability of each of `tokens` as the continuation of the context, which stays as it is."""
        return self._invoke("score", ScoreArgs(ctx, tokens), ScoreResult)

    def cancel(self, request: int) -> None:
        """End a request outstanding on this connection. A generation ends with reason `cancelled` and keeps its
        tokens; forward, score and wait end with ECANCELED. The request's own reply comes once in any case.
        """
        self._invoke("cancel", CancelArgs(request), Empty)

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

    def dmesg(self, since: int = 0) -> DmesgResult:
        """The kernel's log after entry number `since`, oldest first."""
        return self._invoke("dmesg", DmesgArgs(since), DmesgResult)

    def fsck(self) -> FsckResult:
        """Check every invariant of DESIGN.md §3 now, and name the ones that do not hold."""
        return self._invoke("fsck", Empty(), FsckResult)

    def shutdown(self) -> None:
        """Stop the system: this call is answered, what is outstanding elsewhere ends (`killed` or ECANCELED), drivers
        stop.
        """
        self._invoke("shutdown", Empty(), Empty)


class SyncCalls(SyncPlainCalls):
    """Every system call, blocking, on bare handles."""

    def spawn(self, name: str = "", nice: int = 0, fork_of: int = 0) -> SpawnResult:
        """Make a child process of the connection's own. With `fork_of` it starts with a fork of that context, and the
        result names the child's context by handle and by cid.
        """
        return self._invoke("spawn", SpawnArgs(name, nice, fork_of), SpawnResult)

    def alloc_context(self, pid: int = 0, device: str = "") -> AllocContextResult:
        """Make an empty context in a process. The handle is valid on this connection only; the cid names it in `ps`
        and to calls that only look. It takes no frames until something is appended.
        """
        return self._invoke("alloc_context", AllocContextArgs(pid, device), AllocContextResult)


class AsyncPlainCalls(ABC):
    """The asynchronous calls whose results need no object around them."""

    @abstractmethod
    async def _invoke(self, name: str, args: Record, result: type[R]) -> R: ...

    async def hello(self, client: str, version: int) -> HelloResult:
        """Say who is calling and which ABI version it speaks; learn the server's, and the uid that the socket proved.
        It gives the connection its own process, named `client`; calls that need one are EINVAL before it, calls
        that only look work without it. Once per connection (EEXIST). A version that this server does not speak is
        EINVAL.
        """
        return await self._invoke("hello", HelloArgs(client, version), HelloResult)

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

    async def setpriority(self, pid: int, nice: int) -> None:
        """Set the nice value of a process, from -20 (first) to 19 (last)."""
        await self._invoke("setpriority", SetpriorityArgs(pid, nice), Empty)

    async def fork(self, ctx: int, n: int = 1) -> ForkResult:
        """Make `n` contexts with the same log, all or none. Full blocks are shared and the partial tail is copied when
        somebody writes to it, so a fork costs page-table entries, not KV.
        """
        return await self._invoke("fork", ForkArgs(ctx, n), ForkResult)

    async def append(
        self, ctx: int, tokens: bytes = b"", text: str = "", messages: tuple[Message, ...] = ()
    ) -> AppendResult:
        """Add tokens to a context's log and start computing them; the answer does not wait for the computation.
        Exactly one of `tokens`, `text` (tokenized as plain text: nothing in it can become a special token) and
        `messages` (the model's chat template, continuing the messages appended and generated so far). Past the
        window is E2BIG with both numbers. Without a tokenizer, `text` and `messages` are ENOSYS; EIO says the text
        worker could not do it.
        """
        return await self._invoke("append", AppendArgs(ctx, tokens, text, messages), AppendResult)

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
    ) -> GenerateResult:
        """Sample up to `max_tokens` tokens into the context. With `stream`, notifications of kind `tokens` carry token
        ids and text that is always valid UTF-8 and never shows any part of a stop string; the reply carries the
        whole again. Ends with a reason: `stop`, `length` (also at the window), `cancelled` or `killed`. Once the
        first token is out it never ends in an errno. A context that generates refuses other writers with EBUSY.
        Stop strings need a tokenizer (ENOSYS without one).
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
        )
        return await self._invoke("generate", args, GenerateResult)

    async def forward(self, ctx: int, top_k: int = 20) -> ForwardResult:
        """The `top_k` most likely next tokens and their log-probabilities; the context stays as it is. Beam search,
        constrained decoding and speculation are programs over this.
        """
        return await self._invoke("forward", ForwardArgs(ctx, top_k), ForwardResult)

    async def score(self, ctx: int, tokens: bytes) -> ScoreResult:
        """The log-probability of each of `tokens` as the continuation of the context, which stays as it is."""
        return await self._invoke("score", ScoreArgs(ctx, tokens), ScoreResult)

    async def cancel(self, request: int) -> None:
        """End a request outstanding on this connection. A generation ends with reason `cancelled` and keeps its
        tokens; forward, score and wait end with ECANCELED. The request's own reply comes once in any case.
        """
        await self._invoke("cancel", CancelArgs(request), Empty)

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

    async def dmesg(self, since: int = 0) -> DmesgResult:
        """The kernel's log after entry number `since`, oldest first."""
        return await self._invoke("dmesg", DmesgArgs(since), DmesgResult)

    async def fsck(self) -> FsckResult:
        """Check every invariant of DESIGN.md §3 now, and name the ones that do not hold."""
        return await self._invoke("fsck", Empty(), FsckResult)

    async def shutdown(self) -> None:
        """Stop the system: this call is answered, what is outstanding elsewhere ends (`killed` or ECANCELED), drivers
        stop.
        """
        await self._invoke("shutdown", Empty(), Empty)


class AsyncCalls(AsyncPlainCalls):
    """Every system call, asynchronous, on bare handles."""

    async def spawn(self, name: str = "", nice: int = 0, fork_of: int = 0) -> SpawnResult:
        """Make a child process of the connection's own. With `fork_of` it starts with a fork of that context, and the
        result names the child's context by handle and by cid.
        """
        return await self._invoke("spawn", SpawnArgs(name, nice, fork_of), SpawnResult)

    async def alloc_context(self, pid: int = 0, device: str = "") -> AllocContextResult:
        """Make an empty context in a process. The handle is valid on this connection only; the cid names it in `ps`
        and to calls that only look. It takes no frames until something is appended.
        """
        return await self._invoke("alloc_context", AllocContextArgs(pid, device), AllocContextResult)
