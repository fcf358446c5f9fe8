"""What the layout needs and no tool checks: symlinks, import spelling, `__all__`, and declared dependencies."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import pytest


class Source(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def tree(self) -> ast.Module: ...


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(top-level name, line) of every absolute import, wherever in the file it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0], node.lineno


def bare(sources: Iterable[Source], folders: tuple[str, ...]) -> list[str]:
    return [f"{s.path}:{line}: import {name}" for s in sources for name, line in imported(s.tree) if name in folders]


def test_the_five_folders_are_reached_through_relative_symlinks(root: Path, folders: tuple[str, ...]) -> None:
    """Relative, or a clone elsewhere would import the first clone's code."""
    for name in folders:
        link = root / "src" / "attnix" / name
        assert link.is_symlink(), f"src/attnix/{name} is not a symlink"
        assert os.readlink(link) == f"../../{name}"
        assert (link / "__init__.py").is_file()
    assert (root / "src" / "attnix" / "py.typed").is_file()


def test_no_bare_import_of_a_folder(sources: list[Source], folders: tuple[str, ...]) -> None:
    """`import kernel` works from the root, and makes a second copy of every class in it."""
    assert bare(sources, folders) == []


@pytest.mark.parametrize(
    "line",
    [
        "import kernel",
        "import kernel.step as s",
        "from drivers import sim",
        "def f():\n    from syscalls.abi import CALLS",
    ],
)
def test_control_bare_imports_are_found(line: str, folders: tuple[str, ...]) -> None:
    class Made:
        path = "made.py"
        tree = ast.parse(line)

    assert len(bare([Made()], folders)) == 1


@pytest.mark.parametrize("line", ["from .kernel import x", "from attnix.kernel import x", "import attnix.drivers.sim"])
def test_control_the_right_spellings_pass(line: str, folders: tuple[str, ...]) -> None:
    class Made:
        path = "made.py"
        tree = ast.parse(line)

    assert bare([Made()], folders) == []


def declared_all(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets) and isinstance(
            node, ast.Assign | ast.AnnAssign
        ):
            assert node.value is not None
            names: list[str] = ast.literal_eval(node.value)
            return list(names)
    return None


def order(name: str) -> tuple[int, str]:
    """Constants, classes, the rest, each by name: ruff's order (RUF022), so that `make fmt` and this test agree."""
    if len(name) > 1 and name.isupper():
        return 0, name
    return (1, name) if name[:1].isupper() else (2, name)


def test_all_is_sorted_without_repeats_and_every_name_is_there(sources: list[Source]) -> None:
    seen = 0
    for source in sources:
        names = declared_all(source.tree)
        if names is None or source.path.startswith("tests/"):
            continue
        seen += 1
        assert names == sorted(set(names), key=order), f"{source.path}: __all__ is not sorted, or repeats a name"
        dotted = source.path.removesuffix(".py").removesuffix("/__init__").removeprefix("src/").replace("/", ".")
        module = importlib.import_module(dotted if dotted.startswith("attnix") else f"attnix.{dotted}")
        missing = [name for name in names if not hasattr(module, name)]
        assert not missing, f"{source.path}: __all__ names what is not there: {missing}"
    assert seen >= 3  # syscalls, its text and the drivers' public modules have one


def requirement_names(lines: Iterable[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower().replace("-", "_") for line in lines}


def third_party(sources: Iterable[Source]) -> dict[str, str]:
    """Import name -> first file that has it, of what is neither the standard library's nor ours."""
    found: dict[str, str] = {}
    for source in sources:
        for name, line in imported(source.tree):
            if name not in sys.stdlib_module_names and name not in ("attnix", "tests"):
                found.setdefault(name.lower(), f"{source.path}:{line}")
    return found


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, list[str]]:
    table = tomllib.loads((root / "pyproject.toml").read_text())
    return {
        "build": table["build-system"]["requires"],
        "runtime": table["project"]["dependencies"],
        "dev": table["project"]["optional-dependencies"]["dev"],
        "gpu": table["project"]["optional-dependencies"]["gpu"],
    }


def test_every_import_is_a_declared_dependency(
    sources: list[Source], project: dict[str, list[str]], root: Path
) -> None:
    """An import that only works since something else happens to install it breaks on the next machine."""
    runtime = requirement_names(project["runtime"])
    everywhere = runtime | requirement_names([*project["build"], *project["dev"]])
    ours = [s for s in sources if not s.path.startswith("tests/") and s.path != "setup.py"]
    kernels = [s for s in ours if s.path.startswith("kernels_gpu/")]  # the extra gpu is theirs alone
    shipped = third_party(s for s in ours if s not in kernels)
    undeclared = {name: where for name, where in shipped.items() if name not in runtime}
    assert not undeclared, "not in [project.dependencies]"
    for_gpu = runtime | requirement_names(project["gpu"])
    undeclared = {name: where for name, where in third_party(kernels).items() if name not in for_gpu}
    assert not undeclared, "neither in [project.dependencies] nor in the gpu extra"
    neighbours = {f.stem.lower() for f in (root / "tests").rglob("*.py")}  # a test's own helper module
    rest = third_party(s for s in sources if s.path.startswith("tests/") or s.path == "setup.py")
    undeclared = {name: where for name, where in rest.items() if name not in everywhere | neighbours}
    assert not undeclared, "not in the dev extra"


def test_every_dependency_is_used_and_justified(
    sources: list[Source], project: dict[str, list[str]], root: Path
) -> None:
    used = third_party(s for s in sources if not s.path.startswith("tests/"))
    said = (root / "docs" / "dependencies.md").read_text().lower().replace("-", "_")
    for name in sorted(requirement_names(project["runtime"])):
        assert f"| {name} |" in said, f"docs/dependencies.md does not say what {name} is for"
        assert name in used, f"{name} is a dependency that nothing imports"


def test_constraints_pin_everything_that_is_installed_by_name(project: dict[str, list[str]], root: Path) -> None:
    pins = [line for line in (root / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    loose = [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)]
    assert not loose, "constraints are name==version, without a local version"
    named = requirement_names([*project["runtime"], *project["dev"], *project["build"]])
    assert named <= requirement_names(pins), "installed, but not pinned"
    assert "torch==2.13.0" in pins
