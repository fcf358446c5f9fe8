"""What things cost here: measured by the drivers and by the passes themselves, never a constant in the code.

    t_prefill(n, c) = a*n + b*n*(c + n/2) + k      n tokens computed on top of c that are there (DESIGN.md §4)
    t_decode(n, c)  = a*n + b*c + k                a token of each of n contexts that have c cached tokens between them
    t_move(n)       = latency + bytes / bandwidth   of a transfer, per device and direction

Prefill is fitted by least squares over the passes seen, older ones forgotten exponentially (recursive least squares,
Haykin, *Adaptive Filter Theory*, ch. 10, written as normal equations: three unknowns).  Bandwidth and latency are
exponentially weighted averages.  Until something has been measured the answer is "unknown" and the caller keeps what it has.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import Final, NamedTuple

from .params import LINK_SETTLES

_KEEP: Final = 0.98  # weight that a pass keeps when the next one is seen
_SMOOTH: Final = 0.2  # weight of the latest transfer
_ENOUGH: Final = 3.0  # weighted passes before the fit is believed


class Prefill(NamedTuple):
    """a and b in ns per token and per token pair, k in ns per pass."""

    a: float
    b: float
    k: float

    def ns(self, tokens: int, cached: int) -> float:
        return self.a * tokens + self.b * tokens * (cached + tokens / 2) + self.k if tokens > 0 else 0.0

    def tokens_in(self, ns: float, cached: int) -> int:
        """Most tokens on top of `cached` that lengthen a pass by at most `ns`."""
        first = self.a + self.b * cached
        if ns <= 0:
            return 0
        if first <= 0 and self.b <= 0:
            return 1 << 30
        # The positive root of b/2 n^2 + first n = ns, in the form that also holds for b = 0.
        return int(2 * ns / (first + sqrt(first * first + 2 * self.b * ns)))


class Decode(NamedTuple):
    """a in ns per context, b per cached token, k per pass."""

    a: float
    b: float
    k: float

    def ns(self, contexts: int, cached: float) -> float:
        return self.a * contexts + self.b * cached + self.k if contexts > 0 else 0.0

    def one_ns(self, cached: float) -> float:
        """What one more context adds to a pass."""
        return self.a + self.b * cached


class Fit:
    """Three costs of one compute device that passes are made of."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._xx = [[0.0] * 3 for _ in range(3)]
        self._xy = [0.0] * 3
        self._fit: tuple[float, float, float] | None = None

    def _seen(self, first: float, second: float, elapsed_ns: float) -> None:
        x = (first, second, 1.0)
        self._weight = self._weight * _KEEP + 1
        for i in range(3):
            self._xy[i] = self._xy[i] * _KEEP + x[i] * elapsed_ns
            for j in range(3):
                self._xx[i][j] = self._xx[i][j] * _KEEP + x[i] * x[j]
        self._fit = None

    def _known(self) -> tuple[float, float, float] | None:
        """The fit, with no negative part; None before enough has been seen."""
        if self._weight < _ENOUGH:
            return None
        if self._fit is None:
            self._fit = self._solve()
        return self._fit

    def _solve(self) -> tuple[float, float, float]:
        """Least squares with the parts that come out negative left out, one by one: b first, then k."""
        for parts in ((0, 1, 2), (0, 2), (0, 1), (0,)):
            solution = _solve(self._xx, self._xy, parts)
            if solution is not None and all(v >= 0 for v in solution.values()):
                return (solution.get(0, 0.0), solution.get(1, 0.0), solution.get(2, 0.0))
        return (self._xy[2] / max(self._xx[0][2], 1.0), 0.0, 0.0)


class PrefillFit(Fit):
    """The cost of prompts."""

    def seen(self, tokens: int, pairs: float, elapsed_ns: float) -> None:
        """A pass of prompts only took so long.  pairs: sum of n * (c + n/2) over its sequences."""
        self._seen(float(tokens), pairs, elapsed_ns)

    def known(self) -> Prefill | None:
        fit = self._known()
        return Prefill(*fit) if fit is not None else None


class DecodeFit(Fit):
    """The cost of decoding."""

    def seen(self, contexts: int, cached: int, elapsed_ns: float) -> None:
        """A pass of decoding only took so long.  cached: tokens that its contexts have between them."""
        self._seen(float(contexts), float(cached), elapsed_ns)

    def known(self) -> Decode | None:
        fit = self._known()
        return Decode(*fit) if fit is not None else None


def _solve(xx: list[list[float]], xy: list[float], parts: tuple[int, ...]) -> dict[int, float] | None:
    """Gaussian elimination on the chosen rows and columns, scaled to unit diagonal.  None: (nearly) singular."""
    scale = {i: xx[i][i] ** 0.5 for i in parts}
    if min(scale.values()) <= 0:
        return None
    rows = [[xx[i][j] / (scale[i] * scale[j]) for j in parts] + [xy[i] / scale[i]] for i in parts]
    n = len(parts)
    for c in range(n):
        best = max(range(c, n), key=lambda r: abs(rows[r][c]))
        rows[c], rows[best] = rows[best], rows[c]
        if abs(rows[c][c]) < 1e-6:
            return None
        for r in range(n):
            if r != c:
                f = rows[r][c] / rows[c][c]
                rows[r] = [x - f * y for x, y in zip(rows[r], rows[c], strict=True)]
    return {i: rows[c][n] / rows[c][c] / scale[i] for c, i in enumerate(parts)}


