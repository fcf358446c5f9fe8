"""`attnix bench attention`: a wrong answer has no speed, every shape of the sweep is measured, and no peer goes missing for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attnix import bench_attention, bench_attention_peers
from attnix.bench_attention import DRY, Case, Timer, attention, cases, setting_of
from attnix.bench_attention_peers import TOLERANCE, Setting, apart, compiled, own_bytes, sdpa
from attnix.userland.bench.attention import rows_of

DECODE = Case("decode", DRY, 3, 40)
LIMIT = {"copy_bytes_s": 1e9, "product_flops_s": 1e12}
GIB = 1 << 30


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors of a few KB: on a busy machine torch's threads wait for each other ten times as long as they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured(case: Case = DECODE) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return attention(case, device, Timer(device), 1, LIMIT)


# -- answers --------------------------------------------------------------------------------------------------------


def test_answers_are_compared_as_shares_of_their_length() -> None:
    """At 128k random keys a row's values are about 0.005: nothing at all would be 0.02 away, and so right by a tolerance of
    3e-2 for values of about 1."""
    want = 0.005 * torch.randn(70, 4, 64, generator=torch.Generator().manual_seed(1))
    rounded = want.to(torch.bfloat16)
    assert 0 < apart(rounded, want) < TOLERANCE / 4
    assert apart(torch.zeros_like(want), want) == pytest.approx(1)
    for at, value in ((0, 0.005), (69, float("nan"))):  # of one row and head
        other = want.clone()
        other[at, 3, 7] += 10 * value
        assert not apart(other, want) <= TOLERANCE


def planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], Any]) -> None:
    whole = bench_attention.ours

    def ours(setting: Setting) -> Callable[[], torch.Tensor]:
        call = whole(setting)

        def changed() -> torch.Tensor:
            out: torch.Tensor = call()
            change(out)
            return out

        return changed

    monkeypatch.setattr(bench_attention, "ours", ours)


@pytest.mark.parametrize(("row", "peers_room"), [(0, 0), (2, 0), (1, GIB)])
def test_a_wrong_answer_has_no_speed(monkeypatch: pytest.MonkeyPatch, row: int, peers_room: int) -> None:
    """In the first sequence and the last, which SDPA compares whatever fits; and in one that only the peer's own run does."""
    room = iter([GIB])  # for ours
    monkeypatch.setattr(bench_attention, "free_bytes", lambda device: next(room, peers_room))
    planted(monkeypatch, lambda out: out[row].zero_())
    found = measured()
    assert "torch SDPA" in found["wrong"] and "ours_ns" not in found
    (shown,) = rows_of(found)
    assert shown.ours == 0 and shown.peer.startswith("WRONG")


def test_who_computes_something_else_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(setting: Setting) -> Callable[[], torch.Tensor]:
        call = sdpa(setting)
        return lambda: 1.1 * call()

    monkeypatch.setitem(bench_attention_peers.PEERS, "flex_attention", other)
    found = measured()
    assert "something else" in found["missing"]["flex_attention"]
    assert {"in order", "torch SDPA"} <= set(found["peers"])


# -- memory ---------------------------------------------------------------------------------------------------------


def test_every_shape_is_measured_on_a_card_of_140_gb() -> None:
    """An H200 says 143,771 MiB.  On an H100's 80 GiB only the largest does not fit: its K and V alone are 128 GiB."""
    every = cases(dry=False)
    assert max(case.kv_bytes for case in every) == 128 * GIB
    skipped = {
        card: {case.title for case in every if case.needed_bytes > bench_attention.MARGIN * free}
        for card, free in (("H200", 139 * GIB), ("H100", 78 * GIB))
    }
    assert skipped["H200"] == set()
    assert skipped["H100"] == {f"decode, Llama-3-{size}B, batch 256 x 131072" for size in (8, 70)}


def test_a_peer_whose_copy_does_not_fit_is_missing_and_ours_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = setting_of(DECODE, torch.device("cpu"))
    needed = own_bytes("torch SDPA", setting)
    assert needed == min(own_bytes(name, setting) for name in bench_attention_peers.PEERS) >= DECODE.kv_bytes
    room = iter([GIB])  # for ours
    monkeypatch.setattr(bench_attention, "free_bytes", lambda device: next(room, needed - 1))
    found = measured()
    assert all("beside ours" in found["missing"][name] for name in bench_attention_peers.PEERS)
    assert len(found["ours_ns"]) == 1 and set(found["peers"]) == {"in order"}
    monkeypatch.setattr(bench_attention, "free_bytes", lambda device: DECODE.needed_bytes - 1)
    assert "GiB" in measured()["skipped"]


def test_a_copy_for_a_peer_is_what_the_pages_say() -> None:
    setting = setting_of(DECODE, torch.device("cpu"))
    k, v = setting.contiguous([2, 0])
    assert k.shape == (2, DRY.kv, 40, DRY.dim)
    for at, sequence in enumerate((2, 0)):
        for position in (0, 15, 16, 39):
            frame = int(setting.pages.frame[sequence, position // 16])
            for plane, got in enumerate((k, v)):
                assert torch.equal(got[at, :, position], setting.frames.kv[frame, 0, plane, :, position % 16])


# -- compilation ----------------------------------------------------------------------------------------------------


def test_each_case_compiles_its_own() -> None:
    """torch counts per function, and above the limit it runs the rest uncompiled, and says so once, in a log."""
    seen: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(1)
        return graph.forward

    def attend(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for n in range(10):
        assert compiled(attend, backend=backend)(torch.ones(n + 2)).sum() == 2 * (n + 2)
    assert len(seen) == 10
