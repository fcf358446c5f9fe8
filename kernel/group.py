"""Groups: processes accounted together, as cgroups are.  Every uid has one, named `uid:N`; sub-groups are `uid:N/NAME`."""

from __future__ import annotations

from typing import Final

DEFAULT_WEIGHT: Final = 100  # share of a group that nobody gave another


class Group:
    """weight: its share under contention, relative to the other groups'."""

    __slots__ = ("name", "uid", "weight")

    def __init__(self, name: str, uid: int) -> None:
        self.name = name
        self.uid = uid
        self.weight = DEFAULT_WEIGHT


class Groups:
    """All of one machine, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def of_uid(self, uid: int) -> Group:
        return self.named(f"uid:{uid}", uid)

    def named(self, name: str, uid: int) -> Group:
        """Made when it is first named."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name, uid)
        return group
