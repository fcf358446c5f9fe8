"""Records of `health` and `frames`: what a diagnosis and a map need beside vmstat, tiers and ps.  kernel/calls.py names them too."""

from __future__ import annotations

from typing import NamedTuple


class HealthArgs(NamedTuple):
    heads: int = 64  # prompts to tell of: so many of contexts that are there, and so many that went


class SampleRow(NamedTuple):
    """The machine at one moment: sums since boot, and what there was then (of all compute devices together)."""

    at_ns: int
    computed_tokens: int
    generated_tokens: int
    compute_ns: int  # that passes took
    again_tokens: int  # lost by contexts that ran, and brought back
    preemptions: int  # of contexts that ran
    fault_blocks: int  # that admissions found in slower tiers ...
    hit_blocks: int  # ... and in hbm, full ones ...
    missed_blocks: int  # ... and that they had computed; these three are all that were looked for
    some_ns: int  # some context with work waited for frames
    full_ns: int  # and no device did anything
    late_ns: int  # that transfers took longer than their devices did at first
    copy_waits: int  # times that frames were wanted whose content had to be copied down first
    active: int  # contexts that owned frames and ran at once: the most since the sample before
    queued: int  # contexts that wait for frames or for their prompt
    free_frames: int
    reclaimable_frames: int


class HeadRow(NamedTuple):
    """A context that computed a prompt.  What it began with is told to its own uid only."""

    cid: int
    domain: str
    prompt_tokens: int  # length of its log when it was first asked for something
    tokens: int  # and now, or when it went
    hit_tokens: int  # found instead of computed
    live: bool
    head: bytes = b""  # int32: the first tokens; empty: another uid's


class LinkRow(NamedTuple):
    """One direction of one device."""

    device: str
    verb: str  # read | write
    first_bytes_s: int  # what it was measured at when it came up, or in its first transfers; 0: not yet
    bytes_s: int  # now
    moves: int
    late_ns: int  # that its transfers took longer than they would have at first


class ToolRow(NamedTuple):
    """What was learnt of a tool and of those who said when it would be back.  Ratios are what it took / what was said."""

    tool: str
    calls: int
    median_ns: int  # what it takes; -1: nobody knows
    etas: int  # that were judged
    ratio_p25_permille: int
    ratio_p50_permille: int
    ratio_p75_permille: int
    absurd: int  # etas so wrong that nothing was learnt from them
    absent: int  # answers that found no frame of their context


class HoldingRow(NamedTuple):
    """Who holds the frames of a compute device now.  A frame with several sharers counts for each in part."""

    device: str
    capacity_frames: int
    free_frames: int
    cache_frames: int  # of no context: kept until they are wanted
    running_frames: int  # of contexts with work that have all their frames
    waiting_frames: int  # of contexts with work that have not
    idle_frames: int  # of contexts without work
    tool_frames: int  # of contexts that wait for a tool
    pinned_frames: int  # of these, and of contexts without work: pinned


class LostPlaceRow(NamedTuple):
    """A third party's policy that failed on a device, whose place another has."""

    device: str
    setting: str  # the sysctl that names the policy of that place
    fault: str  # in words: which policy, when, what
    instead: str


class DriverRow(NamedTuple):
    """A driver that has died, given up, or whose transfers all fail."""

    device: str
    up: bool
    gone: str  # why it will not be started again by itself; "": it will
    reason: str  # of its last death
    deaths: tuple[tuple[int, int], ...]  # when it went down and came up again (0: not yet), the last ones, oldest first
    mute: int  # transfers in a row of which nothing arrived, though it lives


class HealthResult(NamedTuple):
    at_ns: int
    samples: tuple[SampleRow, ...]  # oldest first, about a second apart while something happens
    heads: tuple[HeadRow, ...]  # oldest first
    links: tuple[LinkRow, ...]
    tools: tuple[ToolRow, ...]
    holdings: tuple[HoldingRow, ...]
    lost_places: tuple[LostPlaceRow, ...] = ()
    drivers: tuple[DriverRow, ...] = ()  # those with which something is, or was


class FramesArgs(NamedTuple):
    device: str
    start: int = 0
    most: int = 16384  # frames from there on, no more than that


class FramesResult(NamedTuple):
    """One array entry per frame from `start` on, as little-endian bytes."""

    device: str
    capacity_frames: int
    start: int
    states: bytes  # uint8: 0 free, 1 being filled, 2 full, 3 loading
    cids: bytes  # int32: the oldest context that has its content, 0: cache, or free
    logical: bytes  # int32: which of that context's blocks it is
    sharers: bytes  # int32: contexts, or page-table entries, that name it
    ages: bytes  # int32: ms since it was last wanted, -1: nobody knows
    blocks: bytes  # int32: number of the block, as `explain` takes it; -1: none
