"""Real daemons for the end-to-end tests: `python -m attnix.boot` as its own process, the way `attnix boot` starts it;
and conversations with the real model, of which a daemon with hbm for all of them has said how they go.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from attnix.kernel.calls import GenerateResult, TierRow
from attnix.syscalls.client import Client, Context, Stream, connect

Boot = Callable[..., str]

THREADS = ("--threads", os.environ.get("OMP_NUM_THREADS", "0"))  # 0: as many as there are cores (tests/conftest.py)
PATIENT = ("--sysctl", "sched.max_wait_ms=0")  # nobody is refused, however slow this machine is
DEADLINE_S = 600.0  # of whatever a busy machine does; a quiet one needs a twentieth
KV_FRAME_BYTES = (
    368_640  # SmolLM2-135M in bfloat16: 30 layers, keys and values, 3 heads, 16 tokens, 64 numbers of 2 bytes
)
STORED_BYTES = 372_736  # the same below hbm: with a header of 4,096


@pytest.fixture
def boot(tmp_path: Path) -> Iterator[Boot]:
    """boot(model, *flags) -> socket path of a daemon that is ready.  All are shut down and must end with status 0."""
    daemons: list[subprocess.Popen[str]] = []

    def start(model: str, *flags: str) -> str:
        path = str(tmp_path / f"d{len(daemons)}" / "s.sock")
        command = [sys.executable, "-m", "attnix.boot", "--model", model, "--socket", path]
        command += ["--state-dir", str(tmp_path / "state"), "--max-contexts", "256", *THREADS, *PATIENT, *flags]
        errors = tmp_path / f"stderr{len(daemons)}"
        with errors.open("w") as file:
            daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        daemons.append(daemon)
        assert daemon.stdout is not None
        line = daemon.stdout.readline()
        if "ready on" not in line:
            daemon.wait()
            raise AssertionError(f"the daemon did not start: {line}{errors.read_text()}")
        return path

    yield start
    statuses = []
    for daemon in daemons:
        daemon.terminate()
        try:
            statuses.append(daemon.wait(30))
        except subprocess.TimeoutExpired:
            daemon.kill()
            statuses.append(daemon.wait())
        assert daemon.stdout is not None
        daemon.stdout.close()
    assert statuses == [0] * len(daemons), "a daemon did not end in order"


# -- a hierarchy ----------------------------------------------------------------------------------------------------


def until(holds: Callable[[], object], what: str, seconds: float = DEADLINE_S) -> None:
    """Poll another process; there is nothing to wait on."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.01)


