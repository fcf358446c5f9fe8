"""Where a generation's tokens stand in the log, when others were injected between them.

A generation begins at log position `start`.  Behind that stand the tokens it samples and those that were injected into it:

    injected    ((index, count), ...): `count` tokens stand before the sampled token `index`; index equal to the number of
                sampled tokens: behind the last of them.  Indices grow.

Everything that reads a generation back out of a log goes through these functions.
"""

from __future__ import annotations

from typing import TypeAlias

Injected: TypeAlias = tuple[tuple[int, int], ...]


def count(injected: Injected) -> int:
    """Tokens that were injected."""
    return sum(n for _, n in injected)


def extent(injected: Injected, sampled: int) -> int:
    """Tokens of the log, from `start` on, that the first `sampled` sampled ones and what stands before each take."""
    return sampled + sum(n for index, n in injected if index < sampled)


def add(injected: Injected, sampled: int, tokens: int) -> Injected:
    """So many more were injected behind `sampled` sampled ones."""
    if injected and injected[-1][0] == sampled:
        return (*injected[:-1], (sampled, injected[-1][1] + tokens))
    return (*injected, (sampled, tokens))


def cut(injected: Injected, keep: int) -> Injected:
    """Only the first `keep` sampled tokens stay, and everything that was injected: what stood further back is at the end now."""
    left = tuple(pair for pair in injected if pair[0] < keep)
    behind = count(injected) - count(left)
    return (*left, (keep, behind)) if behind else left


def split(tail: bytes, injected: Injected) -> tuple[bytes, bytes]:
    """(sampled, injected) tokens of a log from `start` on, all int32."""
    sampled, others, at = bytearray(), bytearray(), 0
    for index, n in injected:
        begin = at + 4 * index - len(sampled)
        sampled += tail[at:begin]
        others += tail[begin : begin + 4 * n]
        at = begin + 4 * n
    return bytes(sampled + tail[at:]), bytes(others)
