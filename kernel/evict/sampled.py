"""What policies that rank sampled leaves share: draw a few dozen, order them by a rule, take each with what hangs above it.

Redis draws 5 keys and is close to exact LRU; with 64 leaves the worst of the sample is within the worst few percent of all.
The blocks above a leaf go with it as long as they are like it (used last at the same moment, as often): they were
one piece of one context and stand or fall together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .protocol import BlockView, Fact

SAMPLE: Final = 64
_SPREAD: Final = 0x9E3779B97F4A7C15  # turns a count into seeds (2**64 / golden ratio)


def draw(view: BlockView, device: int, count: int) -> tuple[Sequence[int], Sequence[Fact]]:
    """Leaves drawn for the `count`-th call of a policy, and their facts."""
    leaves = view.sample(device, SAMPLE, count * _SPREAD & 0xFFFFFFFFFFFFFFFF)
    return leaves, view.facts(leaves)


def take_ranked(view: BlockView, device: int, ranked: Sequence[tuple[float, int, int]], want: int) -> list[int]:
    """`want` blocks: leaves from the (rank, last use, leaf) rows given, least first, with the blocks like them above."""
    found: list[int] = []
    for _, _, leaf in ranked:
        if len(found) >= want:
            break
        chain = view.chain(device, leaf, want - len(found))
        if len(chain) > 1:
            facts = view.facts(chain)
            first = facts[0]
            like = 1
            while like < len(chain) and facts[like].used_ns == first.used_ns and facts[like].hits == first.hits:
                like += 1
            chain = chain[:like]
        found += chain
    return found
