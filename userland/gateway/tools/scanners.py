"""The two ways in which calls stand in a text: between tags, and as the whole of it."""

from __future__ import annotations

from .protocol import Heard, Said, parsed_calls


class Tagged:
    """Calls between an opening and a closing tag, words around them.  White space beside a call is nobody's.

    A tag without its end is read to the end of the text.  What is no call stays as it was written.
    """

    def __init__(self, opening: str, closing: str, names: frozenset[str] | None) -> None:
        self._opening = opening
        self._closing = closing
        self._names = names
        self._held = ""
        self._inside = False
        self._gap = ""  # white space before the opening tag
        self._called = False  # a call came last

    def push(self, text: str) -> list[Heard]:
        self._held += text
        heard: list[Heard] = []
        while True:
            if self._inside:
                body, closed, rest = self._held.partition(self._closing)
                if not closed:
                    return heard
                self._held, self._inside = rest, False
                heard += self._read(body, self._opening + body + self._closing)
                continue
            before, opened, rest = self._held.partition(self._opening)
            if not opened:
                break
            said = before.rstrip()
            heard += self._say(said)
            self._held, self._inside, self._gap = rest, True, before[len(said) :]
        keep = beginning_of(self._held, self._opening)
        settled = self._held[: len(self._held) - keep]
        said = settled.rstrip()
        self._held = self._held[len(said) :]
        return heard + self._say(said)

    def finish(self) -> list[Heard]:
        held, self._held = self._held, ""
        if self._inside:
            body = held[: len(held) - beginning_of(held, self._closing)]  # a length may have cut the tag
            return self._read(body, self._opening + held)
        return self._say("" if self._called and not held.strip() else held)

    def _say(self, text: str) -> list[Heard]:
        if self._called:
            text = text.lstrip()
        if not text:
            return []
        self._called = False
        return [Said(text)]

    def _read(self, body: str, written: str) -> list[Heard]:
        calls = parsed_calls(body, self._names)
        if not calls:
            return self._say(self._gap + written)
        self._called = True
        return [*calls]


class Whole:
    """Calls that are the whole text, as JSON; a text that begins in another way is words from the start.

    openings  with one of these, behind white space, a call may begin
    drop      a marker before it that is no part of it
    """

    def __init__(
        self, names: frozenset[str] | None, openings: tuple[str, ...] = ("{", "[", "```"), drop: str = ""
    ) -> None:
        self._names = names
        self._openings = openings
        self._drop = drop
        self._held = ""
        self._words = False

    @property
    def undecided(self) -> bool:
        """Nothing has been told yet."""
        return not self._words

    def push(self, text: str) -> list[Heard]:
        if self._words:
            return [Said(text)] if text else []
        self._held += text
        begun = self._held.lstrip()
        if any(
            begun.startswith(opening) or opening.startswith(begun)
            for opening in (*self._openings, self._drop)
            if opening
        ):
            return []
        self._words = True
        held, self._held = self._held, ""
        return [Said(held)]

    def finish(self) -> list[Heard]:
        held, self._held = self._held, ""
        if not held:
            return []
        calls = parsed_calls(held.strip().removeprefix(self._drop), self._names)
        return [*calls] if calls else [Said(held.replace(self._drop, "") if self._drop else held)]


def beginning_of(text: str, tag: str) -> int:
    """How many characters at the end of the text may begin the tag."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
