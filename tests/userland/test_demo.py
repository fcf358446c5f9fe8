"""`attnix demo`, really run: what it prints adds up, and what it claims is so."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from attnix.userland.demo.page import tail
from attnix.userland.demo.story import AGENTS, KILL_AFTER_TOKENS
from attnix.userland.models import find_model

from .conftest import COMMAND

BLOCK_TOKENS = 16


@pytest.mark.e2e
@pytest.mark.model
@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    if find_model("smollm2") is None:
        assert not os.environ.get("CI"), "`make test` pulls SmolLM2 first"
        pytest.skip("SmolLM2 is not there: run `attnix pull smollm2`")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    said = subprocess.run([*COMMAND, "demo", "--json"], capture_output=True, text=True, env=environment, timeout=300)
    assert said.returncode == 0, said.stderr
    done: dict[str, Any] = json.loads(said.stdout)

    assert done["different"] == [], "killed, undisturbed and stateless: the same tokens"
    assert [answer["agent"] for answer in done["answers"]] == [agent.name for agent in AGENTS]
    assert all(answer["reason"] in ("stop", "length") for answer in done["answers"]), "no stream saw an error"
    killed = done["killed"]
    assert killed["driver_pid"] != killed["next_pid"]
    assert killed["streams"] == len(AGENTS)
    assert killed["tokens_so_far"] >= len(AGENTS) * KILL_AFTER_TOKENS
    assert sum(len(answer["tokens"]) for answer in done["answers"]) > killed["tokens_so_far"] + 4 * 20

    # By hand: stateless reads the system prompt n times instead of once; a fork computes only what is past the last
    # full block again.  Up to one row per context more or less: `generate` may come before or after its prefill.
    n, prompt = len(AGENTS), done["system_prompt_tokens"]
    saved = (n - 1) * prompt - n * (prompt % BLOCK_TOKENS)
    assert abs(done["stateless"]["computed_tokens"] - done["shared"]["computed_tokens"] - saved) <= n
    blocks = prompt // BLOCK_TOKENS
    assert abs(done["stateless"]["mapped_frames"] - done["shared"]["mapped_frames"] - (n - 1) * blocks) <= n

    page = said.stderr
    assert f"kill -9 {killed['driver_pid']}" in page
    assert "token for token" in page
    assert all(agent.question in page for agent in AGENTS)
    assert max(map(len, page.splitlines())) <= 100
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    for pid in (killed["driver_pid"], killed["next_pid"]):
        assert not os.path.exists(f"/proc/{pid}"), "no process is left behind"


@pytest.mark.parametrize(("text", "shown"), [("short", "short"), ("a\n b", "a b"), ("0123456789", "…56789")])
def test_the_end_of_a_stream(text: str, shown: str) -> None:
    assert tail(text, 6) == shown
