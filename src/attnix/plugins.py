"""What other packages add by entry point.  The kernel itself looks for nothing: whoever boots it calls this first."""

from __future__ import annotations

from importlib.metadata import entry_points

from attnix.kernel.evict import registry

GROUP = "attnix.eviction"


def register_policies() -> list[str]:
    """Make the eviction policies of the entry point group known by name; -> a sentence for each that could not be.

    A package that fails to import costs its own policy, not the boot.  Calling it again adds nothing.
    """
    complaints = []
    for point in entry_points(group=GROUP):
        if point.name in registry.names() and point.name not in registry.BUILT_IN:
            continue
        try:
            registry.register(point.name, point.load())
        except Exception as error:  # somebody else's code: anything
            complaints.append(f"eviction policy {point.name} ({point.value}): {error}")
    return complaints
