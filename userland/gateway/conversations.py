"""Contexts that are kept between the requests of a conversation, and found again by what the client sends.

A client of these interfaces sends the whole conversation each time.  When its beginning is one that a context holds, reply
included, the request goes on in that context, in which nothing has to be computed again and the reply stands as it was
generated.  Until then it is parked: in TOOL_WAIT when the reply ended in tool calls, else idle.

Found by        a digest of the messages up to and with the reply, and the key of the caller; or, when the client has
                changed something, by the ids of the tool calls that its results answer (then as far as the tokens agree)
Given up        by age, the oldest first past a limit, and all when the daemon has gone
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from attnix.syscalls import AsyncContext, AsyncProcess
from attnix.syscalls.text import Piece
from attnix.syscalls.types import Usage


class Conversation:
    """A context, and what it holds.

    owner    name of the key that it belongs to
    finder   whose requests go on in it: Ask.owner
    tokens   the log of its context
    pieces   what the template wrote, one piece before each reply
    replies  indices of the replies among the messages, as many as `pieces`
    exact    the last reply, as text, is what its tokens say: else it is rendered anew
    wait     number of the wait it is in, 0: none
    """

    __slots__ = (
        "call_ids", "connection", "context", "exact", "finder", "fingerprint", "mark", "owner", "parked_s", "pieces", "process",
        "replies", "tokens", "wait",
    )  # fmt: skip

    def __init__(
        self, owner: str, connection: int, process: AsyncProcess, context: AsyncContext, finder: str = ""
    ) -> None:
        self.owner = owner
        self.finder = finder or owner
        self.connection = connection
        self.process = process
        self.context = context
        self.tokens: array[int] = array("i")
        self.pieces: list[Piece] = []
        self.replies: list[int] = []
        self.exact = True
        self.wait = 0
        self.mark = Usage()
        self.fingerprint = b""
        self.call_ids: tuple[str, ...] = ()
        self.parked_s = 0.0


def fingerprints(owner: str, messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """One digest per message: of it and all before it, and whose they are."""
    digest = hashlib.blake2b(owner.encode(), digest_size=16)
    found: list[bytes] = []
    for message in messages:
        digest.update(_plain(message))
        found.append(digest.digest())
    return found


def _plain(message: Mapping[str, Any]) -> bytes:
    """What makes two messages the same: nothing that a client library adds or leaves out."""
    calls = [
        [call.get("id"), call["function"]["name"], _value(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    told = json.dumps(calls, ensure_ascii=True, sort_keys=True) if calls else ""
    parts = (message["role"], message.get("content") or "", told, message.get("tool_call_id") or "")
    plain = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"%d %d %d " % (len(plain[0]), len(plain[1]), len(plain[2])) + b"".join(plain)


def _value(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


class Parked:
    """The contexts at rest.  One that was taken belongs to its request, until it is parked again."""

    def __init__(self, limit: int, age_s: float) -> None:
        self._limit = limit
        self._age_s = age_s
        self._all: OrderedDict[int, Conversation] = OrderedDict()  # by cid, the longest parked first
        self._by_history: dict[bytes, list[Conversation]] = {}
        self._by_call: dict[tuple[str, str], Conversation] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def waiting(self) -> int:
        """How many wait for a tool."""
        return sum(1 for one in self._all.values() if one.wait)

    def park(self, conversation: Conversation, fingerprint: bytes, call_ids: Sequence[str]) -> list[Conversation]:
        """Keep it.  Returns those that have to go for it."""
        conversation.fingerprint = fingerprint
        conversation.call_ids = tuple(call_ids)
        conversation.parked_s = time.monotonic()
        self._all[conversation.context.cid] = conversation
        self._by_history.setdefault(fingerprint, []).append(conversation)
        for call in call_ids:
            self._by_call[conversation.finder, call] = conversation
        leaving = []
        while len(self._all) > self._limit:
            oldest = next(iter(self._all.values()))
            self._take(oldest)
            leaving.append(oldest)
        return leaving

    def find(
        self, owner: str, messages: Sequence[Mapping[str, Any]], prints: Sequence[bytes]
    ) -> tuple[Conversation, bool] | None:
        """The context that holds most of these messages, taken out; whether its history is theirs to the letter."""
        for index in range(len(messages) - 1, -1, -1):
            if messages[index]["role"] == "assistant" and self._by_history.get(prints[index]):
                found = self._by_history[prints[index]][-1]
                self._take(found)
                return found, True
        for message in reversed(messages):
            if message["role"] != "tool":
                continue
            near = self._by_call.get((owner, message.get("tool_call_id") or ""))
            if near is not None:
                self._take(near)
                return near, False
        return None

    def oldest(self, owners: frozenset[str] | None = None) -> Conversation | None:
        """The longest parked, of these owners or of all, taken out: room is needed."""
        found = next((one for one in self._all.values() if owners is None or one.owner in owners), None)
        if found is not None:
            self._take(found)
        return found

    def expired(self) -> list[Conversation]:
        """Those that are too old, taken out."""
        end = time.monotonic() - self._age_s
        found = [one for one in self._all.values() if one.parked_s < end]
        for one in found:
            self._take(one)
        return found

    def woke(self, cid: int, wait: int) -> None:
        """A wait is over by itself."""
        found = self._all.get(cid)
        if found is not None and found.wait == wait:
            found.wait = 0

    def drop_all(self) -> list[Conversation]:
        """Everything goes."""
        found = list(self._all.values())
        self._all.clear()
        self._by_history.clear()
        self._by_call.clear()
        return found

    def _take(self, conversation: Conversation) -> None:
        del self._all[conversation.context.cid]
        same = self._by_history[conversation.fingerprint]
        same.remove(conversation)
        if not same:
            del self._by_history[conversation.fingerprint]
        for call in conversation.call_ids:
            if self._by_call.get((conversation.finder, call)) is conversation:
                del self._by_call[conversation.finder, call]
