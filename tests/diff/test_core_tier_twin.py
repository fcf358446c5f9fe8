"""The C core against its Python twin, with memory tiers: any sequence of valid calls gives equal results."""

from __future__ import annotations

import pytest

from .core_machine import EXAMPLES, run
from .tier_machine import TierMachine


@pytest.mark.parametrize(
    ("devices", "tiers", "hash_bits", "size"),
    [
        (1, (5, 4), 128, 4),
        (2, (5, 4), 128, 4),
        (1, (6,), 128, 4),
        (1, (5, 4), 2, 4),
        (1, (9, 0), 128, 3),
        (1, (5, 30), 128, 2),
        (2, (3, 3, 3, 3, 3, 3), 128, 4),
        (1, (5, 30), 128, 1),
    ],
)
def test_core_and_twin_agree(devices: int, tiers: tuple[int, ...], hash_bits: int, size: int) -> None:
    run(TierMachine, EXAMPLES // 3, devices=devices, tiers=tiers, hash_bits=hash_bits, size=size)
