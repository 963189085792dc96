"""`application`: OpenAI's HTTP interface to an engine, as an ASGI application of Starlette's."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxkv.serving.access import Access
from jaxkv.serving.bodies import ClientGone
from jaxkv.serving.completing import complete
from jaxkv.serving.engine import Engine
from jaxkv.serving.keeping import add_document, delete_document, list_documents, one_document
from jaxkv.serving.limits import Limits
from jaxkv.serving.openapi import description
from jaxkv.serving.refused import Refused, as_json, draining, json_bytes
from jaxkv.serving.service import Service

Endpoint = Callable[[Service, HttpRequest], Awaitable[Response]]


class Application(Access):
    """ASGI application of an engine; `service` has its state.

    Attributes:
        service: what all routes share.
    """

    def __init__(self, engine: Engine, *, name: str, limits: Limits | None = None):
        """Makes the application.

        Args:
            engine: the engine that answers; it is not closed.
            name: name of the model, as clients give it.
            limits: limits of a request; the usual ones if None.
        """
        self.service = Service(engine, name=name, limits=limits or Limits())
        handlers: Any = {Refused: _refused, HTTPException: _of_starlette, ClientGone: _gone, Exception: self._failed}
        inner = Starlette(routes=_routes(self.service), exception_handlers=handlers)
        inner.router.redirect_slashes = False
        super().__init__(inner, self.service)

    async def _failed(self, request: HttpRequest, error: Exception) -> Response:
        """Response to an error of the server's own."""
        return self.service.refusal_of(error, request.state.record).response()


def _routes(service: Service) -> list[Route]:
    """All routes."""
    described = json_bytes(description(service))

    async def openapi(service: Service, request: HttpRequest) -> Response:
        return Response(described, media_type="application/json")

    endpoints: list[tuple[str, str, Endpoint]] = [
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{id:path}", _model),
        ("POST", "/v1/completions", partial(complete, chat=False)),
        ("POST", "/v1/chat/completions", partial(complete, chat=True)),
        ("POST", "/v1/documents", add_document),
        ("GET", "/v1/documents", list_documents),
        ("GET", "/v1/documents/{id:path}", one_document),
        ("DELETE", "/v1/documents/{id:path}", delete_document),
        ("GET", "/health", _health),
        ("GET", "/metrics", _metrics),
        ("GET", "/openapi.json", openapi),
    ]
    by_path: dict[str, dict[str, Endpoint]] = {}
    for method, path, endpoint in endpoints:
        by_path.setdefault(path, {})[method] = endpoint
    return [Route(path, _one_of(service, methods), methods=list(methods)) for path, methods in by_path.items()]


def _one_of(service: Service, methods: dict[str, Endpoint]) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Function of a request that calls its method's endpoint."""

    async def endpoint(request: HttpRequest) -> Response:
        return await methods["GET" if request.method == "HEAD" else request.method](service, request)

    return endpoint


def _model_object(service: Service) -> dict[str, Any]:
    """OpenAI's object of the served model, with the most tokens of a prompt and of an answer."""
    limits = service.engine.limits
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "jaxkv",
        "max_prompt_tokens": limits.prompt,
        "max_question_tokens": limits.question,
        "max_tokens": limits.new,
    }


async def _models(service: Service, request: HttpRequest) -> Response:
    """GET /v1/models: a list of the one model."""
    return as_json({"object": "list", "data": [_model_object(service)]})


async def _model(service: Service, request: HttpRequest) -> Response:
    """GET /v1/models/{id}: the model, or 404."""
    service.require_model(request.path_params["id"])
    return as_json(_model_object(service))


async def _health(service: Service, request: HttpRequest) -> Response:
    """GET /health: 200, or 503 while the server drains or after its engine has failed."""
    if service.draining:
        raise draining()
    if service.engine.error is not None:
        raise Refused(503, "the engine has failed: start the server again", code="engine_failed")
    return as_json({"status": "ok"})


async def _metrics(service: Service, request: HttpRequest) -> Response:
    """GET /metrics: Prometheus' text format."""
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _refused(request: HttpRequest, error: Refused) -> Response:
    """Response of a refusal."""
    return error.response()


async def _gone(request: HttpRequest, error: ClientGone) -> Response:
    """Response to a client that has gone: nobody reads it, the log has its status."""
    return Refused(499, "the client closed the connection", code="client_gone").response()


async def _of_starlette(request: HttpRequest, error: HTTPException) -> Response:
    """Response to a path or a method that is not there, in OpenAI's form."""
    known = {
        404: ("there is no such page", "not_found"),
        405: (f"{request.method[:20]}: this page has other methods", "method_not_allowed"),
    }
    told, code = known.get(error.status_code, (error.detail, None))
    return Refused(error.status_code, told, code=code, headers=error.headers).response()
