"""What the element-wise kernels compute, in plain torch: slow, short, in the dtype that the inputs have.

Quantisation, the rotation of a single row and attention are in reference.py.

Tests call each twice: in float32 (the truth) and in the kernel's dtype (the yardstick of its error).
"""

from __future__ import annotations

import torch


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (arXiv 1910.07467); every step in x's dtype."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, gate first (arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def rope(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotate heads, halves paired (arXiv 2104.09864).  x [T, H, D]; positions [T]; inv_freq [D / 2] f32; in x's dtype.

    The angle is by definition one float32 product, as in the CPU engine: it is no part of the error.
    """
    angle = (positions.float()[:, None] * inv_freq.float()).double()
    cosine, sine = angle.cos().to(x.dtype)[:, None, :], angle.sin().to(x.dtype)[:, None, :]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
