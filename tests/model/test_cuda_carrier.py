"""Copies between a CUDA device's frames and the dram arena, beside its passes: formats, order, and loads that a pass follows.

In the dry run what is given to a copy stream happens only when somebody waits for it (cuda/device.py), so a pass that
went on without its event would read zeros here.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnix.drivers.accel.cuda import errors
from attnix.drivers.accel.cuda.carrier import DeviceCarrier
from attnix.drivers.accel.cuda.device import DryDevice
from attnix.drivers.accel.cuda.moving import Moving
from attnix.drivers.accel.driver import AccelConfig, DeepAccelBackend
from attnix.drivers.accel.metadata import load_config
from attnix.drivers.serve import DeepMover
from attnix.drivers.stored import Placed, StoredFormat
from attnix.kernel.batch import FORWARD
from attnix.kernel.errors import E
from attnix.kernel.events import Exec, ExecDone, ExecFailed, Transfer, TransferDone
from attnix.kernel.tag import GATE_FAILED, GATES, HEADER_BYTES, Tag, gate_value, stored_bytes

Tiny = Callable[[str], tuple[Path, Any]]
BLOCK, LAYERS, VOCAB, DRAM, SLOTS = 16, 3, 300, 2, 12
GATE, TICKET = 5, 77
pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Rig:
    """The driver with a dram arena and gates; a context of 40 tokens in 3 frames, the last of them partial."""

    def __init__(self, backend: Any, path: Path) -> None:
        self.gates = np.zeros(GATES, np.int64)
        self.frame_bytes = load_config(path).frame_bytes(BLOCK, "float32")
        self.slot_bytes = stored_bytes(self.frame_bytes)
        self.dram = np.full(SLOTS * self.slot_bytes, 0xEE, np.uint8)
        self.paged = backend(path)  # its rows and arena; the driver is another
        config = AccelConfig(
            str(path), 8, 16, BLOCK, "float32", "float32", "invariant", 1, dram_device=DRAM, identity=bytes(range(16)).hex(),
            device="cuda-dry", mirror=True,
        )  # fmt: skip
        self.driver = DeepAccelBackend(config, self.paged.arena, self.paged.row_bytes, self.dram, self.gates)
        self.paged.backend = self.driver
        self.arena = np.frombuffer(self.paged.arena, np.uint8).reshape(-1, self.frame_bytes)
        self.text = np.random.default_rng(9).integers(0, VOCAB, 60).tolist()
        self.paged.done(self.paged.seqs([0], [40]), self.text[:40])
        self.frames = [int(frame) for frame in self.paged.rows.frame[0, :3]]
        self.tags = [self.tag(n, self.text[n * BLOCK : min(40, (n + 1) * BLOCK)]) for n in range(3)]

    @staticmethod
    def tag(index: int, tokens: Sequence[int]) -> bytes:
        packed = np.array(tokens, np.int32).tobytes()
        key = bytes([index + 1]) * 16
        return Tag(key, bytes(16), b"r" * 16, index * BLOCK, len(tokens), 0, b"uid:7", packed).pack(BLOCK)

    def begin(self, verb: str, pairs: Sequence[tuple[int, int]], gate: int = -1, seq: int = 41) -> TransferDone | None:
        tags = b"".join(self.tags[: len(pairs)])
        return self.driver.transfer(
            Transfer(0, seq, verb, DRAM, np.array(pairs, np.int32).tobytes(), tags, gate, TICKET if gate >= 0 else 0)
        )

    def end(self) -> TransferDone:
        assert select.select([self.driver.fileno()], [], [], 30)[0]
        (done,) = self.driver.completed()
        return done

    def move(self, verb: str, pairs: Sequence[tuple[int, int]], gate: int = -1) -> TransferDone:
        assert self.begin(verb, pairs, gate) is None
        return self.end()

    def next_token(self, gates: Sequence[tuple[int, int]] = ()) -> ExecDone | ExecFailed:
        """All log-probabilities after the 41st token."""
        self.paged.lengths[0] = 40
        records = self.paged.seqs([0], [1], FORWARD, logprobs=VOCAB)
        packed = np.array(self.text[40:41], np.int32).tobytes()
        return self.driver.execute(Exec(0, 9, records.tobytes(), packed, b"", (), np.array(gates, np.int64).tobytes()))


@pytest.fixture
def rig(tiny_model: Tiny, backend: Any) -> Iterator[Rig]:
    made = Rig(backend, tiny_model("llama")[0])
    yield made
    carrier: Any = made.driver._transfers
    carrier.close()


def test_it_is_a_deep_mover_whose_loads_can_be_followed(rig: Rig) -> None:
    assert isinstance(rig.driver, DeepMover)
    probe = rig.driver.probe()
    assert probe.capabilities == ("exec", "drop", "read", "write", "layered")
    assert probe.arena == "lost" and probe.engine == "cuda-dry/torch/float32"
    assert min(probe.read_bytes_s, probe.write_bytes_s) > 0
    assert rig.driver.health()["pinned_bytes"] == rig.dram.size


def test_a_stored_frame_is_the_one_that_the_cpu_engine_makes(rig: Rig) -> None:
    """Byte for byte what StoredFormat seals on the host."""
    done = rig.move("read", list(zip(rig.frames, (7, 0, 3), strict=True)))
    assert (done.failed, done.moved_bytes) == ((), 3 * rig.frame_bytes)
    expected = np.full(SLOTS * rig.slot_bytes, 0xEE, np.uint8)
    form = StoredFormat(rig.frame_bytes, LAYERS, BLOCK, bytes(range(16)))
    pairs = np.array(list(zip(rig.frames, (7, 0, 3), strict=True)), np.int32).tobytes()
    assert form.seal(rig.arena.reshape(-1), expected, pairs, b"".join(rig.tags)) == []
    assert np.array_equal(rig.dram, expected)


def test_a_context_survives_the_journey(rig: Rig) -> None:
    expected = rig.next_token()
    assert isinstance(expected, ExecDone)
    rig.paged.lengths[0] = 40
    rig.paged.done(rig.paged.seqs([0], [1]), rig.text[40:41])
    assert rig.move("read", list(zip(rig.frames, (7, 0, 3), strict=True))).failed == ()
    rig.arena[:] = 0x11
    fresh = [frame for frame in range(128) if frame not in rig.frames][:3]
    assert rig.move("write", list(zip(fresh, (7, 0, 3), strict=True)), GATE).failed == ()
    assert rig.gates[GATE] == gate_value(TICKET, LAYERS)
    rig.paged.rows.frame[0, :3] = fresh
    again = rig.next_token()
    assert isinstance(again, ExecDone) and again.tops == expected.tops
    rig.arena[fresh[0], 6] ^= 0x40
    changed = rig.next_token()
    assert isinstance(changed, ExecDone) and changed.tops != expected.tops


@pytest.mark.parametrize(
    ("what", "code"), [("payload", E.ECORRUPT), ("header", E.ECORRUPT), ("absent", E.EINVAL), ("elsewhere", E.EINVAL)]
)
def test_items_fail_one_by_one(rig: Rig, what: str, code: E) -> None:
    rig.move("read", list(zip(rig.frames, (7, 0, 3), strict=True)))
    pairs: list[tuple[int, int]] = list(zip(rig.frames, (7, 0, 3), strict=True))
    if what == "payload":
        rig.dram[4096 + 100] ^= 1
    elif what == "header":
        rig.dram[70] ^= 1
    else:
        pairs[1] = (rig.frames[1], SLOTS) if what == "absent" else (128, 0)
    kept = rig.arena[rig.frames].copy()
    rig.arena[:] = 0
    done = rig.move("write", pairs, GATE)
    assert done.failed == ((1, code),) and done.moved_bytes == 2 * rig.frame_bytes
    assert rig.gates[GATE] == gate_value(TICKET, GATE_FAILED)
    assert np.array_equal(rig.arena[rig.frames][[0, 2]], kept[[0, 2]])


def test_what_cannot_be_begun_is_answered_at_once(rig: Rig) -> None:
    refused = rig.driver.transfer(Transfer(0, 3, "read", DRAM + 1, bytes(8), rig.tags[0], GATE, TICKET))
    assert refused is not None and refused.failed == ((0, E.EINVAL),)
    assert rig.gates[GATE] == gate_value(TICKET, GATE_FAILED)


class Slow:
    """Holds the mover before each group of layers until it is let on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = threading.Semaphore(0)
        whole = Placed.verify_layers

        def verify_layers(placed: Placed, first: int, count: int) -> bool:
            assert self.steps.acquire(timeout=30)
            return whole(placed, first, count)

        monkeypatch.setattr(Placed, "verify_layers", verify_layers)
        monkeypatch.setattr("attnix.drivers.accel.cuda.moving._GROUP_BYTES", 1)  # a layer a group


