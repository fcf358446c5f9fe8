"""The forward pass against transformers on the same weights: logits, greedy text, and the bfloat16 error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from attnix.drivers.accel.cuda.weights import as_tensor
from attnix.drivers.accel.weights import load_model
from attnix.syscalls.text import ChatMessage, TextModel, load_text

F32 = npt.NDArray[np.float32]
Tiny = Callable[[str], tuple[Path, Any]]

FAMILIES = ["llama", "llama-tied", "llama3-rope", "llama-linear-rope", "mistral", "qwen2", "qwen3"]
MAX_DIFFERENCE = 1e-3  # of float32 logits
GREEDY_TOKENS = 64


def hf_logits(model: Any, tokens: list[int]) -> F32:
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return np.asarray(logits.float().numpy())


def assert_greedy(model: Any, prompt: list[int], generated: list[int]) -> None:
    """transformers' own greedy text of this length is `generated`.

    One pass over prompt and text instead of one per token: if at every position its most likely token is the next one
    of `generated`, then by induction generating one at a time gives the same.
    """
    logits = hf_logits(model, [*prompt, *generated])
    said = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    if said != generated:
        at = next(i for i, (theirs, ours) in enumerate(zip(said, generated, strict=True)) if theirs != ours)
        top = np.sort(logits[len(prompt) - 1 + at])[-2:]
        pytest.fail(f"token {at}: {generated[at]} instead of {said[at]}; margin of the top two {top[1] - top[0]:.2e}")


def random_prompts(n: int, vocab: int = 300) -> list[list[int]]:
    generator = np.random.default_rng(8)
    return [generator.integers(0, vocab, int(generator.integers(1, 60))).tolist() for _ in range(n)]


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_logits(tiny_model: Tiny, engine: Any, name: str) -> None:
    path, model = tiny_model(name)
    tokens = np.random.default_rng(5).integers(0, 300, 150).tolist()
    ours = engine(path).logits(0, tokens)
    theirs = hf_logits(model, tokens)
    assert np.abs(theirs).max() > 3, "logits this small would make the limit meaningless"
    assert np.abs(ours - theirs).max() <= MAX_DIFFERENCE


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_greedy_text(tiny_model: Tiny, backend: Any, name: str) -> None:
    """20 prompts; prefilled one by one, decoded 20 at a time."""
    path, model = tiny_model(name)
    prompts = random_prompts(20)
    texts = backend(path, slots=20).greedy(prompts, GREEDY_TOKENS)
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(model, prompt, text)


def test_generate_gives_what_the_one_pass_check_says(tiny_model: Tiny, backend: Any) -> None:
    """The check above against transformers' generate itself, once."""
    path, model = tiny_model("llama")
    prompt = random_prompts(1)[0]
    ids = torch.tensor([prompt])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    assert backend(path).greedy([prompt], 32)[0] == whole[0, len(prompt) :].tolist()


def bf16_errors(model: Any, ours: F32, tokens: list[int]) -> tuple[float, float]:
    """Largest error of our bfloat16 logits, and of transformers', both against float32."""
    exact = hf_logits(model, tokens)
    reference = hf_logits(_copy(model).to(torch.bfloat16), tokens)
    return float(np.abs(ours - exact).max()), float(np.abs(reference - exact).max())


def _copy(model: Any) -> Any:
    twin = type(model)(model.config)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_bfloat16_error(tiny_model: Tiny, engine: Any, name: str) -> None:
    path, model = tiny_model(name)
    tokens = np.random.default_rng(6).integers(0, 300, 150).tolist()
    ours, reference = bf16_errors(model, engine(path, dtype="bfloat16").logits(0, tokens), tokens)
    assert 0 < ours <= 2 * reference, f"error {ours:.3g}, transformers in bfloat16 {reference:.3g}"


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_int8_error(tiny_model: Tiny, engine: Any, name: str) -> None:
    """int8 frames under float32 weights are held to the limit of bfloat16: at most twice the error that transformers has
    when it computes in bfloat16.

    Why that can be expected: an int8 value is off by a uniform error of at most scale / 2, rms scale / sqrt(12); with a
    head's peak at about 2.4 standard deviations, scale = peak / 127, that is 0.0055 of the head's rms.  Rounding to bfloat16
    is off by about 0.0008, a seventh of it; but it happens to weights and to every activation, some ten times a layer, and
    not only to K and V.
    """
    path, model = tiny_model(name)
    tokens = np.random.default_rng(6).integers(0, 300, 150).tolist()
    exact = hf_logits(model, tokens)
    ours = float(np.abs(engine(path, dtype="int8").logits(0, tokens) - exact).max())
    reference = float(np.abs(hf_logits(_copy(model).to(torch.bfloat16), tokens) - exact).max())
    assert MAX_DIFFERENCE < ours <= 2 * reference, f"error {ours:.3g}, transformers in bfloat16 {reference:.3g}"


# -- SmolLM2 ------------------------------------------------------------------------------------------------------

QUESTIONS = [
    "What is the capital of France?", "Write a haiku about the sea.", "Explain photosynthesis to a child.",
    "Name three primary colours.", "What is 12 + 30?", "Who wrote Hamlet?", "List the planets in order.",
    "What does HTTP stand for?", "Give me a recipe for pancakes.", "Translate 'good morning' into Spanish.",
    "Why is the sky blue?", "What is a prime number?", "Tell me a short joke.", "How do I boil an egg?",
    "What is the largest ocean?", "Describe a cat in two sentences.", "What year did World War II end?",
    "Write a Python function that reverses a list.", "What is gravity?", "Suggest a name for a bakery.",
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm2_hf(smollm2: Path) -> Any:
    """transformers' Llama on the weights that we read from the GGUF file, float32."""
    config, weights, _ = load_model(smollm2, "float32")
    model: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            vocab_size=config.vocab,
            max_position_embeddings=config.window,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied,
        )
    )
    missing, unexpected = model.load_state_dict(
        {name: as_tensor(array) for name, array in weights.items()}, strict=False
    )
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    text: TextModel = load_text(smollm2)
    return [text.append_messages([ChatMessage("user", question)], [], 0) for question in QUESTIONS]


@pytest.mark.model
def test_smollm2_logits_and_errors(smollm2: Path, smollm2_hf: Any, prompts: list[list[int]], engine: Any) -> None:
    tokens = [token for prompt in prompts[:6] for token in prompt]
    ours = engine(smollm2, slots=1, window=512).logits(0, tokens)
    exact = hf_logits(smollm2_hf, tokens)
    difference = np.abs(ours - exact).max()
    assert difference <= MAX_DIFFERENCE, f"{difference:.3g} over {len(tokens)} tokens"
    coarse = engine(smollm2, dtype="bfloat16", slots=1, window=512).logits(0, tokens)
    error, reference = bf16_errors(smollm2_hf, coarse, tokens)
    assert 0 < error <= 2 * reference, f"error {error:.3g}, transformers in bfloat16 {reference:.3g}"
    error = float(np.abs(engine(smollm2, dtype="int8", slots=1, window=512).logits(0, tokens) - exact).max())
    assert 0 < error <= 2 * reference, f"int8 error {error:.3g}, transformers in bfloat16 {reference:.3g}"


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_greedy_text(smollm2: Path, smollm2_hf: Any, prompts: list[list[int]], backend: Any) -> None:
    texts = backend(smollm2, slots=len(prompts)).greedy(prompts, GREEDY_TOKENS)
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(smollm2_hf, prompt, text)
