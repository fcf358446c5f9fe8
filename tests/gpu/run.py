"""`make gpu`: everything that needs a GPU, in one command, with no network; see --help.

    python tests/gpu/run.py [--dry] [--only NAME ...] [--results FILE]

Steps, each a process of its own; a step that fails does not stop the next:

    kernels      every test in tests/gpu on the device: against the references, 250 repeats bit-equal
    memcheck, racecheck    every kernel once under compute-sanitizer, where that is installed and takes the device
    engine       conformance of the accel driver on CUDA (against the CPU engine it is compared by tests/gpu/test_engine.py)
    e2e          the end-to-end tests with their daemons on CUDA
    attention, decode, tiers, overlap    `attnix bench ...` on CUDA

Then a section with device, date, commands and results is appended to docs/performance.md.  Any Python from 3.11 on will do
that has torch >= 2.11 with CUDA, triton >= 3.6 and the wheels below; the C modules are built in place where they are missing.
Where SmolLM2's file is missing, a file of the same geometry with seeded random weights (attnix.stand_in) takes its place, and
tests that know what the model answers are left out.

`--dry` goes through the same steps where there is no GPU: a few tests of each, tiny models and sizes, the Triton kernels in
Triton's interpreter and daemons with `--device cuda-dry`; in e2e and overlap plain torch stands for the kernels.  It records
nothing: its times are no speeds.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "docs" / "performance.md"
WHEELS: Final = {  # distribution: least version; torch's CUDA wheels bring triton
    "torch": "2.11", "triton": "3.6", "numpy": "2", "pytest": "8.3", "pytest-asyncio": "0.26", "hypothesis": "6.130", "cffi": "1.17",
    "setuptools": "77", "msgspec": "0.19", "msgpack": "1.1", "uvloop": "0.21", "gguf": "0.17", "safetensors": "0.5",
    "tokenizers": "0.21", "jinja2": "3.1", "typer": "0.15", "rich": "13",
}  # fmt: skip
DRY_TESTS: Final = {
    "kernels": ("tests/gpu/test_narrow.py", "tests/gpu/test_paged_attention.py::test_decode_shares_end_anywhere"),
    "engine": ("tests/conformance/test_accel.py", "-k", "cuda and probe"),
    "e2e": ("tests/e2e/test_real_hierarchy.py::test_a_prefix_is_found_after_a_restart[SIGTERM]",),
}
SANITIZERS: Final = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")
KNOWS_ANSWERS: Final = ("test_real_model.py", "test_real_programs.py", "test_real_agents.py")  # of SmolLM2's


CLI: Final = "attnix.userland.cli"


class Step(NamedTuple):
    """command is run by this Python; shown: what it prints is a result.

    stand_ins  files it takes for the model, with their shapes (attnix.stand_in), made when it runs
    missing    asked before it runs: why it cannot here
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = {}
    shown: bool = False
    program: str = sys.executable
    stand_ins: Mapping[Path, str] = {}
    missing: Callable[[], str] = str

    @property
    def typed(self) -> str:
        """The command as one would type it."""
        names = {str(path): path.name for path in self.stand_ins}
        words = [names.get(word, word) for word in self.command]
        if words[:2] == ["-m", CLI]:
            return shlex.join(["attnix", *words[2:]])
        return shlex.join([Path(self.program).name, *words])


class Outcome(NamedTuple):
    step: Step
    status: int
    seconds: float
    output: str
    missing: str = ""

    @property
    def verdict(self) -> str:
        if self.missing:
            return f"skipped: {self.missing}"
        return "passed" if self.status == 0 else f"FAILED, status {self.status}"


def lacking() -> list[str]:
    """What this Python has not got, one a line."""
    made = []
    for name, least in WHEELS.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            made.append(f"{name}>={least}: not installed")
            continue
        if _numbers(found) < _numbers(least):
            made.append(f"{name}>={least}: here is {found}")
    return made


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts[:2] if part.isdigit())


