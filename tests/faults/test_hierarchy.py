"""A real daemon whose hbm holds a quarter of its contexts, with dram and a file below it, and everything that can happen to
the drivers while it serves.  The simulated accel computes; what it says after a token depends on every byte of KV before
it, so one wrong frame is a wrong answer.  The right ones come from the token lists alone (`reference_tokens`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from attnix.drivers.sim import reference_tokens
from attnix.kernel.tag import HEADER_BYTES
from attnix.syscalls import connect
from attnix.syscalls.client import Client, Context

pytestmark = pytest.mark.e2e

DEADLINE_S = 60.0
CONTEXTS, PROMPT, ANSWER = 24, 70, 5  # 24 contexts of 5 blocks; hbm holds 32 blocks, dram 32
SLOW = ("--sim", '{"ns_per_token": 200000}')  # computing costs more than loading, as it does in life
TIERS = ("--hbm", "4KiB", "--dram", "256KiB", "--nvme", "2MiB")


class Daemon:
    """`python -m attnix.boot` with the simulated model; its state stays in the folder from one to the next."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.socket = str(folder / "run" / "s.sock")
        self.nvme_file = folder / "state" / "nvme0.frames"
        self.output = folder / "output"
        command = [sys.executable, "-m", "attnix.boot", "--model", "sim", "--socket", self.socket]
        command += ["--state-dir", str(folder / "state"), "--window", "512", "--max-contexts", "64", *flags]
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        until(lambda: "ready on" in self.text() or self.process.poll() is not None, "boot")
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        return self.output.read_text()

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(DEADLINE_S) == 0, self.text()


Start = Callable[..., Daemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    daemons: list[Daemon] = []

    def begin(*flags: str) -> Daemon:
        daemons.append(Daemon(tmp_path, *flags))
        return daemons[-1]

    yield begin
    for daemon in daemons:
        if daemon.process.poll() is None:
            daemon.process.kill()
        daemon.process.wait(DEADLINE_S)


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.005)


