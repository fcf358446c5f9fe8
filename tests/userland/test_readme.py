"""README.md keeps its word: its Python runs, its commands exist, its tree is the tree."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer.main

from attnix.syscalls import connect
from attnix.userland import cli
from attnix.userland.models import find_model

from .conftest import COMMAND, Attnix

README = Path(__file__).resolve().parents[2] / "README.md"
ROOT = README.parent


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.e2e
@pytest.mark.model
def test_its_python_runs_against_the_default_model(
    tmp_path: Path, attnix: Attnix, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_model("smollm2") is None:
        assert not os.environ.get("CI"), "`make test` pulls SmolLM2 first"
        pytest.skip("SmolLM2 is not there: run `attnix pull smollm2`")
    programs = blocks("python")
    assert len(programs) == 3
    assert len([line for line in programs[0].splitlines() if line.strip()]) <= 12
    socket = str(tmp_path / "run" / "s.sock")
    monkeypatch.setenv("ATTNIX_SOCKET", socket)
    booted = subprocess.run(
        [*COMMAND, "boot", "--daemon", "--numerics", "invariant", "--state-dir", str(tmp_path / "state")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert booted.returncode == 0, booted.stderr
    try:
        said = subprocess.run([sys.executable, "-c", programs[0]], capture_output=True, text=True, timeout=120)
        assert (said.returncode, said.stderr) == (0, "")
        merry, grim, told = said.stdout.split("... ")[1], said.stdout.split("... ")[2], said.stdout.splitlines()[-1]
        assert all(len(text) > 20 for text in (merry, grim, told))
        with connect(socket) as system:
            assert system.fsck().problems == ()
            # The story as if nobody had forked it.
            context = system.alloc_context()
            context.append(messages=[("user", "Tell me a story about a fox and a crow.")])
            alone = context.generate(max_tokens=60).text
        assert alone in said.stdout, "the fork did not change what the first context said"
        # The agent, with a tool that is in less of a hurry to be looked at.
        agent = programs[2].replace("sleep 5", "sleep 0.1").replace("eta=5.0", "eta=0.1")
        said = subprocess.run([sys.executable, "-c", agent], capture_output=True, text=True, timeout=120)
        assert (said.returncode, said.stderr) == (0, "")
        assert "appended=21, waited_ms=" in said.stdout and "recomputed_tokens=0" in said.stdout
    finally:
        assert attnix("shutdown").status == 0


@pytest.mark.e2e
@pytest.mark.model
def test_its_named_contexts_survive_a_killed_daemon(
    tmp_path: Path, attnix: Attnix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The section on tiers, as it stands there: boot line, program, kill -9, boot, one more line."""
    if find_model("smollm2") is None:
        assert not os.environ.get("CI"), "`make test` pulls SmolLM2 first"
        pytest.skip("SmolLM2 is not there: run `attnix pull smollm2`")
    socket = str(tmp_path / "run" / "s.sock")
    monkeypatch.setenv("ATTNIX_SOCKET", socket)
    console = "\n".join(blocks("console"))
    line = re.search(r"^\$ attnix (boot --daemon --hbm .*)$", console, re.MULTILINE)
    later = re.search(r"^\$ python -c '(.*)'$", console, re.MULTILINE)
    assert line and later

    def boot() -> None:
        state = ["--state-dir", str(tmp_path / "state")]
        booted = subprocess.run([*COMMAND, *line[1].split(), *state], capture_output=True, text=True)
        assert booted.returncode == 0, booted.stderr

    boot()
    said = subprocess.run([sys.executable, "-c", blocks("python")[1]], capture_output=True, text=True, timeout=300)
    assert (said.returncode, said.stderr) == (0, "")
    with connect(socket) as system:
        assert len(system.names().rows) == 6
        deadline = time.monotonic() + 60
        while system.tiers().tiers[2].reclaimable_frames < 6 * 28 and time.monotonic() < deadline:
            time.sleep(0.1)  # blocks of named contexts go down by themselves
        os.kill(system.uname().pid, signal.SIGKILL)
    boot()
    try:
        said = subprocess.run([sys.executable, "-c", later[1]], capture_output=True, text=True, timeout=300)
        assert (said.returncode, said.stderr) == (0, "")
        usage = re.search(r"computed_tokens=(\d+), .*nvme_tokens=(\d+)", said.stdout)
        assert usage and int(usage[1]) <= 50 and int(usage[2]) == 448
    finally:
        assert attnix("shutdown").status == 0


def test_its_commands_exist(attnix: Attnix) -> None:
    """Every `attnix WORD` of README and docs is a command, and a console block's options are options."""
    text = "".join(path.read_text() for path in [README, *sorted((ROOT / "docs").glob("*.md"))])
    named = set(re.findall(r"(?:`|\$ )attnix ([a-z]+(?:-[a-z]+)*)\b", text))
    group = typer.main.get_command(cli.app)
    known = set(getattr(group, "commands", {}))
    assert named, "no command is named"
    assert named - known == set()
    for line in re.findall(r"^\$ attnix (.*)$", text, re.MULTILINE):
        words = line.split()
        offered = attnix(words[0], "--help").out
        assert all(word in offered for word in words if word.startswith("--")), line


def test_all_commands_take_json_but_those_it_names() -> None:
    named = re.search(r"all\nbut `(\w+)` and `(\w+)` take `--json` \(`(\w+)` with a FILE\)", README.read_text())
    assert named

    def without(command: Any, name: str) -> list[str]:
        inner = getattr(command, "commands", None)
        if inner is not None:
            return [found for word, each in inner.items() for found in without(each, f"{name} {word}".strip())]
        return [] if any("--json" in parameter.opts for parameter in command.params) else [name]

    lacking = without(cli.command(), "")  # the benches' options are those of their own processes
    assert {name for name in lacking if not name.startswith("bench ")} == set(named.groups())


def test_the_tests_it_names_are_there() -> None:
    named = set(re.findall(r"`(tests/[\w./-]+)`", README.read_text()))
    assert {"tests/gateway/test_agents.py", "tests/dashboard/", "tests/userland/test_doctor.py"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_its_tree_is_the_tree() -> None:
    """The indented listing names folders that exist, at their depth."""
    listing = re.search(r"## The code, in reading order\n\n(.*?)\n\n", README.read_text(), re.DOTALL)
    assert listing
    path: list[str] = []
    found = []
    for line in listing[1].splitlines():
        match = re.match(r"    ( *)([\w/]+/) ", line)
        assert match, line
        depth = len(match[1]) // 2
        path = [*path[:depth], match[2]]
        found.append("".join(path))
    assert len(found) > 10
    assert [name for name in found if not (ROOT / name).is_dir()] == []
    for folder in ("commands", "shell"):
        words = re.search(rf"^ +{folder}/ +(.*)$", listing[1], re.MULTILINE)
        assert words
        files = {p.stem for p in (ROOT / "userland" / folder).glob("*.py")} - {"__init__"}
        assert set(words[1].split()) == files


def test_its_links_lead_somewhere() -> None:
    for path in [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([\w./-]+\.(?:md|py|toml))\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
