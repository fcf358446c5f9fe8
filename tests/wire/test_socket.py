"""Who may have the socket and who may use it (case 40)."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from attnix.kernel.errors import E
from attnix.syscalls import ConnectionLost, connect, daemon, default_socket_path
from attnix.syscalls.exceptions import AccessDenied
from attnix.syscalls.listen import CannotListen, Listener, peer_credentials
from attnix.syscalls.paths import MAX_PATH_BYTES

pack: Any = msgpack.packb  # its stubs say that it may return None


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_rights_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "run" / "a.sock"
    before = os.umask(umask)
    try:
        listener = Listener(str(path))
        assert os.umask(umask) == umask, "put back"
    finally:
        os.umask(before)
    assert mode(path.parent) == 0o700
    assert mode(path) == 0o600
    assert mode(f"{path}.lock") & 0o077 == 0
    listener.close()
    assert not path.exists()


def test_the_socket_is_private_as_it_appears(tmp_path: Path) -> None:
    """The umask is set before bind, and the file has its rights before listen."""
    calls: list[str] = []
    real_umask, real_bind, real_listen = os.umask, socket.socket.bind, socket.socket.listen

    def umask(mask: int) -> int:
        calls.append(f"umask {mask:o}")
        return real_umask(mask)

    def bind(listener: socket.socket, path: str) -> None:
        calls.append("bind")
        real_bind(listener, path)
        calls.append(f"{mode(path):o}")

    def listen(listener: socket.socket, backlog: int) -> None:
        calls.append("listen")
        real_listen(listener, backlog)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "umask", umask)
        patch.setattr(socket.socket, "bind", bind)
        patch.setattr(socket.socket, "listen", listen)
        Listener(str(tmp_path / "run" / "a.sock")).close()
    assert calls[:4] == ["umask 177", "bind", "600", "listen"]


def test_a_second_daemon_is_refused_and_the_first_is_not_harmed(serve: Any, launch: Any) -> None:
    first = serve()
    with connect(first.path) as client:
        before = os.lstat(first.path).st_ino
        second = launch(first.path)
        out, _ = second.communicate(timeout=20)
        assert second.returncode == 1
        assert "already serves" in out and str(first.process.pid) in out
        assert client.uname().pid == first.process.pid
    assert os.lstat(first.path).st_ino == before
    with connect(first.path) as client:
        assert client.uname().pid == first.process.pid


def test_a_stale_socket_is_replaced(serve: Any) -> None:
    first = serve(fit=False)
    first.process.kill()
    first.process.wait(20)
    assert stat.S_ISSOCK(os.lstat(first.path).st_mode)
    with pytest.raises(ConnectionLost, match="attnix boot"):
        connect(first.path)
    second = serve(path=first.path)
    with connect(second.path) as client:
        assert client.uname().pid == second.process.pid
    assert mode(second.path) == 0o600


def test_somebody_elses_live_socket_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(CannotListen, match="another program"):
            Listener(path)
    assert os.path.exists(path)


@pytest.mark.parametrize("kind", ["file", "symlink", "dangling", "directory", "symlink to a socket"])
def test_what_is_not_a_socket_is_never_deleted(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "a.sock", tmp_path / "target"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        if kind == "symlink":
            target.write_text("precious")
        if kind == "symlink to a socket":
            with socket.socket(socket.AF_UNIX) as stale:
                stale.bind(str(target))
        path.symlink_to(target)
    before = os.lstat(path)
    with pytest.raises(CannotListen, match="not a socket"):
        Listener(str(path))
    assert os.lstat(path) == before
    if kind == "symlink":
        assert target.read_text() == "precious"


def test_a_path_that_is_too_long_is_named_with_its_length(tmp_path: Path) -> None:
    room = MAX_PATH_BYTES - len(os.fsencode(tmp_path)) - 1
    if room < 1:
        pytest.skip("the temporary directory's own path is too long")
    Listener(str(tmp_path / ("x" * room))).close()
    with pytest.raises(CannotListen, match=rf"{MAX_PATH_BYTES + 1} bytes.*{MAX_PATH_BYTES}"):
        Listener(str(tmp_path / ("x" * (room + 1))))


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(CannotListen, match="0777"):
        Listener(str(shared / "a.sock"))
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(CannotListen, match="not a directory"):
        Listener(str(link / "a.sock"))
    assert list(shared.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user's")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir(0o700)
    os.chown(other, 12345, 12345)
    with pytest.raises(CannotListen, match="belongs to uid 12345"):
        Listener(str(other / "a.sock"))


def test_a_refused_path_changes_nothing_and_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    path.write_text("in the way")
    with pytest.raises(CannotListen):
        Listener(str(path))
    path.unlink()
    Listener(str(path)).close()


def test_a_socket_put_in_place_of_ours_is_not_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    listener = Listener(path)
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        listener.close()
    assert os.path.exists(path)


def test_a_daemon_whose_socket_file_is_gone_is_told_by_its_process_and_what_ends_it(tmp_path: Path) -> None:
    """`attnix shutdown` could not reach it.  With its file it can, and that is what is said."""
    path = str(tmp_path / "a.sock")
    with contextlib.closing(Listener(path)):
        with pytest.raises(CannotListen, match=rf"process {os.getpid()}.*already serves.*`attnix shutdown`$"):
            Listener(path)
        os.unlink(path)
        with pytest.raises(
            CannotListen, match=rf"process {os.getpid()}\).*file is not there.*`kill {os.getpid()}` ends it"
        ):
            Listener(path)
        os.truncate(f"{path}.lock", 0)
        with pytest.raises(CannotListen, match=rf"`fuser -v {path}.lock` shows"):
            Listener(path)


def test_credentials_are_the_operating_systems() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_credentials(ours.fileno()) == (os.getpid(), os.geteuid(), os.getegid())


def test_another_uid_is_refused_with_a_reason(serve: Any) -> None:
    """The daemon is told that every peer has uid 4242: it says why, gives nothing, closes."""
    served = serve(uid=4242, fit=False)
    client = served.raw()
    got, errno, detail = client.read()
    assert (got, errno, detail["uid"]) == (0, E.EACCES, 4242)
    assert f"uid {os.geteuid()}" in detail["message"]
    assert client.read() is None
    with pytest.raises(ConnectionLost, match="belongs to uid"):
        connect(served.path)
    assert served.stop() == 0


def in_child(work: Callable[[], str], uid: int, *groups: int) -> str:
    """What `work` says in a process of that uid, or the error that ended it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # nothing here may raise into pytest
        said = "?"
        try:
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            said = work()
        except Exception as error:
            said = type(error).__name__
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()


