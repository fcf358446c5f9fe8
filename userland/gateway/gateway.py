"""What all requests share: settings, the connection to the daemon, its model's words, and the contexts that are kept."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final

from attnix.syscalls import AsyncClient, AsyncContext, AsyncProcess, AttnixError
from attnix.syscalls.exceptions import NotFound
from attnix.syscalls.session import Note
from attnix.syscalls.types import WaitNote

from .conversations import Conversation, Parked
from .grammar import Grammars, Path
from .keys import BadKeys, Keys, read_keys
from .metrics import Metrics
from .pins import Pins
from .settings import Settings
from .turns import end_quietly
from .upstream import LOOK_S, Unavailable, Upstream
from .words import Words

SWEEP_S: Final = 1.0  # between looks for contexts that are too old, and at a tokenizer that could not be loaded


class Gateway:
    """One running gateway.  `upstream.client` is an `attnix.syscalls.AsyncClient` that works, or raises Unavailable."""

    def __init__(self, settings: Settings) -> None:
        """Error: BadKeys."""
        self.settings = settings
        self.keys: Keys = read_keys(settings.keys)
        self.upstream = Upstream(settings.socket, self._renewed)
        self.words = Words(lambda: self.upstream.why)
        self.parked = Parked(settings.max_parked, settings.parked_s)
        self.pins = Pins()
        self.metrics = Metrics()
        self.look_s = min(LOOK_S, settings.time_limit_s)
        self._grammars: Grammars | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Work until cancelled; then everything that was kept is given back."""
        sweeper = asyncio.ensure_future(self._sweep())
        try:
            await self.upstream.run()
        finally:
            sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await sweeper
            self.words.close()

    async def _renewed(self, client: AsyncClient) -> None:
        """A new connection: nothing of the one before is left."""
        self.parked.drop_all()
        self.pins.drop_all()
        await self.words.load(client)
        await self.keys.apply(client)
        (longest,) = (await client.sysctl("pin.max_ms")).rows
        self.pins.longest_s = float(longest.value) / 1000
        self._grammars = None
        self._in_the_background(self._listen(client))

    def read_keys_again(self) -> None:
        """The file has changed.  One that cannot be used changes nothing, and that is said."""
        try:
            keys = read_keys(self.settings.keys)
        except BadKeys as error:
            print(f"attnix: {error}; the keys stay as they were", file=sys.stderr, flush=True)
            return
        before, self.keys = self.keys, keys
        gone = keys.follow(before)
        while (conversation := self.parked.oldest(gone)) is not None:
            self.dispose(conversation)
        if self.upstream.connected:
            self._in_the_background(self._apply(self.upstream.client, before))
        print(f"attnix: {self.settings.keys}: {len(keys.keys)} keys", flush=True)

    async def _apply(self, client: AsyncClient, before: Keys) -> None:
        try:
            await self.keys.apply(client, before)
        except AttnixError as error:  # below what is in use now, for one
            print(f"attnix: {self.settings.keys}: not all limits are set: {error}", file=sys.stderr, flush=True)

    async def _listen(self, client: AsyncClient) -> None:
        """Hear of waits that ended by themselves, as long as the connection lasts."""
        ended = asyncio.ensure_future(client.ended())
        while not ended.done():
            note = asyncio.ensure_future(client.notices.get())
            await asyncio.wait((ended, note), return_when=asyncio.FIRST_COMPLETED)
            if note.done():
                self._noticed(note.result())
            else:
                note.cancel()

    def _noticed(self, note: Note) -> None:
        if isinstance(note.payload, WaitNote):
            self.parked.woke(note.payload.cid, note.payload.wait)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for conversation in self.parked.expired():
                self.dispose(conversation)
            if self.words.refusal:
                with suppress(Unavailable, AttnixError):
                    await self.words.load(self.upstream.client)
            expired = self.pins.expired()
            if expired and self.upstream.connected:
                for process in expired:
                    self.end_process(self.upstream.client, process.pid)

    # -- grammars -------------------------------------------------------------------------------------------------

    async def grammar(self, lark: str, param: str) -> Path:
        """A reply that follows `lark`, at its beginning.  Error: ApiError when it cannot be enforced."""
        if self._grammars is None:
            self._grammars = await self.words.run(Grammars, self.words.model, self.words.uname.vocab_tokens)
        return await self.words.run(self._grammars.begin, lark, param)

    # -- processes ------------------------------------------------------------------------------------------------

    async def spawn(
        self, client: AsyncClient, name: str, *, fork_of: AsyncContext | None = None, group: str = "", domain: str = ""
    ) -> AsyncProcess:
        """A process.  Whoever is cancelled while it waits for one leaves none behind."""
        made = asyncio.ensure_future(client.spawn(name, 0, fork_of, group, domain))
        try:
            return await asyncio.shield(made)
        except NotFound as error:
            if "pid" not in error.detail:
                raise
            client.close()  # this connection's own process was killed: nothing can be had of it any more
            raise Unavailable("the gateway's own process was killed; it connects anew") from error
        except asyncio.CancelledError:
            made.add_done_callback(lambda done: self._unwanted(client, done))
            raise

    def _unwanted(self, client: AsyncClient, made: asyncio.Future[AsyncProcess]) -> None:
        if not made.cancelled() and made.exception() is None:
            self.end_process(client, made.result().pid)

    # -- endings --------------------------------------------------------------------------------------------------

    def dispose(self, conversation: Conversation) -> None:
        """Give a context back, with everything that runs in its process."""
        if conversation.connection == self.upstream.connection and self.upstream.connected:
            self.end_process(conversation.process.client, conversation.process.pid)

    async def give_up(self, conversation: Conversation) -> None:
        """The same, and wait until it is done."""
        await end_quietly(conversation.process.client, conversation.process.pid)

    async def make_room(self, owners: frozenset[str] | None) -> bool:
        """Give up what was kept or pinned longest, of these keys or of all.  False: there is nothing."""
        oldest = self.parked.oldest(owners)
        if oldest is not None:
            await self.give_up(oldest)
            return True
        pin = self.pins.oldest(owners)
        if pin is not None:
            await end_quietly(self.upstream.client, pin.pid)
        return pin is not None

    def end_process(self, client: AsyncClient, pid: int) -> None:
        """Kill it in the background."""
        self._in_the_background(end_quietly(client, pid))

    def _in_the_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)  # the loop itself holds it weakly only
        task.add_done_callback(self._background.discard)
