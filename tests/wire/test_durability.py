"""A real daemon that is killed and booted again, on its state directory: what its clients see of that.

`attnix boot --model sim`: the daemon, the driver protocol and the journal are the real ones, the model is a hash.  The
oracle is the model's own reference (drivers/sim_model.py), which knows no daemon.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnix.drivers.sim_model import SamplingChoice, reference_tokens
from attnix.kernel import calls
from attnix.kernel.errors import E
from attnix.syscalls import AsyncClient, Client, ConnectionLost, SyscallError, aconnect, connect
from attnix.syscalls.client import Context
from attnix.syscalls.exceptions import AccessDenied, BadHandle, Corrupt, NotFound
from attnix.syscalls.records import pack_ids, unpack_ids
from attnix.syscalls.session import Session

DEADLINE_S = 30.0
ROOT = Path(__file__).resolve().parents[2]


class Daemon:
    """One state directory and one socket; a daemon process on them that can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self.path = str(directory / "run" / "a.sock")
        self.said = directory / "said"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str, pass_ms: float = 0.0) -> Daemon:
        command = [
            sys.executable, "-m", "attnix.boot", "--model", "sim", "--socket", self.path, "--state-dir", str(self.state),
            "--hbm", "64KiB", "--dtype", "float32", "--kv-dtype", "float32", "--block-tokens", "4", "--window", "512",
            "--max-contexts", "64", "--sim", f'{{"ns_per_pass": {int(pass_ms * 1e6)}}}', *flags,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with self.said.open("ab") as said:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert b"ready" in line, self.said.read_text()
        return self

    def end(self, signum: int) -> None:
        assert self.process is not None and self.process.stdout is not None
        self.process.send_signal(signum)
        status = self.process.wait(DEADLINE_S)
        assert status == (-signal.SIGKILL if signum == signal.SIGKILL else 0)
        self.process.stdout.close()
        self.process = None

    def connect(self, **options: Any) -> Client:
        return connect(self.path, timeout=DEADLINE_S, **options)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    started = Daemon(tmp_path)
    yield started
    if started.process is not None:
        try:
            with started.connect() as client:
                assert client.fsck().problems == ()
                assert [row.text for row in client.dmesg().rows if row.level == "error"] == []
        finally:
            started.end(signal.SIGKILL)


def restart_when(daemon: Daemon, signum: int, ready: Callable[[], bool], **options: Any) -> threading.Thread:
    """In a thread: end the daemon once `ready`, then boot it again."""

    def work() -> None:
        end = time.monotonic() + DEADLINE_S
        while not ready() and time.monotonic() < end:
            time.sleep(0.001)
        daemon.end(signum)
        daemon.start(**options)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


BOTH = pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])


@BOTH
def test_streams_go_on_through_the_death_of_the_daemon(daemon: Daemon, signum: int) -> None:
    """Four streams, each with 60 tokens to go and cut at another place; nothing is lost, doubled or different."""
    daemon.start(pass_ms=50)  # there are seconds left when it is ended
    with daemon.connect(resume=DEADLINE_S) as client:
        prompts = [[n + 1] * (5 + 3 * n) for n in range(4)]
        contexts = [client.alloc_context() for _ in prompts]
        for n, (context, prompt) in enumerate(zip(contexts, prompts, strict=True)):
            context.append(tokens=prompt)
            if n % 2:
                context.publish(f"name {n}")
            else:
                context.detach()
        streams = [c.stream(60 + n, temperature=1.0, seed=n, ignore_eos=True) for n, c in enumerate(contexts)]
        got: list[list[int]] = [[] for _ in streams]
        offsets: list[list[int]] = [[] for _ in streams]
        thread = restart_when(daemon, signum, lambda: len(got[0]) >= 7, pass_ms=0)
        for n, stream in enumerate(streams):
            for note in stream:
                offsets[n].append(note.offset)
                assert note.offset == len(got[n]), "an offset goes on where the last note ended"
                got[n] += unpack_ids(note.tokens)
        thread.join()
        assert client.reconnects == 1
        for n, prompt in enumerate(prompts):
            expected = reference_tokens(prompt, 60 + n, choice=SamplingChoice(temperature=1.0, seed=n))
            result = streams[n].result()
            assert got[n] == expected
            assert unpack_ids(result.tokens) == expected and result.reason == "length"
            assert contexts[n].stat().tokens == len(prompt) + len(expected)


