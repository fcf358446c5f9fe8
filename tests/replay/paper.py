"""A machine with round numbers, and requests written in one line: for traces that are worked out on paper."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from attnix.kernel.geometry import KvShape
from attnix.replay.engine import Frames, Replay
from attnix.replay.metrics import Result
from attnix.replay.profile import Link, Profile
from attnix.replay.workload import from_requests
from attnix.traces import TURN, Request

US = 1000  # ns
K, A, B, R = 1000 * US, 10 * US, 2 * US, 3 * US  # per pass, per token, per token and token before it, per token read
BLOCK = 4  # tokens
_BUS = Link(64e6, 9 * US)  # a frame of 64 bytes, alone, in 10 us
PROFILE = Profile("paper", "round numbers", KvShape(2, 1, 2, 2), K, A, B, R, 0, 0, 0, _BUS, _BUS, _BUS, _BUS)


def prefill(tokens: int, cached: int = 0) -> int:
    """ns of one sequence, without the pass."""
    return A * tokens + B * tokens * cached + B * tokens * tokens // 2


def decode(tokens: int) -> int:
    """ns of one pass that computes one token, the last of so many."""
    return K + R * tokens


def request(
    at_us: int, blocks: Sequence[int], tokens: int, output: int, *, session: int = -1, turn: int = 0, think_us: int = -1,
    ends: str = TURN,
) -> Request:  # fmt: skip
    think_ms = think_us / 1e3 if think_us >= 0 else -1.0
    return Request(
        at_us / 1e3, session, turn, array("q", blocks), tokens, output, 0.0, TURN, ends, "", -1.0, think_ms, 0
    )


def replay(
    requests: Sequence[Request],
    frames: int = 100,
    *,
    exact: bool = False,
    policy: str = "lru",
    check: bool = True,
    hints: bool = False,
    dram: int = 0,
    nvme: int = 0,
) -> Result:
    """check: fsck after every step of the kernel."""
    workload = from_requests("paper", requests, BLOCK)
    return Replay(workload, PROFILE, Frames(frames, dram, nvme), policy, exact=exact, check=check, hints=hints).run()


def us(seconds: float) -> int:
    return round(seconds * 1e6)
