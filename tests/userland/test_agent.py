"""The agent loop against a real daemon, with a scripted mind: what it says is given, everything else is the real thing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from attnix.syscalls import AsyncClient, AsyncContext, SyscallError, aconnect, connect
from attnix.userland.programs.agent import Decide, Outcome, by_generating, run_agent
from attnix.userland.programs.tool_calls import BadCall, ToolCall, described, parse, response
from attnix.userland.programs.tools import CALCULATOR, Tool, ToolError

from .conftest import Attnix, Serve


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


@asynccontextmanager
async def nothing_left(path: str) -> AsyncIterator[AsyncClient]:
    """A connection on which, afterwards, no context and no process of an agent is left."""
    async with aconnect(path, name="test") as system:
        yield system
        left: Any = None
        async with asyncio.timeout(20):  # others that were connected may not have been missed yet
            while left != (0, ["test"]):
                names = [row.name for row in (await system.ps()).processes]
                left = ((await system.vmstat()).counters["contexts"], names)


def saying(*texts: str) -> Decide:
    """A mind that says one after another."""
    left = list(texts)

    async def decide(context: AsyncContext) -> str:
        text = left.pop(0)
        await context.append(text)
        return text

    return decide


def call(tool: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}"


def tool(run: Callable[..., Any], name: str = "tool", time_limit_s: float = 10.0, eta_s: float | None = None) -> Tool:
    return Tool(name, "Does something.", {"text": "what"}, run, time_limit_s=time_limit_s, eta_s=eta_s)


def ask(path: str, tools: list[Tool], *said: str, **options: Any) -> Outcome:
    async def work() -> Outcome:
        async with nothing_left(path) as system:
            return await run_agent(system, "How much?", tools, decide=saying(*said), **options)

    outcome: Outcome = run(work())
    return outcome


# -- the text format ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"x": "1"}}',
        '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call> and more',
        'I will look.\n<tool_call>\n```json\n{"name": "f", "arguments": {"x": "1"}}\n```\n',
        '<tool_call> call: {"tool": "f", "args": {"x": "1"}} please',
        '<tool_call>{"function": "f", "parameters": {"x": "1"}}',
        '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"1\\"}"}',
        '<tool_call>{"name": "f", "x": "1"}',
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}',
        '<tool_call>no</tool_call> once more: <tool_call>{"name": "f", "arguments": {"x": "1"}}',
        '<tool_call>{"name": "f", "arguments": {"x": "1"}}}}',
        '<tool_call>{"name": "g", "arguments": {"x": "</tool_call>"}}</tool_call><tool_call>{"name": "f", "x": "1"}',
        '<tool_call>{"so <tool_call>{"name": "f", "x": "1"}',
    ],
)
def test_a_call_is_read_through_the_usual_junk(text: str) -> None:
    assert parse(text) == ToolCall("f", {"x": "1"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<tool_call>", "no JSON object follows"), ("<tool_call>calculator(2)", "no JSON object follows"),
        ('<tool_call>{"name": "f", "arg', "not JSON"), ("<tool_call>{'name': 'f'}", "not JSON"),
        ('<tool_call>{"arguments": {}}', "names no tool"), ('<tool_call>{"name": 3}', "names no tool"),
        ('<tool_call>{"name": "f", "arguments": [1]}', "no JSON object: write"),
        ('<tool_call>{"name": "f", "arguments": "x"}', "text and no JSON object"),
        ("<tool_call>" + '{"a":' * 5000, "not JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said(text: str, words: str) -> None:
    with pytest.raises(BadCall, match=words) as caught:
        parse(text)
    assert '<tool_call>{"name": "...", "arguments": {...}}</tool_call>' in str(caught.value)


def test_no_call_is_no_call() -> None:
    assert parse("It is 42.") is None
    assert parse('{"name": "f"}') is None


def test_tools_are_described_with_all_they_take() -> None:
    async def search(name: str = "", content: str = "") -> str:
        return ""

    told = described(
        [CALCULATOR, Tool("find", "Finds.", {"name": "its name", "content": "its text"}, search, ("name",))]
    )
    assert "- calculator: Evaluates an arithmetic expression" in told
    assert "- find: Finds. Arguments: name (its name), content (its text; may be left out)." in told


def test_long_answers_are_cut_in_the_middle() -> None:
    assert response("short") == "<tool_response>\nshort\n</tool_response>"
    said = response("a" * 3000 + "b" * 3000)
    assert "[2000 characters left out]" in said and said.count("a") > 1990 and said.count("b") > 1990


# -- the loop -------------------------------------------------------------------------------------------------------

WINDOW = {"window_tokens": 2048, "frames": 600}


def test_a_question_a_tool_and_an_answer(serve: Serve) -> None:
    path = serve(**WINDOW)
    outcome = ask(path, [CALCULATOR], "Let me see. " + call("calculator", expression="6 * 7"), " It is 42. ")
    assert (outcome.reason, outcome.answer) == ("answer", "It is 42.")
    (step,) = outcome.steps
    assert (step.call, step.result, step.failed) == (ToolCall("calculator", {"expression": "6 * 7"}), "42", False)


def noted(path: str) -> tuple[Outcome, list[str]]:
    """What becomes of a question, and what the model's calls gave the one tool that there is."""
    given: list[str] = []

    async def note(text: str) -> str:
        given.append(text)
        return "noted"

    async def work() -> Outcome:
        async with nothing_left(path) as system:
            return await run_agent(system, "?", [tool(note)], decide=by_generating(200, {"temperature": 0.0}))

    return run(work()), given


