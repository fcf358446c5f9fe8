"""The driver protocol: what the daemon says to a driver process and what the driver answers.

A driver is a process of its own, started with open file descriptors: a SOCK_SEQPACKET channel, the memfd of its frames
(`arena`) and the memfd of the page-table rows it reads.  Messages are MessagePack arrays whose first item is the verb.
One message may be cut into several packets: every packet starts with one byte, 1 = more follows, 0 = last.

    to the driver                                     from the driver
    ["probe", id]                                     ["probe", id, {...Probe fields...}]
    ["exec", seq, seqs, tokens, copies, histories]    ["done", seq, tokens, logprobs, tops, scores, stats]
                                                      ["failed", seq, errno, reason]
    ["drop", id, frames]                              ["dropped", id]              scrub these frames
    ["health", id]                                    ["health", id, {...counters...}]
                                                      ["log", level, text]

`read` and `write` (frames <-> DRAM arena offsets, with key and checksum) join with the DRAM tier; a driver that does
not know a verb answers ["unknown", verb].  A driver decides nothing, keeps no state about contexts, answers every
`exec` exactly once, and exits when its channel closes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

PROTOCOL_VERSION: Final = 1
PACKET_BYTES: Final = 64 << 10
LAST: Final = b"\x00"
MORE: Final = b"\x01"


class Probe(NamedTuple):
    """What a driver says of itself."""

    protocol: int  # PROTOCOL_VERSION
    kind: str  # accel | sim
    pid: int
    fingerprint: str  # hex digest of the weights' content: part of every block key
    capabilities: tuple[str, ...]  # verbs beyond probe and health
    capacity_frames: int
    frame_bytes: int
    alignment_bytes: int
    vocab_tokens: int
    numerics: str  # fast | invariant
    engine: str  # e.g. "cpu/avx512bf16"
    model: str


class ExecStats(NamedTuple):
    """Counted where the work is done, not where it was asked for."""

    computed_tokens: int
    sequences: int
    compute_ns: int
    copied_frames: int
