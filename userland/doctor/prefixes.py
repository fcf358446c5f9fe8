"""What the prompts of one domain have in common: from their first token on, and behind a beginning that differs.

Two prompts that differ in front are laid beside one another at the run of GRAM tokens that both have first, and from there
as far as they agree.  That finds what a request id, a time or a name in front has kept from being shared, whether or not the
two beginnings are of one length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from attnix.syscalls.types import HeadRow

FIRST: Final = 64  # a difference counts as in front when it begins within so many tokens ...
LOOK: Final = 192  # ... and ends within so many more
GRAM: Final = 8  # tokens that must agree before anything is laid side by side
EARLIER: Final = 12  # prompts that each is compared with: the latest of its domain


class Alike(NamedTuple):
    """Two prompts: the same up to `common`; then different up to `mine` and `other`; then the same for `same` tokens."""

    common: int
    mine: int
    other: int
    same: int


class Compared(NamedTuple):
    """A prompt, and the earlier one that it has most in common with behind a different beginning.

    common  longest prefix that it has in common with any earlier one
    """

    row: HeadRow
    tokens: Sequence[int]
    common: int
    alike: Alike | None
    other: HeadRow | None

    @property
    def to_the_end(self) -> bool:
        """They agree as far as is known: it may be more."""
        return self.alike is not None and self.alike.mine + self.alike.same == len(self.tokens) < self.row.prompt_tokens


def common_prefix(a: Sequence[int], b: Sequence[int], a_from: int = 0, b_from: int = 0) -> int:
    """Tokens from there on in which they agree."""
    most = min(len(a) - a_from, len(b) - b_from)
    for i in range(most):
        if a[a_from + i] != b[b_from + i]:
            return i
    return max(0, most)


def alike(mine: Sequence[int], other: Sequence[int]) -> Alike | None:
    """Where they agree again behind a difference in front.  None: nowhere near, or they do not differ there."""
    common = common_prefix(mine, other)
    if common > FIRST or common == min(len(mine), len(other)):
        return None
    grams: dict[tuple[int, ...], int] = {}
    for i in range(common, min(common + LOOK, len(other) - GRAM + 1)):
        grams.setdefault(tuple(other[i : i + GRAM]), i)
    for j in range(common, min(common + LOOK, len(mine) - GRAM + 1)):
        at = grams.get(tuple(mine[j : j + GRAM]))
        if at is not None:
            return Alike(common, j, at, common_prefix(mine, other, j, at))
    return None


def compare(heads: Sequence[HeadRow]) -> list[Compared]:
    """Each prompt of which the beginning is known, with the earlier ones of its domain."""
    found: list[Compared] = []
    for row in heads:
        tokens = array("i", row.head)
        if not tokens:
            continue
        earlier = [c for c in found if c.row.domain == row.domain][-EARLIER:]
        common = max((common_prefix(tokens, c.tokens) for c in earlier), default=0)
        best, whose = None, None
        for before in earlier:
            seen = alike(tokens, before.tokens)
            if seen is not None and (best is None or seen.same > best.same):
                best, whose = seen, before.row
        if best is not None and best.mine + best.same <= common:
            best, whose = None, None  # with another one it has all that in common from the start
        found.append(Compared(row, tokens, common, best, whose))
    return found