def device_name() -> str:
    """ "" where torch sees no GPU.  Asked in a process of its own: this one shall hold no device."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def unbuilt() -> list[str]:
    """C modules that are not there.  Without liburing's headers setup.py leaves its own out."""
    sources = [path for folder in ("kernel", "drivers") for path in (ROOT / folder).rglob("_*_build.py")]
    modules = [path.with_name(path.name.removesuffix("_build.py")) for path in sources]
    if not any(Path(folder, "liburing.h").exists() for folder in ("/usr/include", "/usr/local/include")):
        modules = [module for module in modules if module.name != "_uring"]
    return [str(m.relative_to(ROOT)) for m in modules if not any(m.parent.glob(f"{m.name}.*.so"))]


def build() -> None:
    """The C modules in place, when one is missing.  Error: SystemExit."""
    if not unbuilt():
        return
    done = subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=ROOT)
    if done.returncode or unbuilt():
        sys.exit("make gpu: the C modules could not be built; gcc, Python's headers and setuptools are needed")


def steps(dry: bool, scratch: Path) -> Iterator[Step]:
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no")
    attnix = ("-m", CLI)
    kind = "cuda-dry" if dry else "cuda"
    device = {"ATTNIX_DEVICE": kind, "ATTNIX_TEST_DEVICE": kind}
    interpreted = device | ({"ATTNIX_CUDA_DRY": "interpreter"} if dry else {})
    ours = Path(os.environ.get("ATTNIX_HOME") or Path.home() / ".cache" / "attnix")
    real = sorted((ours / "models" / "smollm2").glob("*.gguf"))
    # A folder in place of the user's, in which the tests find the model.
    pulled: Mapping[Path, str] = {}
    home = {}
    if dry or not real:
        pulled = {scratch / "home" / "models" / "smollm2" / "stand-in.gguf": "thin" if dry else "smollm2"}
        home = {"ATTNIX_HOME": str(scratch / "home")}
    if dry:
        yield Step("kernels", (*pytest, *DRY_TESTS["kernels"]))
    else:
        left_out = ("--deselect", "tests/gpu/test_dry_run.py")
        yield Step("kernels", (*pytest, "tests/gpu", *left_out))
    yield from sanitized(dry)
    yield Step(
        "engine", (*pytest, *(DRY_TESTS["engine"] if dry else ("tests/conformance/test_accel.py",))), interpreted
    )
    if dry:
        yield Step("e2e", (*pytest, *DRY_TESTS["e2e"]), device | home, stand_ins=pulled)
    else:
        unknown = [f"--ignore=tests/e2e/{name}" for name in KNOWS_ANSWERS] if pulled else []
        yield Step("e2e", (*pytest, "tests/e2e", *unknown), device | home, stand_ins=pulled)
    made = {scratch / "small.gguf": "small"} if dry else pulled
    at = ("--model", str(next(iter(made), None) or real[0]))
    tiny = ("--rounds", "1") if dry else ()
    yield Step("attention", (*attnix, "bench", "attention", *(("--dry", *tiny) if dry else ())), device, shown=True)
    quick = ("--quick", *tiny, "--steps", "4", "--only", "batch 1,", "--hbm-mib", "64") if dry else ()
    least = {scratch / "least.gguf": "least"} if dry else made
    which = ("--model", str(next(iter(least)))) if dry else at
    yield Step(
        "decode", (*attnix, "bench", "decode", *which, "--peers", "", *quick), interpreted | home, True, stand_ins=least
    )
    few = ("--nvme-frames", "8") if dry else ()
    yield Step("tiers", (*attnix, "bench", "tiers", *at, *tiny, *few), interpreted, True, stand_ins=made)
    short = ("--tokens", "256", "--tiers", "dram") if dry else ()
    # In a dry run plain torch computes here, as in e2e: it takes some hundred passes, minutes of the interpreter's.
    yield Step("overlap", (*attnix, "bench", "overlap", *at, *tiny, *short), device | home, True, stand_ins=made)


def sanitized(dry: bool) -> Iterator[Step]:
    run = ("-m", "attnix.kernels_gpu.exercise")
    if dry:
        yield Step("memcheck", run)
        return
    tool = shutil.which("compute-sanitizer") or next((path for path in SANITIZERS if os.path.exists(path)), "")
    for name in ("memcheck", "racecheck"):
        watched = ("--tool", name, "--error-exitcode", "9", sys.executable, *run)
        off = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that every allocation has an end that is watched
        yield Step(name, watched, off, program=tool, missing=functools.partial(refusal, tool))


