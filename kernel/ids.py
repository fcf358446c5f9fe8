"""Ids that must not be mixed up."""

from __future__ import annotations

from typing import NewType

Pid = NewType("Pid", int)  # process, never reused
Cid = NewType("Cid", int)  # context, system-wide, never reused
Conn = NewType("Conn", int)  # connection, never reused
Slot = NewType("Slot", int)  # context slot of the core: a page-table row