class Link:
    """One direction of one device: how fast bytes go."""

    __slots__ = ("bytes_s", "first_bytes_s", "late_ns", "latency_ns", "moved_bytes", "moves")

    def __init__(self, bytes_s: float = 0.0, latency_ns: float = 0.0) -> None:
        self.bytes_s = bytes_s  # 0: unknown
        self.latency_ns = latency_ns
        self.first_bytes_s = 0.0  # when it came up, or once it had settled; 0: not yet
        self.late_ns = 0.0  # that transfers took longer than they would have then
        self.moved_bytes = 0
        self.moves = 0

    def measured(self, bytes_s: float, latency_ns: float) -> None:
        """By its driver, before anything went over it."""
        self.bytes_s = self.first_bytes_s = bytes_s
        self.latency_ns = latency_ns

    def seen(self, moved_bytes: int, elapsed_ns: int, items: int) -> None:
        """A transfer of `items` frames ended.  Those of one frame say more about latency, the others about bandwidth."""
        if moved_bytes <= 0 or elapsed_ns <= 0:
            return
        self.moves += 1
        self.moved_bytes += moved_bytes
        if items > 1 or not self.bytes_s:
            self.bytes_s = _blend(self.bytes_s, moved_bytes * 1e9 / elapsed_ns)
        elif items == 1:
            self.latency_ns = _blend(self.latency_ns, max(0.0, elapsed_ns - moved_bytes * 1e9 / self.bytes_s))
        if self.first_bytes_s:
            self.late_ns += max(0.0, elapsed_ns - self.latency_ns - moved_bytes * 1e9 / self.first_bytes_s)
        elif self.moves == LINK_SETTLES:
            self.first_bytes_s = self.bytes_s

    def ns(self, n_bytes: int) -> float:
        """0 when nothing is known."""
        return self.latency_ns + n_bytes * 1e9 / self.bytes_s if self.bytes_s else 0.0


def _blend(old: float, new: float) -> float:
    return new if not old else old + _SMOOTH * (new - old)


class Split(NamedTuple):
    """How to make blocks resident: compute those before `first_load`, load the rest."""

    first_load: int
    compute_ns: float
    load_ns: float
    all_load_ns: float
    all_compute_ns: float


def split(prefill: Prefill | None, link: Link, blocks: int, cached: int, block_tokens: int, frame_bytes: int) -> Split:
    """The cheapest split of `blocks` that follow `cached` tokens in hbm.

    A token costs more to compute the deeper it lies (a + b*c) and the same to load, so the head may be worth computing
    where the tail is worth loading; the crossing is where a block costs the same either way.
    """
    per_block = link.ns(frame_bytes) - link.latency_ns
    everything = link.ns(blocks * frame_bytes)
    if prefill is None or not link.bytes_s or not blocks:
        return Split(0, 0.0, everything, everything, 0.0)
    computed = prefill.ns(blocks * block_tokens, cached)
    crossing = blocks
    if prefill.b > 0:
        # Block i lies, on average, at cached + (i + 1/2) blocks: it is computed while that costs less than loading it.
        cross = ((per_block / block_tokens - prefill.a) / prefill.b - cached) / block_tokens - 0.5
        crossing = ceil(min(max(cross, 0.0), float(blocks)))
    elif prefill.a * block_tokens >= per_block:
        crossing = 0
    best = Split(0, 0.0, everything, everything, computed)
    for head in (crossing, blocks):
        head_ns = prefill.ns(head * block_tokens, cached)
        tail_ns = link.ns((blocks - head) * frame_bytes) if head < blocks else 0.0
        if head and head_ns + tail_ns < best.compute_ns + best.load_ns:
            best = Split(head, head_ns, tail_ns, everything, computed)
    return best


class Costs:
    """All measured costs of one kernel: read and write links per device number, prefill fits per compute device."""

    def __init__(self, devices: int, frame_bytes: int, block_tokens: int) -> None:
        self.frame_bytes = frame_bytes
        self.block_tokens = block_tokens
        self.prefill = [PrefillFit() for _ in range(devices)]
        self.decode = [DecodeFit() for _ in range(devices)]
        self._links: dict[tuple[int, str], Link] = {}

    def link(self, device: int, verb: str) -> Link:
        """verb: "read" out of the device's frames, "write" into them."""
        return self._links.setdefault((device, verb), Link())

    def links_of(self, device: int) -> list[tuple[str, Link]]:
        """The directions of a device that anything is known of."""
        found = ((verb, self._links.get((device, verb))) for verb in ("read", "write"))
        return [(verb, link) for verb, link in found if link is not None and link.bytes_s]

    def late_ns(self) -> int:
        """That all transfers took longer than their links did at first."""
        return round(sum(link.late_ns for link in self._links.values()))

    def forget(self, device: int) -> None:
        """Another device has this number now."""
        for verb in ("read", "write"):
            self._links.pop((device, verb), None)

    def rebuild_ns(self, device: int, depth: int) -> int:
        """To compute one block at that depth again, as part of a longer prompt; 0: unknown."""
        fit = self.prefill[device].known() if device < len(self.prefill) else None
        if fit is None:
            return 0
        n = self.block_tokens
        return int(fit.a * n + fit.b * n * (depth + n / 2))

    def depth_cheaper_than(self, device: int, ns: float) -> float:
        """Blocks that lie at a smaller depth take less than `ns` to compute again; 0: none, or unknown."""
        fit = self.prefill[device].known() if device < len(self.prefill) else None
        if fit is None:
            return 0.0
        n = self.block_tokens
        if fit.b <= 0:
            return float("inf") if fit.a * n < ns else 0.0
        return max(0.0, (ns / n - fit.a) / fit.b - n / 2)
