"""The console script.  Until the commands are loaded, which takes a while, Ctrl-C ends it as it ends any program: with no traceback."""

from __future__ import annotations

import signal


def main() -> None:
    """Load what there is, then run it."""
    pressed = signal.getsignal(signal.SIGINT)
    if pressed is not signal.SIG_IGN:  # as `nohup` and `&` want it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as run

    signal.signal(signal.SIGINT, pressed)
    try:
        run()
    finally:
        if pressed is not signal.SIG_IGN:  # what was to be said is said; Python takes a while to end, too
            signal.signal(signal.SIGINT, signal.SIG_DFL)
