"""`usage` and `logprobs` as OpenAI's interface has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attnix.syscalls.records import unpack_floats, unpack_ids
from attnix.syscalls.text import TextModel

from .ask import Logprob, Spent

_LEAST = -9999.0  # what OpenAI says of a token without a log-probability


def usage(spent: Spent) -> dict[str, Any]:
    """With an extension: where the prompt's tokens were found."""
    return {
        "prompt_tokens": spent.prompt,
        "completion_tokens": spent.completion,
        "total_tokens": spent.prompt + spent.completion,
        "prompt_tokens_details": {"cached_tokens": spent.cached},
        "attnix": spent.tiers() | ({"trimmed_tokens": spent.trimmed} if spent.trimmed else {}),
    }


def chat_logprobs(model: TextModel, tokens: Sequence[int], rows: Sequence[Logprob], top: int) -> dict[str, Any]:
    """One entry per token, with its `top` alternatives."""
    content = []
    for token, (logprob, ids, logprobs) in zip(tokens, rows, strict=False):
        alternatives = list(zip(unpack_ids(ids), unpack_floats(logprobs), strict=True))[:top]
        content.append(
            _entry(model, token, logprob) | {"top_logprobs": [_entry(model, each, of) for each, of in alternatives]}
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    model: TextModel, tokens: Sequence[int], rows: Sequence[Logprob], top: int, offset: int
) -> dict[str, Any]:
    """The older shape: parallel lists.  offset: characters of the text before these tokens."""
    names, values, tops, offsets = [], [], [], []
    for token, (logprob, ids, logprobs) in zip(tokens, rows, strict=False):
        name = _text(model, token)
        names.append(name)
        values.append(_finite(logprob))
        pairs = list(zip(unpack_ids(ids), unpack_floats(logprobs), strict=True))[:top]
        tops.append({_text(model, each): _finite(of) for each, of in pairs})
        offsets.append(offset)
        offset += len(name)
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _entry(model: TextModel, token: int, logprob: float) -> dict[str, Any]:
    piece = model.token_bytes[token] if token < len(model.token_bytes) else b""
    return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(piece)}


def _text(model: TextModel, token: int) -> str:
    return (model.token_bytes[token] if token < len(model.token_bytes) else b"").decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
