"""`HttpError`: an HTTP answer that is an error in OpenAI's form, and which one each Python error becomes."""

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

# OpenAI's `type` of an error by its status; others are "server_error" from 500 on, else "invalid_request_error".
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
# Names that the engine's own errors give to fields of a body.
_FIELDS = {"max_new_tokens": "max_tokens", "key": "seed", "sampling": "top_p"}


class ClientGone(Exception):
    """Error that ends the work for a client that has closed its connection."""


class HttpError(Exception):
    """Error that ends an HTTP request: status, message, the field at fault, a code for programs, and headers."""

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

    def body(self) -> dict[str, Any]:
        """OpenAI's error object: {"error": {"message", "type", "param", "code"}}."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": _whole(str(self)),
            "type": _KINDS.get(self.status, kind),
            "param": self.param and _whole(self.param),
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        """The HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)


def _whole(text: str) -> str:
    """A text with question marks for halves of characters, which a body's escapes can hold."""
    return text.encode("utf-8", "replace").decode()


def http_error(error: BaseException, *, retry_after: int = 1, prompt: str = "prompt") -> HttpError:
    """The `HttpError` that a Python error becomes; `prompt` is the body's name of the prompt.

    ValueError and TypeError are 400, an unknown document 404, a damaged one 410, a full queue 429, a deadline 504, a
    closing engine 503, any other error 500.
    """
    match error:
        case HttpError():
            return error
        case RequestValidationError():
            # The first part says where it is: in the body, or the query.
            return _of_fields(error.errors(), 1)
        case ValidationError():
            return _of_fields(error.errors(), 0)
        case HTTPException():
            return HttpError(error.status_code, error.detail, code=None, headers=error.headers)
        case ClientGone():
            return HttpError(499, "the client closed the connection", code="client_gone")
        case QueueFull():
            headers = {"Retry-After": str(retry_after)}
            return HttpError(429, str(error), code="queue_full", headers=headers)
        case TimeoutError():
            said = str(error) or "the time for this request is over"
            return HttpError(504, said, code="deadline_exceeded")
        case concurrent.futures.CancelledError() | EngineClosed():
            return draining()
        case MemoryError():
            return HttpError(503, str(error) or "out of memory", code="out_of_memory")
        case UnknownDocument():
            return HttpError(404, str(error), param="document", code="document_not_found")
        case UnreadableDocument():
            # Its text names files of the server's.
            remedy = "document: its saved cache is damaged or gone: delete it, and compress it anew"
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
    said = f"an error of the server's own: {type(error).__name__}"
    return HttpError(500, said, code="internal_error")


def _of_fields(errors: Any, skipped: int) -> HttpError:
    """The rejection of a body or a query by the first of pydantic's errors."""
    first = errors[0]
    path = [str(each) for each in first["loc"][skipped:]]
    named = bool(path) and first["type"] != "json_invalid"
    where = f"{'.'.join(path)}={reprlib.repr(first.get('input'))}: " if named else ""
    extra = first["type"] == "extra_forbidden"
    said = "there is no such field, or not this value: leave it out" if extra else first["msg"]
    return HttpError(400, where + said, param=path[0][:64] if named else None)


def unknown_model(name: str, there: Iterable[str]) -> HttpError:
    """The answer to a body that names a model of which there is none among the ids `there`."""
    known = ", ".join(map(repr, there))
    said = f"there is none of this id; there are {known}"
    return HttpError(404, f"model={name[:200]!r}: {said}", param="model", code="model_not_found")


def draining() -> HttpError:
    """The answer to new requests while the server ends."""
    remedy = "the server is ending: it answers the requests that it has, and takes no new ones"
    return HttpError(
        503, remedy, code="draining", headers={"Retry-After": "5", "Connection": "close"}
    )
