"""More than 10,000 wrong inputs over a real socket: each gets one clear answer, and the daemon lives."""

from __future__ import annotations

import random
import socket
import typing
from collections import Counter
from typing import Any

import msgpack

from attnix.kernel.errors import E
from attnix.kernel.params import MAX_MESSAGE_BYTES, MAX_REQUESTS
from attnix.syscalls import abi
from attnix.syscalls.framing import LOST_BYTES
from attnix.syscalls.wire import ROUTES

pack: Any = msgpack.packb  # its stubs say that it may return None

SENTINEL = 0x7ABCDEF
UNAME = abi.BY_NAME["uname"].number
WRONG: list[Any] = [
    None, True, -1, 1 << 63, 1.5, float("nan"), "", "text", b"", b"\xff\xfe", [], [[]], {}, {"a": 1}, {1: 2}, [1, 2, 3],
    msgpack.Timestamp(1, 2), msgpack.ExtType(5, b"ext"),
]  # fmt: skip


def is_note(message: list[Any]) -> bool:
    return message[0] == 0 and isinstance(message[1], str)


def check_clear(message: list[Any], what: object) -> None:
    """An errno of ours with a sentence, or a success."""
    assert len(message) == 3, what
    if message[1]:
        assert E(message[1]) in E, what
        assert isinstance(message[2]["message"], str) and len(message[2]["message"]) > 8, what


def answer(client: Any, body: bytes) -> list[Any]:
    """The one answer to `body`: exactly one message comes before the answer to a sentinel sent behind it."""
    client.send(body, pack([SENTINEL, UNAME, []]))
    got: list[list[Any]] = []
    while not (got and got[-1][0] == SENTINEL):
        message = client.read()
        assert message is not None, f"the daemon closed after {body!r}"
        if not is_note(message):
            got.append(message)
    assert len(got) == 2, f"{body!r} got {got[:-1]}"
    check_clear(got[0], body)
    return got[0]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return rng.choice([0, 1, -1, 127, 128, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**63)])
    if kind == 1:
        return rng.choice([0.0, -1.5, float("inf"), float("nan")])
    if kind == 2:
        return rng.choice([None, True, False])
    if kind == 3:
        return "x" * rng.randrange(40)
    if kind == 4:
        return rng.randbytes(rng.randrange(40))
    if kind == 5:
        return rng.randrange(100)
    if kind == 6:
        return {str(n): random_value(rng, depth + 1) for n in range(rng.randrange(4))}
    return [random_value(rng, depth + 1) for _ in range(rng.randrange(6))]


def is_shutdown(body: bytes) -> bool:
    """The one request that must not be sent by chance."""
    try:
        message = msgpack.unpackb(body, strict_map_key=False)
    except Exception:
        return False
    return isinstance(message, list) and len(message) == 3 and message[1] == abi.BY_NAME["shutdown"].number


def test_framed_garbage(serve: Any) -> None:
    """6,500 messages in good frames: random bytes, random values, and requests with bytes changed."""
    rng, served = random.Random(1), serve()
    client = served.raw()
    valid = [pack([9, call.number, _arguments(rng, call)]) for call in abi.CALLS for _ in range(4)]
    codes: Counter[int] = Counter()
    for round_ in range(6500):
        if round_ % 3 == 0:
            body = rng.randbytes(rng.randrange(64))
        elif round_ % 3 == 1:
            body = pack(random_value(rng))
        else:
            changed = bytearray(rng.choice(valid))
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            if rng.random() < 0.3:
                del changed[rng.randrange(len(changed)) :]
            body = bytes(changed)
        if not is_shutdown(body):
            codes[answer(client, body)[1]] += 1
    assert codes[E.EINVAL] > 4000 and codes[E.ENOSYS] > 50 and codes[0] > 10, codes  # it reached every layer


