"""Builds `attnix.kernel._core`, the C core (cffi, API mode).

Sources are named through `src/attnix/`, because that is all the sdist holds.  No -march: wheels are portable.
ATTNIX_SANITIZE=1 builds it with AddressSanitizer and UBSan (tests/diff/asan.sh).
"""

from __future__ import annotations

import os
from pathlib import Path

import cffi

CSRC = "src/attnix/kernel/csrc"
SOURCES = [
    "core.c",
    "index.c",
    "frames.c",
    "slots.c",
    "mapping.c",
    "passes.c",
    "tiers.c",
    "tell.c",
    "look.c",
    "groups.c",
]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1"]

_header = Path(__file__).resolve().with_name("csrc") / "core.h"
_sanitize = os.environ.get("ATTNIX_SANITIZE") == "1"

ffi = cffi.FFI()
ffi.cdef(_header.read_text().split("/* CDEF */")[1].split("/* END */")[0])
ffi.set_source(
    "attnix.kernel._core",
    '#include "core.h"',
    sources=[f"{CSRC}/{name}" for name in SOURCES],
    depends=[f"{CSRC}/{name}" for name in ("core.h", "state.h", "siphash.h")],
    include_dirs=[CSRC],
    extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wextra", *(SANITIZE if _sanitize else [])],
    extra_link_args=["-fsanitize=address,undefined"] if _sanitize else [],
)

if __name__ == "__main__":
    ffi.compile(tmpdir=".", verbose=True)
