"""OpenAI's response objects of completions: whole ones, and the chunks of a stream as server-sent events."""

import secrets
import time
from typing import Any

from jaxkv.results import Completion
from jaxkv.serving.documents import Document
from jaxkv.serving.refused import json_bytes
from jaxkv.serving.requests import Request

DONE = b"data: [DONE]\n\n"


class Replies:
    """Makes the objects that answer one body: they share an id, a time and the model's name.

    Attributes:
        chat: True for /v1/chat/completions, False for /v1/completions.
        usage: True if the chunks of the stream end with numbers of tokens.
    """

    def __init__(self, *, chat: bool, model: str, usage: bool):
        """Draws the id."""
        self.chat, self.usage = chat, usage
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._shared = {"id": self._id, "created": int(time.time()), "model": model}

    def whole(self, completions: list[Completion], usage: dict[str, Any]) -> dict[str, Any]:
        """The object of a complete answer."""
        choices = [self._choice(at, each) for at, each in enumerate(completions)]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._shared, "object": kind, "choices": choices, "usage": usage}

    def opening(self, at: int) -> bytes:
        """Event that begins answer `at` of a chat; nothing for texts."""
        return self._chunk(at, {"role": "assistant", "content": ""}, None) if self.chat else b""

    def piece(self, at: int, text: str) -> bytes:
        """Event with a piece of answer `at`."""
        return self._chunk(at, {"content": text} if self.chat else text, None)

    def end(self, at: int, completion: Completion) -> bytes:
        """Event that says why answer `at` ended."""
        return self._chunk(at, {} if self.chat else "", completion.finish_reason)

    def total(self, usage: dict[str, Any]) -> bytes:
        """Event with the stream's numbers of tokens, if they were asked for; nothing else."""
        return (
            event({**self._shared, "object": self._kind, "choices": [], "usage": usage})
            if self.usage
            else b""
        )

    @property
    def _kind(self) -> str:
        """OpenAI's name of a chunk."""
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, at: int, said: Any, reason: str | None) -> bytes:
        """Event of one choice's chunk."""
        choice = {
            "index": at,
            "delta" if self.chat else "text": said,
            "logprobs": None,
            "finish_reason": reason,
        }
        usage = {"usage": None} if self.usage else {}
        return event({**self._shared, "object": self._kind, "choices": [choice], **usage})

    def _choice(self, at: int, completion: Completion) -> dict[str, Any]:
        """One choice of a complete answer."""
        text = completion.text or ""
        message = {"role": "assistant", "content": text, "refusal": None}
        said = {"message": message} if self.chat else {"text": text}
        return {"index": at, **said, "logprobs": None, "finish_reason": completion.finish_reason}


def usage_of(requests: list[Request], n: int, document: Document | None) -> dict[str, Any]:
    """OpenAI's numbers of tokens of answered requests: each prompt once for its `n` answers, a document as cached."""
    stats = [request.stats for request in requests if request.stats is not None]
    cached = 0 if document is None else document.tokens * len(stats[::n])
    prompt = cached + sum(each.prompt_tokens for each in stats[::n])
    new = sum(each.new_tokens for each in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def document_object(document: Document, model: str) -> dict[str, Any]:
    """The object of a document of a model: its id, tokens, rows per kv head and layer, bytes on the device.

    `kept_bytes` are those of the kept entries alone, `full_bytes` those of the entries of an uncompressed cache.
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


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event of one JSON object."""
    return b"data: " + json_bytes(value) + b"\n\n"
