"""The tree, parsed once: every Python file of the project with its syntax tree."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernel", "drivers", "syscalls", "userland", "kernels_gpu")


class Source(NamedTuple):
    path: str  # relative to the root, as a person names it: kernel/step.py, not src/attnix/kernel/step.py
    tree: ast.Module


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def folders() -> tuple[str, ...]:
    return FOLDERS


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    """Every .py file, each once: the five folders by their real paths, then src/, tests/ and setup.py."""
    files = [f for name in (*FOLDERS, "tests") for f in (ROOT / name).rglob("*.py")]
    files += [*(ROOT / "src" / "attnix").glob("*.py"), ROOT / "setup.py"]
    return [Source(str(f.relative_to(ROOT)), ast.parse(f.read_bytes(), str(f))) for f in sorted(files)]
