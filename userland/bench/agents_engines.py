"""What `attnix bench agents` runs the agents through: attnix, llama.cpp's server, vLLM.

Each engine starts afresh for every run and is warmed up with a prompt that nobody uses again; starting is not timed.  An
agent of attnix is a thread with a connection of its own, one of llama.cpp a thread with HTTP requests; vLLM's engine is
stepped in its own process without a server (bench/peers/agents_vllm.py), which is the best it can do on few cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import queue
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from attnix.syscalls import Context, connect
from attnix.syscalls.client import Pending
from attnix.syscalls.exceptions import ConnectionLost, TryAgain
from attnix.syscalls.records import pack_ids, unpack_ids
from attnix.syscalls.types import AppendArgs, AppendResult, ResumeArgs, ResumeResult

from .agents_workload import Turn, Workload
from .decode_engines import BenchError, Peer, PeerMissing, booted
from .processors import cores

WARM_TOKENS: Final = 64
START_S: Final = 120.0  # for a server to be ready
RETRY_S: Final = 0.05
LOOK_S: Final = 0.5
PR_SET_PDEATHSIG: Final = 1


class Room(NamedTuple):
    """What an engine may use.

    kv_bytes      for KV: attnix's hbm, llama.cpp's and vLLM's whole cache
    spill_bytes   beside it in main memory: attnix's dram, llama.cpp's --cache-ram
    slots         of llama.cpp's server, which divides its KV by them
    slot_tokens   of llama.cpp's server, in all slots together
    """

    kv_bytes: int
    spill_bytes: int
    slots: int
    slot_tokens: int


class Weights(NamedTuple):
    """The same numbers in two forms, and what a prompt that warms up may hold."""

    model: str
    gguf: str
    hf: str
    vocab_tokens: int


class Outcome(NamedTuple):
    """What one run of the workload showed; times in seconds.

    jobs             of each agent, from the start of all to its last token
    burst            to the first token of each agent's first turn
    returns          to the first token after a tool's return, of all agents and turns
    prompt_tokens    computed for prompts, as the engine counts
    tokens           [agent][turn] what was generated
    notes            what else the engine counted
    """

    version: str
    jobs: list[float]
    burst: list[float]
    returns: list[float]
    prompt_tokens: int
    tokens: list[list[list[int]]]
    notes: dict[str, float]


class Engine(Protocol):
    def __call__(self, work: Workload, room: Room, weights: Weights, limit_s: float) -> Outcome:
        """Run the workload.  Error: PeerMissing when the engine cannot; BenchError when attnix cannot."""
        ...


class Answer(NamedTuple):
    """first: when the first token came, by time.perf_counter."""

    first: float
    tokens: list[int]


class Agent(Protocol):
    """One agent's side of an engine."""

    def turn(self, turn: Turn, ids: list[int]) -> Answer:
        """Add ids, generate."""
        ...

    def leave(self, turn: Turn) -> None:
        """It now waits for the turn's tool."""
        ...


class Timed(NamedTuple):
    """As in Outcome."""

    jobs: list[float]
    burst: list[float]
    returns: list[float]
    tokens: list[list[list[int]]]


class _Job(NamedTuple):
    seconds: float
    firsts: list[float]  # of each turn, to its first token
    tokens: list[list[int]]


def together(work: Workload, agents: Sequence[Agent], limit_s: float) -> Timed:
    """Run all agents at once, each in a thread.  Error: TimeoutError, or what the first agent met that failed.

    The others may then still wait for their engine: it must be ended next, which ends them.
    """
    start = threading.Barrier(len(agents) + 1)
    ended: queue.SimpleQueue[tuple[int, _Job | BaseException]] = queue.SimpleQueue()
    began = 0.0

    def run(number: int) -> _Job:
        firsts, tokens = [], []
        start.wait()
        asked = began
        for at, turn in enumerate(work.agents[number]):
            answer = agents[number].turn(turn, [*work.system, *turn.ids] if at == 0 else turn.ids)
            firsts.append(answer.first - asked)
            tokens.append(answer.tokens)
            if len(answer.tokens) != turn.answer:
                raise BenchError(f"agent {number} got {len(answer.tokens)} tokens, not {turn.answer}")
            if at + 1 < len(work.agents[number]):
                asked = time.perf_counter() + turn.wait_s
                agents[number].leave(turn)
                time.sleep(max(0.0, asked - time.perf_counter()))
        return _Job(time.perf_counter() - began, firsts, tokens)

    def keep(number: int) -> None:
        try:
            ended.put((number, run(number)))
        except BaseException as error:
            ended.put((number, error))

    for number in range(len(agents)):
        threading.Thread(target=keep, args=(number,), daemon=True).start()
    began = time.perf_counter()
    start.wait()
    jobs: dict[int, _Job] = {}
    while len(jobs) < len(agents):
        try:
            number, job = ended.get(timeout=LOOK_S)  # a signal may wake another thread, and then waits for this one
        except queue.Empty:
            if time.perf_counter() > began + limit_s:
                raise TimeoutError from None
            continue
        if isinstance(job, BaseException):
            raise job
        jobs[number] = job
    done = [jobs[number] for number in range(len(agents))]
    returns = [first for job in done for first in job.firsts[1:]]
    return Timed([job.seconds for job in done], [job.firsts[0] for job in done], returns, [job.tokens for job in done])


