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


TIERS = """
import resource
from array import array

from attnix.kernel.core import Core
from attnix.kernel.geometry import RowLayout

layout = RowLayout(4, 64)
rows = memoryview(bytearray(layout.total_bytes))
core = Core(bytes(16), 16, layout, [4096, 64], [rows])
a = core.open_slot(0, 1, bytes(16))
core.append(a, array("i", range(160)).tobytes())
assert core.admit(a, 0).status == 0
blocks = list(range(core.frame_table(0)[0].count(1)))
tables = lambda: (core.frame_table(0), core.frame_table(1), core.block_table(), core.slot_row(a), core.counters())
before = tables()
many = [0] * (8 << 20)

pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (300 << 20),) * 2)
refused = []
for name, call in {
    "set_capacity": lambda: core.set_capacity(1, 1 << 24),
    "new tier": lambda: core.set_capacity(2, 1 << 24),
    "describe": lambda: core.describe(many),
    "facts": lambda: core.facts(many),
    "sample": lambda: core.sample(0, 1 << 28, 1),
}.items():
    try:
        call()
    except MemoryError as error:
        refused.append((name, str(error)[:4]))
    assert tables() == before, name
core.set_capacity(2, 32)
assert core.free_frames(2) == 32 and core.find_key(core.key_of(a, 3)) >= 0
core.close_slot(a)
print(refused)
"""


def test_a_tier_that_gets_no_memory_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", TIERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    refused = ("set_capacity", "new tier", "describe", "facts", "sample")
    assert done.stdout.strip() == str([(name, "core") for name in refused])
