"""The programs with the real model: short runs of each, against what the same model says another way."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from attnix.syscalls import AsyncContext, aconnect, connect
from attnix.userland.programs import (
    CALCULATOR,
    Batch,
    BatchOutput,
    Chat,
    Outcome,
    beam_search,
    best_of_n,
    by_generating,
    last_number,
    read_prompts,
    run_agent,
    self_consistency,
)

from .conftest import Boot

pytestmark = [pytest.mark.e2e, pytest.mark.model]

QUESTIONS = ["What is the capital of France?", "What is frozen water called?", "What do bees make?"]


def test_every_program(boot: Boot, smollm2: Path, tmp_path: Path) -> None:
    path = boot(str(smollm2), "--numerics", "invariant")
    with connect(path) as system:
        context = system.alloc_context()
        context.append(messages=[("user", QUESTIONS[0])])
        greedy = context.fork()[0].generate(12)

        beams = beam_search(context, 3, 8)
        for beam in beams:
            assert sum(context.score(beam.tokens)) / len(beam.tokens) == pytest.approx(beam.score, abs=1e-4)
        assert len({beam.tokens for beam in beams}) == 3

        ranked = best_of_n(context, 4, 12, temperature=0.5)
        for one in ranked:
            assert one.score == pytest.approx(sum(context.score(one.sample.tokens)) / len(one.sample.tokens), abs=1e-4)
        assert "Paris" in ranked[0].sample.text

        sums = system.alloc_context()
        sums.append(messages=[("user", "What is 2 + 3? Answer with a number.")])
        vote = self_consistency(sums, last_number, 5, 16, temperature=0.3)
        assert vote.answer == 5.0

        chat = Chat(system)
        assert chat.say(QUESTIONS[0], 12).result().text == greedy.text
        assert chat.say("And of Italy?", 12).result().text

    prompts, answers = tmp_path / "in", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))

    async def rest() -> Outcome:
        async with aconnect(path) as system:
            with BatchOutput(answers) as output:
                batch = Batch(system, output, max_tokens=12)
                assert (await batch.run(read_prompts(prompts))).done == len(QUESTIONS)

            told = iter(["I need to calculate this. "])
            model = by_generating(24, {})

            async def decide(context: AsyncContext) -> str:
                """The model is too small to call a tool by itself: its first words are given, the answer is its own."""
                for words in told:
                    words += '<tool_call>{"name": "calculator", "arguments": {"expression": "1234 * 5678"}}'
                    await context.append(words)
                    return words
                return await model(context)

            return await run_agent(system, "How much is 1234 times 5678?", [CALCULATOR], decide=decide)

    outcome = asyncio.run(rest())
    assert [step.result for step in outcome.steps] == [str(1234 * 5678)]
    assert "7006652" in outcome.answer.replace(",", "")
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert {line["id"]: line["text"] for line in lines}[1] == greedy.text
    with connect(path) as system:
        assert system.fsck().problems == ()
        assert system.vmstat().counters["contexts"] == 0
