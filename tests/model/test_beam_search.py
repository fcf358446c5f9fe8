"""Beam search over system calls against transformers' own: the same beams with the same scores, on the same weights."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pytest
import tokenizers
import torch

from attnix.syscalls import Client, connect
from attnix.userland.launch import launch, stop
from attnix.userland.programs import Hypothesis, beam_search

Tiny = Callable[[str], tuple[Path, Any]]

Early = Literal[True, False, "never"]
EARLY: Final[tuple[Early, ...]] = (False, True, "never")
PENALTIES = (-0.5, 1.0, 2.0)
WIDTH = 4
SCORE_ERROR = 1e-3  # as of logits in test_hf_equal.py


def byte_tokenizer(folder: Path) -> None:
    """The daemon wants a tokenizer; what it does is of no matter here."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made = tokenizers.Tokenizer(tokenizers.models.BPE({piece: n for n, piece in enumerate(sorted(alphabet))}, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A tiny model is all synchronisation: with two threads on a busy machine transformers takes ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def served(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Any]]:
    """A daemon with a tiny model in float32, and transformers' model of the same weights."""
    path, model = tiny_model("qwen3")
    folder = tmp_path_factory.mktemp("beam")
    shutil.copytree(path, folder / "model")
    byte_tokenizer(folder / "model")
    flags = ["--model", str(folder / "model"), "--state-dir", str(folder / "state"), "--threads", "1", "--hbm", "16MiB"]
    flags += ["--dtype", "float32", "--kv-dtype", "float32", "--numerics", "invariant", "--max-contexts", "64"]
    launched = launch(flags, str(folder / "s.sock"), str(folder / "log"), 120)
    try:
        with connect(launched.socket, timeout=120) as system:
            yield system, model
            assert system.fsck().problems == ()
            tier = system.tiers().tiers[0]
            assert tier.free_frames + tier.reclaimable_frames == tier.capacity_frames
    finally:
        assert stop(launched.process) == 0


def theirs(model: Any, prompt: list[int], max_tokens: int, stops: list[int], **options: Any) -> list[Hypothesis]:
    """transformers' beams, without the padding."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, num_beams=WIDTH, do_sample=False,
            num_return_sequences=WIDTH, eos_token_id=stops or None, pad_token_id=299, return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
    found = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((at + 1 for at, token in enumerate(row) if token in stops), len(row))
        found.append(Hypothesis(tuple(row[:end]), score, "stop" if row[end - 1] in stops else "length"))
    return found


def ours(system: Client, prompt: list[int], max_tokens: int, stops: list[int], **options: Any) -> list[Hypothesis]:
    with system.alloc_context() as context:
        context.append(tokens=prompt)
        found = beam_search(context, WIDTH, max_tokens, stop_tokens=stops, **options)
        assert context.stat().tokens == len(prompt)
    assert system.vmstat().counters["contexts"] == 0, "beams are left"
    return found


def prompts(n: int) -> list[list[int]]:
    draw = np.random.default_rng(11)
    return [draw.integers(2, 300, int(length)).tolist() for length in draw.integers(1, 50, n)]


def stops_within_reach(model: Any, prompt: list[int], n: int) -> list[int]:
    """Tokens that beams do come to: the commonest of those that transformers' beams hold when nothing stops them."""
    seen = [token for beam in theirs(model, prompt, 10, []) for token in beam.tokens[1:]]
    return sorted(set(seen), key=lambda token: (-seen.count(token), token))[:n]


def assert_equal(got: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [(one.tokens, one.reason) for one in got] == [(one.tokens, one.reason) for one in expected]
    assert np.abs(np.array([a.score - b.score for a, b in zip(got, expected, strict=True)])).max() < SCORE_ERROR


def test_equals_transformers(served: tuple[Client, Any]) -> None:
    """Every penalty with every way to stop early, over prompts of three lengths with one to three stop tokens."""
    system, model = served
    found: dict[tuple[int, float, Early], list[Hypothesis]] = {}
    for n, prompt in enumerate(prompts(6)[::2]):
        stops = stops_within_reach(model, prompt, (1, 3, 2)[n])
        for penalty, early in itertools.product(PENALTIES, EARLY):
            options: dict[str, Any] = {"length_penalty": penalty, "early_stopping": early}
            found[n, penalty, early] = expected = theirs(model, prompt, 16, stops, **options)
            assert_equal(ours(system, prompt, 16, stops, **options), expected)
    # Controls: a search that ignored an option would have been found out.
    assert {one.reason for beams in found.values() for one in beams} == {"stop", "length"}
    assert any(found[n, -0.5, False] != found[n, 2.0, False] for n in range(3))
    assert any(found[n, 1.0, False] != found[n, 1.0, True] for n in range(3))
    assert any(found[n, 1.0, False] != found[n, 1.0, "never"] for n in range(3))


@pytest.mark.parametrize("max_tokens", [1, 2, 40])
def test_equals_transformers_at_other_lengths(served: tuple[Client, Any], max_tokens: int) -> None:
    system, model = served
    for prompt in ([5], prompts(6)[1]):
        for stops in ([], stops_within_reach(model, prompt, 2)):
            assert_equal(ours(system, prompt, max_tokens, stops), theirs(model, prompt, max_tokens, stops))


def test_the_model_s_own_stop_token_and_the_window(served: tuple[Client, Any]) -> None:
    """Without stop_tokens they are those of the model (0 here); the window ends every beam."""
    system, model = served
    prompt = (prompts(6)[2] * 10)[:250]
    window = system.uname().window_tokens
    assert window == 256
    with system.alloc_context() as context:
        context.append(tokens=prompt)
        got = beam_search(context, WIDTH, 64)
    assert_equal(got, theirs(model, prompt, window - len(prompt), [0]))


def test_what_cannot_be_searched_is_said(served: tuple[Client, Any]) -> None:
    system, _ = served
    with system.alloc_context() as context:
        context.append(tokens=[5, 6, 7])
        with pytest.raises(ValueError, match="a width of at most 64"):
            beam_search(context, 65, 4)
        with pytest.raises(ValueError, match="at least 1"):
            beam_search(context, 0, 4)
        context.append(tokens=[5] * 253)
        with pytest.raises(ValueError, match="fills the window of 256"):
            beam_search(context, 4, 4)
    assert system.vmstat().counters["contexts"] == 0
