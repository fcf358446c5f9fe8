"""Case 2: no two identities give the same keys, however their parts are cut, and each finds its own.

Every pair is one that a simpler encoding confuses: parts joined, or joined by a character, or without their tags.
"""

from __future__ import annotations

from typing import TypeAlias

import pytest

from attnix.kernel.config import encode_identity
from attnix.kernel.core import Core
from attnix.simulated import SimulatedSystem, ints

Identity: TypeAlias = tuple[tuple[str, str], ...]

NVME = 2
WEIGHTS = ("weights", "sim")
PAIRS: dict[str, tuple[Identity, Identity]] = {
    "the same value of an adapter and of a salt": ((("adapter", "X"),), (("salt", "X"),)),
    "a boundary, and a character that joins": ((("a", "b|c"),), (("a|b", "c"),)),
    "a boundary": ((("a", "bc"),), (("ab", "c"),)),
    "a value that looks like the next tag": ((("a", "x"), ("b", "y")), (("a", "xby"),)),
    "the same with a character that joins": ((("a", "x"), ("b", "y")), (("a", "x|b|y"),)),
    "empty and absent": ((("salt", ""),), ()),
    "empty, and part of the value before it": ((("a", "x"), ("b", "")), (("a", "xb"),)),
    "what begins like a length": ((("a", "\x01\0\0\0b"),), (("a\x01\0\0\0", "b"),)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_they_are_encoded_differently(pair: tuple[Identity, Identity]) -> None:
    one, other = pair
    assert encode_identity((WEIGHTS, *one), "uid:1000") != encode_identity((WEIGHTS, *other), "uid:1000")
    assert encode_identity((WEIGHTS, *one), "uid:1000") == encode_identity((WEIGHTS, *one), "uid:1000")


def test_a_domain_is_no_part_of_what_stands_before_it() -> None:
    encoded = {encode_identity(identity, domain) for identity, domain in (
        ((("a", "x"),), "y"), ((("a", "xdomain"),), "y"), ((("a", "x"), ("domain", "y")), ""), ((("a", "x"),), "domainy"),
    )}  # fmt: skip
    assert len(encoded) == 4


def booted(identity: Identity) -> SimulatedSystem:
    return SimulatedSystem(core=Core, frames=8, dram=8, nvme=8, block_tokens=4, identity=(WEIGHTS, *identity))


def hit_tokens(system: SimulatedSystem) -> int:
    """Of a prompt of two blocks and one token."""
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(range(9)))
    system.run()
    assert client.call("demote", ctx, "nvme").resident_blocks >= 2
    found: int = client.call("stat", ctx).usage.hit_tokens
    system.disconnect(client)
    return found


@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_two_kernels_over_one_tier_find_nothing_of_each_other(pair: tuple[Identity, Identity]) -> None:
    """The same tokens of the same uid; what the first has stored is what the tier of the second reports at its start."""
    first = booted(pair[0])
    assert hit_tokens(first) == 0
    for identity, found in ((pair[0], 8), (pair[1], 0)):
        again = booted(identity)
        again.devices[NVME].frames = {k: bytearray(frame) for k, frame in first.devices[NVME].frames.items()}
        again.kill_driver(NVME)
        assert hit_tokens(again) == found
        assert hit_tokens(again) == 8, "and it finds its own"
