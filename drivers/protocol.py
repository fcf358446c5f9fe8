"""The driver protocol: what the daemon says to a driver process and what the driver answers.

A driver is a process of its own, started with open file descriptors: a SOCK_SEQPACKET channel, the memfd of its frames
(`arena`) and the memfd of the page-table rows it reads.  Messages are MessagePack arrays whose first item is the verb.
One message may be cut into several packets: every packet starts with one byte, 1 = more follows, 0 = last.

    to the driver                                           from the driver
    ["probe", id]                                           ["found", rows]       any number, before the first answer
                                                            ["probe", id, {...Probe fields...}]
    ["identity", digest]                                    nothing               before the first transfer
    ["exec", seq, seqs, tokens, copies, histories, gates, allowed]
                                                            ["done", seq, tokens, logprobs, tops, scores, stats]
                                                            ["failed", seq, errno, reason]
    ["read" | "write", seq, arena, pairs, tags, gate, ticket]
                                                            ["moved", seq, [[item, errno], ...], moved_bytes, elapsed_ns]
    ["drop", id, frames]                                    ["dropped", id]       scrub these frames
    ["health", id]                                          ["health", id, {...counters...}]
                                                            ["log", level, text]

`read` and `write` move stored frames (kernel/tag.py); their fields are those of kernel/events.py's Transfer, seen from
the driver: "read" is out of its own frames into the arena of device `arena`.  Items fail one by one, never the driver.
`identity` is the 16-byte digest that goes into every header: an accel is told it once its fingerprint is known, the
driver of another tier has it in its configuration.  `found` is a tier's inventory: rows of (int32 frame, packed tag).

A driver that does not know a verb answers ["unknown", verb].  A driver decides nothing, keeps no state about contexts,
answers every `exec`, `read` and `write` exactly once, and exits when its channel closes.

Besides channel, arena and rows a driver may inherit descriptors under the same numbers, named in its configuration:

    dram_fd, dram_device    the dram arena and its device number (`arena` of a transfer); a tier driver has it as --arena
    dram_frames             stored frames in it
    gates_fd                the gates (kernel/tag.py)
    hbm_fds                 {"0": fd, ...}: hbm arenas by device number, for a driver with capability "direct"

and the numbers frame_bytes, stored_bytes, layers, block_tokens, capacity_frames, and identity (hex).
"""

from __future__ import annotations

from typing import Final, NamedTuple

PROTOCOL_VERSION: Final = 1
PACKET_BYTES: Final = 64 << 10
LAST: Final = b"\x00"
MORE: Final = b"\x01"


class TimedPrefill(NamedTuple):
    """One pass that computed a prompt: `tokens` of it, on top of `cached` that were there."""

    tokens: int
    cached: int
    elapsed_ns: int


class Probe(NamedTuple):
    """What a driver says of itself."""

    protocol: int  # PROTOCOL_VERSION
    kind: str  # accel | sim | nvme | remote | ...
    pid: int
    fingerprint: str  # hex digest of the weights' content: part of every block key
    capabilities: tuple[
        str, ...
    ]  # verbs beyond probe and health; "direct": transfers may name an hbm as their arena; "layered": loads go on beside passes
    capacity_frames: int
    frame_bytes: int
    alignment_bytes: int
    vocab_tokens: int
    numerics: str  # fast | invariant
    engine: str  # e.g. "cpu/avx512bf16"
    model: str
    stored_bytes: int = 0  # of one stored frame; 0: this driver holds none
    read_bytes_s: int = 0  # measured bandwidth out of its frames; 0: not known yet
    write_bytes_s: int = 0
    latency_ns: int = 0  # of a transfer of one frame, beyond its bytes
    prefill: tuple[TimedPrefill, ...] = ()  # timed at the start of the first life; each an array of three on the wire
    arena: str = (
        "kept"  # an accel: whether its frames outlive it (in the daemon's memfd), or are "lost" (in a device's memory)
    )


class ExecStats(NamedTuple):
    """Counted where the work is done, not where it was asked for."""

    computed_tokens: int
    sequences: int
    compute_ns: int
    copied_frames: int
    waited_ns: int = 0  # of compute_ns, spent waiting at gates
