"""More connections than there are descriptors: those too many are told so, and what is open goes on."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from attnix.syscalls import ConnectionLost
from attnix.syscalls.descriptors import SPARE

from .conftest import Gateway
from .rig import DEADLINE_S, says, until

ROOM = 6  # connections more


def descriptors(pid: int) -> list[int]:
    return sorted(int(name) for name in os.listdir(f"/proc/{pid}/fd"))


def squeeze(pid: int) -> int:
    """Leave room for so few connections more, and what no connection gets.  With fewer descriptors than that there is room."""
    room = len(descriptors(pid)) + ROOM
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (room + SPARE, room + SPARE))
    return room


def test_more_clients_than_descriptors(gateway: Gateway, capfd: pytest.CaptureFixture[str]) -> None:
    served = gateway(script=says("yes"))
    pid = served.process.popen.pid
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2
    room = squeeze(pid)
    url = urlsplit(served.url)
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection((url.hostname, url.port), timeout=DEADLINE_S))
            for _ in range(2 * SPARE)
        ]
        said = b""
        while data := idle[-1].recv(65536):
            said += data
        assert said.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in said and b"LimitNOFILE" in said
        assert served.chat().status_code == 200, "whose connection is open is served"
        # It has descriptors for what it needs: another connection to the daemon among it.
        served.daemon.process.stop(9)
        served.daemon.again()
        until(lambda: served.http.get("/readyz").status_code == 200, "its return")
    until(lambda: len(descriptors(pid)) < room, "their end")
    with socket.create_connection((url.hostname, url.port), timeout=DEADLINE_S) as later:
        later.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert later.recv(65536).startswith(b"HTTP/1.1 200 ")
    told = [line for line in capfd.readouterr().err.splitlines() if "LimitNOFILE" in line]
    assert len(told) == 1 and told[0].startswith("attnix: clients get 503: "), told


def test_more_programs_than_descriptors(gateway: Gateway) -> None:
    """Of the daemon."""
    served = gateway(script=says("yes"))
    daemon = served.daemon.process.popen.pid
    room = squeeze(daemon)
    with ExitStack() as stack:
        with pytest.raises(ConnectionLost, match="too many connections") as refused:
            for _ in range(2 * SPARE):
                stack.enter_context(served.daemon.client())
        assert "retry_after_ms" in refused.value.detail
        assert served.chat().status_code == 200
    until(lambda: len(descriptors(daemon)) < room, "their end")
    with served.daemon.client() as client:
        told = [row for row in client.dmesg().rows if "LimitNOFILE" in row.text]
        assert [row.level for row in told] == ["warning"]
