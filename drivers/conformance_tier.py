"""The conformance suite of tiers: what every driver that keeps stored frames must do, against a live driver process.

    from attnix.drivers.conformance_tier import CHECKS, TierRig, Traits

    @pytest.mark.parametrize("name", CHECKS)
    def test_conforms(name, rig): CHECKS[name](rig)          # one test per check

    report = check_tier(lambda: TierRig(spec, format, traits=..., flip=...))     # or everything, at once

Each check raises Nonconformance and leaves a driver that serves on, but for the last.  They need 24 frames of the tier
and of dram, and 8 of hbm.  A check that a tier's traits or capabilities make meaningless does nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, TypeAlias

from attnix.kernel.errors import E
from attnix.kernel.tag import GATE_FAILED, HEADER_BYTES, gate_value

from .conformance_process import Nonconformance, Report, require, run_checks
from .conformance_tier_rig import DRAM, HBM, JUNK, TierRig, Traits
from .protocol import PROTOCOL_VERSION
from .stored import StoredFormat

__all__ = ["CHECKS", "MIN_FRAMES", "Check", "Nonconformance", "StoredFormat", "TierRig", "Traits", "check_tier"]

MIN_FRAMES: Final = 24
NOT_THERE: Final = (int(E.ENOENT), int(E.ECORRUPT))

Check: TypeAlias = Callable[[TierRig], None]
CHECKS: dict[str, Check] = {}


def check_tier(start: Callable[[], TierRig]) -> Report:
    """Run every check (conformance_process.run_checks)."""
    return run_checks(CHECKS, start)


def _check(check: Check) -> Check:
    CHECKS[check.__name__] = check
    return check


# -- who it is ----------------------------------------------------------------------------------------------------


@_check
def probe_is_complete_and_stable(rig: TierRig) -> None:
    """The fields agree with the format, and nothing but measurements changes."""
    probe = rig.probe
    require(probe.protocol == PROTOCOL_VERSION, f"protocol {probe.protocol}, expected {PROTOCOL_VERSION}")
    require(probe.pid == rig.process.pid, f"says pid {probe.pid}, is {rig.process.pid}")
    require({"read", "write", "drop"} <= set(probe.capabilities), f"capabilities {probe.capabilities} lack some")
    require("exec" not in probe.capabilities, "a tier that computes")
    require(probe.frame_bytes == rig.format.frame_bytes, f"frames of {probe.frame_bytes} bytes")
    require(probe.stored_bytes == rig.format.stored_bytes, f"stored frames of {probe.stored_bytes} bytes")
    require(probe.capacity_frames >= MIN_FRAMES, f"the suite needs {MIN_FRAMES} frames, not {probe.capacity_frames}")
    require(min(probe.read_bytes_s, probe.write_bytes_s, probe.latency_ns) >= 0, "a negative measurement")
    require(bool(probe.kind and probe.engine), "kind or engine is not said")
    again = rig.ask_probe()
    again = again._replace(
        read_bytes_s=probe.read_bytes_s, write_bytes_s=probe.write_bytes_s, latency_ns=probe.latency_ns
    )
    require(again == probe, "a second probe is answered differently")


@_check
def unknown_verbs_are_answered(rig: TierRig) -> None:
    """A verb that it does not know costs one answer, `exec` included."""
    for message in (["nonsense"], ["nonsense", 1, 2], ["exec", 1, b"", b"", b"", [], b""]):
        rig.send(message)
        answers = rig.until_health()
        require(answers == [["unknown", message[0]]], f"{message!r} was answered with {answers!r:.200}")


# -- moving -------------------------------------------------------------------------------------------------------


@_check
def frames_round_trip(rig: TierRig) -> None:
    """What comes back is what was written, byte for byte and header included; only the frames named change."""
    rig.spoil()
    blocks = [(number, frame) for number, frame in zip(range(100, 108), (5, 0, 23, 7, 6, 11, 1, 12), strict=True)]
    for at, (number, _) in enumerate(blocks):
        rig.put(2 * at, rig.stored(number))
    before = rig.dram_digests()
    tags = [rig.tag(number) for number, _ in blocks]
    done = rig.move("write", [(frame, 2 * at) for at, (_, frame) in enumerate(blocks)], tags)
    require(not done.failed, f"writing failed: {done.failed}")
    require(rig.dram_digests() == before, "a write changed the dram")
    rig.spoil()
    before = rig.dram_digests()
    done = rig.move("read", [(frame, 3 * at) for at, (_, frame) in enumerate(blocks)], tags)
    require(not done.failed, f"reading failed: {done.failed}")
    for at, (number, frame) in enumerate(blocks):
        require(rig.get(3 * at) == rig.stored(number), f"block {number} came back from frame {frame} as something else")
    after = rig.dram_digests()
    named = {3 * at for at in range(len(blocks))}
    changed = {frame for frame, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}
    require(changed == named, f"a read into {sorted(named)} changed {sorted(changed)}")


@_check
def a_frame_holds_what_was_written_last(rig: TierRig) -> None:
    """Writes and a read of one frame, sent without waiting, act in the order in which they were sent."""
    if not rig.traits.is_addressed:
        return
    n = 4
    for round_ in range(4):
        base = 200 + 10 * round_
        for at in range(n):
            rig.put(at, rig.stored(base + at))
        with _all_at_once(rig):
            for at in range(n):
                rig.begin("write", [(3, at)], [rig.tag(base + at)])
            last = rig.begin("read", [(3, 6)], [rig.tag(base + n - 1)])
            stale = rig.begin("read", [(3, 7)], [rig.tag(base)])
        outcome = {done.seq: done.failed for done in rig.collect()}
        require(outcome.pop(last) == (), "the last of several writes was not what the next read found")
        require(outcome.pop(stale) == ((0, int(E.ECORRUPT)),), "a block that was overwritten was read without an error")
        require(not any(outcome.values()), f"writes failed: {outcome}")
        require(rig.get(6) == rig.stored(base + n - 1), "the last write is not what came back")


@_check
def an_arena_frame_is_used_in_order(rig: TierRig) -> None:
    """A read into a dram frame, sent right after a write out of it, does not overtake the write."""
    rig.write((210, 4))
    for attempt in range(4):
        rig.put(2, rig.stored(211))
        with _all_at_once(rig):
            rig.begin("write", [(5, 2)], [rig.tag(211)])
            rig.begin("read", [(4, 2)], [rig.tag(210)])
        failed = [done.failed for done in rig.collect() if done.failed]
        require(not failed, f"attempt {attempt}: {failed}")
        require(rig.get(2) == rig.stored(210), "the read did not arrive")
        require(rig.read((211, 5)) == [0], "the write took what the read brought")


@_check
def many_transfers_are_answered_once_each(rig: TierRig) -> None:
    """A hundred transfers without waiting: every one is answered exactly once, in any order, and all are right."""
    frames = list(range(12))
    rig.write(*((300 + frame, frame) for frame in frames))
    expected = set()
    for round_ in range(100):
        frame = frames[round_ * 5 % len(frames)]
        expected.add(rig.begin("read", [(frame, 12 + round_ % 12)], [rig.tag(300 + frame)]))
    done = rig.collect()
    require({answer.seq for answer in done} == expected, "not every transfer was answered")
    require(not any(answer.failed for answer in done), f"reads failed: {[a.failed for a in done if a.failed][:3]}")
    require(rig.until_health() == [], "more answers than transfers")


@_check
def private_blocks_are_kept_or_refused(rig: TierRig) -> None:
    """A partial block comes back, or the tier says at once that it does not take any."""
    tag = rig.private_tag(400)
    rig.put(0, rig.stored(400, tag))
    failed = rig.move("write", [(2, 0)], [tag]).failed
    if not rig.traits.keeps_private:
        require(len(failed) == 1, "a private block was taken by a tier that must not keep any")
        return
    require(not failed, f"writing a private block failed: {failed}")
    require(not rig.move("read", [(2, 1)], [tag]).failed, "a private block did not come back")
    require(rig.get(1) == rig.stored(400, tag), "a private block came back as something else")


# -- what must not pass -------------------------------------------------------------------------------------------


@_check
def another_block_is_not_read(rig: TierRig) -> None:
    """Every field of the tag is compared; the other items of the transfer are read all the same."""
    rig.write((500, 0), (501, 1), (502, 2))
    tokens = struct.pack("<i", 7) * rig.format.block_tokens
    wrong: dict[str, dict[str, Any]] = {
        "key": {"key": b"k" * 16},
        "parent": {"parent": b"p" * 16},
        "depth": {"depth": 0},
        "domain": {"domain": b"other"},
        "tokens": {"tokens": tokens},
    }
    for what, change in wrong.items():
        tags = [rig.tag(500), rig.tag(501, **change), rig.tag(502)]
        failed = rig.move("read", [(0, 10), (1, 11), (2, 12)], tags).failed
        allowed = NOT_THERE if what == "key" else NOT_THERE[1:]
        _require_failed(failed, {1}, allowed, f"a block with another {what}")
        require(rig.get(10) == rig.stored(500) and rig.get(12) == rig.stored(502), "its neighbours did not come")


@_check
def nothing_wrong_is_stored_or_returned(rig: TierRig) -> None:
    """A bit of any layer, of the header or of the tag flips in dram: the write fails, or the read does."""
    step = rig.format.layer_bytes
    places = [HEADER_BYTES + layer * step + layer % step for layer in range(rig.format.layers)]
    for offset in (*places, 3, 70, 2048):
        frame = bytearray(rig.stored(510))
        frame[offset] ^= 0x04
        rig.put(0, bytes(frame))
        if rig.move("write", [(3, 0)], [rig.tag(510)]).failed:
            continue
        failed = rig.move("read", [(3, 1)], [rig.tag(510)]).failed
        _require_failed(failed, {0}, NOT_THERE, f"a frame with a wrong byte at {offset}")


@_check
def every_flipped_bit_is_found(rig: TierRig) -> None:
    """The same, but the bit flips where the tier keeps it: header, tag, checksums, and each layer."""
    if rig.flip is None:
        return
    step = rig.format.layer_bytes
    places = [HEADER_BYTES + layer * step + (layer * 977) % step for layer in range(rig.format.layers)]
    for offset in (*places, 0, 9, 13, 25, 33, 64, 100, 192, 2048):
        rig.write((520, 6), (521, 7))
        rig.flip(6, offset)
        codes = rig.read((520, 6), (521, 7))
        require(codes[0] == E.ECORRUPT, f"a flipped bit at {offset}: {codes[0]} instead of ECORRUPT")
        require(codes[1] == 0, "its neighbour was not read")
    rig.write((520, 6))
    require(rig.read((520, 6)) == [0], "a frame that was corrupt cannot be used again")


@_check
def empty_frames_hold_nothing(rig: TierRig) -> None:
    """What nobody wrote, and what was dropped, cannot be read."""
    require(rig.read((999_999, 22))[0] in NOT_THERE, "a block that nobody wrote was read")
    rig.write((530, 13), (531, 14), (532, 15))
    rig.send(["drop", 77, [13, 15]])
    answers = rig.until_health()
    require(answers == [["dropped", 77]], f"drop was answered with {answers!r:.200}")
    codes = rig.read((530, 13), (531, 14), (532, 15))
    require(codes[1] == 0, "a frame that was not dropped is gone")
    if rig.traits.is_addressed:
        require(codes[0] in NOT_THERE and codes[2] in NOT_THERE, f"dropped frames were read: {codes}")


@_check
def items_fail_one_by_one(rig: TierRig) -> None:
    """Frames that do not exist fail, and nothing else of their transfer."""
    rig.write((540, 0), (541, 1))
    codes = dict(rig.move("read", [(0, 4), (1, rig.dram_frames)], [rig.tag(540), rig.tag(541)]).failed)
    require(codes == {1: int(E.EINVAL)}, f"a read into a dram frame that does not exist: {codes}")
    require(rig.get(4) == rig.stored(540), "its neighbour did not come")
    rig.put(4, rig.stored(542))
    codes = dict(rig.move("write", [(2, rig.dram_frames), (3, 4)], [rig.tag(541), rig.tag(542)]).failed)
    require(codes == {0: int(E.EINVAL)}, f"a write from a dram frame that does not exist: {codes}")
    if rig.traits.is_addressed:
        capacity = rig.probe.capacity_frames
        codes = dict(rig.move("write", [(capacity, 4), (5, 4)], [rig.tag(542), rig.tag(542)]).failed)
        require(codes == {0: int(E.EINVAL)}, f"a write to a frame that does not exist: {codes}")


@_check
def malformed_transfers_are_refused_and_survived(rig: TierRig) -> None:
    """Each is answered once, as failed, and changes no frame but those that it names."""
    rig.write((550, 0))
    tag, pair = rig.tag(550), struct.pack("<ii", 0, 3)
    before = rig.dram_digests()
    wrong = [
        ["read", 1_000_000],
        ["read", 1_000_001, DRAM, pair[:-1], tag, -1, 0],
        ["read", 1_000_002, DRAM, pair, tag[:-4], -1, 0],
        ["read", 1_000_003, DRAM, pair, tag * 2, -1, 0],
        ["read", 1_000_004, 7, pair, tag, -1, 0],
        ["write", 1_000_005, 7, pair, tag, -1, 0],
        ["read", 1_000_006, DRAM, struct.pack("<ii", -1, 3), tag, -1, 0],
        ["read", 1_000_007, DRAM, struct.pack("<ii", 0, -1), tag, -1, 0],
        ["write", 1_000_008, DRAM, "text", tag, -1, 0],
        ["write", 1_000_009, DRAM, b"", b"", -1, 0],
        ["write", 1_000_010, HBM, pair, tag, -1, 0],
    ]
    for message in wrong:
        rig.send(message)
        answers = rig.until_health()
        require(
            len(answers) == 1 and answers[0][:2] == ["moved", message[1]] and bool(answers[0][2]),
            f"{message!r:.120} was answered with {answers!r:.200}",
        )
    after = rig.dram_digests()
    before[3] = after[3]
    require(after == before, "a transfer that was refused changed frames that it does not name")
    require(rig.read((550, 0)) == [0], "it serves no more")


# -- direct reads -------------------------------------------------------------------------------------------------


@_check
def direct_reads_arrive_in_layer_order(rig: TierRig) -> None:
    """Bare frames in hbm, verified; the gate never says more than what is there, and ends at the number of layers."""
    if "direct" not in rig.probe.capabilities:
        return
    blocks = [(600 + at, frame) for at, frame in enumerate((4, 9, 0, 17, 2, 11, 16, 1))]
    rig.write(*blocks)
    tags = [rig.tag(number) for number, _ in blocks]
    pairs = [(frame, 7 - at) for at, (_, frame) in enumerate(blocks)]
    payloads = {7 - at: rig.payload(number) for at, (number, _) in enumerate(blocks)}
    for ticket in range(1, 9):
        rig.spoil()
        seq = rig.begin("read", pairs, tags, arena=HBM, gate=12, ticket=ticket)
        _watch_gate(rig, ticket, payloads)
        (done,) = rig.collect(seq)
        require(not done.failed, f"a direct read failed: {done.failed}")
        require(rig.gates.load(12) == gate_value(ticket, rig.format.layers), "the gate does not say that all is there")
        for at, (number, _) in enumerate(blocks):
            require(rig.hbm_frame(7 - at) == payloads[7 - at], f"block {number} arrived in hbm as something else")
        require(set(rig.hbm_frame(9)) == {JUNK}, "a direct read changed a frame that nobody named")
    require(rig.gates.load(11) == rig.gates.load(13) == 0, "another gate was touched")


@_check
def a_failed_direct_read_closes_its_gate(rig: TierRig) -> None:
    """Wrong content in any layer, or a wrong key: the gate says so, the item fails, the others arrive."""
    if "direct" not in rig.probe.capabilities:
        return
    layers, step = rig.format.layers, rig.format.layer_bytes
    rig.write((620, 4), (621, 5))
    require(rig.move("read", [(4, 0), (5, 1)], [rig.tag(621), rig.tag(621)], arena=HBM, gate=3, ticket=1).failed
            == ((0, int(E.ECORRUPT)),), "another block was read into hbm")  # fmt: skip
    require(rig.gates.load(3) == gate_value(1, GATE_FAILED), "the gate of a failed read does not say so")
    for ticket, layer in enumerate(range(layers) if rig.flip else (), start=2):
        assert rig.flip is not None
        rig.write((620, 4), (621, 5))
        rig.flip(4, HEADER_BYTES + layer * step + 5)
        done = rig.move("read", [(4, 0), (5, 1)], [rig.tag(620), rig.tag(621)], arena=HBM, gate=3, ticket=ticket)
        require(done.failed == ((0, int(E.ECORRUPT)),), f"a flipped bit in layer {layer}: {done.failed}")
        require(rig.gates.load(3) == gate_value(ticket, GATE_FAILED), "the gate of a failed read does not say so")
        require(rig.hbm_frame(1) == rig.payload(621), "its neighbour did not arrive")


# -- lives --------------------------------------------------------------------------------------------------------


@_check
def what_was_written_survives_a_restart(rig: TierRig) -> None:
    """The next life finds what is there and can read it; not what was dropped, overwritten, or private to a context."""
    if not rig.traits.survives_restart:
        return
    rig.send(["drop", 1, list(range(MIN_FRAMES))])
    rig.until_health()
    for kill in (True, False):
        base = 700 if kill else 720
        rig.write(*((base + frame, frame) for frame in range(10)))
        rig.write((base + 15, 5))  # overwritten
        private = rig.private_tag(base + 19)
        rig.put(0, rig.stored(base + 19, private))
        require(not rig.move("write", [(20, 0)], [private]).failed, "a private block was refused")
        rig.send(["drop", 2, [7]])
        rig.until_health()
        rig.restart(kill=kill)
        expected = {frame: rig.tag(base + frame) for frame in range(10) if frame not in (5, 7)} | {
            5: rig.tag(base + 15)
        }
        found = rig.found()
        require(found == expected, f"found {_numbers(found)}, expected {_numbers(expected)}")
        codes = rig.read((base, 0), (base + 15, 5), (base + 9, 9))
        require(codes == [0, 0, 0], f"what was found cannot be read: {codes}")
        require(rig.read((base + 7, 7))[0] in NOT_THERE, "a dropped frame came back with the restart")


@_check
def it_exits_when_its_channel_closes(rig: TierRig) -> None:
    """Status 0, within the deadline, with transfers under way.  The last check: it ends the driver."""
    rig.write(*((800 + frame, frame) for frame in range(12)))
    for round_ in range(50):
        frame = round_ % 12
        rig.begin("read", [(frame, 12 + frame)], [rig.tag(800 + frame)])
    rig.channel.close()
    status = rig.wait_for_exit()
    require(status is not None, f"it still runs {rig.deadline_s:g} s after its channel was closed")
    require(status == os.EX_OK, f"it exited with status {status} when its channel was closed")


# -- means --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _all_at_once(rig: TierRig) -> Iterator[None]:
    """What is sent within, the driver finds in its channel together and behind a write of 16 frames, however slow we were
    to send it: what can be taken in a wrong order is."""
    frames = range(8, MIN_FRAMES)
    for frame in frames:
        rig.put(frame, rig.stored(frame))
    rig.process.send_signal(signal.SIGSTOP)
    try:
        rig.begin("write", [(frame, frame) for frame in frames], [rig.tag(frame) for frame in frames])
        yield
    finally:
        rig.process.send_signal(signal.SIGCONT)


def _watch_gate(rig: TierRig, ticket: int, payloads: dict[int, bytes]) -> None:
    """Follow gate 12 while a direct read is under way.  payloads: what must arrive, by hbm frame."""
    step, layers = rig.format.layer_bytes, rig.format.layers
    said = checked = 0
    while not rig.has_answer():
        value = rig.gates.load(12)
        if value < gate_value(ticket, 0):
            continue
        layer = value - gate_value(ticket, 0)
        require(said <= layer <= layers, f"the gate went from {said} to {layer} of {layers} layers")
        said = layer
        for at in range(checked, said):
            for frame, payload in payloads.items():
                arrived = rig.hbm_frame(frame)[at * step : (at + 1) * step]
                require(
                    arrived == payload[at * step : (at + 1) * step], f"layer {at} is not there, the gate says {said}"
                )
        checked = said


def _require_failed(failed: tuple[tuple[int, int], ...], items: set[int], allowed: Collection[int], what: str) -> None:
    named = {item for item, code in failed if code in allowed}
    require(named == items and len(failed) == len(items), f"{what}: {failed}, not {sorted(items)} with {allowed}")


def _numbers(found: dict[int, bytes]) -> list[int]:
    return sorted(found)
