"""What a command says when it cannot do what it was asked."""

from __future__ import annotations


class CommandError(Exception):
    """The message says why and what to do about it."""

    exit_status: int = 1


class WrongUsage(CommandError):
    """The command line is none."""

    exit_status = 2


class Interrupted(CommandError):
    """Ctrl-C ended it before it was done."""

    exit_status = 130
