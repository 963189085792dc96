"""Routes /v1/completions and /v1/chat/completions: one body to requests of the engine, whole or as a stream."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxkv.serving import asking
from jaxkv.serving.documents import Document
from jaxkv.serving.errors import ClientGone
from jaxkv.serving.requests import Request
from jaxkv.serving.schemas import (
    CHATS,
    TEXTS,
    ChatBody,
    ChatPiece,
    Reply,
    TextBody,
    TextChoice,
    Usage,
)
from jaxkv.serving.service import Record, Served, Service

routes = APIRouter()
_FORM: Any = {"response_model": Reply, "response_model_exclude_unset": True}


@routes.post(TEXTS, summary="Continue a text", **_FORM)
async def texts(body: TextBody, request: HttpRequest, service: Served) -> Any:
    """Continues texts or token ids."""
    return await _completed(service, request, body)


@routes.post(CHATS, summary="Answer a chat", **_FORM)
async def chats(body: ChatBody, request: HttpRequest, service: Served) -> Any:
    """Answers messages by the model's chat template."""
    request.state.record.prompt = "messages"
    return await _completed(service, request, body)


async def _completed(service: Service, request: HttpRequest, body: TextBody | ChatBody) -> Any:
    """Submits the requests of a body; returns the whole answer, or a stream."""
    record: Record = request.state.record
    record.model, document = service.asked(body.model, body.document)
    # Tokenizing a long prompt takes long: other connections are served meanwhile.
    requests = await run_in_threadpool(_submitted, service, record.model, body, document)
    if body.stream:
        return EventStream(service, record, body, requests, document)
    with asking.while_asked(requests):
        completions = await asking.while_connected(request.receive, asking.answers(requests))
    reply = asking.whole(body, record.model, requests, completions, document)
    _note(service, record, requests, reply.usage)
    return reply


def _note(service: Service, record: Record, requests: list[Request], usage: Usage | None) -> None:
    """Notes the numbers of tokens of answered requests for the log and the metrics."""
    if usage is not None:
        record.prompt_tokens, record.new_tokens = usage.prompt_tokens, usage.completion_tokens
    for each in requests:
        if each.stats is not None:
            service.metrics.answered(record.model or service.name, each.stats)


def _submitted(
    service: Service, model: str, body: TextBody | ChatBody, document: Document | None
) -> list[Request]:
    """Submits a body's requests."""
    limits = service.limits
    # Two bodies of many answers that fill the queue in turns would both be refused.
    several = body.n * len(body.prompts) > 1
    with service.submitting if several else contextlib.nullcontext():
        return asking.submitted(
            service.models[model],
            body,
            document,
            most_answers=limits.answers,
            seconds=limits.seconds,
        )


class EventStream(StreamingResponse):
    """HTTP response that sends the answers' pieces as server-sent events; cancels the requests if its client goes."""

    def __init__(
        self,
        service: Service,
        record: Record,
        body: TextBody | ChatBody,
        requests: list[Request],
        document: Document | None,
    ):
        # Proxies must not collect the events.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._sent(), headers=headers, media_type="text/event-stream")
        self._service, self._record, self._body = service, record, body
        self._requests, self._document = requests, document
        self._chat = isinstance(body, ChatBody)
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        self._head = {"object": kind, **asking.reply_head(body, record.model or service.name)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the answers are complete or the client has gone."""
        with asking.while_asked(self._requests):
            try:
                await asking.while_connected(receive, self.stream_response(send))
            except ClientGone:
                self._record.status = 499

    async def _sent(self) -> AsyncIterator[bytes]:
        """Yields all events; an error after the headers is the last one."""
        try:
            async for each in self._events():
                yield each
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            refused = self._service.refusal_of(error, self._record)
            self._record.status = refused.status
            yield _event(bytes(refused.response().body))

    async def _events(self) -> AsyncIterator[bytes]:
        """Yields the events of all answers, in the order in which their text is drawn."""
        unopened = set(range(len(self._requests))) if self._chat else set()
        async for at, piece in asking.pieces(self._requests):
            sent = b""
            if at in unopened:
                # Clients take the first event for the first token.
                unopened.discard(at)
                sent = self._piece(at, {"role": "assistant", "content": ""})
            if isinstance(piece, str):
                yield sent + self._piece(at, {"content": piece})
            else:
                yield sent + self._piece(at, {}, piece.finish_reason)
        usage = asking.usage_of(self._requests, self._body.n, self._document)
        _note(self._service, self._record, self._requests, usage)
        if self._body.stream_options.include_usage:
            yield self._chunk([], usage)
        yield _event(b"[DONE]")

    def _piece(self, at: int, delta: dict[str, str], reason: str | None = None) -> bytes:
        """Event of one choice's chunk."""
        told: dict[str, Any] = {"index": at, "logprobs": None, "finish_reason": reason}
        if self._chat:
            return self._chunk([ChatPiece(delta=delta, **told)], None)
        return self._chunk([TextChoice(text=delta.get("content", ""), **told)], None)

    def _chunk(self, choices: list[Any], usage: Usage | None) -> bytes:
        """Event with choices, or with the stream's numbers of tokens, whose field is there only if asked for."""
        numbers: dict[str, Any] = (
            {"usage": usage} if self._body.stream_options.include_usage else {}
        )
        chunk = Reply(choices=choices, **self._head, **numbers)
        return _event(chunk.model_dump_json(exclude_unset=True).encode())


def _event(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + data + b"\n\n"
