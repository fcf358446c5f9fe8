"""The exec ABI: how the kernel describes one forward pass to an accel driver, in flat little-endian arrays.

One pass is `seqs` (an array of the 96-byte record below), `tokens` (int32, the concatenated new tokens of all
sequences) and `copies` (int32 pairs `source frame, destination frame`, made in order before anything else: that is
copy-on-write).  The driver reads frame, shift and count from the page-table rows in shared memory, for the first
`entries` entries of row `slot`; the kernel does not change those entries until the pass completes.

The C core writes these records; drivers view them through `numpy.dtype(SEQ_FIELDS)`.  No numpy here: the kernel does not need it.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

SEQ_FIELDS: Final[list[tuple[str, str]]] = [
    ("slot", "<i4"),  # page-table row
    ("generation", "<u4"),  # generation of that row; a mismatch means the row was released: fail the pass
    ("start", "<i4"),  # logical position of the first token of this pass
    ("ntokens", "<i4"),  # tokens of this pass, >= 1
    ("write_from", "<i4"),  # KV is written for positions >= write_from only
    ("entries", "<i4"),  # page-table entries that cover start + ntokens tokens
    ("token_offset", "<i4"),  # where this sequence's tokens begin in `tokens`
    ("flags", "<u4"),  # SAMPLE | FORWARD | SCORE | HISTORY | ALLOWED
    ("temperature", "<f4"),  # 0 = greedy
    ("top_p", "<f4"),  # 1 = off
    ("min_p", "<f4"),  # 0 = off
    ("top_k", "<i4"),  # 0 = off
    ("seed", "<u8"),  # key of the counter-based generator; the counter is the position of the sampled token
    ("repetition_penalty", "<f4"),  # 1 = off
    ("presence_penalty", "<f4"),  # 0 = off
    ("frequency_penalty", "<f4"),  # 0 = off
    ("logprobs", "<i4"),  # alternatives to return, 0 = none
    ("score_from", "<i4"),  # SCORE: first position whose token's log-probability is wanted
    ("prompt_tokens", "<i4"),  # penalties: tokens of the context that are the prompt (presence/frequency skip them)
    ("context", "<u8"),  # context id, for logs
    ("prompt_left", "<i4"),  # prompt tokens still to compute after this pass (0 when decoding)
    ("reserved", "<i4"),
]

SEQ: Final = struct.Struct("<iIiiiiiIfffiQfffiiiQii")
SEQ_BYTES: Final = 96
assert SEQ.size == SEQ_BYTES

SAMPLE: Final = 1  # draw the next token from the last position's logits
FORWARD: Final = 2  # return the top-k log-probabilities of the last position, draw nothing
SCORE: Final = 4  # return log P(token p | before) for p in max(score_from, start + 1) .. start + ntokens - 1
ALLOWED: Final = 16  # with FORWARD: the top k are among the tokens that this sequence's entry of `allowed` names
HISTORY: Final = 8  # penalties are on: `histories` carries, in batch order, this context's start + ntokens tokens


class Seq(NamedTuple):
    """One record of `seqs`, field for field (see SEQ_FIELDS)."""

    slot: int
    generation: int
    start: int
    ntokens: int
    write_from: int
    entries: int
    token_offset: int
    flags: int
    temperature: float
    top_p: float
    min_p: float
    top_k: int
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int
    score_from: int
    prompt_tokens: int
    context: int
    prompt_left: int
    reserved: int

    @property
    def has_top(self) -> bool:
        """Whether the pass returns alternatives for this sequence (events.ExecDone.tops)."""
        return bool(self.flags & FORWARD or (self.flags & SAMPLE and self.logprobs > 0))


def unpack_seqs(seqs: bytes) -> list[Seq]:
    """Decode a whole `seqs` array; for drivers without numpy and for tests."""
    return [Seq(*fields) for fields in SEQ.iter_unpack(seqs)]
