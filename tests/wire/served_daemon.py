"""A real daemon on a real socket, over the real kernel, with a simulated device in the same process.

Run by conftest.py as a script; options come as one JSON object.  It says `ready` on standard output when it serves.

    socket          path
    frames, block_tokens, window_tokens, vocab_tokens, max_contexts
    pieces          text of each token id; null: no tokenizer.  The default is one byte each
    script          tokens that every generation emits
    scripts         one script per generation of a context, in turn; the last one stays
    texts           a generation emits the one of these scripts that the length of its prompt, plus its seed unless it is greedy,
                    names (modulo their number); an empty one: what the model says
    likes           tokens that it likes best, the last one most, where a mask says what may come
    tokenizer       path of a real tokenizer, instead of `pieces`; messages stay the client's business
    stop_tokens     ids that end a generation
    pass_ms         what a forward takes
    turnstile       path of a FIFO: a forward ends when a byte is written there, and from an "o" on all do, until a "c"
    dram_frames     a second tier, of so many
    accels          compute devices, without a second tier: SIGUSR1 takes the first one away for good
    text_ms         what a text job takes
    state           state directory, for a journal and snapshots; without it there are none
    uid             the uid that every client is said to have; null: the real one
    misbehave       "reply twice" | "undeclared errno" | "panic": what the kernel does wrong for `fsck`
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from attnix.drivers.sim_device import SimDevice
from attnix.drivers.sim_model import scripted
from attnix.durable import open_durable
from attnix.kernel.batch import SAMPLE
from attnix.kernel.calls import FsckResult, Message
from attnix.kernel.config import DeviceConfig, KernelConfig
from attnix.kernel.errors import E, Panic
from attnix.kernel.events import (
    AttachTier,
    DriverDown,
    DriverGone,
    DriverUp,
    Effect,
    Event,
    Exec,
    Reply,
    Syscall,
    Transfer,
)
from attnix.kernel.geometry import KvShape
from attnix.kernel.step import Kernel
from attnix.kernel.tag import stored_bytes
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
        alone = "!refuse" if len(messages) == 1 and "!not alone" in messages[0].content else ""
        self._later("".join(f"{m.role}:{m.content};" for m in messages).encode() + alone.encode(), done)

    def _later(self, data: bytes, done: TextDone) -> None:
        refused: bytes | Failure = Failure(E.EINVAL, {"message": "the template refuses this"})
        outcome = refused if b"!refuse" in data else pack_ids(data)
        asyncio.get_running_loop().call_later(self._delay_s, done, outcome)

    async def close(self) -> None:
        pass


class Turnstile:
    """Lets what waits here go on, one for each byte that is written to a FIFO; after an "o" nothing waits, until a "c"."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._waiting: deque[Callable[[], None]] = deque()
        self._free = 0
        self._open = False
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def enter(self, go: Callable[[], None]) -> None:
        self._waiting.append(go)
        self._turn()

    def _read(self) -> None:
        for byte in os.read(self._fd, 4096):
            if byte in b"oc":
                self._open, self._free = byte == ord("o"), 0
            else:
                self._free += 1
            self._turn()

    def _turn(self) -> None:
        while self._waiting and (self._open or self._free):
            self._free -= not self._open
            asyncio.get_running_loop().call_soon(self._waiting.popleft())


class SimPort:
    """The simulated devices: each answers a pass after `delay_s`, and behind the turnstile.  dram: arena of the second tier."""

    def __init__(self, devices: list[SimDevice], delay_s: float, turnstile: Turnstile | None, dram: bytearray) -> None:
        self.devices = devices
        self.daemon: Daemon
        self._delay_s = delay_s
        self._turnstile = turnstile
        self._dram = dram

    def exec(self, effect: Exec) -> None:
        device = self.devices[effect.device]
        device.computed.clear()
        done = device.execute(effect)
        if self._turnstile is not None:
            self._turnstile.enter(lambda: self.daemon.feed(done))
        else:
            asyncio.get_running_loop().call_later(self._delay_s, self.daemon.feed, done)

    def transfer(self, effect: Transfer) -> None:
        assert self._dram, "there is one tier"
        asyncio.get_running_loop().call_soon(self.daemon.feed, self.devices[0].transfer(effect, self._dram))

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


class TellingDevice(SimDevice):
    """What a generation says is told by its prompt and its seed; where it may not say everything, it says what it likes."""

    def __init__(self, *arguments: Any, texts: list[list[int]], likes: list[int]) -> None:
        super().__init__(*arguments)
        self._texts = texts
        self._likes = likes

    def _next(self, trail: Any, work: Any) -> Any:
        seq = work.seq
        if not seq.flags & SAMPLE:
            said = trail.distribution(work.tokens[-1], self.vocab)
            for token in self._likes:
                said = scripted(said, token)
            return said, said.tokens[0]
        number = seq.prompt_tokens + (seq.seed if seq.temperature > 0 else 0)
        self.script = tuple(self._texts[number % len(self._texts)])
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
    accels = options.get("accels", 1)
    devices = [DeviceConfig(f"hbm{number}", "hbm", frames) for number in range(accels)]
    if "dram_frames" in options:
        devices.append(DeviceConfig("dram0", "dram", options["dram_frames"]))
    sizes = [device.capacity_frames for device in devices]
    config = KernelConfig(
        devices=tuple(devices),
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
    rows = [memoryview(bytearray(config.layout.total_bytes)) for _ in range(accels)]
    kernel = Kernel(config, TwinCore(bytes(16), block, config.layout, sizes, rows, 128))
    script = tuple(options.get("script", ()))

    def device(number: int) -> SimDevice:
        layout = (frames, config.layout, rows[number], block, vocab)
        if "texts" in options:
            return TellingDevice(*layout, texts=options["texts"], likes=options.get("likes", []))
        if "scripts" in options:
            return ScriptedDevice(*layout, scripts=options["scripts"])
        return SimDevice(*layout, script=script)

    computes = [device(number) for number in range(accels)]
    turnstile = Turnstile(options["turnstile"]) if "turnstile" in options else None
    dram = bytearray(sum(sizes[accels:]) * stored_bytes(computes[0].frame_bytes))
    port = SimPort(computes, options.get("pass_ms", 0) / 1000, turnstile, dram)
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
    for number in range(len(devices)):
        daemon.feed(DriverUp(number, 1, 1 + number, "kept"))

    def take_away() -> None:
        daemon.feed(DriverDown(0, 1, "killed"))
        daemon.feed(DriverGone(0, "no such device"))

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, take_away)
    return await daemon.run(ready=lambda: print("ready", flush=True))


if __name__ == "__main__":
    sys.exit(uvloop.run(serve(json.loads(sys.argv[1]))))
