"""The kernels on the device where there is one, in Triton's interpreter on CPU tensors where there is none.

TRITON_INTERPRET is read when a kernel's module is imported, so it is set here, before any test imports one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

REPEATS_INTERPRETED = 50
REPEATS_ON_DEVICE = 250


@pytest.fixture(scope="session", autouse=True)
def language_patched_once() -> Iterator[None]:
    """The interpreter puts its own functions into triton.language at every call of a @jit function by another, which takes
    longer than the arithmetic.  Once per launch and language module does the same."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime import interpreter

    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[frozenset[int]] = set()

    def patch_once(fn: Any) -> Any:
        languages = frozenset(
            id(value) for value in fn.__globals__.values() if value is interpreter.tl or value is interpreter.tl.core
        )
        if languages in done:
            return interpreter._LangPatchScope()
        done.add(languages)
        return patch(fn)

    def run_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang", patch_once)
        patched.setattr(interpreter.GridExecutor, "__call__", run_anew)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def repeats() -> int:
    """How often a kernel must give the same bits: true races show on a device only."""
    return REPEATS_ON_DEVICE if torch.cuda.is_available() else REPEATS_INTERPRETED


@pytest.fixture
def shuffled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Call it with a seed: from then on the interpreter runs the programs of every launch in an order drawn from it.

    On a device it does nothing: the order there is the machine's.
    """
    if torch.cuda.is_available():
        yield lambda seed: None
        return
    from triton.runtime.interpreter import interpreter_builder

    draw = random.Random(0)
    order: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    set_dim, set_index = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx

    def shuffled_dim(x: int, y: int, z: int) -> None:
        set_dim(x, y, z)
        every = [(i, j, k) for i in range(x) for j in range(y) for k in range(z)]
        order.clear()
        order.update(zip(every, draw.sample(every, len(every)), strict=True))

    monkeypatch.setattr(interpreter_builder, "set_grid_dim", shuffled_dim)
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z: set_index(*order[x, y, z]))
    yield draw.seed
