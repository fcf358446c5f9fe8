"""One call for many contexts at once: what is there together runs in the same passes of the model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from attnix.syscalls import Client
from attnix.syscalls.exceptions import TryAgain

from .patience import PATIENCE_S, delay_before

R = TypeVar("R", bound=tuple[Any, ...])


def together(client: Client, name: str, asked: Sequence[tuple[Any, ...]], result: type[R]) -> list[R]:
    """The answers to calls of one name, all sent before any is waited for.

    Those that the system refuses with EAGAIN are sent again when it says, since what is under way should not be lost to
    a busy minute: a refusal has done nothing.  Error: that of the first that has one; TryAgain when patience is at its end.
    """
    answers: dict[int, R] = {}
    left = list(range(len(asked)))
    end = time.monotonic() + PATIENCE_S
    tries = 0
    while left:
        pending = list(zip(left, client.submit_all(name, [asked[number] for number in left], result), strict=True))
        left, delay = [], 0.0
        for number, one in pending:
            try:
                answers[number] = one.result()
            except TryAgain as error:
                left.append(number)
                delay = max(delay, delay_before(error, tries + 1))
                if time.monotonic() + delay > end:
                    raise
        tries += 1
        if left:
            time.sleep(delay)
    return [answers[number] for number in range(len(asked))]