def _arguments(rng: random.Random, call: abi.Call) -> list[Any]:
    plain = {int: 1, str: "s", bytes: b"\1\0\0\0", bool: True, float: 0.5}
    return [plain.get(kind, []) for kind in typing.get_type_hints(call.args).values()]


def test_every_field_with_every_wrong_type_is_named(serve: Any) -> None:
    """EINVAL says which argument of which call; the reply carries the request's id."""
    served = serve()
    client, request = served.raw(), 0
    for call in [route.call for route in ROUTES.values()]:
        hints = typing.get_type_hints(call.args)
        for at, (field, kind) in enumerate(hints.items()):
            for wrong in WRONG:
                if _fits(wrong, kind):
                    continue
                request += 1
                arguments = _arguments(random.Random(0), call)
                arguments[at] = wrong
                got, errno, detail = answer(client, pack([request, call.number, arguments]))
                assert (got, errno) == (request, E.EINVAL), (call.name, field, wrong)
                assert detail["field"] == field, (call.name, field, wrong, detail)
                assert call.name in detail["message"] and field in detail["message"]
        too_many = [*_arguments(random.Random(0), call), 1]
        assert answer(client, pack([1, call.number, too_many]))[1] == E.EINVAL
        required = len(hints) - len(getattr(call.args, "_field_defaults"))  # noqa: B009
        if required:
            _, errno, detail = answer(client, pack([1, call.number, []]))
            assert (errno, detail["field"]) == (E.EINVAL, next(iter(hints)))
    assert request > 800


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value may pass the types of a field: then what it means is the kernel's business."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) not in (None, tuple) else (kind,)
    for each in kinds:
        if typing.get_origin(each) is tuple and (value == [] or (value == [1, 2, 3] and int in typing.get_args(each))):
            return True
        if each is float and type(value) in (int, float):
            return True
        if each is int and type(value) is float and value == int(value if value == value else 1):
            return True
        if each is type(value) or (value is None and each is type(None)):
            return True
    return False


def test_unknown_numbers(serve: Any) -> None:
    served = serve()
    client = served.raw()
    for number in range(-5, 300):
        if number in abi.BY_NUMBER:
            continue
        got, errno, detail = answer(client, pack([4, number, []]))
        assert (got, errno, detail["number"]) == (4, E.ENOSYS, number)
        if number in abi.RESERVED:
            assert abi.RESERVED[number] in detail["message"]
    for number in (2**31, 2**63, 2**64 - 1, -(2**63)):
        assert answer(client, pack([4, number, []]))[1] == E.ENOSYS


def test_ids(serve: Any) -> None:
    """0, negative, too large, not a number, and one that is outstanding: the first request is not disturbed."""
    served = serve(pass_ms=50)
    client = served.raw()
    for wrong in (0, -1, 2**63, 2**64 - 1, "1", None, 1.5, [1]):
        got, errno, detail = answer(client, pack([wrong, UNAME, []]))
        assert (got, errno, detail["field"]) == (0, E.EINVAL, "id"), wrong
    for request in (1, 127, 128, 255, 256, 65536, 2**32, 2**63 - 1):
        assert answer(client, pack([request, UNAME, []]))[:2] == [request, 0]
    client.call(1, abi.BY_NAME["hello"].number, ["t", 1])
    client.call(2, abi.BY_NAME["alloc_context"].number, [])
    assert client.read()[0] == 1
    ctx = client.read()[2][0]
    client.call(3, abi.BY_NAME["append"].number, [ctx, b"\1\0\0\0"])
    assert client.read()[:2] == [3, 0]
    client.send(pack([7, abi.BY_NAME["forward"].number, [ctx]]), pack([7, UNAME, []]))  # in one piece
    assert client.read() == [
        0, E.EINVAL, {"message": "request id 7 is outstanding on this connection", "field": "id", "request": 7},
    ]  # fmt: skip
    assert client.read()[:2] == [7, 0]
    assert answer(client, pack([7, UNAME, []]))[:2] == [7, 0]  # free again


