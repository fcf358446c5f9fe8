"""Models for the tests: tiny random ones made with transformers (the oracle)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from attnix.drivers.accel.config import KvDtype, ModelConfig
from attnix.drivers.accel.driver import AccelBackend, AccelConfig
from attnix.drivers.accel.metadata import load_config
from attnix.drivers.accel.model import Model, PageRows
from attnix.drivers.accel.weights import load_model
from attnix.kernel.batch import FORWARD, HISTORY, SAMPLE, SCORE, SEQ_FIELDS
from attnix.kernel.events import Exec, ExecDone, ExecFailed
from attnix.kernel.geometry import RowLayout

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

BLOCK_TOKENS = 16

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.4,  # large, so that attention is far from uniform and logits far from equal
    "eos_token_id": 0,
    "bos_token_id": 1,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name -> (transformers configuration class, what differs from _SHAPE)
TINY: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama3-rope": (transformers.LlamaConfig, {"rope_parameters": _LLAMA3_ROPE}),
    "llama-linear-rope": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 24, "head_dim": 32}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
}


def make_tiny(name: str) -> Any:
    """A random model of one family, float32, the same every time."""
    kind, changes = TINY[name]
    torch.manual_seed(17)
    factory: Any = transformers.AutoModelForCausalLM
    model = factory.from_config(kind(**(_SHAPE | changes)), attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:  # made as ones and zeros: nothing would show
                parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.3)
    return model.eval()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """name -> (directory written by save_pretrained, the transformers model)."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            model = make_tiny(name)
            path = tmp_path_factory.mktemp("models") / name
            model.save_pretrained(path)
            made[name] = (path, model)
        return made[name]

    return get


