"""What the element-wise kernels compute, in plain torch: slow, short, in the dtype that the inputs have.

Tests call each twice: in float32 (the truth) and in the kernel's dtype (the yardstick of its error).
"""

from __future__ import annotations

import torch

INT8_PEAK = 127.0
FP8_PEAK = 448.0
LEAST_PEAK = 1e-30


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (arXiv 1910.07467); every step in x's dtype."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, gate first (arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def rope(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotate heads, halves paired (arXiv 2104.09864).  x [T, H, D]; positions [T]; inv_freq [D / 2] f32; in x's dtype."""
    angle = positions.double()[:, None] * inv_freq.double()
    cosine, sine = angle.cos().to(x.dtype)[:, None, :], angle.sin().to(x.dtype)[:, None, :]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(stored, scale) with x = stored * scale, one float32 scale per row of the last dim.

    dtype  int8 or float8_e4m3fn; rows whose magnitudes are all below 1e-30 become zeros with a scale of zero
    """
    top = INT8_PEAK if dtype == torch.int8 else FP8_PEAK
    x = x.float()
    peak = x.abs().amax(-1)
    dead = peak < LEAST_PEAK
    factor = torch.where(dead, 0.0, top / torch.where(dead, 1.0, peak))
    y = x * factor[..., None]
    stored = y.round().to(torch.int8) if dtype == torch.int8 else y.clamp(-top, top).to(dtype)
    return stored, torch.where(dead, 0.0, peak / top)
