"""Builds `attnix.drivers._stored`: CRC-32C and stored frames (cffi, API mode).

Sources are named through `src/attnix/`, because that is all the sdist holds.  Instruction sets are chosen at run time.
ATTNIX_SANITIZE=1 builds it with AddressSanitizer and UBSan (tests/diff/asan.sh).
"""

from __future__ import annotations

import os
from pathlib import Path

import cffi

CSRC = "src/attnix/drivers/csrc"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1"]

_header = Path(__file__).resolve().with_name("csrc") / "stored.h"
_sanitize = os.environ.get("ATTNIX_SANITIZE") == "1"

ffi = cffi.FFI()
ffi.cdef(_header.read_text().split("/* CDEF */")[1].split("/* END */")[0])
ffi.set_source(
    "attnix.drivers._stored",
    '#include "stored.h"',
    sources=[f"{CSRC}/crc32c.c", f"{CSRC}/stored.c"],
    depends=[f"{CSRC}/stored.h"],
    include_dirs=[CSRC],
    extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wextra", *(SANITIZE if _sanitize else [])],
    extra_link_args=["-fsanitize=address,undefined"] if _sanitize else [],
)

if __name__ == "__main__":
    ffi.compile(tmpdir=".", verbose=True)