def test_a_tag_in_an_argument_does_not_end_the_call(serve: Serve) -> None:
    """The stop string ends the generation in the middle of the argument; the call goes on behind it."""
    written = "<tool_call>a</tool_call>"
    whole = f"{call('tool', text=written)}</tool_call>"
    cut = whole.index("</tool_call>") + len("</tool_call>")
    scripts = [[*whole[:cut].encode()], [*whole[cut:].encode()], [*b"Done.", 3]]
    path = serve(**WINDOW, scripts=scripts, stop_tokens=[3])
    outcome, given = noted(path)
    assert given == [written] and (outcome.reason, outcome.answer) == ("answer", "Done.")


def test_a_call_in_a_thought_is_none(serve: Serve) -> None:
    """The stop string ends the generation in the middle of the thought, which goes on behind it; and one that stays unfinished
    ends in words."""
    thought = f"<think>{call('tool', text='no')}</tool_call></think>"
    whole = f"{thought}{call('tool', text='yes')}"
    cut = whole.index("</tool_call>") + len("</tool_call>")
    scripts = [
        [*whole[:cut].encode()],
        [*f"{whole[cut:]}</tool_call>".encode()],
        [*f"<think>{call('tool', text='no')}".encode(), 3],
    ]
    path = serve(**WINDOW, scripts=scripts, stop_tokens=[3])
    outcome, given = noted(path)
    assert given == ["yes"] and outcome.reason == "answer"


def test_a_call_in_a_thought_that_the_prompt_began_is_none(serve: Serve) -> None:
    """As templates of models that always think have it."""
    thought = f"{call('tool', text='no')}</tool_call>"
    path = serve(**WINDOW, scripts=[[*thought.encode()], [*b"</think>Done.", 3]], stop_tokens=[3])
    generating = by_generating(200, {"temperature": 0.0})

    async def decide(context: AsyncContext) -> str:
        await context.append("<think>\n")
        return await generating(context)

    async def work() -> Outcome:
        async with nothing_left(path) as system:
            return await run_agent(system, "?", [tool(str)], decide=decide)

    outcome: Outcome = run(work())
    assert outcome == Outcome("answer", f"<think>{thought}</think>Done.", ())


def test_what_the_context_holds(serve: Serve) -> None:
    """The rig's template writes `role:content;` and its tokens are bytes: the log's length says what was appended."""
    path = serve(**WINDOW)
    first, second = call("calculator", expression="1+1"), "Two."
    lengths: list[int] = []
    mind = saying(first, second)

    async def watched(context: AsyncContext) -> str:
        said = await mind(context)
        lengths.append((await context.stat()).tokens)
        return said

    async def work() -> None:
        async with nothing_left(path) as system:
            await run_agent(system, "How much?", [CALCULATOR], decide=watched, instructions="Be brief.")

    run(work())
    prompt = f"system:Be brief.\n\n{described([CALCULATOR])};user:How much?;"
    back = f"</tool_call>user:{response('2')};"
    assert lengths == [len((prompt + first).encode()), len((prompt + first + back + second).encode())]


