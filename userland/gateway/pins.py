"""Beginnings that a client marked as wanted again (`cache_control`): a context that holds them is pinned for a while."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from attnix.syscalls import AsyncProcess
from attnix.syscalls.exceptions import SyscallError

from .ask import Ask
from .conversations import Conversation

if TYPE_CHECKING:
    from .gateway import Gateway

MAX_PINS: Final = 32


class Pins:
    """Pinned contexts by what they hold, the least recently used first."""

    def __init__(self) -> None:
        self.longest_s = 0.0  # that the system pins for; set with each connection
        self._all: OrderedDict[bytes, tuple[AsyncProcess, float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def get(self, digest: bytes) -> AsyncProcess | None:
        found = self._all.get(digest)
        return found[0] if found is not None else None

    def put(self, digest: bytes, process: AsyncProcess, seconds: float, owner: str) -> list[AsyncProcess]:
        """Remember it, for the key that pays.  Returns those that have to go for it."""
        self._all[digest] = (process, time.monotonic() + seconds, owner)
        self._all.move_to_end(digest)
        return [self._all.popitem(last=False)[1][0] for _ in range(len(self._all) - MAX_PINS)]

    def oldest(self, owners: frozenset[str] | None) -> AsyncProcess | None:
        """The least recently used, of these owners or of all, taken out: room is needed."""
        for digest, (process, _, its) in self._all.items():
            if owners is None or its in owners:
                del self._all[digest]
                return process
        return None

    def drop(self, digest: bytes) -> None:
        self._all.pop(digest, None)

    def expired(self) -> list[AsyncProcess]:
        """Those whose time is over, taken out."""
        now = time.monotonic()
        over = [digest for digest, (_, end, _) in self._all.items() if end < now]
        return [self._all.pop(digest)[0] for digest in over]

    def drop_all(self) -> None:
        self._all.clear()


async def pin_beginnings(gateway: Gateway, conversation: Conversation, ask: Ask, marks: tuple[int, ...]) -> int:
    """Pin what `ask` marks of a conversation's context; tokens that were not pinned before.

    A pin that the system refuses (the share of hbm that may be pinned is used up) is left out: it is a wish.
    """
    new = 0
    for (_, seconds), length in zip(ask.pins, marks, strict=False):
        if not 0 < length <= len(conversation.tokens):
            continue
        seconds = min(seconds, gateway.pins.longest_s)
        beginning = conversation.tokens[:length].tobytes()
        digest = hashlib.blake2b(beginning, key=ask.key.name.encode()[:64], digest_size=16).digest()
        client = gateway.upstream.client
        known = gateway.pins.get(digest)
        try:
            if known is not None and known.context is not None:
                await client.pin(known.context.handle, round(seconds * 1000))
                gateway.pins.put(digest, known, seconds, ask.key.name)
                continue
            group = gateway.keys.full(ask.key.group)  # whoever marks it pays for it
            process = await gateway.spawn(client, f"{ask.key.name} cache", fork_of=conversation.context, group=group)
        except SyscallError:
            gateway.pins.drop(digest)
            if known is not None:
                gateway.end_process(client, known.pid)
            continue
        assert process.context is not None
        try:
            await process.context.truncate(length)
            await client.pin(process.context.handle, round(seconds * 1000))
        except BaseException as error:
            gateway.end_process(client, process.pid)
            if not isinstance(error, SyscallError):
                raise
            continue
        for leaving in gateway.pins.put(digest, process, seconds, ask.key.name):
            gateway.end_process(client, leaving.pid)
        new = max(new, length)
    return new
