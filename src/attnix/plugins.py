"""What other packages add by entry point.  The kernel itself looks for nothing: whoever boots it calls this first."""

from __future__ import annotations

from importlib.metadata import entry_points

from attnix.kernel.evict import registry
from attnix.kernel.order import registry as orders

GROUP = "attnix.eviction"
ORDER_GROUP = "attnix.scheduling"


def register_policies() -> list[str]:
    """Make the policies of the entry point groups known by name; -> a sentence for each that could not be.

    A package that fails to import costs its own policy, not the boot.  Calling it again adds nothing.
    """
    complaints = []
    for group, kind, where in ((GROUP, "eviction", registry), (ORDER_GROUP, "scheduling", orders)):
        for point in entry_points(group=group):
            if point.name in where.names() and point.name not in where.BUILT_IN:
                continue
            try:
                where.register(point.name, point.load())
            except Exception as error:  # somebody else's code: anything
                complaints.append(f"{kind} policy {point.name} ({point.value}): {error}")
    return complaints
