"""A daemon that cannot start says why in one line, exits with 1, and leaves no process and no socket behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnix import boot
from attnix.boot import BootError
from attnix.syscalls import connect
from attnix.syscalls.types import LimitRow

DEADLINE_S = 30.0


class Started:
    """`attnix.boot` as a process, its output in a file."""

    def __init__(self, folder: Path, *arguments: str, model: str = "sim", state: Path | None = None) -> None:
        self.socket = folder / "run" / "x.sock"
        self.output = folder / "output"
        command = [sys.executable, "-m", "attnix.boot", "--model", model, "--socket", str(self.socket)]
        command += ["--state-dir", str(state or folder / "state"), "--hbm", "4KiB", "--window", "64", *arguments]
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def children(self) -> list[int]:
        try:
            return [
                int(p) for p in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            ]
        except FileNotFoundError:
            return []

    def drivers(self) -> list[int]:
        """Children that are past their exec."""
        return [p for p in self.children() if b"attnix.drivers" in Path(f"/proc/{p}/cmdline").read_bytes()]

    def text(self) -> str:
        return self.output.read_text()


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Started] = []

    def begin(*arguments: str, model: str = "sim", state: Path | None = None) -> Started:
        started.append(Started(tmp_path, *arguments, model=model, state=state))
        return started[-1]

    yield begin
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.process.kill()
        daemon.process.wait(DEADLINE_S)


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.002)


def refused(daemon: Started, *words: str) -> None:
    assert daemon.process.wait(DEADLINE_S) == 1, daemon.text()
    last = daemon.text()
    assert "attnix: cannot boot: " in last and "Traceback" not in last, last
    for word in words:
        assert word in last, last
    assert not daemon.socket.exists()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sysctl", "no.such=1"), ("no.such",)),
        (("--sysctl", "sched.step_tokens=0"), ("sched.step_tokens", "1048576")),
        (("--sysctl", "evict.policy=best"), ("evict.policy", "lru")),
        (("--sim", "{bad"), ("--sim",)),
        (("--sim", "[]"), ("--sim",)),
        (("--hbm", "10"), ("--hbm",)),
        (("--hbm", "1000000GiB"), ("--hbm", "this machine allows")),
        (("--max-contexts", "1000000000"), ("--max-contexts", "this machine allows")),
        (("--dram", "1000000GiB"), ("--dram", "this machine allows")),
        (("--dram", "4KiB"), ("--dram", "it must hold 1 or more")),
        (("--nvme", "1MiB", "--dram", "24KiB"), ("--dram", "it must hold 4 or more")),
        (("--nvme", "4KiB"), ("nvme0", "do not hold one frame")),
        (("--nvme", "1MiB@/nowhere/at/all"), ("nvme0", "/nowhere/at/all")),
        (("--remote", "ftp://host"), ("remote0", "ftp")),
        (("--sim-tier", '1MiB,{"nosuch": 1}'), ("sim0", "nosuch")),
    ],
)
def test_settings_that_cannot_work(start: Start, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(start(*arguments), *words)


@pytest.mark.e2e
def test_a_driver_that_refuses_its_settings(start: Start) -> None:
    refused(start("--sim", '{"nosuch": 1}'), "nosuch", "hbm0")


@pytest.mark.e2e
def test_models_that_are_none(start: Start, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0" + (100).to_bytes(8, "little") * 2)
    (tmp_path / "folder").mkdir()
    for name in ("missing.gguf", "text.gguf", "cut.gguf", "folder"):
        refused(start(model=str(tmp_path / name)), name)


@pytest.mark.e2e
def test_a_state_directory_that_cannot_be_used(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(start(state=tmp_path / "file"), "state directory")
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "secret").write_bytes(b"abc")
    refused(start(state=tmp_path / "short"), "secret", "16 bytes")


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_driver_loads_ends_both(start: Start, number: signal.Signals) -> None:
    for _ in range(5):
        daemon = start()
        until(daemon.drivers, "a driver process")
        driver = daemon.drivers()[0]
        os.kill(driver, signal.SIGSTOP)  # it will never be ready, unless it was before we looked
        began = time.monotonic()
        daemon.process.send_signal(number)
        status = daemon.process.wait(DEADLINE_S)
        if "ready on" not in daemon.text():
            break
        assert status == 0
    refused(daemon, f"stopped by {number.name}")
    assert time.monotonic() - began < 20
    until(lambda: is_gone(driver), "the end of the driver")


@pytest.mark.e2e
def test_a_second_daemon_and_then_a_third(start: Start) -> None:
    first = start()
    until(lambda: "ready on" in first.text() or first.process.poll() is not None, "the first boot")
    refused_text = start()
    assert refused_text.process.wait(DEADLINE_S) == 1
    assert "already serves" in refused_text.text()
    with connect(str(first.socket), name="test", timeout=DEADLINE_S) as client:
        assert client.fsck().problems == ()
        children = first.children()
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(DEADLINE_S) == 0
    assert all(is_gone(pid) for pid in children) and not first.socket.exists()


@pytest.mark.e2e
def test_shutdown_while_the_driver_is_dead_or_hangs(start: Start) -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        daemon = start("--sim", '{"ns_per_pass": 20000000}')
        until(lambda: "ready on" in daemon.text() or daemon.process.poll() is not None, "boot")  # noqa: B023
        with connect(str(daemon.socket), name="test", timeout=DEADLINE_S) as client:
            driver = client.tiers().tiers[0].driver_pid
            client.alloc_context().append(tokens=[1, 2])
            os.kill(driver, number)
            client.shutdown()
        assert daemon.process.wait(DEADLINE_S) == 0, daemon.text()
        assert is_gone(driver) and not daemon.socket.exists()


@pytest.mark.e2e
def test_limits_of_groups_are_there_from_the_start(start: Start, tmp_path: Path) -> None:
    """4 KiB of frames of 1 layer x 2 x 1 head x 16 tokens x 2 x 2 bytes, which are 128: 32 of them."""
    file = tmp_path / "groups.toml"
    file.write_text('["uid:7"]\nhbm = { hard = "1KiB", soft = 4 }\nweight = 300\n["uid:7/batch"]\ncontexts.hard = 2\n')
    daemon = start("--groups", str(file))
    until(lambda: "ready on" in daemon.text() or daemon.process.poll() is not None, "boot")
    with connect(str(daemon.socket), name="test", timeout=DEADLINE_S) as client:
        assert {row.capacity_frames for row in client.tiers().tiers} == {32}
        rows = {row.name: row for row in client.groups().rows}
        assert [limit for limit in rows["uid:7"].limits if limit.hard] == [LimitRow("hbm", 0, 4, 8)]
        assert rows["uid:7"].weight == 300
        assert [limit for limit in rows["uid:7/batch"].limits if limit.hard] == [LimitRow("contexts", 0, 0, 2)]
        client.setlimit("uid:7", "hbm", 0, 0)  # for as long as it runs
        client.shutdown()
    assert daemon.process.wait(DEADLINE_S) == 0, daemon.text()


def test_a_full_disk_leaves_no_half_of_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BootError, match="No space left on device"):
        boot.read_secret(tmp_path / "state")
    assert list((tmp_path / "state").iterdir()) == []
    monkeypatch.undo()
    secret = boot.read_secret(tmp_path / "state")
    assert len(secret) == 16 and boot.read_secret(tmp_path / "state") == secret
    assert (tmp_path / "state" / "secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["secret"]


def test_two_first_boots_agree_about_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one makes its secret between the first one's look and its link."""
    link = os.link
    other: list[bytes] = []

    def slow_link(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        monkeypatch.setattr(os, "link", link)
        (tmp_path / "other").write_bytes(b"0123456789abcdef")
        link(tmp_path / "other", target)
        other.append(Path(target).read_bytes())
        link(source, target)

    monkeypatch.setattr(os, "link", slow_link)
    assert boot.read_secret(tmp_path) == other[0] == b"0123456789abcdef"
