"""How long the next pass may be while somebody decodes, and what part of it prompts may have.

A decode is as late as the pass that it is in is long.  Where a target limits the pass, prompts get the tokens that the
measured costs (kernel/cost.py) let into what decoding leaves of it.  Chunks smaller than a floor are not worth their pass,
so time that is too little is saved, and as soon as the savings pay for a chunk of the floor, one is sent: on average the
target holds.  Where decoding alone takes longer than the target nothing can be saved; then a chunk of the floor goes with
every PATIENCE-th pass.  So prompts always progress: at least `floor` tokens in PATIENCE passes, or in as many as it takes to
save its cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..cost import Prefill

PATIENCE: Final = 8  # passes
FLOOR_SHARE: Final = 32  # of sched.step_tokens, one of so many parts


class Pace:
    """Of one compute device: `begin`, `room` and `took` while a pass is planned, `sent` when it has gone."""

    def __init__(self) -> None:
        self._slack: Mapping[str, float] | None = None
        self._spent_ns = 0.0
        self._short_ns = 0.0  # most that a chunk could have had which got nothing
        self._left_out = False
        self._saved_ns = 0.0
        self._skipped = 0

    def begin(self, slack_ns: Mapping[str, float] | None) -> None:
        """slack_ns: what the prompts of each group may add to the pass that is planned.  None: there is no limit."""
        self._slack = slack_ns
        self._spent_ns = self._short_ns = 0.0
        self._left_out = False

    def room(self, group: str, need: int, cached: int, fit: Prefill | None, step_tokens: int) -> int:
        """Tokens that a prompt of that group with `need` to compute on top of `cached` may have of this pass."""
        if self._slack is None or fit is None:
            return need
        left_ns = self._slack.get(group, 0.0) - self._spent_ns
        tokens = min(need, fit.tokens_in(left_ns, cached))
        floor = min(need, max(1, step_tokens // FLOOR_SHARE))
        if tokens >= floor:
            return tokens
        pays = self._saved_ns + left_ns >= _cost_ns(fit, floor, cached)
        if not self._spent_ns and (pays or (left_ns <= 0 and self._skipped >= PATIENCE - 1)):
            return floor
        self._left_out = True
        self._short_ns = max(self._short_ns, left_ns)
        return 0

    def took(self, tokens: int, cached: int, fit: Prefill | None) -> None:
        if fit is not None:
            self._spent_ns += _cost_ns(fit, tokens, cached)

    def sent(self) -> None:
        if self._spent_ns:
            self._saved_ns, self._skipped = 0.0, 0
        elif self._left_out:
            self._saved_ns += self._short_ns
            self._skipped += 1


def _cost_ns(fit: Prefill, tokens: int, cached: int) -> float:
    return fit.ns(tokens, cached) - fit.k
