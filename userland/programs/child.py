"""A child process to work in: however the work ends, killing it gives back every context that was made there."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from attnix.syscalls import ConnectionLost, Context
from attnix.syscalls.exceptions import NotFound


@contextmanager
def child_of(context: Context, name: str) -> Iterator[Context]:
    """A fork of `context` in a child process; forks of that fork are in the child too.  `context` stays as it is.

    name  shown by `ps`
    Error: what `spawn` raises, and then there is no child.
    """
    child = context.client.spawn(name, fork_of=context)
    assert child.context is not None
    try:
        yield child.context
    finally:
        with suppress(ConnectionLost):  # then the kernel has ended it
            with suppress(NotFound):  # somebody else has
                child.kill(signal.SIGKILL)
            child.wait()
