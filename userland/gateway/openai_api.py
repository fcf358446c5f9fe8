"""The paths of OpenAI's interface."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .errors import ApiError
from .gateway import Gateway
from .http import answer, guarded
from .keys import Key
from .openai_chat import chat
from .openai_completions import completions
from .sampling import model_name


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Chat, completions, models; embeddings are refused."""

    async def models(request: Request, key: Key) -> Response:
        return answer({"object": "list", "data": [_model(gateway)]})

    async def model(request: Request, key: Key) -> Response:
        name = request.path_params["name"]
        if name != model_name(gateway):
            raise ApiError(404, f"the model {name[:100]!r} does not run here", code="model_not_found", param="model")
        return answer(_model(gateway))

    async def embeddings(request: Request, key: Key) -> Response:
        message = f"{model_name(gateway)} generates text: there are no embeddings here"
        raise ApiError(400, message, code="unsupported", param="model")

    def post(path: str, handler: object) -> Route:
        return Route(path, guarded(gateway, "openai", handler), methods=["POST"])  # type: ignore[arg-type]

    return [
        post("/v1/chat/completions", partial(chat, gateway)),
        post("/v1/completions", partial(completions, gateway)),
        post("/v1/embeddings", embeddings),
        Route("/v1/models", guarded(gateway, "openai", models), methods=["GET"]),
        Route("/v1/models/{name:path}", guarded(gateway, "openai", model), methods=["GET"]),
    ]


def _model(gateway: Gateway) -> dict[str, object]:
    uname = gateway.words.uname
    return {
        "id": uname.model, "object": "model", "created": 0, "owned_by": "attnix",
        "max_model_len": uname.window_tokens, "fingerprint": uname.fingerprint,
    }  # fmt: skip
