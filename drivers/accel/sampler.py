"""From logits to tokens: penalties, temperature, filters, and a draw that a redo repeats.

Order, for a sequence with temperature > 0 (that of Hugging Face's logits processors):

    repetition penalty -> presence and frequency penalties -> temperature -> top-k -> top-p -> min-p -> draw

With temperature 0, or top_k 1, the most likely token after the penalties is taken (the lowest id of equals).

    repetition   CTRL (arXiv 1909.05858, section 4.1): every token of the history, divided where > 0, multiplied where < 0
    presence,    a constant, and a multiple of the count, taken off each token *generated* so far (the OpenAI API's
    frequency      definition): tokens of the prompt do not count
    top-k        tokens at least as likely as the k-th; equals of the k-th stay
    top-p        the fewest most likely tokens with together >= p of what top-k left (arXiv 1904.09751); equals stay
    min-p        tokens with at least p times the probability of the likeliest (arXiv 2407.01082)

The draw inverts the cumulative distribution in vocabulary order at a number that is a pure function of (seed, position
of the sampled token): Philox-4x32-10, so nothing has to be remembered between passes.  Each row is computed on its own:
what else is in the batch changes nothing.

Reported log-probabilities are the model's own: before penalties, temperature and filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .cpu.ops import chosen_isa, log_sums

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Seqs = npt.NDArray[Any]  # structured, attnix.kernel.batch.SEQ_FIELDS

_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_ROUNDS: Final = 10
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))  # golden ratio, sqrt(3) - 1

_BLOCK: Final = 256  # width of the coarse level of the inverse
_ROWS: Final = 8  # rows handled together: a few MB, so that they stay in the cache
_NUCLEUS: Final = 512  # most nuclei are smaller than this; larger ones take a sort of the whole row
_GROUPS: Final = 4  # groups per wanted value in `_upper`: more groups, fewer values left


class BadLogits(Exception):
    """A row of logits has no finite maximum (NaN, or infinities): the pass must fail rather than return a token."""


class Top(NamedTuple):
    """The most likely tokens of one row, most likely first; the lower id first among equals."""

    tokens: I32  # [k]
    logprobs: F32  # [k]


class Drawn(NamedTuple):
    tokens: I32  # [B]
    logprobs: F32  # [B]


# -- random numbers -----------------------------------------------------------------------------------------------


def philox(counter: U32, key: U32) -> U32:
    """Philox-4x32-10: ten rounds over a counter, keyed.  Salmon et al., SC'11, section 3.3.

    counter  [B, 4]  u32
    key      [B, 2]  u32
    ->       [B, 4]  u32
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[:, i].astype(np.uint64) for i in range(2))
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _LOW, (product0 >> _HALF) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(seeds: U64, positions: I64) -> F64:
    """One number in [0, 1) with 53 bits per (seed, position), the same every time.

    seeds      [B]  u64   key
    positions  [B]  i64   counter
    ->         [B]  f64
    """
    position = positions.astype(np.uint64)
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 0], counter[:, 1] = position & _LOW, position >> _HALF
    key = np.stack([seeds & _LOW, seeds >> _HALF], axis=1).astype(np.uint32)
    words = philox(counter, key).astype(np.float64)
    high, low = np.floor(words[:, 0] / 32), np.floor(words[:, 1] / 64)  # 27 and 26 bits
    numbers: F64 = (high * 2.0**26 + low) / 2.0**53
    return numbers


# -- log-probabilities --------------------------------------------------------------------------------------------


def normalizers(logits: F32) -> tuple[F64, I32]:
    """log(sum(exp(row))) of each row, and its most likely token (the lowest id of equals).

    logits  [B, V]  f32
    ->      [B]     f64
            [B]     i32
    Error: BadLogits names the rows without a finite maximum.
    """
    sums, best = log_sums(logits, isa=chosen_isa())
    bad = np.flatnonzero(np.isnan(sums))
    if len(bad):
        peaks = logits[bad[:8]].max(axis=1).tolist()
        raise BadLogits(f"logits of row {', '.join(map(str, bad[:8]))} are not finite: {peaks}")
    return sums, best