def warm_ids(vocab_tokens: int) -> list[int]:
    return random.Random("warm").choices(range(64, vocab_tokens), k=WARM_TOKENS)


# -- attnix -------------------------------------------------------------------------------------------------------------


class OurAgent:
    """A connection with one context.

    tells   "eta": says which tool it waits for and when that returns; "tool": which tool; "": nothing, as before wait_tool
    """

    def __init__(self, path: str, number: int, tells: str, limit_s: float) -> None:
        self.client: Final = connect(path, name=f"agent-{number}", timeout=limit_s)
        self.refused = 0
        self._context: Final[Context] = self.client.alloc_context()
        self._tells: Final = tells
        self._waits = False

    def turn(self, turn: Turn, ids: list[int]) -> Answer:
        added = self._add(ids)
        while True:
            stream = self._context.stream(turn.answer, ignore_eos=True)
            first = 0.0
            try:
                for _ in stream:
                    first = first or time.perf_counter()
                added.result()
                return Answer(first, unpack_ids(stream.result().tokens))
            except TryAgain as refusal:  # load control
                added.result()
                self.refused += 1
                after_ms = refusal.detail.get("retry_after_ms")
                time.sleep(after_ms / 1e3 if isinstance(after_ms, int) else RETRY_S)

    def leave(self, turn: Turn) -> None:
        if self._tells:
            self._context.wait_tool(turn.tool, eta=turn.wait_s if self._tells == "eta" else None)
            self._waits = True

    def _add(self, ids: list[int]) -> Pending[Any]:
        """Sent without waiting for the answer, so that it arrives together with the request to generate."""
        packed, handle = pack_ids(ids), self._context.handle
        if not self._waits:
            return self.client.submit("append", AppendArgs(handle, packed, more=True), AppendResult)
        self._waits = False
        return self.client.submit("resume", ResumeArgs(handle, 0, packed, more=True), ResumeResult)


def attnix(tells: str) -> Engine:
    """tells: as of OurAgent."""

    def run(work: Workload, room: Room, weights: Weights, limit_s: float) -> Outcome:
        flags = ["--dram", str(room.spill_bytes)]
        with (
            tempfile.TemporaryDirectory(prefix="attnix-agents-") as directory,
            booted(weights.model, directory, room.kv_bytes, flags) as ours,
        ):
            ours.prefill([warm_ids(weights.vocab_tokens)])
            ours.decode(4)
            ours.close()
            agents = [OurAgent(ours.client.path, number, tells, limit_s) for number in range(len(work.agents))]
            before = ours.client.vmstat().counters
            try:
                timed = together(work, agents, limit_s)
            except (TimeoutError, ConnectionLost) as error:
                raise BenchError(f"attnix did not finish within {limit_s:.0f} s: {error}") from error
            after = ours.client.vmstat().counters
            for agent in agents:
                agent.client.close()
            version = f"attnix {ours.uname.version}"
        counted = {name: float(value - before.get(name, 0)) for name, value in after.items()}
        answers = sum(turn.answer - 1 for turns in work.agents for turn in turns)
        notes = {name: value for name, value in counted.items() if value}
        notes["refused"] = sum(agent.refused for agent in agents)
        computed = int(counted["computed_tokens"])
        return Outcome(version, *timed[:3], computed - answers, timed.tokens, notes)

    return run


# -- llama.cpp's server -------------------------------------------------------------------------------------------------


class LlamaAgent:
    """Requests to /completion with the whole conversation as token ids: its server keeps the rest."""

    def __init__(self, port: int, slot: int, limit_s: float) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._connection: Final = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
        self._slot: Final = slot
        self._log: list[int] = []

    def turn(self, turn: Turn, ids: list[int]) -> Answer:
        self._log += ids
        request = {
            "prompt": self._log, "n_predict": turn.answer, "stream": True, "return_tokens": True, "cache_prompt": True,
            "id_slot": self._slot, "temperature": 0.0, "top_k": 1, "samplers": ["top_k"], "ignore_eos": True,
        }  # fmt: skip
        self._connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise PeerMissing(f"its server answered {response.status}: {response.read(300).decode(errors='replace')}")
        first, tokens = 0.0, list[int]()
        for line in response:
            if not line.startswith(b"data: "):
                if line.startswith(b"error"):
                    raise PeerMissing(line.decode(errors="replace")[:300])
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise PeerMissing(f"its server failed: {event['error']}"[:300])
            if event["stop"]:
                self.prompt_tokens += event["timings"]["prompt_n"]
                self.cached_tokens += event["timings"]["cache_n"]
            else:
                first = first or time.perf_counter()
                tokens += event["tokens"]
        self._log += tokens
        self.close()  # the server does that after some idle seconds; the next request opens another
        return Answer(first, tokens)

    def leave(self, turn: Turn) -> None:
        return

    def close(self) -> None:
        self._connection.close()


