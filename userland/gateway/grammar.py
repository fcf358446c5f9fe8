"""Replies that follow a grammar: which tokens may come next (llguidance), and which of them does.

The system call `forward` gives the likeliest of the allowed tokens; one is drawn here, appended, and so on: a step is one
pass of the model, in one batch with everybody else's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import llguidance

from attnix.syscalls.text import TextModel

from .errors import ApiError, bad
from .tools.protocol import json_rule

TOP_K: Final = 64  # of the allowed tokens, so many are drawn from
_CACHED: Final = 64  # compiled grammars


class Grammars:
    """Compiles for one model; used by the thread of Words, since it tokenizes."""

    def __init__(self, model: TextModel, vocab_tokens: int) -> None:
        self._bytes = -(-vocab_tokens // 8)
        self.stop_ids = frozenset(model.stop_ids)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Wrapped(model)), n_vocab=vocab_tokens, eos_token=sorted(model.stop_ids)
        )
        self._compiled = lru_cache(maxsize=_CACHED)(self._compile)

    def begin(self, lark: str, param: str) -> Path:
        """A reply that is to follow `lark`.  Error: ApiError when it is no grammar, or one that asks for too much."""
        try:
            matcher = self._compiled(lark)
        except ValueError as error:
            raise bad(f"this cannot be enforced: {str(error)[:400]}", param) from None
        return Path(matcher.deep_copy(), self._bytes, self.stop_ids)

    def _compile(self, lark: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().partition("\n")[0])
        return matcher


class Path:
    """Where a reply stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, mask_bytes: int, stop_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._stop_ids = stop_ids

    def copy(self) -> Path:
        """The same place, to go on from by another way."""
        return Path(self._matcher.deep_copy(), self._mask_bytes, self._stop_ids)

    @property
    def complete(self) -> bool:
        """Nothing can follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> bytes:
        """A bit per token that may come next, the end of the turn among them where the reply may end."""
        mask = self._matcher.compute_bitmask()[: self._mask_bytes]
        self._check()
        if not any(mask):
            raise ApiError(400, "nothing can satisfy the grammar from here", code="grammar")
        return mask

    def take(self, token: int) -> bool:
        """Go on with it; False: it is the end."""
        if token in self._stop_ids:
            return False
        if not self._matcher.consume_token(token):
            self._check()
            raise ApiError(500, f"the grammar refuses token {token}, which it had allowed", code="internal")
        return True

    def _check(self) -> None:
        """Error: ApiError when the matcher has given up: a grammar may show only now that it asks for too much."""
        if self._matcher.is_error():
            why = self._matcher.get_error().partition("\n")[0]
            raise ApiError(400, f"the grammar asks for too much: {why[:200]}", code="grammar")


class _Wrapped:
    """A TextModel as llguidance wants a tokenizer."""

    def __init__(self, model: TextModel) -> None:
        if not model.stop_ids:
            raise bad("the model has no token that ends a turn: nothing can be enforced")
        self.eos_token_id = model.stop_ids[0]
        self.bos_token_id = None
        self.tokens = model.token_bytes
        self.special_token_ids = sorted(model.special_ids)
        self._model = model

    def __call__(self, text: bytes | str) -> list[int]:
        return self._model.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def json_grammar(schema: Mapping[str, Any] | None) -> str:
    """JSON by a schema; None: any object."""
    return f"start: %json {json_rule(schema if schema is not None else {'type': 'object'})}"


def check_schema(schema: Any, param: str) -> dict[str, Any]:
    """Error: ApiError unless it is an object that can be written as JSON."""
    if not isinstance(schema, dict):
        raise bad("a JSON schema is an object", param)
    try:
        json.dumps(schema)
    except (ValueError, RecursionError) as error:
        raise bad(f"the schema is not JSON: {error}", param) from None
    return schema


def draw(
    likeliest: Sequence[tuple[int, float]],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
    counts: Mapping[int, int],
    presence_penalty: float,
    frequency_penalty: float,
) -> tuple[int, float]:
    """One of the likeliest tokens and its log-probability; the same for the same seed and position.

    As drivers/accel/sampler.py has it, of these tokens: penalties, temperature, top-k, top-p of what that left, min-p.
    """
    weighed = [
        (logprob - (presence_penalty + frequency_penalty * counts[token] if token in counts else 0.0), token, logprob)
        for token, logprob in likeliest
    ]
    weighed.sort(key=lambda one: (-one[0], one[1]))
    if temperature <= 0 or top_k == 1:
        return weighed[0][1], weighed[0][2]
    best = weighed[0][0]
    least = weighed[top_k - 1][0] if 0 < top_k < len(weighed) else -math.inf  # equals of the k-th stay
    weights = [math.exp((score - best) / temperature) for score, _, _ in weighed if score >= least]
    total, mass, kept = sum(weights), 0.0, 0
    for weight in weights:
        if kept and (mass >= top_p * total or weight < min_p):  # the likeliest weighs 1
            break
        mass += weight
        kept += 1
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    left = int.from_bytes(digest, "little") / 2**64 * mass
    for (_, token, logprob), weight in zip(weighed[:kept], weights, strict=False):
        left -= weight
        if left < 0:
            return token, logprob
    return weighed[kept - 1][1], weighed[kept - 1][2]
