"""Log-probabilities beside stop strings: a token is shown when no stop string can take it back any more.

A stop string that comes ends the reply in front of it, and tokens go that were sampled long before.  Their text has been
withheld until then, and so is what is said of them: `logprobs` has as many entries as `usage` counts tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnix.syscalls.text import TextStream, TokenTable

from .ask import Logprob


class Certain:
    """Of one reply.  `push` what is sampled, `finish` with the number of tokens that it has in the end."""

    def __init__(self, table: TokenTable, stops: Sequence[str]) -> None:
        self._text = TextStream(table, stops)
        self._held: list[tuple[int, Logprob]] = []
        self._shown = 0

    def push(self, tokens: Sequence[int], rows: Sequence[Logprob]) -> tuple[list[int], tuple[Logprob, ...]]:
        """What can be shown now."""
        self._held += zip(tokens, rows, strict=True)
        self._text.push(tokens)
        return self.finish(self._text.certain_tokens)

    def finish(self, kept: int) -> tuple[list[int], tuple[Logprob, ...]]:
        """What is left of the first `kept` tokens."""
        count = max(0, kept - self._shown)
        shown, self._held = self._held[:count], self._held[count:]
        self._shown += len(shown)
        return [token for token, _ in shown], tuple(row for _, row in shown)