def test_too_many_outstanding(serve: Any) -> None:
    served = serve()
    client = served.raw()
    client.call(1, abi.BY_NAME["hello"].number, ["t", 1])
    client.call(2, abi.BY_NAME["spawn"].number, [])
    assert client.read()[1] == client.read()[1] == 0
    wait = abi.BY_NAME["wait"].number
    client.send(*[pack([10 + n, wait, []]) for n in range(MAX_REQUESTS + 3)])
    refused = [client.read() for _ in range(3)]
    assert [(m[0], m[1]) for m in refused] == [(10 + MAX_REQUESTS + n, E.EAGAIN) for n in range(3)]
    assert answer(client, pack([5, UNAME, []]))[1] == E.EAGAIN


def test_streams_cut_anywhere(serve: Any) -> None:
    """2,000 truncated messages and 2,000 random streams, each on a connection of its own, each answered once."""
    rng, served = random.Random(2), serve()
    message = pack([3, abi.BY_NAME["append"].number, [1, b"\1\0\0\0" * 20]])
    framed = len(message).to_bytes(4, "little") + message
    lost = 0
    for round_ in range(4000):
        client = served.raw()
        if round_ % 2:
            data = framed[: rng.randrange(1, len(framed))]
        else:
            data = rng.randbytes(rng.randrange(4, 200))
            if int.from_bytes(data[:4], "little") <= MAX_MESSAGE_BYTES:
                data = LOST_BYTES.to_bytes(4, "little") + data  # as good as never by chance: 1 in 256
        client.socket.sendall(data)
        client.socket.shutdown(socket.SHUT_WR)
        got = client.read()
        assert got is not None and got[0] == 0 and got[1] in (E.EINVAL, E.E2BIG), data
        check_clear(got, data)
        lost += "closing" in got[2]
        assert client.read() is None, data
        client.close()
        served.clients.remove(client)
    assert lost > 1500


def test_oversized_messages(serve: Any) -> None:
    """Over the limit: E2BIG with both numbers, and the connection goes on.  No sensible length: it closes."""
    served = serve()
    client = served.raw()
    size = MAX_MESSAGE_BYTES + 1
    client.socket.sendall(size.to_bytes(4, "little"))
    got, errno, detail = client.read()  # at once, not when all of it has come
    assert (got, errno, detail["bytes"], detail["limit"]) == (0, E.E2BIG, size, MAX_MESSAGE_BYTES)
    client.socket.sendall(bytes(size))
    assert answer(client, pack([1, UNAME, []]))[:2] == [1, 0]
    whole = pack([2, UNAME, bytes(MAX_MESSAGE_BYTES - 20)])
    assert answer(client, whole)[:2] == [2, E.EINVAL]  # the largest that may be sent
    client.socket.sendall(b"\xff\xff\xff\xff")
    got, errno, detail = client.read()
    assert (got, errno, detail["closing"]) == (0, E.EINVAL, 1)
    assert client.read() is None


def test_hostile_structure(serve: Any) -> None:
    """Headers that promise more than there is, and nesting that would exhaust a stack."""
    served = serve()
    client = served.raw()
    for body in (
        b"\xdd\xff\xff\xff\xff",
        b"\x93\x01\x16\xdd\xff\xff\xff\xff",
        b"\x93\x01\x16\x94\x01\xc4\x00\xa0\xdd\xff\xff\xff\xff",
        b"\x93\x01\x16\xc6\xff\xff\xff\xff",
        b"\x93\x01\x16" + b"\x91" * 1_000_000 + b"\x90",
        b"\x91" * 1_000_000,
        b"\x81" * 100_000,
        b"\x93\x01\x16\x92\x01\xa2\xff\xfe",
        b"\x93\x01\x53\x91\xa2\xff\xfe",
        b"",
    ):
        assert answer(client, body)[1] == E.EINVAL
