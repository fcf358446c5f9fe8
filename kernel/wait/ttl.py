"""The other control: every wait keeps its frames for the same time."""

from __future__ import annotations

from .protocol import Decision, Outlook


class Ttl:
    name = "ttl"
    ranks = False
    fetches = False

    def decide(self, outlook: Outlook) -> Decision:
        return Decision("keep", outlook.fixed_ns, "sysctl wait.ttl_ms")
