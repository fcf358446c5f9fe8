"""The real model behind the real socket: same tokens whatever happens to them, and nobody notices a dead driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from attnix.syscalls.client import Client, connect
from attnix.syscalls.records import unpack_floats, unpack_ids

Boot: TypeAlias = Callable[..., str]

pytestmark = [pytest.mark.e2e, pytest.mark.model]

SYSTEM = "You are a terse assistant. Answer in one short sentence and never apologise. Use plain words."
QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "How many days are in a week?",
    "What do bees make?",
    "What is frozen water called?",
    "Write a short story about a fox.",
]
INVARIANT = ("--numerics", "invariant")


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Poll another process; there is nothing to wait on."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def ask_all(os_: Client, tokens: int) -> list[bytes]:
    """Each question in a context of its own, one after another."""
    answers = []
    for question in QUESTIONS:
        ctx = os_.alloc_context()
        ctx.append(messages=[("system", SYSTEM), ("user", question)])
        answers.append(ctx.generate(max_tokens=tokens, ignore_eos=True).tokens)
        ctx.release()
    return answers


def test_same_tokens_cold_cached_forked_batched_and_preempted(boot: Boot, smollm2: Path) -> None:
    """The same daemon flags but for the pool: one holds everything, one forces preemption."""
    with connect(boot(str(smollm2), *INVARIANT, "--sharing", "none", "--hbm", "256MiB")) as os_:
        cold = ask_all(os_, 40)
    with connect(boot(str(smollm2), *INVARIANT, "--hbm", "8MiB", "--sysctl", "sched.step_tokens=24")) as os_:
        frames = os_.tiers().tiers[0]
        assert frames.capacity_frames * frames.frame_bytes <= 8 << 20
        assert ask_all(os_, 40) == cold, "cached"
        root = os_.alloc_context()
        root.append(messages=[("system", SYSTEM), ("user", QUESTIONS[0])])
        root.forward(1)  # computed to its last token, so that the forks share a partial tail
        pending = []
        forks = root.fork(3)
        for ctx in forks:
            pending.append((0, ctx.stream(max_tokens=40, ignore_eos=True)))
        for n, question in enumerate(QUESTIONS):
            ctx = os_.alloc_context()
            ctx.append(messages=[("system", SYSTEM), ("user", question)])
            pending.append((n, ctx.stream(max_tokens=40, ignore_eos=True)))
        for n, answer in pending:
            assert answer.result().tokens == cold[n], f"question {n}, forked or batched"
        counters = os_.vmstat().counters
        assert counters["preemptions"] > 0, "the pool was meant to be too small"
        assert counters["lookup_hits"] > 0 and counters["cow_copies"] > 0
        assert os_.fsck().problems == ()


def test_killed_accel_is_restarted_and_every_stream_goes_on(boot: Boot, smollm2: Path) -> None:
    with connect(boot(str(smollm2), *INVARIANT)) as os_:
        expected = ask_all(os_, 48)
        for _ in range(5):  # a kill may fall between two passes, and a machine that was held up lets the streams end
            lost = os_.vmstat().counters.get("passes_lost", 0)
            if kill_accel_in_the_midst(os_, expected) and os_.vmstat().counters.get("passes_lost", 0) > lost:
                break
        counters = os_.vmstat().counters
        assert counters["driver_deaths"] >= 1 and counters["passes_lost"] >= 1, "no kill fell into a pass"
        assert os_.fsck().problems == ()


def kill_accel_in_the_midst(os_: Client, expected: list[bytes]) -> bool:
    """Every question at once, and a kill; whether each stream still had 20 tokens to go then."""
    contexts = []
    for question in QUESTIONS:
        ctx = os_.alloc_context()
        ctx.append(messages=[("system", SYSTEM), ("user", question)])
        contexts.append(ctx)
    pending = [ctx.stream(max_tokens=48, ignore_eos=True) for ctx in contexts]
    with connect(os_.path) as watch:

        def generated() -> list[int]:
            """Of each stream, the least first."""
            return sorted(watch.stat(cid=ctx.cid).usage.generated_tokens for ctx in contexts)

        until(lambda: generated()[0] >= 3)
        tier = watch.tiers().tiers[0]
        os.kill(tier.driver_pid, signal.SIGKILL)
        in_time = generated()[-1] <= 28  # looked at afterwards: it grew at most until then
        until(lambda: watch.tiers().tiers[0].restarts > tier.restarts and watch.tiers().tiers[0].state == "up")
    assert [p.result().tokens for p in pending] == expected
    for ctx in contexts:
        ctx.release()
    return in_time


CLIENT = """
import sys
from attnix.syscalls.client import connect
client = connect(sys.argv[1])
ctx = client.alloc_context()
ctx.append(text="Once upon a time there was a king who " * 20)
pending = [fork.stream(max_tokens=400, ignore_eos=True) for fork in ctx.fork(4)]
print("running", flush=True)
pending[0].result()
"""


def test_kill_9_of_a_client_returns_its_frames(boot: Boot, smollm2: Path) -> None:
    path = boot(str(smollm2))
    with connect(path) as watch:
        before = watch.tiers().tiers[0]
        client = subprocess.Popen([sys.executable, "-c", CLIENT, path], stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        client.stdout.readline()
        until(lambda: watch.vmstat().counters.get("generated_tokens", 0) > 8)
        assert watch.tiers().tiers[0].mapped_frames > before.mapped_frames
        client.kill()
        client.wait()
        client.stdout.close()

        def baseline() -> bool:
            now = watch.tiers().tiers[0]
            return now.free_frames + now.reclaimable_frames == now.capacity_frames and len(watch.ps().processes) == 1

        until(baseline)
        assert watch.vmstat().counters["contexts"] == 0
        assert watch.fsck().problems == ()


def test_streamed_text_is_the_text(boot: Boot, smollm2: Path) -> None:
    with connect(boot(str(smollm2), *INVARIANT)) as os_:
        ctx = os_.alloc_context()
        ctx.append(messages=[("user", "List three emoji and the word naïve in French, Greek and Japanese.")])
        twin = ctx.fork(1)[0]
        stop = ["\n\n", "3."]
        whole = ctx.generate(max_tokens=60, temperature=1.0, seed=5, stop=stop)
        pieces = [note.text for note in twin.stream(max_tokens=60, temperature=1.0, seed=5, stop=stop)]
        assert "".join(pieces) == whole.text
        assert not any(s in whole.text for s in stop)
        whole.text.encode("utf-8")


FAST_ERROR = 0.25  # stated in docs/caveats.md: log-probabilities of fast and invariant numerics (bf16) differ by less


def test_fast_numerics_flip_no_token_whose_margin_exceeds_the_stated_error(boot: Boot, smollm2: Path) -> None:
    def run(numerics: str) -> list[list[tuple[int, float, float]]]:
        """Per question and token: id, log-probability, margin over the runner-up.  All questions in one batch."""
        with connect(boot(str(smollm2), "--numerics", numerics)) as os_:
            pending = []
            for question in QUESTIONS:
                ctx = os_.alloc_context()
                ctx.append(messages=[("system", SYSTEM), ("user", question)])
                pending.append(ctx.stream(max_tokens=48, ignore_eos=True, logprobs=2))
            answers = []
            for p in pending:
                result = p.result()
                rows = zip(unpack_ids(result.tokens), result.logprobs, strict=True)
                answers.append([(t, lp, unpack_floats(top)[0] - unpack_floats(top)[1]) for t, (lp, _, top) in rows])
            return answers

    worst = 0.0
    for fast, exact in zip(run("fast"), run("invariant"), strict=True):
        for (t_fast, lp_fast, margin), (t_exact, lp_exact, _) in zip(fast, exact, strict=True):
            if t_fast != t_exact:
                print(f"flip: margin {margin:.4f}")
                assert margin <= FAST_ERROR, "a clear winner lost"
                break
            worst = max(worst, abs(lp_fast - lp_exact))
    print(f"largest difference of a log-probability before any flip: {worst:.4f}")
    assert worst <= FAST_ERROR
