"""What the requests of both APIs have in common, on its way into an Ask."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

import msgspec

from .ask import Ask
from .errors import ApiError, bad
from .gateway import Gateway
from .openai_types import ChatRequest, CompletionRequest, RefusalPart, TextPart, Unserved

_MAX_SEED: Final = 1 << 63
_UNSERVED: Final = tuple(field.name for field in msgspec.structs.fields(Unserved))
_NEUTRAL: Final = {"length_penalty": 1, "typical_p": 1, "add_generation_prompt": True, "skip_special_tokens": True}


def check_model(gateway: Gateway, name: str) -> None:
    """Error: ApiError 404 for a model that is not the one that runs; "" is whichever does."""
    if name not in ("", model_name(gateway)):
        message = f"the model {name[:100]!r} does not run here; {model_name(gateway)!r} does"
        raise ApiError(404, message, code="model_not_found", param="model")


def model_name(gateway: Gateway) -> str:
    """As `/v1/models` names it."""
    return gateway.words.uname.model


def sampled(ask: Ask, request: ChatRequest | CompletionRequest) -> None:
    """Sampling parameters, with OpenAI's defaults."""
    for name in _UNSERVED:
        given = getattr(request, name)
        if given is not None and given != _NEUTRAL[name] if name in _NEUTRAL else given:
            raise bad(f"{name} is not supported", name)
    if request.temperature is not None:
        ask.temperature = request.temperature
    ask.top_p = max(1e-6, request.top_p) if request.top_p is not None else 1.0
    ask.top_k = max(0, request.top_k or 0)
    ask.min_p = request.min_p or 0.0
    ask.seed = request.seed % (1 << 64) if request.seed is not None else secrets.randbelow(_MAX_SEED)
    ask.repetition_penalty = request.repetition_penalty or 1.0
    ask.presence_penalty = request.presence_penalty or 0.0
    ask.frequency_penalty = request.frequency_penalty or 0.0
    ask.ignore_eos = bool(request.ignore_eos)
    ask.n = request.n or 1
    ask.salt = request.cache_salt or ""
    ask.stop = as_stops(request.stop)


def as_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as the daemon takes them."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def joined(parts: str | Sequence[TextPart | RefusalPart] | None) -> str:
    """A message's content as one text."""
    if parts is None or isinstance(parts, str):
        return parts or ""
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in parts)
