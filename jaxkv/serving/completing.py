"""Routes /v1/completions and /v1/chat/completions: one body to requests of the engine, whole or as a stream."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxkv.serving import asking
from jaxkv.serving.bodies import ClientGone, body_of, while_connected
from jaxkv.serving.documents import Document
from jaxkv.serving.fields import strict_json
from jaxkv.serving.forms import Asked, asked_by
from jaxkv.serving.refused import Refused, as_json
from jaxkv.serving.replies import DONE, Replies, event, usage_of
from jaxkv.serving.requests import Request
from jaxkv.serving.service import Record, Service


async def complete(service: Service, request: HttpRequest, *, chat: bool) -> Response:
    """Answers one body of a completion: submits its requests, and responds as a whole or as a stream."""
    record: Record = request.state.record
    body = await body_of(request, service.limits)
    try:
        # Parsing and tokenizing a long prompt take long: other connections are served meanwhile.
        asked, requests, document = await run_in_threadpool(
            _submitted, service, request, body, chat=chat
        )
    except Refused:
        raise
    except Exception as error:
        raise service.refusal_of(error, record, prompt="messages" if chat else "prompt") from error
    replies = Replies(chat=chat, model=record.model or service.name, usage=asked.usage)
    if asked.stream:
        return EventStream(service, requests, asked, document, replies, record)
    with asking.while_asked(requests):
        try:
            completions = await while_connected(request.receive, asking.answers(requests))
        except ClientGone:
            raise
        except Exception as error:
            raise service.refusal_of(error, record) from error
    usage = _told(service, requests, asked, document, record)
    return as_json(replies.whole(completions, usage))


def _submitted(
    service: Service, request: HttpRequest, body: bytes, *, chat: bool
) -> tuple[Asked, list[Request], Document | None]:
    """Reads a body and submits its requests; returns both, and the document that is asked. Notes the model."""
    form, limits = service.forms[request.url.path], service.limits
    given = strict_json(body)
    asked = asked_by(
        given, form, chat=chat, most_answers=limits.answers, usual_tokens=service.most_tokens
    )
    model, document = service.asked(given.get("model"), asked.document)
    request.state.record.model = model
    # Two bodies of many answers that fill the queue in turns would both be refused.
    with service.submitting if asked.answers > 1 else contextlib.nullcontext():
        return (
            asked,
            asking.submitted(service.models[model], asked, document, seconds=limits.seconds),
            document,
        )


def _told(
    service: Service,
    requests: list[Request],
    asked: Asked,
    document: Document | None,
    record: Record,
) -> dict[str, Any]:
    """Numbers of tokens of answered requests; notes them for the log and for the metrics."""
    usage = usage_of(requests, asked.n, document)
    record.prompt_tokens, record.new_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for each in requests:
        if each.stats is not None:
            service.metrics.answered(record.model or service.name, each.stats)
    return usage


class EventStream(Response):
    """HTTP response that sends the answers' pieces as server-sent events; cancels the requests if its client goes."""

    def __init__(
        self,
        service: Service,
        requests: list[Request],
        asked: Asked,
        document: Document | None,
        replies: Replies,
        record: Record,
    ):
        # Proxies must not collect the events.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._service, self._requests, self._asked, self._document = (
            service,
            requests,
            asked,
            document,
        )
        self._replies, self._record = replies, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the answers are complete or the client has gone."""
        with asking.while_asked(self._requests):
            try:
                await while_connected(receive, self._send_all(send))
            except ClientGone:
                self._record.status = 499

    async def _send_all(self, send: Send) -> None:
        """Sends the headers and all events; an error after the headers is an event of its own."""
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async for sent in self._events():
                if sent:
                    await send({"type": "http.response.body", "body": sent, "more_body": True})
        except Exception as error:
            refused = self._service.refusal_of(error, self._record)
            self._record.status = refused.status
            await send(
                {"type": "http.response.body", "body": event(refused.body()), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        """Yields the events of all answers, in the order in which their text is drawn."""
        unopened = set(range(len(self._requests)))
        async for at, piece in asking.pieces(self._requests):
            sent = (
                self._replies.piece(at, piece)
                if isinstance(piece, str)
                else self._replies.end(at, piece)
            )
            # Clients take the first event for the first token.
            yield self._replies.opening(at) + sent if at in unopened else sent
            unopened.discard(at)
        yield self._replies.total(
            _told(self._service, self._requests, self._asked, self._document, self._record)
        )
        yield DONE
