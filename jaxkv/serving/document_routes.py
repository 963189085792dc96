"""Endpoints /v1/documents: compress a document once, list, describe and delete documents, show kept tokens."""

import contextlib
from concurrent.futures import Future
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest

from jaxkv.serving.document_store import Document
from jaxkv.serving.engine import Engine
from jaxkv.serving.errors import ClientDisconnected, HttpError
from jaxkv.serving.requests import await_future
from jaxkv.serving.schemas import DocumentBody, KeptQuery
from jaxkv.serving.service import RequestRecord, Served
from jaxkv.serving.submission import await_while_connected
from jaxkv.text.shown import decode_token_texts

routes = APIRouter(prefix="/v1/documents")


@routes.post("", summary="Compress a document")
async def create_document(
    body: DocumentBody, request: HttpRequest, service: Served
) -> dict[str, Any]:
    """Compress a text or chat, return the document's JSON object; if the client disconnects, cancel or remove it."""
    record: RequestRecord = request.state.record
    if (body.text is None) == (body.messages is None):
        raise HttpError(400, "text: use either text or messages", param="text")
    record.prompt = "text" if body.messages is None else "messages"
    record.model = service.resolve_model_id(body.model)
    engine = service.models[record.model]
    future = await run_in_threadpool(
        engine.submit_document,
        body.text if body.messages is None else [each.template_message for each in body.messages],
        raw=body.raw,
        budget=body.budget,
        deadline=service.limits.seconds,
        owner=record.client,
    )
    try:
        document = await await_while_connected(request.receive, await_future(future))
        # It may have left just as the document was done; nobody else knows the id.
        if await request.is_disconnected():
            raise ClientDisconnected
    except ClientDisconnected:
        if not future.cancel():
            future.add_done_callback(lambda ended: _remove_abandoned_document(engine, ended))
        raise
    record.prompt_tokens, record.new_tokens = document.tokens, 0
    return make_document_object(document, record.model)


def make_document_object(document: Document, model: str) -> dict[str, Any]:
    """Return a document's JSON object: id, model, token count, mean entries per kv head and layer, sizes in bytes.

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


def _remove_abandoned_document(engine: Engine, ended: Future[Document]) -> None:
    """Remove the document of a completed future whose client has disconnected; nothing if the future failed."""
    if ended.exception() is None:
        with contextlib.suppress(ValueError):
            engine.documents.remove_document(ended.result().id)


@routes.get("", summary="List documents")
def list_documents(request: HttpRequest, service: Served) -> dict[str, Any]:
    """Return a JSON list object with the client's document objects of all models, in order of their ids."""
    found = [
        make_document_object(each, model)
        for model, engine in service.models.items()
        for each in engine.documents.get_documents()
        if each.is_visible_to(request.state.record.client)
    ]
    return {"object": "list", "data": sorted(found, key=lambda each: each["id"])}


@routes.get("/{id}", summary="Describe a document")
def describe_document(id: str, request: HttpRequest, service: Served) -> dict[str, Any]:
    """Return a document's JSON object: its model, token count, entries and bytes; 404 for an unknown id."""
    model, document = service.find_model_and_document(id, request.state.record.client)
    return make_document_object(document, model)


@routes.get("/{id}/kept", summary="Show the kept tokens")
def show_kept_tokens(
    id: str, where: Annotated[KeptQuery, Query()], request: HttpRequest, service: Served
) -> dict[str, Any]:
    """Return JSON of a document's token texts, and how many kv heads keep each: of all, or the URL's layer or head."""
    model, document = service.find_model_and_document(id, request.state.record.client)
    kept, session = document.kept, service.models[model].session
    (layers, heads, _), layer, head = kept.bits.shape, where.layer, where.head
    if layer is not None and layer >= layers:
        raise HttpError(400, f"layer={layer}: out of range: use one below {layers}", param="layer")
    if head is not None and (layer is None or head >= heads):
        remedy = f"not a head of a layer: give layer as well, and a head below {heads}"
        raise HttpError(400, f"head={head}: {remedy}", param="head")
    text = session.params.text
    assert text is not None
    pieces, parts = decode_token_texts(kept.ids.tolist(), text), session.policy.build_policy_parts()
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
        "chooses": not parts.read.reads_all_entries,
    }


@routes.delete("/{id}", summary="Delete a document")
def delete_document(id: str, request: HttpRequest, service: Served) -> dict[str, Any]:
    """Remove a document from the device and the disk; return its id and `deleted`; 404 for an unknown id."""
    model, document = service.find_model_and_document(id, request.state.record.client)
    service.models[model].documents.remove_document(document.id)
    return {"id": document.id, "object": "document", "deleted": True}
