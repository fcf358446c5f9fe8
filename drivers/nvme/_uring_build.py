"""Builds `attnix.drivers.nvme._uring`, the io_uring engine (cffi, API mode), where liburing's headers are.

Without them setup.py leaves it out, and the driver reads and writes with a pool of threads.
"""

from __future__ import annotations

from pathlib import Path

import cffi

CSRC = "src/attnix/drivers/nvme/csrc"

_header = Path(__file__).resolve().with_name("csrc") / "uring.h"

ffi = cffi.FFI()
ffi.cdef(_header.read_text().split("/* CDEF */")[1].split("/* END */")[0])
ffi.set_source(
    "attnix.drivers.nvme._uring",
    '#include "uring.h"',
    sources=[f"{CSRC}/uring.c"],
    depends=[f"{CSRC}/uring.h"],
    include_dirs=[CSRC],
    extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra"],
    libraries=["uring"],
)

if __name__ == "__main__":
    ffi.compile(tmpdir=".", verbose=True)
