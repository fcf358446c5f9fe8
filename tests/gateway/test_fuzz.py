"""schemathesis over the gateway's own OpenAPI document: what it allows and what it forbids, and never a 5xx.

A bounded number of cases here; `make fuzz-http` goes on for five minutes (ATTNIX_FUZZ_S).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from .conftest import Gateway
from .rig import environment

CASES = 6  # per operation, beside those that it derives from the document
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_no_5xx(gateway: Gateway, tmp_path: Path) -> None:
    seconds = int(os.environ.get("ATTNIX_FUZZ_S", "0"))
    served = gateway(window_tokens=192, frames=4096, max_contexts=1024)
    long = ["--max-time", str(seconds)] if seconds else ["--seed", "6", "--no-shrink", "--phases", "examples,fuzzing"]
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", f"{served.url}/openapi.json", "--checks", CHECKS,
        "--suppress-health-check", "all", "--max-examples", str(100 if seconds else CASES), "--request-timeout", "60",
        "--warnings", "off", *long,
    ]  # fmt: skip
    began_s = time.monotonic()
    said = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=seconds + 300
    )
    assert said.returncode == 0, said.stdout[-6000:] + said.stderr[-2000:]
    assert time.monotonic() - began_s >= seconds, f"it had nothing more to try: {said.stdout[-2000:]}"
    assert "No issues found" in said.stdout or "passed" in said.stdout, said.stdout
