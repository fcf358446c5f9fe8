"""`attnix boot --groups FILE`: the limits that groups have from the start, as TOML (docs/groups.md).

    ["uid:1001"]
    hbm = { hard = "128MiB", soft = "32MiB" }
    contexts.hard = 64
    weight = 200

A table per group, in it what `attnix group set` takes.  A mistake anywhere is said, and nothing is booted: a limit that is
silently not there is worse than a daemon that is not.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from attnix.kernel.config import GroupLimit
from attnix.kernel.errors import Errno
from attnix.kernel.group import RESOURCES, TIERS, parse_name

from .boot_tiers import parse_bytes

_AMOUNTS: Final = ("soft", "hard")


def read_limits(path: str, frame_bytes: int) -> tuple[GroupLimit, ...]:
    """In the order in which they can be set: what contains a group before it.  Error: ValueError, which names the place."""
    try:
        content = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--groups {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--groups {path} is no TOML: {error}") from error
    found: list[GroupLimit] = []
    for name, limits in content.items():
        place = f'--groups {path}, ["{name}"]'
        try:
            parse_name(name)
        except Errno as error:
            raise ValueError(f"{place}: {error.detail['message']}") from error
        if not isinstance(limits, dict):
            raise ValueError(f'{place} is a table of limits, such as hbm = {{ hard = "128MiB" }}')
        found.extend(_limits(place, name, limits, frame_bytes))
    return tuple(sorted(found, key=lambda limit: "/" in limit.group))


def _limits(place: str, name: str, limits: dict[str, Any], frame_bytes: int) -> Iterator[GroupLimit]:
    for resource, said in limits.items():
        if resource == "weight":
            yield GroupLimit(name, resource, -1, _number(f"{place} weight", said))
            continue
        if resource not in RESOURCES:
            raise ValueError(f"{place}: {resource!r} is none of {', '.join((*RESOURCES, 'weight'))}")
        if not isinstance(said, dict) or not said or set(said) - set(_AMOUNTS):
            raise ValueError(f"{place} {resource}: write {resource}.hard, {resource}.soft or both")
        each = frame_bytes if resource in TIERS else 0
        soft, hard = (
            _amount(f"{place} {resource}.{what}", said[what], each, up=what == "soft") if what in said else -1
            for what in _AMOUNTS
        )
        yield GroupLimit(name, resource, soft, hard)


def _number(place: str, said: object) -> int:
    if not isinstance(said, int) or isinstance(said, bool) or said < 0:
        raise ValueError(f"{place} is a whole number, 0 for none, not {said!r}")
    return said


def _amount(place: str, said: object, frame_bytes: int, *, up: bool) -> int:
    """Frames: as they are, or of bytes the most that fit in, and of a guarantee the fewest that hold them."""
    if not frame_bytes or not isinstance(said, str):
        return _number(place, said)
    try:
        size = parse_bytes(said)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    frames = -(-size // frame_bytes) if up else size // frame_bytes
    if size and not frames:
        raise ValueError(f"{place}: {said} is less than one frame of {frame_bytes} bytes")
    return frames
