"""`--device` and `--hbm`: what is chosen where, and what is said of a device that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnix import boot, boot_device
from attnix.boot_device import Found, HbmSize, choose, hbm_bytes, parse_hbm
from attnix.drivers.accel.config import ModelConfig, weight_scalars
from attnix.drivers.accel.cuda.open import open_device
from attnix.drivers.accel.weights import expected_shapes
from attnix.kernel.geometry import RowLayout
from attnix.kernel.sysctl import Sysctl

SMALL = ModelConfig("qwen2", 2, 64, 96, 4, 2, 16, 97, 128, 1e-5, 1e4, qkv_bias=True)
H200 = Found("H200", 140 << 30, 141 << 30, 90)


def test_sizes_and_shares() -> None:
    assert parse_hbm("") == HbmSize()
    assert parse_hbm("2GiB") == HbmSize(2 << 30)
    assert parse_hbm("90%") == HbmSize(share=0.9)
    for wrong in ("0%", "101%", "lots", "-1%", "0", "0MiB"):
        with pytest.raises(ValueError, match=r"share|not a size"):
            parse_hbm(wrong)


def test_cpu_and_dry_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot_device, "look", lambda: pytest.fail("asked"))
    monkeypatch.setattr(boot_device, "_NODES", ("/nowhere/nvidiactl",))
    assert [choose(wanted, 1)[0] for wanted in ("cpu", "cuda-dry", "auto")] == ["cpu", "cuda-dry", "cpu"]


@pytest.mark.parametrize(
    ("wanted", "accels", "there", "chosen"),
    [("auto", 1, 1, "cuda"), ("auto", 2, 1, "cpu"), ("auto", 1, 0, "cpu"), ("cuda", 2, 3, "cuda")],
)
def test_what_is_there_decides(
    monkeypatch: pytest.MonkeyPatch, wanted: str, accels: int, there: int, chosen: str
) -> None:
    monkeypatch.setattr(boot_device, "_NODES", ("/",))
    monkeypatch.setattr(boot_device, "look", lambda: ("2.13.0+cu130", [H200] * there))
    device, found = choose(wanted, accels)
    assert device == chosen and len(found) == (accels if chosen == "cuda" else 0)


def test_cuda_where_there_is_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot_device, "look", lambda: ("2.13.0+cpu", []))
    with pytest.raises(ValueError, match=r"torch 2.13.0\+cpu \(a build without CUDA\) sees 0; --device cpu"):
        choose("cuda", 1)


def test_torch_itself_is_asked() -> None:
    """On this machine, whatever it has."""
    torch = pytest.importorskip("torch")
    version, found = boot_device.look()
    assert version == torch.__version__ and len(found) == torch.cuda.device_count()


def test_frames_are_sized_by_what_the_weights_leave() -> None:
    weights = 2 * sum(
        size[0] * (size[1] if len(size) > 1 else 1) for size in expected_shapes(SMALL).values()
    )  # bfloat16
    assert weights == 2 * weight_scalars(SMALL)
    free = (140 << 30) - weights - boot_device.WORKING_BYTES
    assert hbm_bytes(HbmSize(), "cuda", [H200], SMALL, "bfloat16") == int(0.9 * free)
    assert hbm_bytes(HbmSize(share=0.5), "cuda", [H200, H200._replace(free_bytes=150 << 30)], SMALL, "bfloat16") == int(
        0.5 * free
    )
    assert hbm_bytes(HbmSize(7 << 20), "cuda", [H200], SMALL, "bfloat16") == 7 << 20
    assert hbm_bytes(HbmSize(), "cpu", [], SMALL, "bfloat16") == 256 << 20
    with pytest.raises(ValueError, match="goes with --device cuda"):
        hbm_bytes(HbmSize(share=0.5), "cpu", [], SMALL, "bfloat16")
    with pytest.raises(ValueError, match="the weights need"):
        hbm_bytes(HbmSize(), "cuda", [H200._replace(free_bytes=1 << 30)], SMALL, "bfloat16")


def test_a_device_s_frames_are_its_own() -> None:
    """The arena is a stub, lost with the driver; every accel has its own ordinal, and the same number of frames."""
    options = boot.parse(["--model", "x", "--device", "cuda", "--accels", "2", "--hbm", "1MiB"])
    shape = boot.Shape("x", "/x", "qwen2", SMALL.kv_shape("bfloat16"), 128, 97, "", SMALL)
    specs = boot.driver_specs(options, shape, RowLayout(4, 8), 50, "cuda")
    assert [(spec.config["device"], spec.config["ordinal"], spec.config["frames"]) for spec in specs] == [
        ("cuda", 0, 50), ("cuda", 1, 50),
    ]  # fmt: skip
    assert all(spec.arena == "lost" and spec.arena_bytes == 4096 for spec in specs)
    assert specs[0].device_bytes == 50 * shape.kv.frame_bytes(16)
    cpu = boot.driver_specs(options, shape, RowLayout(4, 8), 50, "cpu")[0]
    assert (cpu.arena, cpu.arena_bytes, cpu.device_bytes) == ("kept", specs[0].device_bytes, 0)
    assert "device" not in cpu.config


def test_a_model_that_the_kernels_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNIX_CUDA_DRY", "interpreter")
    with pytest.raises(ValueError, match="head dim 16: the CUDA kernels have 64, 96, 128, 256"):
        open_device("cuda-dry", 0, "fast", SMALL, 16)


def test_boot_bounds_the_wait_unless_it_is_told_otherwise() -> None:
    """A minute; the bare kernel refuses nobody.  What is given on the command line goes before."""
    assert boot.settings_of(boot.parse(["--model", "sim"])) == {"sched.max_wait_ms": 60_000}
    assert Sysctl().max_wait_ms == 0
    flags = ["--model", "sim", "--sysctl", "sched.max_wait_ms=0", "--sysctl", "sched.max_queue=9"]
    assert boot.settings_of(boot.parse(flags)) == {"sched.max_wait_ms": "0", "sched.max_queue": "9"}