def loaded(rig: Rig) -> Any:
    """The frames demoted and gone; what follows the 41st token when they are there."""
    expected = rig.next_token()
    rig.paged.lengths[0] = 40
    rig.paged.done(rig.paged.seqs([0], [1]), rig.text[40:41])
    rig.move("read", list(zip(rig.frames, (7, 0, 3), strict=True)))
    rig.arena[:] = 0
    rig.arena[rig.frames] = np.frombuffer(np.full(rig.frame_bytes // 4, np.nan, np.float32).tobytes(), np.uint8)
    return expected


def test_a_pass_follows_its_load_layer_by_layer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass is sent while nothing has been loaded; the frames are NaN until their layer is."""
    expected = loaded(rig)
    slow = Slow(monkeypatch)
    assert rig.begin("write", list(zip(rig.frames, (7, 0, 3), strict=True)), GATE) is None
    follow = Moving.follow

    def follow_and_let_on(moving: Moving, layer: int, timeout_s: float) -> bool | None:
        slow.steps.release()
        return follow(moving, layer, timeout_s)

    monkeypatch.setattr(Moving, "follow", follow_and_let_on)
    done = rig.next_token([(GATE, TICKET)])
    assert isinstance(done, ExecDone), done
    assert done.tops == expected.tops
    assert 0 < done.waited_ns < done.compute_ns
    assert rig.end().failed == ()


def test_a_pass_whose_load_turns_out_corrupt_fails(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(rig)
    rig.dram[4096 + rig.frame_bytes - 8] ^= 1  # in the last layer of slot 0
    slow = Slow(monkeypatch)
    assert rig.begin("write", list(zip(rig.frames, (7, 0, 3), strict=True)), GATE) is None
    slow.steps.release(LAYERS)
    failed = rig.next_token([(GATE, TICKET)])
    assert isinstance(failed, ExecFailed) and failed.code == E.EIO and f"gate {GATE} failed" in failed.reason
    assert rig.end().failed == ((1, E.ECORRUPT),)


def test_a_pass_without_gates_waits_for_a_load_into_its_frames(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of messages, whatever goes on beside it; one into other frames is not waited for."""
    expected = loaded(rig)
    slow = Slow(monkeypatch)
    assert rig.begin("write", list(zip(rig.frames, (7, 0, 3), strict=True))) is None
    opener = threading.Timer(0.02, lambda: slow.steps.release(1))
    opener.start()
    done = rig.next_token()
    opener.join()
    assert isinstance(done, ExecDone) and done.tops == expected.tops
    rig.end()
    others = [frame for frame in range(128) if frame not in rig.frames][:3]
    assert rig.begin("write", list(zip(others, (7, 0, 3), strict=True))) is None
    assert isinstance(rig.next_token(), ExecDone)  # the mover still stands
    slow.steps.release(1)
    assert rig.end().failed == ()


def test_gates_of_other_loaders_are_looked_at(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader in another process tells the gate in shared memory; a later ticket means that ours is over."""
    expected = rig.next_token()
    assert isinstance(expected, ExecDone)
    with monkeypatch.context() as loader:  # it comes while the pass waits
        loader.setattr(
            "attnix.drivers.accel.cuda.gating.time.sleep",
            lambda s: rig.gates.__setitem__(GATE, gate_value(TICKET, LAYERS)),
        )
        done = rig.next_token([(GATE, TICKET)])
    assert isinstance(done, ExecDone) and done.tops == expected.tops and done.waited_ns > 0
    rig.gates[GATE] = gate_value(TICKET + 1, 0)
    done = rig.next_token([(GATE, TICKET)])
    assert isinstance(done, ExecDone) and done.waited_ns == 0
    rig.gates[GATE] = gate_value(TICKET + 2, GATE_FAILED)
    failed = rig.next_token([(GATE, TICKET + 2)])
    assert isinstance(failed, ExecFailed) and "failed" in failed.reason


def test_dropped_frames_are_zeros_after_what_was_loading_into_them(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(rig)
    slow = Slow(monkeypatch)
    rig.begin("write", list(zip(rig.frames, (7, 0, 3), strict=True)))
    threading.Timer(0.02, lambda: slow.steps.release(1)).start()
    rig.driver.drop(rig.frames[:1])
    assert not rig.arena[rig.frames[0]].any() and rig.arena[rig.frames[1]].any()
    rig.end()


def test_memory_that_cannot_be_pinned_is_said_and_works(
    tiny_model: Tiny, backend: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """801 is cudaErrorNotSupported.  CUDA tells it again to the thread's next launch, which would end the driver."""
    ended: list[Exception] = []
    monkeypatch.setattr(errors, "end_driver", ended.append)
    monkeypatch.setattr(DryDevice, "refuses", 801)
    rig = Rig(backend, tiny_model("llama")[0])
    assert "stays pageable" in capsys.readouterr().err and rig.driver.health()["pinned_bytes"] == 0
    kept = rig.arena[rig.frames].copy()
    assert rig.move("read", list(zip(rig.frames, (7, 0, 3), strict=True))).failed == ()
    rig.arena[:] = 0
    assert rig.move("write", list(zip(rig.frames, (7, 0, 3), strict=True))).failed == ()
    assert np.array_equal(rig.arena[rig.frames], kept)
    assert isinstance(rig.next_token(), ExecDone) and ended == []


def test_a_load_that_finds_no_memory_fails_and_leaves_nothing_under_way(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its first layer and its second.  What was issued is over before it is answered: the frames are others' then."""
    rig.move("read", list(zip(rig.frames, (7, 0, 3), strict=True)))
    monkeypatch.setattr("attnix.drivers.accel.cuda.moving._GROUP_BYTES", 1)  # a layer a group
    staging, asked = DryDevice.staging, 0

    def exhausted(self: DryDevice, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal asked
        asked += 1
        if asked == 2:
            error: Any = torch.AcceleratorError("CUDA error: out of memory")
            error.error_code = 2  # cudaHostAlloc's
            raise error
        return staging(self, shape, dtype)

    ended: list[Exception] = []
    monkeypatch.setattr("attnix.drivers.accel.cuda.carrier.end_driver", ended.append)
    with monkeypatch.context() as planted:
        planted.setattr(DryDevice, "staging", exhausted)
        done = rig.move("write", list(zip(rig.frames, (7, 0, 3), strict=True)), GATE)
    assert done.failed == tuple((item, E.ENOMEM) for item in range(3)) and ended == []
    assert rig.gates[GATE] == gate_value(TICKET, GATE_FAILED)
    rig.arena[rig.frames] = 0x22
    other = next(frame for frame in range(128) if frame not in rig.frames)
    assert rig.move("write", [(other, 7)]).failed == ()  # on the same stream
    assert (rig.arena[rig.frames] == 0x22).all()


class DefaultStream(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What changes the frames outside of `computing` happens when this ends: no stream of the engine waits for the default
    one.  Inside it is done when it is asked for, as ever in a dry run."""

    def __init__(self, frames: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.frames, self.inside = frames.untyped_storage().data_ptr(), 0
        self.late: list[Callable[[], Any]] = []
        whole = DryDevice.computing

        @contextlib.contextmanager
        def computing(device: DryDevice) -> Iterator[None]:
            self.inside += 1
            try:
                with whole(device):
                    yield
            finally:
                self.inside -= 1

        monkeypatch.setattr(DryDevice, "computing", computing)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        to: Any = args[0] if args else None
        changes = func._schema.is_mutable and isinstance(to, torch.Tensor)
        if changes and not self.inside and to.untyped_storage().data_ptr() == self.frames:
            self.late.append(lambda: func(*args, **(kwargs or {})))
            return to
        return func(*args, **(kwargs or {}))


def test_what_the_mirror_sets_is_there_before_a_copy_stream_reads_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = rig.driver._transfers
    assert isinstance(carrier, DeviceCarrier)
    rig.arena[5] = 0x77
    with DefaultStream(carrier._frames.bytes_, monkeypatch) as stream:
        assert rig.begin("read", [(5, 2)]) is None
        assert rig.end().failed == ()
    assert stream.late == []
    stored = rig.dram[2 * rig.slot_bytes :][HEADER_BYTES : HEADER_BYTES + rig.frame_bytes]
    assert (stored == 0x77).all()


def test_transfers_are_answered_in_their_order(rig: Rig) -> None:
    carrier = rig.driver._transfers
    assert isinstance(carrier, DeviceCarrier)
    for seq in range(6):
        assert rig.begin("read" if seq % 2 == 0 else "write", [(rig.frames[0], seq // 2)], seq=seq) is None
    done: list[int] = []
    deadline = time.monotonic() + 30
    while len(done) < 6 and time.monotonic() < deadline:
        select.select([rig.driver.fileno()], [], [], 1)
        done += [one.seq for one in rig.driver.completed()]
    assert done == list(range(6))


def test_the_format_of_placed_frames(tmp_path: Path) -> None:
    """void, write payloads, seal: what `seal` makes; verified by layers, the first wrong one stays named."""
    form = StoredFormat(96, 3, 4, bytes(16))
    tag = Tag(b"k" * 16, bytes(16), bytes(16), 0, 1, 0, b"", bytes(4)).pack(4)
    payload = np.random.default_rng(1).integers(0, 256, 96, np.uint8)
    stored: npt.NDArray[np.uint8] = np.full(2 * form.stored_bytes, 7, np.uint8)
    frames = np.array([1, 5], np.int32).tobytes()
    placed = form.placed(stored, frames, tag * 2)
    assert not placed.void() and [item for item, _ in placed.failures] == [1]
    assert not stored[form.stored_bytes :][:8].any() and stored[: form.stored_bytes].min() == 7
    stored[form.stored_bytes + 4096 :][:96] = payload
    placed.seal()
    expected = np.zeros(form.stored_bytes, np.uint8)
    form.seal(payload, expected, bytes(8), tag)
    assert np.array_equal(stored[form.stored_bytes :], expected)
    stored[form.stored_bytes + 4096 + 40] ^= 1  # layer 1
    check = form.placed(stored, np.array([1], np.int32).tobytes(), tag)
    assert check.verify_layers(0, 1) and not check.verify_layers(1, 1) and not check.verify_layers(2, 1)
    assert [code for _, code in check.failures] == [9 | 1 << 8]
