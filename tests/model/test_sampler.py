"""Sampling: published random numbers, the filters against transformers', and the exact distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from attnix.drivers.accel.sampler import BadLogits, philox, sample, token_logprobs, top_logprobs, uniforms
from attnix.kernel.batch import SEQ_FIELDS

F32 = npt.NDArray[np.float32]


def seqs(rows: int, **fields: Any) -> npt.NDArray[Any]:
    """`rows` records with every filter off unless named."""
    records = np.zeros(rows, np.dtype(SEQ_FIELDS))
    defaults = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "ntokens": 1}
    for name, value in (defaults | fields).items():
        records[name] = value
    return records


def draw(logits: F32, records: npt.NDArray[Any], histories: list[Any] | None = None) -> npt.NDArray[np.int32]:
    return sample(logits, records, histories or [None] * len(logits)).tokens


def random_logits(rows: int, vocab: int, seed: int = 0) -> F32:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


# Random123 1.14, tests/kat_vectors, "philox4x32 10"
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> npt.NDArray[np.uint32]:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


def test_philox_published_vectors() -> None:
    counters, keys, answers = (np.stack([words(row[i]) for row in KNOWN_ANSWERS]) for i in range(3))
    np.testing.assert_array_equal(philox(counters, keys), answers)


def test_uniforms_depend_on_both_halves_of_seed_and_position() -> None:
    seeds = np.array([1, 1 << 32, (1 << 32) | 1, 1], np.uint64)
    positions = np.array([5, 5, 5, 6], np.int64)
    numbers = uniforms(seeds, positions)
    assert len(set(numbers.tolist())) == 4
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_uniforms_are_uniform() -> None:
    numbers = uniforms(np.full(20000, 7, np.uint64), np.arange(20000))
    counts = np.histogram(numbers, 20, (0, 1))[0]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 43.8  # 0.1% quantile with 19 degrees of freedom


def test_redo_draws_the_same_and_the_batch_does_not_matter() -> None:
    logits = random_logits(12, 1000)
    records = seqs(12, seed=np.arange(12) * 977, start=np.arange(12) * 3, top_k=50, top_p=0.9)
    together = draw(logits, records)
    for row in range(12):
        assert draw(logits[row : row + 1], records[row : row + 1])[0] == together[row]
    np.testing.assert_array_equal(draw(logits[::-1].copy(), records[::-1].copy())[::-1], together)


def test_position_is_that_of_the_sampled_token() -> None:
    """The same position reached by a chunk of 4 or of 1 draws the same number."""
    logits = random_logits(1, 500)
    chunk = [draw(logits, seqs(1, seed=3, start=8 - size, ntokens=size))[0] for size in (1, 4, 8)]
    assert len(set(chunk)) == 1


def transformers_probabilities(logits: F32, temperature: float, top_k: int, top_p: float, min_p: float) -> F32:
    """The distribution after transformers' warpers, in its own order."""
    scores = torch.from_numpy(logits.copy())
    ids = torch.zeros((len(logits), 1), dtype=torch.long)
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    for warper in warpers:
        scores = warper(ids, scores)
    return np.asarray(torch.softmax(scores.double(), -1).numpy())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 8, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.03), (0.9, 12, 0.9, 0.02)],
)
def test_distribution_equals_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Draws at 20,000 positions: none outside the allowed set, and frequencies within chi-square."""
    logits = random_logits(1, 40, seed=4)
    expected = transformers_probabilities(logits, temperature, top_k, top_p, min_p)[0]
    n = 20000
    records = seqs(n, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=11, start=np.arange(n))
    counts = np.bincount(draw(np.repeat(logits, n, 0), records), minlength=40)
    assert counts[expected == 0].sum() == 0
    allowed = expected * n >= 5
    chi_square = ((counts - expected * n)[allowed] ** 2 / (expected * n)[allowed]).sum()
    degrees = allowed.sum() - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)
    assert allowed.sum() > 3


def test_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    """Against numpy's own searchsorted over the whole softmax; vocabulary wider than one block, and uneven."""
    logits = random_logits(64, 1500, seed=2)
    records = seqs(64, seed=5, start=np.arange(64))
    probabilities = np.exp(logits.astype(np.float64))
    probabilities /= probabilities.sum(1, keepdims=True)
    numbers = uniforms(records["seed"], records["start"].astype(np.int64) + 1)
    expected = [int(np.searchsorted(np.cumsum(row), u, "right")) for row, u in zip(probabilities, numbers, strict=True)]
    np.testing.assert_array_equal(draw(logits, records), expected)


def test_wide_nucleus_takes_the_exact_path() -> None:
    """A flat distribution: the nucleus of 0.9 over 5,000 equal-ish tokens is larger than the fast candidate set."""
    logits = (np.random.default_rng(1).standard_normal((1, 5000)) * 0.01).astype(np.float32)
    expected = transformers_probabilities(logits, 1.0, 0, 0.9, 0.0)[0]
    tokens = draw(np.repeat(logits, 3000, 0), seqs(3000, top_p=0.9, seed=1, start=np.arange(3000)))
    outside = (expected[tokens] == 0).sum()
    assert outside <= 1  # the border itself may differ: transformers sums in float32
    assert 4400 < (expected > 0).sum() < 4600


def test_greedy_is_argmax_and_lowest_of_equals() -> None:
    logits = np.zeros((3, 9), np.float32)
    logits[0, 4] = 1
    logits[1, [2, 7]] = 5
    np.testing.assert_array_equal(draw(logits, seqs(3, temperature=0)), [4, 2, 0])
    np.testing.assert_array_equal(draw(logits, seqs(3, top_k=1)), [4, 2, 0])


