"""The measuring half of `attnix study loop`: an agent that calls a tool ten times on top of one long context.

    python -m attnix.study_loop [--tokens 80000] [--tools 10] [--real]          one JSON document on stdout

A server that keeps nothing between requests computes the whole context again for each tool's answer: 800,000 prompt
tokens for 500 new ones.  Here the context waits (`wait_tool`) and goes on (`resume`).  Both sides are this system: same
kernel, same device, same frames, and the same tokens in the log at every turn.  The stateless side has a new context for
each request, and sharing off.  What is counted is what the device computed.

In simulation the device is the profile's (replay/profile.py) and the kernel the daemon's.  With --real it is a daemon of
its own per side, over the CPU engine and a tiny random model with a window that long (tiny_model.py), where the answers
of the two sides must be the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from attnix.kernel.evict.protocol import KIND_TOOL, KIND_TURN
from attnix.replay.engine import Frames, Replay, Waits
from attnix.replay.profile import PROFILES
from attnix.replay.workload import Session, Turn, Workload
from attnix.syscalls.client import Client, connect
from attnix.syscalls.records import unpack_ids
from attnix.tiny_model import SMALLEST, VOCAB, write_tiny_model

SEED: Final = 4
TOOL_S: Final = 2.0  # simulated
REAL_TOOL_S: Final = 0.05
BLOCK_TOKENS: Final = 16
_BOOT_S: Final = 120.0
_ANSWER_S: Final = 3600.0


class Loop(NamedTuple):
    """A prompt of `tokens`, then `tools` times: `answer_tokens` generated, a tool called, its result of `result_tokens`."""

    tokens: int
    tools: int
    result_tokens: int
    answer_tokens: int

    @property
    def longest_tokens(self) -> int:
        return self.tokens + self.tools * self.result_tokens + (self.tools + 1) * self.answer_tokens


class Side(NamedTuple):
    """computed_tokens: by the device, in all requests.  after_tools: of them, in the requests that followed a tool.

    generated_tokens  sampled: the device computed all of them but the last of each answer
    seconds           of the requests that followed a tool, waiting for tools not counted
    """

    requests: int
    computed_tokens: int
    after_tools: int
    generated_tokens: int
    seconds: float


# -- in simulation --------------------------------------------------------------------------------------------------


def simulated(loop: Loop, profile: str, stateless: bool) -> Side:
    turns = []
    unnamed = 0
    for number in range(loop.tools + 1):
        tokens = loop.result_tokens if number else loop.tokens
        kind = KIND_TOOL if number < loop.tools else KIND_TURN
        pause_ns = round(TOOL_S * 1e9) if number else 0
        none = np.zeros(0, np.int64)
        turns.append(Turn(number, none, unnamed, tokens, loop.answer_tokens, pause_ns, kind, "tool"))
        unnamed += tokens
    frames = -(-(loop.longest_tokens + 1) // BLOCK_TOKENS) * 2  # room for a request's context beside another's remains

    def run(count: int) -> tuple[Replay, int]:
        workload = Workload("loop", BLOCK_TOKENS, [Session(0, turns[:count])], 0, 0, True, follows=True)
        made = Replay(
            workload, PROFILES[profile], Frames(frames), "lru", waits=Waits(""), stateless=stateless, exact=True
        )
        made.run()
        return made, made.kernel.machine.counters["computed_tokens"]

    whole, computed = run(len(turns))
    first, alone = run(1)
    seconds = whole.result.answer_s.mean * whole.result.requests - first.result.answer_s.mean
    return Side(whole.result.requests, computed, computed - alone, whole.result.output_tokens, round(seconds, 6))


# -- for real -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def daemon(folder: Path, model: Path, loop: Loop, sharing: str) -> Iterator[Client]:
    """A daemon of its own; RuntimeError with what it said when it does not come up."""
    window = -(-(loop.longest_tokens + 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    socket = str(folder / f"{sharing}.sock")
    command = [sys.executable, "-m", "attnix.boot", "--model", str(model), "--socket", socket, "--dtype", "float32"]
    command += [
        "--kv-dtype",
        "float32",
        "--numerics",
        "invariant",
        "--hbm",
        str(2 * SMALLEST.kv_bytes(window)),
        "--window",
        str(window),
    ]
    command += ["--max-contexts", "8", "--sharing", sharing, "--state-dir", str(folder / f"state-{sharing}")]
    with (folder / f"{sharing}.log").open("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "ready on" not in line:
                process.wait(_BOOT_S)
                said.seek(0)
                raise RuntimeError(f"the daemon did not come up: {line}{said.read()}")
            with connect(socket, name="study-loop", timeout=_ANSWER_S) as client:
                yield client
        finally:
            process.terminate()
            process.wait(_BOOT_S)
            if process.stdout is not None:
                process.stdout.close()


def real(client: Client, loop: Loop, stateless: bool) -> tuple[Side, list[int]]:
    """(what it took, every token of every answer)."""
    draw = random.Random(SEED)
    log: list[int] = []
    said: list[int] = []
    context = client.alloc_context()
    seconds, after_tools, start = 0.0, 0, _computed(client)
    for turn in range(loop.tools + 1):
        new = draw.choices(range(VOCAB - 1), k=loop.result_tokens if turn else loop.tokens)
        if turn and not stateless:
            context.wait_tool("tool", eta=REAL_TOOL_S)
        if turn:
            time.sleep(REAL_TOOL_S)  # the tool
        before, began = _computed(client), time.perf_counter()
        if stateless:
            context.release()
            context = client.alloc_context()
            context.append(tokens=log + new)
        elif turn:
            context.resume(tokens=new)
        else:
            context.append(tokens=new)
        answer = unpack_ids(context.generate(loop.answer_tokens, ignore_eos=True).tokens)
        if turn:
            seconds += time.perf_counter() - began
            after_tools += _computed(client) - before
        log += [*new, *answer]
        said += answer
    return Side(loop.tools + 1, _computed(client) - start, after_tools, len(said), round(seconds, 3)), said


def _computed(client: Client) -> int:
    """Tokens that the accel says it computed."""
    return client.vmstat().counters.get("computed_tokens", 0)


def study(loop: Loop, profile: str, for_real: bool) -> dict[str, Any]:
    """RuntimeError."""
    if not for_real:
        sides = {name: simulated(loop, profile, name == "stateless") for name in ("attnix", "stateless")}
    else:
        sides, answers = {}, {}
        with tempfile.TemporaryDirectory(prefix="attnix-loop-") as text:
            folder = Path(text)
            model = write_tiny_model(folder / "model", 2 * loop.longest_tokens, shape=SMALLEST)
            for name, sharing in (("attnix", "uid"), ("stateless", "none")):
                with daemon(folder, model, loop, sharing) as client:
                    sides[name], answers[name] = real(client, loop, name == "stateless")
                print(f"{name}: {sides[name]}", file=sys.stderr, flush=True)  # the other one may take long
        if answers["attnix"] != answers["stateless"]:
            raise RuntimeError("the two sides answered with other tokens")
    return {
        "device": "cpu, tiny random model" if for_real else profile, "loop": loop._asdict(),
        "new_tokens": loop.tools * loop.result_tokens, "sides": {name: side._asdict() for name, side in sides.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="attnix.study_loop")
    parser.add_argument("--tokens", type=int, default=80_000, help="of the context before the first tool call")
    parser.add_argument("--tools", type=int, default=10, help="calls")
    parser.add_argument("--result-tokens", type=int, default=50, help="of a tool's result")
    parser.add_argument("--answer-tokens", type=int, default=30, help="that the model says between two calls")
    parser.add_argument("--profile", default="h100-8b", choices=sorted(PROFILES))
    parser.add_argument("--real", action="store_true", help="a real daemon on this machine, with a tiny random model")
    args = parser.parse_args()
    loop = Loop(args.tokens, args.tools, args.result_tokens, args.answer_tokens)
    if min(loop) < 1:
        parser.error("every number is at least 1")
    try:
        found = study(loop, args.profile, args.real)
    except RuntimeError as error:
        sys.exit(f"attnix study loop: {error}")
    json.dump(found, sys.stdout)
    print()


if __name__ == "__main__":
    main()
