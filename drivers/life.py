"""One driver process from spawn to reap, as seen by the daemon's loop.

Everything that ends a life goes one way: its process is gone or gets SIGKILL, its pidfd becomes readable, it is reaped,
and only then `ended` is called, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from attnix.kernel.errors import E
from attnix.kernel.events import Exec, ExecDone, ExecFailed, Found, Transfer, TransferDone
from attnix.kernel.params import BLOCK_TOKENS
from attnix.kernel.tag import stored_bytes

from .channel import EPOCH_VARIABLE, BadMessage, Channel, ChannelClosed
from .messages import (
    Expected,
    answered_seq,
    decode_done,
    decode_failed,
    decode_found,
    decode_health,
    decode_log,
    decode_moved,
    decode_probe,
    exec_message,
    expected_results,
    found_frames,
    identity_message,
    transfer_message,
)
from .protocol import PROTOCOL_VERSION, Probe
from .spec import DriverFds, DriverSpec, Log

OUTPUT_LINES: Final = 20  # last lines of output kept for the message about a death
OUTPUT_LINE_BYTES: Final = 2000
MAX_QUEUED_BYTES: Final = 256 << 20  # unsent to a driver that does not read
_LAST_READS: Final = 16  # after death, of its messages and its output: a descendant that escaped may go on for ever


class State(Enum):
    STARTING = auto()  # spawned, probe asked
    UP = auto()
    ENDING = auto()  # killed, or asked to stop: nothing it says counts any more
    REAPED = auto()


class LifeCallbacks(NamedTuple):
    """Whom a life tells what.  Each is called from the loop, with the life in a consistent state."""

    up: Callable[[Life, Probe], None]
    answered: Callable[[ExecDone | ExecFailed | TransferDone], None]
    ended: Callable[[Life], None]
    log: Log


class _InFlight(NamedTuple):
    """allowance_ns is its own share: a driver works in order, so what is sent behind it may take that much longer."""

    what: Expected | Transfer
    allowance_ns: int
    deadline: asyncio.TimerHandle


class Life:
    """A running driver process.

    reason         why it ended, for people
    late_messages  answers that no pass or transfer was waiting for, dropped
    found          its inventory, complete once it is up
    health         counters of its last health answer
    """

    def __init__(self, spec: DriverSpec, epoch: int, arena_fd: int, rows_fd: int, callbacks: LifeCallbacks) -> None:
        """Spawn the process and ask for its probe.  Error: OSError when it cannot be spawned."""
        self.spec = spec
        self.epoch = epoch
        self.state = State.STARTING
        self.was_up = False
        self.reason = ""
        self.exit_status: int | None = None
        self.late_messages = 0
        self.found: list[Found] = []
        self.health: dict[str, int] = {}
        self.output: deque[str] = deque(maxlen=OUTPUT_LINES)
        self._callbacks = callbacks
        self._loop = asyncio.get_running_loop()
        self.reaped: asyncio.Future[None] = self._loop.create_future()
        self._in_flight: dict[int, _InFlight] = {}  # passes by seq
        self._moving: dict[int, _InFlight] = {}  # transfers by seq
        self._timers: list[asyncio.TimerHandle] = []
        self._health_asked_at: float | None = None
        self._partial_line = b""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = self._spawn(theirs.fileno(), arena_fd, rows_fd)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except BaseException:
            ours.close()
            self._process.kill()
            self._process.communicate()
            raise
        self._channel = Channel(ours)
        self._channel.setblocking(False)
        assert self._process.stdout is not None
        self._output_fd = self._process.stdout.fileno()
        os.set_blocking(self._output_fd, False)
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._loop.add_reader(self._channel.fileno(), self._on_readable)
        self._loop.add_reader(self._output_fd, self._on_output)
        self._after(spec.timing.probe_ns, self._on_probe_deadline)
        self._send(["probe", 1])

    def _spawn(self, channel_fd: int, arena_fd: int, rows_fd: int) -> subprocess.Popen[bytes]:
        spec = self.spec
        fds = DriverFds(channel_fd, arena_fd, rows_fd, spec.fds)
        return subprocess.Popen(
            spec.argv(fds, json.dumps(dict(spec.config))),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(channel_fd, arena_fd, rows_fd, *spec.fds.values()),
            env={**os.environ, **spec.environment, EPOCH_VARIABLE: str(self.epoch)},
            # A group of its own: a Ctrl-C at the terminal stays with the daemon, and one signal ends all of the driver.
            process_group=0,
        )

    # -- what the supervisor asks ---------------------------------------------------------------------------------

    def exec(self, effect: Exec) -> None:
        """Send a pass.  Its answer comes through `answered`, or the life ends.  Only while UP."""
        tokens = len(effect.tokens) // 4
        allowance_ns = self.spec.timing.exec_ns + tokens * self.spec.timing.exec_token_ns
        self._watch(self._in_flight, effect.seq, expected_results(effect.seqs), allowance_ns)
        try:
            self._send(exec_message(effect))
        except BadMessage as error:  # longer than any message may be: the kernel tries smaller passes
            self._in_flight.pop(effect.seq).deadline.cancel()
            failed = ExecFailed(effect.device, effect.seq, E.E2BIG, str(error))
            self._loop.call_soon(self._answer_if_up, failed)

    def transfer(self, effect: Transfer) -> None:
        """Send a transfer, beside whatever else is in flight.  Answered like a pass.  Only while UP."""
        items = len(effect.pairs) // 8
        allowance_ns = self.spec.timing.transfer_ns + items * self.spec.timing.transfer_frame_ns
        self._watch(self._moving, effect.seq, effect, allowance_ns)
        try:
            self._send(transfer_message(effect))
        except BadMessage:
            self._moving.pop(effect.seq).deadline.cancel()
            self._loop.call_soon(self._answer_if_up, failed_transfer(effect, E.E2BIG))

    def identify(self, digest: bytes) -> None:
        """Tell an accel what identity its stored frames carry; before its first transfer."""
        self._send(identity_message(digest))

    def _watch(self, among: dict[int, _InFlight], seq: int, what: Expected | Transfer, allowance_ns: int) -> None:
        """Give it a deadline: its own allowance behind those of everything that was sent before it."""
        before = sum(p.allowance_ns for group in (self._in_flight, self._moving) for p in group.values())
        limit_s = (before + allowance_ns) / 1e9
        deadline = self._loop.call_later(limit_s, self._on_deadline, among, seq, limit_s)
        among[seq] = _InFlight(what, allowance_ns, deadline)

    def _answer_if_up(self, failed: ExecFailed | TransferDone) -> None:
        if self.state is State.UP:
            self._callbacks.answered(failed)

    def kill(self, reason: str) -> None:
        """Give up on it: nothing it says counts from now on.  `ended` follows when it has been reaped."""
        if self.state in (State.ENDING, State.REAPED):
            return
        self.state = State.ENDING
        self.reason = reason
        self._signal_group(signal.SIGKILL)

    async def stop(self) -> None:
        """Ask it to exit by closing its channel, then with SIGTERM, then without asking; returns when it is reaped.

        One that is not up yet has nothing to put in order, and would not look at its channel before it is.
        """
        if self.state is State.STARTING:
            self.kill("asked to stop")
        if self.state is State.UP:
            self.state = State.ENDING
            self.reason = "asked to stop"
            self._close_channel()
            for number in (signal.SIGTERM, signal.SIGKILL):
                await asyncio.wait((self.reaped,), timeout=self.spec.timing.stop_ns / 1e9)
                if self.reaped.done():
                    return
                self._signal_group(number)
        await self.reaped

    # -- what the loop reports ------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        self._read_messages()
        if self._channel.eof and self.state in (State.STARTING, State.UP):
            # It is exiting or broken.  Its last words and exit status are worth a moment's patience.
            self._loop.remove_reader(self._channel.fileno())
            self._after(self.spec.timing.stop_ns, self._on_lingering)

    def _read_messages(self) -> int:
        """Deal with what has arrived; how many messages that was."""
        if self._channel.eof:
            return 0
        try:
            messages = self._channel.recv_ready()
            for message in messages:
                self._receive(message)
        except BadMessage as error:
            self.kill(f"spoke nonsense: {error}")
            return 1
        return len(messages)

    def _receive(self, message: list[Any]) -> None:
        verb = message[0]
        if self.state is State.ENDING:
            self.late_messages += verb in ("done", "failed", "moved")
        elif verb == "moved":
            pending = self._moving.pop(answered_seq(message), None)
            if pending is None:
                self.late_messages += 1
                return
            pending.deadline.cancel()
            assert isinstance(pending.what, Transfer)
            self._callbacks.answered(decode_moved(message, self.spec.device, len(pending.what.pairs) // 8))
        elif verb in ("done", "failed"):
            pending = self._in_flight.pop(answered_seq(message), None)
            if pending is None:
                self.late_messages += 1
                return
            pending.deadline.cancel()
            device = self.spec.device
            assert isinstance(pending.what, Expected)
            answer = decode_done(message, device, pending.what)[0] if verb == "done" else decode_failed(message, device)
            self._callbacks.answered(answer)
        elif verb == "health":
            self._health_asked_at = None
            self.health = decode_health(message)[1]
        elif verb == "log":
            level, text = decode_log(message)
            self._callbacks.log(level, f"{self.spec.name}: {text}")
        elif verb == "found" and self.state is State.STARTING:
            self.found.append(decode_found(message, self.spec.device, self.epoch, self._block_tokens))
        elif verb == "probe":
            probe = decode_probe(message)[1]
            if self.state is State.STARTING:
                self._become_up(probe)
        elif verb in ("unknown", "dropped"):
            self._callbacks.log("warning", f"{self.spec.name}: unexpected {message!r:.200}")
        else:
            raise BadMessage(f"unknown verb {verb!r:.80}")

    def _become_up(self, probe: Probe) -> None:
        if probe.protocol != PROTOCOL_VERSION:
            self.kill(f"speaks protocol {probe.protocol}, the daemon speaks {PROTOCOL_VERSION}")
            return
        claim = self._false_claim(probe)
        if claim:
            self.kill(claim)
            return
        self.state = State.UP
        self.was_up = True
        self._after(self.spec.timing.health_every_ns, self._on_health_time)
        self._callbacks.up(self, probe)

    @property
    def _block_tokens(self) -> int:
        return int(self.spec.config.get("block_tokens", BLOCK_TOKENS))

    def _false_claim(self, probe: Probe) -> str:
        """What of its probe or inventory cannot be true; empty when all of it can."""
        frames, frame_bytes = probe.capacity_frames, probe.frame_bytes
        if self.spec.tier == "hbm":
            room = self.spec.device_bytes or self.spec.arena_bytes
            if frame_bytes > 0 and 0 < frames * frame_bytes <= room:
                return ""
            return f"claims {frames} frames of {frame_bytes} bytes in an arena of {room}"
        wanted = self.spec.config.get("frame_bytes", frame_bytes)
        if frames <= 0 or frame_bytes != wanted or probe.stored_bytes != stored_bytes(frame_bytes):
            return (
                f"claims {frames} frames of {frame_bytes} bytes, {probe.stored_bytes} stored; "
                f"frames have {wanted}, {stored_bytes(wanted)} stored"
            )
        inventory = [frame for found in self.found for frame in found_frames(found, self._block_tokens)]
        if len(set(inventory)) != len(inventory) or not all(0 <= frame < frames for frame in inventory):
            return f"found frames that it does not have, or one twice: {len(inventory)} rows of {frames} frames"
        return ""

    def _on_output(self) -> None:
        if self._read_output() == 0:
            self._loop.remove_reader(self._output_fd)

    def _read_output(self) -> int:
        """Pass on complete lines that it printed; the bytes read, 0 at end-of-file."""
        try:
            chunk = os.read(self._output_fd, 64 << 10)
        except BlockingIOError:
            return -1
        *lines, rest = (self._partial_line + chunk).split(b"\n")
        if not chunk or len(rest) > OUTPUT_LINE_BYTES:
            lines.append(rest)
            rest = b""
        self._partial_line = rest
        for line in lines:
            text = line[:OUTPUT_LINE_BYTES].decode("utf-8", "replace").rstrip()
            if text:
                self.output.append(text)
                self._callbacks.log("info", f"{self.spec.name}: {text}")
        return len(chunk)

    def _on_exit(self) -> None:
        """The process is dead.  What it managed to say before counts, unless we had given up on it."""
        if self.state is State.REAPED:
            return
        self._loop.remove_reader(self._pidfd)
        self._signal_group(signal.SIGKILL)  # whatever it started; the unreaped leader keeps the group's number ours
        for _ in range(_LAST_READS):
            if not self._read_messages():
                break
        for _ in range(_LAST_READS):
            if self._read_output() <= 0:
                break
        self.exit_status = self._process.wait()
        self.state, previous = State.REAPED, self.state
        if previous is not State.ENDING:
            self.reason = _describe_exit(self.exit_status)
        self._close()
        try:
            self._callbacks.ended(self)
        finally:
            self.reaped.set_result(None)

    # -- deadlines ------------------------------------------------------------------------------------------------

    def _on_probe_deadline(self) -> None:
        if self.state is State.STARTING:
            self.kill(f"did not answer its probe within {self.spec.timing.probe_ns / 1e9:g} s")

    def _on_deadline(self, among: dict[int, _InFlight], seq: int, limit_s: float) -> None:
        # A loop that was itself held up must not blame the driver for an answer that is already here.
        self._read_messages()
        if seq in among:
            what = "pass" if among is self._in_flight else "transfer"
            self.kill(f"did not finish a {what} within {limit_s:g} s")

    def _on_health_time(self) -> None:
        self._read_messages()
        if self.state is not State.UP:
            return
        now = self._loop.time()
        asked_at = self._health_asked_at
        if self._in_flight or self._moving:
            self._health_asked_at = None if asked_at is None else now  # busy: each has a deadline of its own
        elif asked_at is None:
            self._health_asked_at = now
            self._send(["health", 0])
        elif now - asked_at > self.spec.timing.health_ns / 1e9:
            self.kill(f"did not answer within {self.spec.timing.health_ns / 1e9:g} s while idle")
            return
        self._after(self.spec.timing.health_every_ns, self._on_health_time)

    def _on_lingering(self) -> None:
        self.kill("closed its channel and did not exit")

    # -- means ----------------------------------------------------------------------------------------------------

    def _send(self, message: list[Any]) -> None:
        try:
            if self._channel.send(message):
                return
        except ChannelClosed:
            return  # its exit is about to be seen; that reports everything
        if self._channel.bytes_queued > MAX_QUEUED_BYTES:
            self.kill("does not read its channel")
        else:
            self._loop.add_writer(self._channel.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        with contextlib.suppress(ChannelClosed):
            if not self._channel.flush():
                return
        self._loop.remove_writer(self._channel.fileno())

    def _after(self, delay_ns: int, call: Callable[[], None]) -> None:
        now = self._loop.time()
        self._timers = [timer for timer in self._timers if not timer.cancelled() and timer.when() > now]
        self._timers.append(self._loop.call_later(delay_ns / 1e9, call))

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _close_channel(self) -> None:
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
        self._channel.close()

    def _close(self) -> None:
        for pending in (*self._in_flight.values(), *self._moving.values()):
            pending.deadline.cancel()
        self._in_flight.clear()
        self._moving.clear()
        for timer in self._timers:
            timer.cancel()
        self._close_channel()
        self._loop.remove_reader(self._output_fd)
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self._pidfd)


def failed_transfer(effect: Transfer, code: E) -> TransferDone:
    """The answer to a transfer of which nothing was done."""
    failed = tuple((item, int(code)) for item in range(len(effect.pairs) // 8))
    return TransferDone(effect.device, effect.seq, failed, 0, 0)


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