def token_logprobs(logits: F32, targets: npt.NDArray[np.integer[Any]]) -> F32:
    """Log-probability of one given token per row.

    logits   [B, V]  f32
    targets  [B]     int
    ->       [B]     f32
    Error: BadLogits.
    """
    return _chosen(logits, targets, normalizers(logits)[0])


def _chosen(logits: F32, tokens: npt.NDArray[np.integer[Any]], sums: F64) -> F32:
    logprobs: F32 = (logits[np.arange(len(logits)), tokens].astype(np.float64) - sums).astype(np.float32)
    return logprobs


def top_logprobs(logits: F32, k: int, allowed: npt.NDArray[np.bool_] | None = None) -> Top:
    """The k most likely tokens of one row (all of them when there are fewer), among those allowed.

    logits   [V]  f32
    allowed  [V]  bool, or None: all.  It chooses; the log-probabilities stay the model's own
    Error: BadLogits.
    """
    normalizer = normalizers(logits[None])[0][0]
    ids = np.arange(len(logits)) if allowed is None else np.flatnonzero(allowed)
    k = min(k, len(ids))
    if k <= 0:
        return Top(np.empty(0, np.int32), np.empty(0, np.float32))
    best = ids[_likeliest(logits if allowed is None else logits[ids], k)]
    return Top(best.astype(np.int32), (logits[best].astype(np.float64) - normalizer).astype(np.float32))


def _likeliest(row: F32, k: int) -> I64:
    """Where the k largest values are, the largest first and the lower index first among equals; 1 <= k <= len(row)."""
    candidates = np.flatnonzero(row >= _kth_largest(row, k))
    best: I64 = candidates[np.lexsort((candidates, -row[candidates]))[:k]]
    return best


# -- sampling -----------------------------------------------------------------------------------------------------


def sample(logits: F32, seqs: Seqs, histories: Sequence[I32 | None]) -> Drawn:
    """One token per row.

    logits     [B, V]  f32   last position of each sequence; not changed
    seqs       [B]     SEQ_FIELDS: sampling parameters; the position of the sampled token is start + ntokens
    histories  B entries: the tokens before the sampled one, for rows with penalties, else None
    ->         tokens [B] i32, logprobs [B] f32
    Error: BadLogits; ValueError for a history with ids outside the vocabulary or a temperature that is no number.
    """
    if not np.isfinite(seqs["temperature"]).all():
        raise ValueError(f"temperatures must be finite, not {seqs['temperature'].tolist()}")
    greedy = (seqs["temperature"] <= 0) | (seqs["top_k"] == 1)
    sums, tokens = normalizers(logits)  # raises before a NaN could be drawn from
    penalised = [row for row, history in enumerate(histories) if history is not None]
    if penalised:
        adjusted = logits.copy()
        for row in penalised:
            history = histories[row]
            assert history is not None
            _penalise(adjusted[row], history, seqs[row])
            tokens[row] = adjusted[row].argmax()
    else:
        adjusted = logits
    drawn = np.flatnonzero(~greedy)
    for first in range(0, len(drawn), _ROWS):
        rows = drawn[first : first + _ROWS]
        weights = _weights(adjusted[rows], seqs[rows])
        positions = seqs["start"][rows].astype(np.int64) + seqs["ntokens"][rows]
        tokens[rows] = _invert(weights, uniforms(seqs["seed"][rows].astype(np.uint64), positions))
    return Drawn(tokens, _chosen(logits, tokens, sums))


def _penalise(row: F32, history: I32, seq: Seqs) -> None:
    """Lower, in place, the logits of tokens that have been used."""
    if len(history) and not 0 <= history.min() <= history.max() < len(row):
        raise ValueError(f"history of context {seq['context']} has token ids outside 0..{len(row) - 1}")
    repetition = float(seq["repetition_penalty"])
    if repetition != 1.0:
        seen = np.unique(history)
        row[seen] = np.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
    presence, frequency = float(seq["presence_penalty"]), float(seq["frequency_penalty"])
    if presence or frequency:
        generated, counts = np.unique(history[int(seq["prompt_tokens"]) :], return_counts=True)
        row[generated] -= (presence + frequency * counts).astype(np.float32)


