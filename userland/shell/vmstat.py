"""`attnix vmstat`: counters since boot."""

from __future__ import annotations

from ..output import JsonOption, SocketOption, call_system, print_json, show, table


def vmstat(as_json: JsonOption = False, socket: SocketOption = "") -> None:
    """Print the kernel's counters, by name.  A counter of events is there from its first one on."""
    with call_system(socket, "vmstat") as system:
        found = system.vmstat()
    if as_json:
        print_json(found)
        return
    made = table("COUNTER", ">VALUE")
    for name, value in sorted(found.counters.items()):
        made.add_row(name, f"{value:,}")
    show(made)
