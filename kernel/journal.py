"""What the kernel writes down so that named and detached contexts outlive the daemon, and what it reads back at boot.

The kernel emits one `Journal` effect (events.py) per step that changed something worth keeping; the daemon writes all of
a turn's records in one transaction, before it sends what the turn answered.  So what a client was told is on record.

Written are the log and the metadata of a context when it is published or detached and whenever a call changes it, and a
generation's parameters when it begins.  Tokens that it samples are written when it ends, never one by one: sampling is
keyed by (seed, position), so they can be drawn again, and those that a client has seen come back from the client.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from .calls import GenerateArgs, GenerateResult
from .injected import Injected


class Generation(NamedTuple):
    """A generation that has begun and not ended.  start: length of the log when it began; injected: see injected.py."""

    args: GenerateArgs
    start: int
    injected: Injected = ()


class ContextRecord(NamedTuple):
    """Everything about a kept context but its log; replaces what was written of it before.

    session     digest of the token of the session that holds it, or held it last
    generation  under way, or the one that `result` is of
    result      of the generation that ended last, as long as nothing came after it (without log-probabilities)
    """

    cid: int
    uid: int
    name: str
    detached: bool
    session: str
    generation: Generation | None = None
    result: GenerateResult | None = None


class LogRecord(NamedTuple):
    """The log of `cid` from token `at` on is exactly `tokens` (int32)."""

    cid: int
    at: int
    tokens: bytes


class DropRecord(NamedTuple):
    """The context is gone."""

    cid: int


class MarkRecord(NamedTuple):
    """No pid and no cid above these was ever given."""

    pid: int
    cid: int


class ToolRecord(NamedTuple):
    """What is known of how long a tool takes; replaces what was written of it before.  durations: int64 ns, oldest first."""

    tool: str
    durations: bytes


JournalRecord: TypeAlias = ContextRecord | LogRecord | DropRecord | MarkRecord | ToolRecord


class RestoredContext(NamedTuple):
    """A context as the journal has it."""

    record: ContextRecord
    log: bytes  # int32
