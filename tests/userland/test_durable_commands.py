"""names, publish, unlink, snapshot, restore, sleep and wake: which calls each makes, and what it says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from attnix.syscalls import Client
from attnix.syscalls.stubs import SyncCalls
from attnix.syscalls.types import NameRow, NamesResult, OpenResult, RestoreResult, SnapshotResult
from attnix.userland.commands import durable

from .conftest import Attnix

ROWS = NamesResult((NameRow("memory.alice", 11, 3, True, "idle", 12_345), NameRow("", 12, 3, False, "suspended", 40)))
ANSWERS: dict[str, Any] = {
    "names": ROWS,
    "open": OpenResult(70, 11, 12_345),
    "publish": None,
    "unlink": None,
    "detach": None,
    "snapshot": SnapshotResult(2, 24_690, 3 << 20, 2 << 20),
    "restore": RestoreResult((71, 72), (21, 22)),
    "sleep": None,
    "wake": None,
}


class Recorded:
    """A client that notes what it was asked, by the names and parameters of the real stubs."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.sys = self

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        arguments = inspect.signature(getattr(Client, name, None) or getattr(SyncCalls, name))
        if name in ("open", "snapshot", "restore"):  # bare handles
            arguments = inspect.signature(getattr(SyncCalls, name))

        def call(*args: Any) -> Any:
            bound = arguments.bind(self, *args)
            bound.apply_defaults()
            self.asked.append((name, {key: value for key, value in bound.arguments.items() if key != "self"}))
            return ANSWERS[name]

        return call


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    monkeypatch.setattr(durable, "call_system", lambda socket, name: recorded)
    monkeypatch.setattr(durable, "look_at", lambda socket, name, source: recorded)
    return recorded


def test_names_by_hand(system: Recorded, attnix: Attnix) -> None:
    lines = [line.split() for line in attnix("names", "memory.").out.splitlines()]
    assert system.asked == [("names", {"prefix": "memory."})]
    assert lines == [
        ["NAME", "CID", "PID", "HELD", "STATE", "TOKENS"],
        ["memory.alice", "11", "3", "yes", "idle", "12,345"],
        ["(detached)", "12", "3", "-", "suspended", "40"],
    ]
    assert attnix("names", "--json").json["rows"][1]["state"] == "suspended"


@pytest.mark.parametrize(("which", "opened"), [("bob", ("bob", 0)), ("11", ("", 11))])
def test_publish_opens_by_name_or_cid(system: Recorded, attnix: Attnix, which: str, opened: tuple[str, int]) -> None:
    said = attnix("publish", which, "other", "--replace", "--json")
    name, cid = opened
    assert system.asked == [
        ("open", {"name": name, "fork": False, "cid": cid}),
        ("publish", {"ctx": 70, "name": "other", "replace": True}),
    ]
    assert said.json == {"name": "other", "cid": 11}


def test_snapshot_takes_forks(system: Recorded, attnix: Attnix) -> None:
    said = attnix("snapshot", "before", "alice", "12")
    assert system.asked == [
        ("open", {"name": "alice", "fork": True, "cid": 0}),
        ("open", {"name": "", "fork": True, "cid": 12}),
        ("snapshot", {"name": "before", "ctxs": (70, 70)}),
    ]
    assert said.out == "2 contexts, 24,690 tokens, 3.0 MiB, 2.0 MiB of KV\n"


def test_restore_publishes_or_detaches_what_it_made(system: Recorded, attnix: Attnix) -> None:
    assert attnix("restore", "before").out == "cid 21, 22\n"
    assert system.asked == [("restore", {"name": "before"}), ("detach", {"ctx": 71}), ("detach", {"ctx": 72})]
    system.asked.clear()
    assert attnix("restore", "before", "--as", "new", "--json").json == {"cids": [21, 22]}
    assert system.asked[1:] == [
        ("publish", {"ctx": 71, "name": "new.0", "replace": False}),
        ("publish", {"ctx": 72, "name": "new.1", "replace": False}),
    ]


@pytest.mark.parametrize(("line", "call"), [("unlink alice", "unlink"), ("sleep", "sleep"), ("wake", "wake")])
def test_one_call_each(system: Recorded, attnix: Attnix, line: str, call: str) -> None:
    assert attnix(*line.split()).status == 0
    assert [name for name, _ in system.asked] == [call]
    assert attnix(*line.split(), "--json").json is not None
