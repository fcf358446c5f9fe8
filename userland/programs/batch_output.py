"""The output of a batch: JSON lines that are only ever added to, so that a run can be gone on with whatever ended it."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

_START: Final = b'{"id": '


class OutputError(ValueError):
    """The file cannot be a batch's output; the message says why and what to do."""


class BatchOutput:
    """Open and lock `path`, repair its end, and read what it holds.

    ids           of the lines that it holds
    retry_errors  leave out lines that hold an error, so that they are done again
    A torn last line, as a machine without power leaves it, is cut off.
    Error: OutputError for a file that holds something else (which is not touched) or that another batch writes; OSError.
    """

    def __init__(self, path: Path, retry_errors: bool = False) -> None:
        self.path: Final = path
        self.ids: set[str | int] = set()
        self._fd = _open_locked(path)
        try:
            failed = self._read()
            if retry_errors and failed:
                self._leave_out(failed)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, line: dict[str, Any]) -> None:
        """Add a line: {"id": ..., ...}.  Error: OSError; what was written of it is cut off by the next run."""
        data = json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]
        self.ids.add(line["id"])

    def close(self) -> None:
        """When it returns, the lines are on the disk."""
        os.fsync(self._fd)
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> set[str | int]:
        """Fill `ids`; those whose line holds an error."""
        failed: set[str | int] = set()
        end = 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, data in enumerate(file, 1):
                line = _line(data)
                if line is None and not data.endswith(b"\n") and _is_torn(data):
                    break
                if line is None:
                    raise OutputError(f"{self.path}, line {number}, is not from a batch: name another file")
                self.ids.add(line["id"])
                if "error" in line:
                    failed.add(line["id"])
                end += len(data)
                if not data.endswith(b"\n"):  # whole, but for its end
                    os.write(self._fd, b"\n")
                    end += 1
        os.ftruncate(self._fd, end)
        return failed

    def _leave_out(self, failed: set[str | int]) -> None:
        """Write the file anew without them: the new one whole in the place of the old one, or the old one."""
        new = self.path.with_name(f".{self.path.name}.new")
        fd = _open_locked(new)
        try:
            os.ftruncate(fd, 0)
            os.fchmod(fd, os.fstat(self._fd).st_mode & 0o777)
            with open(self._fd, "rb", closefd=False) as old, open(fd, "wb", closefd=False) as kept:
                old.seek(0)
                for data in old:
                    line = _line(data)
                    if line is not None and line["id"] not in failed:
                        kept.write(data)
            os.fsync(fd)
            os.rename(new, self.path)
        except BaseException:
            os.close(fd)
            new.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd = fd
        self.ids -= failed


def _open_locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):  # what a pipe or a device holds cannot be read first, or has no end
        os.close(fd)
        raise OutputError(f"{path} is no file, and an interrupted batch goes on with what its file holds: name a file")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise OutputError(f"another batch writes {path}: wait for it, or name another file") from None
    return fd


def _line(data: bytes) -> dict[str, Any] | None:
    """A line of ours; None for anything else."""
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("id"), str | int) else None


def _is_torn(data: bytes) -> bool:
    """Whether it is the beginning of a line of ours, perhaps with the zeros that some file systems leave after a crash."""
    data = data.rstrip(b"\0")
    return data.startswith(_START) or _START.startswith(data)
