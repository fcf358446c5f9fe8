"""What goes wrong, in the shape of the API that was spoken.

Whatever is raised while a request is answered becomes an ApiError, and that the error object of OpenAI's or of
Anthropic's interface.  Bad input is 4xx; 5xx means that the daemon, or this program, could not.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from attnix.syscalls import AttnixError, ConnectionLost, SyscallError
from attnix.syscalls.text import TemplateError
from attnix.syscalls.types import E

from .upstream import RETRY_AFTER_S, Unavailable

Api = Literal["openai", "anthropic"]

# Anthropic's names of errors, by status.
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_OPENAI_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer that is an error.

    code           OpenAI's machine-readable reason; "" where there is none
    param          the field at fault; "" where there is none
    retry_after_s  for the header; 0: it makes no sense to come again as it is
    fields         numbers that say why, beside the message
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "",
        param: str = "",
        retry_after_s: float = 0.0,
        fields: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.fields = fields or {}

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(max(1, round(self.retry_after_s + 0.499)))} if self.retry_after_s else {}

    def openai(self) -> dict[str, Any]:
        """The body of OpenAI's interface."""
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param or None, "code": self.code or None}
        return {"error": error | ({"attnix": self.fields} if self.fields else {})}

    def anthropic(self) -> dict[str, Any]:
        """The body of Anthropic's interface."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error: dict[str, Any] = {"type": kind, "message": self.message}
        return {"type": "error", "error": error | ({"attnix": self.fields} if self.fields else {})}


def api_of(path: str) -> Api:
    """Whose interface a path belongs to."""
    return "anthropic" if path.startswith("/v1/messages") else "openai"


def in_shape(error: ApiError, path: str) -> dict[str, Any]:
    """The body of the interface that this path belongs to."""
    return error.anthropic() if api_of(path) == "anthropic" else error.openai()


def bad(message: str, param: str = "", code: str = "") -> ApiError:
    """What the caller has to change."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """Any failure of a request as an answer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Unavailable | ConnectionLost):
        return ApiError(503, f"the daemon is not there: {error}", code="unavailable", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, TemplateError):
        return bad(str(error), "messages")
    if isinstance(error, RecursionError):  # whatever of a body is walked through: only its depth can bring this about
        return bad("something in the body is nested too deeply", code="too_deep")
    if isinstance(error, TimeoutError):
        return ApiError(408, "the request took longer than this server allows", code="timeout")
    if isinstance(error, SyscallError):
        return _of_syscall(error)
    if isinstance(error, AttnixError):
        return ApiError(503, error.message, code="unavailable", retry_after_s=RETRY_AFTER_S)
    return ApiError(500, f"the gateway failed: {type(error).__name__}", code="internal")


def _of_syscall(error: SyscallError) -> ApiError:
    text = str(error.detail.get("message", "")) or error.message
    fields = {key: value for key, value in error.detail.items() if key != "message" and isinstance(value, int | str)}
    told_ms = error.detail.get("retry_after_ms")
    wait_s = told_ms / 1000 if isinstance(told_ms, int | float) and told_ms > 0 else float(RETRY_AFTER_S)
    if error.errno == E.E2BIG:
        return ApiError(400, text, code="context_length_exceeded", param="messages", fields=fields)
    if error.errno == E.EDQUOT and "limit" in fields and _never_fits(fields):
        return ApiError(400, text, code="context_length_exceeded", fields=fields)
    if error.errno == E.ENOMEM and _never_fits(fields):
        return ApiError(400, text, code="too_many", fields=fields)
    if error.errno in (E.EAGAIN, E.EDQUOT):
        return ApiError(429, text, code="rate_limit_exceeded", retry_after_s=wait_s, fields=fields)
    if error.errno == E.EINVAL:
        return ApiError(400, text, param=str(error.detail.get("field", "")), fields=fields)
    if error.errno in (E.ENOMEM, E.EBUSY, E.ENODEV, E.EIO, E.EHOSTDOWN, E.ECANCELED, E.ETIMEDOUT, E.ENOSPC):
        return ApiError(503, text, code="overloaded", retry_after_s=wait_s, fields=fields)
    return ApiError(500, f"the system said {text}", code="internal", fields=fields)


def _never_fits(fields: dict[str, Any]) -> bool:
    wanted, limit = fields.get("wanted"), fields.get("limit")
    return isinstance(wanted, int) and isinstance(limit, int) and wanted > limit
