"""Frames that leave hbm for the dram arena and come back: what a stored frame holds, that a context survives the journey
to the bit, and that nothing altered gets back in."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from attnix.drivers.accel.config import KvDtype
from attnix.drivers.accel.driver import AccelBackend, AccelConfig
from attnix.drivers.serve import ConfigError
from attnix.kernel.batch import FORWARD
from attnix.kernel.errors import E
from attnix.kernel.events import Transfer, TransferDone
from attnix.kernel.geometry import RowLayout
from attnix.kernel.tag import GATE_FAILED, GATES, Tag, gate_value, stored_bytes

Tiny = Callable[[str], tuple[Path, Any]]
BLOCK, LAYERS, VOCAB, DRAM_FRAMES = 16, 3, 300, 12
DRAM = 2  # its device number
IDENTITY = bytes(range(16))
KV_DTYPES: tuple[KvDtype, ...] = ("float32", "bfloat16", "int8")


def crc32c_by_definition(data: bytes) -> int:
    """Bit by bit: the reflected Castagnoli polynomial (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_oracle() -> None:
    assert crc32c_by_definition(b"123456789") == 0xE3069283  # the check value of RFC 3720


def some_tag(index: int, tokens: Sequence[int]) -> Tag:
    key = bytes([index + 1]) * 16
    packed = np.array(tokens, np.int32).tobytes()
    return Tag(key, bytes([index]) * 16, b"r" * 16, index * BLOCK, len(tokens), 0, b"uid:7", packed)


class Rig:
    """A driver with a dram arena and gates; one context of 70 tokens in 5 frames, the last of them partial."""

    def __init__(self, backend: Any, path: Path, dtype: KvDtype = "float32", **settings: Any) -> None:
        self.gates = np.zeros(GATES, np.int64)
        probe = backend(path, dtype=dtype).backend.probe()
        assert probe.capabilities == ("exec", "drop")  # without a dram arena
        self.frame_bytes = probe.frame_bytes
        self.slot_bytes = stored_bytes(self.frame_bytes)
        self.dram = np.full(DRAM_FRAMES * self.slot_bytes, 0xEE, np.uint8)
        self.paged = backend(
            path, dtype=dtype, dram=self.dram, gates=self.gates, settings={"dram_device": DRAM} | settings
        )
        self.driver: AccelBackend = self.paged.backend
        self.arena = np.frombuffer(self.paged.arena, np.uint8).reshape(-1, self.frame_bytes)
        self.text = [int(token) for token in np.random.default_rng(9).integers(0, VOCAB, 100)]
        self.paged.done(self.paged.seqs([0], [70]), self.text[:70])
        self.frames = [int(frame) for frame in self.paged.rows.frame[0, :5]]
        self.tags = [some_tag(n, self.text[n * BLOCK : min(70, (n + 1) * BLOCK)]) for n in range(5)]

    def slot(self, index: int) -> npt.NDArray[np.uint8]:
        return self.dram[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def move(
        self, verb: str, pairs: Sequence[tuple[int, int]], tags: Sequence[Tag], gate: int = -1, ticket: int = 0,
        arena: int = DRAM,
    ) -> TransferDone:  # fmt: skip
        packed = b"".join(tag.pack(BLOCK) for tag in tags)
        done = self.driver.transfer(
            Transfer(0, 41, verb, arena, np.array(pairs, np.int32).tobytes(), packed, gate, ticket)
        )
        assert done is not None, "the CPU engine's carrier moves at once"
        return done

    def demote(self, slots: Sequence[int]) -> TransferDone:
        return self.move("read", list(zip(self.frames, slots, strict=True)), self.tags)

    def continued(self, n: int = 12) -> list[bytes]:
        """All log-probabilities after each of the next n tokens, to the bit."""
        self.paged.lengths[0] = 70
        said = []
        for token in self.text[70 : 70 + n]:
            records = self.paged.seqs([0], [1], FORWARD, logprobs=VOCAB)
            tokens, logprobs = self.paged.done(records, [token]).tops[0]
            said.append(tokens + logprobs)
        return said


@pytest.fixture
def rig(tiny_model: Tiny, backend: Any) -> Rig:
    return Rig(backend, tiny_model("llama")[0], identity=IDENTITY.hex())


SLOTS = [7, 0, 3, 11, 4]


def test_a_stored_frame_is_what_the_format_says(rig: Rig) -> None:
    """Field by field at the offsets of kernel/tag.py; checksums from their definition."""
    done = rig.demote(SLOTS)
    assert (done.device, done.seq, done.failed, done.moved_bytes) == (0, 41, (), 5 * rig.frame_bytes)
    assert done.elapsed_ns > 0
    for frame, index, tag in zip(rig.frames, SLOTS, rig.tags, strict=True):
        header, payload = rig.slot(index)[:4096].tobytes(), rig.slot(index)[4096:].tobytes()
        kv = rig.arena[frame].tobytes()
        assert payload[: rig.frame_bytes] == kv and not any(payload[rig.frame_bytes :])
        assert header[:8] == b"ATNXBLK1"
        version, crc, generation, size, layers = struct.unpack_from("<IIQII", header, 8)
        assert (version, generation, size, layers) == (1, 0, rig.frame_bytes, LAYERS)
        assert crc == crc32c_by_definition(header[:12] + bytes(4) + header[16:])
        assert header[32:64] == IDENTITY + bytes(16)
        packed = tag.pack(BLOCK)
        assert header[64 : 64 + len(packed)] == packed and not any(header[64 + len(packed) : 2048])
        step = rig.frame_bytes // LAYERS
        sums = [crc32c_by_definition(kv[layer * step : (layer + 1) * step]) for layer in range(LAYERS)]
        assert header[2048:] == struct.pack(f"<{LAYERS}I", *sums) + bytes(2048 - 4 * LAYERS)
    others = [index for index in range(DRAM_FRAMES) if index not in SLOTS]
    assert all((rig.slot(index) == 0xEE).all() for index in others)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_context_survives_the_journey_to_the_bit(tiny_model: Tiny, backend: Any, name: str, dtype: KvDtype) -> None:
    """Demoted, its frames scribbled over, promoted into other frames: the logits that follow are the same bits.  Controls:
    without the promotion, and with one byte of KV altered, they are not."""
    path = tiny_model(name)[0]
    expected = Rig(backend, path, dtype).continued()
    rig = Rig(backend, path, dtype, identity=IDENTITY.hex())
    assert rig.demote(SLOTS).failed == ()
    rig.arena[:] = 0x11
    assert rig.continued() != expected, "the control: frames that were not brought back show"
    rig.arena[:] = 0x11
    used = {int(frame) for frame in rig.paged.rows.frame[0] if frame >= 0}
    fresh = [frame for frame in range(len(rig.arena)) if frame not in used][:5]
    done = rig.move("write", list(zip(fresh, SLOTS, strict=True)), rig.tags)
    assert (done.failed, done.moved_bytes) == ((), 5 * rig.frame_bytes)
    rig.paged.rows.frame[0, :5] = fresh
    tail = rig.arena[fresh[4]].copy()
    assert rig.continued() == expected
    for frame in fresh[:2]:
        kept = rig.arena[frame].copy()
        rig.arena[frame, 6] ^= 0x40  # the top bit of a mantissa, or of half an int8
        rig.arena[fresh[4]] = tail
        assert rig.continued() != expected, "the control: altered KV shows"
        rig.arena[frame] = kept
    rig.arena[fresh[4]] = tail
    assert rig.continued() == expected


def test_nothing_altered_gets_back_in(rig: Rig) -> None:
    """Any one bit of a stored frame, in header or KV; another key, other tokens, another depth; another model."""
    rig.demote(SLOTS)
    fresh = [frame for frame in range(len(rig.arena)) if frame not in rig.paged.rows.frame[0]][:5]
    pairs = list(zip(fresh, SLOTS, strict=True))
    random = np.random.default_rng(5)
    payload_bits = [8 * 4096 + int(bit) for bit in random.integers(0, 8 * rig.frame_bytes, 40)]
    for bit in [0, 8 * 13, 8 * 34 + 5, 8 * 70, 8 * 200, 8 * 2050, 8 * 4095, *payload_bits]:
        rig.slot(SLOTS[2])[bit // 8] ^= 1 << bit % 8
        done = rig.move("write", pairs, rig.tags)
        assert (done.failed, done.moved_bytes) == (((2, E.ECORRUPT),), 4 * rig.frame_bytes), bit
        assert all(
            np.array_equal(rig.arena[new], rig.arena[old])
            for n, (new, old) in enumerate(zip(fresh, rig.frames, strict=True))
            if n != 2
        )
        rig.slot(SLOTS[2])[bit // 8] ^= 1 << bit % 8
    good = rig.tags[1]
    changes: list[dict[str, Any]] = [
        {"key": b"x" * 16}, {"parent": b"x" * 16}, {"root": b"x" * 16}, {"depth": 32}, {"ntokens": 15}, {"flags": 1},
        {"domain": b"uid:8"}, {"tokens": good.tokens[:-4] + b"\1\2\0\0"},
    ]  # fmt: skip
    for change in changes:
        tags = [rig.tags[0], good._replace(**change), *rig.tags[2:]]
        assert rig.move("write", pairs, tags).failed == ((1, E.ECORRUPT),), change
    rig.driver.identify(b"another model   ")
    assert rig.move("write", pairs, rig.tags).failed == tuple((n, E.ECORRUPT) for n in range(5))
    rig.driver.identify(IDENTITY)
    assert rig.move("write", pairs, rig.tags).failed == ()
    assert rig.driver.health()["corrupt_frames"] == 47 + len(changes) + 5


def test_items_that_cannot_be_fail_one_by_one(rig: Rig) -> None:
    before = rig.arena.copy()
    for verb in ("read", "write"):
        pairs = [(len(rig.arena), 0), (rig.frames[0], 1), (-1, 2), (0, DRAM_FRAMES), (0, -5)]
        rig.move("read", [(rig.frames[0], 1)], rig.tags[1:2])
        failed = rig.move(verb, pairs, rig.tags).failed
        assert failed == tuple((n, E.EINVAL) for n in (0, 2, 3, 4))
    assert np.array_equal(rig.arena, before)
    every = tuple((n, E.EINVAL) for n in range(5))
    assert rig.move("read", list(zip(rig.frames, SLOTS, strict=True)), rig.tags, arena=DRAM + 1).failed == every
    assert rig.move("read", list(zip(rig.frames, SLOTS, strict=True)), rig.tags[1:]).failed == every


def test_nothing_moves_before_the_identity_is_known(tiny_model: Tiny, backend: Any) -> None:
    rig = Rig(backend, tiny_model("llama")[0])
    assert rig.demote(SLOTS).failed == tuple((n, E.EIO) for n in range(5))
    assert (rig.dram == 0xEE).all()
    rig.driver.identify(IDENTITY)
    assert rig.demote(SLOTS).failed == ()


def test_the_gate_of_a_transfer_opens_when_all_of_it_is_there(rig: Rig) -> None:
    rig.demote(SLOTS)
    pairs = list(zip(rig.frames, SLOTS, strict=True))
    assert not rig.gates.any()
    rig.move("write", pairs, rig.tags, gate=9, ticket=6)
    assert rig.gates[9] == gate_value(6, LAYERS)
    rig.slot(SLOTS[4])[5000] ^= 1
    rig.move("write", pairs, rig.tags, gate=9, ticket=7)
    assert rig.gates[9] == gate_value(7, GATE_FAILED)
    assert np.count_nonzero(rig.gates) == 1


def test_many_frames_go_through_several_threads(tiny_model: Tiny, backend: Any) -> None:
    """More shares than threads, a failure in some of them: order and indices of failures are those of the items."""
    rig = Rig(backend, tiny_model("llama")[0], identity=IDENTITY.hex(), threads=2)
    mover: Any = rig.driver._transfers
    items = 5 * max(1, (2 << 20) // rig.frame_bytes) + 3
    dram, hbm = np.zeros(items * rig.slot_bytes, np.uint8), np.zeros((items, rig.frame_bytes), np.uint8)
    hbm[:] = np.random.default_rng(1).integers(0, 256, hbm.shape, np.uint8)
    kept = hbm.copy()
    mover._dram, mover._frames = dram, hbm.reshape(-1)
    slots = np.random.default_rng(2).permutation(items).tolist()
    tags = [some_tag(n % 200, [n] * BLOCK) for n in range(items)]
    assert rig.move("read", list(enumerate(slots)), tags).failed == ()
    assert mover._helpers == 1
    hbm[:] = 0
    for n in (1, items // 2, items - 1):
        dram[slots[n] * rig.slot_bytes + 4096 + n] ^= 8
    failed = rig.move("write", list(enumerate(slots)), tags).failed
    assert failed == tuple((n, E.ECORRUPT) for n in (1, items // 2, items - 1))
    good = [n for n in range(items) if n not in dict(failed)]
    assert np.array_equal(hbm[good], kept[good])


def test_the_probe_tells_measured_speeds(rig: Rig) -> None:
    probe = rig.driver.probe()
    assert probe.capabilities == ("exec", "drop", "read", "write")
    assert probe.stored_bytes == 0  # of frames that it holds itself
    for speed in (probe.read_bytes_s, probe.write_bytes_s):
        assert 1 << 28 < speed < 1 << 40
    assert 0 <= probe.latency_ns < 50_000_000
    rig.demote(SLOTS)
    health = rig.driver.health()
    assert (health["read_frames"], health["written_frames"]) == (5, 0)
    assert health["moved_bytes"] == 5 * rig.frame_bytes and health["moving_ns"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 4}, "the model has 3 layers, not 4"),
        ({"identity": "12"}, "32 hex digits"),
        ({"dram_frames": DRAM_FRAMES + 1}, "room for 12 stored frames, not 13"),
        ({"dram_frames": "many"}, "must be int"),
    ],
)
def test_settings_that_do_not_fit(tiny_model: Tiny, settings: dict[str, Any], message: str) -> None:
    layout = RowLayout(2, 4)
    base: dict[str, Any] = {"model": str(tiny_model("llama")[0]), "slots": 2, "entries": 4, "dram_device": DRAM}
    frame_bytes = 2 * LAYERS * 2 * 16 * BLOCK * 2
    with pytest.raises(ConfigError, match=message):
        config = AccelConfig.from_json(base | settings)
        dram = bytearray(DRAM_FRAMES * stored_bytes(frame_bytes))
        AccelBackend(config, bytearray(4 * frame_bytes), bytearray(layout.total_bytes), dram)
