"""What a model says to itself, between `<think>` and `</think>`: no call of a tool stands there."""

from __future__ import annotations

from typing import Final

from attnix.syscalls import AsyncContext

THINK: Final = "<think>"
_THOUGHT: Final = "</think>"
_TAG_TOKENS: Final = 16  # at most, of the tag and white space behind it


def spoken(text: str) -> str:
    """Without the thought that it begins with; nothing while that has no end."""
    return text.partition(_THOUGHT)[2] if text.lstrip().startswith(THINK) else text


async def thinks(context: AsyncContext) -> bool:
    """Whether the last words of a context are the beginning of a thought."""
    length = (await context.stat()).tokens
    last = await context.client.read(context.handle, start=max(0, length - _TAG_TOKENS))
    return last.text.rstrip().endswith(THINK.encode())
