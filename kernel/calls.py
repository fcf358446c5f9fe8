"""Arguments and results of the system calls: plain tuples, in the order in which they travel.

`syscalls/abi.py` numbers them, documents them and lists their errors; this file only gives them shape, so that the
kernel needs neither a codec nor a socket.  Every record is positional; fields with defaults may be left out at the end.

ctx     a context handle of the calling connection: generation << 32 | index; 0 is never a handle
cid     a context's system-wide id, never reused; calls that only look (stat, pagemap) take it too, within one uid
pid     a process id, never reused; 0 means the connection's own first process
tokens  bytes: little-endian int32 token ids
"""

from __future__ import annotations

from typing import NamedTuple

from .calls_health import DriverRow as DriverRow
from .calls_health import FramesArgs as FramesArgs
from .calls_health import FramesResult as FramesResult
from .calls_health import HeadRow as HeadRow
from .calls_health import HealthArgs as HealthArgs
from .calls_health import HealthResult as HealthResult
from .calls_health import HoldingRow as HoldingRow
from .calls_health import LinkRow as LinkRow
from .calls_health import LostPlaceRow as LostPlaceRow
from .calls_health import SampleRow as SampleRow
from .calls_health import ToolRow as ToolRow
from .params import OOM_ADJ_AS_IS


class Empty(NamedTuple):
    """No arguments, or nothing to report."""


class Usage(NamedTuple):
    """What a generation, a process or a context has cost so far, in tokens unless the name says otherwise."""

    computed_tokens: int = 0  # passed through the model (prompt and generated)
    hit_tokens: int = 0  # tokens found in some tier instead of computed
    recomputed_tokens: int = 0  # computed again after a preemption or a lost device
    generated_tokens: int = 0  # sampled
    preemptions: int = 0  # times the context lost its frames to another
    dram_tokens: int = 0  # of the hits, those loaded from dram ...
    nvme_tokens: int = 0
    remote_tokens: int = 0


# -- session and process ------------------------------------------------------------------------------------------


class HelloArgs(NamedTuple):
    client: str
    version: int
    session: str = ""  # token of an earlier connection whose named and detached contexts this one takes over


class KeptRow(NamedTuple):
    """A named or detached context that a session takes with it to its next connection."""

    ctx: int
    cid: int
    name: str  # "": detached
    tokens: int  # length of its log
    generation: str = ""  # running | suspended | ended: `reattach` goes on with it; "": there is none


class HelloResult(NamedTuple):
    server: str
    version: int
    pid: int
    uid: int
    session: str = ""  # secret token; "": this system has none to give
    contexts: tuple[KeptRow, ...] = ()


class SpawnArgs(NamedTuple):
    name: str = ""
    nice: int = 0
    fork_of: int = 0  # ctx: the child starts with a fork of it
    group: str = ""  # "": the parent's; "uid:N" or "uid:N/NAME"
    domain: str = ""  # who may share its prefixes, "": the parent's; named as groups are, or "public"


class SpawnResult(NamedTuple):
    pid: int
    ctx: int = 0
    cid: int = 0


class ExitArgs(NamedTuple):
    pid: int = 0
    code: int = 0


class KillArgs(NamedTuple):
    pid: int
    signal: int = 15  # SIGTERM 15, SIGKILL 9, SIGSTOP 19, SIGCONT 18


class WaitArgs(NamedTuple):
    pid: int = 0  # 0: any child
    timeout_ms: int = -1  # -1: for ever; 0: only look (EAGAIN when none has ended)


class WaitResult(NamedTuple):
    pid: int
    code: int
    reason: str  # exited | killed
    usage: Usage = Usage()


class PsArgs(NamedTuple):
    pid: int = 0  # 0: every process this uid may see


class ContextRow(NamedTuple):
    cid: int
    pid: int
    state: str  # idle | waiting | prefill | running | stopped | tool_wait
    device: str
    tokens: int
    cached_tokens: int  # tokens whose KV is in hbm
    blocks: int
    shared_blocks: int  # blocks some other context maps too
    kv_bytes: int  # live KV: 2 x layers x tokens in hbm x kv_heads x head_dim x bytes
    proportional_bytes: int  # the same with each frame divided by its sharers
    usage: Usage = Usage()
    parent: int = 0  # cid this one was forked from
    tool: str = ""  # what it waits for
    wait: int = 0  # number of that wait, 0: it does not wait
    due_ms: int = -1  # until it is expected back; -1: nobody knows, or it does not wait
    deadline_ms: int = -1  # until it is given up; -1: never


