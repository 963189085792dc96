"""OpenAPI description of the HTTP interface, made of the forms by which bodies are read."""

from collections.abc import Iterable
from typing import Any

from jaxkv.serving.service import Service

_ERRORS = {
    400: "A field is wrong; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, document or page.",
    405: "The page has other methods.",
    408: "The body took too long to arrive.",
    410: "The document's saved cache is damaged or gone.",
    413: "The body is too long.",
    415: "The body is not called JSON.",
    429: "The queue is full; try again after `Retry-After` seconds.",
    503: "The server is ending, or its engine has failed.",
    504: "The answer was not complete in time.",
}
_ANY_POST = (400, 401, 404, 408, 410, 413, 415, 429, 503, 504)


def description(service: Service) -> dict[str, Any]:
    """OpenAPI 3.1 description of all pages."""
    return {
        "openapi": "3.1.0",
        "info": {"title": f"jaxkv: {service.name}", "version": "1"},
        "paths": {
            "/": {
                "get": {
                    "summary": "A page to compress a document, see what is kept of it, and ask",
                    "responses": _answers({"text/html": {"schema": {"type": "string"}}}, ()),
                }
            },
            "/v1/models": {"get": _page("List the models", _object("data"), (401,))},
            "/v1/models/{id}": {
                "get": _page("Look at a model", _object("id"), (401, 404), named=True)
            },
            "/v1/completions": {"post": _completion(service, "/v1/completions")},
            "/v1/chat/completions": {"post": _completion(service, "/v1/chat/completions")},
            "/v1/documents": {
                "post": _page("Compress a document", _DOCUMENT, _ANY_POST)
                | _body(service, "/v1/documents"),
                "get": _page("List documents", _object("data"), (401,)),
            },
            "/v1/documents/{id}": {
                "get": _page("Look at a document", _DOCUMENT, (401, 404), named=True),
                "delete": _page(
                    "Delete a document", _object("id", "deleted"), (401, 404, 503), named=True
                ),
            },
            "/v1/documents/{id}/kept": {
                "get": _page(
                    "See which tokens are kept",
                    _KEPT,
                    (400, 401, 404),
                    named=True,
                    query=("layer", "head"),
                )
            },
            "/health": {"get": _page("Whether requests are taken", _object("status"), (503,))},
            "/metrics": {
                "get": {
                    "summary": "Prometheus metrics",
                    "responses": _answers({"text/plain": {"schema": {"type": "string"}}}, (401,)),
                }
            },
        },
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}] if service.limits.api_key is not None else [],
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_DOCUMENT = {
    "type": "object",
    "required": ["id", "object", "model", "tokens", "rows", "bytes", "kept_bytes", "full_bytes"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "document"},
        "model": {"type": "string"},
        "tokens": {"type": "integer"},
        "rows": {"type": "number"},
        "bytes": {"type": "integer"},
        "kept_bytes": {"type": "integer"},
        "full_bytes": {"type": "integer"},
    },
}
_WHOLE = {"type": "integer", "minimum": 0}
_KEPT = {
    "type": "object",
    "required": [
        "id",
        "object",
        "model",
        "layers",
        "heads",
        "layer",
        "head",
        "pairs",
        "pieces",
        "special",
        "kept",
    ],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "document.kept"},
        "model": {"type": "string"},
        "layers": _WHOLE,
        "heads": _WHOLE,
        "layer": {"anyOf": [_WHOLE, {"type": "null"}]},
        "head": {"anyOf": [_WHOLE, {"type": "null"}]},
        "pairs": _WHOLE,
        "pieces": {"type": "array", "items": {"type": "string"}},
        "special": {"type": "array", "items": _WHOLE},
        "kept": {"type": "array", "items": _WHOLE},
        "merges": {"type": "boolean"},
        "chooses": {"type": "boolean"},
    },
}


def _object(*names: str) -> dict[str, Any]:
    """Schema of an object that has these fields, and others."""
    return {"type": "object", "required": list(names)}


def _answers(content: dict[str, Any], statuses: Iterable[int]) -> dict[str, Any]:
    """Responses: 200 with `content`, and errors."""
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    told = {
        str(status): {"description": _ERRORS[status], "content": error}
        for status in sorted({405, *statuses})
    }
    return {"200": {"description": "Done.", "content": content}, **told}


def _page(
    about: str,
    schema: dict[str, Any],
    statuses: Iterable[int],
    *,
    named: bool = False,
    query: Iterable[str] = (),
) -> dict[str, Any]:
    """Description of one method of one page; `query` names whole numbers that may stand behind its question mark."""
    inside = {
        "name": "id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
    numbers = [{"name": name, "in": "query", "required": False, "schema": _WHOLE} for name in query]
    answers = _answers({"application/json": {"schema": schema}}, statuses)
    return {
        "summary": about,
        "responses": answers,
        **({"parameters": [inside, *numbers]} if named else {}),
    }


def _body(service: Service, path: str) -> dict[str, Any]:
    """Description of a body, by its form."""
    content = {"application/json": {"schema": service.forms[path].schema()}}
    return {"requestBody": {"required": True, "content": content}}


def _completion(service: Service, path: str) -> dict[str, Any]:
    """Description of a page of completions: an object, or events."""
    content = {
        "application/json": {"schema": _object("id", "object", "choices", "usage")},
        "text/event-stream": {},
    }
    return {"summary": "Answer a prompt", "responses": _answers(content, _ANY_POST)} | _body(
        service, path
    )
