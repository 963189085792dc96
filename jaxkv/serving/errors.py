"""`HttpError`: an HTTP error response in OpenAI's form, and its mapping from Python errors."""

import concurrent.futures
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from jaxkv.serving.document_store import UnknownDocument, UnreadableDocument
from jaxkv.serving.requests import EngineClosed, PromptTooLong, QueueFull
from jaxkv.serving.schemas import MESSAGES

# OpenAI's `type` of an error by status; other errors are "server_error" from 500 on, else "invalid_request_error".
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
# Body fields by the names that errors of the engine use.
_FIELDS = {
    "max_new_tokens": "max_tokens",
    "key": "seed",
    "sampling": "top_p",
    "grammar": "response_format",
    "template_arguments": "chat_template_kwargs",
}


class ClientDisconnected(Exception):
    """Exception that ends the work for a client that has closed its connection."""


class HttpError(Exception):
    """Exception that ends an HTTP request with an error: status, message, body field, error code and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = "invalid_value",
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def make_error_body(self) -> dict[str, Any]:
        """Return OpenAI's error object: {"error": {"message", "type", "param", "code"}}."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": _replace_lone_surrogates(str(self)),
            "type": _KINDS.get(self.status, kind),
            "param": self.param and _replace_lone_surrogates(self.param),
            "code": self.code,
        }
        return {"error": error}

    def make_anthropic_error_body(self) -> dict[str, Any]:
        """Return Anthropic's error object: {"type": "error", "error": {"type", "message"}}."""
        error = self.make_error_body()["error"]
        kind = error["type"].replace("server_error", "api_error")
        return {"type": "error", "error": {"type": kind, "message": error["message"]}}

    def make_json_response(self, path: str = "") -> Response:
        """Return the error as an HTTP response with status, headers and JSON body; the path selects the body's form."""
        body = self.make_error_body() if path != MESSAGES else self.make_anthropic_error_body()
        return JSONResponse(body, self.status, self.headers)


def _replace_lone_surrogates(text: str) -> str:
    """Return text with lone surrogates, which escapes in JSON may contain, replaced by question marks."""
    return text.encode("utf-8", "replace").decode()


def convert_to_http_error(
    error: BaseException, *, retry_after: int = 1, prompt: str = "prompt"
) -> HttpError:
    """Convert a Python error to an `HttpError`, status by the error's type; `prompt` names the prompt's body field.

    ValueError and TypeError become 400, an unknown document 404, a damaged one 410, a full queue 429, a passed
    deadline 504, a closing engine 503, and any other error 500.
    """
    match error:
        case HttpError():
            return error
        case RequestValidationError():
            # The first part of the location is "body" or "query".
            return _convert_validation_errors(error.errors(), 1)
        case ValidationError():
            return _convert_validation_errors(error.errors(), 0)
        case HTTPException():
            return HttpError(error.status_code, error.detail, code=None, headers=error.headers)
        case ClientDisconnected():
            return HttpError(499, "the client closed the connection", code="client_gone")
        case QueueFull():
            headers = {"Retry-After": str(retry_after)}
            return HttpError(429, str(error), code="queue_full", headers=headers)
        case TimeoutError():
            said = str(error) or "the deadline of the request has passed"
            return HttpError(504, said, code="deadline_exceeded")
        case concurrent.futures.CancelledError() | EngineClosed():
            return make_draining_error()
        case MemoryError():
            return HttpError(503, str(error) or "out of memory", code="out_of_memory")
        case UnknownDocument():
            return HttpError(404, str(error), param="document", code="document_not_found")
        case UnreadableDocument():
            # The text of the error names files of the server.
            remedy = (
                "document: its saved cache is damaged or missing: delete it and compress it again"
            )
            return HttpError(410, remedy, param="document", code="document_unreadable")
        case PromptTooLong():
            return HttpError(400, str(error), param=prompt, code="context_length_exceeded")
        case ValueError() | TypeError() | OverflowError():
            named = re.match(r"(\w+)=", str(error))
            param = (
                None if named is None else (_FIELDS | {"prompt": prompt}).get(named[1], named[1])
            )
            return HttpError(400, str(error), param=param)
        case RuntimeError():
            return HttpError(500, str(error), code="engine_failed")
    said = f"internal error of the server: {type(error).__name__}"
    return HttpError(500, said, code="internal_error")


def _convert_validation_errors(errors: Any, skipped: int) -> HttpError:
    """Return an `HttpError` 400 for an invalid body or query, from the first of pydantic's errors."""
    first = errors[0]
    path = [str(each) for each in first["loc"][skipped:]]
    named = bool(path) and first["type"] != "json_invalid"
    where = f"{'.'.join(path)}={reprlib.repr(first.get('input'))}: " if named else ""
    extra = first["type"] == "extra_forbidden"
    said = "this field or value is not supported: leave it out" if extra else first["msg"]
    return HttpError(400, where + said, param=path[0][:64] if named else None)


def make_unknown_model_error(name: str, there: Iterable[str]) -> HttpError:
    """Return the `HttpError` 404 for a body that names an unknown model; its text lists the known ids `there`."""
    known = ", ".join(map(repr, there))
    said = f"unknown model: use one of {known}"
    return HttpError(404, f"model={name[:200]!r}: {said}", param="model", code="model_not_found")


def make_draining_error() -> HttpError:
    """Return the `HttpError` 503 for new requests while the server shuts down, with a Retry-After of 5 seconds."""
    remedy = "the server is shutting down and accepts no new requests: try again later"
    return HttpError(
        503, remedy, code="draining", headers={"Retry-After": "5", "Connection": "close"}
    )
