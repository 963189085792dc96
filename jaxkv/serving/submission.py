"""Submits the requests of one HTTP body to an engine, collects their answers, and detects a disconnected client."""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any, TypeVar

import jax
from starlette.types import Receive

from jaxkv.arguments import make_random_key
from jaxkv.engine.generation_results import Completion
from jaxkv.serving.answer_logprobs import LogprobsWriter
from jaxkv.serving.document_store import Document
from jaxkv.serving.engine import Engine
from jaxkv.serving.errors import ClientDisconnected, HttpError
from jaxkv.serving.limits import RequestLimits
from jaxkv.serving.requests import Request
from jaxkv.serving.schemas import ChatBody, ChatChoice, Reply, TextBody, TextChoice, Usage
from jaxkv.text.answer_parsing import PLAIN, AnswerParser, choose_answer_format

T = TypeVar("T")


def submit_body_requests(
    engine: Engine,
    body: TextBody | ChatBody,
    document: Document | None,
    *,
    limits: RequestLimits,
    seed: int | None = None,
    offline: bool = False,
    owner: str = "",
) -> list[Request]:
    """Submit `n` requests per prompt of a body; return them all; cancel all and raise if one is rejected.

    `limits` bound the number of answers and their time. An answer has at most as many tokens as a slot of the engine
    allows. The seed is the body's, else `seed`, else a random one. A single answer samples with the key of the seed,
    answer i of several with `jax.random.fold_in(key, i)`. `owner` names the client.
    """
    chat, prompts, count = isinstance(body, ChatBody), body.prompts, body.n * len(body.prompts)
    format, grammar = PLAIN, body.content_grammar
    if count > limits.answers:
        remedy = f"request {limits.answers} at most per body"
        said = f"n={body.n}: {count} answers are too many: {remedy}"
        raise HttpError(400, said, param="n")
    if isinstance(body, ChatBody):
        format = choose_answer_format(
            engine.session.params.tokenizer,
            body.chat,
            tool_parser=limits.tool_parser,
            reasoning_parser=limits.reasoning_parser,
        )
        format = dataclasses.replace(format, parallel=body.parallel_tool_calls)
        grammar = body.build_grammar(format, engine.session.params.tokenizer)
        prompts = [dataclasses.replace(body.chat, kept_special_tokens=format.special_tokens)]
    most, asked, params = engine.limits.new, body.max_answer_tokens, engine.session.params
    sampling = body.make_sampling(
        params.sampling_defaults if limits.generation_config == "auto" else {}
    )
    options: dict[str, Any] = {
        "max_new_tokens": most if asked is None else min(asked, most),
        "sampling": sampling,
        "stop": body.stop,
        "budget": body.budget,
        "stop_at_eos": not body.ignore_eos,
        # The turn of a document decides whether its question is plain text.
        "raw": not chat and document is None,
        "document": document,
        "offline": offline,
        "owner": owner,
        "grammar": grammar,
    }
    if body.seed is not None:
        seed = body.seed
    elif sampling.temperature == 0:
        seed = None
    elif seed is None:
        seed = secrets.randbits(32)
    key = None if seed is None else make_random_key(seed)
    ends, made = time.monotonic() + limits.seconds, list[Request]()
    try:
        for at, prompt in enumerate(prompts):
            numbers = range(at * body.n, (at + 1) * body.n)
            keys = [
                key if key is None or count == 1 else jax.random.fold_in(key, each)
                for each in numbers
            ]
            left = max(1e-3, ends - time.monotonic())
            first = engine.submit(prompt, key=keys, deadline=left, **options)
            made += [first, *first.others]
        for request in made:
            request.format = format
    except BaseException:
        cancel_requests(made)
        raise
    return made


