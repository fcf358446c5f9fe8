"""One request's work on the daemon: a context is found or made, the prompt appended, replies generated, the context kept.

A conversation is a process of its own, so `attnix ps` shows it, and killing the process gives everything back whatever
state it is in: that is what happens when a client goes away, when something fails, and when a kept context is too old.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from attnix.syscalls import AsyncClient, AsyncContext, AttnixError, ConnectionLost
from attnix.syscalls.client import GenerateOptions
from attnix.syscalls.exceptions import (
    BadHandle,
    DeviceDown,
    NoMemory,
    NotFound,
    QuotaExceeded,
    StaleHandle,
    SyscallError,
    TooBig,
)
from attnix.syscalls.records import unpack_ids
from attnix.syscalls.text import TextStream, TokenTable
from attnix.syscalls.types import GenerateResult, TokensNote, Usage

from .ask import Ask, Begun, Done, Ended, Event, Logprob, Piece, Spent
from .certain import Certain
from .conversations import Conversation, fingerprints
from .errors import ApiError, bad
from .grammar import TOP_K, Path, draw
from .pins import pin_beginnings
from .plan import Plan, plan
from .tools.protocol import Call, Heard, Said, Scanner
from .tools.scanners import Thinking

if TYPE_CHECKING:
    from .gateway import Gateway

R = TypeVar("R")

_ROOM_TRIES: Final = 8  # kept contexts given up for a new one, at most
_SEEDS: Final = 1 << 64
_MOST_CALLS: Final = sys.maxsize


class Reply:
    """One choice, while it comes.

    tokens     those that stay in the context
    overheard  it called more tools than it was allowed to, which nobody is told
    """

    def __init__(self, index: int, scanner: Scanner | None, most_calls: int) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.reason = ""
        self.stop = ""
        self.calls: list[Call] = []
        self.text: list[str] = []
        self.overheard = False
        self._scanner = scanner
        self._calls_left = most_calls

    def hear(self, text: str) -> list[Heard]:
        """What more text says."""
        if self._scanner is None:
            heard: list[Heard] = [Said(text)] if text else []
        else:
            heard = self._scanner.push(text) if text else []
        return self._note(heard)

    def end(self) -> list[Heard]:
        return self._note(self._scanner.finish()) if self._scanner is not None else []

    def _note(self, heard: list[Heard]) -> list[Heard]:
        allowed: list[Heard] = []
        for one in heard:
            if isinstance(one, Call):
                if not self._calls_left:
                    self.overheard = True
                    continue
                self._calls_left -= 1
            allowed.append(one)
        heard = allowed
        self.calls += [one for one in heard if isinstance(one, Call)]
        self.text += [one.text for one in heard if isinstance(one, Said)]
        return heard

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls and self.reason == "stop" else self.reason


class Turn:
    """The work of one request.  `events` once; whoever iterates it closes it (contextlib.aclosing).

    call_id  names the n-th tool call of a reply: the conversation is found by it afterwards
    """

    def __init__(self, gateway: Gateway, ask: Ask, call_id: Callable[[int, int], str]) -> None:
        self._gateway = gateway
        self._ask = ask
        self._call_id = call_id
        self._conversation: Conversation | None = None
        self._kept = False
        self._late = False
        self._streams: list[object] = []

    async def events(self) -> AsyncGenerator[Event, None]:
        """Begun, then pieces and ends of replies, then Done.  Error: ApiError, AttnixError, TimeoutError."""
        gateway, ask = self._gateway, self._ask
        loop = asyncio.get_running_loop()
        self._end = loop.time() + gateway.settings.time_limit_s
        try:
            async with asyncio.timeout_at(self._end):
                made, grammar = await self._prepare()
            conversation = self._conversation
            assert conversation is not None
            start = len(conversation.tokens)
            yield Begun(start, made.trimmed)
            contexts = [conversation.context, *(await self._in_time(self._forks(ask.n - 1)))]
            replies = [Reply(i, self._scanner(made), 1 if ask.one_call else _MOST_CALLS) for i in range(ask.n)]
            paths = [grammar.copy() if grammar else None for _ in contexts]
            if ask.n == 1:
                async for piece in self._reply(contexts[0], replies[0], paths[0], start):
                    yield piece
            else:
                async for event in self._replies(contexts, replies, paths, start):
                    yield event
            spent = await self._soon(self._finish(contexts, replies, made, start))
            if ask.n == 1:
                yield Ended(0, replies[0].finish_reason, replies[0].stop)
            yield Done(spent)
        finally:
            if self._conversation is not None and not self._kept:
                gateway.dispose(self._conversation)

    # -- before ---------------------------------------------------------------------------------------------------

    async def _prepare(self) -> tuple[Plan, Path | None]:
        """A context that holds the prompt."""
        gateway, ask = self._gateway, self._ask
        words = gateway.words
        client = gateway.upstream.client
        uname = words.uname
        if ask.lark and ask.repetition_penalty != 1.0:
            why = f"{ask.lark_param} and repetition_penalty do not go together: log-probabilities do not tell whether a logit was below 0"
            raise bad(f"{why}; presence_penalty and frequency_penalty do", "repetition_penalty")
        grammar = await gateway.grammar(ask.lark, ask.lark_param) if ask.lark else None
        found: Conversation | None = None
        same = False
        if ask.keep and ask.n == 1 and ask.messages:
            prints = fingerprints(ask.owner, ask.messages)
            seen = gateway.parked.find(ask.owner, ask.messages, prints)
            if seen is not None:
                found, same = seen
                self._conversation = found  # it goes with this request, whatever becomes of it
        room = uname.window_tokens - max(1, min(ask.max_tokens or uname.window_tokens // 4, uname.window_tokens // 2))
        made = await self._plan(found, same, room)
        if found is not None and not made.resumed and made.keep < len(found.tokens) // 2:
            gateway.dispose(found)  # little of it is wanted: what is cached of the rest is found by key
            found = self._conversation = None
            made = made._replace(keep=0, tokens=await self._whole(made))
        if found is None:
            self._conversation = await self._new(client)
        conversation = self._conversation
        assert conversation is not None
        try:
            await self._append(conversation, made)
        except (NotFound, StaleHandle, BadHandle, DeviceDown):
            if found is None:
                raise
            gateway.dispose(found)  # somebody has killed it meanwhile, or its device: the prompt is what it is
            made = await self._plan(None, False, room)
            self._conversation = None
            conversation = self._conversation = await self._new(client)
            await self._append(conversation, made)
        conversation.pieces = made.pieces[:-1] if made.resumed else []
        if not made.resumed:
            conversation.replies = []
        conversation.exact = not made.trimmed
        return made, grammar

    async def _plan(self, found: Conversation | None, same: bool, room: int) -> Plan:
        words, ask = self._gateway.words, self._ask
        given = (words.model, words.family, ask, found, same, room, words.uname.block_tokens)
        if ask.tokens:  # no work for another thread
            return plan(*given)
        return await words.run(plan, *given, chars=ask.body_bytes)

    async def _whole(self, made: Plan) -> list[int]:
        """All tokens of a prompt that was to go on in a context which is given up."""
        return (await self._plan(None, False, self._gateway.words.uname.window_tokens)).tokens

    async def _new(self, client: AsyncClient) -> Conversation:
        gateway, ask, key = self._gateway, self._ask, self._ask.key
        group, domain = gateway.keys.full(key.group), gateway.keys.full(ask.domain)
        process = await self._with_room(lambda: gateway.spawn(client, key.name, group=group, domain=domain))
        try:
            context = await self._with_room(process.alloc_context)
        except BaseException:
            gateway.end_process(client, process.pid)
            raise
        return Conversation(key.name, gateway.upstream.connection, process, context, ask.owner)

    async def _with_room(self, call: Callable[[], Awaitable[R]]) -> R:
        """`call`, given up kept contexts and pins for when there is no room for another: of this group if it is full."""
        for _ in range(_ROOM_TRIES):
            try:
                return await call()
            except (NoMemory, QuotaExceeded) as error:
                keys, group = self._gateway.keys, self._ask.key.group
                own = error.detail.get("group") == keys.full(group)
                if not await self._gateway.make_room(keys.sharing(group) if own else None):
                    raise
        return await call()

    async def _append(self, conversation: Conversation, made: Plan) -> None:
        context = conversation.context
        if made.keep < len(conversation.tokens):
            await context.truncate(made.keep)
            del conversation.tokens[made.keep :]
        if not made.tokens:
            raise ApiError(400, "the prompt is empty", param="prompt")
        wait, conversation.wait = conversation.wait, 0
        # Of several replies each would compute the prompt for itself, if it were not begun before they are forked.
        more = self._ask.n == 1
        if wait:
            try:
                await context.resume(tokens=made.tokens, wait=wait, more=more)
            except StaleHandle:  # its deadline came first
                await context.append(tokens=made.tokens, more=more)
        else:
            await context.append(tokens=made.tokens, more=more)
        conversation.tokens.extend(made.tokens)

    async def _forks(self, n: int) -> list[AsyncContext]:
        """Contexts of the other replies, all or none."""
        if not n:
            return []
        assert self._conversation is not None
        context = self._conversation.context
        return await self._with_room(lambda: context.fork(n))

    def _scanner(self, made: Plan) -> Scanner | None:
        ask, words = self._ask, self._gateway.words
        if not ask.scan:
            return None
        opening, closing = words.family.thoughts
        # A grammar of calls holds from the first token on: whatever the prompt ends with, no thought comes first.
        begun = made.pieces[-1].text.rstrip().endswith(opening) if made.pieces and not ask.lark else False
        if ask.prefill and not ask.lark:
            begun = ask.prefill.rfind(opening) > ask.prefill.rfind(closing) or (begun and closing not in ask.prefill)
        inner = words.family.scanner(frozenset(tool.name for tool in ask.tools))
        return Thinking(inner, (opening, closing), begun=begun, drop=opening in words.marker_ids)

    # -- replies --------------------------------------------------------------------------------------------------

    async def _replies(
        self, contexts: list[AsyncContext], replies: list[Reply], paths: list[Path | None], start: int
    ) -> AsyncGenerator[Event, None]:
        """Several at a time, in the order in which they come."""
        queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()

        async def pump(context: AsyncContext, reply: Reply, path: Path | None) -> None:
            try:
                async for piece in self._reply(context, reply, path, start):
                    queue.put_nowait(piece)
                queue.put_nowait(Ended(reply.index, reply.finish_reason, reply.stop))
            except BaseException as error:
                queue.put_nowait(error)
                raise

        tasks = [asyncio.ensure_future(pump(*each)) for each in zip(contexts, replies, paths, strict=True)]
        try:
            left = len(tasks)
            while left:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                left -= isinstance(event, Ended)
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _reply(self, context: AsyncContext, reply: Reply, path: Path | None, start: int) -> AsyncGenerator[Piece, None]:
        seed = (self._ask.seed + reply.index) % _SEEDS
        if path is not None:
            return self._constrained(context, reply, path, start, seed)
        return self._generated(context, reply, seed)

    async def _generated(self, context: AsyncContext, reply: Reply, seed: int) -> AsyncGenerator[Piece, None]:
        """A reply as the daemon generates it."""
        ask = self._ask
        options: GenerateOptions = {
            "temperature": ask.temperature, "top_k": ask.top_k, "top_p": ask.top_p, "min_p": ask.min_p, "seed": seed,
            "repetition_penalty": ask.repetition_penalty, "presence_penalty": ask.presence_penalty,
            "frequency_penalty": ask.frequency_penalty, "logprobs": ask.logprobs, "stop": ask.stop,
            "ignore_eos": ask.ignore_eos,
        }  # fmt: skip
        most = ask.max_tokens if ask.max_tokens is not None else self._gateway.words.uname.window_tokens
        seen = self._markers()
        words = TextStream(seen, ask.stop) if seen is not None else None
        certain = self._certain()
        stream = context.generate(most, **options)
        loop = asyncio.get_running_loop()
        timer = loop.call_at(self._end, self._too_late, stream)
        shown = 0
        try:
            notes = aiter(stream)
            while (note := await self._next(notes)) is not None:
                tokens = list(unpack_ids(note.tokens))
                reply.tokens += tokens
                text = note.text if words is None else "".join(words.push((token,)) for token in tokens)
                shown += len(note.text)
                heard = reply.hear(text)
                rows = note.logprobs
                if certain is not None:
                    tokens, rows = certain.push(tokens, rows)
                if heard or tokens:
                    yield Piece(reply.index, heard, tokens, rows)
            result = await stream.result()
        finally:
            timer.cancel()
        self._check(result)
        reply.reason, reply.stop = result.reason, result.stop
        sampled, reply.tokens = reply.tokens, list(unpack_ids(result.tokens))
        heard = reply.hear(result.text[shown:] if words is None else self._rest(words, sampled, result))
        heard += reply.end()
        tokens, rows = certain.finish(len(reply.tokens)) if certain is not None else ([], ())
        if heard or tokens:
            yield Piece(reply.index, heard, tokens, rows)

    async def _next(self, notes: AsyncIterator[TokensNote]) -> TokensNote | None:
        """None: there are no more.  Error: TimeoutError, when they should be over, and nothing says so."""
        async with asyncio.timeout_at(self._end + self._gateway.look_s):
            return await anext(notes, None)

    async def _soon(self, call: Awaitable[R]) -> R:
        """What takes no time, whether that is over or not.  Error: TimeoutError: the daemon hangs."""
        now = asyncio.get_running_loop().time()
        async with asyncio.timeout_at(max(self._end, now) + self._gateway.look_s):
            return await call

    def _rest(self, words: TextStream, sampled: list[int], result: GenerateResult) -> str:
        """What `words` still withholds, without what the daemon has found to belong to a stop string: of the token that
        completed it nobody hears."""
        held = words.finish()
        if not result.stop or words.stop:
            return held
        over = len(self._gateway.words.model.decode(sampled)) - len(result.text)
        return held[: max(0, len(held) - over)]

    def _too_late(self, stream: object) -> None:
        self._late = True
        stream.cancel()  # type: ignore[attr-defined]

    def _check(self, result: GenerateResult) -> None:
        if self._late and result.reason == "cancelled":
            raise TimeoutError
        if result.reason not in ("stop", "length"):
            raise ApiError(503, f"the generation was {result.reason}", code="unavailable", retry_after_s=1)

    async def _constrained(
        self, context: AsyncContext, reply: Reply, path: Path, start: int, seed: int
    ) -> AsyncGenerator[Piece, None]:
        """A reply that follows a grammar, token by token (grammar.py)."""
        ask = self._ask
        words = TextStream(self._markers() or self._gateway.words.model.table, ask.stop)
        certain = self._certain()
        most = ask.max_tokens if ask.max_tokens is not None else 1 << 60
        window = self._gateway.words.uname.window_tokens
        counts: dict[int, int] = {}
        top = max(TOP_K, ask.logprobs)
        likeliest = await self._in_time(context.forward(top, path.allowed())) if most > 0 else []
        reply.reason = "length"
        while len(reply.tokens) < most and start + len(reply.tokens) < window:
            token, logprob = draw(
                likeliest, temperature=ask.temperature, top_k=ask.top_k, top_p=ask.top_p, min_p=ask.min_p, seed=seed,
                position=start + len(reply.tokens), counts=counts, presence_penalty=ask.presence_penalty,
                frequency_penalty=ask.frequency_penalty,
            )  # fmt: skip
            if not path.take(token):
                reply.reason = "stop"
                break
            counts[token] = counts.get(token, 0) + 1
            reply.tokens.append(token)
            text = words.push((token,))
            heard = reply.hear(text)
            tokens = [token]
            rows: tuple[Logprob, ...] = ((logprob, *_packed(likeliest[: ask.logprobs])),) if ask.logprobs else ()
            if certain is not None:
                tokens, rows = certain.push(tokens, rows)
            yield Piece(reply.index, heard, tokens, rows)
            if words.keep_tokens is not None:
                reply.reason, reply.stop = "stop", words.stop or ""
                await self._soon(context.append(tokens=[token]))
                await self._soon(context.truncate(start + words.keep_tokens))
                del reply.tokens[words.keep_tokens :]
                break
            if path.complete or len(reply.tokens) >= most or start + len(reply.tokens) >= window:
                reply.reason = "stop" if path.complete else "length"
                await self._soon(context.append(tokens=[token]))
                break
            try:
                likeliest = await self._in_time(context.forward(top, path.allowed(), [token]))
            except TooBig:
                break
        heard = reply.hear("" if reply.stop else words.finish()) + reply.end()
        tokens, rows = certain.finish(len(reply.tokens)) if certain is not None else ([], ())
        if heard or tokens:
            yield Piece(reply.index, heard, tokens, rows)

    def _certain(self) -> Certain | None:
        """None: every token can be shown as it comes."""
        ask = self._ask
        return Certain(self._gateway.words.model.table, ask.stop) if ask.logprobs and ask.stop else None

    async def _in_time(self, call: Awaitable[R]) -> R:
        """Error: TimeoutError, also while a limit of its group holds the context back."""
        async with asyncio.timeout_at(self._end):
            return await call

    def _markers(self) -> TokenTable | None:
        """Text in which the control tokens show that the scanner has to see; None: there are none."""
        words = self._gateway.words
        ids = words.marker_ids if self._ask.scan else {}
        if not ids:
            return None
        return TokenTable(words.model.token_bytes, words.model.special_ids - frozenset(ids.values()))

    # -- after ----------------------------------------------------------------------------------------------------

    async def _finish(self, contexts: list[AsyncContext], replies: list[Reply], made: Plan, start: int) -> Spent:
        """Count, and keep the context if it may be wanted again."""
        gateway, ask, conversation = self._gateway, self._ask, self._conversation
        assert conversation is not None
        row = await contexts[0].stat()
        usage = Usage(*(now - then for now, then in zip(row.usage, conversation.mark, strict=True)))
        spent = _spent(usage, made, start, replies)
        if ask.pins:
            spent.pinned = await pin_beginnings(gateway, conversation, ask, made.marks)
        if not (ask.keep and ask.n == 1 and ask.messages) or made.trimmed or ask.prefill:
            return spent
        reply = replies[0]
        conversation.mark = row.usage
        conversation.tokens.extend(array("i", reply.tokens))
        conversation.pieces = made.pieces
        conversation.replies = [*conversation.replies, len(ask.messages)]
        as_said = gateway.words.model.decode(reply.tokens) == "".join(reply.text)
        conversation.exact = (as_said or bool(reply.calls)) and not reply.overheard
        ids = [self._call_id(0, number) for number in range(len(reply.calls))]
        if reply.calls:
            tool = "+".join(sorted({call.name for call in reply.calls}))[:120]
            waiting = await conversation.context.wait_tool(tool, deadline=gateway.settings.parked_s)
            conversation.wait = waiting.wait
        told = [*ask.messages, _as_sent_back(reply, ids)]
        prints = fingerprints(ask.owner, told)
        self._kept = True
        for leaving in gateway.parked.park(conversation, prints[-1], ids):
            gateway.dispose(leaving)
        return spent


def _as_sent_back(reply: Reply, ids: list[str]) -> dict[str, object]:
    """The reply as a message of the next request."""
    calls = [
        {"id": call_id, "function": {"name": call.name, "arguments": call.arguments}}
        for call_id, call in zip(ids, reply.calls, strict=True)
    ]
    return {"role": "assistant", "content": "".join(reply.text), "tool_calls": calls}


def _packed(pairs: list[tuple[int, float]]) -> tuple[bytes, bytes]:
    return array("i", [token for token, _ in pairs]).tobytes(), array("f", [logprob for _, logprob in pairs]).tobytes()


def _spent(usage: Usage, made: Plan, start: int, replies: list[Reply]) -> Spent:
    """Where the prompt's tokens came from.  What its own context held counts as found, unless it had to be computed again.

    A token that was loaded more than once, since the context was preempted, counts once: what the tiers had and what was computed
    adds up to the prompt.
    """
    held = made.keep if made.keep else usage.hit_tokens
    cached = max(0, min(start - 1, held - usage.recomputed_tokens if made.keep else held))
    dram = min(cached, usage.dram_tokens)
    nvme = min(cached - dram, usage.nvme_tokens)
    remote = min(cached - dram - nvme, usage.remote_tokens)
    return Spent(
        prompt=start, completion=sum(len(reply.tokens) for reply in replies), cached=cached,
        hbm=cached - dram - nvme - remote, dram=dram, nvme=nvme, remote=remote,
        recomputed=usage.recomputed_tokens, trimmed=made.trimmed,
    )  # fmt: skip


async def end_quietly(client: AsyncClient, pid: int) -> None:
    """Kill a process and let its pid go.  One that is gone already is no error."""
    with suppress(ConnectionLost, SyscallError, AttnixError):
        with suppress(SyscallError):
            await client.kill(pid, int(signal.SIGKILL))
        await client.wait(pid, -1)
