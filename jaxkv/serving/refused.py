"""`Refused`: an HTTP answer that is an error in OpenAI's form, and which one each Python error becomes."""

import concurrent.futures
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import Response

from jaxkv.serving.documents import UnknownDocument, UnreadableDocument
from jaxkv.serving.requests import EngineClosed, QueueFull

# OpenAI's `type` of an error by its status; others are "server_error" from 500 on, else "invalid_request_error".
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
# Names that the engine's own errors give to fields of a body.
_FIELDS = {"max_new_tokens": "max_tokens", "key": "seed", "sampling": "top_p"}


class Refused(Exception):
    """Error that ends an HTTP request: status, message, the field at fault, a code for programs, and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's error object: {"error": {"message", "type", "param", "code"}}."""
        kind = _KINDS.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> Response:
        """The HTTP response."""
        return as_json(self.body(), status=self.status, headers=self.headers)


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8; halves of characters, which a body's escapes can hold, become question marks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )


def as_json(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """HTTP response with a value as JSON."""
    return Response(
        json_bytes(value), status_code=status, headers=headers, media_type="application/json"
    )


def refused_by(error: BaseException, *, retry_after: int = 1, prompt: str = "prompt") -> Refused:
    """The `Refused` that a Python error becomes; `prompt` is the body's name of the prompt.

    ValueError and TypeError are 400, an unknown document 404, a damaged one 410, a full queue 429, a deadline 504, a
    closing engine 503, any other error 500.
    """
    if isinstance(error, Refused):
        return error
    if isinstance(error, QueueFull):
        return Refused(
            429, str(error), code="queue_full", headers={"Retry-After": str(retry_after)}
        )
    if isinstance(error, TimeoutError):
        return Refused(
            504, str(error) or "the time for this request is over", code="deadline_exceeded"
        )
    if isinstance(error, (concurrent.futures.CancelledError, EngineClosed)):
        return draining()
    if isinstance(error, MemoryError):
        return Refused(503, str(error) or "out of memory", code="out_of_memory")
    if isinstance(error, UnknownDocument):
        return Refused(404, str(error), param="document", code="document_not_found")
    if isinstance(error, UnreadableDocument):
        # Its text names files of the server's.
        remedy = "document: its saved cache is damaged or gone: delete it, and compress it anew"
        return Refused(410, remedy, param="document", code="document_unreadable")
    if isinstance(error, (ValueError, TypeError, OverflowError)):
        named = re.match(r"([\w.\[\]]+)=", str(error))
        param = None if named is None else _FIELDS.get(named[1], named[1])
        return Refused(
            400, str(error), param=prompt if param == "prompt" else param, code="invalid_value"
        )
    message = (
        str(error)
        if isinstance(error, RuntimeError)
        else f"an error of the server's own: {type(error).__name__}"
    )
    return Refused(
        500, message, code="engine_failed" if isinstance(error, RuntimeError) else "internal_error"
    )


def unknown_model(name: str, there: Iterable[str]) -> Refused:
    """The answer to a body that names a model of which there is none among the ids `there`."""
    known = ", ".join(map(repr, there))
    said = f"there are {known}" if "," in known else f"there is one model here: {known}"
    return Refused(404, f"model={name[:200]!r}: {said}", param="model", code="model_not_found")


def draining() -> Refused:
    """The answer to new requests while the server ends."""
    remedy = "the server is ending: it answers the requests that it has, and takes no new ones"
    return Refused(
        503, remedy, code="draining", headers={"Retry-After": "5", "Connection": "close"}
    )
