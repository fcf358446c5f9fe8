"""Asking again when the system says EAGAIN: after as long as it says, or else longer and longer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from attnix.syscalls.exceptions import SyscallError, TryAgain

R = TypeVar("R")

FIRST_DELAY_S: Final = 0.05
LONGEST_DELAY_S: Final = 5.0
PATIENCE_S: Final = 120.0


def delay_before(error: SyscallError, tries: int) -> float:
    """Seconds to wait before the next try, of which `tries` have failed.

    With what the system said some more, at random: those that it refused together should not come back together.
    """
    told_ms = error.detail.get("retry_after_ms")
    if isinstance(told_ms, int | float) and told_ms > 0:
        return float(told_ms) / 1000 * random.uniform(1.0, 1.25)
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(tries - 1, 10)) * random.uniform(0.75, 1.25)


async def patiently(call: Callable[[], Awaitable[R]], patience_s: float = PATIENCE_S) -> R:
    """What `call` gives, called again each time that it raises TryAgain.

    Error: its own; TryAgain too when the next try would come later than `patience_s` after the first.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + patience_s
    tries = 0
    while True:
        try:
            return await call()
        except TryAgain as error:
            tries += 1
            delay = delay_before(error, tries)
            if loop.time() + delay > end:
                raise
        await asyncio.sleep(delay)
