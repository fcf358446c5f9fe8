"""Looks for files below one folder, by name and by what they hold.

Nothing outside that folder is ever opened: paths are followed from the folder's own descriptor, one component at a time, and
no symbolic link is followed, so neither `..` nor a link that appears in the middle of a search leads out.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .tool import Tool, ToolError

MAX_MATCHES: Final = 50
MAX_FILES: Final = 20_000  # looked at
MAX_FILE_BYTES: Final = 1 << 20  # of one file, searched
MAX_LINE_CHARS: Final = 200
TIME_LIMIT_S: Final = 10.0

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not be waited for


def file_search(root: str | Path) -> Tool:
    """The tool for files below `root`.  Error: NotADirectoryError."""
    top = Path(root).resolve()
    if not top.is_dir():
        raise NotADirectoryError(f"{root} is not a folder: name one that exists")

    async def run(name: str = "*", content: str = "", folder: str = "") -> str:
        gave_up = threading.Event()
        try:
            return await asyncio.to_thread(search, top, name, content, folder, gave_up)
        except asyncio.CancelledError:
            gave_up.set()
            raise

    return Tool(
        "search_files", "Finds files by name, and the lines in them that hold a text.",
        {
            "name": "pattern of the file's name or path, such as *.py or docs/*.md",
            "content": "text to look for in the files, in upper or lower case",
            "folder": "where to look, such as docs; everywhere unless given",
        },
        run, time_limit_s=TIME_LIMIT_S + 1, eta_s=0.2,
    )  # fmt: skip


def search(root: Path, name: str, content: str, below: str = "", gave_up: threading.Event | None = None) -> str:
    """A path or, with `content`, a path:line: text for each match, sorted by path; and what was left out.

    Error: ToolError for a folder that is not there, or is not below the root.
    """
    if not name and not content:
        raise ToolError("give a name, such as *.md, or a content to look for")
    found: list[str] = []
    looked = 0
    end = time.monotonic() + TIME_LIMIT_S
    note = ""
    for path, at, entry in _files(root, below):
        looked += 1
        if (gave_up and gave_up.is_set()) or time.monotonic() > end or looked > MAX_FILES:
            note = f"[the search ended after {min(looked, MAX_FILES)} files: give a narrower name or folder]"
            break
        if name and not (fnmatch.fnmatchcase(entry, name) or fnmatch.fnmatchcase(path, name)):
            continue
        found += _lines(path, at, entry, content.lower()) if content else [path]
        if len(found) > MAX_MATCHES:
            note = f"[more than {MAX_MATCHES} matches: ask for something narrower]"
            break
    return "\n".join([*found[:MAX_MATCHES], *([note] if note else [])]) or f"nothing found in {looked} files"


def _files(root: Path, below: str) -> Iterator[tuple[str, int, str]]:
    """(path from the root, descriptor of its folder, name) of every regular file."""
    parts = [part for part in below.split("/") if part not in ("", ".")]
    if below.startswith("/") or ".." in parts:
        raise ToolError(f"{below!r} is not below the root: name a folder in it, without .. and without a leading /")
    top = os.open(root, _FOLDER & ~os.O_NOFOLLOW)  # its own path was given by the user
    try:
        for part in parts:
            try:
                inner = os.open(part, _FOLDER, dir_fd=top)
            except OSError:
                raise ToolError(f"there is no folder {below!r} below the root") from None
            os.close(top)
            top = inner
        for folder, folders, files, at in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            folders.sort()
            prefix = "/".join([*parts, *(part for part in folder.split("/") if part != ".")])
            for entry in sorted(files):
                if stat.S_ISREG(_mode(entry, at)):
                    yield f"{prefix}/{entry}" if prefix else entry, at, entry
    finally:
        os.close(top)


def _mode(entry: str, at: int) -> int:
    try:
        return os.stat(entry, dir_fd=at, follow_symlinks=False).st_mode
    except OSError:  # it has gone
        return 0


def _lines(path: str, at: int, entry: str, content: str) -> list[str]:
    """The lines of one file that hold `content`; none of a file that is not text or cannot be read."""
    try:
        fd = os.open(entry, _FILE, dir_fd=at)
    except OSError:
        return []
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        data = file.read(MAX_FILE_BYTES)
    if b"\0" in data:
        return []
    lines = data.decode(errors="replace").splitlines()
    return [
        f"{path}:{n}: {line.strip()[:MAX_LINE_CHARS]}" for n, line in enumerate(lines, 1) if content in line.lower()
    ]
