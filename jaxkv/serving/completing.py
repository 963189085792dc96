"""Endpoints /v1/completions and /v1/chat/completions: one body to requests of the engine, complete or streamed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxkv.serving import submission
from jaxkv.serving.document_store import Document
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
from jaxkv.serving.service import RequestLog, Served, Service

routes = APIRouter()
_FORM: Any = {"response_model": Reply, "response_model_exclude_unset": True}


@routes.post(TEXTS, summary="Continue a text", **_FORM)
async def texts(body: TextBody, request: HttpRequest, service: Served) -> Any:
    """Continue texts or token ids."""
    return await _completed(service, request, body)


@routes.post(CHATS, summary="Answer a chat", **_FORM)
async def chats(body: ChatBody, request: HttpRequest, service: Served) -> Any:
    """Answer messages with the model's chat template."""
    request.state.record.prompt = "messages"
    return await _completed(service, request, body)


async def _completed(service: Service, request: HttpRequest, body: TextBody | ChatBody) -> Any:
    """Submit the requests of a body; return the complete response, or a stream."""
    record: RequestLog = request.state.record
    record.model, document = service.asked(body.model, body.document)
    # In a thread, so that tokenizing a long prompt does not block other connections.
    requests = await run_in_threadpool(_submitted, service, record.model, body, document)
    if body.stream:
        events = _events(service, record, body, requests, document)
        return EventStream(events, record, requests)
    with submission.while_asked(requests):
        answers = asyncio.gather(*requests)
        completions = await submission.while_connected(request.receive, answers)
    reply = submission.whole(body, record.model, requests, completions, document)
    _note(service, record, requests, reply.usage)
    return reply


def _note(
    service: Service, record: RequestLog, requests: list[Request], usage: Usage | None
) -> None:
    """Record the token counts of answered requests for the log and the metrics."""
    if usage is not None:
        record.prompt_tokens, record.new_tokens = usage.prompt_tokens, usage.completion_tokens
    for each in requests:
        if each.stats is not None:
            service.metrics.answered(record.model or service.name, each.stats)


def _submitted(
    service: Service, model: str, body: TextBody | ChatBody, document: Document | None
) -> list[Request]:
    """Submit the requests of a body."""
    # One at a time: two bodies of many answers that fill the queue in turns would both be rejected.
    several = body.n * len(body.prompts) > 1
    with service.submitting if several else contextlib.nullcontext():
        return submission.submitted(service.models[model], body, document, limits=service.limits)


class EventStream(StreamingResponse):
    """HTTP response of server-sent events; cancels the requests if the client disconnects."""

    def __init__(self, events: AsyncIterator[bytes], record: RequestLog, requests: list[Request]):
        # Proxies must not buffer the events.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._record, self._requests = record, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the answers are complete or the client disconnects."""
        with submission.while_asked(self._requests):
            try:
                await submission.while_connected(receive, self.stream_response(send))
            except ClientGone:
                self._record.status = 499


async def _events(
    service: Service,
    record: RequestLog,
    body: TextBody | ChatBody,
    requests: list[Request],
    document: Document | None,
) -> AsyncIterator[bytes]:
    """Yield the events of all answers in sampling order; an error is the last event."""
    chat, counted = isinstance(body, ChatBody), body.stream_options.include_usage
    kind = "chat.completion.chunk" if chat else "text_completion"
    head = {"object": kind, **submission.reply_head(body, record.model or service.name)}

    def chunk(choices: list[Any], usage: Usage | None = None) -> bytes:
        """Event with choices, or with token counts; the field `usage` is sent only if requested."""
        numbers: dict[str, Any] = {"usage": usage} if counted else {}
        made = Reply(choices=choices, **head, **numbers)
        return _event(made.model_dump_json(exclude_unset=True).encode())

    def piece(at: int, delta: dict[str, str], reason: str | None = None) -> bytes:
        """Event with one piece of a choice."""
        told: dict[str, Any] = {"index": at, "logprobs": None, "finish_reason": reason}
        if chat:
            return chunk([ChatPiece(delta=delta, **told)])
        return chunk([TextChoice(text=delta.get("content", ""), **told)])

    unopened = set(range(len(requests))) if chat else set()
    try:
        async for at, found in submission.pieces(requests):
            sent = b""
            if at in unopened:
                # Clients measure the time to the first token by the first event.
                unopened.discard(at)
                sent = piece(at, {"role": "assistant", "content": ""})
            if isinstance(found, str):
                yield sent + piece(at, {"content": found})
            else:
                yield sent + piece(at, {}, found.finish_reason)
        usage = submission.usage_of(requests, body.n, document)
        _note(service, record, requests, usage)
        if counted:
            yield chunk([], usage)
        yield _event(b"[DONE]")
    except Exception as error:  # noqa: BLE001 - every error is sent to the client
        failure = service.http_error(error, record)
        record.status = failure.status
        yield _event(bytes(failure.response().body))


def _event(data: bytes) -> bytes:
    """Return a server-sent event."""
    return b"data: " + data + b"\n\n"
