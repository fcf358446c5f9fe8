"""The two ways in which calls stand in a text: between tags, and as the whole of it; and what is thought, where none stand."""

from __future__ import annotations

from typing import Final

from .protocol import Call, Heard, Said, Scanner, ends_in_a_string, parsed_calls

_MOST_FENCE_CHARS: Final = 40  # of a code fence, with the name of a language


class Tagged:
    """Calls between an opening and a closing tag, words around them.  White space beside a call is nobody's.

    A tag without its end is read to the end of the text.  A tag in a string of a call's arguments is a part of that string.
    What is no call stays as it was written.
    """

    def __init__(self, opening: str, closing: str, names: frozenset[str] | None) -> None:
        self._opening = opening
        self._closing = closing
        self._names = names
        self._held = ""
        self._inside = False
        self._quoted = 0  # of `_held`, where the last closing tag in a string ends
        self._gap = ""  # white space before the opening tag
        self._called = False  # a call came last

    @property
    def inside(self) -> bool:
        return self._inside

    def push(self, text: str) -> list[Heard]:
        self._held += text
        return self._scan(False)

    def _scan(self, over: bool) -> list[Heard]:
        """What is settled.  over: no more text comes, so nothing is waited for."""
        heard: list[Heard] = []
        while True:
            if self._inside:
                end = self._end(over)
                if end < 0:
                    return heard
                body, self._held = self._held[:end], self._held[end + len(self._closing) :]
                self._inside, self._quoted = False, 0
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

    def _end(self, over: bool) -> int:
        """Where the closing tag of the call in `_held` is, -1: not there yet.

        A tag in a string is passed over as long as a later one may end the call; if none does, there was no call.
        """
        first = end = self._held.find(self._closing)
        if end < self._quoted:
            end = self._held.find(self._closing, self._quoted)
        while end >= 0 and ends_in_a_string(self._held[:end]):
            self._quoted = end + len(self._closing)
            end = self._held.find(self._closing, self._quoted)
        if end > first and not parsed_calls(self._held[:end], self._names):
            return first
        return first if over and end < 0 and not parsed_calls(self._cut(), self._names) else end

    def _cut(self) -> str:
        """The last call without the beginning of its closing tag: a length may have cut that."""
        return self._held[: len(self._held) - beginning_of(self._held, self._closing)]

    def finish(self) -> list[Heard]:
        heard = self._scan(True)
        body, held = self._cut(), self._held
        self._held = ""
        if self._inside:
            return heard + self._read(body, self._opening + held)
        return heard + self._say("" if self._called and not held.strip() else held)

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
    """Calls that are the whole text, as JSON; a text that shows to be none is words from there on, not only at its end.

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

    @property
    def inside(self) -> bool:
        return not self._words and bool(self._held.strip())

    def push(self, text: str) -> list[Heard]:
        if self._words:
            return [Said(text)] if text else []
        self._held += text
        begun = self._held.lstrip()
        if self._drop and self._drop.startswith(begun):
            return []
        begun = begun.removeprefix(self._drop).lstrip()
        if any(begun.startswith(each) or each.startswith(begun) for each in self._openings) and _may_call(begun):
            return []
        self._words = True
        held, self._held = self._held, ""
        return [Said(held.replace(self._drop, "") if self._drop else held)]

    def finish(self) -> list[Heard]:
        held, self._held = self._held, ""
        if not held:
            return []
        calls = parsed_calls(held.strip().removeprefix(self._drop), self._names)
        return [*calls] if calls else [Said(held.replace(self._drop, "") if self._drop else held)]


class Thinking:
    """Words between an opening tag and a closing one are what the model says to itself: a call there is none, and they stay as
    they were written.  All else goes through `inner`.

    A tag counts at the beginning of a line, or behind a call, and not in a call.  What is begun and never ends is thought to its
    end.
    begun  the prompt has the opening tag
    drop   the tags are control tokens, and so no text: they count wherever they are
    """

    def __init__(self, inner: Scanner, tags: tuple[str, str], *, begun: bool = False, drop: bool = False) -> None:
        self._inner = inner
        self._opening, self._closing = tags
        self._thinks = begun
        self._drop = drop
        self._held = ""
        self._line = ""  # of what is no thought, the line that it is in

    @property
    def inside(self) -> bool:
        return not self._thinks and self._inner.inside

    def push(self, text: str) -> list[Heard]:
        self._held += text
        heard: list[Heard] = []
        while True:
            tag = self._closing if self._thinks else self._opening
            before, found, rest = self._held.partition(tag)
            if not found:
                break
            self._held = rest
            heard += self._tell(before)
            if not self._thinks and not self._opens():
                heard += self._tell(tag)
                continue
            if not self._thinks:
                heard += self._inner.finish()  # white space that it withholds comes before
            self._thinks = not self._thinks
            self._line = ""
            if not self._drop:
                heard.append(Said(tag))
        keep = beginning_of(self._held, tag)
        settled = self._held[: len(self._held) - keep]
        self._held = self._held[len(settled) :]
        return heard + self._tell(settled)

    def finish(self) -> list[Heard]:
        held, self._held = self._held, ""
        return self._tell(held) + self._inner.finish()

    def _opens(self) -> bool:
        return not self._inner.inside and (self._drop or not self._line.strip())

    def _tell(self, text: str) -> list[Heard]:
        if not text:
            return []
        if self._thinks:
            return [Said(text)]
        if self._drop:
            text = text.replace(self._closing, "")
        heard = self._inner.push(text)
        self._line = (self._line + text).rpartition("\n")[2]
        if heard and isinstance(heard[-1], Call):
            self._line = ""
        return heard


def _may_call(text: str) -> bool:
    """Whether an object may begin here: in a fence or not, in lists or not."""
    if "```".startswith(text[:3]):
        fence, lines, text = text.partition("\n")
        if not lines:
            return len(fence) <= _MOST_FENCE_CHARS
    text = text.lstrip("[ \t\r\n")
    inner = text[1:].lstrip()
    return not text or (text[0] == "{" and (not inner or inner[0] == '"'))


def beginning_of(text: str, tag: str) -> int:
    """How many characters at the end of the text may begin the tag."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
