"""What the daemon is given by whoever boots it: a kernel, drivers and a text service, as the least each must do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from attnix.kernel.calls import Message
from attnix.kernel.errors import Detail, E
from attnix.kernel.events import AttachTier, Effect, Event, Exec, ReadSnapshot, Transfer, WriteSnapshot
from attnix.kernel.journal import JournalRecord
from attnix.kernel.traps_wait import TextArgs

from .text.detokenize import TokenTable


class KernelPort(Protocol):
    """`attnix.kernel.step.Kernel`."""

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """One event in, effects out."""
        ...

    def tail(self, conn: int, args: TextArgs, count: int) -> tuple[int, bytes]:
        """Length and last `count` tokens of the context that a call with text would write to now.  Error: Errno."""
        ...


class DriverPort(Protocol):
    """The way to the drivers.  Their answers come back through `Daemon.feed`; none of these blocks."""

    def exec(self, effect: Exec) -> None:
        """Run one forward; ExecDone or ExecFailed comes back, or DriverDown."""
        ...

    def transfer(self, effect: Transfer) -> None:
        """Move blocks between a device's frames and an arena; TransferDone comes back, or DriverDown."""
        ...

    def attach(self, effect: AttachTier) -> None:
        """Start the driver of a new tier; DriverUp or DriverGone comes back."""
        ...

    def detach(self, device: int) -> None:
        """Stop the driver of a tier for good; nothing comes back."""
        ...

    def sleep(self, device: int) -> None:
        """Stop the driver of a compute device and give its memory back; DriverAsleep comes back."""
        ...

    def wake(self, device: int) -> None:
        """Start it again; DriverUp or DriverGone comes back."""
        ...

    def restart(self, device: int, reason: str) -> None:
        """Kill the driver of `device`, reap it, start it again."""
        ...

    async def close(self) -> None:
        """Stop every driver; returns when they are gone."""
        ...


class JournalPort(Protocol):
    """What outlives the daemon (journal.py)."""

    @property
    def pending(self) -> bool:
        """Whether `commit` has something to write now."""
        ...

    @property
    def retry_ns(self) -> int:
        """0, or what was added waits for a disk that refused: `commit` is worth an attempt in so long."""
        ...

    @property
    def written(self) -> bool:
        """Whether all that was added is on record."""
        ...

    def refusal(self) -> Failure | None:
        """Why nothing can be put on record now: something was tried.  None: it can."""
        ...

    def add(self, records: tuple[JournalRecord, ...]) -> None:
        """Part of this turn's transaction."""
        ...

    def commit(self) -> None:
        """Write what was added; never raises."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class SnapshotPort(Protocol):
    """Snapshot files.  Answers come back through `Daemon.feed`."""

    def perform(self, effect: WriteSnapshot | ReadSnapshot) -> None:
        """SnapshotWritten or SnapshotRead comes back."""
        ...

    async def close(self) -> None:
        """Wait for what is under way."""
        ...


class Failure(NamedTuple):
    """A text job that could not be done."""

    code: E
    detail: Detail


TextDone: TypeAlias = Callable[[bytes | Failure], None]


class TextPort(Protocol):
    """Tokenizer and chat template, in a process of their own.

    table  what generated tokens stand for
    Each job calls `done` once, later, with token ids (int32) or why not; a long text may be done after shorter ones that came later.
    """

    @property
    def table(self) -> TokenTable: ...

    def encode(self, text: str, context_tokens: int, done: TextDone) -> None:
        """Plain text that is appended to a context of that length."""
        ...

    def encode_messages(self, messages: tuple[Message, ...], tail: bytes, context_tokens: int, done: TextDone) -> None:
        """Chat messages that continue a context of that length which ends with the tokens `tail`."""
        ...

    async def close(self) -> None:
        """Stop the process."""
        ...
