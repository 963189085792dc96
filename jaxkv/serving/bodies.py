"""Reads an HTTP request's body within limits of type, bytes and time, and notices when its client goes away."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from jaxkv.serving.limits import Limits
from jaxkv.serving.refused import Refused

T = TypeVar("T")


class ClientGone(Exception):
    """Error that ends the work for a client that has closed its connection."""


async def body_of(request: HttpRequest, limits: Limits) -> bytes:
    """Reads the body; `Refused` 415 if it is not called JSON, 413 if it is too long, 408 if it takes too long."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A browser sends other types from any page without asking the server first.
        raise Refused(
            415,
            f"content-type={kind[:100]!r}: send application/json",
            code="unsupported_media_type",
        )
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and (len(told) > 15 or int(told) > limits.body_bytes):
        raise _too_long(limits)
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                data += piece
                if len(data) > limits.body_bytes:
                    raise _too_long(limits)
    except TimeoutError:
        message = f"the body was not complete after {limits.body_seconds:g} seconds"
        raise Refused(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(data)


def _too_long(limits: Limits) -> Refused:
    """The refusal of a body that is too long; the connection ends with it, for the rest is not read."""
    message = f"the body is longer than {limits.body_bytes} bytes: send a shorter one"
    return Refused(413, message, code="body_too_large", headers={"Connection": "close"})


async def gone(receive: Receive) -> None:
    """Returns once the client has closed the connection; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`; cancels it and raises `ClientGone` once the client closes the connection."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        # What is cancelled has ended before the connection is given back.
        await asyncio.gather(working, leaving, return_exceptions=True)
