"""Ahead-of-time checks, on any machine: `python -m attnix.kernels_gpu.aot [--all]`.

Every wrapper is called as a pass calls it, with host tensors, under a driver that is none: what would be launched is compiled
for sm_80, sm_90 and sm_100 instead, with the same constants and specialisations, and the cubin is read (cubin.py).  The rules:

    every kernel   fits the architecture's shared memory
    decode         no local memory, no stack, no spills
    prefill and products   the architecture's matrix instructions: HMMA, HGMMA, UTCHMMA
    every row      of the launch table was taken by one of them (unless --only leaves some out)

`--all` is every row of the launch table with every dtype of KV and every block size; without it a subset that has every
kernel and every row on every architecture (`aot_cases.py` says which).  Triton's cache and a report beside each cubin make a
repeat quick.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import JITFunction
from triton.runtime.driver import driver

from .aot_cases import Case, cases, run
from .cubin import Usage, usage
from .launch import SHARED_BYTES, compiling_for
from .launch_table import ROWS, Row

MATRIX_OF: Final = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
DECODE: Final = ("decode",)  # parts of kernel names to which a rule applies
MULTIPLIES: Final = ("prefill", "linear", "matmul")


class Finding(NamedTuple):
    """One kernel of a case, and what is wrong with it."""

    case: Case
    usage: Usage
    faults: tuple[str, ...]


class Checked(NamedTuple):
    """What a case launches, and the launch rows that it took."""

    findings: tuple[Finding, ...]
    rows: frozenset[Row]


class _NoDevice(DriverBase):
    """Says what to compile for.  Every architecture is a device of its own, so that Triton keeps their kernels apart."""

    def __init__(self, architecture: int) -> None:
        super().__init__()
        self._architecture = architecture

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_device(self) -> int:
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self._architecture, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


@contextlib.contextmanager
def compiled_instead(architecture: int) -> Iterator[tuple[list[Any], set[Row]]]:
    """Inside, a launch compiles and adds what it made to the list, its row to the set; nothing runs."""
    made: list[Any] = []
    launch_one = JITFunction.run

    def compile_one(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        made.append(launch_one(self, *args, grid=grid, warmup=True, **kwargs))
        return made[-1]

    before = driver._active
    driver.set_active(_NoDevice(architecture))
    JITFunction.run = compile_one
    try:
        with compiling_for(architecture) as rows:
            yield made, rows
    finally:
        JITFunction.run = launch_one
        driver._active = before


def check(case: Case) -> Checked:
    """Compile all that a case launches and judge it."""
    with compiled_instead(case.architecture) as (made, rows):
        run(case)
    found = {each.hash: usage(each) for each in made}
    return Checked(tuple(Finding(case, each, tuple(faults(case, each))) for each in found.values()), frozenset(rows))


def faults(case: Case, found: Usage) -> Iterator[str]:
    if found.shared > SHARED_BYTES[case.architecture]:
        yield f"{found.shared} bytes of shared memory of {SHARED_BYTES[case.architecture]}"
    if any(part in found.kernel for part in DECODE) and (found.local or found.stack or found.spills):
        yield f"decode with local {found.local}, stack {found.stack}, {found.spills} spills"
    wanted = MATRIX_OF[case.architecture]
    if case.multiplies and any(part in found.kernel for part in MULTIPLIES) and wanted not in found.matrix:
        yield f"no {wanted}, but {', '.join(found.matrix) or 'nothing'}"


def never_taken(architectures: Collection[int], taken: Collection[Row]) -> list[Row]:
    """Rows of the table that would be launched first on a user's device."""
    return [row for row in ROWS if row[1] in architectures and row not in taken]


def check_all(chosen: Sequence[Case], workers: int) -> Iterator[Checked]:
    if workers <= 1:
        yield from map(check, chosen)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(check, chosen)


def show(finding: Finding) -> str:
    case, found = finding.case, finding.usage
    return (
        f"{found.kernel:28} sm_{case.architecture:<4} {case.title:30} {found.registers:>4} {found.stack:>6} {found.local:>6} "
        f"{found.spills:>7} {found.shared:>8} {found.widest_load:>5}  {' '.join(found.matrix) or '-':16} {'; '.join(finding.faults)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="attnix.kernels_gpu.aot", description="Compile and judge every kernel, without a GPU."
    )
    parser.add_argument("--all", action="store_true", help="every launch row and dtype, not the subset that CI takes")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose kernel or title contains TEXT")
    parser.add_argument("--architecture", type=int, action="append", help="only this one; may be repeated")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (%(default)s)")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("attnix.kernels_gpu.aot: with TRITON_INTERPRET=1 nothing is compiled")
    began = time.monotonic()
    chosen = [
        case
        for case in cases(every=options.all)
        if options.only in f"{case.kernel} {case.title}" and case.architecture in (options.architecture or MATRIX_OF)
    ]
    print(f"{'kernel':28} {'':7} {'case':30}  reg  stack  local  spills   shared  load  matrix")
    seen: set[str] = set()
    taken: set[Row] = set()
    bad = 0
    for checked in check_all(chosen, options.workers):
        taken |= checked.rows
        for finding in checked.findings:
            if (line := show(finding)) not in seen:  # the same kernel serves many cases
                print(line, flush=True)
                bad += bool(finding.faults)
            seen.add(line)
    for row in [] if options.only else never_taken(options.architecture or list(MATRIX_OF), taken):
        print(f"launch row {row} was taken by no case")
        bad += 1
    print(f"{len(chosen)} cases, {len(seen)} kernels, {bad} bad, {time.monotonic() - began:.0f} s")
    sys.exit(1 if bad or not seen else 0)


if __name__ == "__main__":
    main()
