"""What of a running system lies in the state directory besides the secret: the journal and the snapshots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from attnix.kernel.config import KernelConfig
from attnix.kernel.events import Event
from attnix.syscalls.journal import JournalBusy, JournalFile
from attnix.syscalls.snapshot_service import SnapshotService


class Durable(NamedTuple):
    """journal: None when another daemon keeps the one in this directory."""

    journal: JournalFile | None
    snapshots: SnapshotService

    def connect(self, feed: Callable[[Event], None]) -> None:
        """Give the kernel what is on record, before anything else happens to it."""
        self.snapshots.connect(feed)
        if self.journal is not None:
            feed(self.journal.load())

    def close(self) -> None:
        """Boot failed: let go of the journal."""
        if self.journal is not None:
            self.journal.close()


def open_durable(directory: Path, config: KernelConfig, log: Callable[[str, str], None]) -> Durable:
    """Requires: `directory` exists, mode 0700.  Token ids mean something to one model only: `config.fingerprint` says which.

    Error: OSError.
    """
    snapshots = SnapshotService(directory / "snapshots", log)
    try:
        return Durable(JournalFile(directory, config.fingerprint, log), snapshots)
    except JournalBusy as error:
        log("warning", f"journal: {error}; what is named here does not outlive this daemon")
        return Durable(None, snapshots)
