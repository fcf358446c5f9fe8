"""`usage` and `logprobs` as OpenAI's interface has them."""

from __future__ import annotations

import codecs
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


class Offsets:
    """Where in a reply's text each of its tokens begins.  A token that is only a part of a character begins where that does."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0

    def next(self, token: int) -> int:
        """Of the token behind those before."""
        found = self._chars
        if token not in self._model.special_ids:  # they are no text
            self._chars += len(self._decoder.decode(_bytes(self._model, token)))
        return found


def completion_logprobs(
    model: TextModel, tokens: Sequence[int], rows: Sequence[Logprob], top: int, offsets: Offsets
) -> dict[str, Any]:
    """The older shape: parallel lists.  offsets: of the reply, up to these tokens."""
    names, values, tops, begins = [], [], [], []
    for token, (logprob, ids, logprobs) in zip(tokens, rows, strict=False):
        names.append(_name(model, token))
        values.append(_finite(logprob))
        pairs = list(zip(unpack_ids(ids), unpack_floats(logprobs), strict=True))[:top]
        tops.append({_name(model, each): _finite(of) for each, of in pairs})
        begins.append(offsets.next(token))
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": begins}


def _entry(model: TextModel, token: int, logprob: float) -> dict[str, Any]:
    piece = _bytes(model, token)
    return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(piece)}


def _name(model: TextModel, token: int) -> str:
    """As OpenAI names a part of a character: by its bytes, or several would have one name."""
    piece = _bytes(model, token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _bytes(model: TextModel, token: int) -> bytes:
    return model.token_bytes[token] if token < len(model.token_bytes) else b""


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
