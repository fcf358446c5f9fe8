"""What --dram, --nvme, --remote and attach_tier become."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from attnix import boot
from attnix.boot_tiers import (
    TierDrivers,
    TierRequest,
    default_dram_bytes,
    identity_digest,
    name_tiers,
    parse_nvme,
    parse_remote,
)
from attnix.kernel.events import AttachTier

MIB = 1 << 20
FRAME_BYTES = 8192


@pytest.fixture
def drivers(tmp_path: Path) -> TierDrivers:
    made = TierDrivers(tmp_path, FRAME_BYTES, 2, 16)
    made.identity = bytes(range(16))
    return made


def test_sizes_paths_and_addresses() -> None:
    assert parse_nvme("2GiB") == TierRequest("nvme", 2 << 30, {})
    assert parse_nvme("1TiB@/data/kv") == TierRequest("nvme", 1 << 40, {"path": "/data/kv"})
    assert parse_remote("redis://host:1,64MiB") == TierRequest("remote", 64 * MIB, {"url": "redis://host:1"})
    assert parse_remote("redis+unix:///run/x").settings == {"url": "redis+unix:///run/x"}
    for wrong in ("", "big", "1PiB", "@x"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_nvme(wrong)
    with pytest.raises(ValueError, match="is not a URL"):
        parse_remote("host:6379")


def test_the_command_line() -> None:
    plain = boot.parse(["--model", "sim"])
    assert (plain.dram_bytes, plain.tiers) == (0, ())
    options = boot.parse(["--hbm", "200MiB", "--nvme", "1GiB", "--remote", "redis://h", "--nvme", "2GiB@/x"])
    assert name_tiers(options.tiers) == ["nvme0", "nvme1", "remote0"]
    assert options.dram_bytes == 400 * MIB, "something slower stages through dram, so there is one"
    assert boot.parse(["--dram", "8MiB", "--nvme", "1GiB"]).dram_bytes == 8 * MIB
    for wrong in (["--nvme", "big"], ["--remote", "h"], ["--tier-write", "never"], ["--accels", "8", "--dram", "1MiB"]):
        with pytest.raises(SystemExit):
            boot.parse(wrong)


def test_a_default_dram_is_bounded_by_the_machine() -> None:
    tiers = (TierRequest("nvme", MIB, {}),)
    assert default_dram_bytes(100 * MIB, (), 1 << 40) == 0
    assert default_dram_bytes(10 * MIB, tiers, 1 << 40) == 256 * MIB
    assert default_dram_bytes(1 << 40, tiers, 1 << 40) == 1 << 38


def test_what_a_driver_is_told(drivers: TierDrivers, tmp_path: Path) -> None:
    spec = drivers.spec(2, "nvme0", TierRequest("nvme", MIB, {}))
    assert (spec.device, spec.tier, spec.arena) == (2, "nvme", "lost")
    assert spec.config == {
        "frame_bytes": 8192, "stored_bytes": 12288, "layers": 2, "block_tokens": 16,
        "identity": "000102030405060708090a0b0c0d0e0f", "capacity_frames": MIB // 12288,
        "path": str(tmp_path / "nvme0.frames"),
    }  # fmt: skip
    attached = drivers.attached(AttachTier(3, "nvme1", "nvme", 7, '{"path": "/data/x"}'))
    assert (attached.name, attached.config["path"], attached.config["capacity_frames"]) == ("nvme1", "/data/x", 7)
    dram = drivers.dram(1, MIB, stages=True)
    assert (dram.device, dram.capacity_frames) == (1, MIB // 12288)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("tape", "{}", "tape"),
        ("nvme", "[]", "JSON object"),
        ("nvme", "{", "not JSON"),
        ("sim", '{"layers": 3}', "layers"),
    ],
)
def test_what_makes_no_driver(drivers: TierDrivers, kind: str, settings: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        drivers.attached(AttachTier(3, "x0", kind, 7, settings))


def test_sizes_that_hold_nothing(drivers: TierDrivers) -> None:
    with pytest.raises(ValueError, match="do not hold one frame of 12288"):
        drivers.spec(2, "nvme0", TierRequest("nvme", 12287, {}))
    with pytest.raises(ValueError, match="it must hold 4 or more"):
        drivers.dram(1, 4 * 12288 - 1, stages=True)
    assert drivers.dram(1, 2 * 12288, stages=False).capacity_frames == 2


def test_the_identity_digest_is_of_every_part() -> None:
    """The encoding by hand: a prefix, then tag and value of each part, each after its length."""

    def part(text: str) -> bytes:
        return len(text).to_bytes(4, "little") + text.encode()

    encoded = b"attnix-key-1" + part("weights") + part("abc") + part("domain") + part("")
    assert identity_digest((("weights", "abc"),)) == hashlib.sha256(encoded).digest()[:16]
    assert identity_digest((("weights", "abd"),)) != identity_digest((("weights", "abc"),))
