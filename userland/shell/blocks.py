"""A page table as blocks, and blocks that are alike as runs: what `pmap`, `cat`, `tree` and `lsctx` read out of `pagemap`."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from attnix.syscalls.types import PagemapResult

FULL, INDEXED, VALID, WIRED = 1, 2, 4, 8


class Block(NamedTuple):
    """A logical block.  frame -1: none in hbm.  copies: a bit per device.  age_ms -1: nobody knows."""

    number: int
    start: int  # its first token
    tokens: int
    frame: int
    shift: int
    sharers: int
    flags: int
    hits: int
    copies: int
    age_ms: int


class Run(NamedTuple):
    """Neighbours that differ in frame, hits and age only."""

    first: Block
    last: Block
    frames: tuple[int, ...]
    hits: tuple[int, int]  # fewest, most
    ages_ms: tuple[int, int]  # latest, longest ago


def blocks_of(seen: PagemapResult) -> list[Block]:
    """In order, those that have no frame and no copy in any tier at the end."""
    columns = [array(kind, data) for kind, data in zip("iihiBi", seen[4:10], strict=True)]
    frames, shifts, counts, sharers, flags, hits = columns
    copies, ages = seen.copies, array("i", seen.ages)
    total = -(-seen.tokens // seen.block_tokens)
    made, start = [], 0
    for number in range(max(total, len(frames))):
        known = number < len(frames)
        tokens = counts[number] if known else max(0, min(seen.block_tokens, seen.tokens - start))
        held = copies[number] if number < len(copies) else 0
        row = (
            (frames[number], shifts[number], sharers[number], flags[number], hits[number])
            if known
            else (-1, 0, 0, 0, 0)
        )
        frame, shift, sharing, flag, hit = row
        made.append(
            Block(
                number,
                start,
                tokens,
                frame,
                shift,
                sharing,
                flag,
                hit,
                held,
                ages[number] if number < len(ages) else -1,
            )
        )
        start += tokens
    return made


def runs(blocks: Sequence[Block]) -> Iterator[Run]:
    """Folded: what people read of a long context."""
    members: list[Block] = []
    for block in blocks:
        if members and not _alike(members[-1], block):
            yield _run(members)
            members = []
        members.append(block)
    if members:
        yield _run(members)


def _alike(a: Block, b: Block) -> bool:
    return _kind(a) == _kind(b)


def _kind(block: Block) -> tuple[object, ...]:
    return (block.frame >= 0, block.shift, block.sharers, block.flags, block.copies, block.age_ms < 0)


def _run(members: Sequence[Block]) -> Run:
    hits = [block.hits for block in members]
    ages = [block.age_ms for block in members]
    frames = tuple(block.frame for block in members if block.frame >= 0)
    return Run(members[0], members[-1], frames, (min(hits), max(hits)), (min(ages), max(ages)))


def frames_text(frames: Sequence[int]) -> str:
    """`7-34` of frames in a row, `34-7` backwards, `7 9 12 +25` of others; `-` of none."""
    if not frames:
        return "-"
    if len(frames) == 1:
        return str(frames[0])
    step = frames[1] - frames[0]
    if abs(step) == 1 and all(b - a == step for a, b in pairwise(frames)):
        return f"{frames[0]}-{frames[-1]}"
    more = f" +{len(frames) - 3}" if len(frames) > 3 else ""
    return " ".join(map(str, frames[:3])) + more


def span_text(low: int, high: int) -> str:
    """`4`, `4-7`"""
    return str(low) if low == high else f"{low}-{high}"


def shared_tokens(parent: Sequence[Block], child: Sequence[Block]) -> tuple[int, bool]:
    """Tokens at the start of both that lie in the same frames; and whether that is all, as far as frames can tell: of blocks
    that one of them does not have in hbm they cannot."""
    found = 0
    for a, b in zip(parent, child, strict=False):
        if a.frame < 0 or b.frame < 0:
            return found, False
        if a.frame != b.frame:
            break
        found += min(a.tokens, b.tokens)
    return found, True
