"""The C core against its Python twin, on compute devices alone: any sequence of valid calls gives equal results."""

from __future__ import annotations

import pytest

from attnix.kernel.batch import SEQ, SEQ_BYTES

from .core_machine import CoreMachine, run


@pytest.mark.parametrize(
    ("devices", "hash_bits", "size"),
    [(1, 128, 4), (2, 128, 4), (1, 2, 4), (2, 2, 4), (1, 0, 4), (2, 0, 4), (1, 128, 1), (2, 128, 3), (1, 128, 12)],
)
def test_core_and_twin_agree(devices: int, hash_bits: int, size: int) -> None:
    run(CoreMachine, devices=devices, hash_bits=hash_bits, size=size)


def test_template_size() -> None:
    assert SEQ.size == SEQ_BYTES == 96
