"""The real model behind the real daemon: tool calls that a grammar enforces, JSON by a schema, and KV that was in dram meanwhile."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from attnix.syscalls import connect

from .rig import BLOCK, DEADLINE_S, Process, environment, until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

TURNS = 10
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "forecast", "description": "The weather of a city.", "parameters": SCHEMA},
    }
]


@pytest.fixture(scope="module")
def system(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(URL of a gateway, socket of its daemon)"""
    directory = tmp_path_factory.mktemp("real")
    socket = str(directory / "run" / "a.sock")
    boot = [
        sys.executable,
        "-m",
        "attnix.boot",
        "--model",
        str(smollm2),
        "--socket",
        socket,
        "--state-dir",
        str(directory),
        "--sysctl",
        "sched.max_wait_ms=0",  # nobody is refused, however slow this machine is
    ]
    daemon = Process([*boot, "--hbm", "96MiB", "--dram", "96MiB"])
    serve = Process([sys.executable, "-m", "attnix.userland.cli", "serve", "--port", "0", "--socket", socket])
    try:
        assert "ready" in daemon.said
        url = serve.said.rpartition(" ")[2]
        until(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the gateway's connection, and its words")
        yield url, socket
    finally:
        serve.stop()
        daemon.stop()


# What the quick start's two programs print, as the clients write their answers: text, why it ended, tokens of it.
ANSWERS = (
    (r"Message\(content=(['\"]).+?\1, ", r"finish_reason='(length|stop)'", r"\bcompletion_tokens=(\d+)"),
    (r"TextBlock\(.*\btext=(['\"]).+?\1, ", r"stop_reason='(max_tokens|end_turn)'", r"\boutput_tokens=(\d+)"),
)


def test_ten_enforced_tool_calls_one_of_which_returns_from_dram(system: tuple[str, str]) -> None:
    url, socket = system
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=DEADLINE_S * 4)
    messages: list[Any] = [{"role": "user", "content": "I travel to ten cities. Ask for the forecast of each."}]
    spent: list[Any] = []
    with connect(socket, name="inspector") as inspector:
        for turn in range(TURNS):
            got = client.chat.completions.create(
                model="", messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=60,
                temperature=0,
            )  # fmt: skip
            spent.append(got.usage)
            made: list[Any] = list(got.choices[0].message.tool_calls or ())
            (call,) = made
            arguments = json.loads(call.function.arguments)
            assert set(arguments) == {"city", "days"} and 1 <= arguments["days"] <= 9 and len(arguments["city"]) <= 16
            (row,) = [c for p in inspector.ps().processes if p.name == "local" for c in p.contexts]
            assert (row.state, row.tool) == ("tool_wait", "forecast")
            if turn == 4:
                moved = inspector.demote(0, "dram", row.cid)
                assert moved.resident_blocks >= row.tokens // BLOCK
            messages += [
                got.choices[0].message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": f"{arguments['days']} days of rain"},
            ]
        done = client.chat.completions.create(
            model="", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=12, temperature=0
        )
        (row,) = [c for p in inspector.ps().processes if p.name == "local" for c in p.contexts]
        assert row.usage.computed_tokens <= row.tokens + (TURNS + 1) * BLOCK
    spent.append(done.usage)
    for turn, (before, after) in enumerate(itertools.pairwise(spent)):
        there = before.prompt_tokens + before.completion_tokens
        assert after.prompt_tokens_details.cached_tokens >= there - BLOCK
        assert (after.model_extra["attnix"]["dram_tokens"] > 0) == (turn == 4), "that turn's KV came from dram"
    client.close()


def test_json_by_a_schema(system: tuple[str, str]) -> None:
    client = openai.OpenAI(base_url=f"{system[0]}/v1", api_key="none", timeout=DEADLINE_S * 4)
    form: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        got = client.chat.completions.create(
            model="", messages=[{"role": "user", "content": "Where do I go, for how long?"}], response_format=form, seed=seed,
            max_tokens=60,
        )  # fmt: skip
        value = json.loads(got.choices[0].message.content or "")
        assert got.choices[0].finish_reason == "stop" and set(value) == {"city", "days"} and 1 <= value["days"] <= 9
    client.close()


def test_the_quick_start_of_the_docs(system: tuple[str, str]) -> None:
    """Its Python, as it stands there, with this gateway's address: both print a whole answer of at most 40 tokens."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "gateway.md").read_text()
    blocks = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) == 2
    for block, (text, ended, spent) in zip(blocks, ANSWERS, strict=True):
        script = block.replace("http://127.0.0.1:8000", system[0])
        said = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            capture_output=True,
            text=True,
            env=environment() | dict(os.environ),
            timeout=DEADLINE_S * 4,
        )
        assert said.returncode == 0, said.stderr
        assert re.search(text, said.stdout) and re.search(ended, said.stdout), said.stdout
        tokens = re.search(spent, said.stdout)
        assert tokens and 0 < int(tokens[1]) <= 40, said.stdout
