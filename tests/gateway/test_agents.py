"""Ten-turn tool-calling loops of official clients and agent frameworks, unchanged, against a real gateway and daemon.

What the model says is scripted: ten tool calls, then an answer.  Shown of each loop: every call reaches its tool, the context
is in TOOL_WAIT while the tool works (once `attnix ps` itself is asked), and each turn computes its new tokens and at most one
block of what was there before.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from typing import Any

import agents
import anthropic
import openai
import pydantic_ai
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from attnix.syscalls import Client
from attnix.syscalls.types import ContextRow

from .conftest import Gateway
from .rig import BLOCK, Served, calls, environment, says

TURNS = 10
SCRIPTS = [says(calls("weather", city=f"city {n}")) for n in range(TURNS)] + [says("It rains everywhere.")]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}}]


def states(client: Client) -> list[str]:
    """Of the conversations that `attnix ps` shows."""
    return [p.state for p in client.ps().processes if p.name not in ("gateway", "inspector")]


class Tool:
    """The tool of every loop: notes what `ps` says while it works, and once what `attnix ps` shows."""

    def __init__(self, served: Served) -> None:
        self.asked: list[str] = []
        self.states: list[list[str]] = []
        self.turns: list[ContextRow] = []  # the context when each turn had ended
        self.shown: list[list[str]] = []  # words of a line each
        self._client = served.daemon.client()
        self._ps = [sys.executable, "-m", "attnix.userland.cli", "ps", "--socket", served.daemon.socket]

    def weather(self, city: str) -> str:
        self.asked.append(city)
        self.states.append(states(self._client))
        self.turns.append(self._context())
        if len(self.asked) == TURNS:
            said = subprocess.run(self._ps, capture_output=True, text=True, env=environment(), check=True)
            self.shown = [line.split() for line in said.stdout.splitlines()]
        return f"rain in {city}"

    def check(self) -> None:
        assert self.asked == [f"city {n}" for n in range(TURNS)]
        assert self.states == [["tool_wait"]] * TURNS
        assert self.shown[0][:4] == ["PID", "GROUP", "NAME", "STATE"] and self.shown[0][-2:] == ["TOOL", "UNTIL"]
        assert [
            (words[2:4], "weather" in words) for words in self.shown[1:] if words[2] not in ("gateway", "inspector")
        ] == [(["local", "tool_wait"], True)]
        self.turns.append(self._context())
        assert len({row.cid for row in self.turns}) == 1, "one context from the first turn to the last"
        for before, after in itertools.pairwise(self.turns):
            computed = after.usage.computed_tokens - before.usage.computed_tokens
            assert computed <= after.tokens - before.tokens + BLOCK, (
                "at most one block of what was there is computed again"
            )
        self._client.close()

    def _context(self) -> ContextRow:
        (row,) = [c for p in self._client.ps().processes for c in p.contexts]
        return row


def test_openai(gateway: Gateway) -> None:
    served = gateway(scripts=SCRIPTS, window_tokens=8192)
    tool = Tool(served)
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": "What is the weather in ten cities?"}]
    spent: list[Any] = []
    while True:
        got = client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS, temperature=0)
        spent.append(got.usage)
        message = got.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        assert got.choices[0].finish_reason == "tool_calls"
        asked: list[Any] = list(message.tool_calls)
        for call in asked:
            result = tool.weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content == "It rains everywhere."
    tool.check()
    client.close()
    for before, after in itertools.pairwise(spent):
        assert before and after and after.prompt_tokens_details
        there = before.prompt_tokens + before.completion_tokens
        assert there - BLOCK <= after.prompt_tokens_details.cached_tokens < after.prompt_tokens
        computed = after.model_extra["attnix"]["computed_tokens"]
        assert computed <= after.prompt_tokens - there + BLOCK


def test_anthropic(gateway: Gateway) -> None:
    served = gateway(scripts=SCRIPTS, window_tokens=8192)
    tool = Tool(served)
    client = anthropic.Anthropic(base_url=served.url, api_key="none")
    described: list[Any] = [{"name": "weather", "description": "", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in ten cities?"}]
    spent = []
    for turn in range(TURNS + 1):
        asked: dict[str, Any] = {
            "model": "scripted", "max_tokens": 200, "messages": messages, "tools": described, "system": "Be terse.",
        }  # fmt: skip
        if turn % 2:
            with client.messages.stream(**asked) as streamed:
                got = streamed.get_final_message()
        else:
            got = client.messages.create(**asked)
        spent.append(got.usage)
        messages.append({"role": "assistant", "content": got.content})
        used = [block for block in got.content if block.type == "tool_use"]
        if not used:
            break
        assert got.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": tool.weather(**dict[str, Any](use.input))}
            for use in used
        ]
        messages.append({"role": "user", "content": results})
    assert [block.text for block in got.content if block.type == "text"] == ["It rains everywhere."]
    assert got.stop_reason == "end_turn"
    tool.check()
    client.close()
    for before, after in itertools.pairwise(spent):
        there = (before.input_tokens or 0) + (before.cache_read_input_tokens or 0) + before.output_tokens
        assert (after.cache_read_input_tokens or 0) >= there - BLOCK


def test_openai_agents(gateway: Gateway) -> None:
    served = gateway(scripts=SCRIPTS, window_tokens=8192)
    tool = Tool(served)
    agents.set_tracing_disabled(True)

    async def work() -> str:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none")
        model = agents.OpenAIChatCompletionsModel("scripted", client)
        weather = agents.function_tool(tool.weather)
        agent = agents.Agent(name="traveller", instructions="Be terse.", model=model, tools=[weather])
        result = await agents.Runner.run(agent, "What is the weather in ten cities?", max_turns=TURNS + 2)
        await client.close()
        return str(result.final_output)

    assert asyncio.run(work()) == "It rains everywhere."
    tool.check()


def test_pydantic_ai(gateway: Gateway) -> None:
    served = gateway(scripts=SCRIPTS, window_tokens=8192)
    tool = Tool(served)

    async def work() -> str:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none")
        model = OpenAIChatModel("scripted", provider=OpenAIProvider(openai_client=client))
        agent = pydantic_ai.Agent(model, instructions="Be terse.", tools=[tool.weather])
        result = await agent.run("What is the weather in ten cities?")
        await client.close()
        return str(result.output)

    assert asyncio.run(work()) == "It rains everywhere."
    tool.check()