class Daemon:
    """A daemon over a folder; its socket and its state stay there for the next one."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        self.folder = folder
        self.socket = str(folder / "run" / "s.sock")
        self.nvme_file = folder / "state" / "nvme0.frames"
        self.output = folder / "output"
        command = [sys.executable, "-m", "attnix.boot", "--model", str(model), "--socket", self.socket]
        command += [
            "--state-dir",
            str(folder / "state"),
            "--numerics",
            "invariant",
            "--max-contexts",
            "128",
            *THREADS,
            *PATIENT,
            *flags,
        ]
        folder.mkdir(exist_ok=True)
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        until(lambda: "ready on" in self.text() or self.process.poll() is not None, "boot")
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        return self.output.read_text()

    def connect(self, resume: float = 0.0) -> Client:
        return connect(self.socket, name="e2e", timeout=DEADLINE_S, resume=resume)

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(DEADLINE_S) == 0, self.text()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)


Start = Callable[..., Daemon]


def starter(folder: Path, model: Path) -> Iterator[Start]:
    daemons: list[Daemon] = []

    def begin(*flags: str) -> Daemon:
        daemons.append(Daemon(folder, model, *flags))
        return daemons[-1]

    try:
        yield begin
    finally:
        for daemon in daemons:
            if daemon.process.poll() is None:
                daemon.kill()
        shutil.rmtree(folder, ignore_errors=True)  # pytest would keep gigabytes of it


@pytest.fixture
def start(tmp_path: Path, smollm2: Path) -> Iterator[Start]:
    """start(*flags) -> a Daemon with the real model.  One after another, they have the same state and the same socket."""
    yield from starter(tmp_path / "d", smollm2)


class Turn(NamedTuple):
    """What is said, and how it is answered."""

    text: str
    max_tokens: int
    temperature: float
    seed: int


class Script(NamedTuple):
    """A conversation: what it begins with, its turns, and the right answers to them (none: they are not looked at)."""

    prompt: str
    turns: tuple[Turn, ...]
    answers: tuple[bytes, ...]


_FIRST = ("Clara", "Boris", "Amina", "Chen", "Diego", "Elsa", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Keiko")
_LAST = ("Novak", "Petrov", "Diallo", "Wei", "Ruiz", "Lund", "Nasser", "Vogel", "Martin", "Costa", "Berg", "Tanaka")
_ANIMALS = ("geese", "goats", "horses", "cats", "bees", "sheep", "rabbits", "ducks", "pigs", "mules", "hens", "dogs")
_TOWNS = ("Turin", "Oslo", "Dakar", "Lima", "Kyoto", "Bergen", "Porto", "Graz", "Cairo", "Quito", "Riga", "Bern")


def conversation(number: int, lines: int, turns: int) -> Script:
    """A register that no two conversations have in common, and lines of it begun again: how they go on hangs on KV from all
    over it.  Every second answer is sampled, at temperature 1, where any change of a logit may change a token."""
    draw = random.Random(f"conversation {number}")
    entries = [
        (f"{draw.choice(_FIRST)} {draw.choice(_LAST)}", draw.randrange(10, 100), draw.choice(_ANIMALS), draw.choice(_TOWNS))
        for _ in range(lines)
    ]  # fmt: skip
    prompt = f"{number:03d} is the number of this register.\n"
    prompt += "".join(f"{who} keeps {count} {animals} in {town}.\n" for who, count, animals, town in entries)
    said = []
    for n in range(turns):
        text = f"\n{draw.choice(entries)[0]} keeps"
        said.append(Turn(text, 5 + draw.randrange(4), float(n % 2), draw.randrange(1 << 30)))
    return Script(prompt, tuple(said), ())


def answer(context: Context, turn: Turn) -> Stream:
    """Say it, and begin to answer."""
    context.append(text=turn.text)
    return context.stream(turn.max_tokens, temperature=turn.temperature, seed=turn.seed, ignore_eos=True)


def answered(start: Start, scripts: Sequence[Script], *flags: str) -> list[Script]:
    """The scripts with their answers, by a daemon whose hbm holds all of them and that has nothing else."""
    longest = max(len(s.prompt) + sum(len(t.text) + 8 * t.max_tokens for t in s.turns) for s in scripts)
    frames = len(scripts) * (longest // 2 // 16 + 4)  # a token is two characters of this text, or more
    daemon = start("--hbm", str(frames * KV_FRAME_BYTES), *flags)
    with daemon.connect() as client:
        contexts = []
        for script in scripts:
            contexts.append(client.alloc_context())
            contexts[-1].append(text=script.prompt)
        answers: list[list[bytes]] = [[] for _ in scripts]
        for n in range(max(len(s.turns) for s in scripts)):
            pending = [answer(c, s.turns[n]) for c, s in zip(contexts, scripts, strict=True)]
            for said, p in zip(answers, pending, strict=True):
                said.append(p.result().tokens)
        assert client.vmstat().counters.get("preemptions", 0) == 0, "it was meant to hold everything"
        assert [row.tier for row in client.tiers().tiers] == ["hbm"]
    daemon.end()
    assert len({a for said in answers for a in said}) > len(answers), "nearly all answers are one and the same"
    return [script._replace(answers=tuple(said)) for script, said in zip(scripts, answers, strict=True)]


@pytest.fixture(scope="session")
def conversations() -> dict[str, list[Script]]:
    """All that is said in these tests, by the fixture that has it answered."""
    streamed = [conversation(200 + n, 26, 3) for n in range(6)]
    return {
        "scripts": [conversation(n, 12, 8) for n in range(12)],
        "long_scripts": [conversation(100 + n, 76, 5) for n in range(64)],
        "streamed": [s._replace(turns=(s.turns[0], s.turns[1]._replace(max_tokens=64), s.turns[2])) for s in streamed],
    }


@pytest.fixture(scope="session")
def scripts(
    tmp_path_factory: pytest.TempPathFactory, smollm2: Path, conversations: dict[str, list[Script]]
) -> list[Script]:
    """A dozen conversations of some 200 tokens and eight turns, with their answers."""
    with contextlib.contextmanager(starter)(tmp_path_factory.mktemp("reference") / "d", smollm2) as start:
        return answered(start, conversations["scripts"])


@pytest.fixture(scope="session")
def long_scripts(
    tmp_path_factory: pytest.TempPathFactory, smollm2: Path, conversations: dict[str, list[Script]]
) -> list[Script]:
    """64 conversations of 1,024 tokens and more and five turns; every second has its answers, which take a minute to find."""
    scripts = list(conversations["long_scripts"])
    with contextlib.contextmanager(starter)(tmp_path_factory.mktemp("reference") / "d", smollm2) as start:
        scripts[::2] = answered(start, scripts[::2])
    return scripts


@pytest.fixture(scope="session")
def streamed(
    tmp_path_factory: pytest.TempPathFactory, smollm2: Path, conversations: dict[str, list[Script]]
) -> list[Script]:
    """Six conversations of some 370 tokens, of whose three turns the second has a long answer."""
    with contextlib.contextmanager(starter)(tmp_path_factory.mktemp("reference") / "d", smollm2) as start:
        return answered(start, conversations["streamed"])


class Talks:
    """Conversations that go on by turns, in a random order and some at a time, each answer compared with the right one."""

    def __init__(self, client: Client, scripts: Sequence[Script], at_once: int = 3, seed: int = 1) -> None:
        self.client = client
        self.scripts = scripts
        self.contexts: list[Context] = []
        self.done = [0] * len(scripts)  # turns
        self.prompt_tokens = 0
        self.generations = 0
        self._at_once = at_once
        self._random = random.Random(seed)

    def begin(self) -> None:
        """Make the contexts, each with a name."""
        for n, script in enumerate(self.scripts):
            context = self.client.alloc_context()
            self.prompt_tokens += context.append(text=script.prompt).appended
            context.publish(f"talk{n}")
            self.contexts.append(context)

    def turn(self, at: dict[int, Callable[[], object]] | None = None) -> list[GenerateResult]:
        """Continue each of them; when the n-th has just begun, do what `at` says."""
        results = []
        under_way: list[tuple[int, Stream]] = []
        order = self._random.sample(range(len(self.scripts)), len(self.scripts))
        for n, i in enumerate(order):
            under_way.append((i, self.go_on(i)))
            if at and n in at:
                at[n]()
            if len(under_way) == self._at_once:
                results.append(self.check(*under_way.pop(0)))
        results += [self.check(*one) for one in under_way]
        return results

    def go_on(self, i: int) -> Stream:
        """Begin the next turn of one."""
        return answer(self.contexts[i], self.scripts[i].turns[self.done[i]])

    def check(self, i: int, stream: Stream) -> GenerateResult:
        """Wait for the end of that turn; its tokens are the right ones."""
        result, right = stream.result(), self.scripts[i].answers
        assert not right or result.tokens == right[self.done[i]], f"turn {self.done[i]} of conversation {i}"
        self.done[i] += 1
        self.generations += 1
        return result

    def count(self, name: str) -> int:
        return self.client.vmstat().counters.get(name, 0)

    def row(self, device: str) -> TierRow:
        return next(row for row in self.client.tiers().tiers if row.device == device)

    def dmesg(self) -> str:
        return "\n".join(f"{row.level}: {row.text}" for row in self.client.dmesg(0).rows)

    def log_tokens(self) -> int:
        return sum(context.stat().tokens for context in self.contexts)

    def sound(self) -> None:
        assert self.client.fsck().problems == ()


TalksOf = Callable[..., Talks]


@pytest.fixture(scope="session")
def talks_of() -> TalksOf:
    """Talks(client, scripts, ...), for modules that cannot import this one."""
    return Talks


@pytest.fixture(scope="session")
def answered_by() -> Callable[..., list[Script]]:
    """answered(start, scripts, *flags), likewise."""
    return answered