@BOTH
def test_a_whole_answer_comes_through_the_death_of_the_daemon(daemon: Daemon, signum: int) -> None:
    """`generate` without a stream has no tokens to bring, and is the same all the same."""
    daemon.start(pass_ms=30)
    with daemon.connect(resume=DEADLINE_S) as client, daemon.connect() as watcher:
        context = client.alloc_context()
        context.append(tokens=[5, 4, 3])
        context.publish("whole")
        began = threading.Event()

        def far_enough() -> bool:
            return began.is_set() and watcher.stat(0, context.cid).tokens > 10

        thread = restart_when(daemon, signum, far_enough, pass_ms=0)
        began.set()
        result = context.generate(50, temperature=1.0, seed=3)
        thread.join()
        assert unpack_ids(result.tokens) == reference_tokens([5, 4, 3], 50, choice=SamplingChoice(1.0, seed=3))


@BOTH
async def test_the_asynchronous_client_comes_back_too(daemon: Daemon, signum: int) -> None:
    daemon.start(pass_ms=2)
    async with aconnect(daemon.path, resume=DEADLINE_S) as client:
        contexts = [await client.alloc_context() for _ in range(3)]
        for n, context in enumerate(contexts):
            await context.append(tokens=[n, n, 7])
            await context.publish(f"a{n}")
        loose = await client.alloc_context()
        got: list[list[int]] = [[], [], []]

        async def read(n: int) -> None:
            async for note in contexts[n].generate(50, temperature=0.7, seed=n):
                assert note.offset == len(got[n])
                got[n] += unpack_ids(note.tokens)

        async def restart() -> None:
            while len(got[0]) < 6:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(daemon.end, signum)
            waiting = asyncio.ensure_future(client.names())  # asked for while nobody is there
            await asyncio.to_thread(daemon.start)
            assert len((await waiting).rows) == 3

        await asyncio.gather(restart(), *[read(n) for n in range(3)])
        for n in range(3):
            assert got[n] == reference_tokens([n, n, 7], 50, choice=SamplingChoice(0.7, seed=n))
        assert client.reconnects == 1
        with pytest.raises(BadHandle):
            await loose.stat()
        await _second_life(client)


async def _second_life(client: AsyncClient) -> None:
    context = await client.open("a1")
    assert (await context.stat()).tokens == 53


def test_what_is_not_kept_is_gone_and_the_client_goes_on(daemon: Daemon) -> None:
    daemon.start()
    with daemon.connect(resume=DEADLINE_S) as client:
        loose = client.alloc_context()
        loose.append(tokens=[1, 2])
        daemon.end(signal.SIGKILL)
        daemon.start()
        assert client.uname().model == "sim"  # comes back, as whoever it is now
        with pytest.raises(BadHandle):
            loose.stat()
        assert client.alloc_context().cid > loose.cid, "ids are never used twice"


def test_nothing_that_may_have_been_done_is_done_again(daemon: Daemon) -> None:
    """The daemon dies with an append on its way: the client says that it does not know, and `stat` does."""
    daemon.start(pass_ms=50)
    with daemon.connect(resume=DEADLINE_S) as client:
        context = client.alloc_context()
        context.append(tokens=[1] * 9)
        context.publish("n")
        assert daemon.process is not None
        os.kill(daemon.process.pid, signal.SIGSTOP)
        pending = client.submit("append", calls.AppendArgs(context.handle, pack_ids([2, 2])), calls.AppendResult)
        daemon.end(signal.SIGKILL)
        daemon.start()
        with pytest.raises(ConnectionLost, match="whether it was done is not known"):
            pending.result()
        assert context.stat().tokens == 9


def test_an_answered_append_is_there_after_kill(daemon: Daemon) -> None:
    """Whatever a client was told has been written down, however soon the daemon dies after it."""
    daemon.start()
    for n in range(1, 4):
        with daemon.connect() as client:
            context = client.open("n") if n > 1 else client.alloc_context()
            if n == 1:
                context.publish("n")
            assert context.append(tokens=[n]).tokens == n
            daemon.end(signal.SIGKILL)
        daemon.start()
    with daemon.connect() as client:
        assert unpack_ids(client.open("n").generate(3).tokens) == reference_tokens([1, 2, 3], 3)


