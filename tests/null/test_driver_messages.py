"""Transfers, their answers and inventories as messages: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

from array import array
from typing import Any

import msgpack
import pytest

from attnix.drivers.channel import BadMessage
from attnix.drivers.messages import (
    decode_done,
    decode_exec,
    decode_found,
    decode_identity,
    decode_moved,
    decode_probe,
    decode_transfer,
    done_message,
    exec_message,
    expected_results,
    found_frames,
    found_message,
    identity_message,
    moved_message,
    probe_message,
    transfer_message,
)
from attnix.drivers.protocol import ExecStats, Probe, TimedPrefill
from attnix.kernel.events import Exec, ExecDone, Found, Transfer, TransferDone
from attnix.kernel.tag import GATES, Tag

BLOCK = 4
PAIRS = array("i", [3, 0, 5, 9]).tobytes()
TAGS = bytes(2 * 144)
TRANSFER = Transfer(0, 7, "write", 1, PAIRS, TAGS, 5, 123456789012)


def sent(message: list[Any]) -> list[Any]:
    """As it arrives."""
    packed = msgpack.packb(message)
    assert isinstance(packed, bytes)
    received: list[Any] = msgpack.unpackb(packed)
    return received


def test_what_goes_in_comes_out() -> None:
    assert sent(transfer_message(TRANSFER)) == ["write", 7, 1, PAIRS, TAGS, 5, 123456789012]
    assert decode_transfer(sent(transfer_message(TRANSFER))) == TRANSFER
    done = TransferDone(2, 7, ((1, 74),), 4096, 12)
    assert sent(moved_message(done)) == ["moved", 7, [[1, 74]], 4096, 12]
    assert decode_moved(sent(moved_message(done)), 2, items=2) == done
    assert decode_identity(sent(identity_message(bytes(16)))) == bytes(16)


def test_an_inventory() -> None:
    rows = b"".join(
        frame.to_bytes(4, "little") + Tag(bytes(16), bytes(16), bytes(16), 0, 4, 0, b"", bytes(16)).pack(BLOCK)
        for frame in (8, 2)
    )
    assert len(rows) == 2 * (4 + 128 + 16)
    found = decode_found(sent(found_message(rows)), 2, 3, BLOCK)
    assert found == Found(2, 3, rows) and found_frames(found, BLOCK) == [8, 2]
    assert found_frames(Found(2, 3, b""), BLOCK) == []
    for wrong in (["found"], ["found", "text"], ["found", rows[:-1]], ["found", rows, 1]):
        with pytest.raises(BadMessage):
            decode_found(wrong, 2, 3, BLOCK)


@pytest.mark.parametrize(
    "change",
    [
        {0: "copy"}, {1: "7"}, {1: True}, {2: -1}, {2: 8}, {3: b""}, {3: PAIRS[:-1]}, {3: array("i", [3, -1]).tobytes()},
        {3: "text"}, {4: b""}, {4: TAGS[:-1]}, {5: -2}, {5: GATES}, {5: None}, {6: -1},
    ],
)  # fmt: skip
def test_transfers_that_are_none(change: dict[int, Any]) -> None:
    message = transfer_message(TRANSFER)
    for at, value in change.items():
        message[at] = value
    with pytest.raises(BadMessage):
        decode_transfer(message)
    with pytest.raises(BadMessage):
        decode_transfer(message[:-1])


@pytest.mark.parametrize(
    "message",
    [
        ["moved", 7], ["moved", "7", [], 0, 0], ["moved", 7, [], -1, 0], ["moved", 7, [], 0, -1],
        ["moved", 7, [[2, 5]], 0, 0], ["moved", 7, [[-1, 5]], 0, 0], ["moved", 7, [[0, 0]], 0, 0],
        ["moved", 7, [[0, 5], [0, 5]], 0, 0], ["moved", 7, [0], 0, 0], ["moved", 7, [[0]], 0, 0],
        ["moved", 7, [[0, 5], [1, 5], [1, 5]], 0, 0], ["moved", 7, {}, 0, 0],
    ],
)  # fmt: skip
def test_answers_that_cannot_be(message: list[Any]) -> None:
    with pytest.raises(BadMessage):
        decode_moved(message, 2, items=2)


def test_what_older_drivers_say_is_understood() -> None:
    gates = array("q", [5, 9]).tobytes()
    effect = Exec(0, 1, b"", b"", b"", (), gates)
    assert decode_exec(sent(exec_message(effect))) == effect
    assert decode_exec(sent(exec_message(effect))[:6]) == effect._replace(gates=b"")
    for wrong in (gates[:-1], array("q", [GATES, 9]).tobytes(), array("q", [-1, 9]).tobytes(), "text"):
        with pytest.raises(BadMessage):
            decode_exec([*exec_message(effect)[:6], wrong])
    done = ExecDone(0, 1, b"", b"", (), (), 4, 100, 30)
    message = sent(done_message(done, ExecStats(4, 0, 100, 0, 30)))
    expected = expected_results(b"")
    assert decode_done(message, 0, expected)[0] == done
    message[6] = message[6][:4]
    assert decode_done(message, 0, expected)[0].waited_ns == 0
    probe = Probe(1, "nvme", 9, "", (), 8, 32, 1, 0, "", "e", "m", 8192, 10, 20, 30)
    message = sent(probe_message(1, probe))
    assert decode_probe(message) == (1, probe)
    for name in ("stored_bytes", "read_bytes_s", "write_bytes_s", "latency_ns"):
        del message[2][name]
    assert decode_probe(message)[1] == probe._replace(stored_bytes=0, read_bytes_s=0, write_bytes_s=0, latency_ns=0)
    message[2]["latency_ns"] = -1
    with pytest.raises(BadMessage):
        decode_probe(message)


def test_passes_that_a_driver_timed() -> None:
    probe = Probe(
        1,
        "accel",
        9,
        "",
        (),
        8,
        32,
        1,
        0,
        "",
        "e",
        "m",
        prefill=(TimedPrefill(16, 0, 900), TimedPrefill(64, 512, 4000)),
    )
    message = sent(probe_message(1, probe))
    assert message[2]["prefill"] == [[16, 0, 900], [64, 512, 4000]]
    assert decode_probe(message) == (1, probe)
    del message[2]["prefill"]
    assert decode_probe(message)[1].prefill == ()
    wrongs: list[Any] = [
        None, 5, "text", {}, [16, 0, 900], [[16, 0]], [[16, 0, 900, 1]], [[0, 0, 900]], [[16, -1, 900]], [[16, 0, 0]],
        [[16, 0, 9.5]], [[16, True, 900]], [[1 << 63, 0, 900]], [[16, 0, 900]] * 65,
    ]  # fmt: skip
    for wrong in wrongs:
        message[2]["prefill"] = wrong
        with pytest.raises(BadMessage):
            decode_probe(message)
