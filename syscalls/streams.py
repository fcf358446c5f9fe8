"""What the daemon keeps of a generation under way: its text, its stop strings, and what the client has been told."""

from __future__ import annotations

import math
from array import array
from typing import Final

from attnix.kernel.calls import GenerateArgs, GenerateResult, ReadResult, TokensNote
from attnix.kernel.injected import cut

from .text.detokenize import TextStream, TokenTable

Logprob = tuple[float, bytes, bytes]
_UNKNOWN: Final[Logprob] = (math.nan, b"", b"")  # of a token from before a crash


class Stream:
    """One generation.  Text is found the same way whether it is streamed or not, so the two cannot differ.

    pushed      tokens sampled so far, also those that a stop string then takes back
    keep_tokens how many of them stay, once a stop string was found
    """

    __slots__ = (
        "_fresh",
        "_fresh_from",
        "_logprobs",
        "_parts",
        "_text",
        "_tokens",
        "conn",
        "notifies",
        "request",
        "with_logprobs",
    )

    def __init__(self, conn: int, request: int, args: GenerateArgs, table: TokenTable | None) -> None:
        self.conn: Final = conn
        self.request: Final = request
        self.notifies: Final = args.stream
        self.with_logprobs: Final = args.logprobs > 0
        self._text = None if table is None else TextStream(table, args.stop)
        self._tokens = array("i")
        self._parts: list[str] = []
        self._logprobs: list[Logprob] = []
        self._fresh: list[str] = []
        self._fresh_from = 0

    @property
    def stopped(self) -> bool:
        """A stop string was found: what comes after it is nobody's."""
        return self._text is not None and self._text.keep_tokens is not None

    @property
    def keep_tokens(self) -> int:
        """Tokens that stay in the context."""
        keep = None if self._text is None else self._text.keep_tokens
        return len(self._tokens) if keep is None else keep

    @property
    def tokens(self) -> bytes:
        """The tokens that stay, little-endian int32."""
        return self._tokens[: self.keep_tokens].tobytes()

    @property
    def begun(self) -> bool:
        """Whether any token was sampled."""
        return bool(self._tokens)

    def push(self, token: int, logprob: Logprob | None) -> bool:
        """Take a sampled token; whether it completed a stop string."""
        self._tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        if self._text is None:
            return False
        text = self._text.push((token,))
        if text:
            self._fresh.append(text)
        return self._text.keep_tokens is not None

    def prime(self, tokens: array[int], told: int, logprobs: tuple[Logprob, ...]) -> None:
        """Take the tokens that the generation had before, of which the client knows the first `told`; before any push.

        Text comes token by token here as it did then, so that the client is told exactly what it has not been told.
        """
        for index, token in enumerate(tokens):
            if index == told:
                self._take_told()
            known = index < len(logprobs)
            self.push(token, (logprobs[index] if known else _UNKNOWN) if self.with_logprobs else None)
            if self.stopped:
                break
        if told >= len(self._tokens):
            self._take_told()

    def _take_told(self) -> None:
        self._take_text()
        self._fresh_from = len(self._tokens)

    def note(self) -> TokensNote | None:
        """What there is to tell since the last note; None when that is nothing."""
        start, end = self._fresh_from, self.keep_tokens
        text = self._take_text()
        if start >= end and not text:
            return None
        start = min(start, end)
        self._fresh_from = end
        logprobs = tuple(self._logprobs[start:end]) if self.with_logprobs else ()
        return TokensNote(self.request, start, self._tokens[start:end].tobytes(), text, logprobs)

    def finish(self) -> None:
        """No more tokens: text that was withheld comes out."""
        if self._text is not None:
            rest = self._text.finish()
            if rest:
                self._fresh.append(rest)

    def complete(self, result: GenerateResult) -> GenerateResult:
        """The kernel's result with what only the daemon knows; call it after `finish` and the last `note`.

        A generation that ended by itself in the step that sampled the stop string is cut here, as StopAt cuts its log.
        """
        count = len(result.tokens) // 4
        kept = min(count, self.keep_tokens) if self.stopped else count
        return result._replace(
            reason="stop" if self.stopped else result.reason,
            tokens=result.tokens[: 4 * kept],
            text="".join(self._parts),
            tokens_total=result.tokens_total - (count - kept),
            logprobs=tuple(self._logprobs[:kept]),
            injected=cut(result.injected, kept),
            stop=(self._text.stop or "") if self._text is not None else "",
        )

    def _take_text(self) -> str:
        text = "".join(self._fresh)
        self._fresh.clear()
        self._parts.append(text)
        return text


def spelled(result: ReadResult, table: TokenTable) -> ReadResult:
    """With the bytes that its tokens stand for; control tokens stand for none."""
    text, ends = bytearray(), array("i")
    for token in memoryview(result.tokens).cast("i"):
        text += table.piece(token)
        ends.append(len(text))
    return result._replace(text=bytes(text), ends=ends.tobytes())
