"""Machines for the doctor's tests, and the doctor's view of them."""

from __future__ import annotations

from typing import Any, cast

from attnix.kernel import calls as c
from attnix.simulated import SimulatedClient, ints
from attnix.userland.doctor.examine import examine
from attnix.userland.doctor.facts import read
from attnix.userland.doctor.finding import Finding


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

    def sysctl(self, name: str = "") -> c.SysctlResult:
        return cast(c.SysctlResult, self._ask("sysctl", name))

    def health(self) -> c.HealthResult:
        return cast(c.HealthResult, self._ask("health"))

    def pressure(self) -> c.PressureResult:
        return cast(c.PressureResult, self._ask("pressure"))

    def _ask(self, name: str, *args: object) -> Any:
        return self._client.result(self._client.post(name, *args))  # answered at once: no device runs for it


def found(client: SimulatedClient, window_s: float = 120.0) -> dict[str, Finding]:
    """The doctor's findings, by name, the worst first."""
    return {finding.name: finding for finding in examine(read(Seen(client), window_s))}


def ask(client: SimulatedClient, prompt: list[int], answer: int = 1) -> int:
    """A context that has answered: its handle."""
    ctx = int(client.call("alloc_context").ctx)
    client.call("append", ctx, ints(prompt))
    client.call("generate", ctx, answer)
    return ctx
