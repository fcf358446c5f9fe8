"""`/openapi.json`: what this gateway takes and gives, made from the types that requests are decoded into."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from .anthropic_types import CountRequest, MessagesRequest
from .gateway import Gateway
from .openai_types import ChatRequest, CompletionRequest, Unserved

_REFUSED: Final = {
    400: "the request cannot be answered as it is",
    401: "no key, or an unknown one",
    403: "this machine only, as there is no keys file",
    404: "no such model",
    408: "it took too long",
    413: "the body is too long",
    415: "the body is not application/json",
    429: "come again after `retry-after` seconds",
    503: "the daemon is not there, or has no room: come again after `retry-after` seconds",
}


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The document."""
    document = describe()

    async def openapi(request: Request) -> Response:
        return JSONResponse(document)

    return [Route("/openapi.json", openapi, methods=["GET"])]


def describe() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    bodies = [ChatRequest, CompletionRequest, CountRequest, MessagesRequest]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for body in (ChatRequest, CompletionRequest):  # what is refused anyway needs no description
        for refused in msgspec.structs.fields(Unserved):
            del components[body.__name__]["properties"][refused.name]
    components |= _SHAPES
    chat, completion, counted, messages = schemas
    paths = {
        "/v1/chat/completions": {"post": _post("chat", chat, "ChatCompletion", "OpenAiError", True)},
        "/v1/completions": {"post": _post("completions", completion, "Completion", "OpenAiError", True)},
        "/v1/embeddings": {"post": _unsupported()},
        "/v1/models": {"get": _get("models", "ModelList", "OpenAiError")},
        "/v1/models/{name}": {"get": _get("model", "Model", "OpenAiError", "name")},
        "/v1/messages": {"post": _post("messages", messages, "Message_", "AnthropicError", True)},
        "/v1/messages/count_tokens": {"post": _post("countTokens", counted, "TokenCount", "AnthropicError", False)},
        "/healthz": {"get": _probe("healthz", {200: "this process answers"})},
        "/readyz": {"get": _probe("readyz", {200: "and so does the daemon", 503: "the daemon does not"})},
        "/metrics": {
            "get": {
                "operationId": "metrics",
                "responses": {
                    "200": _content("text/plain", {"type": "string"}),
                    "401": _content("application/json", _ref("OpenAiError")),
                    "403": _content("application/json", _ref("OpenAiError")),
                },
            }
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "attnix gateway",
            "version": "1",
            "description": "OpenAI's and Anthropic's interfaces to attnix.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(kind: str, schema: dict[str, Any], about: str = "the answer") -> dict[str, Any]:
    return {"description": about, "content": {kind: {"schema": schema}}}


def _errors(shape: str) -> dict[str, Any]:
    return {str(status): _content("application/json", _ref(shape), about) for status, about in _REFUSED.items()}


def _post(name: str, body: dict[str, Any], shape: str, error: str, streams: bool) -> dict[str, Any]:
    whole = _content("application/json", _ref(shape))
    if streams:
        # No schema: some would read it as the whole stream's, some as each event's.
        whole["content"]["text/event-stream"] = {}
    return {
        "operationId": name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": whole, **_errors(error)},
    }


def _unsupported() -> dict[str, Any]:
    refused = _content("application/json", _ref("OpenAiError"), "there are no embeddings here")
    return {
        "operationId": "embeddings",
        "requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}},
        "responses": {
            "400": refused,
            **{k: v for k, v in _errors("OpenAiError").items() if k in ("401", "403", "429", "503")},
        },
    }


def _get(name: str, shape: str, error: str, parameter: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": name,
        "responses": {"200": _content("application/json", _ref(shape)), **_errors(error)},
    }
    if parameter:
        schema = {"type": "string", "minLength": 1}
        found["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": schema}]
    return found


def _probe(name: str, answers: dict[int, str]) -> dict[str, Any]:
    shape = {"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]}
    responses = {str(status): _content("application/json", shape, about) for status, about in answers.items()}
    return {"operationId": name, "responses": responses, "security": [{}]}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "integer", "minimum": 0}
_ANY: Final[dict[str, Any]] = {}
_OPENAI_USAGE: Final = _object(
    prompt_tokens=_NUMBER,
    completion_tokens=_NUMBER,
    total_tokens=_NUMBER,
    prompt_tokens_details=_object(cached_tokens=_NUMBER),
    attnix={"type": "object", "additionalProperties": _NUMBER},
)
_CHOICES: Final = {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["index", "finish_reason"]}}
_SHAPES: Final[dict[str, Any]] = {
    "OpenAiError": _object(error=_object(message=_TEXT, type=_TEXT, param=_ANY, code=_ANY)),
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    "ChatCompletion": _object(
        id=_TEXT,
        object={"const": "chat.completion"},
        created=_NUMBER,
        model=_TEXT,
        choices=_CHOICES,
        usage=_OPENAI_USAGE,
    ),
    "Completion": _object(
        id=_TEXT,
        object={"const": "text_completion"},
        created=_NUMBER,
        model=_TEXT,
        choices=_CHOICES,
        usage=_OPENAI_USAGE,
    ),
    "Model": _object(id=_TEXT, object={"const": "model"}, created=_NUMBER, owned_by=_TEXT),
    "ModelList": _object(object={"const": "list"}, data={"type": "array", "items": _ref("Model")}),
    "Message_": _object(
        id=_TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_TEXT,
        content={"type": "array", "items": {"type": "object", "required": ["type"]}},
        stop_reason=_TEXT,
        usage=_object(input_tokens=_NUMBER, output_tokens=_NUMBER, cache_read_input_tokens=_NUMBER),
    ),
    "TokenCount": _object(input_tokens=_NUMBER),
}
