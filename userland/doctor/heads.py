"""Prompts that differ in their first tokens and are the same afterwards.

A prefix is shared from its first token on.  With a request id or the time in front of a system prompt, no block of it is ever
found again, and all of it is computed for each request.
"""

from __future__ import annotations

from collections.abc import Sequence

from .facts import Facts
from .finding import Finding
from .prefixes import Compared

NAME = "heads"
FEWEST = 3  # prompts that lost something
SHARE = 0.1  # of the tokens of prompts
SAME = 32  # tokens that agree behind the difference: less may be the template's


def heads(facts: Facts) -> Finding | None:
    compared = facts.compared
    lost = [(c, _lost(c, facts.block_tokens)) for c in compared]
    lost = [(c, tokens) for c, tokens in lost if tokens > 0]
    total = sum(c.row.prompt_tokens for c in compared)
    tokens = sum(n for _, n in lost)
    if len(lost) < FEWEST or tokens < SHARE * total:
        return None
    worst = max((c for c, _ in lost), key=lambda c: (c.alike.same if c.alike else 0, c.row.cid))
    if worst.alike is None or worst.other is None:
        return None
    known = "at least " if any(c.to_the_end for c, _ in lost) else ""
    differ = max(worst.alike.mine, worst.alike.other) - worst.alike.common
    other = next(c for c in compared if c.row is worst.other)
    return Finding(
        NAME,
        "Prompts differ in their first tokens and are the same afterwards: what they have in common is not shared",
        facts.prompt_share * tokens / total,
        "time",
        (
            f"{len(lost)} of the last {len(compared)} prompts: {known}{tokens:,} of {total:,} tokens computed again",
            f"cids {worst.other.cid} and {worst.row.cid}: the same {worst.alike.common} tokens, then {differ} that differ, then the "
            f"same {known}{worst.alike.same:,}",
            *_side_by_side(facts, other, worst),
        ),
        (
            "Put what changes from request to request (an id, the time, a name) behind what does not: at the end of the system "
            "prompt, or into the user's message.",
        ),
        numbers={
            "prompts": len(compared),
            "prompts_lost": len(lost),
            "tokens_lost": tokens,
            "tokens_same": worst.alike.same,
            "tokens_common": worst.alike.common,
            "tokens_differing": differ,
            "first_cid": worst.other.cid,
            "second_cid": worst.row.cid,
        },
    )


def _lost(c: Compared, block: int) -> int:
    """Tokens in whole blocks that it would have found, had what differs come last."""
    if c.alike is None or c.alike.same < SAME:
        return 0
    could = (c.alike.common + c.alike.same) // block * block
    return max(0, could - c.common // block * block)


def _side_by_side(facts: Facts, first: Compared, second: Compared) -> list[str]:
    """Both beginnings, with » and « around what differs; token ids where there is no tokenizer."""
    if second.alike is None:
        return []
    say = _speaker(facts)
    lines = []
    for c, differs in ((first, second.alike.other), (second, second.alike.mine)):
        common, after = second.alike.common, differs + 16
        parts = [say(c.tokens[a:b]) for a, b in ((0, common), (common, differs), (differs, after))]
        lines.append(f"  cid {c.row.cid}: {parts[0]}»{parts[1]}«{parts[2]}…")
    return lines


def _speaker(facts: Facts) -> _Speaker:
    return _Speaker(facts.uname.tokenizer)


class _Speaker:
    """Token ids as text."""

    def __init__(self, path: str) -> None:
        self._pieces: list[bytes] | None = None
        if path:
            from attnix.syscalls.text import load_text  # it takes a while, and only this finding wants it

            try:
                self._pieces = load_text(path).token_bytes
            except (OSError, ValueError):
                self._pieces = None  # it is somewhere that this user may not read

    def __call__(self, tokens: Sequence[int]) -> str:
        if self._pieces is None:
            return " ".join(map(str, tokens)) + (" " if tokens else "")
        pieces = self._pieces
        data = b"".join(pieces[t] if 0 <= t < len(pieces) else b"?" for t in tokens)
        return data.decode(errors="replace").replace("\n", "\\n")
