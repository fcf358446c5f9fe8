"""Scheduling policies by name: ours, and those that were registered (src/attnix/plugins.py reads the entry point group)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final

from .guarded import Failed, Guarded
from .protocol import OrderPolicy

Factory = Callable[[], OrderPolicy]

DEFAULT: Final = "shortest_prefill"
BUILT_IN: Final = {
    "deadline": "Deadline",
    "fcfs": "Fcfs",
    "least_attained": "LeastAttained",
    "longest_prefix": "LongestPrefix",
    "priority": "Priority",
    "program_fcfs": "ProgramFcfs",
    "shortest_prefill": "ShortestPrefill",
}
_registered: dict[str, Factory] = {}


def names() -> tuple[str, ...]:
    """What `make` knows, in order."""
    return tuple(sorted({*BUILT_IN, *_registered}))


def register(name: str, factory: Factory) -> None:
    """Make `name` mean a third party's policy.  `factory` is called once per device.  ValueError: the name is taken."""
    if name in BUILT_IN or name in _registered:
        raise ValueError(f"there is a scheduling policy {name!r} already")
    _registered[name] = factory


def make(name: str) -> OrderPolicy:
    """A new instance for one device.  KeyError: nobody knows `name`."""
    if name in _registered:
        return _registered[name]()
    if name not in BUILT_IN:
        raise KeyError(f"no scheduling policy {name!r}; known: {', '.join(names())}")
    policy: OrderPolicy = getattr(import_module(f".{name}", __package__), BUILT_IN[name])()
    return policy


def make_guarded(name: str, failed: Failed) -> OrderPolicy:
    """The same for a kernel, which a fault of a third party's policy must not stop: `failed` is told of the first one."""
    return Guarded(name, _registered[name], failed) if name in _registered else make(name)
