"""copy_frames moves what it says and nothing else; `independent` keeps the order that a launch does not have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnix.kernels_gpu.copy_frames import copy_frames, independent

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADER = 4096  # before each frame of a dram arena
COPIES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12)


def arena(frames: int, frame_bytes: int, header: int, seed: int, *, pinned: bool = False) -> torch.Tensor:
    """A view of the frames' bytes that skips the headers."""
    draw = torch.Generator().manual_seed(seed)
    made = torch.randint(0, 256, (frames, header + frame_bytes), dtype=torch.uint8, generator=draw)
    if DEVICE.type == "cuda":
        made = made.pin_memory() if pinned else made.to(DEVICE)
    return made[:, header:]


@settings(max_examples=30)
@given(data=st.data())
def test_layers_move_between_arenas_and_nothing_else_does(data: st.DataObject) -> None:
    layers, words = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 90, 2048, 2049]))
    frame_bytes = layers * words * 8
    source = arena(6, frame_bytes, data.draw(st.sampled_from([0, HEADER])), 1, pinned=data.draw(st.booleans()))
    target = arena(7, frame_bytes, data.draw(st.sampled_from([0, HEADER])), 2, pinned=data.draw(st.booleans()))
    targets = data.draw(st.lists(st.integers(0, 6), unique=True, max_size=7))
    pairs = [(data.draw(st.integers(0, 5)), to) for to in targets]
    first = data.draw(st.integers(0, layers - 1))
    count = data.draw(st.integers(1, layers - first))
    want = target.cpu().clone()
    for a, b in pairs:
        part = slice(first * words * 8, (first + count) * words * 8)
        want[b, part] = source.cpu()[a, part]
    table = torch.tensor(pairs, dtype=torch.int32, device=DEVICE).view(-1, 2)
    copy_frames(source, target, table, layer_bytes=words * 8, first_layer=first, layers=count)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()  # reading pinned memory waits for nobody
    assert torch.equal(target.cpu(), want)


@settings(max_examples=30)
@given(copies=COPIES)
def test_copies_in_order_within_one_arena(copies: list[tuple[int, int]]) -> None:
    """Copy-on-write: what a pass copies before anything else, one after the other."""
    frames = arena(7, 64, 0, 3)
    want = frames.cpu().clone()
    for a, b in copies:
        want[b] = want[a].clone()
    for launch_pairs in independent(copies):
        table = torch.tensor(launch_pairs, dtype=torch.int32, device=DEVICE)
        copy_frames(frames, frames, table, layer_bytes=16)
    assert torch.equal(frames.cpu(), want)


@given(copies=COPIES)
def test_a_cut_loses_nothing_and_no_launch_depends_on_itself(copies: list[tuple[int, int]]) -> None:
    launches = list(independent(copies))
    assert [pair for pairs in launches for pair in pairs] == copies
    for pairs in launches:
        written = [to for _, to in pairs]
        assert pairs and len(set(written)) == len(written)
        for number, (source, _) in enumerate(pairs):
            assert source not in written[:number]
            assert source not in written[number + 1 :]


def test_a_chain_is_cut_and_copies_from_one_frame_are_not() -> None:
    assert list(independent([(0, 1), (1, 2)])) == [[(0, 1)], [(1, 2)]]
    assert list(independent([(0, 1), (0, 2), (0, 3)])) == [[(0, 1), (0, 2), (0, 3)]]


def test_repeats_in_any_order_of_programs_are_equal(shuffled: Callable[[int], None], repeats: int) -> None:
    source, target = arena(4, 40_000, 0, 1), arena(4, 40_000, HEADER, 2)
    table = torch.tensor([[0, 3], [2, 1], [1, 0]], dtype=torch.int32, device=DEVICE)
    copy_frames(source, target, table, layer_bytes=8000)
    want = target.clone()
    for seed in range(repeats):
        shuffled(seed)
        target[[0, 1, 3]] = 0
        copy_frames(source, target, table, layer_bytes=8000)
        assert torch.equal(target, want)


@pytest.mark.parametrize(
    "sizes", [{"layer_bytes": 12}, {"layer_bytes": 16, "first_layer": 3, "layers": 2}, {"layer_bytes": 128}]
)
def test_what_does_not_fit_is_refused(sizes: dict[str, int]) -> None:
    frames, table = arena(3, 64, 0, 0), torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    before = frames.clone()
    with pytest.raises(ValueError):
        copy_frames(frames, frames, table, **({"layers": 1} | sizes))
    assert torch.equal(frames, before)
