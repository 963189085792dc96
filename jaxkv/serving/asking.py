"""Submits the requests of one HTTP body to an engine, and reads their answers within an event loop."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import jax

from jaxkv.arguments import random_key
from jaxkv.results import Completion
from jaxkv.serving.documents import Document
from jaxkv.serving.engine import Engine
from jaxkv.serving.forms import Asked
from jaxkv.serving.requests import Request, result_of


def submitted(
    engine: Engine,
    asked: Asked,
    document: Document | None,
    *,
    seconds: int | float,
    offline: bool = False,
) -> list[Request]:
    """Submits a request for each prompt and answer; cancels all of them if one is refused, and raises its error.

    Answer i of several draws with `jax.random.fold_in(key, i)`; a single one with the seed's own key.
    """
    key = None if asked.seed is None else random_key(asked.seed)
    ends, made = time.monotonic() + seconds, list[Request]()
    try:
        for at, prompt in enumerate(asked.prompts):
            drawn = range(at * asked.n, (at + 1) * asked.n)
            keys = [
                key if key is None or asked.answers == 1 else jax.random.fold_in(key, each)
                for each in drawn
            ]
            left, options = (
                max(1e-3, ends - time.monotonic()),
                {"offline": offline, **asked.options},
            )
            first = engine.submit(prompt, key=keys, deadline=left, document=document, **options)
            made += [first, *first.others]
    except BaseException:
        cancel(made)
        raise
    return made


def cancel(requests: list[Request]) -> None:
    """Cancels all requests that have not ended."""
    for request in requests:
        request.cancel()


@contextlib.contextmanager
def while_asked(requests: list[Request]) -> Iterator[None]:
    """Context manager that cancels all requests that have not ended when it is left."""
    try:
        yield
    finally:
        cancel(requests)


async def answers(requests: list[Request]) -> list[Completion]:
    """Waits for all requests and returns their `Completion`s; raises the error of the first that fails."""
    return await asyncio.gather(*(result_of(each.future) for each in requests))


async def pieces(requests: list[Request]) -> AsyncIterator[tuple[int, str | Completion]]:
    """Yields each request's pieces of text as they are drawn, with its index, and at its end its `Completion`."""
    found: asyncio.Queue[tuple[int, str | Completion | Exception]] = asyncio.Queue()

    async def read(at: int, request: Request) -> None:
        try:
            async for piece in request:
                await found.put((at, piece))
            completion = await result_of(request.future)
            await found.put((at, completion))
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
