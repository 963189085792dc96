"""Writers of replies: `ReplyWriter` in the form of OpenAI's completions, `TranslatingWriter` in one of forms.json."""

import json
from pathlib import Path
from typing import Any

from jaxkv.serving.errors import HttpError
from jaxkv.serving.schemas import ChatBody, ChatPiece, Reply, Usage

# Shapes of other APIs' answers and events: "$name" at the end of a text stands for a value, or for another shape.
_FORMS = json.loads(Path(__file__).with_name("forms.json").read_text("utf-8"))


class ReplyWriter:
    """Writer of one body's answers as OpenAI's (chat) completion, or as its chunks in a stream."""

    def write_reply(self, reply: Reply) -> Any:
        """Return the response to a body that requests no stream."""
        return reply

    def write_chunk(self, chunk: Reply) -> bytes:
        """Return a chunk of a stream as server-sent events."""
        return _format_sse_event(chunk.model_dump_json(exclude_unset=True).encode())

    def write_end(self, usage: Usage) -> bytes:
        """Return the last events of a complete stream, with token counts if the API sends them here."""
        return _format_sse_event(b"[DONE]")

    def write_error(self, error: HttpError) -> bytes:
        """Return the last event of a stream that an error ends."""
        return _format_sse_event(bytes(error.make_json_response().body))


class TranslatingWriter(ReplyWriter):
    """Writer of the one answer to a chat in another API's form, of which forms.json has the shapes.

    Calls of tools would be further events: a piece of a call is like a piece of text.
    """

    def __init__(self, form: str, body: ChatBody):
        """Create the writer of one answer in a form of forms.json, which may repeat fields of the body."""
        self._form = _FORMS[form]
        self._shapes = self._form | self._form["states"]["began"]
        self._values = {**vars(body), "number": 0, "text": ""}
        self._end: Any = None

    def write_reply(self, reply: Reply) -> Any:
        """Return the API's object of an answer to a chat."""
        self._end = reply.choices[0]
        self._values |= vars(reply) | {"text": self._end.message["content"]}
        self._note_end(reply.usage)
        return self._fill_shape("$answer")

    def write_chunk(self, chunk: Reply) -> bytes:
        """Return the API's events of a chunk: those of the start, if it is the first, and of its text."""
        sent = b""
        if self._end is None:
            self._values |= vars(chunk)
            sent += self._write_events("started")
        for choice in chunk.choices:
            assert isinstance(choice, ChatPiece)
            self._end = choice
            piece = choice.delta.get("content")
            if piece:
                self._values |= {"piece": piece, "text": self._values["text"] + piece}
                sent += self._write_events("continued")
        return sent

    def write_end(self, usage: Usage) -> bytes:
        """Return the API's events of the end, with token counts."""
        self._note_end(usage)
        return self._write_events("ended")

    def write_error(self, error: HttpError) -> bytes:
        """Return the API's event of an error that ends a stream."""
        self._values |= error.make_error_body()["error"] | error.make_anthropic_error_body()
        return self._write_events("failed")

    def _note_end(self, usage: Usage | None) -> None:
        """Note how the answer ended, with token counts, and the shapes of that state."""
        assert usage is not None
        met, cached = self._end.stop_reason, usage.prompt_tokens_details["cached_tokens"]
        state = self._end.finish_reason if met is None else "stop_string"
        self._shapes = self._form | self._form["states"][state]
        counts = {"cached_tokens": cached, "uncached_tokens": usage.prompt_tokens - cached}
        self._values |= vars(usage) | counts | {"stop_string": met}

    def _write_events(self, phase: str) -> bytes:
        """Return the form's events of a phase of the stream, each with the next number."""
        sent = b""
        for shape in self._form[phase]:
            event = self._fill_shape(shape)
            self._values["number"] += 1
            sent += f"event: {event['type']}\n".encode()
            sent += _format_sse_event(json.dumps(event).encode())
        return sent

    def _fill_shape(self, shape: Any) -> Any:
        """Return a shape of JSON with each "$name" in it replaced by the value, or the filled shape, of that name."""
        match shape:
            case dict():
                return {name: self._fill_shape(each) for name, each in shape.items()}
            case list():
                return [self._fill_shape(each) for each in shape]
            case str() if "$" in shape:
                prefix, _, name = shape.partition("$")
                known = name in self._values
                found = self._values[name] if known else self._fill_shape(self._shapes[name])
                return prefix + found if prefix else found
        return shape


def _format_sse_event(data: bytes) -> bytes:
    """Return bytes of JSON as a server-sent event: "data: ", the bytes and a blank line."""
    return b"data: " + data + b"\n\n"
