"""`HttpApplication`: OpenAI's HTTP interface to engines, as a FastAPI application."""

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from jaxkv._checks import format_non_default_fields
from jaxkv.serving import completing, document_routes, other_apis, tokenizing
from jaxkv.serving.access import AccessMiddleware
from jaxkv.serving.engine import Engine
from jaxkv.serving.errors import HttpError, make_draining_error
from jaxkv.serving.given import supports_request_budget
from jaxkv.serving.limits import RequestLimits
from jaxkv.serving.schemas import ErrorBody
from jaxkv.serving.service import Served, ServerState
from jaxkv.serving.web_page import serve_web_page

routes = APIRouter()
routes.get("/", summary="Compress a document and ask", response_class=HTMLResponse)(serve_web_page)


class HttpApplication(AccessMiddleware):
    """ASGI application of one or several engines: OpenAI's endpoints, documents, metrics, and the web page.

    Attributes:
        service: state that all routes share.
    """

    def __init__(self, models: Mapping[str, Engine], *, limits: RequestLimits | None = None):
        """Create the FastAPI application and its routes, inside the access middleware.

        Args:
            models: engines by model id; a body without an id uses the first. The caller closes them.
            limits: limits of a request; None for the defaults.
        """
        self.service = ServerState(models, limits=limits or RequestLimits())
        caught = (HttpError, RequestValidationError, HTTPException, Exception)
        inner = FastAPI(
            title=f"jaxkv: {self.service.name}",
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            exception_handlers=dict.fromkeys(caught, self._make_error_response),
            responses={"default": {"model": ErrorBody, "description": "An error"}},
        )
        inner.state.service = self.service
        for each in (completing, other_apis, document_routes, tokenizing):
            inner.include_router(each.routes)
        inner.include_router(routes)
        super().__init__(inner, self.service)

    async def _make_error_response(self, request: HttpRequest, error: Exception) -> Response:
        """Convert a route's error to an HTTP response in its API's form; record where an internal one was raised."""
        return self.service.convert_and_record_error(
            error, request.state.record
        ).make_json_response(request.scope["path"])


def _make_model_object(service: ServerState, name: str) -> dict[str, Any]:
    """Return OpenAI's object of a model, with policy, budget, and maximum tokens of a prompt, a question and an answer.

    `own_budget` says whether requests and documents may have a smaller budget of their own. `full_cache` says whether
    every entry is kept and read.
    """
    engine = service.models[name]
    limits, policy = engine.limits, engine.session.policy
    parts = policy.build_policy_parts()
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jaxkv",
        "policy": format_non_default_fields(engine.policy),
        "budget": None if parts.budget is None else parts.budget.field_value,
        "own_budget": supports_request_budget(policy),
        "full_cache": parts.read.reads_all_entries and not parts.compresses_prompts,
        "max_prompt_tokens": limits.prompt,
        "max_question_tokens": limits.question,
        "max_tokens": limits.new,
        "max_model_len": limits.prompt + limits.new,
    }


@routes.get("/v1/models", summary="List the models")
async def list_models(service: Served) -> dict[str, Any]:
    """Return a JSON list object with OpenAI's object of each model, the default model first."""
    return {
        "object": "list",
        "data": [_make_model_object(service, name) for name in service.models],
    }


@routes.get("/v1/models/{id:path}", summary="Look at a model")
async def describe_model(id: str, service: Served) -> dict[str, Any]:
    """Return OpenAI's object of one model, with its policy and token limits; 404 for an unknown id."""
    return _make_model_object(service, service.resolve_model_id(id))


@routes.head("/health", include_in_schema=False)
@routes.get("/health", summary="Whether requests are accepted")
@routes.get("/ping")
@routes.post("/ping")
async def report_health(service: Served) -> dict[str, Any]:
    """Answer /health and /ping: status 200, or 503 while the server drains or after an engine has failed."""
    if service.draining:
        raise make_draining_error()
    failed = [name for name, engine in service.models.items() if engine.error is not None]
    if failed:
        message = f"the engine of {', '.join(failed)} has failed: restart the server"
        raise HttpError(503, message, code="engine_failed")
    return {"status": "ok"}


@routes.get("/version")
async def report_version() -> dict[str, str]:
    """Return JSON with the version of jaxkv."""
    return {"version": metadata.version("jaxkv")}


@routes.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
def export_metrics(service: Served) -> Response:
    """Return an HTTP response with all metrics of the server, in Prometheus' text format."""
    return Response(
        service.metrics.format_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8"
    )