def test_repetition_penalty_equals_transformers() -> None:
    logits = random_logits(1, 60, seed=9)
    history = np.array([3, 3, 9, 50, 12], np.int32)
    penalise: Any = RepetitionPenaltyLogitsProcessor(1.7)
    expected = penalise(torch.from_numpy(history[None].astype(np.int64)), torch.from_numpy(logits.copy()))
    records = seqs(1, temperature=0, repetition_penalty=1.7)
    assert draw(logits, records, [history])[0] == int(expected.argmax())
    assert draw(logits, records, [np.array([int(logits.argmax())] * 2, np.int32)])[0] != logits.argmax()


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    logits = np.array([[3.0, 2.0, 0.0]], np.float32)
    prompt_only = np.array([0, 0, 0], np.int32)
    once = np.array([0, 0, 0, 0], np.int32)
    presence = seqs(1, temperature=0, presence_penalty=1.5, prompt_tokens=3)
    assert draw(logits, presence, [prompt_only])[0] == 0
    assert draw(logits, presence, [once])[0] == 1
    frequency = seqs(1, temperature=0, frequency_penalty=0.6, prompt_tokens=0)
    assert draw(logits, frequency, [np.array([0], np.int32)])[0] == 0  # 3 - 0.6
    assert draw(logits, frequency, [np.array([0, 0], np.int32)])[0] == 1  # 3 - 1.2


def test_history_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        sample(random_logits(1, 10), seqs(1, repetition_penalty=2.0), [np.array([10], np.int32)])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_poisoned_logits_fail(poison: float, temperature: float) -> None:
    logits = random_logits(4, 300)
    logits[2, 7] = poison
    with pytest.raises(BadLogits, match="row 2 "):
        sample(logits, seqs(4, temperature=temperature), [None] * 4)
    with pytest.raises(BadLogits):
        sample(np.full((1, 8), -np.inf, np.float32), seqs(1, temperature=temperature), [None])


def test_parameters_beyond_their_range() -> None:
    logits = random_logits(1, 300)
    assert draw(logits, seqs(1, min_p=2.0))[0] == draw(logits, seqs(1, top_p=-1.0))[0] == logits.argmax()
    with pytest.raises(ValueError, match="finite"):
        draw(logits, seqs(1, temperature=np.nan))


def test_minus_infinity_only_forbids() -> None:
    logits = np.full((200, 300), -np.inf, np.float32)
    logits[:, [5, 290]] = 0
    assert set(draw(logits, seqs(200, start=np.arange(200))).tolist()) == {5, 290}


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(5, 700)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    drawn = sample(logits, seqs(5, temperature=0.3, top_k=5, seed=1), [None] * 5)
    np.testing.assert_allclose(drawn.logprobs, expected[np.arange(5), drawn.tokens], atol=1e-5)
    targets = np.array([0, 3, 699, 8, 1])
    np.testing.assert_allclose(token_logprobs(logits, targets), expected[np.arange(5), targets], atol=1e-5)
    top = top_logprobs(logits[0], 10)
    reference = torch.from_numpy(expected[0]).topk(10)
    np.testing.assert_array_equal(top.tokens, reference.indices.numpy())
    np.testing.assert_allclose(top.logprobs, reference.values.numpy(), atol=1e-5)


def test_top_of_equals_and_of_a_small_vocabulary() -> None:
    assert top_logprobs(np.array([1, 2, 2, 0, 2], np.float32), 2).tokens.tolist() == [1, 2]
    assert top_logprobs(np.array([1, 2], np.float32), 50).tokens.tolist() == [1, 0]
    assert len(top_logprobs(np.array([1, 2], np.float32), 0).tokens) == 0


@given(st.data())
def test_a_drawn_token_is_always_allowed(data: st.DataObject) -> None:
    """Any filters, hard cases for rounding: huge ranges, tiny temperatures, many equal values."""
    vocab = data.draw(st.integers(1, 600))
    levels = data.draw(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=5))
    generator = np.random.default_rng(data.draw(st.integers(0, 9999)))
    logits = generator.choice(np.array(levels, np.float32), (1, vocab))
    records = seqs(
        1,
        temperature=data.draw(st.sampled_from([1e-30, 1e-3, 0.5, 1.0, 50.0])),
        top_k=data.draw(st.integers(0, 700)),
        top_p=data.draw(st.floats(0.0, 1.0, width=32)),
        min_p=data.draw(st.floats(0.0, 1.0, width=32)),
        seed=data.draw(st.integers(0, 2**64 - 1)),
    )
    token = draw(logits, records)[0]
    assert 0 <= token < vocab
    best = logits.max()
    if records["min_p"][0] > 0:
        ratio = np.exp((np.float64(logits[0, token]) - best) / np.float64(records["temperature"][0]))
        assert ratio >= records["min_p"][0] * (1 - 1e-3)
    # Likelier by more than rounding: float32 cannot tell e**-1e-7 from 1, and such tokens are equals to a sampler.
    ahead = (logits[0].astype(np.float64) - np.float64(logits[0, token])) / np.float64(records["temperature"][0])
    if records["top_k"][0] > 0:
        assert (ahead > 1e-6).sum() < records["top_k"][0]
    if records["top_p"][0] == 0:
        assert not (ahead > 1e-6).any()
