"""docs/writing-a-program.md: its program runs, and what it says of files and limits is so."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.syscalls import Context, connect
from attnix.syscalls.session import Session
from attnix.userland import programs
from attnix.userland.programs import beam_search, best_of_n, self_consistency

from .conftest import Serve

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "writing-a-program.md").read_text()
PROGRAMS = ROOT / "userland" / "programs"
PYTHON = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


def test_its_program_runs(serve: Serve) -> None:
    path = serve(window_tokens=1024, frames=600, script=list(b"because"))
    program, _agent = PYTHON
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stderr) == (0, "")
    prompt = list(b"system:You are terse.;user:Why is the sky blue?;")
    first = reference_tokens(prompt, 48, script=list(b"because"))
    assert said.stdout.startswith("because")
    assert " -> because" in said.stdout
    with connect(path) as system:
        counters = system.vmstat().counters
    assert len(first) == 48 and counters["contexts"] == 0


def test_its_agent_runs(serve: Serve) -> None:
    serve(window_tokens=4096, frames=600, script=list(b"rain"))
    said = subprocess.run([sys.executable, "-c", PYTHON[1]], capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith("answer rain")


def test_what_it_names_is_there() -> None:
    named = set(re.findall(r"`(\w+\.py)`", DOCUMENT))
    assert {"beam.py", "best_of_n.py", "self_consistency.py", "agent.py", "chat.py", "batch.py"} <= named
    assert not [name for name in named if not (PROGRAMS / name).exists()]
    for name in ("child_of", "patiently", "run_agent", "Tool"):
        assert name in DOCUMENT and hasattr(programs, name)


@pytest.mark.parametrize("path", sorted(PROGRAMS.rglob("*.py")), ids=lambda path: path.name)
def test_programs_are_short_and_use_calls_only(path: Path) -> None:
    """At most 150 lines, and nothing but the system's calls behind them."""
    source = path.read_text()
    assert source.count("\n") <= 150
    imported = set(re.findall(r"^ *from (\S+) import|^ *import (\S+)", source, re.MULTILINE))
    modules = {a or b for a, b in imported}
    foreign = {m for m in modules if m.startswith("attnix.") and not m.startswith("attnix.syscalls")}
    assert foreign == set() and not {"torch", "numpy", "transformers"} & modules


DOES = {"fork", "forward", "append", "kill"}  # what issue 4 wants these written with
HOUSE = {"spawn", "wait"}  # a fork into a process of its own, and what is left of it when it was killed
LOOKS = {"uname", "stat", "read"}  # change nothing


@pytest.mark.parametrize(
    ("search", "calls"),
    [
        (lambda context: best_of_n(context, 3, 4), DOES | HOUSE | LOOKS),
        (lambda context: best_of_n(context, 3, 4, stop="x"), DOES | HOUSE | LOOKS),
        (lambda context: self_consistency(context, len, 3, 4), DOES | HOUSE | LOOKS),
        # `forward` appends here too.  A beam that is dropped is one context of several in a process, and kill ends it whole.
        (lambda context: beam_search(context, 3, 4), DOES - {"append"} | HOUSE | LOOKS - {"read"} | {"release"}),
    ],
    ids=["best of n", "with a stop string", "self-consistency", "beam search"],
)
def test_searches_are_made_of_four_calls(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, search: Callable[[Context], object], calls: set[str]
) -> None:
    with connect(serve()) as system, system.alloc_context() as context:
        context.append("What is 6 x 7?")
        asked: list[str] = []
        request = Session.request

        def noted(session: Session, name: str, args: Any) -> tuple[int, bytes]:
            asked.append(name)
            return request(session, name, args)

        monkeypatch.setattr(Session, "request", noted)
        search(context)
        monkeypatch.undo()
    assert set(asked) == calls
