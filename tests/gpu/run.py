"""`make gpu`: everything that needs a GPU, in one command, with no network; see --help.

    python tests/gpu/run.py [--dry] [--only NAME ...] [--results FILE]

Steps, each a process of its own; a step that fails does not stop the next:

    kernels      every test in tests/gpu on the device: against the references, 250 repeats bit-equal
    memcheck, racecheck    every kernel once under compute-sanitizer, where that is installed
    engine       conformance and model tests of the accel driver on CUDA
    e2e          the end-to-end tests with their daemons on CUDA
    attention, decode, tiers, overlap    `attnix bench ...` on CUDA

Then a section with device, date, command and results is appended to docs/performance.md.  Any Python from 3.11 on will do
that has torch >= 2.11 with CUDA, triton >= 3.6 and the wheels below; the C modules are built in place where they are missing.
Where SmolLM2's file is missing, a file of the same geometry with seeded random weights (attnix.stand_in) takes its place, and
tests that know what the model answers are left out.

`--dry` does the same with tiny sizes where there is no GPU: the interpreter in place of the device, `--device cuda-dry` for
daemons.  It records nothing: its times are no speeds.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "docs" / "performance.md"
WHEELS: Final = {  # distribution: least version; torch's CUDA wheels bring triton
    "torch": "2.11", "triton": "3.6", "numpy": "2", "pytest": "8.3", "pytest-asyncio": "0.26", "hypothesis": "6.130", "cffi": "1.17",
    "msgspec": "0.19", "msgpack": "1.1", "uvloop": "0.21", "gguf": "0.17", "safetensors": "0.5", "tokenizers": "0.21", "jinja2": "3.1",
    "typer": "0.15", "rich": "13",
}  # fmt: skip
SANITIZERS: Final = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")
KNOWS_ANSWERS: Final = ("test_real_model.py", "test_real_programs.py", "test_real_agents.py")  # of SmolLM2's


class Step(NamedTuple):
    """command is run by this Python; shown: what it prints is a result."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = {}
    shown: bool = False
    program: str = sys.executable
    missing: str = ""  # why it cannot run here


class Outcome(NamedTuple):
    step: Step
    status: int
    seconds: float
    output: str

    @property
    def verdict(self) -> str:
        if self.step.missing:
            return f"skipped: {self.step.missing}"
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
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_DEFAULT_FP_FUSION": "1"}


def build() -> None:
    """The C modules in place, when they are not.  Error: SystemExit."""
    if any((ROOT / "kernel").glob("_core*.so")) and any((ROOT / "drivers" / "accel" / "cpu").glob("_cpu*.so")):
        return
    done = subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=ROOT)
    if done.returncode:
        sys.exit("make gpu: the C modules could not be built; gcc, Python's headers and setuptools are needed")


