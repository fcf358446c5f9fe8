"""The control: a wait is like any other pause."""

from __future__ import annotations

from .protocol import Decision, Outlook


class Lru:
    name = "lru"
    ranks = False
    fetches = False

    def decide(self, outlook: Outlook) -> Decision:
        return Decision("keep", 0, "least recently used goes first")
