"""schemathesis over the gateway's own OpenAPI document: what it allows and what it forbids, and never a 5xx.

A bounded number of cases here; `make fuzz-http` goes on for five minutes (ATTNIX_FUZZ_S).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis

from .conftest import Gateway
from .rig import Daemon, Served, environment

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
    counted = served.http.get("/metrics").text
    answers = dict(re.findall(r'^attnix_http_answers_total{status="(\d+)"} (\d+)', counted, re.MULTILINE))
    print(f"{time.monotonic() - began_s:.0f} s, answers by status: {answers}")
    assert answers and not [status for status in answers if status >= "500"], "as the gateway counts them"
    assert "No issues found" in said.stdout or "passed" in said.stdout, said.stdout


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_a_stream_is_what_the_document_says(served: Served, path: str) -> None:
    """What it found after five minutes of chance: schemathesis reads the schema of a stream as one of each event."""
    document = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    asked: dict[str, Any] = (
        {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    )
    case = document[path]["POST"].Case(body={**asked, "max_tokens": 4, "stream": True}, media_type="application/json")
    response = case.call()
    assert response.status_code == 200
    case.validate_response(response)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    started = Served(Daemon(tmp_path_factory.mktemp("stream")))
    yield started
    started.stop()
    started.daemon.at_rest()
    assert started.daemon.process.stop() == 0
