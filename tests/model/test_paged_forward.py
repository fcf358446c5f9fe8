"""The paged forward pass against a dense reference in torch float64 that knows no pages, on every instruction set.

The reference itself is held to transformers in the first test.  `Pages` stands where the kernel stands: it scatters
blocks over frames and fills page-table rows by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnix.drivers.accel.config import KvDtype, ModelConfig
from attnix.drivers.accel.cpu.ops import Isa, available_isas
from attnix.drivers.accel.model import Model, PageRows, PassRefused, Refusal, rotary_frequencies
from attnix.kernel.batch import SEQ_FIELDS

F32 = npt.NDArray[np.float32]
Weights = dict[str, torch.Tensor]
ISAS = pytest.mark.parametrize("isa", available_isas(), ids=lambda isa: isa.name.lower())
NO_COPIES = np.zeros((0, 2), np.int32)
SMALL = ModelConfig("llama", 2, 64, 80, 4, 2, 32, 97, 2048, 1e-5, 10000.0)


def random_weights(c: ModelConfig, seed: int = 0) -> Weights:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float, centre: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=g) * scale + centre

    w = {"model.embed_tokens.weight": normal(c.vocab, c.hidden, scale=1.0)}
    w["model.norm.weight"] = normal(c.hidden, scale=0.2, centre=1.0)
    if not c.tied:
        w["lm_head.weight"] = normal(c.vocab, c.hidden, scale=c.hidden**-0.5)
    for layer in range(c.layers):
        at = f"model.layers.{layer}."
        for name, n in (("q_proj", c.heads), ("k_proj", c.kv_heads), ("v_proj", c.kv_heads)):
            w[f"{at}self_attn.{name}.weight"] = normal(n * c.head_dim, c.hidden, scale=1.5 * c.hidden**-0.5)
            if c.qkv_bias:
                w[f"{at}self_attn.{name}.bias"] = normal(n * c.head_dim, scale=0.3)
        w[at + "self_attn.o_proj.weight"] = normal(c.hidden, c.heads * c.head_dim, scale=c.hidden**-0.5)
        for name in ("gate_proj", "up_proj"):
            w[f"{at}mlp.{name}.weight"] = normal(c.intermediate, c.hidden, scale=1.5 * c.hidden**-0.5)
        w[at + "mlp.down_proj.weight"] = normal(c.hidden, c.intermediate, scale=c.intermediate**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            w[f"{at}{name}.weight"] = normal(c.hidden, scale=0.2, centre=1.0)
        if c.qk_norm:
            w[at + "self_attn.q_norm.weight"] = normal(c.head_dim, scale=0.2, centre=1.0)
            w[at + "self_attn.k_norm.weight"] = normal(c.head_dim, scale=0.2, centre=1.0)
    return w


def rotate(x: torch.Tensor, position: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    """x [..., D] at position [...]: halves paired."""
    angle = position[..., None] * frequency
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def reference(
    c: ModelConfig,
    weights: Weights,
    tokens: Sequence[int],
    shift: Sequence[int] | None = None,
    since: int = 0,
    held: Sequence[tuple[F32, F32]] | None = None,
) -> F32:
    """Logits [T, vocab] of one dense sequence in float64.

    shift[j] is that of the run which holds position j, and is in force from query `since` on: tokens before were
    computed without shifts, so their keys lie rotated at j; later keys are rotated at j - shift[j].  A query i >= since
    sees key j rotated to i - shift[j].

    held: per layer the keys and values [T, Hkv, D] that attention sees in place of those that the layer computes.
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    frequency = torch.from_numpy(rotary_frequencies(c)).double()
    n, eps = len(tokens), c.norm_eps
    moved = torch.tensor(shift if shift is not None else [0] * n).double()
    position = torch.arange(n).double()
    late = position >= since
    home = torch.where(late, position - moved, position)
    x = w["model.embed_tokens.weight"][torch.tensor(tokens)]

    def norm(y: torch.Tensor, name: str) -> torch.Tensor:
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * w[name]

    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    seen = (j <= i) & (j > i - (c.sliding_window or n + 1))
    for layer in range(c.layers):
        at = f"model.layers.{layer}."
        y = norm(x, at + "input_layernorm.weight")
        heads = {}
        for name, count in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            z = y @ w[f"{at}self_attn.{name}_proj.weight"].T
            if c.qkv_bias:
                z = z + w[f"{at}self_attn.{name}_proj.bias"]
            z = z.view(n, count, c.head_dim)
            if c.qk_norm and name != "v":
                z = norm(z, f"{at}self_attn.{name}_norm.weight")
            heads[name] = z
        group = c.heads // c.kv_heads
        key = rotate(heads["k"], home[:, None].expand(n, c.kv_heads), frequency)
        value = heads["v"]
        if held is not None:
            key, value = (torch.from_numpy(plane).double() for plane in held[layer])
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.empty(c.heads, n, n, dtype=torch.float64)
        for s in sorted({int(v) for v in moved}):
            query = rotate(heads["q"], torch.where(late, position - s, position)[:, None].expand(n, c.heads), frequency)
            of_run = torch.einsum("ihd,jhd->hij", query, key)
            scores[:, :, moved == s] = of_run[:, :, moved == s]
        p = (scores / c.head_dim**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", p, value).reshape(n, -1)
        x = x + out @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, at + "post_attention_layernorm.weight")
        gated = torch.nn.functional.silu(y @ w[at + "mlp.gate_proj.weight"].T) * (y @ w[at + "mlp.up_proj.weight"].T)
        x = x + gated @ w[at + "mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if c.tied else "lm_head.weight"]
    return cast(F32, (norm(x, "model.norm.weight") @ head.T).float().numpy())


@dataclass
class Pages:
    """Frames and page-table rows for one model; entries get frames in a scrambled order."""

    model: Model
    block_tokens: int = 16
    capacity: int = 160
    slots: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        entries = -(-self.model.config.window // self.block_tokens)
        frame_bytes = self.model.frame_bytes(self.block_tokens)
        self.arena = np.zeros((self.capacity, frame_bytes), np.uint8)
        self.arena[:] = 0xFF  # NaN everywhere: whatever is read before it is written shows
        self.rows = PageRows(
            np.full((self.slots, entries), -1, np.int32),
            np.zeros((self.slots, entries), np.int32),
            np.zeros((self.slots, entries), np.int16),
            np.arange(self.slots, dtype=np.uint32) + 5,
        )
        self.free = [int(f) for f in np.random.default_rng(self.seed).permutation(self.capacity)]
        self.model.attach(self.arena.reshape(-1), self.rows, self.block_tokens, self.capacity)

    def map(self, slot: int, counts: Sequence[int], shifts: Sequence[int] | None = None) -> None:
        """Give a row these entries; keeps the frames it has."""
        for entry, count in enumerate(counts):
            if self.rows.frame[slot, entry] < 0:
                self.rows.frame[slot, entry] = self.free.pop()
            self.rows.count[slot, entry] = count
            self.rows.shift[slot, entry] = shifts[entry] if shifts is not None else 0
        self.rows.count[slot, len(counts) :] = 0

    def cover(self, slot: int, n: int) -> None:
        full, rest = divmod(n, self.block_tokens)
        self.map(slot, [self.block_tokens] * full + [rest] * (rest > 0))

    def record(self, slot: int, start: int, ntokens: int, write_from: int | None = None) -> npt.NDArray[Any]:
        seq = np.zeros(1, np.dtype(SEQ_FIELDS))
        seq["slot"], seq["generation"] = slot, self.rows.generation[slot]
        seq["start"], seq["ntokens"] = start, ntokens
        seq["write_from"] = start if write_from is None else write_from
        covered = np.cumsum(self.rows.count[slot])
        seq["entries"] = int(np.searchsorted(covered, start + ntokens)) + 1
        return seq

    def run(
        self,
        parts: Sequence[tuple[npt.NDArray[Any], Sequence[int]]],
        copies: npt.NDArray[np.int32] = NO_COPIES,
        want: Sequence[int] | None = None,
    ) -> F32:
        seqs = np.concatenate([seq for seq, _ in parts])
        seqs["token_offset"] = np.cumsum(seqs["ntokens"]) - seqs["ntokens"]
        tokens = np.array([token for _, some in parts for token in some], np.int32)
        rows = np.arange(tokens.size) if want is None else np.array(want)
        return self.model.forward(seqs, tokens, copies, rows.astype(np.int32))

    def prefill(self, slot: int, tokens: Sequence[int], cuts: Sequence[int] = ()) -> F32:
        """Logits of every token of a fresh context, in the chunks that the cuts make."""
        edges = [0, *sorted(cuts), len(tokens)]
        out = []
        for a, b in itertools.pairwise(edges):
            if a < b:
                self.cover(slot, b)
                out.append(self.run([(self.record(slot, a, b - a), tokens[a:b])]))
        return np.concatenate(out)


def make(
    monkeypatch: pytest.MonkeyPatch,
    isa: Isa,
    c: ModelConfig,
    weights: Weights,
    dtype: KvDtype = "float32",
    threads: int = 2,
) -> Model:
    monkeypatch.setenv("ATTNIX_CPU_ISA", isa.name.lower())
    weight_dtype: Literal["float32", "bfloat16"] = "bfloat16" if dtype == "bfloat16" else "float32"
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    model = Model(c, arrays, kv_dtype=dtype, dtype=weight_dtype, numerics="invariant", threads=threads)
    assert model.isa is isa
    return model


def some_tokens(n: int, seed: int = 1, vocab: int = 97) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, n)]


