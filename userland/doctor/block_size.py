"""A block size too large for how long contexts are, or for what they share.

The last block of a context is half empty on average, and a prefix is shared in whole blocks only: what is left of it is in
every context's own frames.  Both cost half a block per context, which is nothing with 16 tokens and much with 128.
"""

from __future__ import annotations

from .facts import Facts
from .finding import Finding
from .prefixes import Compared

NAME = "block_size"
SHARE = 0.05  # of the frames that contexts need
FEWEST = 8
SIZES = (64, 32, 16)  # what is proposed; below 16 page tables and transfers get too many entries


def block_size(facts: Facts) -> Finding | None:
    block = facts.block_tokens
    compared = facts.ended
    if len(compared) < FEWEST or block <= min(SIZES):
        return None
    tokens, needed = sum(c.row.tokens for c in compared), _needed(compared, block)
    smaller = {size: _needed(compared, size) for size in SIZES if size < block}
    best = min(smaller.values())
    proposed = max(size for size, n in smaller.items() if n <= 1.03 * best)
    share = 1 - smaller[proposed] / needed
    if share < SHARE:
        return None
    half_empty = sum(-(-c.row.tokens // block) * block - c.row.tokens for c in compared)
    shareable = [_shareable(c) for c in compared if _shareable(c)]
    cut = sum(n % block for n in shareable)
    return Finding(
        NAME, f"Blocks of {block} tokens are too large for what is in them", share * facts.used_share, "frames",
        (
            f"the last {len(compared)} contexts have {tokens / len(compared):,.0f} tokens on average and take {needed:,} token slots; "
            f"with blocks of {proposed} they would take {smaller[proposed]:,}, {share:.0%} fewer",
            f"{half_empty:,} slots are empty at the ends of last blocks"
            + (f"; {cut:,} are copies of what {len(shareable)} prompts share but do not fill a block with" if cut else ""),
            f"{facts.used_share:.0%} of the frames were in use at most",
        ),
        (f"Boot with `attnix boot --block-tokens {proposed}`.  What lies in files and remote tiers under the old size is not found.",),
        numbers={
            "block_tokens": block, "proposed": proposed, "slots": needed, "slots_proposed": smaller[proposed],
            "empty_slots": half_empty, "unshared_slots": cut,
        },
    )  # fmt: skip


def _shareable(c: Compared) -> int:
    """Tokens of a prefix that it has, or could have, in common with another."""
    return max(c.common, c.alike.common + c.alike.same if c.alike is not None else 0)


def _needed(compared: list[Compared], block: int) -> int:
    """Token slots that they take, what they share counted once."""
    return sum(-(-c.row.tokens // block) * block - _shareable(c) // block * block for c in compared)
