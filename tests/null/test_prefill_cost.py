"""What the driver timed before it served decides from the first reload on what is loaded and what is computed.

The device here computes n tokens on top of c in 100 n + 10 n (c + n/2) + 50 ns, and a block of 4 tokens comes back from
dram in 1,040: as long as 4 * (100 + 10 * 16), a block that begins at token 16.  So the first four blocks are computed.
"""

from __future__ import annotations

from typing import Any

import pytest

from attnix.drivers.sim_device import SimDevice
from attnix.kernel.batch import unpack_seqs
from attnix.kernel.core import Core
from attnix.kernel.cost import PrefillFit
from attnix.kernel.events import DriverUp, Exec, ExecDone, ExecFailed
from attnix.kernel.geometry import RowLayout
from attnix.kernel.twin import TwinCore
from attnix.simulated import SimulatedSystem, ints

A, B, K = 100, 10, 50
FRAME_BYTES, BLOCK_NS = 32, 1040
TIMED = tuple((n, c, int(A * n + B * n * (c + n / 2)) + K) for n, c in ((4, 0), (16, 0), (16, 32), (4, 32), (16, 16)))
TOKENS = range(1, 33)  # eight blocks of four


class Timed(SimDevice):
    """A simulated device whose passes take what the text above says."""

    def execute(self, effect: Exec) -> ExecDone | ExecFailed:
        done = super().execute(effect)
        if isinstance(done, ExecFailed):
            return done
        pairs = sum(seq.ntokens * (seq.start + seq.ntokens / 2) for seq in unpack_seqs(effect.seqs))
        return done._replace(compute_ns=int(A * done.computed_tokens + B * pairs) + K)


def system_of(core: type[TwinCore] | type[Core], prefill: tuple[tuple[int, int, int], ...]) -> SimulatedSystem:
    def make(frames: int, layout: RowLayout, rows: memoryview) -> Any:
        return Timed(frames, layout, rows, 4, 256, gates=bytearray(8 << 10))

    system = SimulatedSystem(dram=32, core=core, make_device=make)
    bytes_s = FRAME_BYTES * 1_000_000_000 // BLOCK_NS
    system.step(DriverUp(0, 1, 101, "kept", "sim", (), bytes_s, bytes_s, 0, prefill))
    return system


@pytest.mark.parametrize("core", [TwinCore, Core])
@pytest.mark.parametrize(("prefill", "computed_blocks"), [(TIMED, 4), ((), 0)], ids=["timed", "not timed"])
def test_the_first_reload_is_split_by_what_the_driver_timed(
    core: type[TwinCore] | type[Core], prefill: tuple[tuple[int, int, int], ...], computed_blocks: int
) -> None:
    system = system_of(core, prefill)
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints([*TOKENS, 33]))
    client.call("forward", ctx, 1)
    client.call("demote", ctx, "dram")
    before = client.call("stat", ctx).usage
    client.call("forward", ctx, 1)
    after = client.call("stat", ctx).usage
    # the ninth block is a partial one and comes back, or is computed, with the others; the last token always is
    assert client.call("vmstat").counters.get("split_blocks", 0) == computed_blocks
    assert after.dram_tokens - before.dram_tokens >= 32 - 4 * computed_blocks
    assert 4 * computed_blocks <= after.computed_tokens - before.computed_tokens <= 4 * computed_blocks + 1


@pytest.mark.parametrize("core", [TwinCore, Core])
def test_it_is_shown(core: type[TwinCore] | type[Core]) -> None:
    rows = system_of(core, TIMED).connect().call("tiers").tiers
    shown = [(row.prefill_token_ns, row.prefill_pair_ns, row.prefill_pass_ns) for row in rows]
    assert shown == [pytest.approx((A, B, K), rel=1e-3), (0, 0, 0)]
    rows = system_of(core, TIMED[:2]).connect().call("tiers").tiers  # three unknowns, two passes
    assert rows[0].prefill_token_ns == 0


def test_passes_seen_later_outweigh_what_was_timed() -> None:
    """A machine that was busy at boot: half as fast as it is afterwards."""
    fit = PrefillFit()
    for n, c, ns in TIMED:
        fit.seen(n, n * (c + n / 2), 2 * ns)
    for _ in range(40):
        for n, c, ns in TIMED:
            fit.seen(n, n * (c + n / 2), ns)
    known = fit.known()
    assert known is not None
    assert known.ns(64, 64) == pytest.approx(A * 64 + B * 64 * 96 + K, rel=0.05)
