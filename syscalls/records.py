"""Between records (the NamedTuples of kernel/calls.py) and plain MessagePack values, for the client's side.

Records grow at the end: fields that a peer does not know are ignored when read, and left out when they have their
default value when sent.  So an old client speaks to a new server and the other way round.
"""

from __future__ import annotations

import sys
import types
import typing
from array import array
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar, cast

R = TypeVar("R", bound=tuple[Any, ...])

_Build = Callable[[Any], Any]


def trimmed(record: tuple[Any, ...]) -> list[Any]:
    """The fields of a record as a list, without trailing ones that have their default."""
    defaults: dict[str, Any] = getattr(record, "_field_defaults", {})
    names: tuple[str, ...] = getattr(record, "_fields", ())
    values = list(record)
    while values and names[len(values) - 1] in defaults and values[-1] == defaults[names[len(values) - 1]]:
        values.pop()
    return values


def build(cls: type[R], value: object) -> R:
    """A record from the array that travelled.  Error: ValueError when it does not have the record's shape."""
    try:
        return cast(R, _builder(cls)(value))
    except (TypeError, IndexError) as error:
        raise ValueError(f"not a {cls.__name__}: {error}") from None


@cache
def _builder(kind: Any) -> _Build:
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _tuple_builder(typing.get_args(kind))
    if isinstance(kind, type) and hasattr(kind, "_fields"):
        return _record_builder(kind)
    if kind in (int, str, bytes, bool):
        return _scalar_builder(kind)
    if kind is float:
        return _number
    if origin is dict or origin in (types.UnionType, typing.Union):
        return _as_is
    raise TypeError(f"records cannot hold a {kind!r}")


def _record_builder(cls: Any) -> _Build:
    hints = typing.get_type_hints(cls)
    fields = [_builder(hints[name]) for name in cls._fields]
    required = len(fields) - len(cls._field_defaults)

    def make(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) < required:
            raise TypeError(f"{cls.__name__} needs an array of at least {required}")
        return cls(*[field(item) for field, item in zip(fields, value, strict=False)])

    return make


def _tuple_builder(kinds: tuple[Any, ...]) -> _Build:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        item = _builder(kinds[0])
        return lambda value: tuple([item(each) for each in value])
    items = [_builder(kind) for kind in kinds]
    return lambda value: tuple([item(each) for item, each in zip(items, value, strict=True)])


def _scalar_builder(kind: type) -> _Build:
    def make(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return make


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"expected float, got {type(value).__name__}")
    return float(value)


def _as_is(value: Any) -> Any:
    return value


def pack_ids(tokens: Iterable[int]) -> bytes:
    """Token ids as they travel: little-endian int32.  Error: OverflowError for an id that is no int32."""
    ids = array("i")
    ids.extend(tokens)  # not array("i", tokens): that would read a bytes object as already packed
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The reverse of pack_ids."""
    ids = array("i", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def unpack_floats(data: bytes) -> list[float]:
    """Little-endian float32, as log-probabilities travel."""
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
