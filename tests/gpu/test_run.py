"""`make gpu`'s script, as far as it goes without a GPU: what it would run is there, and what it would record says how."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from . import run


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[run.Step]:
    """What a machine with a GPU and without the model runs."""
    monkeypatch.setenv("ATTNIX_HOME", str(tmp_path / "nothing"))
    return list(run.steps(False, tmp_path / "scratch"))


def test_what_a_gpu_would_run_is_there(planned: list[run.Step]) -> None:
    for step in planned:
        for word in (part for each in step.command for part in each.split("=")):
            if word.startswith("tests/"):
                assert (run.ROOT / word.split("::")[0]).exists(), word
        assert importlib.util.find_spec(step.command[step.command.index("-m") + 1])
        assert (
            step.environment.get("ATTNIX_TEST_DEVICE", "cuda") == "cuda" and "ATTNIX_CUDA_DRY" not in step.environment
        )
    assert [step.name for step in planned][-5:] == ["e2e", "attention", "decode", "tiers", "overlap"]


def test_a_dry_run_has_the_same_steps_and_takes_its_kernels_from_the_interpreter(
    planned: list[run.Step], tmp_path: Path
) -> None:
    dry = {step.name: step for step in run.steps(True, tmp_path)}
    assert list(dry) == [step.name for step in planned if step.name != "racecheck"]
    assert {n for n, s in dry.items() if "ATTNIX_CUDA_DRY" in s.environment} == {"engine", "decode", "tiers"}


def test_triton_compiles_for_the_tests_as_it_does_for_who_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another setting is other bits (kernels_gpu/__init__.py)."""
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    assert "TRITON_DEFAULT_FP_FUSION" not in run.environment()


def test_the_record_names_the_commands_and_not_where_a_stand_in_lay(planned: list[run.Step]) -> None:
    decode = next(step for step in planned if step.name == "decode")
    outcomes = [run.Outcome(decode, 0, 12.0, "a table\n"), run.Outcome(planned[0], 1, 3.0, "a trace")]
    text = run.section("a GPU", outcomes, ["--only", "decode"])
    assert "`attnix bench decode --model stand-in.gguf --peers ''`:\n\n```\na table\n```" in text
    assert "`python tests/gpu/run.py --only decode`" in text and "stand-in with random weights" in text
    assert "| decode | passed | 12 |" in text and "| kernels | FAILED, status 1 | 3 |" in text and "a trace" not in text


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 0", ""),
        (
            "echo '========= COMPUTE-SANITIZER'; echo '========= Error: Device not supported'; exit 1",
            "Device not supported",
        ),
        ("exit 7", "no reason given"),
    ],
)
def test_a_sanitizer_that_refuses_the_device_is_no_failure(script: str, why: str, tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    said = run.refusal(str(tool))
    assert bool(said) == bool(why) and why in said
    step = run.Step("memcheck", ("-c", "0"), missing=lambda: said)
    assert run.run(step).verdict == (f"skipped: {said}" if why else "passed")


def test_every_c_module_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.unbuilt() == []
    for name in ("kernel/_core", "drivers/_stored", "drivers/accel/cpu/_cpu"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}_build.py").touch()
        (tmp_path / f"{name}.abi3.so").touch()
    (tmp_path / "drivers" / "_stored.abi3.so").unlink()
    monkeypatch.setattr(run, "ROOT", tmp_path)
    assert run.unbuilt() == ["drivers/_stored"]
