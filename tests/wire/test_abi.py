"""The ABI table, and everything that is made from it or must agree with it."""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path

import msgspec
import pytest

from attnix.kernel import calls, events
from attnix.kernel.errors import E
from attnix.kernel.trap_table import TRAPS
from attnix.syscalls import Client, abi, docgen, exceptions, stubs
from attnix.syscalls.aclient import AsyncClient
from attnix.syscalls.records import build, pack_ids, trimmed, unpack_floats, unpack_ids

DESIGN_CALLS = """
    hello spawn exit kill wait ps getrusage setpriority setlimit
    alloc_context fork append truncate cut release stat pagemap map unmap publish open unlink snapshot restore
    generate forward score cancel inject  wait_tool resume
    pin unpin advise prefetch demote evict
    uname tiers vmstat sysctl trace explain dmesg fsck attach_tier detach_tier shutdown
"""  # DESIGN.md section 6
LATER_CALLS = "names detach reattach sleep wake groups pressure read health frames"  # that it did not foresee


def test_every_call_of_the_design_has_a_number_of_its_own() -> None:
    named = {call.name: call.number for call in abi.CALLS} | {name: number for number, name in abi.RESERVED.items()}
    assert set(named) == set(DESIGN_CALLS.split()) | set(LATER_CALLS.split())
    assert len(set(named.values())) == len(named)
    assert all(0 < number < 128 for number in named.values())  # one byte on the wire


def test_the_kernel_has_exactly_these_calls() -> None:
    assert set(TRAPS) == set(abi.BY_NAME)


@pytest.mark.parametrize("call", abi.CALLS, ids=lambda call: call.name)
def test_both_clients_have_the_call_with_its_parameters(call: abi.Call) -> None:
    fields = typing.get_type_hints(call.args)
    defaults = getattr(call.args, "_field_defaults")  # noqa: B009  # mypy does not know it on a type[tuple]
    for owner in (stubs.SyncCalls, stubs.AsyncCalls):
        method = getattr(owner, call.name)
        parameters = list(inspect.signature(method).parameters.values())[1:]
        assert [p.name for p in parameters] == list(fields)
        assert {p.name: p.default for p in parameters if p.default is not p.empty} == defaults
        hints = typing.get_type_hints(method)
        returned = hints.pop("return")
        assert hints == fields
        assert returned is (type(None) if call.result is calls.Empty else call.result)
        assert inspect.getdoc(method)
    assert hasattr(Client, call.name) and hasattr(AsyncClient, call.name)


@pytest.mark.parametrize("call", abi.CALLS, ids=lambda call: call.name)
def test_both_codecs_agree_on_the_records(call: abi.Call) -> None:
    """What msgspec writes the client's builder reads, for arguments and results, empty and full."""
    for record in (call.args, call.result):
        sample = _sample(record)
        packed = msgspec.msgpack.encode(sample)
        plain = msgspec.msgpack.decode(packed)
        assert build(record, plain) == sample
        assert build(record, [*plain, "from a newer peer"]) == sample
        assert msgspec.msgpack.decode(packed, type=record) == sample
        short = msgspec.msgpack.encode(trimmed(sample))
        assert msgspec.msgpack.decode(short, type=record) == sample


def _sample(record: type[abi.Record]) -> abi.Record:
    values = [_value(kind) for kind in typing.get_type_hints(record).values()]
    return record(*values)


def _value(kind: typing.Any) -> typing.Any:
    if hasattr(kind, "_fields"):
        return _sample(kind)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        return (_value(inner[0]),) * 2 if inner[-1] is Ellipsis else tuple(_value(k) for k in inner)
    if typing.get_origin(kind) is dict:
        return {"a": 7}
    return {int: 7, str: "s", bytes: b"\1\0\0\0", bool: True, float: 0.5}.get(kind, "s")


def test_trailing_defaults_are_not_sent() -> None:
    assert trimmed(calls.GenerateArgs(5)) == [5]
    assert trimmed(calls.GenerateArgs(5, 256, 0.0, 3)) == [5, 256, 0.0, 3]
    assert trimmed(calls.Empty()) == []


def test_wrong_shapes_are_refused_by_the_client() -> None:
    for wrong in (None, 3, [], ["x"], [1, b"", "", [["user"]]], {"ctx": 1}):
        with pytest.raises(ValueError, match="AppendArgs"):
            build(calls.AppendArgs, wrong)


def test_arrays_are_little_endian() -> None:
    assert pack_ids([1, -2]) == b"\1\0\0\0\xfe\xff\xff\xff"
    assert pack_ids(b"ab") == pack_ids([97, 98])
    assert unpack_ids(b"\1\0\0\0\xfe\xff\xff\xff") == [1, -2]
    assert unpack_floats(b"\0\0\x80\x3f\0\0\0\xc0") == [1.0, -2.0]


def test_every_errno_has_its_exception() -> None:
    for errno in E:
        error = exceptions.syscall_error(errno, {"message": "why", "limit": 3}, "fork")
        assert type(error) is not exceptions.SyscallError
        assert (error.errno, error.detail["limit"]) == (errno, 3)
        assert str(error) == f"fork: {errno.name}: why"
    assert str(exceptions.syscall_error(999, {"message": "new"})) == "errno 999: new"


def test_generated_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert docgen.main(["--check"]) == 0, capsys.readouterr().err


def test_docs_name_every_call_field_and_errno() -> None:
    text = docgen.render_docs()
    for call in abi.CALLS:
        section = text.split(f"### {call.name} ({call.number})")[1].split("\n### ")[0]
        for field in typing.get_type_hints(call.args):
            assert f"| `{field}` |" in section
        for errno in call.errnos - abi.COMMON_ERRNOS:
            assert errno.name in section


def test_errnos_written_in_a_trap_are_declared() -> None:
    """A trap's own `raise Errno(E.X` lines; what the functions it calls raise is walked by test_grind."""
    for name, trap in TRAPS.items():
        raised = {E[errno] for errno in re.findall(r"Errno\(\s*E\.(\w+)", inspect.getsource(trap))}
        assert raised <= abi.BY_NAME[name].errnos, name


def test_positional_records_match_their_events() -> None:
    assert events.Syscall._fields == ("conn", "request", "name", "args")


def test_nothing_imports_a_folder_by_its_bare_name() -> None:
    for file in (Path(docgen.__file__).parent).rglob("*.py"):
        assert not re.search(r"^(from|import) (kernel|drivers|syscalls|userland)\b", file.read_text(), re.M), file
