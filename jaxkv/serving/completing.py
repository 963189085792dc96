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
from jaxkv.serving.answer_logprobs import LogprobsWriter
from jaxkv.serving.document_store import Document
from jaxkv.serving.errors import ClientDisconnected
from jaxkv.serving.reply_writers import ReplyWriter
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
from jaxkv.serving.service import RequestRecord, Served, ServerState
from jaxkv.text.answer_parsing import AnswerParser, Delta

routes = APIRouter()
_FORM: Any = {"response_model": Reply, "response_model_exclude_unset": True}


@routes.post(TEXTS, summary="Continue a text", **_FORM)
async def complete_texts(body: TextBody, request: HttpRequest, service: Served) -> Any:
    """Answer POST /v1/completions: continue texts or lists of token ids; return the response or an event stream."""
    return await answer_body(service, request, body, ReplyWriter())


@routes.post(CHATS, summary="Answer a chat", **_FORM)
async def complete_chats(body: ChatBody, request: HttpRequest, service: Served) -> Any:
    """Answer POST /v1/chat/completions with the model's chat template; return the response or an event stream."""
    request.state.record.prompt = "messages"
    return await answer_body(service, request, body, ReplyWriter())


async def answer_body(
    service: ServerState, request: HttpRequest, body: TextBody | ChatBody, writer: ReplyWriter
) -> Any:
    """Submit the requests of a body; return what `writer` makes of the `Reply`, or an `EventStream` for a stream."""
    record: RequestRecord = request.state.record
    record.model, document = service.resolve_model_and_document(
        body.model, body.document, record.client
    )
    # In a thread, so that tokenizing a long prompt does not block other connections.
    requests = await run_in_threadpool(_submit_body, service, record, body, document)
    if body.stream:
        events = _generate_events(service, record, body, requests, document, writer)
        return EventStream(events, record, requests)
    with submission.cancel_on_exit(requests):
        answers = asyncio.gather(*requests)
        completions = await submission.await_while_connected(request.receive, answers)
    reply = submission.make_complete_reply(body, record.model, requests, completions, document)
    _record_token_counts(service, record, requests, reply.usage)
    return writer.write_reply(reply)


def _record_token_counts(
    service: ServerState, record: RequestRecord, requests: list[Request], usage: Usage | None
) -> None:
    """Record answers' token counts in the HTTP request's record, and each answer's stats in the server's metrics."""
    if usage is not None:
        record.prompt_tokens, record.new_tokens = usage.prompt_tokens, usage.completion_tokens
    for each in requests:
        if each.stats is not None:
            reason = each.result().finish_reason
            service.metrics.record_answer(record.model or service.name, each.stats, reason)


def _submit_body(
    service: ServerState,
    record: RequestRecord,
    body: TextBody | ChatBody,
    document: Document | None,
) -> list[Request]:
    """Submit a body's requests, one per prompt and answer, and return them; bodies of several wait for one another."""
    # One at a time: two bodies of many answers that fill the queue in turns would both be rejected.
    several = body.n * len(body.prompts) > 1
    with service.submitting if several else contextlib.nullcontext():
        return submission.submit_body_requests(
            service.models[record.model or service.name],
            body,
            document,
            limits=service.limits,
            owner=record.client,
        )


class EventStream(StreamingResponse):
    """HTTP response that streams server-sent events; cancels its requests if the client disconnects."""

    def __init__(
        self, events: AsyncIterator[bytes], record: RequestRecord, requests: list[Request]
    ):
        # Proxies must not buffer the events.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._record, self._requests = record, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the answers are complete; if the client disconnects, cancel them and set status 499."""
        with submission.cancel_on_exit(self._requests):
            try:
                await submission.await_while_connected(receive, self.stream_response(send))
            except ClientDisconnected:
                self._record.status = 499


async def _generate_events(
    service: ServerState,
    record: RequestRecord,
    body: TextBody | ChatBody,
    requests: list[Request],
    document: Document | None,
    writer: ReplyWriter,
) -> AsyncIterator[bytes]:
    """Yield the answers' server-sent events as bytes, in sampling order; an error is sent as the last event."""
    chat, counted = isinstance(body, ChatBody), body.stream_options.include_usage
    kind = "chat.completion.chunk" if chat else "text_completion"
    writers = [LogprobsWriter(each, chat=chat) for each in requests]
    head = {"object": kind, **submission.make_reply_head(body, record.model or service.name)}

    def make_chunk_event(choices: list[Any], usage: Usage | None = None) -> bytes:
        """Return an event's bytes: `choices`, and `usage` (token counts or null) only if the client requests it."""
        numbers: dict[str, Any] = {"usage": usage} if counted else {}
        return writer.write_chunk(Reply(choices=choices, **head, **numbers))

    def make_piece_event(at: int, delta: Delta, **end: str | None) -> bytes:
        """Return the bytes of an event with one piece of answer `at`: a text, a chat's role, or why it ended."""
        logprobs = None if "role" in delta else writers[at].write_new()
        told: dict[str, Any] = {"index": at, "logprobs": logprobs, "finish_reason": None, **end}
        if chat:
            return make_chunk_event([ChatPiece(delta=delta, **told)])
        return make_chunk_event([TextChoice(text=delta.get("content", ""), **told)])

    unopened = set(range(len(requests))) if chat else set()
    parsers = [AnswerParser(each.format) for each in requests]
    try:
        async for at, found in submission.iterate_text_pieces(requests):
            sent = b""
            if at in unopened:
                # Clients measure the time to the first token by the first event.
                unopened.discard(at)
                sent = make_piece_event(at, {"role": "assistant", "content": ""})
            parser = parsers[at]
            deltas = parser.push_text(found) if isinstance(found, str) else parser.flush_text()
            sent += b"".join(make_piece_event(at, each) for each in deltas)
            if not isinstance(found, str):
                reason = parser.rename_finish_reason(found.finish_reason)
                end = {"finish_reason": reason, "stop_reason": found.stop_reason}
                sent += make_piece_event(at, {}, **end)
            if sent:
                yield sent
        usage = submission.count_usage_tokens(requests, body.n, document)
        _record_token_counts(service, record, requests, usage)
        counts = make_chunk_event([], usage) if counted else b""
        yield counts + writer.write_end(usage)
    except Exception as error:  # noqa: BLE001 - every error is sent to the client
        failure = service.convert_and_record_error(error, record)
        record.status = failure.status
        yield writer.write_error(failure)
