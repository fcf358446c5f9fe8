"""The engines that `attnix bench decode` compares: attnix through its socket, each peer as a process of its own.

All have the same verbs, so the benchmark's loop knows no engine; bench/peers/serve.py says what they mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

from attnix.syscalls import Context, connect
from attnix.syscalls.records import pack_ids, unpack_ids
from attnix.syscalls.types import AppendArgs, AppendResult

PEERS_DIR: Final = Path(__file__).resolve().parent / "peers"
SLACK_TOKENS: Final = 8  # the last stream may start so many passes after the first
ATTEMPTS: Final = 5  # at a decode in which it does

Prompts = list[list[int]]


class BenchError(Exception):
    """The measurement is not worth anything; the message says why."""


class PeerMissing(Exception):
    """A peer cannot run here; the message says why."""


class Engine(Protocol):
    """What the benchmark asks of an engine."""

    def prefill(self, prompts: Prompts) -> tuple[float, list[int]]: ...

    def decode(self, steps: int) -> tuple[float, list[list[int]]]: ...


class Overhead(NamedTuple):
    """A decode pass as a client sees it, and the part of it that the driver spent computing; both in nanoseconds."""

    pass_ns: float
    compute_ns: float


class Ours:
    """attnix, as any client sees it: one connection, one context per prompt, streamed text and all.

    overheads   one entry per `decode`
    engine      what computes: `cuda/sm_90/bfloat16`
    """

    def __init__(self, path: str) -> None:
        self.client: Final = connect(path, name="bench")
        self.uname: Final = self.client.uname()
        self.engine: Final = next(row.engine for row in self.client.tiers().tiers if row.tier == "hbm")
        self.overheads: list[Overhead] = []
        self._contexts: list[Context] = []
        self._length = 0

    def prefill(self, prompts: Prompts) -> tuple[float, list[int]]:
        self.close()
        self._contexts = [self.client.alloc_context() for _ in prompts]
        self._length = len(prompts[0])
        packed = [pack_ids(prompt) for prompt in prompts]
        before = self._counter("computed_tokens")
        began = time.perf_counter()
        streams = []
        for context, ids in zip(self._contexts, packed, strict=True):
            self.client.submit("append", AppendArgs(context.handle, ids, more=True), AppendResult)
            streams.append(context.stream(1, ignore_eos=True))
        firsts = [unpack_ids(stream.result().tokens)[0] for stream in streams]
        seconds = time.perf_counter() - began
        computed = self._counter("computed_tokens") - before
        if computed < len(prompts) * self._length:
            raise BenchError(f"a prefill of {len(prompts)} x {self._length} tokens computed only {computed}")
        return seconds, firsts

    def decode(self, steps: int) -> tuple[float, list[list[int]]]:
        """Timed from the arrival of the last stream's first token: from there on each pass gives one to every stream."""
        for _ in range(ATTEMPTS):
            timed = self._decode_once(steps)
            if timed is not None:
                return timed
        raise BenchError(f"{len(self._contexts)} streams did not run together, {ATTEMPTS} times: is this machine busy?")

    def _decode_once(self, steps: int) -> tuple[float, list[list[int]]] | None:
        """None: some had ended before the last was done, since it began late or we were not given a processor."""
        for context in self._contexts:
            context.truncate(self._length + 1)
        passes, compute_ns = self._counter("passes"), self._counter("compute_ns")
        streams = [c.stream(steps + 1 + SLACK_TOKENS, ignore_eos=True) for c in self._contexts]
        began, arrived, at_start = 0.0, 0, 0
        seconds, late = 0.0, True
        for note in streams[-1]:
            now = time.perf_counter()
            arrived += len(note.tokens) // 4
            if not began:
                began, at_start = now, arrived
            elif not seconds and arrived >= at_start + steps:
                seconds = (now - began) * steps / (arrived - at_start)
                late = any(stream.done for stream in streams)
        tokens = [unpack_ids(stream.result().tokens)[:steps] for stream in streams]
        if late:
            return None
        passes, compute_ns = self._counter("passes") - passes, self._counter("compute_ns") - compute_ns
        self.overheads.append(Overhead(seconds / steps * 1e9, compute_ns / passes))
        return seconds, tokens

    def _counter(self, name: str) -> int:
        return self.client.vmstat().counters.get(name, 0)

    def close(self) -> None:
        for context in self._contexts:
            context.release()
        self._contexts = []


def device_of(engine: str) -> Literal["cpu", "cuda", "cuda-dry"]:
    """Where an engine computes, from what it calls itself."""
    kind = engine.split("/")[0]
    if kind == "cuda":
        return "cuda"
    return "cuda-dry" if kind == "cuda-dry" else "cpu"


@contextlib.contextmanager
def booted(model: str, directory: str, hbm_bytes: int, flags: Sequence[str] = ()) -> Iterator[Ours]:
    """A daemon with the real model, bf16 and fast numerics as by default, on a socket of its own.

    directory  holds its state, too: booted again with the same one, it is the same system
    flags      more of `attnix boot`
    """
    path = os.path.join(directory, "d", "bench.sock")
    command = [sys.executable, "-m", "attnix.boot", "--model", model, "--socket", path, "--state-dir", directory]
    command += ["--hbm", str(hbm_bytes), "--dtype", "bfloat16", "--kv-dtype", "bfloat16", "--numerics", "fast", *flags]
    errors = Path(directory) / "daemon.err"
    with errors.open("w") as file:
        daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
    assert daemon.stdout is not None
    try:
        if "ready" not in daemon.stdout.readline():
            daemon.wait()
            raise BenchError(f"the daemon did not start: {errors.read_text().strip()}")
        ours = Ours(path)
        with ours.client:
            yield ours
    finally:
        daemon.terminate()
        daemon.wait()
        daemon.stdout.close()


class Peer:
    """Another engine.  Between calls its process is stopped (SIGSTOP), so that its idle threads cannot spin.

    python   interpreter of the venv where it is installed
    pid      process, and leader of a process group of its own
    Error at construction: PeerMissing.
    """

    def __init__(
        self, engine: str, python: str, settings: dict[str, Any], environment: dict[str, str], log: Path
    ) -> None:
        command = [python, str(PEERS_DIR / "serve.py"), engine, json.dumps(settings)]
        with log.open("w") as file:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                    env=os.environ | environment,
                    start_new_session=True,  # the benchmark's group stays out of the signals below
                )
            except OSError as error:
                raise PeerMissing(f"{python}: {error.strerror}; `make peers` installs the peers") from error
        self.pid: Final = self._process.pid
        try:
            self.version = str(self._answer())
        except PeerMissing:
            self.end()
            raise
        self._signal(signal.SIGSTOP)

    def call(self, method: str, *arguments: Any) -> Any:
        """Error: PeerMissing when it answers with an error or ends."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
            self._process.stdin.flush()
            return self._answer()
        except BrokenPipeError:
            raise PeerMissing(f"it ended with status {self._process.wait()}") from None
        finally:
            self._signal(signal.SIGSTOP)

    def prefill(self, prompts: Prompts) -> tuple[float, list[int]]:
        seconds, firsts = self.call("prefill", prompts)
        return seconds, firsts

    def decode(self, steps: int) -> tuple[float, list[list[int]]]:
        seconds, tokens = self.call("decode", steps)
        return seconds, tokens

    def end(self) -> None:
        """Kill it, and what it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerMissing(f"it ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerMissing(answer["error"])
        return answer["ok"]
