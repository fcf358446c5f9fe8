"""What attention must move, against a count by hand; and the document's tables are those of the formula."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnix.kernels_gpu.roofline import DEVICES, LLAMA_8B, LLAMA_70B, Heads, decode_work, prefill_work, tables

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_decode_by_hand() -> None:
    """Llama-3-8B: 8 KV heads x 128 x 2 bytes x (K, V) = 4,096 bytes a token and layer; 32 heads x 128 x 2 products x 2 = 16,384 FLOP."""
    work = decode_work(LLAMA_8B, 64, 4096)
    tokens = 64 * 4096
    table = tokens // 16 * 8 * 12
    q_and_out = 2 * 64 * 32 * 128 * 2
    assert work.bytes == tokens * 4096 + table + q_and_out
    assert work.flops == tokens * 16_384
    assert work.intensity == pytest.approx(4, rel=0.02)  # the query heads of a KV head, for 2-byte KV
    assert decode_work(LLAMA_70B, 64, 4096).intensity == pytest.approx(8, rel=0.02)


def test_narrow_kv_moves_about_half() -> None:
    wide, narrow = decode_work(LLAMA_8B, 64, 4096), decode_work(LLAMA_8B, 64, 4096, element_bytes=1, scale_bytes=4)
    assert narrow.bytes / wide.bytes == pytest.approx((128 + 4) / 256, abs=0.01)


def test_prefill_counts_each_pair_once() -> None:
    tiny = Heads("tiny", 1, 1, 1)
    assert [prefill_work(tiny, n).flops // 4 for n in (1, 2, 3)] == [1, 3, 6]
    assert prefill_work(tiny, 2, cached=10).flops // 4 == 2 * 10 + 3


def test_the_slower_of_the_two_is_the_bound() -> None:
    h200 = next(d for d in DEVICES if d.name.startswith("H200"))
    decode, prefill = decode_work(LLAMA_8B, 64, 4096), prefill_work(LLAMA_8B, 8192)
    assert decode.intensity < h200.ridge < prefill.intensity
    assert decode.least_us(h200) == pytest.approx(decode.bytes / 4.8e6)
    assert prefill.least_us(h200) == pytest.approx(prefill.flops / 989e6)


def test_the_document_has_the_tables_of_the_formula() -> None:
    assert tables() in DOCUMENT.read_text()
