"""The measuring half of `attnix study fragmentation`: three ways to give token slots to requests, on the kernel's own core.

    python -m attnix.study_fragmentation [--seed N] [--no-attention]      one JSON document on stdout

A pool of 32,768 token slots and a seeded stream of requests (PagedAttention, SOSP'23, section 3.1, has the question):

    max-length   every request reserves the window, 4,096 slots, whatever it will use
    exact fit    a contiguous run of exactly its length, first fit, holes merged when a request leaves
    paged b      frames of b tokens through `kernel/core.Core`: open_slot, append, admit, close_slot

Each is asked twice.  *Filled*: requests in order into the empty pool until one does not fit.  *Churn*: the same stream as a
queue, where an admitted request leaves after a seeded number of steps and the first one waiting is tried again at every
step; what is free in total while it is refused is what fragmentation costs.

Sharing: groups of requests with a common prefix of random length go through the core's index, which shares whole
blocks; the smaller the block, the more of the prefix is found.  What a small block costs is study_attention.py's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from array import array
from statistics import fmean
from typing import Final, NamedTuple, Protocol

from attnix.kernel.core import Core
from attnix.kernel.geometry import RowLayout
from attnix.kernel.records import OK

POOL_TOKENS: Final = 32_768
WINDOW_TOKENS: Final = 4_096
BLOCK_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REQUESTS: Final = 2_000
STEPS: Final = 400  # of churn
STAY: Final = (10, 120)  # steps that a request stays, uniform
TYPICAL_TOKENS: Final = 512  # median length; the spread is that of chat traces: log-normal with sigma 1
LEAST_TOKENS: Final = 16
ENTRY_BYTES: Final = 4 + 4 + 2  # frame, shift and count of a page-table entry
SLOTS: Final = 1_024
GROUPS: Final = 16  # of requests with one prefix each
MEMBERS: Final = 8
PREFIX_TOKENS: Final = (1, 1_024)


class Request(NamedTuple):
    """number tells its tokens from every other request's."""

    number: int
    tokens: int
    stay: int


class Placement(NamedTuple):
    """What one method did.  Token counts; `block_tokens` 0 where there are no blocks.

    admitted        into the empty pool before the first that did not fit
    used            tokens of those; reserved: slots taken for them; waste = reserved - used
    table_bytes     page-table entries of those, 10 bytes each
    mean_admitted, mean_used   over the steps of the churn
    refused         steps of the churn at which the first in the queue did not fit
    refused_in_spite of those, with enough slots free in total
    mean_free       slots free, on average, when refused
    """

    method: str
    block_tokens: int
    admitted: int
    used: int
    reserved: int
    waste: int
    waste_share: float
    table_bytes: int
    mean_admitted: float
    mean_used: float
    refused: int
    refused_in_spite: int
    mean_free: float


class Sharing(NamedTuple):
    """Prefix hits at one block size: of `possible` tokens that earlier requests had computed, `hit` were found."""

    block_tokens: int
    requests: int
    tokens: int
    possible: int
    hit: int
    hit_share: float
    held: int  # token slots in use with sharing


def requests(seed: int, count: int = REQUESTS) -> list[Request]:
    """The stream: the same for every method."""
    draw = random.Random(seed)
    lengths = (round(draw.lognormvariate(0.0, 1.0) * TYPICAL_TOKENS) for _ in range(count))
    return [Request(n, min(WINDOW_TOKENS, max(LEAST_TOKENS, x)), draw.randint(*STAY)) for n, x in enumerate(lengths)]


class Pool(Protocol):
    """A way to give slots away.  `enter` returns what names the place, or None and nothing was done."""

    block_tokens: int

    def enter(self, request: Request) -> int | None: ...
    def leave(self, place: int) -> None: ...
    def reserved_for(self, tokens: int) -> int: ...
    def free_tokens(self) -> int: ...