class Conversations:
    """Contexts that grow by turns, in random order, each answer compared with what the model says of the same tokens."""

    def __init__(self, client: Client, seed: int = 5) -> None:
        self.client = client
        self._random = random.Random(seed)
        self.contexts: list[Context] = []
        self.logs: list[list[int]] = []
        for n in range(CONTEXTS):
            prompt = [self._random.randrange(256) for _ in range(PROMPT + n % 7)]
            context = client.alloc_context()
            context.append(tokens=prompt)
            self.contexts.append(context)
            self.logs.append(prompt)
        self.prompt_tokens = sum(map(len, self.logs))

    def turn(self, at: dict[int, Callable[[], None]] | None = None) -> None:
        """Continue each context; before the n-th, do what `at` says."""
        for n, i in enumerate(self._random.sample(range(CONTEXTS), CONTEXTS)):
            if at and n in at:
                at[n]()
            answer = array("i", self.contexts[i].generate(ANSWER).tokens).tolist()
            assert answer == reference_tokens(self.logs[i], ANSWER, vocab=256), f"context {i}"
            self.logs[i] += answer

    def count(self, name: str) -> int:
        return self.client.vmstat().counters.get(name, 0)

    def pid(self, device: str) -> int:
        return next(tier.driver_pid for tier in self.client.tiers().tiers if tier.device == device)

    def kill(self, device: str, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
        return lambda: os.kill(self.pid(device), number)

    def sound(self) -> None:
        assert self.client.fsck().problems == ()


def conversing(daemon: Daemon) -> Client:
    return connect(daemon.socket, name="test", timeout=DEADLINE_S)


def test_more_contexts_than_hbm_holds_and_no_token_is_computed_twice(start: Start) -> None:
    daemon = start(*TIERS, *SLOW)
    with conversing(daemon) as client:
        talk = Conversations(client)
        for _ in range(3):
            talk.turn()
        talk.sound()
        assert talk.count("computed_tokens") <= talk.prompt_tokens + 3 * CONTEXTS * ANSWER, (
            "something was computed again"
        )
        rows = {row.device: row for row in client.tiers().tiers}
        assert rows["hbm0"].capacity_frames == 32 < CONTEXTS * 5
        for device in ("hbm0", "nvme0"):
            assert rows[device].read_bytes and rows[device].write_bytes, f"{device} did not take part"
            assert not rows[device].errors
        assert talk.count("loaded_blocks_nvme") > 0 and talk.count("demoted_blocks") > 0
    daemon.end()


@pytest.mark.parametrize("device", ["nvme0", "hbm0"])
def test_a_driver_is_killed_in_every_turn(start: Start, device: str) -> None:
    daemon = start(*TIERS, *SLOW)
    with conversing(daemon) as client:
        talk = Conversations(client)

        def restarted(times: int) -> bool:
            rows = {row.device: row for row in client.tiers().tiers}
            return all(row.state == "up" for row in rows.values()) and rows[device].restarts == times

        for death, n in enumerate((3, 9, 17), 1):
            talk.turn({n: talk.kill(device)})
            until(partial(restarted, death), "the restart")
        talk.turn()
        talk.sound()
        assert talk.count("driver_deaths") == 3
    daemon.end()


@pytest.mark.slow
def test_a_tier_that_hangs_is_reaped_and_its_blocks_are_computed(start: Start) -> None:
    """SIGSTOP: the call that needs it waits for the deadline of a transfer (10 s), and then is answered rightly."""
    daemon = start(*TIERS, *SLOW)
    with conversing(daemon) as client:
        talk = Conversations(client)
        talk.turn()
        stopped = talk.pid("nvme0")
        talk.turn({5: talk.kill("nvme0", signal.SIGSTOP)})
        until(lambda: talk.pid("nvme0") not in (0, stopped), "the restart")
        assert not Path(f"/proc/{stopped}").exists()
        talk.turn()
        talk.sound()
        assert talk.count("driver_deaths") == 1 and "did not finish a transfer" in daemon.text()
    daemon.end()


def rot(path: Path, every: int) -> None:
    """Flip a bit in the payload of every n-th slot, behind the driver's back."""
    slot_bytes = HEADER_BYTES + 4096
    fd = os.open(path, os.O_RDWR)
    try:
        for at in range(0, os.fstat(fd).st_size - slot_bytes + 1, every * slot_bytes):
            for first in range(
                at, at + slot_bytes, 4096
            ):  # wherever the payload is: a header may come before the slots
                byte = os.pread(fd, 1, first + 7)
                os.pwrite(fd, bytes([byte[0] ^ 16]), first + 7)
        os.fsync(fd)
    finally:
        os.close(fd)


def test_bits_that_flip_in_the_file_are_found(start: Start) -> None:
    daemon = start(*TIERS, *SLOW)
    with conversing(daemon) as client:
        talk = Conversations(client)
        talk.turn()
        talk.turn({4: lambda: rot(daemon.nvme_file, 2)})
        talk.turn()
        talk.sound()
        assert {row.device: row.corrupt for row in client.tiers().tiers}["nvme0"] > 0
        assert talk.count("corrupt_copies") > 0
    daemon.end()


def test_what_the_file_holds_is_found_after_a_restart(start: Start) -> None:
    """Killed without a word; the same prompts then find their blocks in the file, and only those are computed that it lacks."""
    first = start(*TIERS, "--tier-write", "through", *SLOW)
    with conversing(first) as client:
        talk = Conversations(client)
        talk.turn()
        assert talk.count("computed_tokens") >= talk.prompt_tokens
        until(lambda: client.tiers().tiers[2].write_bytes > 40 * (HEADER_BYTES + 4096), "writing through")
        first.process.kill()
        first.process.wait(DEADLINE_S)
    second = start(*TIERS, *SLOW)
    with conversing(second) as client:
        again = Conversations(client)  # the same seed: the same prompts
        again.turn()
        again.sound()
        assert again.count("computed_tokens") < talk.prompt_tokens // 2
        assert again.count("loaded_blocks_nvme") > 40
    second.end()


@pytest.mark.parametrize(("token_ns", "computes"), [(1, True), (300_000_000, False)], ids=["cheap", "dear"])
def test_the_first_reload_after_a_boot_already_knows_what_computing_costs(
    start: Start, token_ns: int, computes: bool
) -> None:
    """Four blocks of the prompt are in the file, and nothing has been computed yet but what the driver says it timed."""
    prompt = [n % 251 for n in range(70)]
    timed = [[n, c, n * token_ns] for n, c in ((16, 0), (64, 0), (64, 256), (16, 256))]
    first = start(*TIERS, "--tier-write", "through")
    with conversing(first) as client:
        context = client.alloc_context()
        context.append(tokens=prompt)
        context.generate(1)
        until(lambda: client.tiers().tiers[2].write_bytes >= 4 * 4096, "writing through")
    first.end()
    second = start(*TIERS, "--sim", json.dumps({"prefill": timed}))
    with conversing(second) as client:
        assert client.tiers().tiers[0].prefill_token_ns == pytest.approx(token_ns, rel=0.01)
        context = client.alloc_context()
        context.append(tokens=prompt)
        answer = array("i", context.generate(3).tokens).tolist()
        assert answer == reference_tokens(prompt, 3, vocab=256)
        counters = client.vmstat().counters
        assert counters.get("split_blocks", 0) == (4 if computes else 0)
        assert counters.get("loaded_blocks_nvme", 0) == (0 if computes else 4)
        said = [row.why for row in client.explain().rows if row.what == "split"]
        assert len(said) == computes and all("compute 4 of 4 blocks" in text for text in said)
    second.end()


def test_tiers_attach_and_detach_while_contexts_go_on(start: Start, tmp_path: Path) -> None:
    daemon = start("--hbm", "4KiB", "--dram", "256KiB", *SLOW)
    with conversing(daemon) as client:
        talk = Conversations(client)
        talk.turn()
        attached: list[str] = []

        def attach() -> None:
            settings = json.dumps({"path": str(tmp_path / "later.frames")})
            attached.append(client.attach_tier("nvme", 2 << 20, settings).device)

        talk.turn({6: attach})
        talk.turn()
        rows = {row.device: row for row in client.tiers().tiers}
        assert attached == ["nvme0"] and rows["nvme0"].write_bytes > 0
        pid = rows["nvme0"].driver_pid
        talk.turn({6: lambda: client.detach_tier("nvme0")})
        until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the driver")
        talk.turn()
        talk.sound()
        assert talk.count("driver_deaths") == 0
    daemon.end()


class Chatter(threading.Thread):
    """A client that appends, continues, forks, truncates and releases, and compares every answer: a hundred times, and on
    until it is enough."""

    def __init__(self, socket: str, seed: int, enough: threading.Event) -> None:
        super().__init__()
        self._enough = enough
        self._socket = socket
        self._random = random.Random(seed)
        self.answers = 0
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            with connect(self._socket, name="chatter", timeout=DEADLINE_S) as client:
                self._talk(client)
        except BaseException as error:
            self.problem = error

    def _talk(self, client: Client) -> None:
        draw = self._random
        held: list[tuple[Context, list[int]]] = []
        for step in itertools.count():
            if step >= 100 and self._enough.is_set():
                return
            what = draw.choice(("new", "fork", "truncate", "release", "generate", "generate", "generate", "generate"))
            if not held or (what == "new" and len(held) < 6):
                prompt = [draw.randrange(256) for _ in range(draw.randrange(1, 90))]
                context = client.alloc_context()
                context.append(tokens=prompt)
                held.append((context, prompt))
                continue
            n = draw.randrange(len(held))
            context, log = held[n]
            if what == "fork" and len(held) < 7:
                held.append((context.fork(1)[0], list(log)))
            elif what == "truncate":
                keep = draw.randrange(1, len(log) + 1)
                context.truncate(keep)
                del log[keep:]
            elif what == "release":
                held.pop(n)[0].release()
            elif len(log) < 400:
                count = draw.randrange(1, 12)
                answer = array("i", context.generate(count).tokens).tolist()
                assert answer == reference_tokens(log, count, vocab=256), f"a context of {len(log)} tokens"
                log += answer
                self.answers += 1


def test_a_tier_that_takes_nothing_is_not_asked_without_end(start: Start) -> None:
    """Every write fails at once with EIO, as with a network store behind an open breaker."""
    faults = json.dumps({"fail_items": list(range(5000))})
    daemon = start("--hbm", "4KiB", "--dram", "256KiB", "--sim-tier", f"2MiB,{faults}", *SLOW)
    with conversing(daemon) as client:
        talk = Conversations(client)
        for _ in range(3):
            talk.turn()
        talk.sound()
        blocks = talk.count("computed_tokens") // 16 + 4 * CONTEXTS  # and a partial one per context and turn
        assert 0 < talk.count("transfer_errors") <= 2 * blocks
    daemon.end()


@pytest.mark.slow
@pytest.mark.parametrize("below", ["nvme", "sim"])
def test_six_clients_while_drivers_die(start: Start, below: str) -> None:
    """The simulated tier loads straight into hbm, layer by layer, and fails, loses and rots frames besides."""
    faults = {"latency_ns": 2_000_000, "fail_items": [30, 77], "flip_items": [50, 90], "lose_items": [60, 140]}
    tier = ("--nvme", "1MiB") if below == "nvme" else ("--sim-tier", f"1MiB,{json.dumps(faults)}")
    daemon = start("--hbm", "4KiB", "--dram", "256KiB", *tier, "--sim", '{"ns_per_token": 50000}')
    enough = threading.Event()
    chatters = [Chatter(daemon.socket, seed, enough) for seed in range(6)]
    draw = random.Random(7)
    with conversing(daemon) as client:
        for chatter in chatters:
            chatter.start()
        kills, end = 0, time.monotonic() + DEADLINE_S
        while any(chatter.is_alive() for chatter in chatters):
            rows = [row for row in client.tiers().tiers if row.driver_pid and row.state == "up"]
            if len(rows) == 2:  # both: the next death comes once the last one has been mended
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(rows).driver_pid, signal.SIGKILL)
                    kills += 1
            if kills >= 3 or time.monotonic() > end:
                enough.set()
            assert client.fsck().problems == ()
            next((chatter for chatter in chatters if chatter.is_alive()), chatters[0]).join(0.2)
        assert [chatter.problem for chatter in chatters] == [None] * 6
        assert all(chatter.answers > 10 for chatter in chatters) and kills >= 3
        assert client.fsck().problems == ()
        assert client.vmstat().counters["demoted_blocks"] > 50
    daemon.end()