def test_the_kernel_knows_what_it_waits_for(serve: Serve) -> None:
    path = serve(**WINDOW)
    seen: list[Any] = []

    async def look(text: str = "") -> str:
        def rows() -> list[Any]:
            with connect(path, name="look") as other:
                return [(p.name, c.state, c.tool, c.due_ms) for p in other.ps().processes for c in p.contexts]

        seen.extend(await asyncio.to_thread(rows))
        return "seen"

    outcome = ask(path, [tool(look, eta_s=5.0)], call("tool"), "Done.")
    assert outcome.answer == "Done."
    ((name, state, what, due_ms),) = seen
    assert (name, state, what) == ("agent", "tool_wait", "tool")
    assert 0 < due_ms <= 5000


def test_whatever_a_tool_does_wrong_is_told_to_the_model(serve: Serve) -> None:
    path = serve(**WINDOW)

    async def refuses(text: str = "") -> str:
        raise ToolError("not that way")

    async def breaks(text: str = "") -> str:
        raise KeyError("oh")

    async def hangs(text: str = "") -> str:
        await asyncio.sleep(60)
        return "never"

    tools = [tool(refuses, "refuses"), tool(breaks, "breaks"), tool(hangs, "hangs", time_limit_s=0.1), CALCULATOR]
    outcome = ask(
        path, tools, call("refuses"), call("breaks"), call("hangs"), call("calculator", x="1"), call("nosuch"),
        "<tool_call>what?", "I give up.",
    )  # fmt: skip
    assert outcome.reason == "answer" and all(step.failed for step in outcome.steps)
    results = [step.result for step in outcome.steps]
    assert results[:3] == [
        "error: not that way",
        "error: breaks failed: KeyError: 'oh'",
        "error: hangs did not answer within 0.1 s and was stopped",
    ]
    assert "no argument 'x'" in results[3]
    assert "no tool 'nosuch'; there are: refuses, breaks, hangs, calculator" in results[4]
    assert "no JSON object follows" in results[5]


def test_a_deadline_that_the_kernel_sees_first(serve: Serve) -> None:
    """The wait is over, and with it the right to resume: the answer is appended like anything else, and is in the log."""
    path = serve(**WINDOW)
    lengths: list[int] = []

    async def late(text: str = "") -> str:
        async with aconnect(path) as other:
            while any(row.state == "tool_wait" for row in (await other.ps()).processes):
                await asyncio.sleep(0.005)
        return "late"

    mind = saying(call("tool"), "Fine.")

    async def watched(context: AsyncContext) -> str:
        said = await mind(context)
        lengths.append((await context.stat()).tokens)
        return said

    async def work() -> Outcome:
        async with nothing_left(path) as system:
            wait = AsyncContext.wait_tool

            async def short(
                self: AsyncContext, name: str, eta: float | None = None, deadline: float | None = None
            ) -> Any:
                return await wait(self, name, eta, 0.05)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(AsyncContext, "wait_tool", short)
                return await run_agent(system, "How much?", [tool(late)], decide=watched)

    outcome = run(work())
    (step,) = outcome.steps
    assert (step.result, step.failed, step.waited_ms) == ("late", True, 0)
    assert lengths[1] - lengths[0] == len(f"</tool_call>user:{response('late')};Fine.")


def test_too_many_turns(serve: Serve) -> None:
    path = serve(**WINDOW)
    again = call("calculator", expression="1")
    outcome = ask(path, [CALCULATOR], again, again, again, "never said", max_turns=2)
    assert (outcome.reason, len(outcome.steps), outcome.answer) == ("turns", 2, again)


def test_a_full_window(serve: Serve) -> None:
    path = serve(window_tokens=1024, frames=300)

    async def talks(text: str = "") -> str:
        return "bla " * 500

    outcome = ask(path, [tool(talks)], call("tool"), "never said")
    assert (outcome.reason, outcome.steps) == ("window", ())


