"""The documents name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernel", "drivers", "syscalls", "userland", "kernels_gpu", "tests", "docs", "src")


@pytest.mark.parametrize("document", ["docs/tour.md", "docs/invariants.md", "README.md", "docs/log.md"])
def test_every_path_in_backquotes_is_there(document: str) -> None:
    text = (ROOT / document).read_text()
    named = [p for p in re.findall(r"`([\w./-]+/[\w.-]*)`", text) if p.split("/")[0] in FOLDERS]
    assert named, f"{document} names no file"
    assert not [p for p in named if not (ROOT / p).exists()]
