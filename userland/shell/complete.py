"""Completion at the shell's prompt: what there is, asked of the system while the user types."""

from __future__ import annotations

import glob
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from attnix.syscalls import AttnixError, connect
from attnix.syscalls.abi import BY_NAME

from .words import matching, wanted

_FRESH_S: Final = 1.0  # answers are used again for so long: a key stroke is no reason to ask anew
_PATIENCE_S: Final = 0.5  # longer than this nobody waits for a suggestion
_SIGNALS: Final = (("TERM", "end it"), ("KILL", "end it"), ("STOP", "take it off the device"), ("CONT", "go on"))
_CALLS: Final = tuple((name, f"system call {call.number}") for name, call in sorted(BY_NAME.items()))
_RESOURCES: Final = ("hbm", "dram", "nvme", "contexts", "tokens_s", "weight")

Pairs = Iterable[tuple[str, str]]


class Values:
    """(text, meaning) of every kind of value in words.KINDS.  A daemon that is not there is no error: nothing is suggested."""

    def __init__(self, socket: str, commands: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = socket
        self._commands = commands
        self._clock = clock
        self._kept: dict[str, tuple[float, list[tuple[str, str]]]] = {}
        self._live: dict[str, Callable[[Any], Pairs]] = {
            "pid": lambda s: ((str(r.pid), r.name) for r in s.ps().processes if r.pid != s.server.pid),
            "cid": lambda s: (
                (str(c.cid), f"{r.name}, {c.tokens} tokens") for r in s.ps().processes for c in r.contexts
            ),
            "name": lambda s: ((r.name, f"cid {r.cid}, {r.tokens} tokens") for r in s.names().rows if r.name),
            "sysctl": lambda s: ((r.name, r.meaning) for r in s.sysctl().rows),
            "group": lambda s: ((r.name, f"{r.processes} processes") for r in s.groups().rows),
            "tier": lambda s: ((r.tier, r.device) for r in s.tiers().tiers),
            "device": lambda s: ((r.device, r.state) for r in s.tiers().tiers),
        }

    def of(self, kind: str, typed: str) -> Pairs:
        if kind == "signal":
            return _SIGNALS
        if kind == "resource":
            return [(name, "") for name in _RESOURCES]
        if kind == "manual":
            return [*((name, _about(self._commands[name])) for name in sorted(self._commands)), *_CALLS]
        if kind == "file":
            return [(path + "/" * os.path.isdir(path), "") for path in sorted(glob.glob(glob.escape(typed) + "*"))]
        return self._asked(kind)

    def _asked(self, kind: str) -> Pairs:
        at, found = self._kept.get(kind, (float("-inf"), []))
        if kind not in self._live or self._clock() - at < _FRESH_S:
            return found
        try:
            with connect(self._socket or None, name="attnix sh", timeout=_PATIENCE_S) as system:
                found = list(self._live[kind](system))
        except AttnixError:
            found = []
        self._kept[kind] = (self._clock(), found)
        return found


class ShellCompleter(Completer):
    """commands: by name, as typer made them."""

    def __init__(self, commands: Mapping[str, Any], values: Values) -> None:
        self._commands = commands
        self._values = values

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        place = wanted(document.text_before_cursor, self._commands)
        if place is None:
            return
        found = [(name, _about(place.names[name])) for name in sorted(place.names)]
        for kind in place.kinds:
            found += self._values.of(kind, place.typed)
        for text, meaning in matching(place.typed, found):
            yield Completion(_quoted(text), start_position=-place.columns, display=text, display_meta=meaning)


def _about(known: Any) -> str:
    """Of a command or an option."""
    if hasattr(known, "get_short_help_str"):
        return str(known.get_short_help_str(60))
    return str(getattr(known, "help", None) or "")


def _quoted(text: str) -> str:
    """As it has to stand in a line to be that one word."""
    return shlex.quote(text)