class MaxLength:
    """Reservation of the window."""

    block_tokens = 0

    def __init__(self) -> None:
        self._free = list(range(POOL_TOKENS // WINDOW_TOKENS))

    def enter(self, request: Request) -> int | None:
        return self._free.pop() if self._free else None

    def leave(self, place: int) -> None:
        self._free.append(place)

    def reserved_for(self, tokens: int) -> int:
        return WINDOW_TOKENS

    def free_tokens(self) -> int:
        return len(self._free) * WINDOW_TOKENS


class ExactFit:
    """Contiguous runs of exactly what is asked; first fit by address (Knuth, TAOCP 1, section 2.5, algorithm A)."""

    block_tokens = 0

    def __init__(self) -> None:
        self._holes: list[tuple[int, int]] = [(0, POOL_TOKENS)]  # (start, length) by start, never touching
        self._length: dict[int, int] = {}

    def enter(self, request: Request) -> int | None:
        for n, (start, length) in enumerate(self._holes):
            if length >= request.tokens:
                self._holes[n : n + 1] = [(start + request.tokens, length - request.tokens)] * (length > request.tokens)
                self._length[start] = request.tokens
                return start
        return None

    def leave(self, place: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._holes, (place, self._length.pop(place))]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._holes = merged

    def reserved_for(self, tokens: int) -> int:
        return tokens

    def free_tokens(self) -> int:
        return sum(length for _, length in self._holes)


class Paged:
    """The kernel's core.  Nothing is computed here, so a request that leaves gives its frames back at once."""

    def __init__(self, block_tokens: int, pool_tokens: int = POOL_TOKENS) -> None:
        self.block_tokens = block_tokens
        layout = RowLayout(SLOTS, WINDOW_TOKENS // block_tokens)
        rows = memoryview(bytearray(layout.total_bytes))
        self.core = Core(bytes(16), block_tokens, layout, [pool_tokens // block_tokens], [rows])
        self._root = self.core.hash(b"study")

    def enter(self, request: Request) -> int | None:
        first = request.number * WINDOW_TOKENS
        slot, _ = self.admit(array("i", range(first, first + request.tokens)))
        return slot

    def admit(self, tokens: array[int]) -> tuple[int | None, int]:
        """(slot, tokens found in the index); (None, 0) when it does not fit."""
        slot = self.core.open_slot(0, 1, self._root)
        assert slot >= 0, "more requests than slots"
        self.core.append(slot, tokens.tobytes())
        result = self.core.admit(slot, 0)
        if result.status != OK:
            self.core.close_slot(slot)
            return None, 0
        return slot, result.mapped_frames * self.block_tokens

    def leave(self, place: int) -> None:
        self.core.close_slot(place)

    def reserved_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens) * self.block_tokens

    def free_tokens(self) -> int:
        return self.core.free_frames(0) * self.block_tokens


def fill(pool: Pool, stream: list[Request]) -> list[Request]:
    """Admit in order until one does not fit; they stay."""
    admitted = []
    for request in stream:
        if pool.enter(request) is None:
            break
        admitted.append(request)
    return admitted


class Churn(NamedTuple):
    mean_admitted: float
    mean_used: float
    refused: int
    refused_in_spite: int
    mean_free: float


def churn(pool: Pool, stream: list[Request], steps: int = STEPS) -> Churn:
    """A queue that is never empty, and requests that leave."""
    leaves: dict[int, list[tuple[int, int]]] = {}  # step -> (place, tokens)
    waiting = iter(stream)
    head = next(waiting)
    admitted = used = in_spite = 0
    counts: list[int] = []
    uses: list[int] = []
    frees: list[int] = []
    for step in range(steps):
        for place, tokens in leaves.pop(step, ()):
            pool.leave(place)
            admitted, used = admitted - 1, used - tokens
        while (where := pool.enter(head)) is not None:
            leaves.setdefault(step + head.stay, []).append((where, head.tokens))
            admitted, used = admitted + 1, used + head.tokens
            head = next(waiting)
        frees.append(pool.free_tokens())
        in_spite += frees[-1] >= head.tokens
        counts.append(admitted)
        uses.append(used)
    return Churn(fmean(counts), fmean(uses), steps, in_spite, fmean(frees))


def placement(method: str, stream: list[Request], block_tokens: int = 0) -> Placement:
    def make() -> Pool:
        if block_tokens:
            return Paged(block_tokens)
        return MaxLength() if method == "max-length" else ExactFit()

    pool = make()
    admitted = fill(pool, stream)
    used = sum(request.tokens for request in admitted)
    reserved = sum(pool.reserved_for(request.tokens) for request in admitted)
    assert pool.free_tokens() == POOL_TOKENS - reserved, f"{method}: the pool does not add up"
    entries = reserved // block_tokens if block_tokens else 0
    return Placement(
        method, block_tokens, len(admitted), used, reserved, reserved - used, (reserved - used) / reserved,
        entries * ENTRY_BYTES, *churn(make(), stream),
    )  # fmt: skip


def placements(seed: int) -> list[Placement]:
    stream = requests(seed)
    paged = [placement("paged", stream, size) for size in BLOCK_SIZES]
    return [placement("max-length", stream), placement("exact fit", stream), *paged]


def shared_prompts(seed: int) -> list[tuple[int, array[int]]]:
    """(tokens of the prefix that an earlier request has, prompt), groups interleaved; what follows a prefix is unique."""
    draw = random.Random(seed)
    prefixes = [draw.randint(*PREFIX_TOKENS) for _ in range(GROUPS)]
    tails = requests(seed + 1, GROUPS * MEMBERS)
    made = []
    for tail in tails:
        group = tail.number % GROUPS
        own = (GROUPS + tail.number) * WINDOW_TOKENS
        length = min(tail.tokens, WINDOW_TOKENS - prefixes[group])
        prompt = array("i", range(group * WINDOW_TOKENS, group * WINDOW_TOKENS + prefixes[group]))
        prompt.extend(range(own, own + length))
        made.append((prefixes[group] if tail.number >= GROUPS else 0, prompt))
    return made


def sharing(seed: int, block_tokens: int) -> Sharing:
    """Every prompt admitted into a pool that holds them all."""
    prompts = shared_prompts(seed)
    total = sum(len(prompt) for _, prompt in prompts)
    pool_tokens = total + len(prompts) * block_tokens
    pool = Paged(block_tokens, pool_tokens)
    whole = pool.free_tokens()
    hit = 0
    for _, prompt in prompts:
        slot, found = pool.admit(prompt)
        assert slot is not None
        hit += found
    possible = sum(prefix for prefix, _ in prompts)
    return Sharing(block_tokens, len(prompts), total, possible, hit, hit / possible, whole - pool.free_tokens())


def study(seed: int, with_attention: bool) -> dict[str, object]:
    costs: list[dict[str, object]] = []
    if with_attention:
        from attnix.study_attention import attention  # torch: seconds to load

        measured = attention(seed, BLOCK_SIZES, POOL_TOKENS, WINDOW_TOKENS)
        costs = [each._asdict() for each in measured]
    return {
        "seed": seed,
        "pool_tokens": POOL_TOKENS,
        "window_tokens": WINDOW_TOKENS,
        "placements": [each._asdict() for each in placements(seed)],
        "sharing": [sharing(seed, size)._asdict() for size in BLOCK_SIZES],
        "attention": costs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="attnix.study_fragmentation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-attention", action="store_true", help="leave out what takes seconds and a model")
    options = parser.parse_args()
    json.dump(study(options.seed, not options.no_attention), sys.stdout)
    print()


if __name__ == "__main__":
    main()
