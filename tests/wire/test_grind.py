"""Random, well-typed system calls from several clients (xv6's grind): no call may break the daemon or surprise the ABI.

Every reply is an errno that the call declares (the daemon writes a line to dmesg otherwise, and `serve` finds it), no
request is answered twice or never, and at the end all is as at the beginning.
"""

from __future__ import annotations

import random
import typing
from collections import Counter
from typing import Any

import msgpack
import pytest

from attnix.syscalls import abi
from attnix.syscalls.wire import ROUTES

pack: Any = msgpack.packb  # its stubs say that it may return None

INTS = [
    0,
    1,
    2,
    3,
    -1,
    4,
    5,
    15,
    16,
    17,
    31,
    64,
    127,
    255,
    256,
    1000,
    2**31 - 1,
    2**31,
    2**32,
    2**32 + 1,
    2**62,
    2**63,
    2**64 - 1,
    -(2**31),
    -(2**63),
]
FLOATS = [0.0, 0.5, 1.0, 2.0, -1.0, 1e30, float("inf"), float("nan")]
TEXTS = ["", "hbm0", "sched.max_running", "sched.", "evict.policy", "lru", "a", "\u20ac" * 5, "x" * 300, "\0"]
BYTES = [b"", b"\1\0\0\0", b"\1\0\0\0" * 20, b"\xff\xff\xff\xff", b"\0\1\0\0", b"abc", b"\7\0\0\0" * 300]
SKIPPED = {"shutdown"}
WAITS = {
    "prefetch",
    "demote",
    "evict",
    "attach_tier",
    "detach_tier",
    "wait",
    "generate",
    "reattach",
    "forward",
    "score",
    "append",
    "truncate",
}
SERVED = [route.call for route in ROUTES.values()]


def value(rng: random.Random, field: str, kind: Any, known: dict[str, list[int]]) -> Any:
    if field in ("ctx", "fork_of") and known["ctx"] and rng.random() < 0.85:
        return rng.choice(known["ctx"])
    if field in known and known[field] and rng.random() < 0.7:
        return rng.choice(known[field])
    if field in ("max_tokens", "length", "n", "top_k", "logprobs") and rng.random() < 0.8:
        return rng.randrange(1, 12)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        return [value(rng, "", inner, known) for _ in range(rng.randrange(3))]
    if hasattr(kind, "_fields"):
        return [value(rng, "", k, known) for k in typing.get_type_hints(kind).values()]
    if kind is int:
        return rng.choice(INTS)
    if kind is float:
        return rng.choice(FLOATS)
    if kind is bool:
        return rng.random() < 0.5
    if kind is bytes:
        return rng.choice(BYTES)
    if kind is str:
        return rng.choice(TEXTS)
    return rng.choice([None, 1, 100, 1.5, "lru", "x"])  # sysctl's value


@pytest.mark.parametrize("seed", range(4))
def test_grind(serve: Any, until: Any, seed: int) -> None:
    rng = random.Random(seed)
    served = serve(frames=24, window_tokens=64, max_contexts=24)
    known: dict[str, list[int]] = {"pid": [], "cid": [], "ctx": [], "request": []}
    clients: list[Any] = []
    codes: Counter[tuple[str, int]] = Counter()
    for _ in range(2500):
        if len(clients) < 3 or rng.random() < 0.01:
            client = served.raw()
            client.call(1, abi.BY_NAME["hello"].number, ["grind", 1])
            known["pid"].append(client.read()[2][2])
            client.next, client.open, client.handles = 2, {}, []
            clients.append(client)
        client = rng.choice(clients)
        if len(clients) > 2 and rng.random() < 0.01:
            clients.remove(client)
            client.close()
            continue
        call = rng.choice(SERVED)
        if call.name in SKIPPED or (call.name == "kill" and rng.random() < 0.8):
            continue
        known["ctx"] = client.handles
        known["request"] = list(client.open)
        fields = typing.get_type_hints(call.args)
        arguments = [value(rng, field, kind, known) for field, kind in fields.items()]
        required = len(fields) - len(getattr(call.args, "_field_defaults"))  # noqa: B009
        del arguments[rng.randint(required, len(fields)) :]
        request, client.next = client.next, client.next + 1
        client.open[request] = call
        client.call(request, call.number, arguments)
        client.call(request + 10**6, abi.BY_NAME["uname"].number, [])
        while (message := client.read())[0] != request + 10**6:
            settle(message, client, codes, known)
        if call.name not in WAITS:
            assert request not in client.open, f"{call.name}{arguments} was not answered in its turn"
    # Whoever still waits is cancelled, and gets its one answer.
    for client in clients:
        client.call(10**7, abi.BY_NAME["exit"].number, [])
        while (message := client.read())[0] != 10**7:
            settle(message, client, codes, known)
        for request in list(client.open):
            if client.open[request].name == "wait":
                client.call(10**8 + request, abi.BY_NAME["cancel"].number, [request])
        until_empty(client, codes, known)
    assert len({name for name, _ in codes}) >= len(SERVED) - 1 - len(SKIPPED)
    assert (
        sum(count for (_, code), count in codes.items() if code == 0) > 400
    )  # of 2,500, most of them with wrong arguments
    for client in clients:
        client.close()
    tidy(served, until)


def tidy(served: Any, until: Any) -> None:
    """Take what is named or detached, once nobody holds it any more, and let it go: the rest of the test counts frames."""
    with served.connect() as client:
        until(lambda: not any(row.held for row in client.names().rows), "the end of the other connections")
        for row in client.names().rows:
            context = client.open(cid=row.cid)
            if row.name:
                client.unlink(row.name)
            context.release()


def settle(message: list[Any], client: Any, codes: Counter[tuple[str, int]], known: dict[str, list[int]]) -> None:
    if message[0] == 0:
        assert message[1] in ("tokens", "syscall", "wait"), message
        return
    if message[0] >= 10**8:
        return
    call = client.open.pop(message[0])  # KeyError: answered twice
    codes[call.name, message[1]] += 1
    assert message[1] == 0 or message[1] in call.errnos, (call.name, message)
    if message[1] == 0 and call.name in ("alloc_context", "spawn"):
        client.handles += [message[2][call.name == "spawn"]]
    if message[1] == 0 and call.name == "fork":
        client.handles += message[2][0][:4]
    if message[1] == 0 and call.name == "spawn":
        known["pid"].append(message[2][0])


def until_empty(client: Any, codes: Counter[tuple[str, int]], known: dict[str, list[int]]) -> None:
    while any(call.name != "forward" for call in client.open.values()):
        message = client.read()
        assert message is not None
        settle(message, client, codes, known)


def test_msgpack_ints_are_the_range_that_travels() -> None:
    """The largest and smallest values above are the largest and smallest that MessagePack has."""
    with pytest.raises(OverflowError):
        pack(max(INTS) + 1)
    with pytest.raises(OverflowError):
        pack(min(INTS) - 1)
