"""What the accel times at its first start, against a pass of another size on the same machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from attnix.drivers.accel import calibration
from attnix.drivers.accel.calibration import measure_prefill
from attnix.drivers.accel.cpu_engine import CpuEngine
from attnix.drivers.accel.cuda.device import DryDevice
from attnix.drivers.accel.cuda.engine import CudaEngine
from attnix.drivers.accel.cuda.ops import TorchOps
from attnix.drivers.accel.driver import AccelBackend, make_backend
from attnix.drivers.accel.metadata import load_config
from attnix.drivers.accel.weights import load_model
from attnix.drivers.channel import EPOCH_VARIABLE
from attnix.drivers.memfd import create_memfd, map_shared
from attnix.drivers.serve import DriverArguments
from attnix.kernel.batch import SAMPLE, SEQ_FIELDS
from attnix.kernel.cost import PrefillFit
from attnix.kernel.events import Exec, ExecDone
from attnix.kernel.geometry import RowLayout

Tiny = Callable[[str], tuple[Path, Any]]
WINDOW, BLOCK, PROMPT = 1024, 16, 384
LAYOUT = RowLayout(1, WINDOW // BLOCK)
ATTEMPTS = 5


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that a pass is arithmetic and not overhead: 384 tokens take tens of milliseconds."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=300, max_position_embeddings=WINDOW,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "small"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


class Memory:
    """The memfds that a driver is started with; slot 0 has a frame for each of its blocks."""

    def __init__(self, path: Path) -> None:
        frame_bytes = load_config(path).frame_bytes(BLOCK, "bfloat16")
        self.arena_fd = create_memfd("arena", LAYOUT.entries * frame_bytes)
        self.rows_fd = create_memfd("rows", LAYOUT.total_bytes)
        rows = np.frombuffer(map_shared(self.rows_fd), np.uint8)
        rows[LAYOUT.frame_offset :][: 4 * LAYOUT.entries].view(np.int32)[:] = np.arange(LAYOUT.entries)
        rows[LAYOUT.count_offset :][: 2 * LAYOUT.entries].view(np.int16)[:] = BLOCK
        self.config = {"model": str(path), "slots": 1, "entries": LAYOUT.entries, "threads": 1}

    def start(self) -> AccelBackend:
        return make_backend(DriverArguments(-1, self.arena_fd, self.rows_fd, self.config))

    def content(self) -> bytes:
        with map_shared(self.arena_fd) as arena:
            return bytes(arena)

    def close(self) -> None:
        os.close(self.arena_fd)
        os.close(self.rows_fd)


@pytest.fixture
def memory(small_model: Path) -> Iterator[Memory]:
    made = Memory(small_model)
    yield made
    made.close()


def prefill(driver: AccelBackend) -> ExecDone:
    seq = np.zeros(1, np.dtype(SEQ_FIELDS))
    seq["ntokens"], seq["entries"], seq["flags"] = PROMPT, PROMPT // BLOCK, SAMPLE
    seq["top_p"] = seq["repetition_penalty"] = 1
    tokens = np.random.default_rng(3).integers(0, 300, PROMPT).astype(np.int32)
    done = driver.execute(Exec(0, 1, seq.tobytes(), tokens.tobytes(), b"", ()))
    assert isinstance(done, ExecDone), done
    return done


def test_the_fit_predicts_a_prompt_of_another_length(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a factor of 2, the fastest of some passes of each: a neighbour may take the core at any moment, and not
    always, so a calibration that was disturbed is made again.  384 tokens are no point of it."""
    monkeypatch.setenv(EPOCH_VARIABLE, "1")
    driver = memory.start()
    ratios = []
    for _ in range(ATTEMPTS):
        fit = PrefillFit()
        for tokens, cached, elapsed_ns in driver.probe().prefill:
            fit.seen(tokens, tokens * (cached + tokens / 2), elapsed_ns)
        known = fit.known()
        assert known is not None
        ratios.append(known.ns(PROMPT, 0) / min(prefill(driver).compute_ns for _ in range(5)))
        if 0.5 < ratios[-1] < 2:
            return
        driver.calibrate()
    pytest.fail(f"predicted / measured: {ratios}")


def test_only_the_first_life_measures_and_the_arena_is_not_touched(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EPOCH_VARIABLE, "2")
    later = memory.start()
    assert later.probe().prefill == ()
    expected = prefill(later)
    written = memory.content()
    assert any(written)
    with map_shared(memory.arena_fd) as arena:
        arena[:] = bytes(len(arena))
    monkeypatch.setenv(EPOCH_VARIABLE, "1")
    first = memory.start()
    assert len(first.probe().prefill) > 3
    assert not any(memory.content()), "timing wrote into the frames"
    assert prefill(first).tokens == expected.tokens
    assert memory.content() == written, "passes after timing do not use the frames"
    assert first.health()["passes"] == 1


def test_points_fit_the_window_and_the_budget(small_model: Path, tmp_path: Path) -> None:
    config, weights, _ = load_model(small_model)
    model = CpuEngine(config, weights, threads=1)
    points = {timed[:2] for timed in measure_prefill(model, BLOCK)}
    assert {(16, 0), (64, 512), (256, 512)} <= points and all(n + c <= WINDOW for n, c in points)
    assert measure_prefill(model, BLOCK, budget_ns=0) == ()
    transformers.LlamaConfig.from_pretrained(small_model, max_position_embeddings=72).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(small_model / "model.safetensors")
    short = CpuEngine(*load_model(tmp_path)[:2], threads=1)
    assert {timed[:2] for timed in measure_prefill(short, BLOCK)} == {(16, 0), (64, 0), (64, 8), (16, 56)}


class Compiling(TorchOps):
    """The clock stands still but for what is planted: a second for the first pass of a kind, a microsecond a token for each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        self.seen: set[int] = set()
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.now_ns)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:  # once a layer
        tokens = len(gate_up)
        self.now_ns += 1000 * tokens + (0 if tokens in self.seen else 1_000_000_000)
        self.seen.add(tokens)
        return super().silu_mul(gate_up)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("compiles", [True, False])
def test_what_compiling_takes_is_no_point(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    """On a cold cache a first pass takes seconds, more than all the budget; without a warm-up nothing would be told."""
    config, weights, _ = load_model(tiny_model("llama")[0])
    device, clock = DryDevice(), Compiling(monkeypatch)
    monkeypatch.setattr(device, "interpreted", not compiles)
    model = CudaEngine(config, weights, device, clock)
    timed = measure_prefill(model, BLOCK)
    if not compiles:  # control
        assert timed == ()
        return
    assert len(timed) == 5  # of a window of 256
    assert all(ns == config.layers * 1000 * tokens for tokens, _, ns in timed)


@pytest.mark.usefixtures("one_torch_thread")
def test_warming_up_ends(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points that had no turn are not timed, and so not told."""
    config, weights, _ = load_model(tiny_model("llama")[0])
    device, clock = DryDevice(), Compiling(monkeypatch)
    monkeypatch.setattr(device, "interpreted", False)
    monkeypatch.setattr(calibration, "WARM_UP_NS", 500_000_000)
    assert {timed[:2] for timed in measure_prefill(CudaEngine(config, weights, device, clock), BLOCK)} == {(16, 0)}