def test_the_reference_is_transformers() -> None:
    c = replace(SMALL, arch="qwen3", qk_norm=True, tied=False)
    kind = transformers.Qwen3Config(
        hidden_size=c.hidden, intermediate_size=c.intermediate, num_hidden_layers=c.layers, vocab_size=c.vocab,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = transformers.Qwen3ForCausalLM(kind)
    model.eval()
    weights = random_weights(c)
    model.load_state_dict(weights)
    tokens = some_tokens(90)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(reference(c, weights, tokens) - theirs).max() < 2e-4


@ISAS
@pytest.mark.parametrize("block_tokens", [4, 16, 32])
def test_prefill_and_decode(isa: Isa, block_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill in one piece, one in pieces, and one token at a time, past several tiles of positions."""
    weights = random_weights(SMALL)
    pages = Pages(make(monkeypatch, isa, SMALL, weights), block_tokens, capacity=600 // block_tokens * 2)
    tokens = some_tokens(203)
    exact = reference(SMALL, weights, tokens)
    assert np.abs(exact).max() > 2
    assert np.abs(pages.prefill(0, tokens) - exact).max() < 1e-3
    assert np.abs(pages.prefill(1, tokens, [1, 15, 16, 33, 130]) - exact).max() < 1e-3
    assert np.abs(pages.prefill(2, tokens, range(1, 150)) - exact).max() < 1e-3


@ISAS
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_head_shapes(isa: Isa, head_dim: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    c = replace(
        SMALL, layers=1, heads=2 * group, kv_heads=2, head_dim=head_dim, intermediate=70, qkv_bias=True, tied=True
    )
    weights = random_weights(c)
    tokens = some_tokens(75)
    exact = reference(c, weights, tokens)
    pages = Pages(make(monkeypatch, isa, c, weights))
    assert np.abs(pages.prefill(0, tokens, [40, 73, 74]) - exact).max() < 1e-3
    bf16 = Pages(make(monkeypatch, isa, c, weights, "bfloat16"))
    assert np.abs(bf16.prefill(0, tokens, [40, 73, 74]) - exact).max() < 0.05 * np.abs(exact).max()


@ISAS
@pytest.mark.parametrize("window", [1, 7, 64, 100])
def test_sliding_window(isa: Isa, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    c = replace(SMALL, arch="mistral", sliding_window=window)
    weights = random_weights(c)
    tokens = some_tokens(700, seed=3)
    exact = reference(c, weights, tokens)
    pages = Pages(make(monkeypatch, isa, c, weights))
    assert np.abs(pages.prefill(0, tokens) - exact).max() < 1e-3
    assert np.abs(pages.prefill(1, tokens, [600, *range(690, 700)]) - exact).max() < 1e-3


@ISAS
def test_relocated_runs(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with shifts of both signs and short blocks in the middle, several within one tile of positions.

    The first 100 tokens are computed without shifts, then their runs get some, as if they came from elsewhere; the
    rest is computed on top, in one piece and token by token, some of it in runs that have a shift as well."""
    weights = random_weights(SMALL)
    pages = Pages(make(monkeypatch, isa, SMALL, weights))
    counts = [16, 5, 16, 16, 3, 1, 16, 16, 16, 16, 9]
    shifts = [0, 0, 20, 20, -300, 7, 7, 0, 60, 60, 0]
    tokens = some_tokens(sum(counts), seed=4)
    since = 100
    moved = [s for s, n in zip(shifts, counts, strict=True) for _ in range(n)]
    exact = reference(SMALL, weights, tokens, moved, since)[since:]
    assert np.abs(exact - reference(SMALL, weights, tokens)[since:]).max() > 0.1  # the shifts matter
    for slot in (0, 1):
        pages.map(slot, counts)
        pages.run([(pages.record(slot, 0, since), tokens[:since])])
        pages.map(slot, counts, shifts)
    whole = pages.run([(pages.record(0, since, len(tokens) - since), tokens[since:])])
    assert np.abs(whole - exact).max() < 1e-3
    steps = [pages.run([(pages.record(1, i, 1), tokens[i : i + 1])])[0] for i in range(since, len(tokens))]
    assert np.array_equal(np.stack(steps), whole)


@ISAS
def test_a_shift_alone_changes_nothing(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary attention sees distances only: keys and queries of a run that are both moved give the plain logits."""
    weights = random_weights(SMALL)
    pages = Pages(make(monkeypatch, isa, SMALL, weights))
    tokens = some_tokens(80, seed=5)
    pages.map(0, [16] * 5, [-5, 3, 3, 40, 0])
    moved = pages.run([(pages.record(0, 0, 80), tokens)])
    assert np.abs(moved - reference(SMALL, weights, tokens)).max() < 1e-3


@ISAS
def test_write_from(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole hit recomputes its last token and writes nothing; a later write_from leaves what lies before it alone."""
    weights = random_weights(SMALL)
    pages = Pages(make(monkeypatch, isa, SMALL, weights))
    tokens = some_tokens(50)
    whole = pages.prefill(0, tokens)
    before = pages.arena.copy()
    again = pages.run([(pages.record(0, 49, 1, write_from=50), tokens[49:])])
    assert np.array_equal(pages.arena, before)
    assert np.array_equal(again[0], whole[49])
    pages.arena.view(np.float32)[pages.rows.frame[0, 0]] += 1.0  # a shared block that differs from what we would write
    before = pages.arena.copy()
    changed = pages.run([(pages.record(0, 10, 40, write_from=32), tokens[10:])])
    kept = pages.rows.frame[0, :2]
    assert np.array_equal(pages.arena[kept], before[kept])
    assert not np.array_equal(changed[0], whole[10])  # and it was read, not recomputed


@ISAS
def test_only_the_new_tokens_are_written(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys lie rotated at their position, values as they are, in [L, 2, Hkv, P, D]; nothing else changes."""
    c = replace(SMALL, layers=1)
    weights = random_weights(c)
    pages = Pages(make(monkeypatch, isa, c, weights))
    tokens = some_tokens(21)
    pages.prefill(0, tokens, [9])
    frames = pages.arena.view(np.float32).reshape(-1, 1, 2, c.kv_heads, 16, c.head_dim)
    x = weights["model.embed_tokens.weight"][torch.tensor(tokens)].double()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c.norm_eps) * weights["model.layers.0.input_layernorm.weight"]
    key, value = (
        (x @ weights[f"model.layers.0.self_attn.{n}_proj.weight"].double().T).view(21, c.kv_heads, c.head_dim)
        for n in "kv"
    )
    position = torch.arange(21).double()[:, None].expand(21, c.kv_heads)
    key = rotate(key, position, torch.from_numpy(rotary_frequencies(c)).double())
    for i in range(21):
        held = frames[pages.rows.frame[0, i // 16], 0, :, :, i % 16]
        assert np.abs(held[0] - key[i].numpy()).max() < 1e-4
        assert np.abs(held[1] - value[i].numpy()).max() < 1e-4
    used = [int(f) for f in pages.rows.frame[0, :2]]
    assert np.isnan(frames[used[1], 0, :, :, 5:]).all()
    others = np.delete(pages.arena, used, axis=0)
    assert (others == 0xFF).all()


def test_copies_come_first_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(SMALL)
    pages = Pages(make(monkeypatch, available_isas()[-1], SMALL, weights))
    tokens = some_tokens(20)
    whole = pages.prefill(0, tokens)
    source = int(pages.rows.frame[0, 1])
    middle, end = pages.free.pop(), pages.free.pop()
    pages.cover(1, 20)
    pages.rows.frame[1, :2] = pages.rows.frame[0, 0], end
    shared = pages.arena[source].copy()
    copies = np.array([[source, middle], [middle, end]], np.int32)
    out = pages.run([(pages.record(1, 19, 1), tokens[19:])], copies)
    assert np.array_equal(pages.arena[middle], shared)
    assert np.array_equal(out[0], whole[19])
    assert np.array_equal(pages.arena[source], shared)


def test_wanted_rows_in_any_order_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(SMALL)
    pages = Pages(make(monkeypatch, available_isas()[-1], SMALL, weights), capacity=200)
    tokens = some_tokens(1100)
    whole = pages.prefill(0, tokens)  # three chunks of the engine
    pages.cover(1, 1100)
    want = [1099, 0, 600, 600, 511, 512]
    some = pages.run([(pages.record(1, 0, 1100), tokens)], want=want)
    assert np.array_equal(some, whole[want])
    assert pages.run([(pages.record(1, 1099, 1), tokens[1099:])], want=[]).shape == (0, SMALL.vocab)


INVARIANT_KINDS = pytest.mark.parametrize(
    ("isa", "dtype"),
    [(isa, dtype) for isa in available_isas() for dtype in ("float32", "bfloat16", "int8")],
    ids=lambda value: value if isinstance(value, str) else value.name.lower(),
)


@INVARIANT_KINDS
def test_bit_equal_in_any_batch_and_chunking(isa: Isa, dtype: KvDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences cut at random places, a random set of them advancing in each pass, on scattered frames: every logit
    equals, to the bit, that of the sequence alone in one prefill.  Among the batches are ones of more than 8 rows."""
    c = replace(SMALL, sliding_window=70)
    weights = random_weights(c)
    model = make(monkeypatch, isa, c, weights, dtype)
    texts = [some_tokens(n, seed=n) for n in (1, 16, 17, 40, 65, 90, 130, 33)]
    alone = [Pages(model, seed=9).prefill(0, text) for text in texts]
    largest = 0

    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal largest
        pages = Pages(model, seed=data.draw(st.integers(0, 99)))
        done = [0] * len(texts)
        got: list[list[F32]] = [[] for _ in texts]
        while any(d < len(t) for d, t in zip(done, texts, strict=True)):
            left = [i for i, t in enumerate(texts) if done[i] < len(t)]
            chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
            parts = []
            for i in chosen:
                n = data.draw(st.integers(1, len(texts[i]) - done[i]))
                pages.cover(i, done[i] + n)
                parts.append((pages.record(i, done[i], n), texts[i][done[i] : done[i] + n]))
            out = pages.run(parts)
            largest = max(largest, len(out))
            for (record, some), i in zip(parts, chosen, strict=True):
                offset = (
                    int(record["token_offset"][0])
                    if len(parts) == 1
                    else sum(len(s) for _, s in parts[: chosen.index(i)])
                )
                got[i].append(out[offset : offset + len(some)])
                done[i] += len(some)
        for mine, expected in zip(got, alone, strict=True):
            assert np.array_equal(np.concatenate(mine), expected)

    check()
    assert largest > 8


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_bit_equal_across_splits_and_threads(threads: int, dtype: KvDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts: a lone decode shares its splits among threads, a crowded one does not, a prefill never does."""
    weights = random_weights(SMALL)
    isa = available_isas()[-1]
    tokens = some_tokens(1300, seed=6)
    expected = Pages(make(monkeypatch, isa, SMALL, weights, dtype, 2), capacity=200).prefill(0, tokens)[1295:]
    pages = Pages(make(monkeypatch, isa, SMALL, weights, dtype, threads), capacity=200)
    pages.prefill(0, tokens[:1295], [700, 1000])
    lone = []
    for i in range(1295, 1300):
        pages.cover(0, i + 1)
        lone.append(pages.run([(pages.record(0, i, 1), tokens[i : i + 1])])[0])
    assert np.array_equal(np.stack(lone), expected)
    crowd = [(pages.record(0, 1299, 1, write_from=1300), tokens[1299:])]
    for slot in range(1, 8):
        pages.cover(slot, 3)
        crowd.append((pages.record(slot, 0, 3), tokens[:3]))
    assert np.array_equal(pages.run(crowd)[0], expected[-1])


@INVARIANT_KINDS
def test_every_mapped_block_matters(isa: Isa, dtype: KvDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the equality tests: KV altered in any one mapped block changes the logits."""
    weights = random_weights(SMALL)
    pages = Pages(make(monkeypatch, isa, SMALL, weights, dtype))
    tokens = some_tokens(150)
    last = pages.prefill(0, tokens)[-1]
    record = pages.record(0, 149, 1, write_from=150)
    assert np.array_equal(pages.run([(record, tokens[149:])])[0], last)
    element = {"float32": 4, "bfloat16": 2, "int8": 1}[dtype]
    half = SMALL.kv_heads * 16 * SMALL.head_dim * element  # bytes of K, then of V, of one layer
    for entry in range(10):
        frame = int(pages.rows.frame[0, entry])
        for plane in range(2):
            kept = pages.arena[frame].copy()
            row = pages.arena[frame, plane * half : plane * half + SMALL.head_dim * element]
            row[:] = np.roll(row, 4)
            assert not np.array_equal(pages.run([(record, tokens[149:])])[0], last), (entry, plane)
            pages.arena[frame] = kept
    assert np.array_equal(pages.run([(record, tokens[149:])])[0], last)


# -- int8 frames --------------------------------------------------------------------------------------------------


def dequantised(pages: Pages, slot: int, n: int) -> list[tuple[F32, F32]]:
    """Keys and values [n, Hkv, D] of each layer as the frames of a context hold them; reads the layout of a frame anew:
    per layer [2, Hkv, P, D] int8, then [2, Hkv, P] float32."""
    c, p = pages.model.config, pages.block_tokens
    ints = 2 * c.kv_heads * p * c.head_dim
    layers = pages.arena.reshape(pages.capacity, c.layers, -1)
    assert layers.shape[2] == ints + 4 * 2 * c.kv_heads * p
    out = []
    for layer in range(c.layers):
        planes = np.empty((2, n, c.kv_heads, c.head_dim), np.float32)
        for i in range(n):
            held = layers[pages.rows.frame[slot, i // p], layer]
            values = held[:ints].view(np.int8).reshape(2, c.kv_heads, p, c.head_dim)[:, :, i % p]
            scales = held[ints:].view(np.float32).reshape(2, c.kv_heads, p)[:, :, i % p]
            assert (np.abs(values).max(axis=-1) == 127).all() and (scales > 0).all()
            planes[:, i] = values * scales[:, :, None]
        out.append((planes[0], planes[1]))
    return out


@ISAS
def test_int8_frames_hold_every_value_to_half_a_step(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each head and token on its own: scale = largest magnitude / 127, error <= scale / 2; nothing else is written."""
    c = replace(SMALL, layers=1)
    weights = random_weights(c)
    pages = Pages(make(monkeypatch, isa, c, weights, "int8"))
    exact = Pages(make(monkeypatch, isa, c, weights))
    tokens = some_tokens(21)
    for one in (pages, exact):
        one.prefill(0, tokens, [9])
    frames = exact.arena.view(np.float32).reshape(-1, 2, c.kv_heads, 16, c.head_dim)
    for plane in range(2):
        held = dequantised(pages, 0, 21)[0][plane]
        for i in range(21):
            true = frames[exact.rows.frame[0, i // 16], plane, :, i % 16].astype(np.float64)
            step = np.abs(true).max(axis=-1, keepdims=True) / 127
            assert (np.abs(held[i] - true) <= step * (0.5 + 1e-4)).all()
            assert (np.abs(np.abs(held[i]).max(axis=-1, keepdims=True) / 127 / step - 1) < 1e-6).all()
    last = pages.arena[pages.rows.frame[0, 1]]
    ints = last[: 2 * c.kv_heads * 16 * c.head_dim].reshape(2, c.kv_heads, 16, c.head_dim)
    assert (ints[:, :, 5:] == 0xFF).all()
    scales = last[ints.size :].view(np.float32).reshape(2, c.kv_heads, 16)
    assert np.isnan(scales[:, :, 5:]).all() and np.isfinite(scales[:, :, :5]).all()
    untouched = [f for f in range(pages.capacity) if f not in pages.rows.frame[0, :2]]
    assert (pages.arena[untouched] == 0xFF).all()


@ISAS
@pytest.mark.parametrize(("head_dim", "group"), [(32, 2), (64, 3), (80, 1), (96, 8), (128, 2)])
def test_int8_attention_is_exact_on_what_the_frames_hold(
    isa: Isa, head_dim: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the values in the frames, the rest is as exact as with frames of the dtype that is multiplied: float32 sums, but
    where AVX-512-BF16 rounds queries and probabilities to bfloat16, as it does for bfloat16 frames.  A sliding window, runs
    with several shifts, and decode as well as prefill."""
    c = replace(SMALL, heads=2 * group, head_dim=head_dim, qk_norm=True, sliding_window=150, arch="qwen3")
    weights = random_weights(c)
    pages = Pages(make(monkeypatch, isa, c, weights, "int8"))
    tokens = some_tokens(203)
    got = pages.prefill(0, tokens, [1, 40, 170, *range(190, 203)])
    exact = reference(c, weights, tokens, held=dequantised(pages, 0, 203))
    assert np.abs(exact).max() > 2
    limit = 0.02 * np.abs(exact).max() if isa is Isa.AVX512BF16 else 1e-3
    assert np.abs(got - exact).max() < limit
    assert (
        np.abs(reference(c, weights, tokens) - exact).max() > 1e-2
    )  # the rounding shows: 1e-3 would not do without it


@ISAS
def test_int8_runs_with_shifts(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(SMALL)
    pages = Pages(make(monkeypatch, isa, SMALL, weights, "int8"))
    counts, shifts = [16, 5, 16, 16, 3, 1, 16, 16, 16, 16, 9], [0, 0, 20, 20, -300, 7, 7, 0, 60, 60, 0]
    tokens = some_tokens(sum(counts), seed=4)
    since = 100
    moved = [s for s, n in zip(shifts, counts, strict=True) for _ in range(n)]
    exact = reference(SMALL, weights, tokens, moved, since)[since:]
    for slot in (0, 1):
        pages.map(slot, counts)
        pages.run([(pages.record(slot, 0, since), tokens[:since])])
        pages.map(slot, counts, shifts)
    whole = pages.run([(pages.record(0, since, len(tokens) - since), tokens[since:])])
    assert np.abs(whole - exact).max() < 0.05 * np.abs(exact).max()
    assert np.abs(exact - reference(SMALL, weights, tokens)[since:]).max() > 0.3 * np.abs(exact).max()
    steps = [pages.run([(pages.record(1, i, 1), tokens[i : i + 1])])[0] for i in range(since, len(tokens))]
    assert np.array_equal(np.stack(steps), whole)


@ISAS
def test_int8_of_what_is_not_a_number_and_of_nothing(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN does not become a number on its way through a frame; a head of zeros is one of zeros."""
    weights = random_weights(SMALL)
    poisoned = dict(weights)
    poisoned["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    poisoned["model.embed_tokens.weight"][5, 3] = torch.nan
    pages = Pages(make(monkeypatch, isa, SMALL, poisoned, "int8"))
    assert np.isfinite(pages.prefill(0, [1, 2, 3])).all()
    assert np.isnan(pages.prefill(1, [1, 5, 3])[2]).any()
    silent = weights | {f"model.layers.{layer}.self_attn.v_proj.weight": torch.zeros(64, 64) for layer in range(2)}
    pages = Pages(make(monkeypatch, isa, SMALL, silent, "int8"))
    tokens = some_tokens(70)
    assert np.abs(pages.prefill(0, tokens) - reference(SMALL, silent, tokens)).max() < 1e-3


def test_a_bad_pass_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(SMALL)
    model = make(monkeypatch, available_isas()[-1], SMALL, weights)
    seq = np.zeros(1, np.dtype(SEQ_FIELDS))
    with pytest.raises(PassRefused) as unready:
        model.forward(seq, np.zeros(1, np.int32), NO_COPIES, np.zeros(0, np.int32))
    assert unready.value.reason is Refusal.NOTREADY
    pages = Pages(model)
    tokens = some_tokens(20)
    pages.prefill(0, tokens)
    before = pages.arena.copy()
    good = pages.record(0, 19, 1)

    def refused(
        field: str | None = None, value: int = 0, token: int = 1, want: int = 0, copy: int | None = None
    ) -> Refusal:
        seqs = good.copy()
        if field is not None:
            seqs[field] = value
        copies = NO_COPIES if copy is None else np.array([[0, copy]], np.int32)
        with pytest.raises(PassRefused) as refusal:
            model.forward(seqs, np.array([token], np.int32), copies, np.array([want], np.int32))
        assert np.array_equal(pages.arena, before)
        return refusal.value.reason

    assert refused("slot", 8) is refused("slot", -1) is Refusal.SLOT
    assert refused("generation", 4) is Refusal.STALE
    assert refused("entries", 0) is refused("entries", 4000) is Refusal.ENTRIES
    assert refused("entries", 1) is refused("start", 20) is Refusal.COUNT
    assert refused("start", -1) is refused("ntokens", 0) is refused("start", 2048) is Refusal.POSITION
    assert refused("start", 2**31 - 1) is Refusal.POSITION
    assert refused("ntokens", 2) is refused("token_offset", 1) is Refusal.TOKEN
    assert refused(token=97) is refused(token=-1) is Refusal.TOKEN
    assert refused(want=1) is refused(want=-1) is Refusal.WANT
    assert refused(copy=160) is refused(copy=-1) is Refusal.COPY
    pages.rows.count[0, 0] = 17
    assert refused() is Refusal.COUNT
    pages.rows.count[0, 0] = 16
    pages.rows.frame[0, 1] = 160
    assert refused() is Refusal.FRAME
