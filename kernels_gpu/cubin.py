"""What a compiled kernel costs, read out of its cubin with the `cuobjdump` and `nvdisasm` that Triton brings.  No GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

import triton
from triton import knobs

_TOOLS: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_USAGE: Final = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION: Final = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
MATRIX: Final = ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA")
_FORMAT: Final = 1  # of the stored reports


class Usage(NamedTuple):
    """One kernel as one machine would run it.

    registers     per thread
    stack         bytes per thread; local: bytes of local memory per thread, the stack's not among them
    spills        loads and stores of local memory among the instructions
    shared        bytes per program, as Triton asks for them at launch
    tensor_memory columns of it (sm_100)
    matrix        which matrix instructions there are, of MATRIX
    widest_load   bits of the widest load from global memory
    """

    kernel: str
    registers: int
    stack: int
    local: int
    spills: int
    shared: int
    tensor_memory: int
    matrix: tuple[str, ...]
    widest_load: int


def usage(compiled: Any) -> Usage:
    """Of a triton CompiledKernel; remembered beside Triton's own cache, by its hash, so that it is read once."""
    store = Path(knobs.cache.dir) / "attnix-usage" / f"{compiled.hash}-{_FORMAT}.json"
    if store.is_file():
        found = json.loads(store.read_text())
        return Usage(**{**found, "matrix": tuple(found["matrix"])})
    made = _read(compiled)
    store.parent.mkdir(parents=True, exist_ok=True)
    draft = store.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(made._asdict()))
    draft.replace(store)
    return made


def _read(compiled: Any) -> Usage:
    """Error: RuntimeError when a tool fails or says something else than it did in Triton 3.9."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        resources = _run("cuobjdump", "--dump-resource-usage", file.name)
        listing = _run("nvdisasm", "-c", file.name)
    found = _USAGE.findall(resources)
    names = _INSTRUCTION.findall(listing)
    if len(found) != 1 or not names:
        raise RuntimeError(f"{compiled.metadata.name}: cannot read the cubin: {resources.strip()[-300:]}")
    registers, stack, _, local = map(int, found[0])
    seen = set(names)
    return Usage(
        compiled.metadata.name,
        registers,
        stack,
        local,
        sum(name in ("LDL", "STL") for name in names),
        int(compiled.metadata.shared),
        int(getattr(compiled.metadata, "tmem_size", 0) or 0),
        tuple(name for name in MATRIX if name in seen),
        max((_width(suffix) for suffix in re.findall(r"\bLDG((?:\.\w+)*)", listing)), default=0),
    )


def _width(suffix: str) -> int:
    for part, bits in ((".256", 256), (".128", 128), (".64", 64), (".U8", 8), (".S8", 8), (".U16", 16), (".S16", 16)):
        if part in suffix:
            return bits
    return 32


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([str(_TOOLS / tool), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool}: {done.stderr.strip()[-300:]}")
    return done.stdout
