"""The file tier conforms with both of its engines, and lives through what can happen to its file."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnix.drivers.conformance_tier import CHECKS, MIN_FRAMES, Nonconformance, StoredFormat, TierRig, check_tier
from attnix.drivers.memfd import create_memfd, map_shared
from attnix.drivers.nvme.engine import Region, new_region
from attnix.drivers.nvme.ring_engine import RingEngine, RingUnavailable
from attnix.drivers.spec import DriverFds, DriverSpec, driver_argv
from attnix.kernel.errors import E
from attnix.kernel.tag import GATE_FAILED, gate_value

FORMAT = StoredFormat(6 * 16384, 6, 4, bytes(range(16)))
SUPERBLOCK = 4096


def has_uring() -> bool:
    try:
        RingEngine(new_region(4096), 1).close()
    except RingUnavailable:
        return False
    return True


ENGINES = [pytest.param("uring", marks=pytest.mark.skipif(not has_uring(), reason="no io_uring here")), "threads"]


def nvme_spec(path: Path, /, **settings: Any) -> DriverSpec:
    config = {"path": str(path), "capacity_frames": MIN_FRAMES, **settings}
    return DriverSpec(2, "nvme0", driver_argv("attnix.drivers.nvme"), config, 1, 4096, tier="nvme")


def flipper(path: Path, format: StoredFormat) -> Callable[[int, int], None]:
    def flip(slot: int, offset: int) -> None:
        at = SUPERBLOCK + slot * format.stored_bytes + offset
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x20]))
            file.flush()
            os.fsync(file.fileno())  # the driver does not look into the page cache

    return flip


def start(path: Path, format: StoredFormat = FORMAT, /, **settings: Any) -> TierRig:
    return TierRig(nvme_spec(path, **settings), format, flip=flipper(path, format), deadline_s=20)


@pytest.fixture(scope="module", params=ENGINES)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierRig]:
    rig = start(tmp_path_factory.mktemp("tier") / "slots", engine=request.param)
    yield rig
    rig.close()


def test_a_whole_report(tmp_path: Path) -> None:
    """`check_tier` starts a driver by itself, and again after a finding."""
    flips = iter([lambda slot, offset: None])  # the first life's bits do not flip: one check must notice

    def begin() -> TierRig:
        flip = next(flips, flipper(tmp_path / "slots", FORMAT))
        return TierRig(nvme_spec(tmp_path / "slots"), FORMAT, flip=flip, deadline_s=20)

    report = check_tier(begin)
    assert [finding.check for finding in report.findings] == ["every_flipped_bit_is_found"]
    assert len(report.passed) == len(CHECKS) - 1


@pytest.mark.parametrize("name", CHECKS)
def test_the_file_tier_conforms(name: str, rig: TierRig) -> None:
    CHECKS[name](rig)


WRONG_TIER = Path(__file__).parent / "wrong_tier.py"


def known_bugs() -> list[str]:
    spec = importlib.util.spec_from_file_location("wrong_tier", WRONG_TIER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.BUGS)


RACES = {"lets_transfers_overtake_each_other", "opens_the_gate_too_early"}  # they show when transfers meet
ATTEMPTS = 5


@pytest.mark.parametrize("bug", known_bugs())
def test_a_wrong_tier_is_found_out(bug: str, tmp_path: Path) -> None:
    spec = nvme_spec(tmp_path / "slots")

    def argv(fds: DriverFds, config: str) -> list[str]:
        right = spec.argv(fds, config)
        return [sys.executable, str(WRONG_TIER), bug, *right[right.index("--channel") :]]

    wrong = dataclasses.replace(spec, argv=argv)
    flip = flipper(tmp_path / "slots", FORMAT)
    deadline_s = 2.0 if bug.startswith(("stays", "loses", "does_not_answer")) else 20.0
    passed = 0
    for _ in range(ATTEMPTS if bug in RACES else 1):
        rig = TierRig(wrong, FORMAT, flip=flip, deadline_s=deadline_s)
        passed = 0
        try:
            for check in CHECKS.values():
                check(rig)
                passed += 1
        except Nonconformance:
            break
        finally:
            rig.close()
    assert passed < len(CHECKS), "nothing was found"
    assert passed or bug == "computes", "the very first check fails: the suite does not tell mistakes apart"


# -- the file -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Callable[..., TierRig]]:
    """Starts tiers on one path and ends them."""
    rigs: list[TierRig] = []

    def begin(format: StoredFormat = FORMAT, **settings: Any) -> TierRig:
        rigs.append(start(tmp_path / "slots", format, **settings))
        return rigs[-1]

    yield begin
    for rig in rigs:
        rig.close()


def refusal(tmp_path: Path, capfd: pytest.CaptureFixture[str], **settings: Any) -> str:
    """What a driver says that does not start because of its configuration."""
    with pytest.raises(Nonconformance, match=f"status {os.EX_CONFIG}"):
        start(tmp_path / "slots", **settings).close()
    return capfd.readouterr().err


def test_it_says_which_engine_it_uses(tier: Callable[..., TierRig], engine: str) -> None:
    rig = tier(engine=engine)
    assert rig.probe.engine == f"{engine}/direct"
    assert rig.probe.read_bytes_s > 0 and rig.probe.write_bytes_s > 0 and rig.probe.latency_ns > 0
    health = rig.ask_health()
    assert health["uring"] == (engine == "uring") and health["direct_io"] == 1


def test_the_queue_is_deep_and_no_deeper_than_asked(tier: Callable[..., TierRig], engine: str) -> None:
    rig = tier(engine=engine, depth=32)
    rig.write(*((frame, frame) for frame in range(24)))
    for _ in range(8):
        rig.begin("read", [(frame, frame) for frame in range(12)], [rig.tag(frame) for frame in range(12)])
        rig.begin("read", [(frame, frame) for frame in range(12, 24)], [rig.tag(frame) for frame in range(12, 24)])
    assert not any(done.failed for done in rig.collect())
    health = rig.ask_health()
    assert 20 <= health["deepest_queue"] <= 32
    assert (health["read_frames"], health["written_frames"], health["failed_items"]) == (8 * 24, 24, 0)


def test_the_file_is_allocated_and_no_larger(tier: Callable[..., TierRig], tmp_path: Path, engine: str) -> None:
    """Case 42 for this tier: what is allocated is what was asked for, with an odd frame size, written or not."""
    format = StoredFormat(3 * 33 * 1024 + 3, 3, 4, bytes(16))
    capacity = 64
    rig = tier(format, capacity_frames=capacity, engine=engine)
    budget = capacity * format.stored_bytes
    for _ in range(2):
        allocated = (tmp_path / "slots").stat().st_blocks * 512
        assert budget <= allocated <= budget * 1.05
        rig.write(*((number, number) for number in range(24)))
    assert "direct" not in rig.probe.capabilities, (
        "a frame that is no multiple of 4,096 bytes cannot go to hbm directly"
    )


def test_frames_of_several_operations(tier: Callable[..., TierRig], engine: str) -> None:
    """A stored frame larger than an operation: whole, in order, and a bit flipped in its last part is found."""
    format = StoredFormat(5 * 500_000, 5, 4, bytes(16))
    rig = tier(format, engine=engine, capacity_frames=4)
    rig.write((1, 0), (2, 3), (3, 1))
    assert rig.read((2, 3), (1, 0), (3, 1)) == [0, 0, 0]
    assert rig.flip is not None
    rig.flip(3, SUPERBLOCK + 5 * 500_000 - 1)
    assert rig.read((2, 3), (1, 0)) == [E.ECORRUPT, 0]


def test_a_restart_obeys_the_capacity(tier: Callable[..., TierRig], tmp_path: Path, engine: str) -> None:
    """Case 22: ten blocks are found again after SIGTERM and SIGKILL; the eleventh replaces one; total stays ten."""
    rig = tier(engine=engine, capacity_frames=10)
    rig.write(*((number, number) for number in range(10)))
    size = (tmp_path / "slots").stat().st_size
    for kill in (True, False):
        rig.restart(kill=kill)
        assert rig.found() == {number: rig.tag(number) for number in range(10)}
        assert rig.probe.capacity_frames == 10
    assert rig.move("write", [(10, 0)], [rig.tag(9)]).failed == ((0, E.EINVAL),)
    rig.write((11, 4))
    rig.restart(kill=True)
    assert rig.found() == {number: rig.tag(11 if number == 4 else number) for number in range(10)}
    assert (tmp_path / "slots").stat().st_size == size


def test_fewer_slots_drop_the_ones_beyond_and_more_keep_all(tier: Callable[..., TierRig], tmp_path: Path) -> None:
    rig = tier(capacity_frames=10)
    rig.write(*((number, number) for number in range(10)))
    rig.stop(kill=True)
    rig = tier(capacity_frames=6)
    assert sorted(rig.found()) == list(range(6))
    assert (tmp_path / "slots").stat().st_size == SUPERBLOCK + 6 * FORMAT.stored_bytes
    rig.stop(kill=False)
    rig = tier(capacity_frames=12)
    assert sorted(rig.found()) == list(range(6)), "what was dropped came back"
    assert rig.read((5, 5)) == [0] and rig.read((6, 6)) == [E.ENOENT]


@pytest.mark.parametrize("change", ["identity", "frame_bytes", "layers", "block_tokens", "torn"])
def test_a_file_of_another_format_is_made_anew(
    change: str, tier: Callable[..., TierRig], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rig = tier()
    rig.write((1, 1))
    rig.stop(kill=False)
    other = {
        "identity": StoredFormat(FORMAT.frame_bytes, FORMAT.layers, FORMAT.block_tokens, b"q" * 16),
        "frame_bytes": StoredFormat(2 * FORMAT.frame_bytes, FORMAT.layers, FORMAT.block_tokens, FORMAT.identity),
        "layers": StoredFormat(FORMAT.frame_bytes, 3, FORMAT.block_tokens, FORMAT.identity),
        "block_tokens": StoredFormat(FORMAT.frame_bytes, FORMAT.layers, 8, FORMAT.identity),
        "torn": FORMAT,
    }[change]
    if change == "torn":
        with open(tmp_path / "slots", "r+b") as file:
            file.seek(20)
            file.write(b"\xff\xff")
    capfd.readouterr()
    rig = tier(other)
    assert rig.found() == {}
    assert "made anew" in capfd.readouterr().err
    assert rig.read((1, 1)) == [E.ENOENT]
    rig.write((2, 1))
    assert rig.read((2, 1)) == [0]


def test_somebody_elses_file_is_left_alone(
    tier: Callable[..., TierRig], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the start, and when it takes our file's place while we run."""
    notes = b"these are my notes, not a cache"
    (tmp_path / "slots").write_bytes(notes)
    assert "is not the file of a tier" in refusal(tmp_path, capfd)
    assert (tmp_path / "slots").read_bytes() == notes
    (tmp_path / "slots").unlink()
    rig = tier()
    rig.write((1, 1))
    (tmp_path / "notes").write_bytes(notes)
    (tmp_path / "notes").rename(tmp_path / "slots")
    assert rig.read((1, 1)) == [E.ENOENT]
    assert (tmp_path / "slots").read_bytes() == notes
    (tmp_path / "slots").unlink()
    rig.write((2, 2))
    assert rig.read((2, 2), (1, 1)) == [0, E.ENOENT]