def test_every_step_is_told(serve: Serve) -> None:
    path = serve(**WINDOW)
    told: list[str] = []
    said = [call("calculator", expression=f"{n} + 1") for n in range(3)]
    ask(path, [CALCULATOR], *said, "Done.", watch=lambda step: told.append(step.result))
    assert told == ["1", "2", "3"]


@pytest.mark.parametrize("where", ["deciding", "working"])
def test_nothing_is_left_when_it_is_cancelled_or_fails(serve: Serve, where: str) -> None:
    path = serve(**WINDOW)

    async def work() -> None:
        async with nothing_left(path) as system:
            there = asyncio.Event()

            async def stuck(context: Any = None, text: str = "") -> str:
                there.set()
                await asyncio.sleep(60)
                return ""

            decide = stuck if where == "deciding" else saying(call("tool"))
            task = asyncio.create_task(run_agent(system, "?", [tool(stuck)], decide=decide))
            await there.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            async def fails(context: AsyncContext) -> str:
                raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await run_agent(system, "?", [], decide=fails)

    run(work())


def test_killed_from_outside_while_it_waits(serve: Serve) -> None:
    """`attnix kill` of an agent's process: the agent ends in the system's own error, and everything is back."""
    path = serve(**WINDOW)

    async def killed(text: str = "") -> str:
        def kill() -> None:
            with connect(path, name="killer") as other:
                (pid,) = [row.pid for row in other.ps().processes if row.name == "agent"]
                other.kill(pid, 9)

        await asyncio.to_thread(kill)
        return "too late"

    async def work() -> None:
        async with nothing_left(path) as system:
            with pytest.raises(SyscallError):
                await run_agent(system, "?", [tool(killed)], decide=saying(call("tool")))

    run(work())


def test_many_agents_at_once(serve: Serve) -> None:
    """Sixteen on one connection, three tool calls each."""
    path = serve(window_tokens=2048, frames=2000)

    async def work() -> list[Outcome]:
        async with nothing_left(path) as system:
            minds = [
                saying(*(call("calculator", expression=f"{n} * {k}") for k in range(3)), f"agent {n}")
                for n in range(16)
            ]
            return await asyncio.gather(*(run_agent(system, "?", [CALCULATOR], decide=mind) for mind in minds))

    for n, outcome in enumerate(run(work())):
        assert outcome.answer == f"agent {n}"
        assert [step.result for step in outcome.steps] == [str(n * k) for k in range(3)]


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_with_a_model_that_calls_a_tool(serve: Serve, attnix: Attnix, tmp_path: Path) -> None:
    """The simulated device says the same in every generation: a tool call, for ever.  `</tool_call>` ends each."""
    (tmp_path / "notes.md").write_text("the answer is 42\n")
    text = call("search_files", content="answer") + "</tool_call>!!"
    serve(window_tokens=4096, frames=1200, script=list(text.encode()))
    said = attnix("agent", "What is it?", "--root", str(tmp_path), "--max-turns", "2", "--json")
    assert (said.status, said.err) == (0, "")
    assert said.json["reason"] == "turns"
    assert [step["result"] for step in said.json["steps"]] == ["notes.md:1: the answer is 42"] * 2
    assert said.json["steps"][0]["said"] == text.partition("</tool_call>")[0]

    shown = attnix("agent", "-", "--root", str(tmp_path), "--max-turns", "1", stdin="What is it?")
    assert shown.status == 1
    assert "- search_files(content='answer')\n  notes.md:1: the answer is 42\n" in shown.err
    assert "it asked for more than 1 tools" in shown.err
    assert "run_command" not in shown.err


def test_the_command_with_a_model_that_answers(serve: Serve, attnix: Attnix) -> None:
    serve(window_tokens=4096, frames=1200, script=list(b"It is 42."))
    said = attnix("agent", "What is it?", "-n", "9")
    assert (said.status, said.out, said.err) == (0, "It is 42.\n", "")
    assert attnix("agent", "What is it?", "--root", "/nowhere").status == 2


def test_the_command_without_a_daemon_and_with_wrong_usage(nobody: str, attnix: Attnix) -> None:
    said = attnix("agent", "What is it?")
    assert (said.status, said.out, "attnix boot" in said.err) == (1, "", True)
    for line in ("agent", "agent x --max-turns -1", "agent x --root /nowhere"):
        assert attnix(*line.split()).status == 2
