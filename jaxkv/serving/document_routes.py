"""Endpoints /v1/documents: compress a document once, list, describe and delete documents, show kept tokens."""

import contextlib
from concurrent.futures import Future
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest

from jaxkv.serving.document_store import Document
from jaxkv.serving.engine import Engine
from jaxkv.serving.errors import ClientGone, HttpError
from jaxkv.serving.requests import result_of
from jaxkv.serving.schemas import DocumentBody, KeptQuery
from jaxkv.serving.service import RequestLog, Served
from jaxkv.serving.submission import while_connected
from jaxkv.text.shown import pieces_of

routes = APIRouter(prefix="/v1/documents")


@routes.post("", summary="Compress a document")
async def add(body: DocumentBody, request: HttpRequest, service: Served) -> dict[str, Any]:
    """Compress a text or a chat; the document of a client that disconnects is removed."""
    record: RequestLog = request.state.record
    if (body.text is None) == (body.messages is None):
        raise HttpError(400, "text: use either text or messages", param="text")
    record.prompt = "text" if body.messages is None else "messages"
    record.model = service.model(body.model)
    engine = service.models[record.model]
    future = await run_in_threadpool(
        engine.submit_document,
        body.text if body.messages is None else [each.plain for each in body.messages],
        raw=body.raw,
        budget=body.budget,
        deadline=service.limits.seconds,
    )
    try:
        document = await while_connected(request.receive, result_of(future))
    except ClientGone:
        if not future.cancel():
            future.add_done_callback(lambda ended: _remove(engine, ended))
        raise
    record.prompt_tokens, record.new_tokens = document.tokens, 0
    return document_object(document, record.model)


def document_object(document: Document, model: str) -> dict[str, Any]:
    """Return the object of a document: its id, tokens, entries per kv head and layer, bytes on the device.

    `kept_bytes` is the size of the kept entries alone, `full_bytes` that of all entries of an uncompressed cache.
    """
    return {
        "id": document.id,
        "object": "document",
        "model": model,
        "tokens": document.tokens,
        "rows": document.rows,
        "bytes": document.nbytes,
        "kept_bytes": document.kept_nbytes,
        "full_bytes": document.full_nbytes,
    }


def _remove(engine: Engine, ended: Future[Document]) -> None:
    """Remove a document whose client has disconnected."""
    if ended.exception() is None:
        with contextlib.suppress(ValueError):
            engine.documents.remove(ended.result().id)


@routes.get("", summary="List documents")
def every(service: Served) -> dict[str, Any]:
    """List all documents, in order of their ids."""
    found = [
        document_object(each, model)
        for model, engine in service.models.items()
        for each in engine.documents.all()
    ]
    return {"object": "list", "data": sorted(found, key=lambda each: each["id"])}


@routes.get("/{id}", summary="Describe a document")
def one(id: str, service: Served) -> dict[str, Any]:
    """Describe one document."""
    model, document = service.document(id)
    return document_object(document, model)


@routes.get("/{id}/kept", summary="Show the kept tokens")
def kept(id: str, where: Annotated[KeptQuery, Query()], service: Served) -> dict[str, Any]:
    """Return the texts of a document's tokens, and how many (layer, kv head) pairs keep each."""
    model, document = service.document(id)
    kept, session = document.kept, service.models[model].session
    (layers, heads, _), layer, head = kept.bits.shape, where.layer, where.head
    if layer is not None and layer >= layers:
        raise HttpError(400, f"layer={layer}: out of range: use one below {layers}", param="layer")
    if head is not None and (layer is None or head >= heads):
        remedy = f"not a head of a layer: give layer as well, and a head below {heads}"
        raise HttpError(400, f"head={head}: {remedy}", param="head")
    text = session.params.text
    assert text is not None
    pieces, parts = pieces_of(kept.ids.tolist(), text), session.policy.parts()
    return {
        "id": document.id,
        "object": "document.kept",
        "model": model,
        "layers": layers,
        "heads": heads,
        "layer": layer,
        "head": head,
        "pairs": (layers if layer is None else 1) * (heads if head is None else 1),
        "pieces": pieces.texts,
        "special": pieces.special,
        "kept": kept.counts(layer, head).tolist(),
        "merges": parts.merge is not None,
        "chooses": not parts.read.everything,
    }


@routes.delete("/{id}", summary="Delete a document")
def delete(id: str, service: Served) -> dict[str, Any]:
    """Remove a document from the device and the disk."""
    model, document = service.document(id)
    service.models[model].documents.remove(document.id)
    return {"id": document.id, "object": "document", "deleted": True}
