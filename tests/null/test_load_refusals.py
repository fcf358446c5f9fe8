"""Every refusal says what would make it succeed; and new work that would wait too long is refused before it costs anything."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import attnix.kernel
import attnix.syscalls
from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.backlog import Backlog
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of

S, MS = 1_000_000_000, 1_000_000

# Fields that a refusal has to carry: all of them, or, for EBUSY, one that says by whom the object is in use.
NUMBERS = {
    "ENOMEM": {"wanted", "free"},
    "E2BIG": {"limit"},
    "EDQUOT": {"wanted", "limit"},
    "EAGAIN": {"retry_after_ms"},
}
WHO = {"cid", "pid", "conn", "request", "device", "wait", "state", "group"}
SIZE = {"wanted", "bytes"}
# Of every other, one at least: which argument, which object, or who may.  In these nothing that was asked for is wrong.
BARE = {"ENOSYS", "EIO", "ECANCELED", "ETIMEDOUT"}


def fields_of(code: ast.expr, rest: list[ast.expr], keywords: list[ast.keyword]) -> tuple[str, set[str]] | None:
    """(errno, fields) where `code` is E.SOMETHING: what is passed by name, and what a dictionary beside it has."""
    if not (isinstance(code, ast.Attribute) and isinstance(code.value, ast.Name) and code.value.id == "E"):
        return None
    fields = {k.arg for k in keywords if k.arg is not None}
    for each in rest:
        if isinstance(each, ast.Dict):
            fields |= {k.value for k in each.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
    return code.attr, fields


def refusals() -> list[tuple[str, str, set[str]]]:
    """(where, errno, fields) of each that the source of the kernel and of the daemon makes."""
    found = []
    for package in (attnix.kernel, attnix.syscalls):
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                made: tuple[str, set[str]] | None = None
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in ("Errno", "SnapshotError")
                ):
                    made = fields_of(node.args[0], [], node.keywords)
                elif isinstance(node, ast.Call) and any(isinstance(a, ast.Dict) for a in node.args):
                    made = next((m for k, a in enumerate(node.args) if (m := fields_of(a, node.args[k:], []))), None)
                elif isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[1], ast.Dict):
                    made = fields_of(node.elts[0], node.elts[1:], [])
                if made is not None:
                    found.append((f"{folder.name}/{path.relative_to(folder)}:{getattr(node, 'lineno', 0)}", *made))
    return found


def test_refusals_carry_numbers() -> None:
    found = refusals()
    assert {"ENOMEM", "E2BIG", "EDQUOT", "EAGAIN", "EBUSY", "EACCES", "EINVAL", "ENOENT", "ENODEV"} <= {
        c for _, c, _ in found
    }
    assert {"kernel/backlog.py", "syscalls/wire.py", "syscalls/snapshots.py"} <= {
        where.split(":")[0] for where, _, _ in found
    }
    bare = []
    for where, code, fields in found:
        missing = NUMBERS.get(code, set()) - fields
        if missing:
            bare.append(f"{where}: {code} without {', '.join(sorted(missing))}")
        elif code == "EBUSY" and not fields & WHO:
            bare.append(f"{where}: EBUSY does not say by whom")
        elif code == "E2BIG" and not fields & SIZE:
            bare.append(f"{where}: E2BIG does not say how large it is")
        elif code not in BARE and not fields - {"message", "closing"}:
            bare.append(f"{where}: {code} says in no field what is wrong")
    assert not bare, "\n".join(bare)


def refused(client: SimulatedClient, name: str, *args: object) -> Errno:
    with pytest.raises(Errno) as error:
        client.result(client.post(name, *args))
    return error.value


def test_slots_by_number() -> None:
    system = SimulatedSystem(core=Core, max_contexts=3)
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints([1]))
    said = refused(client, "fork", ctx, 3)
    assert said.code is E.ENOMEM
    assert {k: said.detail[k] for k in ("wanted", "free", "limit")} == {"wanted": 3, "free": 2, "limit": 3}
    client.call("fork", ctx, 2)
    system.run()
    for name, args in (("alloc_context", ()), ("score", (ctx, ints([1]))), ("spawn", ("x", 0, ctx))):
        said = refused(client, name, *args)
        assert (said.code, said.detail["wanted"], said.detail["free"]) == (E.ENOMEM, 1, 0)


def test_who_is_in_the_way() -> None:
    system = SimulatedSystem(core=Core)
    client = system.connect()
    made = client.call("alloc_context")
    client.post("append", made.ctx, ints([1]))
    request = client.post("generate", made.ctx, 9)
    said = refused(client, "append", made.ctx, ints([1]))
    assert said.code is E.EBUSY and (said.detail["cid"], said.detail["request"]) == (made.cid, request)
    system.run()
    client.call("pin", made.ctx, 5000)
    system.advance(2 * S)
    said = refused(client, "evict", made.ctx)
    assert said.code is E.EBUSY and said.detail["left_ms"] == 3000
    assert refused(client, "wait", 0, 0).code is E.ENOENT


# -- the bound on waiting -------------------------------------------------------------------------------------------


def crowd(client: SimulatedClient, n: int, tokens: int = 8) -> list[int]:
    """So many contexts with a prompt each; all wait for the first pass."""
    made = [client.call("alloc_context").ctx for _ in range(n)]
    for k, ctx in enumerate(made):
        client.result(client.post("append", ctx, ints([k] * tokens)))
    return made


def test_the_queue_has_a_length_if_it_is_given_one() -> None:
    system = SimulatedSystem(core=Core, frames=64, sysctl={"sched.max_queue": 3})
    client = system.connect()
    contexts = crowd(client, 3)
    late = client.call("alloc_context").ctx
    said = refused(client, "append", late, ints([9] * 4))
    assert said.code is E.EAGAIN
    assert (said.detail["queued"], said.detail["limit"], said.detail["retry_after_ms"]) == (3, 3, 1000)
    assert client.call("stat", late).tokens == 0, "an errno means that nothing was done"
    requests = [client.post("generate", ctx, 2) for ctx in contexts]  # they have their place already
    system.run()
    for k, request in enumerate(requests):
        assert tokens_of(client.result(request).tokens) == reference_tokens([k] * 8, 2)
    assert client.call("append", late, ints([9] * 4)).tokens == 4
    assert system.kernel.machine.counters["refused_overload"] == 1


def test_whatever_brings_new_work_is_refused() -> None:
    """Also by a call that only adds to what is there, and also beside a job that has its place; and it counts once."""
    system = SimulatedSystem(core=Core, frames=64, block_tokens=4, max_contexts=64, sysctl={"sched.max_queue": 2})
    client = system.connect()
    idle = client.call("alloc_context").ctx
    client.call("append", idle, ints(range(10, 18)))
    system.run()
    queued, _ = crowd(client, 2)
    new = ints(range(30, 40))
    for name, ctx in (("append", idle), ("inject", idle), ("forward", idle), ("score", idle), ("score", queued)):
        said = refused(client, name, ctx, *((1, b"", new) if name == "forward" else (new,)))
        assert said.code is E.EAGAIN and said.detail["queued"] == 2, name
    assert client.call("stat", idle).tokens == 8
    for name in ("inject", "score"):
        client.post(name, idle, ints([3]))  # goes on with what has begun
    system.run()
    assert client.call("inject", idle, new).tokens == 19


def test_the_wait_is_the_queue_over_the_rate() -> None:
    """Eight prompts, one a second, while others wait: the ninth of nine waits nine seconds.  The forgetting (15 s) takes
    the same from both sides, but for what happens at a point in time and what in between: 1 - e^-(1/15) of a second."""
    system = SimulatedSystem(core=Core)
    backlog = Backlog(system.kernel.machine, 0)
    system.kernel.machine.schedulers[0].queue.append(None)  # type: ignore[arg-type]
    system.kernel.machine.now_ns = 0
    backlog.look()
    for number in range(1, 9):
        system.kernel.machine.now_ns += S
        backlog.begun()
        assert backlog.wait_ns(1) == -1 or number >= 4
    assert backlog.wait_ns(9) / S == pytest.approx(9 * 15 * (1 - 2.718281828 ** (-1 / 15)), rel=1e-6)
    system.kernel.machine.schedulers[0].queue.clear()
    backlog.look()
    before = backlog.wait_ns(9)
    system.kernel.machine.now_ns += 1000 * S  # nobody waits: says nothing about the rate
    backlog.look()
    assert backlog.wait_ns(9) == before and backlog.wait_ns(0) == 0


def paced(system: SimulatedSystem, passes: int) -> None:
    """Each pass takes a second."""
    for _ in range(passes):
        system.now_ns += S
        system.tick()


def test_what_goes_on_is_not_refused_half_way() -> None:
    """A context between two `forward`s has no job; the queue is full meanwhile, and it goes on all the same."""
    system = SimulatedSystem(core=Core, frames=64, block_tokens=4, max_contexts=64, sysctl={"sched.max_queue": 2})
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(range(8)))
    likeliest = client.call("forward", ctx, 1)
    crowd(client, 2)
    token = likeliest.tokens[:4]
    asked = client.post("forward", ctx, 1, b"", token)
    assert asked not in client.replies or not client.replies[asked].code
    fresh, other = client.call("alloc_context").ctx, ints(range(50, 58))
    with pytest.raises(Errno) as error:
        client.call("append", fresh, other)
    assert error.value.code == E.EAGAIN
    with pytest.raises(Errno) as error:  # more than a block is new work
        client.call("append", ctx, ints(range(60, 66)))
    assert error.value.code in (E.EAGAIN, E.EBUSY)
    system.run()
    assert len(client.result(asked).tokens) == 4


def test_what_would_wait_too_long_is_refused_and_told_when_to_come_again() -> None:
    """A pass computes one prompt and takes a second: after six, five of which were measured, a wait is a second a job."""
    system = SimulatedSystem(
        core=Core,
        frames=64,
        block_tokens=4,
        max_contexts=64,
        sysctl={"sched.step_tokens": 8, "sched.max_wait_ms": 9500},
    )
    client = system.connect()
    crowd(client, 16)
    paced(system, 6)
    machine = system.kernel.machine
    rest = machine.schedulers[0].backlog.waiting()
    accepted = 0
    while True:
        ctx = client.call("alloc_context").ctx
        request = client.post("append", ctx, ints([100 + accepted] * 8))
        if client.replies[request].code:
            break
        accepted += 1
    with pytest.raises(Errno) as error:
        client.result(request)
    said = error.value
    assert said.code is E.EAGAIN
    assert rest + accepted in (9, 10), "as many as are served in nine and a half seconds"
    assert said.detail["queued"] == rest + accepted
    assert 0 < int(said.detail["retry_after_ms"]) <= 1000
    assert int(said.detail["wait_ms"]) == 9500 + int(said.detail["retry_after_ms"])
    paced(system, 1)  # for as long as it was told
    assert client.result(client.post("append", ctx, ints([99] * 8))).tokens == 8
    system.run()


def test_by_default_nobody_is_refused() -> None:
    system = SimulatedSystem(core=Core, frames=64, max_contexts=64, sysctl={"sched.step_tokens": 8})
    client = system.connect()
    crowd(client, 50)
    paced(system, 20)
    assert "refused_overload" not in system.kernel.machine.counters
