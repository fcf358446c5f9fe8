"""Contexts and the work they wait for.

A context is an address space: a token log plus the page table that maps it.  Both live in the core, in the slot this
object names.  What stays here is what a scheduler looks at once per decision, never once per token.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from .calls import GenerateArgs, Usage
from .errors import Panic
from .events import Syscall
from .ids import Cid, Slot
from .injected import Injected
from .params import NICE_JOBS

if TYPE_CHECKING:
    from .lifetimes import Wait
    from .movers import Move
    from .names import Kept
    from .process import Process


class JobKind(Enum):
    PREFILL = "prefill"  # compute what was appended; nobody waits for it
    GENERATE = "generate"
    FORWARD = "forward"
    SCORE = "score"


class Job:
    """What a context is being run for.  One at a time."""

    __slots__ = (
        "allowed", "args", "begun", "conn", "due_ns", "ending", "injected", "kind", "logprobs", "order", "passed", "request", "scored", "scores", "seen", "since_ns",
        "start", "started",
    )  # fmt: skip

    def __init__(self, kind: JobKind, order: int, conn: int = 0, request: int = 0) -> None:
        self.kind = kind
        self.order = order  # arrival: the smaller, the older; a preempted job keeps it
        self.conn = conn
        self.request = request
        self.args = GenerateArgs(0)
        self.allowed = b""  # FORWARD: a bit per token that may be in the answer; empty: all
        self.start = 0  # log length when it began
        self.injected: Injected = ()  # tokens behind `start` that it did not sample (injected.py)
        self.begun = False  # it has sampled: it ends in a reason from now on, never in an errno
        self.ending = ""  # reason to end with as soon as no pass is in flight
        self.logprobs: list[tuple[float, bytes, bytes]] = []
        self.scored = 0  # SCORE: positions below this have their log-probability
        self.scores: list[bytes] = []
        self.since_ns = -1  # when it arrived; -1: it has not been started
        self.due_ns = 0  # when its first token is wanted; 0: nobody said
        self.passed = 0  # later jobs that were begun before it (order/line.py)
        self.started = False  # a part of its prompt has been in a pass
        self.seen: tuple[int, int, int, int] | None = None  # of its prompt when last looked at (order/facts.py)

    def follows(self, prefill: Job) -> None:
        """It takes the place of a prefill of its context that nobody waits for."""
        self.order = prefill.order
        self.since_ns = prefill.since_ns
        self.passed = prefill.passed
        self.started = prefill.started


class Context:
    __slots__ = (
        "admitted", "asked_ns", "born", "cid", "device", "domain", "dying", "gated", "gates", "handle", "hint", "job", "keep", "kept", "kept_until_ns", "last_injected", "last_request", "last_start", "lost_tokens",
        "mark", "parent", "parked", "pinned_until_ns", "preemptions", "process", "prompt_tokens", "queued", "reached", "rested_ns", "slot", "tier_hits", "told_blocks", "turns",
        "unparking", "wait", "waited", "waits",
    )  # fmt: skip

    def __init__(self, cid: Cid, slot: Slot, device: int, process: Process, parent: Cid, domain: str) -> None:
        self.cid = cid
        self.born = 0  # in the order in which this kernel has made or restored them
        self.domain = domain  # who may share its prefixes (domain.py)
        self.slot = slot
        self.device = device
        self.process = process
        self.parent = parent
        self.handle = 0  # 0: not reachable by handle (the scratch context of a score)
        self.job: Job | None = None
        self.queued = False  # it is in its scheduler's queue
        self.admitted = True  # the whole log has frames
        self.dying = False  # released while a pass was in flight
        self.keep = -1  # cut its generation to this many sampled tokens when no pass is in flight; -1 = no
        self.parked: deque[Syscall] = deque()  # calls that wait for the pass in flight, and those that came after them
        self.unparking = False  # the first of them has its turn now
        self.preemptions = 0
        self.last_request: tuple[int, int] = (
            0,
            0,
        )  # (conn, request) of the generation that ended last, as long as nothing came after it
        self.last_start = 0  # log length when that generation began
        self.last_injected: Injected = ()  # and what was injected into it
        self.gates: list[Move] = []  # loads of it that report their progress
        self.gated = False  # it has computed on top of them: until they have landed it runs behind their gates only
        self.pinned_until_ns = 0  # 0: not pinned
        self.kept_until_ns = 0  # pin that `explain` has been told of
        self.tier_hits: dict[str, int] = {}  # tokens loaded, by tier
        self.lost_tokens = 0  # that it had when it was preempted; 0: it has been admitted since, or had no work
        self.reached = 0  # tokens that were in hbm when it last lost its frames
        self.hint: tuple[int, int] | None = None  # (kind, due_ns): what is known of the end of the turn that runs
        self.turns = 0  # generations that ended
        self.prompt_tokens = 0  # length of its log when it was first asked for something; 0: it never was
        self.told_blocks = 0  # first blocks of its log that its device's eviction policy has heard of
        self.mark = Usage()  # usage when the last generation ended
        self.kept: Kept | None = None  # it outlives its connection (names.py)
        self.wait: Wait | None = None  # for a tool (lifetimes.py)
        self.waited = 0  # number of the wait that it was in last, 0: none
        self.waits = 0  # waits that it was in
        self.asked_ns = 0  # when its tool answered, as long as it waits for frames that it had lost; 0: it does not
        self.rested_ns = 0  # when a generation of it ended, as long as nothing came after it; 0: something did

    def place(self) -> tuple[int, int]:
        """Of its job in the order of service: arrival, NICE_JOBS jobs later per step of nice; the smaller, the sooner."""
        if self.job is None:
            raise Panic(f"context {self.cid} is queued without a job")
        return (self.job.order + NICE_JOBS * self.process.nice, self.job.order)

    def state(self) -> str:
        """idle | waiting | prefill | running | stopped | tool_wait"""
        job = self.job
        if self.wait is not None:
            return "tool_wait"
        if job is None:
            return "idle"
        if self.process.stopped:
            return "stopped"
        if not self.admitted:
            return "waiting"
        return "running" if job.begun else "prefill"
