"""What a request wants, and what comes of it, in no API's words."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from .keys import Key
from .tools.protocol import Heard, Tool

Logprob: TypeAlias = tuple[float, bytes, bytes]


@dataclass
class Ask:
    """
    salt        only contexts of the same key and salt share a prefix with it; "": all of the key's domain
    messages    role, content, tool_calls, tool_call_id; contents are text
    tokens      instead of messages: a prompt as it is
    one_call    of the calls of a reply only the first counts
    scan        tool calls are looked for in the reply
    lark        grammar that the reply follows; "": none.  lark_param: the field that asked for it
    max_tokens  None: to the end of the window
    prefill     how the reply begins
    pins        (messages from the first on, seconds): this beginning is wanted again
    trim        what does not fit the window is cut out behind the system message, oldest first
    keep        the context is kept for the next request of the conversation
    body_bytes  of the request: how long it takes to tokenize at most
    """

    key: Key
    messages: Sequence[Mapping[str, Any]] = ()
    tokens: Sequence[int] = ()
    tools: Sequence[Tool] = ()
    scan: bool = False
    one_call: bool = False
    lark: str = ""
    lark_param: str = ""
    max_tokens: int | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    prefill: str = ""
    pins: Sequence[tuple[int, float]] = ()
    trim: bool = False
    keep: bool = True
    body_bytes: int = 0
    salt: str = ""

    @property
    def owner(self) -> str:
        """Whose conversations it may go on in."""
        return f"{self.key.name}\0{self.salt}" if self.salt else self.key.name

    @property
    def domain(self) -> str:
        """Of the uid's domains the one in which it shares prefixes; "": the uid's own."""
        if not self.salt:
            return self.key.domain
        parts = [part.encode("utf-8", "surrogatepass") for part in (self.key.domain, self.salt)]
        return f"salt-{hashlib.blake2b(b'%d ' % len(parts[0]) + b''.join(parts), digest_size=14).hexdigest()}"  # what a name has room for


class Begun(NamedTuple):
    """The prompt was taken."""

    prompt_tokens: int
    trimmed_tokens: int


class Piece(NamedTuple):
    """Something of a reply.  tokens and logprobs are as sampled, and may be ahead of the words; but with log-probabilities and
    stop strings only those come that stay (certain.py)."""

    choice: int
    heard: list[Heard]
    tokens: list[int]
    logprobs: tuple[Logprob, ...]


class Ended(NamedTuple):
    """A reply is over.  reason: stop | length | tool_calls; stop: the stop string that ended it."""

    choice: int
    reason: str
    stop: str


@dataclass
class Spent:
    """Tokens of a request.

    cached    of the prompt, those that were not computed for it: found in a tier, or held by its context
    computed  of the prompt, the others
    pinned    of the prompt, those that a pin was made for
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    hbm: int = 0
    dram: int = 0
    nvme: int = 0
    remote: int = 0
    recomputed: int = 0
    pinned: int = 0
    trimmed: int = 0

    def tiers(self) -> dict[str, int]:
        """The extension of `usage`."""
        return {
            "hbm_tokens": self.hbm,
            "dram_tokens": self.dram,
            "nvme_tokens": self.nvme,
            "remote_tokens": self.remote,
            "computed_tokens": self.prompt - self.cached,
            "recomputed_tokens": self.recomputed,
        }


class Done(NamedTuple):
    """Everything is over, and whatever is kept is kept."""

    spent: Spent


Event: TypeAlias = Begun | Piece | Ended | Done
