"""Sequences whose page tables begin alike are read together (cpu/csrc/plan.c): to the bit what each gets alone.

A sequence in a pass of its own is in no group, so that pass is the reference.  KV is random: attention is what is tested,
and the frames need no prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnix.drivers.accel.config import KvDtype
from attnix.drivers.accel.cpu.ops import Isa, available_isas

from .test_paged_forward import SMALL, Pages, make, random_weights, some_tokens

KINDS = pytest.mark.parametrize(
    ("isa", "dtype"),
    [(available_isas()[-1], dtype) for dtype in ("float32", "bfloat16", "int8")] + [(Isa.PORTABLE, "float32")],
    ids=lambda value: str(value) if isinstance(value, str) else value.name.lower(),
)


def fill(pages: Pages, dtype: KvDtype) -> None:
    """Random K and V in every frame; int8 with scales that make them as large as the others."""
    c, rng = pages.model.config, np.random.default_rng(3)
    numbers = torch.from_numpy(
        rng.standard_normal((pages.capacity, c.layers, 2 * c.kv_heads * 16 * c.head_dim), np.float32)
    )
    planes = pages.arena.reshape(pages.capacity, c.layers, -1)
    if dtype == "int8":
        values = (numbers * 40).round().clamp(-127, 127).to(torch.int8).numpy()
        planes[:, :, : values.shape[2]] = values.view(np.uint8)
        scales = rng.uniform(0.01, 0.04, (pages.capacity, c.layers, 2 * c.kv_heads * 16)).astype(np.float32)
        planes[:, :, values.shape[2] :] = scales.view(np.uint8)
    else:
        kept = numbers if dtype == "float32" else numbers.to(torch.bfloat16)
        planes[:] = kept.view(torch.uint8).numpy()


def map_run(pages: Pages, slot: int, run: Sequence[tuple[int, int, int]], own: int) -> int:
    """Give a row these (frame, count, shift), then full blocks of its own for `own` tokens; all its positions."""
    n = -(-own // 16)
    entries = [*run, *((pages.free.pop(), min(16, own - 16 * i), 0) for i in range(n))]
    row = pages.rows
    row.frame[slot], row.shift[slot], row.count[slot] = -1, 0, 0
    for i, (frame, count, shift) in enumerate(entries):
        row.frame[slot, i], row.count[slot, i], row.shift[slot, i] = frame, count, shift
    return sum(count for _, count, _ in entries)


def parts_of(pages: Pages, totals: Sequence[int], last: Sequence[int]) -> list[tuple[npt.NDArray[Any], list[int]]]:
    """Per slot a pass over its last tokens."""
    return [
        (pages.record(slot, total - n, n), some_tokens(n, seed=slot))
        for slot, (total, n) in enumerate(zip(totals, last, strict=True))
    ]


@KINDS
@pytest.mark.parametrize("window", [0, 200])
def test_together_is_alone_to_the_bit(isa: Isa, dtype: KvDtype, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups and loners, partial and shifted entries within the shared runs, decode and short prefill, one to three
    threads: every row as in a pass of its own."""
    c = replace(SMALL, sliding_window=window or None)
    weights = random_weights(c)
    models = [make(monkeypatch, isa, c, weights, dtype, threads) for threads in (1, 2, 3)]
    shared = 0

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal shared
        pages = Pages(data.draw(st.sampled_from(models)), capacity=330)
        fill(pages, dtype)
        count = st.one_of(st.just(16), st.just(16), st.integers(1, 16))
        shift = st.sampled_from([0, 0, 0, 0, 9, -40])
        runs: list[list[tuple[int, int, int]]] = []
        for blocks in data.draw(st.lists(st.integers(9, 70), min_size=1, max_size=2)):
            plain = data.draw(st.booleans())
            shape = [(16, 0) if plain else (data.draw(count), data.draw(shift)) for _ in range(blocks)]
            runs.append([(pages.free.pop(), *entry) for entry in shape])
        slots = data.draw(st.integers(2, 8))
        totals, last = [], []
        for slot in range(slots):
            run = data.draw(st.sampled_from(runs))
            cut = data.draw(st.sampled_from([len(run), len(run), len(run) // 2, 0]))
            last.append(data.draw(st.sampled_from([1, 1, 1, 5, 24])))
            totals.append(map_run(pages, slot, run[:cut], last[-1] + data.draw(st.integers(0, 150))))
        parts = parts_of(pages, totals, last)
        alone = []
        for part in parts:
            alone.append(pages.run([part]))
            assert pages.model.shared_tokens == 0
        together = pages.run(parts)
        shared += pages.model.shared_tokens
        assert np.isfinite(together).all()
        assert np.array_equal(together, np.concatenate(alone))

    check()
    assert shared > 0


def test_who_reads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leading entries that agree in frame, shift and count, in whole tiles of 64 positions; and each of those matters to
    the rows of its group and to no other."""
    pages = Pages(make(monkeypatch, available_isas()[-1], SMALL, random_weights(SMALL), "bfloat16"), capacity=200)
    fill(pages, "bfloat16")
    long, short = ([(pages.free.pop(), 16, 0) for _ in range(n)] for n in (20, 11))
    totals = [map_run(pages, slot, long, 30 + slot) for slot in range(3)]
    totals += [map_run(pages, slot, short, 7) for slot in (3, 4)]
    totals.append(map_run(pages, 5, [], 400))
    parts = parts_of(pages, totals, [1] * 6)
    before = pages.run(parts)
    assert pages.model.shared_tokens == 3 * 320 + 2 * 128
    for frame, group in ((long[19][0], range(3)), (short[0][0], (3, 4))):
        kept = pages.arena[frame].copy()
        pages.arena[frame] = np.roll(kept, 4)
        changed = np.flatnonzero((pages.run(parts) != before).any(axis=1))
        assert list(changed) == list(group)
        pages.arena[frame] = kept
    pages.rows.shift[1, 9] = 3  # from position 144 on, in the tile that begins at 128
    pages.run(parts)
    assert pages.model.shared_tokens == 2 * 320 + 2 * 128
    pages.rows.shift[2, 13] = 3  # 0 and 2 agree on 208 positions
    pages.run(parts)
    assert pages.model.shared_tokens == 2 * 192 + 2 * 128
    assert np.array_equal(pages.run([parts[3]]), before[3:4])


@pytest.mark.parametrize("slots", [40, 70])
def test_a_group_may_be_larger_than_a_task(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks have 96 rows, of 2 heads here: 48 sequences at most."""
    pages = Pages(
        make(monkeypatch, available_isas()[-1], SMALL, random_weights(SMALL), "bfloat16"), capacity=300, slots=slots
    )
    fill(pages, "bfloat16")
    run = [(pages.free.pop(), 16, 0) for _ in range(40)]
    parts = parts_of(pages, [map_run(pages, slot, run, 1 + slot) for slot in range(slots)], [1] * slots)
    together = pages.run(parts)
    assert pages.model.shared_tokens == slots * 640
    for slot in (0, 17, slots - 1):
        assert np.array_equal(pages.run([parts[slot]])[0], together[slot])
