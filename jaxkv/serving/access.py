"""`Access`: ASGI layer around all routes: API key, draining, a line of log and a count for each request, faults."""

import hmac
import logging
import secrets
import time
import urllib.parse
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxkv.serving.refused import Refused, draining
from jaxkv.serving.service import Record, Service

LOG = logging.getLogger("jaxkv.serving")
_KNOWN = (
    "/",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/documents",
    "/health",
    "/metrics",
)
# Asked every few seconds by machines.
_QUIET = ("/health", "/metrics")


class Access:
    """ASGI application around another one: lets requests in, counts and logs them."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one HTTP request; passes anything else on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, service = Record(id=f"req-{secrets.token_hex(8)}"), self._service
        scope["state"] = {**scope.get("state", {}), "record": record}
        works = scope["path"].startswith("/v1/") and scope["method"] not in ("GET", "HEAD")

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)

        service.active += works
        try:
            refused = self._refusal(scope, works=works)
            app: Any = self._app if refused is None else refused.response()
            await app(scope, receive, noted)
        except Exception as error:
            # Starlette has answered, and raises the error again.
            record.status = service.refusal_of(error, record).status
        finally:
            service.active -= works
            service.metrics.ended(_route(scope["path"]), record.status or 499)
            _log(scope, record)

    def _refusal(self, scope: Scope, *, works: bool) -> Refused | None:
        """Refusal of a request before its body is read: 401 for a wrong key, 503 while draining; None for none."""
        key, path = self._service.limits.api_key, scope["path"]
        if key is not None and (path.startswith("/v1/") or path == "/metrics"):
            given = Headers(scope=scope).get("authorization", "")
            if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {key}".encode()):
                message = (
                    "the API key is missing or wrong: send the header Authorization: Bearer KEY"
                )
                return Refused(
                    401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
        return draining() if works and self._service.draining else None


def _route(path: str) -> str:
    """Route of a path, for the metrics: a few names, whatever clients send."""
    if path in _KNOWN:
        return path
    if path.startswith("/v1/documents/") and path.endswith("/kept"):
        return "/v1/documents/{id}/kept"
    parents = [known for known in ("/v1/models", "/v1/documents") if path.startswith(f"{known}/")]
    return f"{parents[0]}/{{id}}" if parents else "other"


def _log(scope: Scope, record: Record) -> None:
    """Writes one line of a request: id, method, path, status, tokens of prompt and answer, seconds; no text of it."""
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
        record.status or 499,
        *counts,
        time.monotonic() - record.begun,
    )
    if record.fault is not None:
        LOG.error("%s %s", record.id, record.fault)
