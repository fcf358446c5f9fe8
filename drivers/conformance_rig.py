"""What the conformance suite stands on: one driver process, its memory, and passes written by hand.

The rig plays the daemon's part without any kernel: it writes page-table rows, sends messages, waits with a deadline, and
after every pass looks at the whole arena.  A driver is judged by what it answers and by which bytes changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from attnix.kernel.batch import SAMPLE, SEQ, Seq
from attnix.kernel.events import Exec, ExecDone
from attnix.kernel.geometry import RowLayout

from .channel import BadMessage, Channel, ChannelClosed
from .memfd import create_memfd, map_shared, reopen_read_only
from .messages import decode_done, decode_probe, exec_message, expected_results
from .protocol import ExecStats, Probe
from .spec import DriverFds, DriverSpec

_PAIR: Final = struct.Struct("<ii")
START_S: Final = 300.0
OLD_CONTENT: Final = 0x5A  # frames begin with this, so that reading an unwritten one differs from reading zeros


class Nonconformance(AssertionError):
    """The driver does not do what the protocol says; the message says what was seen."""


def require(holds: bool, what: str) -> None:
    """Error: Nonconformance."""
    if not holds:
        raise Nonconformance(what)


@dataclass
class PassSeq:
    """One sequence of a hand-written pass; the rest of its record takes values that mean "off"."""

    slot: int
    start: int
    tokens: Sequence[int]
    write_from: int = 0
    flags: int = SAMPLE
    generation: int | None = None  # None: the row's own
    entries: int | None = None  # None: as many as cover the tokens
    temperature: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    logprobs: int = 0
    score_from: int = 0
    prompt_tokens: int = 0
    history: Sequence[int] = ()


@dataclass
class Answer:
    """A completed pass, unpacked; two are equal when they say the same, however long they took."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[tuple[list[int], list[float]]]
    scores: list[list[float]]
    stats: ExecStats = field(compare=False)


