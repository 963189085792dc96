"""`Service`: state that all HTTP routes share: engines by model id, limits, metrics."""

import contextlib
import dataclasses
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request as HttpRequest

from jaxkv._errors import require
from jaxkv.serving.document_store import Document
from jaxkv.serving.engine import Engine
from jaxkv.serving.errors import HttpError, http_error, unknown_model
from jaxkv.serving.limits import RequestLimits
from jaxkv.serving.server_metrics import Metrics


@dataclasses.dataclass(kw_only=True)
class RequestLog:
    """Log record of one HTTP request: id, time of arrival, status, token counts, location of an internal error.

    Attributes:
        id: id in the header `x-request-id` of the response.
        begun: time of arrival on the clock `time.monotonic`.
        status: HTTP status; 499 before the response begins, and if the client disconnects before its end.
        prompt_tokens: tokens of the prompts, once known.
        new_tokens: tokens of the answers, once complete.
        model: id of the model that answers, once known.
        prompt: name of the prompt in the body.
        fault: where an unexpected error was raised, else empty; without its message, which may contain a prompt.
    """

    id: str
    begun: float = dataclasses.field(default_factory=time.monotonic)
    status: int = 499
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    model: str | None = None
    prompt: str = "prompt"
    fault: str = ""


class Service:
    """Engines behind HTTP: their model ids, limits, metrics, and whether the server drains.

    Attributes:
        models: engines by model id; a body without an id uses the first.
        name: id of the first model.
        limits: limits of a request.
        metrics: metrics of the endpoint /metrics.
        created: start time, in seconds since 1970.
        active: number of completions and documents in progress.
        draining: True once new requests are rejected.
        submitting: lock held while the requests of a body with several answers are submitted.
    """

    def __init__(self, models: Mapping[str, Engine], *, limits: RequestLimits):
        """Create the service of running engines."""
        require(len(models) > 0, "models", models, "no engine: give at least one")
        self.models, self.name, self.limits = dict(models), next(iter(models)), limits
        self.metrics, self.created = Metrics(self.models), int(time.time())
        self.active, self.draining = 0, False
        self.submitting = threading.Lock()

    def model(self, name: str | None) -> str:
        """Return the id of the model that a body names, the first one's for None; `HttpError` 404 if unknown."""
        if name is not None and name not in self.models:
            raise unknown_model(name, self.models)
        return self.name if name is None else name

    def document(self, name: str) -> tuple[str, Document]:
        """Return the model id of a document, and the document; `HttpError` 404 if unknown."""
        for model, engine in self.models.items():
            with contextlib.suppress(ValueError):
                return model, engine.documents.of(name)
        message = f"document={name[:200]!r}: unknown document: it was removed, or belongs to another server"
        raise HttpError(404, message, param="document", code="document_not_found")

    def asked(self, model: str | None, document: str | None) -> tuple[str, Document | None]:
        """Return the model id and the document of a body; by default the model of the document.

        Raises `HttpError` 404 for unknown ids, and 400 for a document of another model.
        """
        if document is None:
            return self.model(model), None
        owner, found = self.document(document)
        if model is not None and self.model(model) != owner:
            message = (
                f"document={document!r}: {owner!r} compressed it, "
                f"not {model!r}: use {owner!r}, or compress it again"
            )
            raise HttpError(400, message, param="document", code="document_of_another_model")
        return owner, found

    def http_error(self, error: BaseException, record: RequestLog) -> HttpError:
        """Convert any error to an `HttpError`; record in `record` where an unexpected one was raised."""
        retry_after = self.metrics.retry_after(record.model or self.name)
        found = http_error(error, retry_after=retry_after, prompt=record.prompt)
        if found.status == 500:
            record.fault = f"{type(error).__name__} at " + " < ".join(
                f"{frame.name} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"
                for frame in reversed(traceback.extract_tb(error.__traceback__)[-6:])
            )
        return found


async def _served(request: HttpRequest) -> Service:
    """Return the service of the application."""
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(_served)]