def llama(python: str, unified: bool, pinned: bool = False) -> Engine:
    """unified: one KV cache for all slots (`--kv-unified`).  pinned: an agent always asks for the same slot."""

    def run(work: Workload, room: Room, weights: Weights, limit_s: float) -> Outcome:
        with llama_server(python, unified, room, weights) as (port, version):
            warm = LlamaAgent(port, -1, limit_s)
            warm.turn(Turn([], 4, "", 0.0), warm_ids(weights.vocab_tokens))
            slots = [i % room.slots if pinned else -1 for i in range(len(work.agents))]
            agents = [LlamaAgent(port, slot, limit_s) for slot in slots]
            try:
                timed = together(work, agents, limit_s)
            except TimeoutError:
                raise PeerMissing(f"it did not finish within {limit_s:.0f} s") from None
            except OSError as error:
                raise PeerMissing(f"its server went away: {error}") from error
            finally:
                for agent in (warm, *agents):
                    agent.close()
        notes = {"cached_tokens": float(sum(agent.cached_tokens for agent in agents))}
        return Outcome(version, *timed[:3], sum(agent.prompt_tokens for agent in agents), timed.tokens, notes)

    return run


@contextlib.contextmanager
def llama_server(python: str, unified: bool, room: Room, weights: Weights) -> Iterator[tuple[int, str]]:
    """Its port and version.  Error: PeerMissing."""
    binary = Path(python).with_name("llama-server")
    if not binary.exists():
        raise PeerMissing(f"there is no {binary}; `make peers` builds it")
    port = free_port()
    command = [
        str(binary), "--model", weights.gguf, "--host", "127.0.0.1", "--port", str(port), "--threads", str(cores()),
        "--ctx-size", str(room.slot_tokens), "--parallel", str(room.slots), "--cache-ram", str(room.spill_bytes >> 20),
        "--kv-unified" if unified else "--no-kv-unified", "--no-webui", "--offline",
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
        try:
            end = time.monotonic() + START_S
            while not healthy(port):
                if server.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise PeerMissing(f"{binary.name} did not start: {log.read()[-300:]}")
                time.sleep(0.1)
            yield port, llama_version(binary)
        finally:
            server.kill()
            server.wait()


def die_with_parent() -> None:
    """In a new process: what kills the benchmark also ends the server."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def healthy(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False


def llama_version(binary: Path) -> str:
    said = subprocess.run([str(binary), "--version"], capture_output=True, text=True)
    lines = (said.stdout + said.stderr).splitlines()
    return next((f"llama.cpp {line}" for line in lines if line.startswith("version")), "llama.cpp")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# -- vLLM ---------------------------------------------------------------------------------------------------------------


def vllm(python: str, cache: Path, block_tokens: int) -> Engine:
    """cache: where it keeps what it compiles."""

    def run(work: Workload, room: Room, weights: Weights, limit_s: float) -> Outcome:
        settings: dict[str, Any] = {"hf": weights.hf, "kv_bytes": room.kv_bytes, "agents": len(work.agents)}
        settings["block_tokens"] = block_tokens
        settings["window"] = work.longest_tokens + 64
        intel = (
            Path(python).parents[1] / "lib" / "libiomp5.so"
        )  # its manual asks for Intel's OpenMP, which its wheel brings
        environment = {"OMP_NUM_THREADS": str(cores()), "VLLM_CACHE_ROOT": str(cache)}
        environment |= {"LD_PRELOAD": str(intel)} if intel.exists() else {}
        with tempfile.TemporaryDirectory(prefix="attnix-agents-") as directory:
            peer = Peer("agents_vllm", python, settings, environment, Path(directory) / "vllm.err")
            late = threading.Timer(limit_s, peer.end)
            try:
                peer.call("warm", warm_ids(weights.vocab_tokens))
                late.start()
                got = peer.call("run", work.system, work.agents)
            except PeerMissing as missing:
                raise (
                    missing if late.is_alive() else PeerMissing(f"it did not finish within {limit_s:.0f} s")
                ) from missing
            finally:
                late.cancel()
                peer.end()
        return Outcome(peer.version, *(got[name] for name in Outcome._fields[1:]))

    return run


def engines(python: str, cache: Path) -> dict[str, Engine]:
    """All of them, by the names that `--engine` takes; python is the peers' interpreter."""
    return {
        "attnix": attnix("eta"),
        "attnix-no-eta": attnix("tool"),
        "attnix-no-wait": attnix(""),
        "vllm": vllm(python, cache, 128),
        "vllm-32": vllm(python, cache, 32),
        "llama.cpp": llama(python, unified=False),
        "llama.cpp-pinned": llama(python, unified=False, pinned=True),
        "llama.cpp-unified": llama(python, unified=True),
    }


def peers_python(given: str) -> str:
    """The interpreter of the peers' venv."""
    return given or str(Path(__file__).resolve().parents[2] / ".venv-peers" / "bin" / "python")
