"""`attnix doctor` on prompts: beginnings that differ, and block sizes.  Each fault planted, and not planted."""

from __future__ import annotations

import pytest

from attnix.simulated import SimulatedClient, SimulatedSystem
from attnix.userland.doctor.prefixes import FIRST, alike

from .doctor_rig import ask, found

SHARED = [100 + i % 60 for i in range(64)]  # a system prompt


def system(block_tokens: int = 4, frames: int = 400) -> SimulatedClient:
    made = SimulatedSystem(frames=frames, block_tokens=block_tokens, window_tokens=512, max_contexts=32, check=False)
    return made.connect()


def question(number: int) -> list[int]:
    return [200 + number, *(number * 3 + i for i in range(4))]


def test_an_id_in_front_of_a_shared_prompt() -> None:
    client = system()
    for number in range(6):
        ask(client, [9, 9, number, number + 1, *SHARED, *question(number)])
    finding = found(client)["heads"]
    assert finding.numbers["prompts"] == 6
    assert finding.numbers["prompts_lost"] == 5  # the first has nothing to share with
    # Each could have found 2 + 64 tokens, 16 whole blocks of 4 (the last two tokens fill no block).
    assert finding.numbers["tokens_lost"] == 5 * 64
    assert (finding.numbers["tokens_common"], finding.numbers["tokens_differing"]) == (2, 2)
    assert finding.numbers["tokens_same"] == 64
    first, second = [line for line in finding.evidence if line.startswith("  cid")]
    assert "9 9 »" in first and "«100 101" in first and "«100 101" in second
    ids = [line.split("»")[1].split("«")[0].split() for line in (first, second)]
    assert ids[0] != ids[1] and all(len(id_) == 2 for id_ in ids)
    # Every token was a prompt's; 320 of 6 * 73 were computed again, and that is all that the machine has done.
    assert finding.damage == pytest.approx(320 / 438, abs=0.02)


def test_the_same_with_the_id_behind_it_is_healthy() -> None:
    client = system()
    for number in range(6):
        ask(client, [9, 9, *SHARED, number, number + 1, *question(number)])
    assert found(client) == {}


def test_prompts_that_have_nothing_in_common_are_healthy() -> None:
    client = system()
    for number in range(6):
        ask(client, [number, *((number * 37 + i * i) % 250 for i in range(70))])
    assert found(client) == {}


def test_ids_of_different_lengths_are_laid_side_by_side() -> None:
    client = system()
    for number in range(6):
        ask(client, [*range(1 + number % 3), 70 + number, *SHARED])
    assert found(client)["heads"].numbers["tokens_same"] == 64


def test_other_domains_prompts_are_not_compared() -> None:
    made = SimulatedSystem(frames=400, window_tokens=512, check=False)
    for uid in (1000, 2000, 3000):
        ask(made.connect(uid), [uid // 1000, *SHARED])
    assert found(made.connect(0)) == {} and found(made.connect(1000)) == {}


@pytest.mark.parametrize(
    ("mine", "other", "expected"),
    [
        ([1, 2, *SHARED], [1, 3, *SHARED], (1, 2, 2, 64)),
        ([1, *SHARED], [1, 2, 3, 4, *SHARED], (1, 1, 4, 64)),
        ([*SHARED, 1], [*SHARED, 2], None),  # the same from the start
        ([*range(FIRST + 1), 7, *SHARED], [*range(FIRST + 1), 8, *SHARED], None),  # they do not differ in front
        ([1, 2, 3], [4, 5, 6], None),
        ([], [], None),
    ],
)
def test_two_prompts_beside_one_another(mine: list[int], other: list[int], expected: tuple[int, ...] | None) -> None:
    assert alike(mine, other) == expected


def test_blocks_of_128_tokens_for_contexts_of_40() -> None:
    client = system(block_tokens=128, frames=16)
    for number in range(10):
        client.call("release", ask(client, [number, *((number * 37 + i * i) % 250 for i in range(38))], 2))
    holding = [ask(client, [50 + n, *((n * 91 + i * i) % 250 for i in range(38))]) for n in range(12)]
    finding = found(client)["block_size"]
    assert len(holding) == 12
    # 41 tokens: one block of 128, or one of 64; with 16 it is 48 slots.
    assert (finding.numbers["slots"], finding.numbers["slots_proposed"]) == (10 * 128, 10 * 48)
    assert finding.numbers["proposed"] == 16
    assert finding.numbers["empty_slots"] == 10 * (128 - 41)
    assert finding.damage == pytest.approx((1 - 48 / 128) * 12 / 16)
    assert "--block-tokens 16" in finding.remedies[0]


def test_a_shared_prompt_that_does_not_fill_a_block() -> None:
    client = system(block_tokens=128, frames=32)
    for number in range(10):
        client.call("release", ask(client, [*SHARED[:60], *((number * 37 + i * i) % 250 for i in range(190))], 6))
    held = [ask(client, [n, *((n * 41 + i * i) % 250 for i in range(254))]) for n in range(12)]
    finding = found(client)["block_size"]
    assert held
    # 256 tokens fill two blocks exactly: nothing is empty, but the 60 shared ones are in every context's own frames.
    assert finding.numbers["empty_slots"] == 0
    assert int(finding.numbers["unshared_slots"]) >= 9 * 60
    assert int(finding.numbers["slots"]) == 10 * 256
    assert int(finding.numbers["slots_proposed"]) <= 10 * 256 - 9 * 48


def test_the_same_contexts_in_blocks_of_16_are_healthy() -> None:
    client = system(block_tokens=16, frames=64)
    for number in range(10):
        client.call("release", ask(client, [number, *((number * 37 + i * i) % 250 for i in range(38))], 2))
    assert found(client) == {}


def test_blocks_of_128_for_contexts_that_fill_them_are_healthy() -> None:
    client = system(block_tokens=128, frames=64)
    for number in range(10):
        client.call("release", ask(client, [number, *((number * 37 + i * i) % 250 for i in range(379))], 3))
    assert found(client) == {}
