"""`attnix boot`: in the foreground, in the background, and when it cannot."""

from __future__ import annotations

import inspect
import os
import re
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from attnix import boot as booting
from attnix.syscalls import connect
from attnix.userland import launch
from attnix.userland.commands.boot import boot

from .conftest import COMMAND, Attnix

SIM = ("--model", "sim", "--hbm", "1MiB", "--window", "256", "--max-contexts", "16")


@pytest.fixture
def socket(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = str(tmp_path / "run" / "a.sock")
    monkeypatch.setenv("ATTNIX_SOCKET", path)
    return path


def test_in_the_background_until_shutdown(socket: str, attnix: Attnix) -> None:
    said = attnix("boot", *SIM, "--daemon", "--json")
    assert said.status == 0, said.err
    try:
        assert said.json["socket"] == socket
        assert Path(said.json["log"]) == Path(f"{socket}.log")
        assert Path(said.json["log"]).stat().st_mode & 0o077 == 0
        assert attnix("uname", "--json").json["pid"] == said.json["pid"]
        assert attnix("run", "--tokens", "1,2,3", "-n", "4", "--json").json["reason"] == "length"
        free = attnix("free", "--json").json["tiers"][0]
        assert free["state"] == "up"
        assert free["driver_pid"] != said.json["pid"], "the driver is a process of its own"

        second = attnix("boot", *SIM, "--daemon")
        assert second.status == 1
        assert "already serves" in second.err
        assert str(said.json["pid"]) in second.err
        assert attnix("fsck").status == 0, "the first one was not harmed"
    finally:
        down = attnix("shutdown")
    assert down.status == 0
    assert attnix("ps").status == 1
    assert not os.path.exists(socket)


def test_a_killed_driver_comes_back(socket: str, attnix: Attnix, until: Any) -> None:
    """What the demo rests on: its pid is in `free`, and the restart is counted there."""
    assert attnix("boot", *SIM, "-d").status == 0
    try:
        pid = attnix("free", "--json").json["tiers"][0]["driver_pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: attnix("free", "--json").json["tiers"][0]["restarts"] == 1, "the restart")
        assert attnix("run", "--tokens", "1,2", "-n", "3").status == 0
    finally:
        attnix("shutdown")


def test_run_says_what_it_waits_for_while_the_system_sleeps(socket: str, attnix: Attnix) -> None:
    assert attnix("boot", *SIM, "--sim-tier", "1MiB", "--daemon").status == 0
    try:
        assert attnix("sleep").status == 0
        asked = [*COMMAND, "run", "--tokens", "1,2", "-n", "3"]
        process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            assert select.select([process.stderr], [], [], 20)[0], "it says nothing"
            assert process.stderr.readline() == "attnix: the system is asleep: this waits for `attnix wake`\n"
            assert attnix("wake").status == 0
            said, more = process.communicate(timeout=30)
        finally:
            process.kill()
            process.communicate()
        assert (said.count(","), more, process.returncode) == (2, "", 0)
    finally:
        attnix("shutdown")


def test_in_the_foreground_until_it_is_told_to_stop(socket: str) -> None:
    process = subprocess.Popen([*COMMAND, "boot", *SIM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == f"attnix: ready on {socket}\n"
        with connect(socket) as system:
            assert system.uname().pid == process.pid, "it took the command's place"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_without_the_model_it_says_how_to_get_it(socket: str, attnix: Attnix) -> None:
    said = attnix("boot", "--daemon")
    assert said.status == 1
    assert "attnix pull smollm2" in said.err
    assert not os.path.exists(socket)


def test_a_file_that_is_no_model(socket: str, attnix: Attnix, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF and nothing else")
    said = attnix("boot", "--model", str(path), "--daemon")
    assert said.status == 1
    assert "status 1" in said.err
    assert "cannot boot" in said.err
    assert not os.path.exists(socket)


def test_a_driver_that_cannot_start_is_quoted(socket: str, attnix: Attnix) -> None:
    said = attnix("boot", *SIM, "--sim", '{"vocab": "many"}', "--daemon")
    assert said.status == 1
    assert "vocab" in said.err and said.err.count("cannot be started") == 1, said.err
    assert "info:" not in said.err, "what went well is not why"


@pytest.mark.parametrize("flags", [("--numerics", "sloppy"), ("--hbm", "lots"), ("--accels", "0"), ("--accels", "x")])
def test_wrong_flags_are_status_2(socket: str, attnix: Attnix, flags: tuple[str, ...]) -> None:
    said = attnix("boot", *SIM, *flags, "--daemon")
    assert said.status == 2
    assert flags[1] in said.err or flags[0] in said.err
    assert len(said.err.splitlines()) <= 6, "what was wrong, and not below a screen of all options"


def test_a_daemon_that_never_gets_ready_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says why and then hangs: its words are shown, and it is gone."""
    log = tmp_path / "d.log"
    monkeypatch.setattr(
        launch, "boot_command", lambda flags: ["sh", "-c", 'echo $$ "still loading" >&2; exec sleep 60', *flags]
    )
    with pytest.raises(launch.BootFailed, match="within 3 s") as failed:
        launch.launch([], str(tmp_path / "s"), str(log), 3.0)
    pid = re.search(r"(\d+) still loading", str(failed.value))
    assert pid
    assert not os.path.exists(f"/proc/{pid[1]}")


def test_only_the_new_lines_of_the_log_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "d.log"
    log.write_text("from yesterday\n")
    monkeypatch.setattr(launch, "boot_command", lambda flags: ["sh", "-c", "echo today >&2; exit 3"])
    with pytest.raises(launch.BootFailed) as failed:
        launch.launch([], str(tmp_path / "s"), str(log), 30.0)
    assert str(failed.value) == "the daemon ended with status 3:\n  today"


def test_warnings_are_told_though_it_boots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["attnix: info: hbm0: up", "attnix: warning: journal: another attnix keeps it", "attnix: info: dram0: up"]
    script = "; ".join(f"echo '{line}' >&2" for line in lines) + "; echo attnix: ready on s; exec sleep 60"
    monkeypatch.setattr(launch, "boot_command", lambda flags: ["sh", "-c", script])
    launched = launch.launch([], str(tmp_path / "s"), str(tmp_path / "d.log"), 30.0)
    launch.stop(launched.process)
    assert launched.warnings == [lines[1]]
    monkeypatch.setattr(
        launch, "boot_command", lambda flags: ["sh", "-c", script.replace("ready on s; exec sleep 60", "no; exit 1")]
    )
    with pytest.raises(launch.BootFailed) as failed:
        launch.launch([], str(tmp_path / "s"), str(tmp_path / "d.log"), 30.0)
    assert lines[1] in str(failed.value)


def test_a_log_that_cannot_be_written(socket: str, attnix: Attnix, tmp_path: Path) -> None:
    said = attnix("boot", *SIM, "--daemon", "--log", str(tmp_path))
    assert (said.status, "cannot be written" in said.err) == (1, True)


def test_it_has_every_flag_of_the_boot_module(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        booting.parse(["--help"])
    wanted = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    names = {f"--{name.replace('_', '-')}" for name in inspect.signature(boot).parameters}
    assert wanted - names == set()
    assert names - wanted == {"--daemon", "--log", "--wait", "--as-json"}
