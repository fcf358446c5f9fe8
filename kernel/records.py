"""What both cores answer with: the records and constants of kernel/coreapi.py."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

FREE: Final = 0
FILLING: Final = 1
VALID: Final = 2
LOADING: Final = 3  # a transfer writes it

NO_COPY: Final = 255  # residency: no tier has this block
BLOCKED_BY_LOAD: Final = -2  # Advance.blocked_by: the block at `computed` is on its way

# status of admit and plan
OK: Final = 0
EVICT: Final = 1  # evict `shortage` frames, then call again: it will succeed
NOROOM: Final = 2  # even with every reclaimable frame evicted, `shortage` frames are missing
OWN_EVICT: Final = 3  # `group` is at its limit: evict `shortage` frames that are charged to it, then call again
OWN_NOROOM: Final = 4  # `group` is at its limit and has too few reclaimable frames itself

# why a generation finished, as commit reports it
RUNNING: Final = 0
STOP: Final = 1
LENGTH: Final = 2

PREFILL: Final = struct.Struct("<iiiiii")  # slot, start, ntokens, flags, score_from, prompt_left


class Admit(NamedTuple):
    status: int  # OK | EVICT | NOROOM | OWN_EVICT | OWN_NOROOM
    shortage_frames: int
    mapped_frames: int  # found in the index by this call
    new_frames: int
    loads: int = 0  # frames that wait for a transfer: `loads()` says which
    group: int = 0  # whose limit it is, else the slot's


class Plan(NamedTuple):
    """One forward pass, ready to send; or a shortage and nothing done."""

    status: int
    shortage_frames: int
    sequences: int
    seqs: bytes
    tokens: bytes
    copies: bytes
    histories: int  # sequences with the HISTORY flag
    samples: int  # sequences with the SAMPLE flag: what `commit` expects
    group: int = 0  # of a shortage: whose limit it is, or for whom room is to be made


class Advance(NamedTuple):
    computed: int  # tokens of the slot whose KV is valid, after skipping blocks that others computed
    ready: int  # tokens that may be computed next, from there
    blocked_by: int  # slot that is filling the block at `computed`, BLOCKED_BY_LOAD, or -1


class Commit(NamedTuple):
    streams: bytes  # int64 pairs (conn, request) of the tokens kept
    tokens: bytes  # int32
    logprobs: bytes  # float32
    kept: bytes  # int32: index of each among the sampled tokens of the pass
    finished: tuple[tuple[int, int], ...]  # (slot, STOP | LENGTH)


class SlotRow(NamedTuple):
    tokens: int
    computed: int
    entries: int
    shared: int  # entries whose frame another entry names too
    share_millionths: int  # sum over entries of 1,000,000 // sharers
    computed_total: int
    hit_total: int
    recomputed_total: int
    generated_total: int


class Prefix(NamedTuple):
    """Blocks that a log begins with, by key, each count from where the one before ends."""

    here: int  # VALID on the log's own compute device
    coming: int  # VALID there or on their way
    awaited: int  # VALID there, on their way, or being computed by another slot
    stored: int  # VALID on some device


class Account(NamedTuple):
    """What a group, with its sub-groups, has on one device, in frames."""

    used: int
    reclaimable: int
    soft: int  # 0: no guarantee
    hard: int  # 0: no limit


class Counters(NamedTuple):
    lookup_hits: int  # full blocks that an admission found on its own device
    lookup_misses: int  # full blocks that a successful admission gave a frame to compute; the others it loads
    evictions: int
    collisions: int  # equal keys, unequal content: the key function is broken
    cow_copies: int
    merged: int  # full blocks found to exist already when they were sealed
    indexed: int
    freed: int
    partial_hits: int  # blocks of which an admission could use the first tokens only
    partial_tokens: int  # those tokens
    ghosts: int  # blocks without a copy, kept because a block that continues them has one


FACT: Final = struct.Struct(
    "<qqiiiiiBBBB"
)  # used_ns, due_ns, depth, hits, turn, children, domain, kind, priority, copies mask, indexed
