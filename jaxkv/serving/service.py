"""`ServerState`: state that all HTTP routes share: engines by model id, limits, metrics."""

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
from jaxkv.serving.errors import HttpError, convert_to_http_error, make_unknown_model_error
from jaxkv.serving.limits import RequestLimits
from jaxkv.serving.server_metrics import ServerMetrics


@dataclasses.dataclass(kw_only=True)
class RequestRecord:
    """Log record of one HTTP request: id, time of arrival, status, token counts, location of an internal error.

    Attributes:
        id: id in the header `x-request-id` of the response; the client's own, if it sends one.
        begun: time of arrival on the clock `time.monotonic`.
        status: HTTP status; 499 before the response begins, and if the client disconnects before its end.
        prompt_tokens: tokens of the prompts, once known.
        new_tokens: tokens of the answers, once complete.
        model: id of the model that answers, once known.
        prompt: name of the prompt in the body.
        client: public name of the client's API key; empty without one.
        fault: where an unexpected error was raised, else empty; without its message, which may contain a prompt.
    """

    id: str
    begun: float = dataclasses.field(default_factory=time.monotonic)
    status: int = 499
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    model: str | None = None
    prompt: str = "prompt"
    client: str = ""
    fault: str = ""


class ServerState:
    """State that all HTTP routes share: engines by model id, limits, metrics, and whether the server drains.

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
        """Create the state of a server of running engines; ValueError without engines."""
        require(len(models) > 0, "models", models, "no engine: give at least one")
        self.models, self.name, self.limits = dict(models), next(iter(models)), limits
        self.metrics, self.created = ServerMetrics(self.models), int(time.time())
        self.active, self.draining = 0, False
        self.submitting = threading.Lock()

    def resolve_model_id(self, name: str | None) -> str:
        """Return a known model id, the first one for None; raise `HttpError` 404 for an unknown one."""
        if name is not None and name not in self.models:
            raise make_unknown_model_error(name, self.models)
        return self.name if name is None else name

    def find_model_and_document(self, name: str, client: str) -> tuple[str, Document]:
        """Return the model id and the `Document` of a document id; `HttpError` 404 if unknown or another client's."""
        for model, engine in self.models.items():
            with contextlib.suppress(ValueError):
                document = engine.documents.get_document(name)
                if document.is_visible_to(client):
                    return model, document
        message = f"document={name[:200]!r}: unknown document: it was removed, or belongs to another server"
        raise HttpError(404, message, param="document", code="document_not_found")

    def resolve_model_and_document(
        self, model: str | None, document: str | None, client: str
    ) -> tuple[str, Document | None]:
        """Return the model id and the `Document`, if any, of a body's ids; by default the document's model.

        Raises `HttpError` 404 for ids unknown to `client`, and 400 for a document of another model.
        """
        if document is None:
            return self.resolve_model_id(model), None
        owner, found = self.find_model_and_document(document, client)
        if model is not None and self.resolve_model_id(model) != owner:
            message = (
                f"document={document!r}: {owner!r} compressed it, "
                f"not {model!r}: use {owner!r}, or compress it again"
            )
            raise HttpError(400, message, param="document", code="document_of_another_model")
        return owner, found

    def convert_and_record_error(self, error: BaseException, record: RequestRecord) -> HttpError:
        """Convert any error to an `HttpError`; for status 500, store in `record` where the error was raised."""
        retry_after = self.metrics.estimate_retry_seconds(record.model or self.name)
        found = convert_to_http_error(error, retry_after=retry_after, prompt=record.prompt)
        if found.status == 500:
            record.fault = f"{type(error).__name__} at " + " < ".join(
                f"{frame.name} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"
                for frame in reversed(traceback.extract_tb(error.__traceback__)[-6:])
            )
        return found


async def _get_server_state(request: HttpRequest) -> ServerState:
    """Return the server state of a request's application, for FastAPI's dependency injection."""
    service: ServerState = request.app.state.service
    return service


Served = Annotated[ServerState, Depends(_get_server_state)]
