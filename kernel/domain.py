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

from typing import TYPE_CHECKING, Final

from .errors import E, Errno
from .group import parse_name

if TYPE_CHECKING:
    from .machine import Machine

PUBLIC: Final = "public"


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
