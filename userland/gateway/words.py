"""Templates and tokenizer of the model that the daemon runs, in threads of their own.

The gateway renders and tokenizes itself: templates take tools, which the system call `append` does not know, and the tokens
of a conversation say which context it goes on in.  Two threads: a long prompt delays other long ones, no short one and no
stream.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from attnix.syscalls import AsyncClient
from attnix.syscalls.text import LONG_CHARS, TextModel, load_text
from attnix.syscalls.types import UnameResult

from .errors import ApiError
from .families import Family, family_of
from .upstream import RETRY_AFTER_S, Unavailable

R = TypeVar("R")


class Words:
    """`load` after each connection; then `model` and `uname` are those of the daemon.  why: says why there is none yet."""

    def __init__(self, why: Callable[[], str]) -> None:
        self._why = why
        self._thread = ThreadPoolExecutor(1, "words")
        self._for_long = ThreadPoolExecutor(1, "long words")
        self._model: TextModel | None = None
        self._family: Family | None = None
        self._marker_ids: dict[str, int] = {}
        self._uname: UnameResult | None = None
        self._files: list[tuple[object, ...]] = []  # as they were when the model was loaded
        self.refusal = ""  # why the tokenizer cannot be loaded

    @property
    def uname(self) -> UnameResult:
        """Error: Unavailable before the first connection."""
        if self._uname is None:
            raise Unavailable(self._why())
        return self._uname

    @property
    def model(self) -> TextModel:
        """Error: ApiError when the model has no tokenizer, or none that can be loaded."""
        if self._model is None and self.refusal:
            raise ApiError(503, self.refusal, code="unavailable", retry_after_s=RETRY_AFTER_S)
        if self._model is None:
            raise ApiError(400, f"{self.uname.model} has no tokenizer: it takes token ids only")
        return self._model

    @property
    def family(self) -> Family:
        """How this model is told of tools, and asks for them."""
        assert self.model and self._family is not None
        return self._family

    @property
    def marker_ids(self) -> dict[str, int]:
        """Control tokens in which this family's calls and thoughts are written."""
        return self._marker_ids

    async def load(self, client: AsyncClient) -> None:
        """Learn what runs there; its tokenizer is loaded once, again when its files have changed, or tried each time."""
        uname = await client.uname()
        path = Path(uname.tokenizer)
        files = _states(path) if uname.tokenizer else []
        if (
            self._uname is None
            or self.refusal
            or uname.tokenizer != self._uname.tokenizer
            or uname.fingerprint != self._uname.fingerprint
            or files != self._files
        ):
            refusal, model = "", None
            if uname.tokenizer:
                try:
                    model = await self.run(load_text, path.parent if path.name == "tokenizer.json" else path)
                except Exception as error:  # files of somebody else's: there is no end to what may be wrong with them
                    refusal = f"the tokenizer of {uname.model} cannot be loaded from {path}: {error}"
            if refusal and refusal != self.refusal:
                print(f"attnix: {refusal}; requests get 503 until it can", file=sys.stderr, flush=True)
            self._model, self.refusal, self._files = model, refusal, files
            if model is not None:
                self._family = family_of(model)
                names = {model.token_bytes[token].decode("utf-8", "replace"): token for token in model.special_ids}
                self._marker_ids = {
                    name: names[name] for name in (*self._family.markers, *self._family.thoughts) if name in names
                }
                gc.collect()
                gc.freeze()  # its tables stay: let no collection look through them
        self._uname = uname

    async def run(self, work: Callable[..., R], *arguments: Any, chars: int = 0) -> R:
        """Do something with the model and about so many characters, in a thread of its own."""
        thread = self._thread if chars < LONG_CHARS else self._for_long
        return await asyncio.get_running_loop().run_in_executor(thread, work, *arguments)

    def close(self) -> None:
        for thread in (self._thread, self._for_long):
            thread.shutdown(wait=False, cancel_futures=True)


def _states(tokenizer: Path) -> list[tuple[object, ...]]:
    """Of every file that a tokenizer and its template are read from: what a change of it would change."""
    files = [tokenizer]
    if tokenizer.name == "tokenizer.json":
        files = sorted(file for file in tokenizer.parent.glob("*") if file.suffix in (".json", ".jinja"))
    states: list[tuple[object, ...]] = []
    for file in files:
        with suppress(OSError):
            state = file.stat()
            states.append((file.name, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
    return states