def test_killed_in_the_middle_of_writing(tier: Callable[..., TierRig], engine: str) -> None:
    """Whatever the moment: the next life finds what was answered, and nothing it finds is wrong when it is read."""
    rig = tier(engine=engine)
    last: dict[int, int] = {}  # block by slot, of writes that were answered
    for life in range(6):
        base = 1000 * (life + 1)
        for at in range(12):
            rig.put(at, rig.stored(base + at))
        sent: dict[int, dict[int, int]] = {}
        for first in range(0, 12, 3):
            blocks = {first + at: base + first + at for at in range(3)}
            sent[rig.begin("write", [(s, s) for s in blocks], [rig.tag(n) for n in blocks.values()])] = blocks
        for _ in range(life % 4):
            answer = rig.receive("answer")
            assert answer[2] == []
            last.update(sent.pop(answer[1]))
        rig.restart(kill=True)
        unsure = {slot: number for blocks in sent.values() for slot, number in blocks.items()}
        tags = {rig.tag(number): number for number in (*last.values(), *unsure.values())}
        found = {slot: tags.get(tag) for slot, tag in rig.found().items()}
        for slot, number in last.items():
            assert slot in unsure or found.get(slot) == number, f"slot {slot} was answered and is gone"
        for slot, known in found.items():
            assert known is not None and known in (last.get(slot), unsure.get(slot))
            (code,) = rig.read((known, slot))
            assert code == 0 or (code == E.ECORRUPT and slot in unsure), "torn, and nothing else"
            if code == 0:
                last[slot] = known
        for slot in unsure:
            rig.write((base + 500 + slot, slot))
            last[slot] = base + 500 + slot


