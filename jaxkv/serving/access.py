"""`AccessMiddleware`: ASGI middleware for all routes: API key, draining, body limits, request log and counts."""

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
import time
import urllib.parse

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxkv.serving.errors import ClientDisconnected, HttpError, make_draining_error
from jaxkv.serving.service import RequestRecord, ServerState

LOG = logging.getLogger("jaxkv.serving")
_QUIET = ("/health", "/ping", "/metrics")
# Paths besides /v1/ that need an API key.
_GUARDED = ("/metrics", "/tokenize", "/detokenize")


class AccessMiddleware:
    """ASGI middleware that checks the API key, draining and body limits, and counts and logs HTTP requests."""

    def __init__(self, app: ASGIApp, service: ServerState):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check an HTTP request; pass it on or answer an error; set `x-request-id`, count, log; other scopes pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, service = RequestRecord(id=_choose_request_id(scope)), self._service
        scope["state"] = {**scope.get("state", {}), "record": record}
        works = scope["path"].startswith("/v1/") and scope["method"] not in ("GET", "HEAD")

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)

        service.active += works
        try:
            self._check_admission(scope, record, works=works)
            # Load balancers send POST /ping without a body.
            reads = scope["method"] == "POST" and scope["path"] != "/ping"
            given = await self._read_body(scope, receive) if reads else receive
            # Starlette answers an unexpected error and then raises it again.
            with contextlib.suppress(Exception):
                await self._app(scope, given, noted)
        except HttpError as error:
            await error.make_json_response(scope["path"])(scope, receive, noted)
        except ClientDisconnected:
            pass  # the client cannot be answered
        finally:
            service.active -= works
            # A request rejected before routing has no route.
            route = getattr(scope.get("route"), "path_format", "other")
            service.metrics.count_http_request(route, record.status)
            _log_request(scope, record)

    def _check_admission(self, scope: Scope, record: RequestRecord, *, works: bool) -> None:
        """Note the client's name; raise `HttpError` 401 without a needed API key, 503 for new work while draining."""
        clients, path = self._service.limits.clients, scope["path"]
        if clients and (path.startswith("/v1/") or path in _GUARDED):
            headers = Headers(scope=scope)
            given = headers.get("authorization", "")
            if "x-api-key" in headers:
                given = f"Bearer {headers['x-api-key']}"
            # All keys are compared, so that the time tells nothing about them.
            names = [
                name
                for key, name in clients.items()
                if hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {key}".encode())
            ]
            if not names:
                message = "missing or wrong API key: send the header Authorization: Bearer KEY"
                wanted = {"WWW-Authenticate": "Bearer"}
                raise HttpError(401, message, code="invalid_api_key", headers=wanted)
            record.client = names[0]
        if works and self._service.draining:
            raise make_draining_error()

    async def _read_body(self, scope: Scope, receive: Receive) -> Receive:
        """Read a JSON body within its limits; return a receive function that replays it, then continues with `receive`.

        Raises `HttpError` 415 if the content type is not JSON, 413 if the body is too long, 408 if it is too slow.
        """
        headers, limits = Headers(scope=scope), self._service.limits
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Browsers send other content types across origins without a preflight request.
            said = f"content-type={kind[:100]!r}: send application/json"
            raise HttpError(415, said, code="unsupported_media_type")
        told, data, more = headers.get("content-length", "0"), bytearray(), True
        size = int(told[:16]) if told.isdecimal() else 0
        # A rejected body is not read to its end: the connection is closed instead.
        close = {"Connection": "close"}
        try:
            async with asyncio.timeout(limits.body_seconds):
                while more and size <= limits.body_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    data += message.get("body", b"")
                    more, size = message.get("more_body", False), max(size, len(data))
        except TimeoutError:
            said = f"the body was not complete after {limits.body_seconds:g} seconds"
            raise HttpError(408, said, code="body_timeout", headers=close) from None
        if size > limits.body_bytes:
            said = f"the body is longer than {limits.body_bytes} bytes: send a shorter one"
            raise HttpError(413, said, code="body_too_large", headers=close)
        whole = iter([{"type": "http.request", "body": bytes(data), "more_body": False}])

        async def given() -> Message:
            return next(whole, None) or await receive()

        return given


def _choose_request_id(scope: Scope) -> str:
    """Return the client's `x-request-id` if it is printable ASCII of at most 128 characters, else a new id."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if re.fullmatch("[ -~]{1,128}", given) else f"req-{secrets.token_hex(8)}"


def _log_request(scope: Scope, record: RequestRecord) -> None:
    """Log a line for an HTTP request: id, method, path, status, token counts, seconds; another for internal errors."""
    path = urllib.parse.quote(scope["path"][:100], errors="replace")
    counts = [
        "-" if count is None else str(count) for count in (record.prompt_tokens, record.new_tokens)
    ]
    LOG.log(
        logging.DEBUG if path in _QUIET else logging.INFO,
        "%s %s %s %s prompt_tokens=%s new_tokens=%s seconds=%.3f",
        record.id,
        scope["method"][:10],
        path,
        record.status,
        *counts,
        time.monotonic() - record.begun,
    )
    if record.fault:
        LOG.error("%s %s", record.id, record.fault)
