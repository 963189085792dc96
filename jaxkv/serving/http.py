"""`Application`: OpenAI's HTTP interface to engines, as an ASGI application of Starlette's."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxkv._values import brief
from jaxkv.serving.access import Access
from jaxkv.serving.bodies import ClientGone
from jaxkv.serving.completing import complete
from jaxkv.serving.engine import Engine
from jaxkv.serving.given import takes_own_budget
from jaxkv.serving.keeping import (
    add_document,
    delete_document,
    kept_of_document,
    list_documents,
    one_document,
)
from jaxkv.serving.limits import Limits
from jaxkv.serving.openapi import description
from jaxkv.serving.page import page
from jaxkv.serving.refused import Refused, as_json, draining, json_bytes
from jaxkv.serving.service import Service

Endpoint = Callable[[Service, HttpRequest], Awaitable[Response]]


class Application(Access):
    """ASGI application of one or several engines; `service` has its state.

    Attributes:
        service: what all routes share.
    """

    def __init__(self, models: Mapping[str, Engine], *, limits: Limits | None = None):
        """Makes the application.

        Args:
            models: engines by the model ids that clients give; they are not closed. Bodies that name none are the
                first's.
            limits: limits of a request; the usual ones if None.
        """
        self.service = Service(models, limits=limits or Limits())
        handlers: Any = {
            Refused: _refused,
            HTTPException: _of_starlette,
            ClientGone: _gone,
            Exception: self._failed,
        }
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
        ("GET", "/", page),
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{id:path}", _model),
        ("POST", "/v1/completions", partial(complete, chat=False)),
        ("POST", "/v1/chat/completions", partial(complete, chat=True)),
        ("POST", "/v1/documents", add_document),
        ("GET", "/v1/documents", list_documents),
        ("GET", "/v1/documents/{id}/kept", kept_of_document),
        ("GET", "/v1/documents/{id:path}", one_document),
        ("DELETE", "/v1/documents/{id:path}", delete_document),
        ("GET", "/health", _health),
        ("GET", "/metrics", _metrics),
        ("GET", "/openapi.json", openapi),
    ]
    by_path: dict[str, dict[str, Endpoint]] = {}
    for method, path, endpoint in endpoints:
        by_path.setdefault(path, {})[method] = endpoint
    return [
        Route(path, _one_of(service, methods), methods=list(methods))
        for path, methods in by_path.items()
    ]


def _one_of(
    service: Service, methods: dict[str, Endpoint]
) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Function of a request that calls its method's endpoint."""

    async def endpoint(request: HttpRequest) -> Response:
        return await methods["GET" if request.method == "HEAD" else request.method](
            service, request
        )

    return endpoint


def _model_object(service: Service, name: str) -> dict[str, Any]:
    """OpenAI's object of a model, with its policy and the most tokens of a prompt and of an answer.

    `own_budget` says whether requests and documents may have a smaller budget of their own, `full_cache` whether every
    row is kept and read.
    """
    engine = service.models[name]
    limits, policy = engine.limits, engine.session.policy
    parts = policy.parts()
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jaxkv",
        "policy": brief(policy),
        "budget": None if parts.budget is None else parts.budget.given,
        "own_budget": takes_own_budget(policy),
        "full_cache": parts.scorer is None and parts.read is None,
        "max_prompt_tokens": limits.prompt,
        "max_question_tokens": limits.question,
        "max_tokens": limits.new,
    }


async def _models(service: Service, request: HttpRequest) -> Response:
    """GET /v1/models: a list of all models, the first one first."""
    return as_json(
        {"object": "list", "data": [_model_object(service, name) for name in service.models]}
    )


async def _model(service: Service, request: HttpRequest) -> Response:
    """GET /v1/models/{id}: the model, or 404."""
    return as_json(_model_object(service, service.model(request.path_params["id"])))


async def _health(service: Service, request: HttpRequest) -> Response:
    """GET /health: 200, or 503 while the server drains or after its engine has failed."""
    if service.draining:
        raise draining()
    failed = [name for name, engine in service.models.items() if engine.error is not None]
    if failed:
        message = f"the engine of {', '.join(failed)} has failed: start the server again"
        raise Refused(503, message, code="engine_failed")
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
