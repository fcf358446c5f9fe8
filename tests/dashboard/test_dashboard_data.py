"""What the dashboard's page is told: by whom it may be asked, what it holds, and how large pools are put together."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnix.syscalls import connect
from attnix.userland.gateway.dashboard.bins import binned
from attnix.userland.gateway.dashboard.look import Frames
from attnix.userland.gateway.dashboard.routes import STATIC
from attnix.userland.output import plain

from ..gateway.rig import Daemon, Served


def frames(states: str, cids: list[int], sharers: list[int] | None = None, ages: list[int] | None = None) -> Frames:
    n = len(states)
    return Frames(
        "hbm0", n, bytes(map(int, states)), array("i", cids), array("i", range(n)), array("i", sharers or [1] * n),
        array("i", ages or [5] * n), array("i", range(100, 100 + n)),
    )  # fmt: skip


def test_few_frames_are_a_cell_each() -> None:
    map_ = binned(frames("0122", [0, 7, 7, 0]), {7: 3}, 16)
    assert (map_["each"], map_["states"], map_["pids"], map_["cids"]) == (1, [0, 1, 2, 2], [0, 3, 3, 0], [0, 7, 7, 0])
    assert map_["used"] == [0, 1, 1, 1]


def test_many_frames_are_put_together_and_drawn_as_the_process_that_has_most() -> None:
    seen = frames(
        "2222022200", [7, 8, 8, 0, 0, 9, 9, 9, 0, 0], [1, 2, 4, 0, 0, 1, 1, 1, 0, 0], [9, 5, -1, 8, -1, 3, 4, 2, -1, -1]
    )
    map_ = binned(seen, {7: 1, 8: 2, 9: 2}, 3)
    assert map_["each"] == 4  # 10 frames in at most 3 cells
    assert map_["pids"] == [2, 2, 0]
    assert map_["used"] == [4, 3, 0]
    assert map_["sharers"] == [4, 1, 0]
    assert map_["ages"] == [5, 2, -1]
    assert map_["cids"] == [8, 9, 0] and map_["blocks"] == [101, 105, -1]
    assert map_["states"] == [2, 2, 0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    started = Served(Daemon(tmp_path_factory.mktemp("dashboard"), frames=64))
    yield started
    started.stop()
    started.daemon.at_rest()
    assert started.daemon.process.stop() == 0


def test_the_page_loads_nothing_from_elsewhere_and_nothing_inline(served: Served) -> None:
    page = served.http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
    assert "style=" not in page.text and "<script>" not in page.text and "onclick" not in page.text
    for name in re.findall(r'(?:src|href)="([^"#]+)"', page.text):
        assert served.http.get(name).status_code == 200, name
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert not re.search(r"https?://|//cdn|@import", text), path
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert (STATIC / module).is_file()
        assert path.stat().st_size < 16384


@pytest.mark.parametrize("name", ["nothing.js", "..%2froutes.py", "%2e%2e/routes.py", ".", "static"])
def test_other_files_are_not_served(served: Served, name: str) -> None:
    assert served.http.get(f"/dashboard/static/{name}").status_code == 404


def test_the_state_is_what_the_system_says(served: Served) -> None:
    with connect(served.daemon.socket, name="somebody") as system:
        context = system.alloc_context()
        context.append(text="a text of some length, for a few blocks")
        context.generate(max_tokens=2)
        state = served.http.get("/dashboard/state").json()
        rows = plain(system.ps().processes)
        for row in (*rows, *state["processes"]):
            row.pop("age_ns")
        assert state["processes"] == rows
        assert [tier["device"] for tier in state["tiers"]] == ["hbm0"]
        assert state["samples"][-1]["generated_tokens"] == 2
        map_ = served.http.get("/dashboard/frames?device=hbm0").json()
        assert map_["cids"].count(context.cid) == 3  # 39 + 1 tokens in blocks of 16
        told = served.http.get(f"/dashboard/explain?cid={context.cid}&logical=1").json()
        assert told["entry"]["tokens_from"] == 16 and told["entry"]["tokens"] == 16
        assert map_["cids"][told["entry"]["frame"]] == context.cid


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("frames?device=tape0", 404),
        ("frames?device=hbm0&cells=0", 400),
        ("frames?device=hbm0&cells=many", 400),
        ("explain?cid=999&logical=0", 404),
        ("explain?cid=-1", 400),
    ],
)
def test_what_is_wrong_is_said(served: Served, path: str, status: int) -> None:
    answer = served.http.get(f"/dashboard/{path}")
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_with_keys_a_caller_sees_its_own_group_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[key]]\nname = "alice"\nkey = "sk-alice-1234"\n[[key]]\nname = "bob"\nkey = "sk-bob-12345"\n[[key]]\nname = "root"\nkey = "sk-root-1234"\noperator = true\n'
    )
    keys.chmod(0o600)
    served = Served(Daemon(tmp_path / "daemon", frames=64), "--keys", str(keys))
    try:
        seen_by_two(served)
    finally:
        served.stop()
        served.daemon.process.stop()


def seen_by_two(served: Served) -> None:
    assert served.http.get("/").status_code == 200  # it says nothing
    assert served.http.get("/dashboard/state").status_code == 401
    alice, bob = ({"x-api-key": key} for key in ("sk-alice-1234", "sk-bob-12345"))
    with connect(served.daemon.socket, name="root") as system:
        uid = system.server.uid
        child = system.spawn("secret-work", group=f"uid:{uid}/alice")
        context = child.alloc_context()
        context.append(text="what nobody else may know")
        context.generate(max_tokens=2)
        mine = served.http.get("/dashboard/state", headers=alice).json()
        theirs = served.http.get("/dashboard/state", headers=bob).json()
        assert [row["name"] for row in mine["processes"]] == ["secret-work"]
        assert theirs["processes"] == [] and theirs["samples"] == [] and theirs["counters"] == {}
        map_ = served.http.get("/dashboard/frames?device=hbm0", headers=bob).json()
        assert set(map_["states"]) == {0} and set(map_["cids"]) == {0} and set(map_["blocks"]) == {-1}
        (tier,) = theirs["tiers"]
        assert (
            tier["free_frames"] == tier["capacity_frames"] == 64
            and not tier["mapped_frames"]
            and not tier["read_bytes"]
        )
        assert context.cid in served.http.get("/dashboard/frames?device=hbm0", headers=alice).json()["cids"]
        path = f"/dashboard/explain?cid={context.cid}&logical=0"
        assert served.http.get(path, headers=bob).status_code == 404
        assert served.http.get(path, headers=alice).status_code == 200
        assert served.http.get("/dashboard/explain?block=0", headers=bob).status_code == 404
        with_block = served.http.get(f"{path}&block=0", headers=alice).json()
        assert with_block["block"] == -1  # numbers of blocks could be anybody's
    for headers, status in (({}, 401), (alice, 403), (bob, 403), ({"authorization": "Bearer sk-root-1234"}, 200)):
        assert served.http.get("/metrics", headers=headers).status_code == status
    everything = served.http.get("/dashboard/state", headers={"x-api-key": "sk-root-1234"}).json()
    assert everything["samples"] and everything["counters"]
    (tier,) = everything["tiers"]
    assert tier["free_frames"] < tier["capacity_frames"]
