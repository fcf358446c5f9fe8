"""Passes that use frames which are still being loaded: they wait layer by layer, and give the same bits as if all had
been there from the start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from attnix.drivers.accel.metadata import load_config
from attnix.drivers.accel.model import NO_GATES, LoadFailed, Model, PassRefused, Refusal
from attnix.drivers.accel.weights import load_model
from attnix.kernel.batch import SAMPLE
from attnix.kernel.errors import E
from attnix.kernel.events import Exec, ExecDone, ExecFailed
from attnix.kernel.tag import GATE_FAILED, GATES, gate_value

Tiny = Callable[[str], tuple[Path, Any]]
BLOCK, LAYERS, VOCAB = 16, 3, 300
NO_COPIES = np.empty((0, 2), np.int32)
GATE, TICKET = 5, 77


class Loading:
    """A context of 40 tokens whose two full blocks, and the tail that the next pass writes into, have been taken out of
    hbm: a load brings them back layer by layer, from a thread, and tells the gate."""

    def __init__(self, path: Path, engine: Any, threads: int, clear: bool = True) -> None:
        self.rig = engine(path)
        config, weights, _ = load_model(path)
        model: Model = Model(config, weights, threads=threads)
        self.gates = np.zeros(GATES, np.int64)
        model.attach_gates(self.gates)
        model.attach(self.rig._arena, self.rig.rows, BLOCK, len(self.rig._arena) // model.frame_bytes(BLOCK))
        self.rig.model = model
        self.frames = self.rig._arena.reshape(-1, LAYERS, model.frame_bytes(BLOCK) // LAYERS)
        self.text = np.random.default_rng(4).integers(0, VOCAB, 70).tolist()
        self.rig.logits(0, self.text[:40])
        self.held = [int(frame) for frame in self.rig.rows.frame[0, :3]]
        self.kept = self.frames[self.held].copy()
        if clear:
            self.frames[self.held] = 0xFF  # NaN: whatever is read too early shows

    def bring(self, layer: int) -> None:
        self.frames[self.held, layer] = self.kept[:, layer]
        self.gates[GATE] = gate_value(TICKET, layer + 1)

    def bring_slowly(self, delay_s: float) -> None:
        for layer in range(LAYERS):
            time.sleep(delay_s)
            self.bring(layer)

    def bring_as_the_pass_follows(self, delay_s: float) -> None:
        """The next layer comes only when the pass has written its own KV in the last one, and a while after: long enough
        to run into the gate."""
        deadline = time.monotonic() + 20
        for layer in range(LAYERS):
            time.sleep(delay_s)
            tail = self.kept[2, layer]
            self.bring(layer)
            while np.array_equal(self.frames[self.held[2], layer], tail):
                if time.monotonic() > deadline:
                    return
                time.sleep(0.0002)

    def record(self, n: int = 1) -> npt.NDArray[Any]:
        self.rig.lengths[0] = 40
        records: npt.NDArray[Any] = self.rig.seqs([0], [n])
        return records

    def run(
        self, n: int = 1, copies: Any = NO_COPIES, gates: Any = ((GATE, TICKET),), limit_ns: int = 20_000_000_000
    ) -> npt.NDArray[np.float32]:
        tokens = np.array(self.text[40 : 40 + n], np.int32)
        rows = np.arange(n, dtype=np.int32)
        model: Model = self.rig.model
        pairs = np.array(gates, np.int64).reshape(-1, 2)
        return model.forward(self.record(n), tokens, np.array(copies, np.int32).reshape(-1, 2), rows, pairs, limit_ns)


@pytest.fixture(scope="module")
def model_path(tiny_model: Tiny) -> Path:
    return tiny_model("qwen3")[0]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [1, 30])
def test_a_pass_follows_its_load_layer_by_layer(model_path: Path, engine: Any, threads: int, n: int) -> None:
    """The next layer arrives only after the pass has had time to overtake the load, which NaN would betray."""
    expected = Loading(model_path, engine, 1, clear=False).run(n, gates=NO_GATES)
    loading = Loading(model_path, engine, threads)
    thread = threading.Thread(target=loading.bring_as_the_pass_follows, args=(0.01,))
    thread.start()
    logits = loading.run(n)
    waited_ns = loading.rig.model.waited_ns
    thread.join()
    assert np.array_equal(logits, expected)
    assert 0 < waited_ns < 20_000_000_000
    phases = loading.rig.model.phase_ns()
    assert phases["wait"] == waited_ns and min(phases.values()) >= 0
    assert np.array_equal(loading.run(n), expected) and loading.rig.model.waited_ns == 0  # the gate stays open


def test_the_control_a_pass_without_its_gate_reads_what_is_not_there(model_path: Path, engine: Any) -> None:
    assert np.isnan(Loading(model_path, engine, 1).run(gates=NO_GATES)).all()


def test_a_later_ticket_of_the_gate_means_that_the_load_is_over(model_path: Path, engine: Any) -> None:
    loading = Loading(model_path, engine, 1, clear=False)
    expected = loading.run(gates=NO_GATES)
    loading.gates[GATE] = gate_value(TICKET + 1, 0)
    assert np.array_equal(loading.run(), expected)
    loading.gates[GATE] = gate_value(TICKET - 1, LAYERS)  # an earlier one means that ours has not begun
    began_ns = time.monotonic_ns()
    with pytest.raises(LoadFailed, match="gate 5 did not come in time"):
        loading.run(limit_ns=2_000_000)  # from the pass's beginning, of which waiting is a part
    passed_ns = time.monotonic_ns() - began_ns
    assert passed_ns >= 2_000_000 and 0 < loading.rig.model.waited_ns < passed_ns


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layers", range(LAYERS))
def test_a_failed_load_fails_the_pass_and_touches_no_frame_of_others(
    model_path: Path, engine: Any, threads: int, layers: int
) -> None:
    loading = Loading(model_path, engine, threads)
    for layer in range(layers):
        loading.bring(layer)
    record = loading.record(30)
    own = [int(frame) for frame in loading.rig.rows.frame[0, : int(record["entries"][0])]]
    others = [frame for frame in range(len(loading.frames)) if frame not in own]
    before = loading.frames.copy()
    thread = threading.Timer(0.005, lambda: loading.gates.__setitem__(GATE, gate_value(TICKET, GATE_FAILED)))
    thread.start()
    with pytest.raises(LoadFailed, match="gate 5 failed"):
        loading.run(30)
    thread.join()
    assert np.array_equal(loading.frames[others], before[others])
    assert np.array_equal(loading.frames[own[:2]], before[own[:2]], equal_nan=True)  # full blocks are never written
    assert np.array_equal(loading.frames[own, layers:], before[own, layers:])  # nor is a layer whose load did not come
    for layer in range(LAYERS):  # and the pass may be run again
        loading.bring(layer)
    loading.gates[GATE] = gate_value(TICKET + 1, LAYERS)
    again = loading.run(30, gates=[(GATE, TICKET + 1)])
    assert np.array_equal(again, Loading(model_path, engine, 1, clear=False).run(30, gates=NO_GATES))


def test_copies_of_loaded_frames_wait_too(model_path: Path, engine: Any) -> None:
    """Copy on write of a block that is still on its way, and a copy of that copy: layer by layer, in order."""
    plain = Loading(model_path, engine, 1, clear=False)
    loading = Loading(model_path, engine, 2)
    spare = [frame for frame in range(len(loading.frames)) if frame not in loading.rig.rows.frame[0]][:2]
    copies = [(loading.held[2], spare[0]), (spare[0], spare[1])]
    expected = []
    for rig in (plain, loading):
        rig.rig.rows.frame[0, 2] = spare[1]  # the pass writes into, and reads, the second copy
        thread = threading.Thread(target=loading.bring_slowly, args=(0.003,))
        thread.start()
        expected.append(rig.run(5, copies, NO_GATES if rig is plain else ((GATE, TICKET),)))
        thread.join()
    assert np.array_equal(expected[1], expected[0]) and np.isfinite(expected[0]).all()
    assert np.array_equal(loading.frames[spare], plain.frames[spare])
    assert np.array_equal(loading.frames[spare[0], :, :64], loading.kept[2, :, :64])


def test_gates_that_cannot_be_are_refused(model_path: Path, engine: Any) -> None:
    loading = Loading(model_path, engine, 1, clear=False)
    before = loading.frames.copy()
    for gates in ([(GATES, 1)], [(-1, 1)], [(GATE, -1)], [(GATE, TICKET), (0, 2), (GATES + 5, 1)]):
        with pytest.raises(PassRefused) as refused:
            loading.run(gates=gates)
        assert refused.value.reason is Refusal.GATE and refused.value.detail == len(gates) - 1
    assert np.array_equal(loading.frames, before)


def test_the_driver_reports_what_was_waited_and_fails_the_pass_with_eio(tiny_model: Tiny, backend: Any) -> None:
    path, _ = tiny_model("llama")
    assert load_config(path).layers == LAYERS
    gates = np.zeros(GATES, np.int64)
    rig = backend(path, gates=gates)
    text = list(range(20))
    packed = np.array(text, np.int32).tobytes()

    def run(ticket: int) -> ExecDone | ExecFailed:
        pairs = np.array([GATE, ticket], np.int64).tobytes()
        rig.lengths[0] = 0
        outcome: ExecDone | ExecFailed = rig.backend.execute(
            Exec(0, 9, rig.seqs([0], [20], SAMPLE).tobytes(), packed, b"", (), pairs)
        )
        return outcome

    for delay_s in (0.005, 0.1, 2.0):  # a busy machine may let the load be there before the pass has looked
        gates[GATE] = 0
        opened = threading.Timer(delay_s, lambda: gates.__setitem__(GATE, gate_value(1, LAYERS)))
        opened.start()
        done = run(1)
        opened.join()
        assert isinstance(done, ExecDone)
        if done.waited_ns:
            break
    assert isinstance(done, ExecDone) and 0 < done.waited_ns < done.compute_ns
    assert rig.backend.health()["waited_ns"] == done.waited_ns
    gates[GATE] = gate_value(2, GATE_FAILED)
    failed = run(2)
    assert isinstance(failed, ExecFailed) and failed.code == E.EIO and "load at gate 5 failed" in failed.reason
    refused = backend(path).backend.execute(
        Exec(0, 1, rig.seqs([1], [20]).tobytes(), packed, b"", (), np.array([0, 1], np.int64).tobytes())
    )
    assert isinstance(refused, ExecFailed)  # no gates attached