def _weights(logits: F32, seqs: Seqs) -> F32:
    """Relative probabilities [B, V] after temperature and filters; the largest of each row is 1."""
    with np.errstate(over="ignore"):  # a tiny temperature: far tokens go to exp(-inf) = 0
        weights: F32 = np.exp((logits - logits.max(axis=1, keepdims=True)) / seqs["temperature"][:, None])
    for row, seq in zip(weights, seqs, strict=True):
        floor = _floor(row, int(seq["top_k"]), float(seq["top_p"]), float(seq["min_p"]))
        if floor > 0:
            row[row < floor] = 0
    return weights


def _floor(row: F32, top_k: int, top_p: float, min_p: float) -> float:
    """The weight that a token must have to stay."""
    floor = min_p
    left = row
    if 0 < top_k < len(row):
        kth = _kth_largest(row, top_k)
        floor = max(floor, float(kth))
        left = row[row >= kth]
    if top_p < 1:
        floor = max(floor, float(_nucleus_floor(left, top_p)))
    return min(floor, 1.0)  # whatever was asked for, the likeliest token stays


def _upper(row: F32, k: int) -> F32:
    """Values of the row that include its k largest, usually few more; requires 1 <= k <= len(row).

    Cut the row into at least k groups: at least k values are as large as the k-th largest of the groups' maxima, so
    whatever is below that is not among the k largest.  Much less work than selecting in the whole row.
    """
    width = len(row) // (_GROUPS * k)
    if width < 2:
        return row
    groups = len(row) // width
    maxima = row[: groups * width].reshape(width, groups).max(axis=0)
    upper: F32 = row[row >= np.partition(maxima, groups - k)[groups - k]]
    return upper


def _kth_largest(row: F32, k: int) -> np.float32:
    upper = _upper(row, k)
    return np.float32(np.partition(upper, len(upper) - k)[len(upper) - k])


def _nucleus_floor(row: F32, p: float) -> np.float32:
    """The weight of the last token of the smallest set of likeliest tokens that holds p of the mass."""
    wanted = p * row.sum(dtype=np.float64)
    largest = _upper(row, min(_NUCLEUS, len(row)))
    if len(largest) < len(row) and largest.sum(dtype=np.float64) < wanted:
        largest = row
    descending = np.sort(largest)[::-1]
    within = np.cumsum(descending, dtype=np.float64)
    return np.float32(descending[min(int(np.searchsorted(within, wanted)), len(descending) - 1)])


def _invert(weights: F32, numbers: F64) -> I64:
    """Token whose share of the cumulative sum, in vocabulary order, holds number x total.

    Two levels (sums of 256, then inside one block): a float64 cumulative sum over the whole vocabulary is not needed.
    A token of weight 0 is never returned.

    weights  [B, V]  f32, at least one > 0 in each row
    numbers  [B]     f64 in [0, 1)
    """
    rows, vocab = weights.shape
    blocks = -(-vocab // _BLOCK)
    padded = weights
    if vocab % _BLOCK:
        padded = np.zeros((rows, blocks * _BLOCK), np.float32)
        padded[:, :vocab] = weights
    grid = padded.reshape(rows, blocks, _BLOCK)
    upto = np.cumsum(grid.sum(axis=2, dtype=np.float64), axis=1)
    targets = numbers * upto[:, -1]
    tokens = np.empty(rows, np.int64)
    for row in range(rows):
        block = _first_above(upto[row], targets[row])
        before = upto[row, block - 1] if block else 0.0
        inner = np.cumsum(grid[row, block], dtype=np.float64)
        tokens[row] = block * _BLOCK + _first_above(inner, targets[row] - before)
    return tokens


def _first_above(cumulative: F64, target: float) -> int:
    """First index whose sum exceeds target; rounding at the very end falls back to the last step upwards."""
    index = int(np.searchsorted(cumulative, target, side="right"))
    return index if index < len(cumulative) else int(np.searchsorted(cumulative, cumulative[-1], side="left"))