def make_complete_reply(
    body: TextBody | ChatBody,
    model: str,
    requests: list[Request],
    completions: list[Completion],
    document: Document | None,
) -> Reply:
    """Return the `Reply`, OpenAI's response object, with all complete answers of a body and their token counts."""
    found = zip(requests, completions, strict=True)
    choices = [_make_choice(body, at, *each) for at, each in enumerate(found)]
    kind = "chat.completion" if isinstance(body, ChatBody) else "text_completion"
    usage, head = count_usage_tokens(requests, body.n, document), make_reply_head(body, model)
    if isinstance(body, ChatBody) and body.prompt_logprobs is not None:
        head["prompt_logprobs"] = LogprobsWriter(requests[0], chat=True).list_prompt_logprobs()
    return Reply(object=kind, **head, choices=choices, usage=usage)


def make_reply_head(body: TextBody | ChatBody, model: str) -> dict[str, Any]:
    """Return a dict of a new id, the time and the model id: the fields that all events of one response share."""
    prefix = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": model,
    }


def _make_choice(
    body: TextBody | ChatBody, at: int, request: Request, completion: Completion
) -> Any:
    """Return one `choices` item, `TextChoice` or `ChatChoice`: a completion's text, logprobs and finish reason."""
    text, parser = completion.text or "", AnswerParser(request.format)
    parser.push_text(text)
    parser.flush_text()
    echoes = isinstance(body, TextBody) and body.echo and body.logprobs is not None
    writer = LogprobsWriter(request, chat=isinstance(body, ChatBody), echo=echoes)
    told: dict[str, Any] = {
        "index": at,
        "logprobs": writer.write_new(),
        "finish_reason": parser.rename_finish_reason(completion.finish_reason),
        "stop_reason": completion.stop_reason,
    }
    if isinstance(body, TextBody):
        if body.prompt_logprobs is not None:
            told["prompt_logprobs"] = writer.list_prompt_logprobs()
        if body.echo and request.tokenizer is not None:
            text = request.tokenizer.decode([ids[0] for ids, _ in request.scorer.scored[0]]) + text
        return TextChoice(text=text, **told)
    return ChatChoice(message=parser.message, **told)


def count_usage_tokens(requests: list[Request], n: int, document: Document | None) -> Usage:
    """Return the `Usage`: prompt tokens, a document's as cached, and sampled tokens; `n` answers share a prompt."""
    stats = [request.stats for request in requests if request.stats is not None]
    held = 0 if document is None else document.tokens * len(stats[::n])
    prompt = held + sum(each.prompt_tokens for each in stats[::n])
    cached = held + sum(each.cached_tokens for each in stats[::n])
    new = sum(each.new_tokens for each in stats)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=new,
        total_tokens=prompt + new,
        prompt_tokens_details={"cached_tokens": cached},
    )


def cancel_requests(requests: list[Request]) -> None:
    """Cancel all requests that have not ended; others are unchanged."""
    for request in requests:
        request.cancel()


@contextlib.contextmanager
def cancel_on_exit(requests: list[Request]) -> Iterator[None]:
    """Context manager that cancels, on exit, all requests that have not ended."""
    try:
        yield
    finally:
        cancel_requests(requests)


async def iterate_text_pieces(
    requests: list[Request],
) -> AsyncIterator[tuple[int, str | Completion]]:
    """Yield (request index, text piece) as sampled, (index, `Completion`) at each end; raise the first error."""
    found: asyncio.Queue[tuple[int, str | Completion | Exception]] = asyncio.Queue()

    async def read(at: int, request: Request) -> None:
        try:
            async for piece in request:
                await found.put((at, piece))
            await found.put((at, await request))
        except Exception as error:  # noqa: BLE001 - raised below, where the requests are answered
            await found.put((at, error))

    readers = [asyncio.create_task(read(at, request)) for at, request in enumerate(requests)]
    try:
        left = len(requests)
        while left:
            at, piece = await found.get()
            if isinstance(piece, Exception):
                raise piece
            left -= isinstance(piece, Completion)
            yield at, piece
    finally:
        for reader in readers:
            reader.cancel()


async def await_while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work` and return its result; cancel it and raise `ClientDisconnected` if the client disconnects."""
    working, leaving = (
        asyncio.ensure_future(work),
        asyncio.ensure_future(_wait_for_disconnect(receive)),
    )
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        for task in (working, leaving):
            task.cancel()
        # Cancelled tasks must end before the connection is handed back.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client closes the connection; the body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
