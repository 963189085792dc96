"""Routes /v1/documents: compress a document once, list, look at and delete documents."""

import asyncio
import contextlib
from concurrent.futures import Future
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxkv.serving.bodies import ClientGone, body_of, while_connected
from jaxkv.serving.completing import document_of
from jaxkv.serving.documents import Document
from jaxkv.serving.fields import strict_json
from jaxkv.serving.refused import Refused, as_json
from jaxkv.serving.replies import document_object
from jaxkv.serving.requests import result_of
from jaxkv.serving.service import Record, Service


async def add_document(service: Service, request: HttpRequest) -> Response:
    """POST: compresses a document; a client that goes away leaves none behind."""
    record: Record = request.state.record
    body = await body_of(request, service.limits)
    name = "text"
    try:
        given = await run_in_threadpool(_read, service, body)
        name = "text" if "text" in given else "messages"
        submit = service.engine.submit_document
        future = await run_in_threadpool(submit, given[name], raw=given.get("raw", False))
        async with asyncio.timeout(service.limits.seconds):
            document = await while_connected(request.receive, result_of(future))
    except Refused:
        raise
    except ClientGone:
        future.add_done_callback(lambda ended: _remove(service, ended))
        raise
    except Exception as error:
        if isinstance(error, TimeoutError):
            future.add_done_callback(lambda ended: _remove(service, ended))
        raise service.refusal_of(error, record, prompt=name) from error
    record.prompt_tokens, record.new_tokens = document.tokens, 0
    return as_json(document_object(document))


def _read(service: Service, body: bytes) -> dict[str, Any]:
    """Reads a body by its form; ValueError for both a text and messages."""
    given = service.forms["/v1/documents"].read(strict_json(body))
    service.require_model(given.get("model"))
    if "text" in given and "messages" in given:
        raise ValueError("text=...: messages are given as well: give one of them")
    return given


def _remove(service: Service, ended: Future[Document]) -> None:
    """Removes a document that nobody waits for any more."""
    if ended.exception() is None:
        with contextlib.suppress(ValueError):
            service.engine.documents.remove(ended.result().id)


async def list_documents(service: Service, request: HttpRequest) -> Response:
    """GET: all documents, in order of their ids."""
    return as_json({"object": "list", "data": [document_object(each) for each in service.engine.documents.all()]})


async def one_document(service: Service, request: HttpRequest) -> Response:
    """GET: one document."""
    return as_json(document_object(document_of(service, request.path_params["id"])))


async def delete_document(service: Service, request: HttpRequest) -> Response:
    """DELETE: removes a document from the device and the disk."""
    name = document_of(service, request.path_params["id"]).id
    try:
        await run_in_threadpool(service.engine.documents.remove, name)
    except ValueError as error:
        # Somebody else was faster.
        raise Refused(404, str(error), param="document", code="document_not_found") from None
    return as_json({"id": name, "object": "document", "deleted": True})
