"""Arguments at the ends of what the wire can carry: an errno or an answer, never an exception out of the kernel."""

from __future__ import annotations

import math

import pytest

from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.simulated import SimulatedClient, SimulatedSystem, ints

INTEGERS = [
    -(2**63), -(2**31) - 1, -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
]  # fmt: skip
NUMBERS = [math.nan, math.inf, -math.inf, 1e-300, 1e-45, 1e300, -0.0, 3.5e38, 1.0, 0.999999999999]
CTX = "a context that exists"

# Every call with an integer, with the place of that integer among its arguments marked by None.
WITH_INTEGER: list[tuple[str, tuple[object, ...]]] = [
    ("hello", ("x", None)), ("spawn", ("x", None)), ("spawn", ("x", 0, None)), ("exit", (None,)), ("exit", (0, None)),
    ("kill", (None, 9)), ("kill", (0, None)), ("wait", (None,)), ("wait", (0, None)), ("ps", (None,)),
    ("getrusage", (None,)), ("setpriority", (None, 0)), ("setpriority", (0, None)), ("alloc_context", (None,)),
    ("fork", (None, 1)), ("fork", (CTX, None)), ("append", (None, ints([1]))), ("truncate", (None, 1)),
    ("truncate", (CTX, None)), ("release", (None,)), ("stat", (None,)), ("stat", (0, None)), ("pagemap", (None,)),
    ("pagemap", (0, None)), ("generate", (None,)), ("generate", (CTX, None)), ("generate", (CTX, 3, 1.0, None)),
    ("generate", (CTX, 3, 1.0, 5, 1.0, 0.0, None)),
    ("generate", (CTX, 3, 1.0, 5, 1.0, 0.0, 1, 1.0, 0.0, 0.0, None)), ("forward", (None,)), ("forward", (CTX, None)),
    ("score", (None, ints([1]))), ("cancel", (None,)), ("dmesg", (None,)), ("sysctl", ("sched.step_tokens", None)),
    ("sysctl", ("sched.max_running", None)), ("sysctl", ("sched.watermark_permille", None)),
    ("sysctl", ("evict.policy", None)),
]  # fmt: skip


def attempt(name: str, template: tuple[object, ...], value: object) -> None:
    system = SimulatedSystem(core=Core, frames=12, block_tokens=4)
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints([1, 2, 3, 4, 5]))
    args = tuple(value if a is None else ctx if a is CTX else a for a in template)
    request = client.post(name, *args)
    system.run(limit=1000)
    assert request in client.replies, f"{name}{args} got no answer"
    works(client, ctx)


def works(client: SimulatedClient, ctx: int) -> None:
    try:
        client.call("release", ctx)
    except Errno as error:
        assert error.code in (E.ESTALE, E.EBADF)
    client.call("fsck")
    client.system.disconnect(client)
    client.system.run()
    assert client.system.available() == 12


@pytest.mark.parametrize(("name", "template"), WITH_INTEGER)
def test_integers(name: str, template: tuple[object, ...]) -> None:
    for value in INTEGERS:
        attempt(name, template, value)


@pytest.mark.parametrize("field", [2, 4, 5, 7, 8, 9])
def test_numbers(field: int) -> None:
    """temperature, top_p, min_p and the three penalties: what float32 makes of them must be usable too."""
    for value in NUMBERS:
        template: list[object] = [CTX, 3, 0.5, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0]
        template[field] = None
        attempt("generate", tuple(template), value)


def test_penalties_that_a_float32_cannot_hold_are_refused() -> None:
    system = SimulatedSystem(core=Core, frames=12, block_tokens=4)
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints([1, 2, 3]))
    for value in (1e-300, 1e-45, 0.0, -1.0, math.nan, math.inf):
        with pytest.raises(Errno) as error:
            client.call("generate", ctx, 3, 0.0, 0, 1.0, 0.0, 0, value)
        assert error.value.code is E.EINVAL, value
    with pytest.raises(Errno) as error:
        client.call("generate", ctx, 3, 0.0, 0, 1e-300)
    assert error.value.code is E.EINVAL
    assert client.call("vmstat").counters.get("exec_failed", 0) == 0


@pytest.mark.parametrize("tokens", [b"\0", b"\0" * 3, b"\0" * 5, b"\xff" * 4, b"\0\1\0\0", ints([1]) + b"\2"])
def test_token_bytes_of_odd_sizes_and_outside_the_vocabulary(tokens: bytes) -> None:
    system = SimulatedSystem(core=Core, frames=12, block_tokens=4)
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints([1, 2, 3]))
    for name, args in (
        ("append", (ctx, tokens)),
        ("score", (ctx, tokens)),
        ("generate", (ctx, 3, 0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 0, (), tokens)),
    ):
        with pytest.raises(Errno) as error:
            client.call(name, *args)
        assert error.value.code is E.EINVAL, name
    assert client.call("stat", ctx).tokens == 3


@pytest.mark.parametrize("value", ["", "9" * 5000, "0x10", "\0", "nan", 2.0, math.nan, math.inf])
def test_sysctl_values_that_are_no_integers(value: object) -> None:
    system = SimulatedSystem(core=Core, frames=12, block_tokens=4)
    client = system.connect()
    for name in ("sched.step_tokens", "evict.policy"):
        with pytest.raises(Errno) as error:
            client.call("sysctl", name, value)
        assert error.value.code is E.EINVAL
    with pytest.raises(Errno) as error:
        client.call("sysctl", "no.such", value)
    assert error.value.code is E.ENOENT


def test_names_show_nothing_but_characters() -> None:
    system = SimulatedSystem(core=Core, frames=12, block_tokens=4)
    client = system.connect(hello=False)
    client.call("hello", "evil\x1b[2J\nname\x9b" + "x" * 500, 1)
    client.call("spawn", "caf\u00e9 \u202e\0")
    names = [p.name for p in client.call("ps").processes]
    assert names[0].startswith("evil?[2J?name?x") and len(names[0]) == 128
    assert names[1] == "caf\u00e9 ??"