def test_a_client_without_resume_is_told_why(daemon: Daemon) -> None:
    daemon.start(pass_ms=50)
    with daemon.connect() as client:
        context = client.alloc_context()
        context.append(tokens=[1, 2, 3])
        context.publish("n")
        stream = context.stream(100)
        notes = iter(stream)
        next(notes)
        daemon.end(signal.SIGTERM)
        assert stream.result().reason == "suspended"
        had = unpack_ids(stream.result().tokens)
    daemon.start()
    with daemon.connect() as client:
        rest = client.open("n").reattach(had)
        assert unpack_ids(rest.result().tokens) == reference_tokens([1, 2, 3], 100)


def test_a_generation_ends_while_its_client_is_away(daemon: Daemon) -> None:
    daemon.start(pass_ms=1)
    first = daemon.connect()
    context = first.alloc_context()
    context.append(tokens=[9, 8])
    context.publish("n")
    stream = context.stream(40)
    next(iter(stream))
    session = first.server.session
    first.close()
    with daemon.connect() as client:
        end = time.monotonic() + DEADLINE_S
        while client.names().rows[0].tokens < 42:
            assert time.monotonic() < end
            time.sleep(0.002)
    daemon.end(signal.SIGKILL)
    daemon.start()
    with socket.socket(socket.AF_UNIX) as plain:  # the raw protocol: hello with the token
        plain.connect(daemon.path)
        raw = Session()
        plain.sendall(raw.request("hello", calls.HelloArgs("raw", 2, session))[1])
        answer: Any = raw.receive(plain.recv(1 << 16))[0]
        row = answer.result[5][0]
        assert row[2:] == ("n", 42, "ended")
        plain.sendall(raw.request("reattach", calls.ReattachArgs(row[0]))[1])
        messages: list[Any] = []
        while not messages or not hasattr(messages[-1], "errno"):
            messages += raw.receive(plain.recv(1 << 16))
        assert unpack_ids(messages[-1].result[1]) == reference_tokens([9, 8], 40)


def test_forged_session_tokens_are_refused(daemon: Daemon) -> None:
    daemon.start()
    with daemon.connect() as client:
        context = client.alloc_context()
        context.publish("n")
        token = client.server.session
        with daemon.connect() as other:
            assert len(token) == 32 and token != other.server.session
    for forged in (token[:-1] + ("0" if token[-1] != "0" else "1"), token.upper(), token[:16], "n", "\0"):
        with socket.socket(socket.AF_UNIX) as plain:
            session = Session()
            plain.connect(daemon.path)
            plain.sendall(session.request("hello", calls.HelloArgs("forger", 2, forged))[1])
            answer: Any = session.receive(plain.recv(1 << 16))[0]
            assert answer.errno == AccessDenied.code, (forged, answer)


# -- the journal file ------------------------------------------------------------------------------------------------


def kept(daemon: Daemon, n: int = 3) -> None:
    with daemon.connect() as client:
        for i in range(n):
            context = client.alloc_context()
            context.append(tokens=[i + 1] * 8)
            context.publish(f"n{i}")


def names(daemon: Daemon) -> list[str]:
    with daemon.connect() as client:
        return [row.name for row in client.names().rows]


def test_the_journal_is_private_and_one_file_after_an_orderly_end(daemon: Daemon) -> None:
    daemon.start()
    kept(daemon)
    daemon.end(signal.SIGTERM)
    files = sorted(path.name for path in daemon.state.iterdir())
    assert files == ["journal.db", "journal.lock", "secret", *(["snapshots"] if "snapshots" in files else [])]
    assert stat.S_IMODE((daemon.state / "journal.db").stat().st_mode) == 0o600
    assert stat.S_IMODE(daemon.state.stat().st_mode) == 0o700


