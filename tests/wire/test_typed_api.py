"""The typed API under both checkers: what must be accepted is, with the types it must have, and mistakes are found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_right_uses_have_their_types_and_mistakes_are_found(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong_api.py"
    wrong.write_text((HERE / "wrong_api.txt").read_text())
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    # follow-imports=silent: what is wrong elsewhere is not this test's business
    command += ["--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    ran = subprocess.run(
        [*command, str(HERE / "typed_api.py"), str(wrong)], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    found = {int(m[1]): m[2] for m in re.finditer(r"wrong_api\.py:(\d+): error: .*\[([\w-]+)\]", ran.stdout)}
    expected = {
        number: line.split("# error: ")[1]
        for number, line in enumerate(wrong.read_text().splitlines(), 1)
        if "# error: " in line
    }
    assert found == expected, ran.stdout + ran.stderr
    assert "typed_api.py:" not in ran.stdout, ran.stdout


def test_pyright_agrees(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong_api.py"
    wrong.write_text((HERE / "wrong_api.txt").read_text())
    settings: dict[str, Any] = {"extraPaths": [str(ROOT / "src")], "include": [str(HERE / "typed_api.py"), str(wrong)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--project",
        str(tmp_path),
        "--pythonpath",
        sys.executable,
        "--outputjson",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    diagnostics = json.loads(ran.stdout)["generalDiagnostics"]
    found = {(Path(d["file"]).name, d["range"]["start"]["line"] + 1) for d in diagnostics if d["severity"] == "error"}
    lines = wrong.read_text().splitlines()
    assert found == {("wrong_api.py", n) for n, line in enumerate(lines, 1) if "# error: " in line}, diagnostics
