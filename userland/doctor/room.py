"""How many contexts the frames hold when they are as long as they get here."""

from __future__ import annotations

from typing import NamedTuple

from .facts import FEW, Facts
from .prefixes import Compared


class Room(NamedTuple):
    """
    contexts       that fit when they are in the middle of their lives, some at their beginning and some at their end
    at_end         that fit when all are as long as they get
    at_first       that fit when each is as long as its prompt
    frames         of one at its end, what it shares left out
    prompt_frames  of one at its beginning
    tokens         of one at its end
    """

    contexts: int
    at_end: int
    at_first: int
    frames: float
    prompt_frames: float
    tokens: float


def room(facts: Facts) -> Room | None:
    """None: too little is known."""
    known = [(c.row, _shared(c)) for c in facts.ended] or [(head, 0) for head in facts.heads]
    if len(known) < FEW or not facts.capacity_frames:
        return None
    block = facts.block_tokens
    shared = [n // block for _, n in known]
    at_end = sum(-(-h.tokens // block) - s for (h, _), s in zip(known, shared, strict=True)) / len(known)
    at_first = sum(-(-h.prompt_tokens // block) - s for (h, _), s in zip(known, shared, strict=True)) / len(known)
    kept = facts.setting("sched.watermark_permille") / 1000
    usable = facts.capacity_frames * (1 - kept) - max(shared)
    tokens = sum(h.tokens for h, _ in known) / len(known)
    fits, fits_at_end, fits_at_first = (
        max(1, int(usable / max(frames, 0.5))) for frames in ((at_end + at_first) / 2, at_end, at_first)
    )
    return Room(fits, fits_at_end, fits_at_first, at_end, at_first, tokens)


def _shared(c: Compared) -> int:
    """Tokens that it shares with another from the start.  Its hits count where more is shared than is known of prompts; not
    elsewhere, since what is found again after a preemption is a hit, too."""
    if c.common < len(c.tokens) or c.common == c.row.prompt_tokens:
        return c.common
    return max(c.common, min(c.row.hit_tokens, c.row.prompt_tokens))
