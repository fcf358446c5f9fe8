"""What a machine with a model costs, worked out from published figures.

A pass costs `k` (every weight is read once), plus for each sequence that computes n > 1 tokens on top of c cached ones
`a*n + b*n*(c + n/2)` (DESIGN.md §4), plus for each that computes one token the time to read its KV:

    k  weight bytes / (memory bandwidth x _BANDWIDTH)
    a  2 x parameters / (peak FLOP/s x _COMPUTE): one multiply and one add per weight and token
    b  4 x layers x heads x head_dim / (bf16 peak x _COMPUTE): one query times one key, one weight times one value
    r  KV bytes of a token / (memory bandwidth x _BANDWIDTH)

Peaks and sizes are the makers' (dense, no sparsity); the shares of them that are reached are assumptions, the same for
all machines: half of the arithmetic in a long prefill, four fifths of the memory bandwidth, 85% of a PCIe link.

    H100 SXM5   989.4 TFLOP/s bf16, 1,978.9 fp8, 80 GB at 3.35 TB/s, PCIe 5.0 x16       NVIDIA H100 data sheet
    H200 SXM    the same processor with 141 GB at 4.8 TB/s                              NVIDIA H200 data sheet
    RTX 4060 Laptop   11.61 TFLOP/s fp32, twice that in the tensor cores with fp32 accumulation (NVIDIA Ada white
                paper), 8 GB at 256 GB/s, PCIe 4.0 x8
    PCIe        5.0 x16 63 GB/s, 4.0 x8 15.75 GB/s, each way                            PCI-SIG
    NVMe        Samsung PM9A3 6.5 GB/s read, 3.5 write; 980 PRO 7.0 and 5.0             Samsung data sheets
    Llama 3.1 8B    8.03e9 parameters, 32 layers, 32 heads, 8 of KV, 128 each           its config.json
    Llama 3.1 70B   70.6e9 parameters, 80 layers, 64 heads, 8 of KV, 128 each           its config.json
    Llama 3.2 3B    3.21e9 parameters, 28 layers, 24 heads, 8 of KV, 128 each           its config.json

Latencies of a transfer (10 us over PCIe, 100 us to a flash read) are round numbers of the right size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from attnix.kernel.geometry import KvShape

_COMPUTE: Final = 0.5
_BANDWIDTH: Final = 0.8
_LINK: Final = 0.85
_GB: Final = 10**9
_GIB: Final = 1 << 30


@dataclass(frozen=True)
class Link:
    """One direction between two memories.  A transfer takes latency_ns plus its bytes at bytes_per_s; one at a time."""

    bytes_per_s: float
    latency_ns: int

    def time_ns(self, moved_bytes: int) -> int:
        return self.latency_ns + round(moved_bytes * 1e9 / self.bytes_per_s)


@dataclass(frozen=True)
class Profile:
    """*_ns: as the head of this file says, per pass, token, token x token and token.  *_bytes: size of each tier's KV."""

    name: str
    about: str
    kv: KvShape
    k_ns: float
    a_ns: float
    b_ns: float
    r_ns: float
    hbm_bytes: int
    dram_bytes: int
    nvme_bytes: int
    demote: Link  # hbm to dram
    promote: Link  # dram to hbm
    nvme_read: Link
    nvme_write: Link

    def prefill_ns(self, tokens: int, cached: int) -> float:
        """One sequence of `tokens` on top of `cached`, in a pass of its own."""
        return self.k_ns + self.a_ns * tokens + self.b_ns * tokens * (cached + tokens / 2)


def _profile(
    name: str, about: str, *, parameters: float, weight_bytes: float, layers: int, heads: int, kv_heads: int,
    head_dim: int, flops: float, attention_flops: float, memory_bytes_s: float, memory_bytes: int, spare_bytes: int,
    pcie_bytes_s: float, dram_bytes: int, nvme_bytes: int, nvme_read_bytes_s: float, nvme_write_bytes_s: float,
) -> Profile:  # fmt: skip
    kv = KvShape(layers, kv_heads, head_dim, 2)
    bus = Link(pcie_bytes_s * _LINK, 10_000)
    return Profile(
        name, about, kv,
        k_ns=weight_bytes / (memory_bytes_s * _BANDWIDTH) * 1e9,
        a_ns=2 * parameters / (flops * _COMPUTE) * 1e9,
        b_ns=4 * layers * heads * head_dim / (attention_flops * _COMPUTE) * 1e9,
        r_ns=kv.token_bytes / (memory_bytes_s * _BANDWIDTH) * 1e9,
        hbm_bytes=memory_bytes - round(weight_bytes) - spare_bytes, dram_bytes=dram_bytes, nvme_bytes=nvme_bytes,
        demote=bus, promote=bus, nvme_read=Link(nvme_read_bytes_s, 100_000), nvme_write=Link(nvme_write_bytes_s, 30_000),
    )  # fmt: skip


PROFILES: Final[dict[str, Profile]] = {
    p.name: p
    for p in (
        _profile(
            "h100-8b", "Llama 3.1 8B in bf16 on one H100 SXM5",
            parameters=8.03e9, weight_bytes=16.06e9, layers=32, heads=32, kv_heads=8, head_dim=128,
            flops=989.4e12, attention_flops=989.4e12, memory_bytes_s=3.35e12, memory_bytes=80 * _GB, spare_bytes=8 * _GB,
            pcie_bytes_s=63e9, dram_bytes=256 * _GIB, nvme_bytes=2048 * _GIB,
            nvme_read_bytes_s=6.5e9, nvme_write_bytes_s=3.5e9,
        ),
        _profile(
            "h200-70b", "Llama 3.1 70B, fp8 weights and bf16 KV, on one H200 SXM",
            parameters=70.6e9, weight_bytes=70.6e9, layers=80, heads=64, kv_heads=8, head_dim=128,
            flops=1978.9e12, attention_flops=989.4e12, memory_bytes_s=4.8e12, memory_bytes=141 * _GB, spare_bytes=12 * _GB,
            pcie_bytes_s=63e9, dram_bytes=512 * _GIB, nvme_bytes=4096 * _GIB,
            nvme_read_bytes_s=6.5e9, nvme_write_bytes_s=3.5e9,
        ),
        _profile(
            "laptop", "Llama 3.2 3B in 4.5 bits on an RTX 4060 Laptop",
            parameters=3.21e9, weight_bytes=3.21e9 * 4.5 / 8, layers=28, heads=24, kv_heads=8, head_dim=128,
            flops=23.2e12, attention_flops=23.2e12, memory_bytes_s=256e9, memory_bytes=8 * _GB, spare_bytes=_GB,
            pcie_bytes_s=15.75e9, dram_bytes=16 * _GIB, nvme_bytes=256 * _GIB,
            nvme_read_bytes_s=7e9, nvme_write_bytes_s=5e9,
        ),
    )
}  # fmt: skip