def as_user(uid: int, path: str) -> str:
    """What a process of that uid is told at the socket: the daemon's message, or the error of its connect."""

    def greeted() -> str:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(20)
            peer.connect(path)
            return repr(peer.recv(4096))

    return in_child(greeted, uid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_real_other_user_is_refused(serve: Any) -> None:
    """By the file's rights, and, had they failed, by the peer's credentials."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        os.chmod(base, 0o711)
        served = serve(path=f"{base}/run/a.sock")
        assert as_user(65534, served.path) == "PermissionError"
        os.chmod(f"{base}/run", 0o711)
        assert as_user(65534, served.path) == "PermissionError"
        os.chmod(served.path, 0o666)
        assert "belongs to uid 0; you are uid 65534" in as_user(65534, served.path)
        served.fit()
        served.stop()


def test_default_path(monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    monkeypatch.delenv("ATTNIX_SOCKET", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert default_socket_path() == f"/tmp/attnix-{uid}/attnix.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_socket_path() == f"/run/user/7/attnix-{uid}/attnix.sock"
    monkeypatch.setenv("ATTNIX_SOCKET", "/elsewhere/s")
    assert default_socket_path() == "/elsewhere/s"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_in_order(serve: Any, signum: int) -> None:
    """Outstanding requests are answered, the socket file goes, the status is 0."""
    served = serve(pass_ms=30, fit=False)
    client = served.raw()
    client.call(1, 1, ["t", 1])
    client.call(2, 2, ["child"])
    client.call(3, 5, [])  # wait for the child: for ever
    client.call(4, 20, [])
    assert [client.read()[0], client.read()[0]] == [1, 2]
    ctx = client.read()[2][0]
    client.call(5, 22, [ctx, pack(0) * 4])
    client.call(6, 40, [ctx, 200])
    seen: list[Any] = []
    while not any(m[0] == 0 for m in seen):  # the generation has begun
        seen.append(client.read())
    served.process.send_signal(signum)
    while (message := client.read()) is not None:
        seen.append(message)
    replies = {m[0]: m for m in seen if m[0]}
    assert sorted(m[0] for m in seen if m[0]) == [3, 5, 6], "each exactly once"
    assert replies[3][1] == E.ECANCELED
    assert replies[6][1] == 0 and replies[6][2][0] == "cancelled" and replies[6][2][1]
    assert served.process.wait(20) == 0
    assert not os.path.exists(served.path)


async def test_the_end_of_a_daemon_that_was_held_up_waits_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's answer came while the machine stood still for longer than it is waited for: it is looked for again."""
    clock = itertools.count(step=10)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    looks = iter((False, False, True))
    await daemon._until(lambda: next(looks), 2.0)
    assert not list(looks)


def test_shutdown_answers_its_caller(serve: Any) -> None:
    served = serve(fit=False)
    with connect(served.path) as client:
        client.shutdown()
    assert served.process.wait(20) == 0
    assert not os.path.exists(served.path)


GROUP = 54321  # of nobody


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_group_shares_the_socket(serve: Any) -> None:
    """Its members get in and are who they are; others do not.  Neither can end the other's processes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        os.chmod(base, 0o711)
        served = serve(path=f"{base}/run/a.sock", socket_group=str(GROUP))
        for path, mode in ((served.path, 0o660), (f"{base}/run", 0o710)):
            found = os.stat(path)
            assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (mode, 0, GROUP)
        assert as_user(65534, served.path) == "PermissionError"

        def member() -> str:
            with connect(served.path) as client:
                context = client.alloc_context()
                context.append(tokens=[1, 2, 3])
                (mine,) = client.ps().processes
                try:
                    client.kill(owner.server.pid)
                except AccessDenied:
                    return f"{client.server.uid} {mine.group} {context.generate(3, ignore_eos=True).reason}"
            return "it killed a process of another user"

        with connect(served.path) as owner:
            assert in_child(member, 65534, GROUP) == "65534 uid:65534 length"
            assert owner.server.uid == 0
        served.fit()
        served.stop()


def test_a_group_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CannotListen, match="no group 'nobody-has-this'"):
        Listener(str(tmp_path / "run" / "a.sock"), "nobody-has-this")
    assert not (tmp_path / "run").exists()


def test_a_group_that_cannot_reach_the_directory(tmp_path: Path) -> None:
    """One that was there before is not opened to others unasked."""
    (tmp_path / "run").mkdir(mode=0o700)
    with pytest.raises(CannotListen, match=f"chgrp {os.getegid()}"):
        Listener(str(tmp_path / "run" / "a.sock"), str(os.getegid()))
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
