"""A gateway process in front of a daemon process with a scripted mind: only what it says is made up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from attnix.syscalls import Client, connect

from ..wire.turnstile import Turnstile

DEADLINE_S: Final = 30.0
SOURCE: Final = str(Path(__file__).resolve().parents[2] / "src")
DAEMON: Final = Path(__file__).resolve().parents[1] / "wire" / "served_daemon.py"
START, END = 256, 257  # <|im_start|>, <|im_end|>
LONG: Final = ("DE", "HI", "J tail", "EFG")  # tokens of several characters, from 258 on
VOCAB: Final = 258 + len(LONG)
BLOCK: Final = 16

# Qwen2.5's way with tools, written anew and shorter.
TEMPLATE: Final = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}write <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_text(directory: Path, template: str = TEMPLATE, markers: list[str] | None = None) -> Path:
    """A tokenizer of bytes with two control tokens, and a template.  The path of the tokenizer.

    markers  more control tokens, from VOCAB on
    """
    directory.mkdir(parents=True, exist_ok=True)
    # One token per byte, numbered as the byte is.
    by_byte = {byte: char for char, byte in _byte_alphabet().items()}
    tokenizer = Tokenizer(models.BPE({by_byte[n]: n for n in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken(piece, special=False) for piece in LONG])
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers or ()])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": template, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory / "tokenizer.json"


def _byte_alphabet() -> dict[str, int]:
    """Character of the byte-level alphabet -> byte, as GPT-2 defines it."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


def says(text: str, *, ends: bool = True) -> list[int]:
    """A script: this text, and the end of the turn."""
    return [*text.encode(), *([END] if ends else [])]


def calls(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))}


def until(holds: Callable[[], bool], what: str) -> None:
    """Poll until `holds`; an assertion with `what` when it takes too long."""
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen within {DEADLINE_S} s"
        time.sleep(0.005)


class Process:
    """A child that says one line when it serves."""

    def __init__(self, command: list[str]) -> None:
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())

    @cached_property
    def said(self) -> str:
        """Its first line; waits for it."""
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def stop(self, signum: int = signal.SIGTERM) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(signum)
        status = self.popen.wait(DEADLINE_S)
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        return status


class Daemon:
    """tests/wire/served_daemon.py with a text model.

    stepped  passes of the model wait until the test lets them end
    """

    def __init__(self, directory: Path, *, stepped: bool = False, **options: Any) -> None:
        self.socket = str(directory / "run" / "a.sock")
        self._turnstile: Turnstile | None = None
        if stepped:
            directory.mkdir(parents=True, exist_ok=True)
            self._turnstile = Turnstile(directory / "turnstile")
            options["turnstile"] = self._turnstile.path
        markers: list[str] = options.pop("markers", [])
        tokenizer = write_text(directory / "model", options.pop("template", TEMPLATE), markers)
        settings = {
            "socket": self.socket, "tokenizer": str(tokenizer), "vocab_tokens": VOCAB + len(markers), "stop_tokens": [END],
            "window_tokens": 4096, "frames": 2048, "block_tokens": BLOCK, "max_contexts": 1024, **options,
        }  # fmt: skip
        self._command = [sys.executable, str(DAEMON), json.dumps(settings)]
        self.process = Process(self._command)

    def again(self) -> None:
        """Start it once more, after its end."""
        self.process = Process(self._command)
        assert self.process.said == "ready"

    def client(self) -> Client:
        return connect(self.socket, name="inspector", timeout=DEADLINE_S)

    def let(self, passes: int) -> None:
        """Of those that wait or will wait, so many end."""
        assert self._turnstile is not None
        self._turnstile.let(passes)

    def let_all(self) -> None:
        """None waits any more."""
        assert self._turnstile is not None
        self._turnstile.let_all()

    def let_none(self) -> None:
        """They wait again."""
        assert self._turnstile is not None
        self._turnstile.let_none()

    def passes(self) -> int:
        """Of the model, begun since boot."""
        with self.client() as client:
            return client.vmstat().counters.get("passes", 0)

    def contexts(self) -> int:
        with self.client() as client:
            return client.vmstat().counters["contexts"]

    def at_rest(self, contexts: int = 0) -> None:
        """Every context but so many is gone, every frame back, no process but the connections' own left."""
        if self._turnstile is not None:
            self.let_all()
        with self.client() as client:
            until(lambda: client.vmstat().counters["contexts"] == contexts, f"{contexts} contexts left")
            until(
                lambda: {p.name for p in client.ps().processes} <= {"gateway", "inspector"} or contexts > 0,
                "no process left",
            )
            assert client.fsck().problems == ()
            if not contexts:
                tier = client.tiers().tiers[0]
                assert tier.free_frames + tier.reclaimable_frames == tier.capacity_frames
            assert [row.text for row in client.dmesg().rows if row.level == "error"] == []


class Served:
    """Both processes, and ways to talk to them."""

    def __init__(self, daemon: Daemon, *options: str) -> None:
        self.daemon = daemon
        command = [sys.executable, "-m", "attnix.userland.cli", "serve", "--port", "0", "--socket", daemon.socket]
        self.process = Process([*command, *options])  # it comes up beside the daemon, and waits for it
        assert daemon.process.said == "ready"
        assert self.process.said.startswith("attnix: serving on http://"), self.process.said
        self.url = self.process.said.rpartition(" ")[2]
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S)
        until(lambda: self.http.get("/readyz").status_code == 200, "the gateway's connection")

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def stop(self) -> None:
        self.http.close()
        self.process.stop()


def sse(response: httpx.Response) -> list[Any]:
    """The events of a streamed answer; [DONE] has to be the last."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = [block for block in response.text.split("\n\n") if block]
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]
