"""`Service`: what all routes of the HTTP interface share: engines by model id, and the state that its server reads."""

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
    """Entry of the log for one HTTP request: id, time of arrival, status, numbers of tokens, the server's own fault.

    Attributes:
        id: id that the answer's header `x-request-id` has.
        begun: time of arrival on the clock `time.monotonic`.
        status: HTTP status; 499 before the answer begins, and if the client was gone before it was complete.
        prompt_tokens: tokens of the prompts, once they are known.
        new_tokens: tokens of the answers, once they are complete.
        model: id of the model that answers, once it is known.
        prompt: the body's name of the prompt.
        fault: where an unexpected error was raised, without its message, which may hold a prompt's text; else empty.
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
        models: engines by the model ids that clients give; a body without one is the first's.
        name: id of the first model.
        limits: limits of a request.
        metrics: what /metrics shows.
        created: time of the start, seconds since 1970.
        active: completions and documents that are being answered.
        draining: True once no new requests are taken.
        submitting: lock that bodies of several answers hold while their requests are submitted.
    """

    def __init__(self, models: Mapping[str, Engine], *, limits: RequestLimits):
        """Makes the service of engines that are there."""
        require(len(models) > 0, "models", models, "give at least one engine")
        self.models, self.name, self.limits = dict(models), next(iter(models)), limits
        self.metrics, self.created = Metrics(self.models), int(time.time())
        self.active, self.draining = 0, False
        self.submitting = threading.Lock()

    def model(self, name: str | None) -> str:
        """Id of the model that a body names, the first one's for None; `HttpError` 404 if there is none of this id."""
        if name is not None and name not in self.models:
            raise unknown_model(name, self.models)
        return self.name if name is None else name

    def document(self, name: str) -> tuple[str, Document]:
        """The model id of a document, and the document; `HttpError` 404 if there is none of this id."""
        for model, engine in self.models.items():
            with contextlib.suppress(ValueError):
                return model, engine.documents.of(name)
        message = f"document={name[:200]!r}: there is none of this id: it was removed, or is another server's"
        raise HttpError(404, message, param="document", code="document_not_found")

    def asked(self, model: str | None, document: str | None) -> tuple[str, Document | None]:
        """The model id and the document that a body asks: its document's model if it names none.

        Raises `HttpError` 404 for unknown ids, and 400 for a document that another model compressed.
        """
        if document is None:
            return self.model(model), None
        owner, found = self.document(document)
        if model is not None and self.model(model) != owner:
            message = (
                f"document={document!r}: {owner!r} compressed it, "
                f"not {model!r}: ask {owner!r}, or compress it anew"
            )
            raise HttpError(400, message, param="document", code="document_of_another_model")
        return owner, found

    def http_error(self, error: BaseException, record: RequestLog) -> HttpError:
        """The `HttpError` of any error; notes in `record` where an unexpected one was raised."""
        retry_after = self.metrics.retry_after(record.model or self.name)
        refused = http_error(error, retry_after=retry_after, prompt=record.prompt)
        if refused.status == 500:
            record.fault = f"{type(error).__name__} at " + " < ".join(
                f"{frame.name} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"
                for frame in reversed(traceback.extract_tb(error.__traceback__)[-6:])
            )
        return refused


async def _served(request: HttpRequest) -> Service:
    """The service of a request's application."""
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(_served)]