def test_of_two_copies_the_newer_is_found(tier: Callable[..., TierRig]) -> None:
    rig = tier()
    rig.write((1, 3), (2, 4))
    rig.write((1, 2))
    rig.restart(kill=True)
    assert rig.found() == {2: rig.tag(1), 4: rig.tag(2)}
    rig.write((1, 9))  # newer than what an earlier life wrote, too
    rig.restart(kill=True)
    assert rig.found() == {9: rig.tag(1), 4: rig.tag(2)}


def test_a_torn_header_or_payload_is_not_used(tier: Callable[..., TierRig], tmp_path: Path) -> None:
    """A power failure leaves half of a write: the half header is not found, the half payload not read."""
    rig = tier()
    rig.write((1, 1), (2, 2), (3, 3))
    rig.stop(kill=True)
    with open(tmp_path / "slots", "r+b") as file:
        file.seek(SUPERBLOCK + 1 * FORMAT.stored_bytes + 512)
        file.write(b"\x11" * 512)  # one sector of the header
        file.seek(SUPERBLOCK + 2 * FORMAT.stored_bytes + 4096 + 40_000)
        file.write(bytes(4096))
    rig = tier()
    assert sorted(rig.found()) == [2, 3]
    codes = rig.read((1, 1), (2, 2), (3, 3))
    assert codes[0] in (E.ENOENT, E.ECORRUPT) and codes[1:] == [E.ECORRUPT, 0]


