"""What a system call costs: `attnix bench syscall`.

Round trips of `uname` and of `append` of 4,096 tokens, against a raw Python echo of the same number of bytes in the
same placement (both processes on one core, and on two), round by round so that a slow minute of the machine hits both.
Then calls per second from 1, 8 and 64 clients, one request at a time and 32 deep, against a raw epoll echo.

The daemon is a process of its own with the simulated accel.  Both sides are driven by the same loops with the same
prepared bytes, so only the servers differ.  Every call must have gone through `Kernel.step`: the kernel's own counter
is read before and after, and a difference is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgpack

from attnix.syscalls import Client, connect
from attnix.syscalls.abi import BY_NAME
from attnix.syscalls.records import pack_ids

from .report import show
from .row import Row, rate_row, time_row

ROUNDS: Final = 7
TRIPS: Final = 2000  # uname round trips in a round
APPENDS: Final = 200  # append round trips in a round
APPEND_TOKENS: Final = 4096
CLIENTS: Final = (1, 8, 64)
DEPTHS: Final = (1, 32)
WINDOW_SECONDS: Final = 0.5  # of one throughput measurement
IDS: Final = 64  # request ids in use, a ring; one byte each
ECHO: Final = "raw Python echo"


class BenchError(Exception):
    """The measurement is not worth anything; the message says why."""


def run(json: bool = False) -> list[Row]:
    """Measure everything; without `json`, tell on standard error what is being done.  Error: BenchError."""

    def said(text: str) -> None:
        if not json:
            print(text, file=sys.stderr, flush=True)

    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="attnix-bench-") as directory, daemon(directory) as path:
        for placement in ("one core", "two cores") if len(cores()) > 1 else ("one core",):
            said(f"round trips, {placement}")
            rows.append(uname_trips(directory, path, placement))
            rows.append(append_trips(directory, path, placement))
        for depth in DEPTHS:
            for clients in CLIENTS:
                said(f"calls/s, {clients} clients, {depth} deep")
                rows += throughput(directory, path, clients, depth)
    return rows


# -- processes ------------------------------------------------------------------------------------------------------


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def daemon(directory: str) -> Iterator[str]:
    """A daemon with a simulated accel, on a socket of its own."""
    path = os.path.join(directory, "d", "bench.sock")
    command = [sys.executable, "-m", "attnix.boot", "--model", "sim", "--socket", path, "--state-dir", directory]
    command += ["--window", "8192", "--hbm", "64MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        if "ready" not in process.stdout.readline():
            raise BenchError(f"the daemon did not start: {' '.join(command)}")
        try:
            yield path
        finally:
            process.terminate()


@contextlib.contextmanager
def echo(directory: str, request_bytes: int, reply_bytes: int, many: bool) -> Iterator[tuple[str, int]]:
    """The raw peer: (socket path, pid)."""
    path = os.path.join(directory, "echo.sock")
    command = [sys.executable, "-m", "attnix.userland.bench.echo", path, str(request_bytes), str(reply_bytes)]
    command += ["many"] if many else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield path, process.pid
        finally:
            process.terminate()
            process.wait()
            os.unlink(path)


@contextlib.contextmanager
def placed(server_pid: int, placement: str) -> Iterator[None]:
    """This process on one core, the server on the same or on another."""
    allowed = os.sched_getaffinity(0)
    here, there = cores()[0], cores()[-1] if placement == "two cores" else cores()[0]
    before = os.sched_getaffinity(server_pid)
    os.sched_setaffinity(0, {here})
    os.sched_setaffinity(server_pid, {there})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(server_pid, before)


def cpu_us(pid: int) -> float:
    """Processor time that a process of one thread has used, in microseconds."""
    with open(f"/proc/{pid}/task/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1000


def link(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.connect(path)
    return connected


def request(number: int, args: list[Any], request_id: int = 1) -> bytes:
    body: Any = msgpack.packb([request_id, number, args])
    return len(body).to_bytes(4, "little") + bytes(body)


def ask(connected: socket.socket, message: bytes) -> bytes:
    """One round trip; the reply, header included."""
    connected.sendall(message)
    reply = connected.recv(1 << 18)
    while len(reply) < 4 or len(reply) < 4 + int.from_bytes(reply[:4], "little"):
        reply += connected.recv(1 << 18)
    return reply


def result_of(reply: bytes) -> list[Any]:
    _, errno, result = msgpack.unpackb(reply[4:])
    if errno:
        raise BenchError(f"a call failed: {result}")
    return list(result)


@contextlib.contextmanager
def through_the_kernel(inspector: Client, calls: Callable[[], int]) -> Iterator[None]:
    """Error: BenchError when the kernel did not count exactly `calls()` of them."""
    before = inspector.vmstat().counters["syscalls"]
    yield
    counted = inspector.vmstat().counters["syscalls"] - before - 1
    if counted != calls():
        raise BenchError(f"{calls()} calls were answered and {counted} went through Kernel.step")


# -- round trips ----------------------------------------------------------------------------------------------------


def trip_us(connected: socket.socket, message: bytes, reply_bytes: int, trips: int) -> float:
    """Mean of `trips` round trips, in microseconds."""
    send, receive = connected.sendall, connected.recv
    start = time.perf_counter_ns()
    for _ in range(trips):
        send(message)
        missing = reply_bytes
        while missing:
            missing -= len(receive(1 << 18))
    return (time.perf_counter_ns() - start) / trips / 1000


def uname_trips(directory: str, path: str, placement: str) -> Row:
    """`uname`, one at a time."""
    message = request(BY_NAME["uname"].number, [])
    with connect(path) as inspector, link(path) as ours:
        pid = inspector.uname().pid
        size = len(ask(ours, message))
        with echo(directory, len(message), size, many=False) as (echo_path, echo_pid), link(echo_path) as raw:
            our_times, raw_times = [], []
            with through_the_kernel(inspector, lambda: ROUNDS * TRIPS):
                for _ in range(ROUNDS):
                    with placed(echo_pid, placement):
                        raw_times.append(trip_us(raw, message, size, TRIPS))
                    with placed(pid, placement):
                        our_times.append(trip_us(ours, message, size, TRIPS))
    theirs = statistics.median(raw_times)
    case = f"uname round trip, {placement}"
    return time_row("syscall", case, statistics.median(our_times), "us", ECHO, theirs, ROUNDS, theirs)


def append_trips(directory: str, path: str, placement: str) -> Row:
    """`append` of 4,096 tokens whose blocks are all cached; between two of them the context is emptied again, untimed."""
    with connect(path) as inspector, link(path) as ours:
        pid = inspector.uname().pid
        result_of(ask(ours, request(BY_NAME["hello"].number, ["bench", 1])))
        ctx = result_of(ask(ours, request(BY_NAME["alloc_context"].number, [])))[0]
        message = request(BY_NAME["append"].number, [ctx, pack_ids(n * 7 % 251 for n in range(APPEND_TOKENS))])
        empty = request(BY_NAME["truncate"].number, [ctx, 0])
        forward = request(BY_NAME["forward"].number, [ctx, 1])
        size = len(ask(ours, message))
        result_of(ask(ours, forward))  # ends when the whole prompt is computed
        result_of(ask(ours, empty))
        with echo(directory, len(message), size, many=False) as (echo_path, echo_pid), link(echo_path) as raw:
            our_times, raw_times = [], []
            with through_the_kernel(inspector, lambda: ROUNDS * APPENDS * 2):
                for _ in range(ROUNDS):
                    with placed(echo_pid, placement):
                        raw_times.append(trip_us(raw, message, size, APPENDS))
                    with placed(pid, placement):
                        timed = []
                        for _ in range(APPENDS):
                            timed.append(trip_us(ours, message, size, 1))
                            ask(ours, empty)
                        our_times.append(statistics.fmean(timed))
    theirs = statistics.median(raw_times)
    case = f"append of {APPEND_TOKENS} cached tokens, round trip, {placement}"
    return time_row("syscall", case, statistics.median(our_times), "us", ECHO, theirs, ROUNDS, theirs)


# -- throughput -----------------------------------------------------------------------------------------------------


class Load:
    """`clients` connections, each with `depth` requests on their way; as many are sent as answers come."""

    def __init__(self, path: str, clients: int, depth: int, number: int, reply_bytes: int) -> None:
        self.depth = depth
        self.answered = 0
        self._reply_bytes = reply_bytes
        ring = b"".join(request(number, [], n + 1) for n in range(IDS))
        self._request_bytes = len(ring) // IDS
        self._ring = ring + ring
        self._links = {each.fileno(): each for each in [link(path) for _ in range(clients)]}
        self._next = dict.fromkeys(self._links, 0)
        self._partial = dict.fromkeys(self._links, 0)
        self._epoll = select.epoll()
        for fd in self._links:
            self._epoll.register(fd, select.EPOLLIN)
            self._send(fd, depth)

    def _send(self, fd: int, count: int) -> None:
        at = self._next[fd]
        self._next[fd] = (at + count) % IDS
        self._links[fd].sendall(self._ring[at * self._request_bytes : (at + count) * self._request_bytes])

    def run(self, seconds: float) -> float:
        """Answers per second over that time."""
        links, partial, size = self._links, self._partial, self._reply_bytes
        poll, send = self._epoll.poll, self._send
        start, before = time.perf_counter(), self.answered
        end = start + seconds
        while time.perf_counter() < end:
            for fd, _ in poll():
                count, partial[fd] = divmod(len(links[fd].recv(1 << 18)) + partial[fd], size)
                self.answered += count
                if count:
                    send(fd, count)
        return (self.answered - before) / (time.perf_counter() - start)

    def close(self) -> None:
        """Read what is still on its way, then leave."""
        for fd, each in self._links.items():
            missing = self.depth * self._reply_bytes - self._partial[fd]
            while missing:
                missing -= len(each.recv(min(missing, 1 << 18)))
            self.answered += self.depth
            each.close()
        self._epoll.close()


def throughput(directory: str, path: str, clients: int, depth: int) -> list[Row]:
    """`uname` calls per second, the load on one core and the server on the other; and the server's CPU time per call.

    The second is what a busy machine does not distort: its reciprocal is what one core could serve.
    """
    number = BY_NAME["uname"].number
    placement = "two cores" if len(cores()) > 1 else "one core"
    with connect(path) as inspector:
        pid = inspector.uname().pid
        with link(path) as sample:
            size = len(ask(sample, request(number, [])))
            width = len(request(number, []))
        with echo(directory, width, size, many=True) as (echo_path, echo_pid):
            ours, theirs = Measured(path, pid), Measured(echo_path, echo_pid)
            with through_the_kernel(inspector, lambda: ours.answered):
                for _ in range(ROUNDS):
                    for each in (theirs, ours):
                        each.round(clients, depth, number, size, placement)
    case = f"{clients} clients, {depth} deep"
    rate, raw_rate = statistics.median(ours.rates), statistics.median(theirs.rates)
    cpu, raw_cpu = statistics.median(ours.cpu_us), statistics.median(theirs.cpu_us)
    return [
        rate_row("syscall", f"uname calls/s, {case}", rate, "calls/s", ECHO, raw_rate, ROUNDS, raw_rate),
        time_row("syscall", f"uname CPU of the server per call, {case}", cpu, "us", ECHO, raw_cpu, ROUNDS, raw_cpu),
    ]


class Measured:
    """One server under load, round by round."""

    def __init__(self, path: str, pid: int) -> None:
        self.path = path
        self.pid = pid
        self.answered = 0
        self.rates: list[float] = []
        self.cpu_us: list[float] = []

    def round(self, clients: int, depth: int, number: int, reply_bytes: int, placement: str) -> None:
        """One window of load."""
        before = cpu_us(self.pid)
        load = Load(self.path, clients, depth, number, reply_bytes)
        with placed(self.pid, placement):
            self.rates.append(load.run(WINDOW_SECONDS))
        load.close()
        self.answered += load.answered
        self.cpu_us.append((cpu_us(self.pid) - before) / load.answered)


def main() -> None:
    parser = argparse.ArgumentParser(prog="attnix bench syscall", description="What a system call costs.")
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    options = parser.parse_args()
    try:
        show(run(options.json), options.json)
    except BenchError as error:
        sys.exit(f"attnix bench syscall: {error}")


if __name__ == "__main__":
    main()
