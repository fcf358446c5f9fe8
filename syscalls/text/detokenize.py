"""From generated tokens to streamed text: bytes to characters, and stop strings that never leak.

A token is a run of *bytes*; a character may be spread over several tokens and a stop string over many.  So text goes
through two small machines, both fed as tokens come and both independent of how the tokens are grouped:

    Detokenizer   token ids -> text; withholds the bytes of an unfinished character
    StopScanner   text -> text before the first stop string; withholds what may be the beginning of one

`TextStream` is the two in a row, with the count of tokens a stopped generation keeps.
The scanner is the automaton of Aho and Corasick (CACM 18(6), 1975): one state, one move per character, and its depth
is exactly the number of characters that must be withheld.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class TokenTable:
    """What each token id stands for.

    pieces   id -> its bytes
    hidden   ids that are never text (control tokens such as end-of-turn); they contribute nothing
    """

    def __init__(self, pieces: Sequence[bytes], hidden: Iterable[int] = ()) -> None:
        self.hidden = frozenset(hidden)
        self.pieces = [b"" if token in self.hidden else piece for token, piece in enumerate(pieces)]

    def __len__(self) -> int:
        return len(self.pieces)

    def piece(self, token: int) -> bytes:
        """Bytes of a token.  An id outside the vocabulary (a padded embedding row can be sampled) is no text."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def text(self, tokens: Iterable[int]) -> str:
        """Decode everything at once; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")


class Detokenizer:
    """Incremental decoding of one generation: the pieces and `flush()` joined equal `table.text` of all tokens."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """Text completed by these tokens: valid UTF-8, without the bytes of a character still unfinished."""
        return "".join(self.pieces(tokens))

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """The same, one string per token: what each one completed (possibly nothing)."""
        decode, piece = self._decoder.decode, self._table.piece
        return [decode(piece(token)) for token in tokens]

    def flush(self) -> str:
        """The generation is over: an unfinished character comes out as U+FFFD."""
        return self._decoder.decode(b"", True)


class StopMatch(NamedTuple):
    """A stop string was found."""

    stop: str
    start: int  # characters of the whole text before it


class StopScanner:
    """Passes text on up to the first stop string.

    The stop that *ends* first wins (that is when a generation stops); of several ending at the same character the
    longest, so that no part of a stop string is passed on.  What may be the beginning of a stop is withheld until the
    next characters decide.  The result depends on the text alone, not on how it was cut.

    Error: ValueError for an empty stop string.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._moves: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        self._ends: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._state = 0
        self._held = ""
        self._seen = 0
        self.match: StopMatch | None = None

    def _insert(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty: it would stop every generation at once")
        state = 0
        for char in stop:
            following = self._moves[state].get(char)
            if following is None:
                following = len(self._moves)
                self._moves[state][char] = following
                self._moves.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[state] + 1)
                self._ends.append(None)
            state = following
        self._ends[state] = stop

    def _link(self) -> None:
        queue = deque(self._moves[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._moves[state].items():
                queue.append(child)
                fallback = self._fallback[state]
                while fallback and char not in self._moves[fallback]:
                    fallback = self._fallback[fallback]
                self._fallback[child] = self._moves[fallback].get(char, 0)
            if self._ends[state] is None:  # breadth first: the shorter suffix is final already
                self._ends[state] = self._ends[self._fallback[state]]

    def push(self, text: str) -> str:
        """Text that is certain not to belong to a stop string; nothing more once `match` is set."""
        if self.match is not None or not text:
            return ""
        if len(self._moves) == 1:
            self._seen += len(text)
            return text
        for index, char in enumerate(text):
            state = self._state
            while state and char not in self._moves[state]:
                state = self._fallback[state]
            self._state = state = self._moves[state].get(char, 0)
            stop = self._ends[state]
            if stop is not None:
                self._seen += index + 1
                self.match = StopMatch(stop, self._seen - len(stop))
                passed = (self._held + text[: index + 1])[: -len(stop)]
                self._held = ""
                return passed
        self._seen += len(text)
        pending = self._held + text
        cut = len(pending) - self._depth[self._state]
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """The text is over: what was withheld was no stop string after all."""
        held, self._held, self._state = self._held, "", 0
        return held


class TextStream:
    """The text of one generation, as it may be sent to the client.

    After a stop string, `keep_tokens` says how many of the pushed tokens stay in the context: the fewest whose text
    covers everything that was passed on.  (A token that holds both the last characters before the stop and its first
    ones is kept: the client has seen the former.)  Until then it is None.
    """

    def __init__(self, table: TokenTable, stops: Iterable[str] = ()) -> None:
        self._detokenizer = Detokenizer(table)
        self._scanner = StopScanner(stops)
        self._lengths: deque[tuple[int, int]] = deque()  # (tokens, characters completed by them), not yet settled
        self._tokens = 0
        self._chars = 0
        self._passed = 0
        self.keep_tokens: int | None = None

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return None if self._scanner.match is None else self._scanner.match.stop

    @property
    def certain_tokens(self) -> int:
        """How many of the pushed tokens stay whatever comes: the fewest whose text covers everything that was passed on."""
        return self.keep_tokens if self.keep_tokens is not None else self._covering(self._passed)

    def push(self, tokens: Sequence[int]) -> str:
        """Text to send now: possibly empty, always valid UTF-8, never part of a stop string."""
        if self.keep_tokens is not None:
            return ""
        return self._scan(self._detokenizer.pieces(tokens))

    def finish(self) -> str:
        """The generation ended (end-of-turn token, length, cancelled): the rest of the text.

        An unfinished character comes out as U+FFFD, and may itself complete a stop string.
        """
        if self.keep_tokens is not None:
            return ""
        tail = self._detokenizer.flush()
        sent = self._scan([tail], new_tokens=0) if tail else ""
        return sent if self.keep_tokens is not None else sent + self._scanner.flush()

    def _scan(self, pieces: Sequence[str], new_tokens: int = 1) -> str:
        sent: list[str] = []
        for piece in pieces:
            self._tokens += new_tokens
            self._chars += len(piece)
            if piece:
                self._lengths.append((self._tokens, self._chars))
                sent.append(self._scanner.push(piece))
                self._passed += len(sent[-1])
            match = self._scanner.match
            if match is not None:
                self.keep_tokens = self._covering(match.start)
                break
            while len(self._lengths) > 1 and self._lengths[0][1] < self._passed:
                self._lengths.popleft()
        return "".join(sent)

    def _covering(self, chars: int) -> int:
        """The fewest tokens that complete `chars` characters."""
        if chars == 0:
            return 0
        return next(tokens for tokens, total in self._lengths if total >= chars)
