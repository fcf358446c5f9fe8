"""Wait policies by name (sysctl wait.policy)."""

from __future__ import annotations

from typing import Final

from .cachettl import CacheTtl
from .cost import Cost
from .lru import Lru
from .protocol import WaitPolicy
from .ttl import Ttl

POLICIES: Final[dict[str, WaitPolicy]] = {policy.name: policy for policy in (Cost(), CacheTtl(), Ttl(), Lru())}
DEFAULT: Final = "cost"
