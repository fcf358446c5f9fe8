"""Domains: who may find whose prefixes in the cache.  The name of a domain is part of every block key made in it.

    uid:N        the default: the uid's own contexts share with each other
    uid:N/NAME   narrower: only contexts that name it
    public       wider: any uid's contexts that name it

KV in the cache cannot be forged: a key is computed from the tokens, a hit compares them, and the KV was computed by this
system.  But that a prefix is there can be seen, by time and by hit counts, so a context that is made in `public` tells
everybody there which prefixes it has, and reads theirs in the same way.  That is why it is opted into by each context,
and why `sysctl domain.public` says who may at all.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from .config import encode_identity
from .errors import E, Errno
from .group import parse_name

if TYPE_CHECKING:
    from .machine import Machine

PUBLIC: Final = "public"
KEPT: Final = 4096  # domains that are remembered at least, before those that nothing is left of are looked for


def check_domain(m: Machine, uid: int, name: str) -> None:
    """EINVAL: it cannot be the name of one.  EACCES: this uid may not share there."""
    if name == PUBLIC:
        allowed = m.sysctl.public
        if allowed != "all" and not (allowed == "owner" and uid in (0, m.config.owner_uid)):
            raise Errno(
                E.EACCES,
                f"sysctl domain.public is {allowed!r}: the daemon's user may set it to 'all', or use domain uid:{uid}",
                domain=name,
            )
        return
    if parse_name(name)[0] != uid:
        raise Errno(E.EACCES, f"domain {name} is another user's: yours are uid:{uid} and uid:{uid}/NAME", domain=name)


def known_domain(name: str) -> bool:
    """A block that was found in a tier may be of a domain of this name."""
    try:
        return name == PUBLIC or parse_name(name)[0] >= 0
    except Errno:
        return False


class Domains:
    """Those in use, by name: a small number for the core, and the root of their keys.  A program may name any number of them, so
    what no context is in and no block is of is forgotten, and its number given again."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._known: dict[str, tuple[int, bytes]] = {}
        self._free: list[int] = []  # numbers
        self._last = 0
        self._most = KEPT  # known ones at which it is looked at again

    def __len__(self) -> int:
        return len(self._known)

    def of(self, name: str) -> tuple[int, bytes]:
        """Number and root.  They hold until the next call, unless a context or a block is given them."""
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= self._most:
                self._forget()
            self._last += not self._free
            number = self._free.pop() if self._free else self._last
            known = self._known[name] = (number, self._m.core.hash(encode_identity(self._m.config.identity, name)))
            self._m.tiers.know_domain(number, name, known[1])
        return known

    def _forget(self) -> None:
        """Looked for as often as their number has doubled: a look costs as much as there are blocks."""
        numbers = set(array("i", self._m.core.block_table()[1]))
        names = {context.domain for context in self._m.contexts.values()}
        for name in [n for n, (number, _) in self._known.items() if n not in names and number not in numbers]:
            number, _ = self._known.pop(name)
            self._free.append(number)
            self._m.tiers.forget_domain(number)
        self._most = max(KEPT, 2 * len(self._known))