class ProcessRow(NamedTuple):
    pid: int
    parent: int
    uid: int
    name: str
    state: str  # new | ready | running | tool_wait | stopped | zombie
    nice: int
    contexts: tuple[ContextRow, ...]
    kv_bytes: int
    proportional_bytes: int
    tokens: int
    age_ns: int
    usage: Usage = Usage()
    group: str = ""
    oom_score: int = 0  # 0..2000: the larger, the sooner it is ended when memory runs out
    oom_score_adj: int = 0


class PsResult(NamedTuple):
    processes: tuple[ProcessRow, ...]


class GetrusageArgs(NamedTuple):
    pid: int = 0


class SetpriorityArgs(NamedTuple):
    pid: int
    nice: int
    oom_score_adj: int = OOM_ADJ_AS_IS  # -1000 (never ended) .. 1000; -1001: as it is


class SetlimitArgs(NamedTuple):
    """One limit of a group.

    resource  hbm | dram | nvme (frames) | contexts | tokens_s (tokens computed per second) | weight (its share, 1..10000)
    soft      guaranteed: no other group pushes it below; 0: nothing is.  -1: as it is
    hard      never above; 0: no limit.  -1: as it is.  Of weight: the weight
    """

    group: str
    resource: str
    soft: int = -1
    hard: int = -1


class LimitRow(NamedTuple):
    resource: str
    used: int  # frames charged to the group; contexts; tokens in the last second
    soft: int
    hard: int


class GroupRow(NamedTuple):
    name: str
    uid: int
    weight: int
    processes: int
    limits: tuple[LimitRow, ...]
    proportional_bytes: int  # of hbm, each shared frame divided by its sharers
    served_tokens: int  # computed for it since boot
    throttled: int  # times that a limit held it back


class GroupsArgs(NamedTuple):
    name: str = ""  # "": all that this uid may see


class GroupsResult(NamedTuple):
    rows: tuple[GroupRow, ...]


# -- context ------------------------------------------------------------------------------------------------------


class AllocContextArgs(NamedTuple):
    pid: int = 0
    device: str = ""  # "": the kernel chooses
    domain: str = ""  # "": its process's


class AllocContextResult(NamedTuple):
    ctx: int
    cid: int


class ForkArgs(NamedTuple):
    ctx: int
    n: int = 1


class ForkResult(NamedTuple):
    ctxs: tuple[int, ...]
    cids: tuple[int, ...]


class Message(NamedTuple):
    """One chat message, rendered by the model's own template."""

    role: str
    content: str


class AppendArgs(NamedTuple):
    """Exactly one of tokens, text, messages.

    more  a call that computes (generate, forward, score) follows at once: it computes these tokens too, in the same pass,
          and until then nothing is begun (send(2) has MSG_MORE for that)
    """

    ctx: int
    tokens: bytes = b""
    text: str = ""
    messages: tuple[Message, ...] = ()
    more: bool = False


class AppendResult(NamedTuple):
    tokens: int  # length of the context's log now
    appended: int  # tokens added by this call


class TruncateArgs(NamedTuple):
    ctx: int
    length: int


class TruncateResult(NamedTuple):
    tokens: int


class CtxArgs(NamedTuple):
    ctx: int


class LookArgs(NamedTuple):
    """Name a context by handle or, from another connection of the same uid, by cid."""

    ctx: int = 0
    cid: int = 0


class PagemapResult(NamedTuple):
    """One array entry per logical block, as little-endian bytes."""

    cid: int
    device: str
    block_tokens: int
    tokens: int
    frames: bytes  # int32, -1 where the block has no frame
    shifts: bytes  # int32
    counts: bytes  # int16
    sharers: bytes  # int32: page-table entries that name the block, over all contexts
    flags: bytes  # uint8: 1 full, 2 indexed, 4 valid (computed), 8 wired
    hits: bytes  # int32
    copies: bytes = b""  # uint8: bit d is set where device number d holds a copy; empty when there is only one tier
    ages: bytes = (
        b""  # int32: ms since the block was last wanted, -1: nobody knows.  As `copies`, past the last frame too
    )


