"""What `attnix boot` sets before --sysctl does; the bare kernel (tests, studies, replay) has none of it."""

from __future__ import annotations

from typing import Final

# New work that would wait for longer than this is refused and told when to come again.  Without it a queue grows for as long
# as more is asked than is done, until everybody in it has hung up.  With it half of those who are served wait no longer than that
# at four times the capacity, too, and at the capacity nobody is refused (docs/performance.md, Overload).
DEFAULTS: Final[dict[str, int | str]] = {"sched.max_wait_ms": 60_000}