def model_file(scratch: Path, dry: bool) -> tuple[Path, bool]:
    """The model, and whether it is a stand-in."""
    home = Path(os.environ.get("ATTNIX_HOME") or Path.home() / ".cache" / "attnix")
    files = sorted((home / "models" / "smollm2").glob("*.gguf"))
    if files and not dry:
        return files[0], False
    path = scratch / "home" / "models" / "smollm2" / "stand-in.gguf"
    path.parent.mkdir(parents=True)
    flags = ["--small"] if dry else []
    subprocess.run(
        [sys.executable, "-m", "attnix.stand_in", str(path), *flags],
        env=environment(),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return path, True


def steps(dry: bool, scratch: Path) -> Iterator[Step]:
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no")
    attnix = ("-m", "attnix.userland.cli")
    model, stand_in = model_file(scratch, dry)
    device = {"ATTNIX_DEVICE": "cuda-dry" if dry else "cuda", "ATTNIX_TEST_DEVICE": "cuda-dry" if dry else "cuda"}
    home = {"ATTNIX_HOME": str(scratch / "home")} if stand_in else {}
    if dry:
        yield Step("kernels", (*pytest, "tests/gpu/test_narrow.py"))
    else:
        yield Step(
            "kernels", (*pytest, "tests/gpu", "--deselect", "tests/gpu/test_launch.py::test_make_gpu_in_a_dry_run")
        )
    yield from sanitized(dry)
    engine = [
        "tests/conformance/test_accel.py",
        *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests/model").glob("test_cuda*.py")),
    ]
    if dry:
        yield Step("engine", (*pytest, engine[0], "-k", "cuda and probe"), device)
    else:
        yield Step("engine", (*pytest, *engine), device)
    if dry:
        yield Step("e2e", (*pytest, "tests/e2e", "--collect-only"), device | home)
    else:
        left_out = [f"--ignore=tests/e2e/{name}" for name in KNOWS_ANSWERS] if stand_in else []
        yield Step("e2e", (*pytest, "tests/e2e", *left_out), device | home)
    tiny = ("--rounds", "1") if dry else ()
    yield Step("attention", (*attnix, "bench", "attention", *(("--dry", *tiny) if dry else ())), device, shown=True)
    at = ("--model", str(model))
    quick = ("--quick", "--only", "batch 1,", "--hbm-mib", "64") if dry else ()
    yield Step("decode", (*attnix, "bench", "decode", *at, "--peers", "", *quick), device | home, shown=True)
    yield Step(
        "tiers", (*attnix, "bench", "tiers", *at, *tiny, *(("--nvme-frames", "8") if dry else ())), device, shown=True
    )
    short = ("--tokens", "256", "--tiers", "dram") if dry else ()
    yield Step("overlap", (*attnix, "bench", "overlap", *at, *tiny, *short), device | home, shown=True)


def sanitized(dry: bool) -> Iterator[Step]:
    run = ("-m", "attnix.kernels_gpu.exercise")
    if dry:
        yield Step("memcheck", run)
        return
    tool = shutil.which("compute-sanitizer") or next((path for path in SANITIZERS if os.path.exists(path)), "")
    for name in ("memcheck", "racecheck"):
        watched = ("--tool", name, "--error-exitcode", "9", sys.executable, *run)
        off = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that every allocation has an end that is watched
        yield Step(name, watched, off, program=tool, missing="" if tool else "compute-sanitizer is not installed")


def run(step: Step) -> Outcome:
    if step.missing:
        return Outcome(step, 0, 0.0, "")
    began = time.monotonic()
    done = subprocess.run(
        [step.program, *step.command], cwd=ROOT, env=environment() | dict(step.environment), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT if not step.shown else None,
    )  # fmt: skip
    return Outcome(step, done.returncode, time.monotonic() - began, done.stdout)


def section(device: str, outcomes: Sequence[Outcome], stand_in: bool) -> str:
    """What is appended to docs/performance.md."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "triton"))
    lines = [
        f"\n## On a GPU: `make gpu` ({datetime.date.today().isoformat()}, {device})\n",
        f"Python {sys.version.split()[0]}, {versions}. " + ("The model is a stand-in with random weights." if stand_in else "SmolLM2-135M."),
        "", "| step | result | seconds |", "|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {o.step.name} | {o.verdict} | {o.seconds:.0f} |" for o in outcomes]
    for outcome in outcomes:
        if outcome.step.shown and outcome.status == 0:
            lines += ["", f"`attnix bench {outcome.step.name}`:", "", "```"]
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
            print(f"== {step.name}: {' '.join(step.command)}", flush=True)
            outcome = run(step)
            if outcome.status or step.shown:
                print(outcome.output[-20_000:])
            print(f"== {step.name} {outcome.verdict}, {outcome.seconds:.0f} s", flush=True)
            outcomes.append(outcome)
        stand_in = any("ATTNIX_HOME" in step.environment for step in planned)
    if not options.dry:
        with options.results.open("a") as file:
            file.write(section(device, outcomes, stand_in))
        print(f"appended to {options.results}")
    print(json.dumps({o.step.name: o.verdict for o in outcomes}))
    sys.exit(any(o.status for o in outcomes))


if __name__ == "__main__":
    main()
