"""A real daemon on a real socket, over the real kernel, with a simulated device in the same process.

Run by conftest.py as a script; options come as one JSON object.  It says `ready` on standard output when it serves.

    socket          path
    frames, block_tokens, window_tokens, vocab_tokens, max_contexts
    pieces          text of each token id; null: no tokenizer.  The default is one byte each
    script          tokens that every generation emits
    scripts         one script per generation of a context, in turn; the last one stays
    tokenizer       path of a real tokenizer, instead of `pieces`; messages stay the client's business
    stop_tokens     ids that end a generation
    pass_ms         what a forward takes
    gate            path of a FIFO; each byte written to it lets one forward end, and none ends without
    text_ms         what a text job takes
    state           state directory, for a journal and snapshots; without it there are none
    uid             the uid that every client is said to have; null: the real one
    misbehave       "reply twice" | "undeclared errno" | "panic": what the kernel does wrong for `fsck`
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from attnix.drivers.sim_device import SimDevice
from attnix.durable import open_durable
from attnix.kernel.batch import SAMPLE
from attnix.kernel.calls import FsckResult, Message
from attnix.kernel.config import DeviceConfig, KernelConfig
from attnix.kernel.errors import E, Panic
from attnix.kernel.events import AttachTier, DriverUp, Effect, Event, Exec, Reply, Syscall, Transfer
from attnix.kernel.geometry import KvShape
from attnix.kernel.step import Kernel
from attnix.kernel.twin import TwinCore
from attnix.syscalls.daemon import Daemon
from attnix.syscalls.listen import CannotListen, Credentials, Listener, peer_credentials
from attnix.syscalls.ports import Failure, TextDone
from attnix.syscalls.records import pack_ids
from attnix.syscalls.text import load_text
from attnix.syscalls.text.detokenize import TokenTable


class ByteText:
    """A tokenizer whose token ids are bytes, and a template that writes `role:content;`."""

    def __init__(self, pieces: list[bytes], delay_s: float) -> None:
        self.table = TokenTable(pieces)
        self._delay_s = delay_s

    def encode(self, text: str, context_tokens: int, done: TextDone) -> None:
        self._later(text.encode(), done)

    def encode_messages(self, messages: tuple[Message, ...], tail: bytes, context_tokens: int, done: TextDone) -> None:
        self._later("".join(f"{m.role}:{m.content};" for m in messages).encode(), done)

    def _later(self, data: bytes, done: TextDone) -> None:
        refused: bytes | Failure = Failure(E.EINVAL, {"message": "the template refuses this"})
        outcome = refused if b"!refuse" in data else pack_ids(data)
        asyncio.get_running_loop().call_later(self._delay_s, done, outcome)

    async def close(self) -> None:
        pass


class Gate:
    """Lets through one for each byte that is written to a FIFO, in order."""

    def __init__(self, path: str) -> None:
        self._fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # for writing as well: it never ends
        self._open = 0
        self._waiting: deque[Callable[[], object]] = deque()
        asyncio.get_running_loop().add_reader(self._fifo, self._opened)

    def then(self, go: Callable[[], object]) -> None:
        self._waiting.append(go)
        self._let()

    def _opened(self) -> None:
        self._open += len(os.read(self._fifo, 65536))
        self._let()

    def _let(self) -> None:
        while self._open and self._waiting:
            self._open -= 1
            self._waiting.popleft()()


class SimPort:
    """The simulated device: answers each pass after `delay_s`, and when the gate lets it."""

    def __init__(self, device: SimDevice, delay_s: float, gate: Gate | None) -> None:
        self.device = device
        self.daemon: Daemon
        self._delay_s = delay_s
        self._gate = gate

    def exec(self, effect: Exec) -> None:
        self.device.computed.clear()
        done = self.device.execute(effect)
        answer = partial(asyncio.get_running_loop().call_later, self._delay_s, self.daemon.feed, done)
        if self._gate is None:
            answer()
        else:
            self._gate.then(answer)

    def transfer(self, effect: Transfer) -> None:
        raise AssertionError("there is one tier")

    def attach(self, effect: AttachTier) -> None:
        raise AssertionError("there is one tier")

    def detach(self, device: int) -> None:
        raise AssertionError("there is one tier")

    def sleep(self, device: int) -> None:
        raise AssertionError("there is one tier")

    def wake(self, device: int) -> None:
        raise AssertionError("there is one tier")

    def restart(self, device: int, reason: str) -> None:
        raise AssertionError(reason)

    async def close(self) -> None:
        pass


class ScriptedDevice(SimDevice):
    """Each generation of a context has a script of its own."""

    def __init__(self, *arguments: Any, scripts: list[list[int]]) -> None:
        super().__init__(*arguments)
        self._scripts = scripts
        self._turns: dict[int, list[int]] = {}  # context -> lengths of the prompts of its generations

    def _next(self, trail: Any, work: Any) -> Any:
        if work.seq.flags & SAMPLE:
            turns = self._turns.setdefault(work.seq.context, [])
            if work.seq.prompt_tokens not in turns:
                turns.append(work.seq.prompt_tokens)
            turn = min(turns.index(work.seq.prompt_tokens), len(self._scripts) - 1)
            self.script = tuple(self._scripts[turn])
        else:
            self.script = ()
        return super()._next(trail, work)


class WrongKernel:
    """The kernel, but `fsck` shows one fault that the daemon must contain."""

    def __init__(self, kernel: Kernel, fault: str) -> None:
        self._kernel = kernel
        self._fault = fault
        self.tail = kernel.tail

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        if not (isinstance(event, Syscall) and event.name == "fsck"):
            return self._kernel.step(event, now_ns)
        if self._fault == "panic":
            raise Panic("made up")
        if self._fault == "reply twice":
            result = FsckResult((), 0, 0)
            return [Reply(event.conn, event.request, 0, result), Reply(event.conn, event.request, 0, result)]
        return [Reply(event.conn, event.request, E.ENOSPC, {"message": "made up"})]


async def serve(options: dict[str, Any]) -> int:
    frames, block = options.get("frames", 64), options.get("block_tokens", 4)
    vocab = options.get("vocab_tokens", 256)
    config = KernelConfig(
        devices=(DeviceConfig("hbm0", "hbm", frames),),
        kv=KvShape(1, 1, 2, 2),
        window_tokens=options.get("window_tokens", 256),
        vocab_tokens=vocab,
        identity=(("weights", "sim"),),
        block_tokens=block,
        max_contexts=options.get("max_contexts", 64),
        tokenizer=options.get("tokenizer", ""),
        stop_tokens=tuple(options.get("stop_tokens", ())),
        model="scripted",
        owner_uid=os.geteuid(),
        version="test",
        daemon_pid=os.getpid(),
    )
    rows = memoryview(bytearray(config.layout.total_bytes))
    kernel = Kernel(config, TwinCore(bytes(16), block, config.layout, [frames], [rows], 128))
    script = tuple(options.get("script", ()))
    layout = (frames, config.layout, rows, block, vocab)
    scripts = options.get("scripts")
    device = ScriptedDevice(*layout, scripts=scripts) if scripts else SimDevice(*layout, script=script)
    gate = Gate(options["gate"]) if "gate" in options else None
    port = SimPort(device, options.get("pass_ms", 0) / 1000, gate)
    pieces = options.get("pieces", [chr(n) for n in range(128)] + [bytes([n]).hex() for n in range(128, 256)])
    text = None
    if pieces is not None:
        table = [
            piece.encode() if token < 128 or "pieces" in options else bytes.fromhex(piece)
            for token, piece in enumerate(pieces)
        ]
        text = ByteText(table, options.get("text_ms", 0) / 1000)
        if "tokenizer" in options:
            text.table = load_text(Path(options["tokenizer"]).parent).table
    fault, uid = options.get("misbehave"), options.get("uid")

    def credentials(fd: int) -> Credentials:
        return peer_credentials(fd) if uid is None else Credentials(1, uid, uid)

    try:
        listener = Listener(options["socket"], options.get("socket_group", ""))
    except CannotListen as error:
        print(error, flush=True)
        return 1
    durable = None
    if "state" in options:
        Path(options["state"]).mkdir(mode=0o700, exist_ok=True)
        durable = open_durable(Path(options["state"]), config, lambda level, text: print(level, text, file=sys.stderr))
    daemon = Daemon(
        WrongKernel(kernel, fault) if fault else kernel, listener, text, port, credentials=credentials,
        journal=durable.journal if durable else None, snapshots=durable.snapshots if durable else None,
    )  # fmt: skip
    port.daemon = daemon
    if durable is not None:
        durable.connect(daemon.feed)
    daemon.feed(DriverUp(0, 1, 1, "kept"))
    return await daemon.run(ready=lambda: print("ready", flush=True))


if __name__ == "__main__":
    sys.exit(uvloop.run(serve(json.loads(sys.argv[1]))))