class ReadArgs(NamedTuple):
    """Tokens [start, end) of a context's log (end -1: to its end).  By handle or, from any connection of the same uid, by cid."""

    ctx: int = 0
    cid: int = 0
    start: int = 0
    end: int = -1


class ReadResult(NamedTuple):
    cid: int
    start: int
    tokens: bytes  # int32
    text: bytes = b""  # their bytes, which need not begin or end at a character; empty without a tokenizer
    ends: bytes = b""  # int32: where in `text` each of them ends


# -- names and snapshots ------------------------------------------------------------------------------------------


class PublishArgs(NamedTuple):
    ctx: int
    name: str
    replace: bool = False  # take the name from the context that has it


class OpenArgs(NamedTuple):
    """By name, or by cid (which also reaches detached contexts of this uid)."""

    name: str = ""
    fork: bool = False  # a private fork; the context itself stays where it is
    cid: int = 0


class OpenResult(NamedTuple):
    ctx: int
    cid: int
    tokens: int  # length of its log
    generation: str = ""  # as in hello's rows


class UnlinkArgs(NamedTuple):
    name: str


class NamesArgs(NamedTuple):
    prefix: str = ""


class NameRow(NamedTuple):
    name: str  # "": detached
    cid: int
    pid: int  # process that it is in
    held: bool  # a live connection holds it
    state: str  # as in `ps`, or suspended
    tokens: int


class NamesResult(NamedTuple):
    rows: tuple[NameRow, ...]


class ReattachArgs(NamedTuple):
    """Go on with a generation that lost its client.  tokens: what the caller has of it, from its first token on."""

    ctx: int
    tokens: bytes = b""
    stream: bool = True


class SnapshotArgs(NamedTuple):
    name: str
    ctxs: tuple[int, ...]


class SnapshotResult(NamedTuple):
    contexts: int
    tokens: int
    file_bytes: int
    kv_bytes: int = 0  # of the file: KV that went with the tokens


class RestoreArgs(NamedTuple):
    name: str


class RestoreResult(NamedTuple):
    """In the order of the snapshot."""

    ctxs: tuple[int, ...]
    cids: tuple[int, ...]


# -- compute ------------------------------------------------------------------------------------------------------


class GenerateArgs(NamedTuple):
    ctx: int
    max_tokens: int = 256
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: bytes = b""  # int32; the model's own end-of-turn tokens are added unless ignore_eos
    ignore_eos: bool = False
    stream: bool = True  # notifications as tokens come; the reply carries the whole either way
    ttft_ms: int = 0  # wanted: time to the first token, 0: no target
    tpot_ms: int = 0  # wanted: time per token after it, 0: no target


class GenerateResult(NamedTuple):
    reason: str  # stop | length | cancelled | killed | suspended
    tokens: bytes  # the tokens left in the context by this call (a stop token is not among them)
    text: str
    usage: Usage
    tokens_total: int  # length of the context's log now
    logprobs: tuple[
        tuple[float, bytes, bytes], ...
    ] = ()  # per token: (log-probability, top ids int32, top log-probabilities float32)
    injected: tuple[
        tuple[int, int], ...
    ] = ()  # (index among `tokens` before which they stand, how many): in the context, but not among `tokens`
    stop: str = ""  # the stop string that ended it; "": something else did


class TokensNote(NamedTuple):
    """Notification "tokens": what a streamed generation has produced since the last one."""

    request: int
    offset: int  # index, within the generation, of the first token of this notification
    tokens: bytes
    text: str  # always valid UTF-8; may lag behind the tokens
    logprobs: tuple[tuple[float, bytes, bytes], ...] = ()


class ForwardArgs(NamedTuple):
    """allowed  a bit per token id of the vocabulary, lowest bit first: only these are among the answer; empty: all
    tokens   appended first, in the same pass; they stay, whatever becomes of the answer
    """

    ctx: int
    top_k: int = 20
    allowed: bytes = b""
    tokens: bytes = b""


class ForwardResult(NamedTuple):
    tokens: bytes  # int32, most likely first
    logprobs: bytes  # float32


class ScoreArgs(NamedTuple):
    """Log-probability of `tokens` as the continuation of ctx, which stays as it is."""

    ctx: int
    tokens: bytes


