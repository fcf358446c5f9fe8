"""The raw peer of `attnix bench syscall`: a Python process that answers n bytes with m bytes and does nothing else.

    python -m attnix.userland.bench.echo PATH REQUEST_BYTES REPLY_BYTES [many]

Without `many` it serves one client with blocking calls, the least a Python pair can do.  With it, any number of
clients from one epoll loop, again with nothing between `recv` and `send`.
"""

from __future__ import annotations

import select
import socket
import sys


def serve_one(listener: socket.socket, request_bytes: int, reply: bytes) -> None:
    """Blocking, one client after the other."""
    while True:
        client, _ = listener.accept()
        with client:
            while True:
                missing = request_bytes
                while missing:
                    data = client.recv(1 << 18)
                    if not data:
                        break
                    missing -= len(data)
                if missing:
                    break
                client.sendall(reply)


def serve_many(listener: socket.socket, request_bytes: int, reply: bytes) -> None:
    """Whole requests only, as the clients of the benchmark send them: whatever a `recv` brings is a multiple."""
    epoll = select.epoll()
    epoll.register(listener.fileno(), select.EPOLLIN)
    clients: dict[int, socket.socket] = {}
    replies = [reply * count for count in range(65)]
    while True:
        for fd, _ in epoll.poll():
            if fd == listener.fileno():
                client, _ = listener.accept()
                clients[client.fileno()] = client
                epoll.register(client.fileno(), select.EPOLLIN)
                continue
            data = clients[fd].recv(1 << 18)
            if data:
                clients[fd].sendall(replies[len(data) // request_bytes])
            else:
                epoll.unregister(fd)
                clients.pop(fd).close()


def main(path: str, request_bytes: str, reply_bytes: str, many: str = "") -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(128)
        print("ready", flush=True)
        serve = serve_many if many else serve_one
        serve(listener, int(request_bytes), bytes(int(reply_bytes)))


if __name__ == "__main__":
    main(*sys.argv[1:])
