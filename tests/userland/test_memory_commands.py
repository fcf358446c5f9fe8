"""prefetch, demote, evict, pin, unpin, attach-tier and detach-tier: which call each makes, and what it says of the answer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest

from attnix.syscalls import Client
from attnix.syscalls.types import AttachTierResult, MovedResult, NameRow, NamesResult
from attnix.userland.commands import memory, tiers

from .conftest import Attnix

ANSWERS: dict[str, Any] = {
    "prefetch": MovedResult(3, 8, 0),
    "demote": MovedResult(1, 8, 2),
    "evict": MovedResult(5, 0, 0),
    "pin": None,
    "unpin": None,
    "attach_tier": AttachTierResult("nvme1"),
    "detach_tier": None,
    "names": NamesResult(
        tuple(
            NameRow(name, cid, 5, True, "idle", 64)
            for name, cid in (("chat", 7), ("chat 2", 8), ("ours", 9), ("ours", 10))
        )
    ),
}


class Recorded:
    """A client that notes what it was asked, by the names that the real one has."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        arguments = inspect.signature(getattr(Client, name))

        def call(*args: Any) -> Any:
            bound = arguments.bind(self, *args)
            bound.apply_defaults()
            self.asked.append((name, {key: value for key, value in bound.arguments.items() if key != "self"}))
            return ANSWERS[name]

        return call


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    for module in (memory, tiers):
        monkeypatch.setattr(module, "call_system", lambda socket, name: recorded)
    return recorded


@pytest.mark.parametrize(
    ("line", "call", "args"),
    [
        ("prefetch 7", "prefetch", {"ctx": 0, "tier": "hbm", "deadline_ms": 0, "cid": 7}),
        ("prefetch 7 -t dram --deadline-ms 50", "prefetch", {"ctx": 0, "tier": "dram", "deadline_ms": 50, "cid": 7}),
        ("evict 7", "evict", {"ctx": 0, "cid": 7}),
        ("pin 7 --duration-ms 900", "pin", {"ctx": 0, "duration_ms": 900, "cid": 7}),
        ("unpin 7", "unpin", {"ctx": 0, "cid": 7}),
        ("detach-tier nvme1", "detach_tier", {"device": "nvme1"}),
    ],
)
def test_each_makes_its_call(system: Recorded, attnix: Attnix, line: str, call: str, args: dict[str, Any]) -> None:
    assert attnix(*line.split()).status == 0
    assert system.asked == [(call, args)]
    said = attnix(*line.split(), "--json")
    assert said.status == 0
    assert said.json is not None


@pytest.mark.parametrize("command", ["prefetch", "demote", "evict", "pin", "unpin"])
def test_a_named_context_is_found_by_its_whole_name(system: Recorded, attnix: Attnix, command: str) -> None:
    attnix(command, "chat")
    (asked, _), (name, args) = system.asked
    assert (asked, name, args["cid"], args["ctx"]) == ("names", command, 7, 0)


@pytest.mark.parametrize(
    ("which", "says"),
    [("cha", "nothing is named 'cha'"), ("ours", "several users' contexts, cids 9, 10"), ("0", "'0' is no cid")],
)
def test_what_names_no_context_or_two_moves_nothing(system: Recorded, attnix: Attnix, which: str, says: str) -> None:
    said = attnix("demote", which)
    assert said.status != 0 and says in said.err
    assert [name for name, _ in system.asked] in ([], ["names"])


def test_what_could_not_be_moved_is_said_and_is_status_1(system: Recorded, attnix: Attnix) -> None:
    said = attnix("demote", "7", "--tier", "nvme")
    assert system.asked == [("demote", {"ctx": 0, "tier": "nvme", "cid": 7})]
    assert said.status == 1
    assert said.out.splitlines()[0] == "1 block moved, 8 in nvme now"
    assert said.out.splitlines()[1].startswith("2 blocks could not be moved")
    as_json = attnix("demote", "7", "--json")
    assert as_json.status == 1
    assert as_json.json == {"moved_blocks": 1, "resident_blocks": 8, "failed_blocks": 2}


def test_settings_of_a_tier_travel_as_json(system: Recorded, attnix: Attnix) -> None:
    said = attnix("attach-tier", "nvme", "1.5GiB", "path=/data/kv", "depth=32", "direct=false")
    assert (said.out, said.status) == ("nvme1\n", 0)
    ((name, args),) = system.asked
    assert (name, args["kind"], args["size_bytes"]) == ("attach_tier", "nvme", 3 << 29)
    assert json.loads(args["settings"]) == {"path": "/data/kv", "depth": 32, "direct": False}