class Rig:
    """A driver process under test.

    spec, layout, block_tokens  how it is started and what its configuration says about rows and blocks
    deadline_s                  longest wait for any one answer; the first, which follows loading, may take START_S
    """

    def __init__(self, spec: DriverSpec, layout: RowLayout, block_tokens: int, *, deadline_s: float = 30.0) -> None:
        self.spec = spec
        self.layout = layout
        self.block_tokens = block_tokens
        self.deadline_s = START_S
        self.logs: list[str] = []
        self._seq = 0
        self._request = 0
        self._inbox: deque[list[Any]] = deque()
        arena_fd = create_memfd("conformance-arena", spec.arena_bytes)
        rows_fd = create_memfd("conformance-rows", max(spec.rows_bytes, layout.total_bytes))
        rows_read_only_fd = reopen_read_only(rows_fd)
        self.arena = map_shared(arena_fd)
        self.arena[:] = bytes([OLD_CONTENT]) * len(self.arena)
        self._rows = map_shared(rows_fd)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed = (theirs.fileno(), arena_fd, rows_read_only_fd, *spec.fds.values())
        try:
            self.process = subprocess.Popen(
                spec.argv(
                    DriverFds(theirs.fileno(), arena_fd, rows_read_only_fd, spec.fds), json.dumps(dict(spec.config))
                ),
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                env={**os.environ, **spec.environment},
                process_group=0,
            )
        finally:
            theirs.close()
            for fd in (arena_fd, rows_fd, rows_read_only_fd):
                os.close(fd)
        self.channel = Channel(ours)
        self.channel.setblocking(False)
        try:
            self.probe = self.ask_probe()
        except BaseException:
            self.close()
            raise
        self.deadline_s = deadline_s

    def close(self) -> None:
        """End the process, whatever state it is in, and reap it."""
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.arena.close()
        self._rows.close()

    # -- messages -------------------------------------------------------------------------------------------------

    def send(self, message: list[Any]) -> None:
        try:
            sent = self.channel.send(message)
            while not sent:
                self._wait(select.POLLOUT, f"it did not read a {message[0]!r} message")
                sent = self.channel.flush()
        except ChannelClosed:
            raise Nonconformance(f"the channel closed; {self._death()}") from None

    def receive(self, what: str) -> list[Any]:
        """The next message, log lines apart.  Error: Nonconformance when it dies, is silent, or speaks nonsense."""
        while True:
            while self._inbox:
                message = self._inbox.popleft()
                if message[0] != "log":
                    return message
                self.logs.append(str(message[1:]))
            if self.channel.eof:
                raise Nonconformance(f"the channel closed while waiting for {what}; {self._death()}")
            self._wait(select.POLLIN, f"no {what}")
            try:
                self._inbox.extend(self.channel.recv_ready())
            except BadMessage as error:
                raise Nonconformance(f"nonsense instead of {what}: {error}") from error

    def ask_probe(self) -> Probe:
        self._request += 1
        self.send(["probe", self._request])
        message = self.receive("probe answer")
        require(message[0] == "probe", f"a probe was answered with {message!r:.200}")
        try:
            request, probe = decode_probe(message)
        except BadMessage as error:
            raise Nonconformance(str(error)) from error
        require(request == self._request, f"probe {self._request} was answered as {request}")
        return probe

    def until_health(self) -> list[list[Any]]:
        """Ask for health; everything that came before its answer.  Messages are handled in order, so that is all there is."""
        self._request += 1
        self.send(["health", self._request])
        before: list[list[Any]] = []
        while True:
            message = self.receive("health answer")
            if message[0] == "health":
                require(
                    message[1] == self._request and isinstance(message[2], dict), f"bad health answer {message!r:.200}"
                )
                return before
            before.append(message)

    def _wait(self, event: int, what: str) -> None:
        poll = select.poll()
        poll.register(self.channel.fileno(), event)
        if not poll.poll(self.deadline_s * 1000):
            raise Nonconformance(f"{what} within {self.deadline_s:g} s")

    def wait_for_exit(self) -> int | None:
        """The exit status, negative for a signal; None when it still runs at the deadline."""
        if self.process.returncode is None:
            pidfd = os.pidfd_open(self.process.pid)
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(self.deadline_s * 1000)
            finally:
                os.close(pidfd)
        return self.process.poll()

    def _death(self) -> str:
        status = self.wait_for_exit()
        return "the driver still runs" if status is None else f"the driver ended with status {status}"

    # -- frames and rows ------------------------------------------------------------------------------------------

    def frame(self, index: int) -> bytes:
        return bytes(self.arena[index * self.probe.frame_bytes : (index + 1) * self.probe.frame_bytes])

    def set_frame(self, index: int, content: bytes) -> None:
        self.arena[index * self.probe.frame_bytes : (index + 1) * self.probe.frame_bytes] = content

    def spoil(self, frames: Sequence[int]) -> None:
        """Give frames the content they had at the start."""
        for index in frames:
            self.set_frame(index, bytes([OLD_CONTENT]) * self.probe.frame_bytes)

    def digests(self) -> list[bytes]:
        """A digest of every frame, and of what lies behind the last one."""
        view = memoryview(self.arena)
        step = self.probe.frame_bytes
        ends = [*range(0, self.probe.capacity_frames * step + 1, step), len(view)]
        found = [
            hashlib.blake2b(view[a:b], digest_size=16).digest() for a, b in itertools.pairwise(ends)
        ]  # fmt: skip
        view.release()
        return found

    def map_row(self, slot: int, frames: Sequence[int], tokens: int, *, generation: int = 1) -> None:
        """Make row `slot` map `tokens` tokens into `frames`, full blocks first; the rest of the row is unmapped."""
        n = self.layout.entries
        full = [-1] * n
        full[: len(frames)] = frames
        left = [min(self.block_tokens, max(0, tokens - i * self.block_tokens)) for i in range(n)]
        struct.pack_into(f"<{n}i", self._rows, self.layout.frame_offset + 4 * n * slot, *full)
        struct.pack_into(f"<{n}i", self._rows, self.layout.shift_offset + 4 * n * slot, *([0] * n))
        struct.pack_into(f"<{n}h", self._rows, self.layout.count_offset + 2 * n * slot, *left)
        struct.pack_into("<I", self._rows, self.layout.generation_offset + 4 * slot, generation)

    def row_frames(self, slot: int) -> list[int]:
        n = self.layout.entries
        return list(struct.unpack_from(f"<{n}i", self._rows, self.layout.frame_offset + 4 * n * slot))

    def row_generation(self, slot: int) -> int:
        return int(struct.unpack_from("<I", self._rows, self.layout.generation_offset + 4 * slot)[0])

    # -- passes ---------------------------------------------------------------------------------------------------

    def effect(self, seqs: Sequence[PassSeq], copies: Sequence[tuple[int, int]] = ()) -> Exec:
        """Pack a pass, with the next seq number."""
        self._seq += 1
        tokens: list[int] = []
        records: list[bytes] = []
        for seq in seqs:
            end = seq.start + len(seq.tokens)
            entries = -(-end // self.block_tokens) if seq.entries is None else seq.entries
            generation = self.row_generation(seq.slot) if seq.generation is None else seq.generation
            record = Seq(
                seq.slot, generation, seq.start, len(seq.tokens), seq.write_from, entries, len(tokens), seq.flags,
                seq.temperature, 1.0, 0.0, 0, seq.seed, 1.0, seq.presence_penalty, 0.0, seq.logprobs, seq.score_from,
                seq.prompt_tokens, seq.slot + 1, 0, 0,
            )  # fmt: skip
            records.append(SEQ.pack(*record))
            tokens += seq.tokens
        histories = tuple(array("i", seq.history).tobytes() for seq in seqs if seq.history)
        packed_copies = b"".join(_PAIR.pack(*pair) for pair in copies)
        return Exec(0, self._seq, b"".join(records), array("i", tokens).tobytes(), packed_copies, histories)

    def run(self, seqs: Sequence[PassSeq], copies: Sequence[tuple[int, int]] = ()) -> Answer:
        """Run a pass that must succeed, and hold it to everything that is true of every pass.

        It is answered once and before anything sent later, its counts are right, and no frame changed but those it had
        to write.
        """
        effect = self.effect(seqs, copies)
        allowed = {destination for _, destination in copies}
        for seq in seqs:
            frames = self.row_frames(seq.slot)
            for position in range(max(seq.start, seq.write_from), seq.start + len(seq.tokens)):
                allowed.add(frames[position // self.block_tokens])
        before = self.digests()
        self.send(exec_message(effect))
        answers = self.until_health()
        self.require_unchanged(before, allowed)
        require(
            len(answers) == 1, f"a pass was answered {len(answers)} times before a later message was: {answers!r:.300}"
        )
        message = answers[0]
        require(message[0] == "done", f"a valid pass was not done: {message!r:.300}")
        try:
            done, stats = decode_done(message, 0, expected_results(effect.seqs))
        except BadMessage as error:
            raise Nonconformance(str(error)) from error
        require(done.seq == effect.seq, f"pass {effect.seq} was answered as {done.seq}")
        n_tokens = sum(len(seq.tokens) for seq in seqs)
        counted = (stats.computed_tokens, stats.sequences, stats.copied_frames)
        require(counted == (n_tokens, len(seqs), len(copies)), f"a pass of {n_tokens} tokens counted as {stats}")
        return _unpack(done, stats)

    def refused(self, message: list[Any]) -> int:
        """Send an `exec` that must be refused without a trace; the errno of its answer."""
        before = self.digests()
        self.send(message)
        answers = self.until_health()
        self.require_unchanged(before, set())
        require(len(answers) == 1 and answers[0][0] == "failed", f"a wrong pass was answered with {answers!r:.300}")
        answer = answers[0]
        well_formed = len(answer) == 4 and answer[1] == message[1] and isinstance(answer[2], int) and answer[3]
        require(bool(well_formed), f"not a proper refusal of pass {message[1]}: {answer!r:.300}")
        return int(answer[2])

    def require_unchanged(self, before: list[bytes], allowed: set[int]) -> None:
        """Error: Nonconformance when a frame outside `allowed` is not as it was."""
        after = self.digests()
        changed = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b and n not in allowed]
        require(not changed, f"frames {changed} changed; only {sorted(allowed)} may")


def _unpack(done: ExecDone, stats: ExecStats) -> Answer:
    return Answer(
        list(array("i", done.tokens)),
        list(array("f", done.logprobs)),
        [(list(array("i", ids)), list(array("f", logprobs))) for ids, logprobs in done.tops],
        [list(array("f", scores)) for scores in done.scores],
        stats,
    )
