"""The wheel and the sdist: built by the package's own build, installed into an empty venv, and run there.

The build is the real one: an sdist from a copy of this tree by `python -m build`, then the wheel from that sdist by pip,
with the C extensions compiled; that is what `pip install` of an sdist does before it installs.  Dependencies are not downloaded again: each venv gets a .pth that names this interpreter's
site-packages.  A plain .pth line does not read the .pth files that it leads to, so the editable install stays out of sight.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow

EXTENSIONS = {"attnix/kernel/_core.abi3.so", "attnix/drivers/_stored.abi3.so", "attnix/drivers/accel/cpu/_cpu.abi3.so"}
if any(Path(folder, "liburing.h").exists() for folder in ("/usr/include", "/usr/local/include")):  # as setup.py looks
    EXTENSIONS.add("attnix/drivers/nvme/_uring.abi3.so")
FLAGS = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir")
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "*.o")

# Run inside the empty venv, from a folder that is not the project's.
USE = """
import sys
import attnix
from attnix.drivers.accel.cpu import _cpu
from attnix.kernel import _core
from attnix.kernel.core import Core
from attnix.simulated import SimulatedSystem, ints, tokens_of

for module in (attnix, _core, _cpu):
    assert module.__file__.startswith(sys.prefix), module.__file__
assert _cpu.lib.ax_best_isa() >= 0

system = SimulatedSystem(core=Core, frames=12, block_tokens=4)
client = system.connect()
baseline = system.available()
ctx = client.call("alloc_context").ctx
client.call("append", ctx, ints([1, 2, 3, 4, 5, 6]))
assert len(tokens_of(client.call("generate", ctx, 8).tokens)) == 8
client.call("release", ctx)
assert system.available() == baseline
print("used", attnix.__version__)
"""


class Dists(NamedTuple):
    wheel: Path
    sdist: Path


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that must succeed; what it said is shown if it does not."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ATTNIX", "COV"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dists(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Dists:
    work = tmp_path_factory.mktemp("dist")
    shutil.copytree(root, work / "tree", symlinks=True, ignore=LEFT_OUT)
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", work / "out", work / "tree", cwd=work)
    (sdist,) = (work / "out").glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", *FLAGS, "--wheel-dir", work / "out", sdist, cwd=work)
    (wheel,) = (work / "out").glob("*.whl")
    return Dists(wheel, sdist)


def shipped_python(root: Path, folders: tuple[str, ...]) -> set[str]:
    """What the wheel must hold, by the names it has there."""
    package = root / "src" / "attnix"
    files = {f"attnix/{f.name}" for f in package.iterdir() if f.suffix == ".py" or f.name == "py.typed"}
    own = [d for d in package.iterdir() if d.is_dir() and not d.is_symlink()]  # packages above the layers: replay
    for folder, above in [(root / name, root) for name in folders] + [(d, package) for d in own]:
        for f in folder.rglob("*"):
            if f.suffix in (".py", ".pyi") or f.parent.name == "static":
                files.add(f"attnix/{f.relative_to(above)}")
    return files


def test_the_wheel_holds_the_package_and_nothing_else(dists: Dists, root: Path, folders: tuple[str, ...]) -> None:
    assert "-cp311-abi3-linux_" in dists.wheel.name, "one wheel serves every Python from 3.11 up"
    with zipfile.ZipFile(dists.wheel) as wheel:
        names = {n for n in wheel.namelist() if not n.endswith("/")}
    inside = {n for n in names if ".dist-info/" not in n}
    assert inside == shipped_python(root, folders) | EXTENSIONS
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_the_sdist_holds_what_the_build_needs(dists: Dists, root: Path, folders: tuple[str, ...]) -> None:
    with tarfile.open(dists.sdist) as sdist:
        members = sdist.getmembers()
    assert not any(m.issym() or m.islnk() for m in members), "pip drops symlinks on some systems"
    names = {m.name.partition("/")[2] for m in members if m.isfile()}
    c_files = {f"src/attnix/{f.relative_to(root)}" for name in folders for f in (root / name).rglob("csrc/*.[ch]")}
    assert c_files and c_files <= names
    assert {f"src/{n}" for n in shipped_python(root, folders)} <= names
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names
    assert not [n for n in names if n.endswith((".so", ".o", ".pyc"))]


def test_it_installs_into_an_empty_venv_and_runs(dists: Dists, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", *FLAGS, dists.wheel, cwd=tmp_path)
    assert run(python, "-W", "error", "-c", USE, cwd=tmp_path).startswith("used ")
    told = run(home / "bin" / "attnix", "--help", cwd=tmp_path)
    for command in ("boot", "pull", "run", "chat", "ps", "pmap", "free", "fsck", "demo"):
        assert command in told