def test_a_damaged_journal_is_moved_aside_and_boot_goes_on(daemon: Daemon) -> None:
    """More kinds of damage: test_journal.py."""
    daemon.start()
    kept(daemon)
    daemon.end(signal.SIGTERM)
    (daemon.state / "journal.db").write_bytes(b"not a database" * 99)
    daemon.start()
    assert "it was moved to" in daemon.said.read_text()
    assert (daemon.state / "journal.db.damaged-1").read_bytes() == b"not a database" * 99
    with daemon.connect() as client:
        assert client.names().rows == ()
        assert any("cannot be read" in row.text for row in client.dmesg().rows)
    kept(daemon)
    daemon.end(signal.SIGKILL)
    daemon.start()
    assert names(daemon) == ["n0", "n1", "n2"]
    with daemon.connect() as client:
        assert client.names().rows[0].cid > 3, "no id is given twice, though the marks were lost"


def test_names_are_refused_while_the_journal_cannot_be_written(daemon: Daemon) -> None:
    """Its log may not grow, as on a disk that is full; and then it may."""
    daemon.start()
    assert daemon.process is not None
    wal = daemon.state / "journal.db-wal"
    with daemon.connect() as client:
        context = client.alloc_context()
        context.append(tokens=[1, 2, 3])
        _, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (wal.stat().st_size, hard))
        asks: list[Callable[[], object]] = [lambda: context.publish("n"), context.detach]
        for ask in asks:
            with pytest.raises(SyscallError, match=r"journal.db cannot be written .*; make room") as refused:
                ask()
            assert refused.value.errno in (E.ENOSPC, E.EIO)
            assert refused.value.detail["file"] == str(daemon.state / "journal.db")
        assert client.names().rows == (), "nothing was done"
        context.append(tokens=[4])
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        context.publish("n")
    daemon.end(signal.SIGKILL)
    daemon.start()
    with daemon.connect() as client:
        assert unpack_ids(client.read(0, client.open("n").cid).tokens) == [1, 2, 3, 4]