def test_two_daemons_never_use_one_file(
    tier: Callable[..., TierRig], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rig = tier()
    rig.write((1, 1))
    assert "in use by another daemon" in refusal(tmp_path, capfd, lock_wait_ms=200)
    assert rig.read((1, 1)) == [0]


# -- what can happen to it ----------------------------------------------------------------------------------------


def test_a_deleted_file_is_a_miss_and_made_again(tier: Callable[..., TierRig], tmp_path: Path, engine: str) -> None:
    """Case 20: same process, errors per item, counted; then it serves on, from a file that exists again."""
    rig = tier(engine=engine)
    rig.write((1, 1), (2, 2))
    pid = rig.ask_probe().pid
    (tmp_path / "slots").unlink()
    assert rig.read((1, 1), (2, 2)) == [E.ENOENT, E.ENOENT]
    assert (tmp_path / "slots").stat().st_size == SUPERBLOCK + MIN_FRAMES * FORMAT.stored_bytes
    rig.write((3, 1))
    assert rig.read((3, 1), (2, 2)) == [0, E.ENOENT]
    assert (rig.ask_probe().pid, rig.ask_health()["recreated"]) == (pid, 1)
    rig.restart(kill=True)
    assert rig.found() == {1: rig.tag(3)}


def test_a_deleted_file_under_load(tier: Callable[..., TierRig], tmp_path: Path, engine: str) -> None:
    """Deleted while transfers are under way: every one is answered, what comes is right, nothing hangs."""
    rig = tier(engine=engine)
    for _ in range(3):
        rig.write(*((frame, frame) for frame in range(12)))
        for round_ in range(60):
            rig.begin("read", [(round_ % 12, 12 + round_ % 12)], [rig.tag(round_ % 12)])
            if round_ == 20:
                (tmp_path / "slots").unlink()
        codes = {code for done in rig.collect() for _, code in done.failed}
        assert codes <= {E.ENOENT}
    rig.write((1, 1))
    assert rig.read((1, 1)) == [0]


def test_a_cut_file_loses_what_was_cut(tier: Callable[..., TierRig], tmp_path: Path, engine: str) -> None:
    rig = tier(engine=engine)
    rig.write(*((frame, frame) for frame in range(10)))
    os.truncate(tmp_path / "slots", SUPERBLOCK + 5 * FORMAT.stored_bytes + 1000)
    codes = rig.read(*((frame, frame) for frame in range(10)))
    assert codes[:5] == [0] * 5 and codes[6:] == [E.ENOENT] * 4
    assert codes[5] in (E.ENOENT, E.ECORRUPT), "the frame that was cut through"
    rig.write((20, 9))
    assert rig.read((20, 9)) == [0]
    assert rig.ask_health()["recreated"] == 1


def test_a_folder_that_is_gone_fails_transfers_and_not_the_driver(tmp_path: Path, engine: str) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    rig = start(folder / "slots", engine=engine)
    try:
        rig.write((1, 1))
        folder.rename(tmp_path / "elsewhere")
        assert rig.read((1, 1)) == [E.ENOENT]
        rig.put(0, rig.stored(2))
        assert rig.move("write", [(2, 0)], [rig.tag(2)]).failed == ((0, E.ENOENT),)
        (tmp_path / "elsewhere").rename(folder)
        assert rig.read((1, 1)) == [0], "the very same file is back"
    finally:
        rig.close()


def test_a_full_disk_is_said_per_item(tier: Callable[..., TierRig], tmp_path: Path, engine: str) -> None:
    """The file may not be written beyond some point any more: ENOSPC for those slots, the others are written."""
    rig = tier(engine=engine)
    limit = SUPERBLOCK + 8 * FORMAT.stored_bytes
    resource.prlimit(rig.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    blocks = [(number, slot) for number, slot in zip(range(6), (2, 9, 7, 8, 0, 23), strict=True)]
    for at, (number, _) in enumerate(blocks):
        rig.put(at, rig.stored(number))
    done = rig.move("write", [(slot, at) for at, (_, slot) in enumerate(blocks)], [rig.tag(n) for n, _ in blocks])
    assert done.failed == ((1, E.ENOSPC), (3, E.ENOSPC), (5, E.ENOSPC))
    assert rig.read((0, 2), (2, 7), (4, 0)) == [0, 0, 0]
    resource.prlimit(rig.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    rig.write((1, 9))
    assert rig.read((1, 9)) == [0]


def test_too_little_space_is_said_at_the_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """More frames than the file system has room for: refused with both numbers, and no trace of the attempt is left."""
    space = os.statvfs(tmp_path)
    frames = space.f_blocks * space.f_frsize // FORMAT.stored_bytes + 1000
    said = refusal(tmp_path, capfd, capacity_frames=frames)
    assert (
        str(SUPERBLOCK + frames * FORMAT.stored_bytes) in said and "bytes are free" in said and "allow_shrink" in said
    )
    assert not (tmp_path / "slots").exists()


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB that is all ours."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount anything")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_with_allow_shrink_it_takes_what_there_is(small_file_system: Path, engine: str) -> None:
    rig = start(small_file_system / "slots", capacity_frames=1000, allow_shrink=True, engine=engine)
    try:
        capacity = rig.probe.capacity_frames
        most = (4 << 20) // FORMAT.stored_bytes
        assert most * 3 // 4 <= capacity <= most
        assert rig.probe.engine == f"{engine}/buffered", "memory has no direct I/O"
        rig.write((1, capacity - 1), (2, 0))
        assert rig.read((1, capacity - 1), (2, 0)) == [0, 0]
        assert rig.move("write", [(capacity, 0)], [rig.tag(1)]).failed == ((0, E.EINVAL),)
    finally:
        rig.close()


def test_a_disk_that_fills_up_behind_a_hole(small_file_system: Path, engine: str) -> None:
    """Somebody punches holes into the file and fills the disk: ENOSPC, and space that comes back is used again."""
    rig = start(small_file_system / "slots", engine=engine)
    try:
        rig.write((1, 1))
        subprocess.run(
            ["fallocate", "--punch-hole", "-o", str(SUPERBLOCK), "-l", str(8 * FORMAT.stored_bytes),
             small_file_system / "slots"], check=True
        )  # fmt: skip
        filler = small_file_system / "filler"
        with pytest.raises(OSError, match="No space"), open(filler, "wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        assert rig.read((1, 1)) == [E.ENOENT]
        rig.put(0, rig.stored(2))
        assert rig.move("write", [(2, 0)], [rig.tag(2)]).failed == ((0, E.ENOSPC),)
        filler.unlink()
        rig.write((2, 2))
        assert rig.read((2, 2)) == [0]
    finally:
        rig.close()


BROKEN_DEVICE = """
import errno, sys
from attnix.drivers.nvme import driver, engine, ring_engine
def broken(real):
    def reap(self, *rest):
        results = []
        for operation, result in real(self, *rest):
            slot = (operation.offset - 4096) // 102400
            if operation.owner is not None and slot in (3, 4):
                result = -errno.EIO if slot == 3 else result // 2
            results.append((operation, result))
        return results
    return reap
ring_engine.RingEngine._reap = broken(ring_engine.RingEngine._reap)
engine.ThreadEngine.reap = broken(engine.ThreadEngine.reap)
from attnix.drivers.serve import run_driver
run_driver("broken", driver.make_backend, sys.argv[1:])
"""


def test_a_device_that_fails_fails_its_items(tmp_path: Path, engine: str) -> None:
    """Case 20: reading and writing raise, or do half, in two places; the others are served, by the same process."""
    spec = nvme_spec(tmp_path / "slots", engine=engine)
    assert FORMAT.stored_bytes == 102_400

    def argv(fds: DriverFds, config: str) -> list[str]:
        right = spec.argv(fds, config)
        return [sys.executable, "-c", BROKEN_DEVICE, *right[right.index("--channel") :]]

    rig = TierRig(dataclasses.replace(spec, argv=argv), FORMAT, deadline_s=20)
    try:
        for at in range(6):
            rig.put(at, rig.stored(at))
        tags = [rig.tag(at) for at in range(6)]
        done = rig.move("write", [(at, at) for at in range(6)], tags)
        assert done.failed == ((3, E.EIO), (4, E.EIO))
        assert rig.read((0, 0), (1, 1), (2, 2), (5, 5)) == [0, 0, 0, 0]
        assert rig.read((3, 3), (0, 0), (4, 4)) == [E.EIO, 0, E.EIO]
        done = rig.move("read", [(1, 1), (3, 3), (2, 2)], [tags[1], tags[3], tags[2]], arena=0, gate=5, ticket=1)
        assert done.failed == ((1, E.EIO),)
        assert rig.gates.load(5) == gate_value(1, GATE_FAILED)
        assert rig.ask_health()["failed_items"] == 2 + 2 + 1
    finally:
        rig.close()


def test_writes_that_survive_a_power_failure_are_synced(tier: Callable[..., TierRig], engine: str) -> None:
    rig = tier(engine=engine, fsync="batch")
    rig.write(*((frame, frame) for frame in range(8)))
    assert rig.read(*((frame, frame) for frame in range(8))) == [0] * 8
    operations = rig.ask_health()["operations"]
    assert operations == 8 + 1 + 8, "one sync for the batch"


@pytest.mark.skipif(not has_uring(), reason="no io_uring here")
def test_memory_is_registered_once_it_is_there(tmp_path: Path) -> None:
    """An arena whose pages do not exist is not made by the driver; when they do, reads go into registered memory."""
    rig = start(tmp_path / "slots", engine="uring")
    try:
        deadline = time.monotonic() + 10
        while rig.ask_health()["registered_buffers"] < 2:  # landing places and dram: the rig has filled it
            assert time.monotonic() < deadline
        rig.write((1, 1))
        assert rig.read((1, 1)) == [0]
    finally:
        rig.close()
    memory = create_memfd("empty", 1 << 20)
    region = Region(map_shared(memory), memory)
    ring = RingEngine(new_region(4096), 4)
    assert ring.offer([region]) == "" and ring.next_region is region
    assert not region.is_populated()
    region.view[:] = bytes(1 << 20)
    assert region.is_populated() and ring.register_next() == "" and ring.next_region is None
    assert region.buffers == [0]
    ring.close()
    os.close(memory)


@pytest.mark.skipif(not has_uring(), reason="no io_uring here")
def test_without_room_to_lock_memory_it_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Registered buffers are refused (RLIMIT_MEMLOCK, without the capability to ignore it): a log line, and reads work."""
    spec = nvme_spec(tmp_path / "slots", engine="uring")

    def argv(fds: DriverFds, config: str) -> list[str]:
        limits = ["prlimit", "--memlock=65536"]
        if os.geteuid() == 0:
            limits = ["setpriv", "--bounding-set=-ipc_lock", *limits]
        return [*limits, *spec.argv(fds, config)]

    rig = TierRig(dataclasses.replace(spec, argv=argv), FORMAT)
    try:
        assert "not registered with io_uring" in capfd.readouterr().err
        assert rig.ask_health()["registered_buffers"] == 0
        rig.write((1, 1))
        assert rig.read((1, 1)) == [0]
    finally:
        rig.close()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"engine": "libaio"}, "one of auto, uring, threads"),
        ({"fsync": "always"}, "one of none, batch"),
        ({"pth": "x"}, "unknown setting 'pth'"),
        ({"capacity_frames": 0}, "capacity_frames positive"),
        ({"depth": 5000}, "depth"),
        ({"path": "/nowhere/at/all"}, "cannot open '/nowhere/at/all'"),
        ({"path": "/dev/null"}, "not a regular file"),
        ({"allow_shrink": 1}, "'allow_shrink' must be bool"),
    ],
)
def test_settings_that_cannot_work_are_named(
    settings: dict[str, Any], expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert expected in refusal(tmp_path, capfd, **settings)


def test_a_file_system_without_direct_io_is_said_and_works(tmp_path: Path, engine: str) -> None:
    """O_DIRECT refused: emulated by a driver whose system calls say so."""
    spec = nvme_spec(tmp_path / "slots", engine=engine)
    source = (
        "import fcntl, os, sys\n"
        "real = fcntl.fcntl\n"
        "def refuse(fd, command, *rest):\n"
        "    if command == fcntl.F_SETFL and rest[0] & os.O_DIRECT: raise OSError(22, 'Invalid argument')\n"
        "    return real(fd, command, *rest)\n"
        "fcntl.fcntl = refuse\n"
        "from attnix.drivers.nvme.driver import make_backend\n"
        "from attnix.drivers.serve import run_driver\n"
        "run_driver('nvme', make_backend, sys.argv[1:])\n"
    )

    def argv(fds: DriverFds, config: str) -> list[str]:
        right = spec.argv(fds, config)
        return [sys.executable, "-c", source, *right[right.index("--channel") :]]

    rig = TierRig(dataclasses.replace(spec, argv=argv), FORMAT)
    try:
        assert rig.probe.engine == f"{engine}/buffered"
        assert "direct" not in rig.probe.capabilities
        rig.write((1, 1), (2, 2))
        assert rig.read((1, 1), (2, 2)) == [0, 0]
    finally:
        rig.close()
