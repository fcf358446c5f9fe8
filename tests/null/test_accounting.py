"""Live KV accounting: 2 x layers x tokens x kv_heads x head_dim x bytes, by hand and against public shapes."""

from __future__ import annotations

from attnix.kernel.core import Core
from attnix.kernel.geometry import KvShape
from attnix.simulated import SimulatedSystem, ints

LLAMA_3_8B = KvShape(layers=32, kv_heads=8, head_dim=128, element_bytes=2)


def test_llama_3_8b_costs_128_kib_a_token() -> None:
    assert LLAMA_3_8B.token_bytes == 128 * 1024
    assert 4000 * LLAMA_3_8B.token_bytes == 500 * 1024 * 1024


def test_stat_and_ps_report_live_and_proportional_kv() -> None:
    system = SimulatedSystem(core=Core, frames=64, block_tokens=16, window_tokens=512, kv=LLAMA_3_8B)
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints([n % 256 for n in range(40)]))
    system.run()
    row = client.call("stat", ctx)
    assert (row.tokens, row.cached_tokens, row.blocks) == (40, 40, 3)
    assert row.kv_bytes == 40 * 131_072
    assert row.proportional_bytes == 3 * 16 * 131_072
    client.call("fork", ctx, 3)  # four contexts name the same three frames
    row = client.call("stat", ctx)
    assert row.shared_blocks == 3
    assert row.proportional_bytes == 3 * 16 * 131_072 // 4
    process = client.call("ps").processes[0]
    assert process.kv_bytes == 4 * 40 * 131_072
    assert process.proportional_bytes == 3 * 16 * 131_072
