"""Endpoints /tokenize and /detokenize in vLLM's form: texts or chats to token ids, token ids to text."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from jaxkv._errors import require
from jaxkv.serving.errors import HttpError
from jaxkv.serving.schemas import Body, Ids, Messages
from jaxkv.serving.service import Served
from jaxkv.text.chat import Chat
from jaxkv.text.shown import decode_token_texts

routes = APIRouter()


class TokenizeBody(Body):
    """Body of POST /tokenize: a text, or messages, whose special tokens are those of the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Body of POST /detokenize: token ids."""

    model: str | None = None
    tokens: Ids


@routes.post("/tokenize", summary="Tokenize a text or a chat")
def tokenize(body: TokenizeBody, request: HttpRequest, service: Served) -> dict[str, Any]:
    """Return JSON of the token ids of a text, or of messages in the chat template, with their number and texts."""
    engine = service.models[service.resolve_model_id(body.model)]
    tokenizer = engine.session.params.text
    assert tokenizer is not None
    if body.prompt is not None and body.messages is None:
        ids = tokenizer.encode(body.prompt, bos=body.add_special_tokens)
    elif body.messages is not None and body.prompt is None:
        request.state.record.prompt = "messages"
        chat = Chat(messages=[each.template_message for each in body.messages])
        given = tokenizer.shield_special_tokens(chat.template_inputs)
        written = tokenizer.render_chat(**given, generation_prompt=body.add_generation_prompt)
        ids = tokenizer.encode(written, bos=False, shielded=True)
    else:
        raise HttpError(400, "prompt: use either prompt or messages", param="prompt")
    texts = decode_token_texts(ids, tokenizer).texts if body.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": engine.limits.prompt + engine.limits.new,
        "tokens": ids,
        "token_strs": texts,
    }


@routes.post("/detokenize", summary="Convert token ids to text")
def detokenize(body: DetokenizeBody, service: Served) -> dict[str, str]:
    """Return JSON of the text of token ids, special tokens spelled out."""
    params = service.models[service.resolve_model_id(body.model)].session.params
    assert params.text is not None
    most, vocab = max(body.tokens), params.config.vocab
    require(most < vocab, "tokens", most, f"out of range: use ids in [0, {vocab})")
    return {"prompt": params.text.decode(body.tokens, skip_special=False)}
