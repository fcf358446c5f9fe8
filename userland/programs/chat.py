"""A conversation in one context: each turn is appended to it, so nothing is sent or computed twice.

with attnix.connect() as system:
    chat = Chat(system, "You are terse.", name="evening")     # goes on where it was, if it has been before
    for note in chat.say("What is a frame?"):
        print(note.text, end="")
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Unpack

from attnix.syscalls import Client, Context, Stream, SyscallError
from attnix.syscalls.client import GenerateOptions
from attnix.syscalls.exceptions import NotFound, TooBig

from .turns import Turn, asked, context_of, newest, shortened

MAX_TOKENS: Final = 512
_ROOM: Final = 4  # an answer should find a window's 1/_ROOM free, or max_tokens if that is less


class Chat:
    """A conversation.  With a `name` it outlives this program and the daemon, and is gone on with if it is there.

    system_prompt  what a new one begins with.  It is not kept with the name: give it again, for when turns must go
    context, turns  of a conversation that is under way already
    Public: context; turns that this program knows of, oldest first (those before a reopening are in the context only);
    dropped, how many had to go since the window was full; unfinished, what a reopened conversation is in the middle of saying.
    Error: the system's own; Busy when another program holds the conversation of that name.
    """

    def __init__(
        self,
        system: Client,
        system_prompt: str = "",
        name: str = "",
        *,
        context: Context | None = None,
        turns: Sequence[Turn] = (),
    ) -> None:
        self.system: Final = system
        self.name = name
        self.turns = list(turns)
        self.dropped = 0
        self.unfinished: Stream | None = None
        self._system_prompt = system_prompt
        self._window = system.uname().window_tokens
        self._stream: Stream | None = None
        if context is None and name:
            context = self._reopen()
        self._opaque = context is not None and not turns  # it holds what this program has not seen
        self.context = context or self._begin()

    @property
    def reopened(self) -> bool:
        """Whether it holds turns from before this program."""
        return self._opaque

    def say(self, text: str, max_tokens: int = MAX_TOKENS, **options: Unpack[GenerateOptions]) -> Stream:
        """Say something; iterate over what is returned to read the answer.

        When that leaves no room for an answer the oldest turns go, until the others fill half the window or less.
        Error: TooBig when even alone it has no room; a refusal leaves everything as it was.
        """
        self._settle()
        start = self.context.stat().tokens
        said = asked(text, self._system_prompt, start)
        try:
            length = self.context.append(messages=said, more=True).tokens
        except TooBig:
            start = self._make_room(text, start)
        else:
            crowded = self._window - length < min(max_tokens, self._window // _ROOM)
            if crowded and (self._opaque or newest(self.turns, start, self._window // 2) > 0):
                self.context.truncate(start)
                start = self._make_room(text, start)
        self.turns.append(Turn(start, text))
        self._stream = self.context.stream(max_tokens, **options)
        return self._stream

    def undo(self) -> str:
        """Take the last turn back; what was said.  Error: IndexError when this program knows of none."""
        self._settle()
        turn = self.turns.pop()
        self.context.truncate(turn.start)
        return turn.question

    def branch(self) -> Chat:
        """The same conversation once more, without a name: what is said in one is not said in the other."""
        self._settle()
        twin = Chat(self.system, self._system_prompt, context=self.context.fork()[0], turns=self.turns)
        twin._opaque = self._opaque
        return twin

    def publish(self, name: str) -> None:
        """Keep it under a name, or under another one.  Error: AlreadyExists."""
        self.context.publish(name)
        self.name = name

    def start_over(self) -> None:
        """Forget all that was said.  A name goes on to the new conversation."""
        self._go_on_in(self._begin(), [])

    def close(self) -> None:
        """Give the context back; a named one is there for the next program."""
        self.context.release()

    def _reopen(self) -> Context | None:
        try:
            found = self.system.sys.open(self.name)
        except NotFound:
            return None
        context = Context(self.system, found.ctx, found.cid)
        if found.generation:
            self.unfinished = context.reattach()
        return context

    def _settle(self) -> None:
        """Wait for the last answer, and write it down.  A turn that the system refused to answer was not said."""
        if self.unfinished is not None:
            with suppress(SyscallError):
                self.unfinished.result()
            self.unfinished = None
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        turn = self.turns.pop()
        try:
            self.turns.append(turn._replace(answer=stream.result().text))
        except SyscallError:
            self.context.truncate(turn.start)

    def _make_room(self, text: str, length: int) -> int:
        """Go on in a context with the newest turns and `text`; tokens before that.  Error: TooBig."""
        kept = self.turns[newest(self.turns, length, self._window // 2) :]
        context, turns = shortened(self.system, self._system_prompt, kept, text, self.name)
        last = turns.pop()
        self.dropped += len(self.turns) - len(turns)
        self._go_on_in(context, turns)
        return last.start

    def _begin(self) -> Context:
        return context_of(self.system, self._system_prompt, (), self.name)[0]

    def _go_on_in(self, context: Context, turns: list[Turn]) -> None:
        self.context.release()
        self.context, self.turns, self._opaque, self._stream = context, turns, False, None
