"""The gateway's threads for templates and tokenizers."""

from __future__ import annotations

import asyncio
import threading

from attnix.syscalls.text import LONG_CHARS
from attnix.userland.gateway.words import Words


def test_nobody_waits_for_somebodys_book() -> None:
    words = Words(lambda: "")
    read = threading.Event()

    async def use() -> None:
        books = [asyncio.ensure_future(words.run(read.wait, 60, chars=LONG_CHARS)) for _ in range(2)]
        for n in range(20):
            assert await words.run(int, n, chars=LONG_CHARS - 1) == n
        assert not any(book.done() for book in books)
        read.set()
        assert await asyncio.gather(*books) == [True, True]

    asyncio.run(asyncio.wait_for(use(), 50))
    words.close()
