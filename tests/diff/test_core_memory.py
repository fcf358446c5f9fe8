"""No memory: every call that may need some raises MemoryError, and the core is as it was.

In a process of its own, since the limit on its address space cannot be raised again.
"""

from __future__ import annotations

import subprocess
import sys

LIMITED = """
import resource
from array import array

from attnix.kernel.core import Core
from attnix.kernel.geometry import RowLayout

layout = RowLayout(4, 1 << 22)
rows = memoryview(bytearray(layout.total_bytes))
core = Core(bytes(16), 16, layout, [4096], [rows])
a = core.open_slot(0, 1, bytes(16))
core.append(a, bytes(4 * 60000))
assert core.admit(a, 0).status == 0
tables = lambda: (core.frame_table(0), core.block_table(), core.slot_row(a), core.pagemap(a), core.slots_used())
before = tables()

pages = int(open("/proc/self/statm").read().split()[0])
big = bytes(200 << 20)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (260 << 20),) * 2)
refused = []
for name, call in {
    "new": lambda: Core(bytes(16), 16, RowLayout(1, 1), [1 << 24], [memoryview(bytearray(RowLayout(1, 1).total_bytes))]),
    "append": lambda: core.append(a, big),
}.items():
    try:
        call()
    except MemoryError as error:
        refused.append((name, str(error)))
assert tables() == before
assert core.append(a, array("i", [1]).tobytes()) == 60001
core.close_slot(a)
print(refused)
"""


def test_calls_that_get_no_memory_change_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "('new', 'core: no memory for 16777216 frames')" in done.stdout
    assert "('append', 'core: no memory for a log of" in done.stdout