def test_a_second_daemon_on_the_same_state_directory_keeps_no_journal(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start()
    kept(daemon)
    other = Daemon(tmp_path / "other")
    (tmp_path / "other").mkdir()
    other.state = daemon.state
    other.start()
    assert "another attnix keeps the journal" in other.said.read_text()
    kept(other, 1)
    other.end(signal.SIGTERM)
    assert names(daemon) == ["n0", "n1", "n2"]


def test_contexts_of_another_model_wait_for_it(daemon: Daemon) -> None:
    daemon.start()
    kept(daemon)
    daemon.end(signal.SIGTERM)
    daemon.start("--sim", '{"model": "another"}')
    assert names(daemon) == []
    assert "3 contexts belong to other models" in daemon.said.read_text()
    daemon.end(signal.SIGTERM)
    daemon.start()
    assert names(daemon) == ["n0", "n1", "n2"]


# -- snapshots -------------------------------------------------------------------------------------------------------


def test_a_snapshot_of_another_identity_names_the_field(daemon: Daemon) -> None:
    daemon.start()
    with daemon.connect() as client:
        context = client.alloc_context()
        context.append(tokens=[1, 2, 3])
        assert client.snapshot("s", [context]).contexts == 1
        (back,) = client.restore("s")
        assert unpack_ids(back.generate(4).tokens) == reference_tokens([1, 2, 3], 4)
        with pytest.raises(NotFound):
            client.restore("another")
    daemon.end(signal.SIGTERM)
    daemon.start("--numerics", "invariant")
    with daemon.connect() as client, pytest.raises(Corrupt) as caught:
        client.restore("s")
    assert caught.value.detail["field"] == "numerics"
    assert (caught.value.detail["stored"], caught.value.detail["running"]) == ("fast", "invariant")


def test_case_26_a_restore_is_not_a_silent_no_op(daemon: Daemon) -> None:
    """64 tokens, snapshot, restore, the same 64 + 4: the executor computes exactly 4 (as the driver's passes count them)."""
    daemon.start()
    prompt = [n % 50 for n in range(64)]
    with daemon.connect() as client:
        first = client.alloc_context()
        first.append(tokens=prompt)
        wait_computed(first, 64)
        client.snapshot("s", [first])
        first.release()
        (restored,) = client.restore("s")
        computed = client.vmstat().counters["computed_tokens"]
        restored.append(tokens=[1, 2, 3, 4])
        wait_computed(restored, 68)
        assert client.vmstat().counters["computed_tokens"] - computed == 4
        row = restored.stat()
        assert row.blocks == 17 and row.usage.hit_tokens == 64


TIERS = ("--dram", "1MiB", "--nvme", "8MiB")


@BOTH
def test_case_26_over_a_restart_with_a_file_tier(daemon: Daemon, signum: int) -> None:
    """The KV is found by key in nvme: what the restored context needs again is loaded, and 4 tokens are computed."""
    daemon.start(*TIERS)
    prompt = [n % 50 for n in range(64)]
    with daemon.connect() as client:
        first = client.alloc_context()
        first.append(tokens=prompt)
        wait_computed(first, 64)
        assert client.demote(first.handle, "nvme").failed_blocks == 0
        client.snapshot("s", [first])
    daemon.end(signum)
    daemon.start(*TIERS)
    with daemon.connect() as client:
        (restored,) = client.restore("s")
        restored.append(tokens=[1, 2, 3, 4])
        wait_computed(restored, 68)
        assert client.vmstat().counters["computed_tokens"] == 4
        row = restored.stat()
        assert row.blocks == 17 and row.usage.hit_tokens == row.usage.nvme_tokens == 64
        assert unpack_ids(restored.generate(5).tokens) == reference_tokens([*prompt, 1, 2, 3, 4], 5)


@BOTH
def test_named_contexts_hit_the_file_tier_after_a_restart(daemon: Daemon, signum: int) -> None:
    """Case 22: their blocks come back by key, and each goes on as if nothing had been."""
    daemon.start(*TIERS)
    prompts = [[n + 1] * 16 + list(range(20, 36)) for n in range(4)]
    with daemon.connect() as client:
        for n, prompt in enumerate(prompts):
            context = client.alloc_context()
            context.append(tokens=prompt)
            context.publish(f"n{n}")
            wait_computed(context, len(prompt))
            assert client.demote(context.handle, "nvme").failed_blocks == 0
    daemon.end(signum)
    daemon.start(*TIERS)
    with daemon.connect() as client:
        for n, prompt in enumerate(prompts):
            context = client.open(f"n{n}")
            result = context.generate(6)
            assert unpack_ids(result.tokens) == reference_tokens(prompt, 6)
            assert result.usage.nvme_tokens == len(prompt) and result.usage.computed_tokens == 6


def wait_computed(context: Context, tokens: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while context.stat().cached_tokens < tokens:
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_daemon_that_does_not_come_back_is_given_up(daemon: Daemon) -> None:
    daemon.start(pass_ms=50)
    with daemon.connect(resume=0.2) as client:
        context = client.alloc_context()
        context.append(tokens=[1])
        context.publish("n")
        stream = context.stream(100)
        daemon.end(signal.SIGKILL)
        with pytest.raises(ConnectionLost):
            stream.result()
        with pytest.raises(ConnectionLost):
            client.uname()


async def test_the_asynchronous_client_gives_up_too(daemon: Daemon) -> None:
    daemon.start(pass_ms=50)
    async with aconnect(daemon.path, resume=0.2) as client:
        context = await client.alloc_context()
        await context.append(tokens=[1])
        await context.publish("n")
        stream = context.generate(100)
        await asyncio.to_thread(daemon.end, signal.SIGKILL)
        with pytest.raises(ConnectionLost):
            await stream
        with pytest.raises(ConnectionLost):
            await client.uname()


def test_an_interrupted_wait_for_the_daemon_can_be_taken_up_again(daemon: Daemon) -> None:
    """Ctrl-C while it is away: nothing that was under way is forgotten."""
    daemon.start(pass_ms=100)
    with daemon.connect(resume=DEADLINE_S) as client:
        context = client.alloc_context()
        context.append(tokens=[1, 2])
        context.publish("n")
        stream = context.stream(30)
        next(iter(stream))
        daemon.end(signal.SIGKILL)

        def interrupt(signum: int, frame: Any) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                stream.result()
        finally:
            signal.signal(signal.SIGALRM, before)
        daemon.start()
        assert unpack_ids(stream.result().tokens) == reference_tokens([1, 2], 30)
