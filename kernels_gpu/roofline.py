"""What attention must move and multiply, and what that takes at least: `python -m attnix.kernels_gpu.roofline`.

Nothing here is measured.  The roofline (Williams, Waterman, Patterson, CACM 52(4), 2009) says that a kernel of F operations
over B bytes takes at least max(F / peak, B / bandwidth); the devices' two figures are their makers'.  docs/kernels.md holds the
tables that this prints.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Device(NamedTuple):
    """Dense bfloat16 peak and memory bandwidth, from the maker's data sheet."""

    name: str
    flops: float
    bytes_per_second: float

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on the peak is the bound."""
        return self.flops / self.bytes_per_second


class Heads(NamedTuple):
    name: str
    q_heads: int
    kv_heads: int
    head_dim: int


class Work(NamedTuple):
    """One layer's attention."""

    bytes: int
    flops: int

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    def least_us(self, device: Device) -> float:
        return max(self.flops / device.flops, self.bytes / device.bytes_per_second) * 1e6


DEVICES: Final = (
    Device("A100 80GB SXM", 312e12, 2.039e12),
    Device("H100 SXM", 989e12, 3.35e12),
    Device("H200 SXM", 989e12, 4.8e12),
    Device("B200", 2250e12, 8.0e12),
)
LLAMA_8B: Final = Heads("Llama-3-8B", 32, 8, 128)
LLAMA_70B: Final = Heads("Llama-3-70B", 64, 8, 128)
BATCHES: Final = (1, 16, 64, 256)
CONTEXTS: Final = (128, 4096, 32768, 131072)


def decode_work(
    h: Heads, batch: int, context: int, *, element_bytes: int = 2, scale_bytes: int = 0, block_tokens: int = 16
) -> Work:
    """KV once, the page table once per KV head, q and the output; 2 FLOP a product, scores and values."""
    kv = 2 * h.kv_heads * (h.head_dim * element_bytes + scale_bytes)
    table = h.kv_heads * 12 / block_tokens  # frame, shift and where the entry begins: 4 bytes each
    rows = 2 * batch * h.q_heads * h.head_dim * 2
    return Work(round(batch * context * (kv + table)) + rows, 4 * batch * context * h.q_heads * h.head_dim)


def prefill_work(h: Heads, new: int, cached: int = 0, *, element_bytes: int = 2) -> Work:
    """`new` tokens over `cached` ones, causal: KV once, which is what memory must deliver; tiles re-read it from the cache."""
    kv = (cached + new) * 2 * h.kv_heads * h.head_dim * element_bytes
    pairs = new * cached + new * (new + 1) // 2
    return Work(kv + 2 * new * h.q_heads * h.head_dim * 2, 4 * pairs * h.q_heads * h.head_dim)


def tables() -> str:
    lines = ["| device | bf16 peak, TFLOP/s | memory, TB/s | ridge, FLOP/byte |", "|---|---|---|---|"]
    lines += [f"| {d.name} | {d.flops / 1e12:.0f} | {d.bytes_per_second / 1e12:.2f} | {d.ridge:.0f} |" for d in DEVICES]
    head = "| MB | GFLOP | FLOP/byte | " + " | ".join(f"{d.name}, µs" for d in DEVICES) + " |"
    rule = "|---" * (3 + len(DEVICES)) + "|"
    for h in (LLAMA_8B, LLAMA_70B):
        lines += ["", f"Decode, {h.name} heads ({h.q_heads}/{h.kv_heads}, D {h.head_dim}), bf16 KV, one layer:", ""]
        lines += ["| batch | context " + head, "|---|---" + rule]
        lines += [_row(f"{b} | {c:,}", decode_work(h, b, c)) for b in BATCHES for c in CONTEXTS]
    for h in (LLAMA_8B, LLAMA_70B):
        lines += [
            "",
            f"Prefill of one sequence, {h.name} heads, bf16, one layer:",
            "",
            "| new | cached " + head,
            "|---|---" + rule,
        ]
        shapes = [(c, 0) for c in (128, 1024, 8192, 32768, 131072)] + [(512, 8192), (512, 131072 - 512)]
        lines += [_row(f"{new:,} | {cached:,}", prefill_work(h, new, cached)) for new, cached in shapes]
    return "\n".join(lines) + "\n"


def _row(shape: str, work: Work) -> str:
    times = " | ".join(_short(work.least_us(d)) for d in DEVICES)
    return f"| {shape} | {_short(work.bytes / 1e6)} | {_short(work.flops / 1e9)} | {_short(work.intensity)} | {times} |"


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 0.1 else f"{x:.3f}"


if __name__ == "__main__":
    print(tables(), end="")
