"""The file of `attnix boot --groups`: what it says, and every way in which it can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnix.boot import BootError, make_kernel, parse
from attnix.boot_groups import read_limits
from attnix.kernel.config import DeviceConfig, GroupLimit, KernelConfig
from attnix.kernel.geometry import KvShape
from attnix.kernel.step import Kernel
from attnix.kernel.twin import TwinCore

FRAME_BYTES = 360 << 10


def test_what_docs_groups_md_shows(tmp_path: Path) -> None:
    """128 MiB hold 364 frames of 360 KiB (131,072 / 360 = 364.1), 32 MiB are held by 92 (91.02)."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "groups.md").read_text()
    shown = text[text.index('    ["uid:1001"]') :].partition("\n\nA table")[0]
    file = tmp_path / "groups.toml"
    file.write_text(shown)
    assert read_limits(str(file), FRAME_BYTES) == (
        GroupLimit("uid:1001", "hbm", 92, 364),
        GroupLimit("uid:1001", "contexts", -1, 64),
        GroupLimit("uid:1001", "weight", -1, 200),
        GroupLimit("uid:1001/batch", "tokens_s", -1, 200),
    )


def test_what_contains_a_group_comes_before_it(tmp_path: Path) -> None:
    file = tmp_path / "groups.toml"
    file.write_text('["uid:1/a"]\nhbm.soft = 1\n["uid:1"]\nhbm.hard = 2\n')
    assert [limit.group for limit in read_limits(str(file), FRAME_BYTES)] == ["uid:1", "uid:1/a"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[uid", "is no TOML"),
        ("['uid:01']\nhbm.hard = 1", r"is not uid:N or uid:N/NAME"),
        ("'uid:1' = 3", r"is a table of limits"),
        ("['uid:1']\nHBM.hard = 1", r"'HBM' is none of hbm, dram, nvme, contexts, tokens_s, weight"),
        ("['uid:1']\nhbm = 12", r"write hbm.hard, hbm.soft or both"),
        ("['uid:1']\nhbm = {}", r"write hbm.hard, hbm.soft or both"),
        ("['uid:1']\nhbm.most = 12", r"write hbm.hard, hbm.soft or both"),
        ("['uid:1']\nhbm.hard = 'lots'", r"hbm.hard: 'lots' is not a size"),
        ("['uid:1']\nhbm.hard = '1KiB'", r"1KiB is less than one frame of 368640 bytes"),
        ("['uid:1']\nhbm.hard = -1", r"hbm.hard is a whole number, 0 for none, not -1"),
        ("['uid:1']\nhbm.hard = true", r"hbm.hard is a whole number, 0 for none, not True"),
        ("['uid:1']\ncontexts.hard = '1MiB'", r"contexts.hard is a whole number"),
        ("['uid:1']\nweight = '2'", r"weight is a whole number"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_it_is_said_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "groups.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=says) as wrong:
        read_limits(str(file), FRAME_BYTES)
    assert str(wrong.value).startswith(f"--groups {file}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_limits(str(tmp_path / "none.toml"), FRAME_BYTES)


def booted(*limits: GroupLimit) -> Kernel:
    """With 32 frames."""
    config = KernelConfig(
        (DeviceConfig("hbm0", "hbm", 32),), KvShape(1, 1, 2, 2), 64, 256, (("weights", "sim"),), block_tokens=4, max_contexts=8,
        limits=limits,
    )  # fmt: skip
    rows = [memoryview(bytearray(config.layout.total_bytes))]
    return make_kernel(parse(["--groups", "g.toml"]), config, TwinCore(bytes(16), 4, config.layout, [32], rows))


def test_guarantees_that_do_not_fit_are_said_with_the_file() -> None:
    assert not booted(GroupLimit("uid:7", "hbm", 12, -1), GroupLimit("uid:8", "hbm", 20, -1)).fsck()
    with pytest.raises(
        BootError, match=r"^--groups g.toml: 20 frames of hbm cannot be guaranteed to uid:8: 13 are to others, of 32$"
    ):
        booted(GroupLimit("uid:7", "hbm", 13, -1), GroupLimit("uid:8", "hbm", 20, -1))


def test_what_is_set_at_boot_holds_and_group_set_changes_it() -> None:
    kernel = booted(GroupLimit("uid:7", "hbm", -1, 8), GroupLimit("uid:7", "weight", -1, 300))
    group = kernel.machine.groups.named("uid:7")
    assert (group.limits, group.weight) == ({"hbm": (0, 8)}, 300)
    assert kernel.machine.core.account(0, group.number).hard == 8
    assert any(row.text == "group uid:7: hbm soft -1 hard 8, from boot on" for row in kernel.machine.dmesg.since(0))
    kernel.machine.groups.set_limit(group, "hbm", 0, 0)
    assert group.limits == {}