class ScoreResult(NamedTuple):
    logprobs: bytes  # float32, one per token


class CancelArgs(NamedTuple):
    request: int  # id of a request outstanding on this connection


class InjectArgs(NamedTuple):
    """Exactly one of tokens, text.  By handle or, from any connection of the same uid, by cid."""

    ctx: int
    tokens: bytes = b""
    text: str = ""
    cid: int = 0


class InjectResult(NamedTuple):
    tokens: int  # length of the log behind them
    appended: int


# -- waiting ------------------------------------------------------------------------------------------------------


class WaitToolArgs(NamedTuple):
    """eta_ms: when the caller expects the answer; deadline_ms: when the wait is given up.  -1: not given."""

    ctx: int
    tool: str
    eta_ms: int = -1
    deadline_ms: int = -1


class WaitToolResult(NamedTuple):
    wait: int  # number of this wait, never used again: `resume` names it
    decision: str  # keep | demote | drop: what becomes of its frames (docs/lifetimes.md)
    keep_ms: int  # for how long they are taken after everybody else's; 0: not
    expected_ms: int  # when it is expected back: the eta, or what was learnt of the tool; -1: nobody knows
    deadline_ms: int


class ResumeArgs(NamedTuple):
    """The tool's answer: one of tokens, text, messages, or nothing.  By handle or cid, as `inject`.  more: as of `append`."""

    ctx: int
    wait: int = 0  # 0: whichever it is in
    tokens: bytes = b""
    text: str = ""
    messages: tuple[Message, ...] = ()
    cid: int = 0
    more: bool = False


class ResumeResult(NamedTuple):
    tokens: int  # length of the context's log now
    appended: int
    waited_ms: int


class WaitNote(NamedTuple):
    """Notification "wait": a wait ended by itself."""

    ctx: int
    cid: int
    wait: int
    tool: str
    reason: str  # deadline


class PressureArgs(NamedTuple):
    threshold_permille: int = -1  # notify when `some` of the window is above it; 1001: no more; -1: only look
    window_ms: int = 2000


class PressureResult(NamedTuple):
    """Share of the time in which somebody (some) or everybody (full) waited for frames, as PSI: over 10, 60, 300 s."""

    some_permille: tuple[int, int, int]
    full_permille: tuple[int, int, int]
    some_ns: int  # since boot
    full_ns: int
    admitted_limit: int  # contexts that the thrash guard lets run now; 0: no limit
    free_frames: int
    reclaimable_frames: int


class PressureNote(NamedTuple):
    """Notification "pressure"."""

    some_permille: int  # of the window
    full_permille: int
    free_frames: int
    reclaimable_frames: int


class OomNote(NamedTuple):
    """Notification "oom": memory ran out and this process of yours was ended."""

    pid: int
    cid: int
    score: int
    message: str


# -- memory -------------------------------------------------------------------------------------------------------


# Each names its context by handle or, with `ctx` 0 and from any connection of the same uid, by cid: that is how the
# shell acts on what other programs hold.


class PinArgs(NamedTuple):
    """Keep a context in hbm: until `unpin`, or for `duration_ms` (0: the longest that sysctl pin.max_ms allows)."""

    ctx: int
    duration_ms: int = 0
    cid: int = 0


class AdviseArgs(NamedTuple):
    """What is known about tokens [start, end) of a context (end -1: to its end).

    advice  "willneed" | "dontneed" | "cold" | "normal" | "priority"
    priority, duration_ms  for "priority": 0 (first to go) .. 100, for that long (0: for ever)
    """

    ctx: int
    advice: str
    start: int = 0
    end: int = -1
    priority: int = 50
    duration_ms: int = 0
    cid: int = 0


class PrefetchArgs(NamedTuple):
    """Bring a context up to `tier`; `deadline_ms` 0: none."""

    ctx: int
    tier: str = "hbm"
    deadline_ms: int = 0
    cid: int = 0


class DemoteArgs(NamedTuple):
    """Copy a context down to `tier` and give its faster frames back."""

    ctx: int
    tier: str = "dram"
    cid: int = 0


class MovedResult(NamedTuple):
    """What a prefetch, demote or evict did, in blocks."""

    moved_blocks: int
    resident_blocks: int  # in the tier asked for, afterwards
    failed_blocks: int