@functools.cache
def refusal(tool: str) -> str:
    """Why compute-sanitizer cannot watch here, or nothing: some virtual machines do not let it at the device."""
    if not tool:
        return "compute-sanitizer is not installed"
    program = "import torch; torch.zeros(1, device='cuda').item()"
    done = subprocess.run(
        [tool, "--tool", "memcheck", sys.executable, "-c", program], text=True, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode == 0:
        return ""
    said = [line.strip("= ") for line in done.stdout.splitlines() if line.strip("= ")]
    reason = next(
        (line for line in said if "support" in line or "rror" in line), said[-1] if said else "no reason given"
    )
    return f"compute-sanitizer refuses this device: {reason[:120]}"


def run(step: Step) -> Outcome:
    if missing := step.missing():
        return Outcome(step, 0, 0.0, "", missing)
    for path, shape in step.stand_ins.items():
        if not path.exists():
            made = (sys.executable, "-m", "attnix.stand_in", str(path), "--shape", shape)
            subprocess.run(made, env=environment(), check=True, stdout=subprocess.DEVNULL)
    began = time.monotonic()
    done = subprocess.run(
        [step.program, *step.command], cwd=ROOT, env=environment() | dict(step.environment), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT if not step.shown else None,
    )  # fmt: skip
    return Outcome(step, done.returncode, time.monotonic() - began, done.stdout)


def section(device: str, outcomes: Sequence[Outcome], arguments: Sequence[str]) -> str:
    """What is appended to docs/performance.md."""
    stand_in = any(outcome.step.stand_ins for outcome in outcomes)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "triton"))
    lines = [
        f"\n## On a GPU: `make gpu` ({datetime.date.today().isoformat()}, {device})\n",
        f"Python {sys.version.split()[0]}, {versions}. " + ("The model is a stand-in with random weights." if stand_in else "SmolLM2-135M."),
        f"`{shlex.join(['python', 'tests/gpu/run.py', *arguments])}`",
        "", "| step | result | seconds |", "|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {o.step.name} | {o.verdict} | {o.seconds:.0f} |" for o in outcomes]
    for outcome in outcomes:
        if outcome.step.shown and outcome.status == 0:
            lines += ["", f"`{outcome.step.typed}`:", "", "```"]
            lines += [outcome.output.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="make gpu"
    )
    parser.add_argument("--dry", action="store_true", help="without a GPU: tiny sizes, the interpreter, no record")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this step; may be repeated")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the section is appended (docs/performance.md)"
    )
    options = parser.parse_args()
    lacks = lacking()
    if lacks:
        sys.exit("make gpu: this Python lacks\n  " + "\n  ".join(lacks))
    device = "" if options.dry else device_name()
    if not device and not options.dry:
        sys.exit("make gpu: torch sees no GPU here; `make gpu DRY=1` tries the same with tiny sizes in the interpreter")
    build()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="attnix-gpu-") as scratch:
        planned = list(steps(options.dry, Path(scratch)))
        unknown = set(options.only or ()) - {step.name for step in planned}
        if unknown:
            sys.exit(f"make gpu: no step is called {', '.join(sorted(unknown))}: {', '.join(s.name for s in planned)}")
        for step in planned:
            if options.only and step.name not in options.only:
                continue
            print(f"== {step.name}: {step.typed}", flush=True)
            outcome = run(step)
            if outcome.status or step.shown:
                print(outcome.output[-20_000:])
            print(f"== {step.name} {outcome.verdict}, {outcome.seconds:.0f} s", flush=True)
            outcomes.append(outcome)
    if not options.dry:
        with options.results.open("a") as file:
            file.write(section(device, outcomes, sys.argv[1:]))
        print(f"appended to {options.results}")
    print(json.dumps({o.step.name: o.verdict for o in outcomes}))
    sys.exit(any(o.status for o in outcomes))


if __name__ == "__main__":
    main()
