"""Machines for the doctor's tests, and the doctor's view of them: live, and of a dump."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import pytest

from attnix.kernel import calls as c
from attnix.simulated import SimulatedClient, ints
from attnix.syscalls import Client
from attnix.userland import dumpfile
from attnix.userland.doctor.examine import examine
from attnix.userland.doctor.facts import read
from attnix.userland.doctor.finding import Finding
from attnix.userland.shell.dump import questions

ASKED: Final = frozenset({"uname", "tiers", "vmstat", "sysctl", "health", "pressure"})


class Seen:
    """A simulated client, with the calls that the doctor makes as methods."""

    def __init__(self, client: SimulatedClient) -> None:
        self._client = client

    def uname(self) -> c.UnameResult:
        return cast(c.UnameResult, self._ask("uname"))

    def tiers(self) -> c.TiersResult:
        return cast(c.TiersResult, self._ask("tiers"))

    def vmstat(self) -> c.VmstatResult:
        return cast(c.VmstatResult, self._ask("vmstat"))

    def sysctl(self, name: str = "", *args: Any) -> c.SysctlResult:
        return cast(c.SysctlResult, self._ask("sysctl", name, *args))

    def health(self, *args: int) -> c.HealthResult:
        return cast(c.HealthResult, self._ask("health", *args))

    def pressure(self, *args: int) -> c.PressureResult:
        return cast(c.PressureResult, self._ask("pressure", *args))

    def ps(self) -> c.PsResult:
        return c.PsResult(())  # of contexts, a dump holds much that the doctor does not ask for

    def __getattr__(self, name: str) -> Any:
        return partial(self._ask, name)

    def _ask(self, name: str, *args: object) -> Any:
        return self._client.result(self._client.post(name, *args))  # answered at once: no device runs for it


def found(client: SimulatedClient, window_s: float = 120.0) -> dict[str, Finding]:
    """The doctor's findings, by name, the worst first.  It says the same of a dump that `attnix dump --text` would write."""
    seen = Seen(client)
    seen.uname()  # a sample of the counters that is due is taken in the first call: from here on there are as many
    findings = examine(read(seen, window_s))
    with tempfile.TemporaryDirectory(prefix="attnix-doctor-") as folder:
        path = Path(folder) / "dump.json"
        asked = [each for each in questions(cast(Client, seen), text=True) if each[0] in ASKED]
        dumpfile.write(path, dumpfile.take("", c.HelloResult("", 0, 0, 0), asked))
        saved = examine(read(dumpfile.SavedSystem(path), window_s))
    assert [replace(finding, damage=0) for finding in saved] == [replace(finding, damage=0) for finding in findings]
    assert [f.damage for f in saved] == pytest.approx([f.damage for f in findings])  # (some ns later)
    return {finding.name: finding for finding in findings}


def ask(client: SimulatedClient, prompt: list[int], answer: int = 1) -> int:
    """A context that has answered: its handle."""
    ctx = int(client.call("alloc_context").ctx)
    client.call("append", ctx, ints(prompt))
    client.call("generate", ctx, answer)
    return ctx
