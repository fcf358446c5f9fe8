"""What the kernel knows of one device: a compute device with its hbm frames, or a tier."""

from __future__ import annotations

from collections import deque

from .batch import SEQ_BYTES, Seq, unpack_seqs
from .config import DeviceConfig
from .events import Exec

RESTART_AFTER_FAILURES = 3  # passes in a row that fail before the driver is restarted
DEATHS = 32  # of its drivers that are remembered
BLAME_AFTER_FAILURES = 3  # passes of a context alone that fail, others going well, before it is to blame


class Device:
    """up and epoch follow the driver; `flight` is the pass that runs there now (a tier has none)."""

    __slots__ = (
        "blame",
        "capacity",
        "chosen",
        "corrupt",
        "deaths",
        "direct",
        "draining",
        "driver_pid",
        "engine",
        "epoch",
        "errors",
        "failures",
        "flight",
        "found",
        "full_seq",
        "gone",
        "index",
        "isolate",
        "layered",
        "mute",
        "name",
        "read_only",
        "removed",
        "restarts",
        "samples",
        "seq",
        "tier",
        "transfer_seq",
        "up",
        "why_down",
    )  # fmt: skip

    def __init__(self, index: int, config: DeviceConfig) -> None:
        self.index = index
        self.name = config.name
        self.tier = config.tier
        self.capacity = config.capacity_frames
        self.chosen = 0  # the larger, the later a context was put here for which nobody had said where
        self.up = False
        self.gone = ""  # why its driver will not come back; "" = it is up or being restarted
        # Of its drivers: when, and when the next was up (0: not yet).
        self.deaths: deque[tuple[int, int]] = deque(maxlen=DEATHS)
        self.why_down = ""  # the last of them
        self.mute = 0  # transfers in a row that all failed, though its driver answered
        self.epoch = 0
        self.driver_pid = 0
        self.restarts = 0
        self.seq = 0  # of the last pass sent
        self.transfer_seq = 0  # of the last transfer sent
        self.read_only = False  # a tier that is full for good: what it holds can be read
        self.draining = False  # detach_tier: nothing new goes there
        self.errors = 0  # items of transfers that failed
        self.corrupt = 0  # of them, those with other content than they should have
        self.found = b""  # inventory of a driver that is starting
        self.direct = False  # its driver reads straight into hbm frames
        self.layered = False  # an accel that loads from dram beside its passes: one may follow a load layer by layer
        self.engine = ""
        self.full_seq = 0  # the last transfer sent when a write met ENOSPC, if none sent later went well; 0: otherwise
        self.removed = False  # detached: its number may be used again
        self.flight: Exec | None = None
        self.samples = 0  # tokens the pass in flight will sample
        self.failures = 0  # passes in a row that failed
        self.blame: dict[
            int, int
        ] = {}  # by cid: passes that failed with this context alone in them, since one of its went well
        self.isolate = 0  # passes still to be run with one sequence each, to find which one fails

    def flight_seqs(self) -> list[Seq]:
        return unpack_seqs(self.flight.seqs) if self.flight else []

    @property
    def flight_length(self) -> int:
        return len(self.flight.seqs) // SEQ_BYTES if self.flight else 0
