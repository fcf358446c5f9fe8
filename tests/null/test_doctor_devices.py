"""`attnix doctor` on devices and tools: a slow tier, a cache that must be copied first, and etas.  Planted, and not planted."""

from __future__ import annotations

from attnix.drivers.sim_memory import SimTier
from attnix.kernel.tag import stored_bytes
from attnix.simulated import SimulatedClient, SimulatedSystem, ints
from attnix.userland.doctor.finding import Finding

from .doctor_rig import ask, found

MS = 1_000_000
SECOND = 1000 * MS


def moving(slower_by: int, rounds: int = 20) -> dict[str, Finding]:
    """A context goes down to a file tier and comes back, again and again; after half of the rounds its reads get slower."""
    system = SimulatedSystem(frames=12, dram=20, nvme=40, check=False)
    tier = system.devices[2]
    assert isinstance(tier, SimTier)
    tier.read_bytes_s = tier.write_bytes_s = 10**6
    client = system.connect()
    ctx = ask(client, [1, *range(30)], 2)  # 8 blocks
    for number in range(2 * rounds):
        if number == rounds:
            tier.read_bytes_s //= slower_by
        client.call("demote", ctx, "nvme")
        client.call("prefetch", ctx, "hbm")
        system.advance(SECOND)
    return found(client)


def test_a_tier_that_has_become_slow() -> None:
    finding = moving(slower_by=5)["slow_tier"]
    assert (finding.numbers["device"], finding.numbers["verb"]) == ("nvme0", "read")
    first, now = int(finding.numbers["first_bytes_s"]), int(finding.numbers["bytes_s"])
    assert 4.5 < first / now < 5.5
    # 20 reads of 8 full blocks and a tail each took five times what they would have at a byte per us.
    late_ns = 20 * 9 * stored_bytes(_frame_bytes()) * 1000 * 4
    assert 0.9 * late_ns <= int(finding.numbers["late_ns"]) <= 1.2 * late_ns
    assert any("detach-tier nvme0" in line for line in finding.remedies)


def _frame_bytes() -> int:
    return int(SimulatedSystem(frames=1, dram=1, nvme=1, check=False).devices[2].frame_bytes)


def test_a_tier_that_is_as_fast_as_ever_is_healthy() -> None:
    assert moving(slower_by=1) == {}


def tools(client: SimulatedClient, system: SimulatedSystem, took_ms: list[int], said_ms: int) -> dict[str, Finding]:
    ctx = ask(client, [1, 2, 3])
    for took in took_ms:
        wait = client.call("wait_tool", ctx, "build", said_ms).wait
        system.advance(took * MS)
        client.call("resume", ctx, wait, ints([5]))
    return found(client)


def test_an_eta_that_is_always_too_short() -> None:
    system = SimulatedSystem(frames=20)
    finding = tools(system.connect(), system, [3000, 4000, 5000] * 4, 1000)["eta"]
    assert (finding.numbers["tool"], finding.numbers["calls"]) == ("build", 12)
    assert abs(int(finding.numbers["ratio_p50_permille"]) - 4000) < 10
    assert "4.0 s" in finding.remedies[0]


def test_an_eta_that_is_wrong_beyond_all_measure() -> None:
    system = SimulatedSystem(frames=20)
    finding = tools(system.connect(), system, [90_000] * 8, 1000)["eta"]
    assert finding.numbers["absurd"] == 8


def test_etas_that_are_right_are_healthy() -> None:
    system = SimulatedSystem(frames=20)
    assert tools(system.connect(), system, [900, 1000, 1200] * 4, 1000) == {}


def test_etas_that_are_wrong_both_ways_are_healthy() -> None:
    system = SimulatedSystem(frames=20)
    assert tools(system.connect(), system, [300, 1000, 3000] * 4, 1000) == {}