class ExplainArgs(NamedTuple):
    """Decisions about one context (handle, or cid) or one block number; all 0 / -1: the latest of this uid."""

    ctx: int = 0
    cid: int = 0
    block: int = -1


class DecisionRow(NamedTuple):
    number: int
    at_ns: int
    what: str  # evict | keep | load | recompute | demote | drop | miss | split | prefetch | pin
    device: str
    cid: int  # 0: of no context
    block: int  # first block, -1: none
    blocks: int
    why: str  # a sentence with the numbers that decided


class ExplainResult(NamedTuple):
    rows: tuple[DecisionRow, ...]


class AttachTierArgs(NamedTuple):
    """kind: nvme | remote | sim.  settings: JSON object for its driver ("path", "url", ...)."""

    kind: str
    size_bytes: int
    settings: str = "{}"


class AttachTierResult(NamedTuple):
    device: str


class DetachTierArgs(NamedTuple):
    device: str


# -- system -------------------------------------------------------------------------------------------------------


class UnameResult(NamedTuple):
    system: str
    version: str
    abi_version: int
    model: str
    fingerprint: str  # hex digest of the weights' content
    architecture: str
    vocab_tokens: int
    window_tokens: int
    block_tokens: int
    frame_bytes: int
    token_bytes: int
    kv_dtype: str
    numerics: str
    tokenizer: str  # path of the tokenizer file, for clients that tokenize themselves
    stop_tokens: bytes
    devices: tuple[str, ...]
    pid: int  # process id of the daemon


class TierRow(NamedTuple):
    device: str  # hbm0
    tier: str  # hbm
    state: str  # up | down
    epoch: int
    capacity_frames: int
    free_frames: int
    reclaimable_frames: int
    mapped_frames: int
    wired_frames: int
    frame_bytes: int
    driver_pid: int
    restarts: int
    policy: str = ""  # eviction policy in force
    engine: str = ""  # how the driver does its I/O, as it says itself
    read_bytes_s: int = 0  # measured; 0: not yet
    write_bytes_s: int = 0
    latency_ns: int = 0
    read_bytes: int = 0  # moved since boot
    write_bytes: int = 0
    errors: int = 0
    corrupt: int = 0
    prefill_token_ns: float = 0.0  # what computing costs: for each new token, measured; all three 0: not yet
    prefill_pair_ns: float = 0.0  # for each pair of a new token and one that it attends to
    prefill_pass_ns: float = 0.0  # for the pass itself


class TiersResult(NamedTuple):
    tiers: tuple[TierRow, ...]


class VmstatResult(NamedTuple):
    counters: dict[str, int]


class SysctlArgs(NamedTuple):
    name: str = ""  # "" or a prefix ending in "." lists
    value: str | int | float | None = None


class SysctlRow(NamedTuple):
    name: str
    value: str | int | float
    meaning: str
    writable: bool


class SysctlResult(NamedTuple):
    rows: tuple[SysctlRow, ...]


class FsckResult(NamedTuple):
    problems: tuple[str, ...]  # empty: every invariant holds
    checked_blocks: int
    checked_contexts: int


class TraceArgs(NamedTuple):
    """what  "syscalls": a notification `syscall` for each call from now on | "none": no more of them"""

    pid: int
    what: str = "syscalls"


class SyscallNote(NamedTuple):
    """Notification "syscall": a call of a traced process.  One that is not answered at once is told twice, the second time
    with its answer.  An empty name: the traced process's client is gone, and nothing more will come."""

    pid: int  # as it was given to `trace`
    at_ns: int  # when it came, on the machine's monotonic clock
    request: int  # its id on the traced connection
    name: str
    args: str  # as name=value, ... where they are not the default; long ones cut short, secrets left out
    took_ns: int = -1  # from then until its answer was written; -1: not answered yet
    errno: int = 0
    result: str = ""  # as args; of an error its message
    lost: int = 0  # notifications before this one that were left out, since the tracer did not read


class DmesgArgs(NamedTuple):
    since: int = 0  # sequence number of the last entry seen


class DmesgRow(NamedTuple):
    number: int
    at_ns: int
    level: str  # info | warning | error
    text: str


class DmesgResult(NamedTuple):
    rows: tuple[DmesgRow, ...]
