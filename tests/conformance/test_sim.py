"""The simulated driver conforms; a driver that misbehaves is found out, whatever it does."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnix.drivers.conformance import CHECKS, MIN_ENTRIES, MIN_FRAMES, MIN_SLOTS, Rig, check_driver
from attnix.drivers.faulty import Fault, FaultPlan
from attnix.drivers.sim import KV_BYTES
from attnix.drivers.spec import Argv, DriverFds, DriverSpec, driver_argv
from attnix.kernel.geometry import RowLayout

LAYOUT = RowLayout(MIN_SLOTS, MIN_ENTRIES)
BLOCK_TOKENS = 4
WRONG_DRIVER = Path(__file__).parent / "wrong_driver.py"


def wrong_driver_argv(bug: str) -> Argv:
    def build(fds: DriverFds, config: str) -> list[str]:
        right = driver_argv("attnix.drivers.sim")(fds, config)
        return [sys.executable, str(WRONG_DRIVER), bug, *right[right.index("--channel") :]]

    return build


def known_bugs() -> list[str]:
    spec = importlib.util.spec_from_file_location("wrong_driver", WRONG_DRIVER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.BUGS)


def start_sim(plan: FaultPlan | None = None, *, bug: str = "", deadline_s: float = 30.0) -> Rig:
    spec = DriverSpec(
        device=0,
        name="sim",
        argv=wrong_driver_argv(bug) if bug else driver_argv("attnix.drivers.sim"),
        config={"slots": LAYOUT.slots, "entries": LAYOUT.entries, "block_tokens": BLOCK_TOKENS},
        arena_bytes=MIN_FRAMES * BLOCK_TOKENS * KV_BYTES,
        rows_bytes=LAYOUT.total_bytes,
        environment={} if plan is None else plan.environment(),
    )
    return Rig(spec, LAYOUT, BLOCK_TOKENS, deadline_s=deadline_s)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    rig = start_sim()
    yield rig
    rig.close()


@pytest.mark.parametrize("name", CHECKS)
def test_the_simulated_driver_conforms(name: str, rig: Rig) -> None:
    CHECKS[name](rig)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault.FAIL, "a valid pass was not done"),
        (Fault.HANG, "no health answer within"),
        (Fault.LOSE, "answered 0 times"),
        (Fault.TWICE, "answered 2 times"),
        (Fault.LATE, "answered 0 times"),
        (Fault.DIE_BEFORE, "the driver ended with status -9"),
        (Fault.DIE_AFTER, "the driver ended with status -9"),
        (Fault.FLIP, "changed; only"),
        (Fault.SLOW, "no health answer within"),
        (Fault.GARBAGE, "bad done"),
    ],
)
def test_a_single_fault_in_a_whole_run_is_found(fault: Fault, expected: str) -> None:
    """One pass of one check goes wrong (the 12th of the driver's life): one finding, which says what was seen."""
    plan = FaultPlan({(1, 11): fault}, seed=3, slow_ns=20_000_000_000)
    lives = [plan, None]  # the driver started after the finding is a healthy one
    deadline_s = 4.0 if fault in (Fault.HANG, Fault.SLOW) else 30.0

    report = check_driver(lambda: start_sim(lives.pop(0), deadline_s=deadline_s))

    assert len(report.findings) == 1, report
    assert expected in report.findings[0].problem
    assert len(report.passed) == len(CHECKS) - 1


def test_a_driver_that_always_fails_passes_no_check_that_computes() -> None:
    plan = FaultPlan(rate_permille=1000, kinds=(Fault.FAIL,))
    report = check_driver(lambda: start_sim(plan))
    assert set(report.passed) == {
        "probe_is_complete_and_stable",
        "unknown_verbs_are_answered",
        "dropped_frames_are_scrubbed",
        "it_exits_when_its_channel_closes",
    }


@pytest.mark.parametrize("bug", known_bugs())
def test_a_wrong_driver_is_found_out(bug: str) -> None:
    deadline_s = 1.0 if bug.startswith("stays") else 30.0
    report = check_driver(lambda: start_sim(bug=bug, deadline_s=deadline_s))
    found = {finding.check for finding in report.findings}
    assert found, f"no check notices a driver that {bug}"
    assert report.passed, f"every check fails for a driver that {bug}: the suite does not tell mistakes apart"
