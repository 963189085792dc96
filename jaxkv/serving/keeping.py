"""Routes /v1/documents: compress a document once, list, look at and delete documents, and see what is kept of one."""

import contextlib
import re
from concurrent.futures import Future
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxkv.serving.bodies import ClientGone, body_of, while_connected
from jaxkv.serving.documents import Document, UnknownDocument
from jaxkv.serving.engine import Engine
from jaxkv.serving.fields import strict_json
from jaxkv.serving.refused import Refused, as_json, refused_by
from jaxkv.serving.replies import document_object
from jaxkv.serving.requests import result_of
from jaxkv.serving.service import Record, Service
from jaxkv.text.pieces import pieces_of


async def add_document(service: Service, request: HttpRequest) -> Response:
    """POST: compresses a document; a client that goes away leaves none behind."""
    record: Record = request.state.record
    body = await body_of(request, service.limits)
    name = "text"
    try:
        given = await run_in_threadpool(_read, service, body)
        name = "text" if "text" in given else "messages"
        record.model = service.model(given.get("model"))
        engine = service.models[record.model]
        options = {
            "raw": given.get("raw", False),
            "budget": given.get("budget"),
            "deadline": service.limits.seconds,
        }
        future = await run_in_threadpool(engine.submit_document, given[name], **options)
        document = await while_connected(request.receive, result_of(future))
    except Refused:
        raise
    except ClientGone:
        if not future.cancel():
            future.add_done_callback(lambda ended: _remove(engine, ended))
        raise
    except Exception as error:
        raise service.refusal_of(error, record, prompt=name) from error
    record.prompt_tokens, record.new_tokens = document.tokens, 0
    return as_json(document_object(document, record.model))


def _read(service: Service, body: bytes) -> dict[str, Any]:
    """Reads a body by its form; ValueError for both a text and messages."""
    given = service.forms["/v1/documents"].read(strict_json(body))
    if "text" in given and "messages" in given:
        raise ValueError("text=...: messages are given as well: give one of them")
    return given


def _remove(engine: Engine, ended: Future[Document]) -> None:
    """Removes a document that nobody waits for any more."""
    if ended.exception() is None:
        with contextlib.suppress(ValueError):
            engine.documents.remove(ended.result().id)


async def list_documents(service: Service, request: HttpRequest) -> Response:
    """GET: all documents, in order of their ids."""
    found = [
        (each, model) for model, engine in service.models.items() for each in engine.documents.all()
    ]
    objects = [
        document_object(each, model) for each, model in sorted(found, key=lambda pair: pair[0].id)
    ]
    return as_json({"object": "list", "data": objects})


async def one_document(service: Service, request: HttpRequest) -> Response:
    """GET: one document."""
    model, document = service.document(request.path_params["id"])
    return as_json(document_object(document, model))


async def kept_of_document(service: Service, request: HttpRequest) -> Response:
    """GET: texts of a document's tokens, and the number of (layer, kv head) pairs that keep each token's row."""
    model, document = service.document(request.path_params["id"])
    return as_json(await run_in_threadpool(_kept, service, model, document, request.query_params))


def _kept(service: Service, model: str, document: Document, query: QueryParams) -> dict[str, Any]:
    """The object of what is kept of a document, in one layer or one kv head of it if the query says so."""
    for name in query:
        if name not in ("layer", "head"):
            said = f"{name[:40]}: there is no such field here; there are layer, head"
            raise Refused(400, said, param=name[:40], code="invalid_value")
    kept, session = document.kept, service.models[model].session
    layer, head = _index(query, "layer", kept.layers), _index(query, "head", kept.heads)
    if layer is None and head is not None:
        raise Refused(
            400,
            f"head={head}: heads are those of a layer: give layer, too",
            param="head",
            code="invalid_value",
        )
    text = session.params.text
    assert text is not None
    pieces, parts = pieces_of(kept.ids.tolist(), text), session.policy.parts()
    return {
        "id": document.id,
        "object": "document.kept",
        "model": model,
        "layers": kept.layers,
        "heads": kept.heads,
        "layer": layer,
        "head": head,
        "pairs": (kept.layers if layer is None else 1) * (kept.heads if head is None else 1),
        "pieces": pieces.texts,
        "special": pieces.special,
        "kept": kept.counts(layer, head).tolist(),
        "merges": parts.merge is not None,
        "chooses": parts.read is not None,
    }


def _index(query: QueryParams, name: str, count: int) -> int | None:
    """The number of a query's field, from 0 to `count` - 1; None if it is left out; `Refused` 400 for anything else."""
    given = query.getlist(name)
    if not given:
        return None
    if len(given) == 1 and re.fullmatch("[0-9]{1,9}", given[0]) and int(given[0]) < count:
        return int(given[0])
    said = given[0][:40] if len(given) == 1 else f"{len(given)} numbers"
    raise Refused(
        400, f"{name}={said}: give one from 0 to {count - 1}", param=name, code="invalid_value"
    )


async def delete_document(service: Service, request: HttpRequest) -> Response:
    """DELETE: removes a document from the device and the disk."""
    model, document = service.document(request.path_params["id"])
    name = document.id
    try:
        await run_in_threadpool(service.models[model].documents.remove, name)
    except UnknownDocument as error:
        # Somebody else was faster.
        raise refused_by(error) from None
    return as_json({"id": name, "object": "document", "deleted": True})
