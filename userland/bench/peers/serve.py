"""Run one engine as a process that does what it is told and nothing else.  Runs in the peers' venv, without attnix.

    python serve.py ENGINE '{"settings": "as JSON"}'

ENGINE names a module beside this file with a class `Engine`:

    Engine(settings)                       loads and warms up; a failure ends the process, its message is the reason
    version            str                 what runs, for the report
    prefill(prompts) -> (seconds, firsts)  [B][P] ids in, B next tokens (greedy) out
    decode(steps) -> (seconds, tokens)     the `steps` tokens after those, [B][steps], never stopping early; every call
                                           starts again at the end of the prompts, so that all rounds do the same work
    close()                                forgets the prompts

One JSON request a line on stdin, `[method, argument...]`, one JSON answer a line on stdout: `{"ok": ...}` or
`{"error": text}`.  Whatever the engine prints goes to stderr.  Seconds are measured here, so the pipe is not in them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from importlib import import_module

PR_SET_PDEATHSIG = 1


def main(engine: str, settings: str) -> None:
    # The benchmark stops this process (SIGSTOP) while another engine is measured; it must not outlive it like that.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        served = import_module(engine).Engine(json.loads(settings))
    except BaseException as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}) + "\n")
        raise
    answers.write(json.dumps({"ok": served.version}) + "\n")
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            answers.write(json.dumps({"ok": getattr(served, method)(*arguments)}) + "\n")
        except Exception as error:
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}) + "\n")
    answers.flush()
    os._exit(0)  # some engines take seconds, or for ever, to unload


if __name__ == "__main__":
    main(*sys.argv[1:])