class Paged:
    """A model on frames of its own, with the simplest memory there is: frames are handed out in a scrambled order and never
    returned.  It stands where the kernel stands: it fills page-table rows and describes passes."""

    def __init__(self, capacity: int, slots: int, entries: int) -> None:
        self.layout = RowLayout(slots, entries)
        self.row_bytes = np.zeros(self.layout.total_bytes, np.uint8)
        self.rows = PageRows.over(self.row_bytes, self.layout)
        self.rows.frame[:] = -1
        self.rows.generation[:] = np.arange(slots) + 7
        self._free = list(np.random.default_rng(3).permutation(capacity))
        self.lengths = [0] * slots

    def seqs(self, slots: Sequence[int], counts: Sequence[int], flags: int = SAMPLE, **fields: Any) -> npt.NDArray[Any]:
        """Records that append counts[i] tokens to slots[i]; maps the frames they need."""
        records = np.zeros(len(slots), np.dtype(SEQ_FIELDS))
        records["top_p"] = records["repetition_penalty"] = 1
        for record, slot, count in zip(records, slots, counts, strict=True):
            start = self.lengths[slot]
            self.lengths[slot] = end = start + count
            entries = -(-end // BLOCK_TOKENS)
            for entry in range(entries):
                if self.rows.frame[slot, entry] < 0:
                    self.rows.frame[slot, entry] = self._free.pop()
                self.rows.count[slot, entry] = min(BLOCK_TOKENS, end - entry * BLOCK_TOKENS)
            record["slot"], record["generation"] = slot, self.rows.generation[slot]
            record["start"], record["ntokens"], record["entries"] = start, count, entries
            record["write_from"], record["context"], record["flags"] = start, slot + 1, flags
        records["token_offset"] = np.cumsum(records["ntokens"]) - records["ntokens"]
        for name, value in fields.items():
            records[name] = value
        return records


def _threads(config: ModelConfig) -> int:
    """Tiny models are all synchronisation: two threads on a busy machine take ten times as long as one.  Large ones get
    what tests/conftest.py leaves us; 0: one per core."""
    return 1 if config.hidden < 512 else int(os.environ.get("OMP_NUM_THREADS", "0"))


def weight_dtype(kv_dtype: KvDtype) -> Literal["float32", "bfloat16"]:
    """int8 frames go with float32 weights here, so that the KV is all that was rounded."""
    return "float32" if kv_dtype == "int8" else kv_dtype


class Engine(Paged):
    """The forward pass alone."""

    def __init__(self, path: Path, dtype: KvDtype = "float32", slots: int = 8, window: int = 256) -> None:
        config, weights, _ = load_model(path)
        threads = _threads(config)
        entries = window // BLOCK_TOKENS
        super().__init__(slots * entries, slots, entries)
        self.model = Model(
            config, weights, kv_dtype=dtype, dtype=weight_dtype(dtype), numerics="invariant", threads=threads
        )
        self._arena = np.zeros(slots * entries * self.model.frame_bytes(BLOCK_TOKENS), np.uint8)
        self.model.attach(self._arena, self.rows, BLOCK_TOKENS, slots * entries)

    def logits(self, slot: int, tokens: Sequence[int]) -> F32:
        """Append tokens to a context; logits of each of them [T, V]."""
        records = self.seqs([slot], [len(tokens)])
        want = np.arange(len(tokens), dtype=np.int32)
        return self.model.forward(records, np.array(tokens, np.int32), np.empty((0, 2), np.int32), want)


class Backend(Paged):
    """The whole driver, without its process."""

    def __init__(
        self,
        path: Path,
        dtype: KvDtype = "float32",
        slots: int = 8,
        window: int = 256,
        settings: dict[str, Any] | None = None,
        **shared: Any,
    ) -> None:
        """settings: more fields of AccelConfig; shared: what else AccelBackend takes."""
        entries = window // BLOCK_TOKENS
        super().__init__(slots * entries, slots, entries)
        config = load_config(path)
        self.arena = bytearray(slots * entries * config.frame_bytes(BLOCK_TOKENS, dtype))
        chosen = AccelConfig(
            str(path), slots, entries, BLOCK_TOKENS, weight_dtype(dtype), dtype, "invariant", _threads(config)
        )
        self.backend = AccelBackend(chosen._replace(**settings or {}), self.arena, self.row_bytes, **shared)

    def execute(
        self, records: npt.NDArray[Any], tokens: Sequence[int], histories: Sequence[I32] = ()
    ) -> ExecDone | ExecFailed:
        packed = np.array(tokens, np.int32).tobytes()
        return self.backend.execute(
            Exec(0, 1, records.tobytes(), packed, b"", tuple(history.tobytes() for history in histories))
        )

    def done(self, records: npt.NDArray[Any], tokens: Sequence[int], histories: Sequence[I32] = ()) -> ExecDone:
        outcome = self.execute(records, tokens, histories)
        assert isinstance(outcome, ExecDone), outcome
        return outcome

    def greedy(self, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
        """Prefill every prompt, then decode all together; n tokens each."""
        slots = range(len(prompts))
        out: list[list[int]] = []
        for slot, prompt in zip(slots, prompts, strict=True):
            first = self.done(self.seqs([slot], [len(prompt)]), prompt)
            out.append(np.frombuffer(first.tokens, np.int32).tolist())
        for _ in range(n - 1):
            records = self.seqs(list(slots), [1] * len(prompts))
            step = self.done(records, [tokens[-1] for tokens in out])
            for tokens, token in zip(out, np.frombuffer(step.tokens, np.int32).tolist(), strict=True):
                tokens.append(token)
        return out


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """A tiny model is all synchronisation: with two threads on a busy machine torch takes ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def engine() -> type[Engine]:
    return Engine


@pytest.fixture(scope="session")
def backend() -> type[Backend]:
    return Backend


@pytest.fixture(scope="session")
def batch_flags() -> dict[str, int]:
    return {"SAMPLE": SAMPLE, "FORWARD": FORWARD, "SCORE": SCORE, "HISTORY": HISTORY}
