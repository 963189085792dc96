"""`Service`: what all routes of the HTTP interface share, and the state that its server reads."""

import dataclasses
import threading
import time
import traceback
from typing import Any

from jaxkv.serving.engine import Engine
from jaxkv.serving.forms import Form, chat_form, document_form, text_form
from jaxkv.serving.limits import Limits
from jaxkv.serving.metrics import Metrics
from jaxkv.serving.refused import Refused, refused_by


@dataclasses.dataclass(kw_only=True)
class Record:
    """Entry of the log for one HTTP request: id, time of arrival, status, numbers of tokens, the server's own fault.

    Attributes:
        id: id that the answer's header `x-request-id` has.
        begun: time of arrival on the clock `time.monotonic`.
        status: HTTP status; 499 if the client was gone before the answer was complete. None before the answer begins.
        prompt_tokens: tokens of the prompts, once they are known.
        new_tokens: tokens of the answers, once they are complete.
        fault: where an unexpected error was raised, without its message, which may hold a prompt's text.
    """

    id: str
    begun: float = dataclasses.field(default_factory=time.monotonic)
    status: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    fault: str | None = None


class Service:
    """An engine behind HTTP: its model's name, the forms of bodies, limits, metrics, and whether it drains.

    Attributes:
        engine: the engine that answers.
        name: name of the model, as clients give it.
        limits: limits of a request.
        metrics: what /metrics shows.
        created: time of the start, seconds since 1970.
        active: completions and documents that are being answered.
        draining: True once no new requests are taken.
        submitting: lock that bodies of several answers hold while their requests are submitted.
    """

    def __init__(self, engine: Engine, *, name: str, limits: Limits):
        """Makes the service of an engine that is there."""
        self.engine, self.name, self.limits = engine, name, limits
        self.metrics, self.created = Metrics(engine), int(time.time())
        self.active, self.draining = 0, False
        self.submitting = threading.Lock()
        most: dict[str, Any] = {"most_tokens": engine.limits.new, "most_answers": limits.answers}
        self.forms: dict[str, Form] = {
            "/v1/completions": text_form(**most),
            "/v1/chat/completions": chat_form(**most),
            "/v1/documents": document_form(),
        }

    def require_model(self, name: str | None) -> None:
        """Raises `Refused` 404 for another model than the served one; a body may leave it out."""
        if name is not None and name != self.name:
            message = f"model={name[:200]!r}: there is one model here: {self.name!r}"
            raise Refused(404, message, param="model", code="model_not_found")

    def refusal_of(self, error: BaseException, record: Record, *, prompt: str = "prompt") -> Refused:
        """The `Refused` of any error; notes in `record` where an unexpected one was raised."""
        refused = refused_by(error, retry_after=self.metrics.retry_after(), prompt=prompt)
        if refused.status == 500:
            record.fault = f"{type(error).__name__} at " + " < ".join(
                f"{frame.name} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"
                for frame in reversed(traceback.extract_tb(error.__traceback__)[-6:])
            )
        return refused
