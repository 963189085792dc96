"""Writers of replies: `ReplyWriter` in the form of OpenAI's completions, `TranslatingWriter` in one of forms.json."""

import json
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.serving.errors import HttpError
from jaxkv.serving.schemas import ChatPiece, Reply, Usage
from jaxkv.text.answer_parsing import Delta

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

    An answer has parts: sections of reasoning or text, and tool calls. Each is opened, continued and closed.
    """

    def __init__(self, form: str, repeated: Mapping[str, Any]):
        """Create the writer of one answer in a form of forms.json, which may repeat fields of the request."""
        self._form = _FORMS[form]
        self._state, self._kind = "began", ""
        self._values: dict[str, Any] = {**repeated, "number": 0, "items": []}
        self._end: Any = None

    def write_reply(self, reply: Reply) -> Any:
        """Return the API's object of an answer to a chat."""
        assert reply.usage is not None
        self._values |= vars(reply)
        self._end = reply.choices[0]
        self._write_delta(self._end.message)
        self.write_end(reply.usage)
        return self._fill_shape("$answer")

    def write_chunk(self, chunk: Reply) -> bytes:
        """Return the API's events of a chunk: those of the start, if it is the first, and of its delta."""
        sent = b""
        if self._end is None:
            self._values |= vars(chunk)
            sent += self._write_events("started")
        for choice in chunk.choices:
            assert isinstance(choice, ChatPiece)
            self._end = choice
            sent += self._write_delta(choice.delta)
        return sent

    def write_end(self, usage: Usage) -> bytes:
        """Return the API's events of the end, with token counts."""
        met, cached = self._end.stop_reason, usage.prompt_tokens_details["cached_tokens"]
        counts = {"cached_tokens": cached, "uncached_tokens": usage.prompt_tokens - cached}
        self._values |= vars(usage) | counts | {"stop_string": met}
        sent = self._close_part(self._end.finish_reason if met is None else "stop_string")
        return sent + self._write_events("ended")

    def write_error(self, error: HttpError) -> bytes:
        """Return the API's event of an error that ends a stream."""
        self._values |= error.make_error_body()["error"] | error.make_anthropic_error_body()
        return self._write_events("failed")

    def _write_delta(self, delta: Delta) -> bytes:
        """Return the form's events of a delta, or of a message, which is one large delta."""
        sent = b""
        for kind in ("reasoning_content", "content"):
            if piece := delta.get(kind):
                sent += b"" if kind == self._kind else self._open_part(kind)
                sent += self._continue_part(piece)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                named = {"call_id": call["id"], "name": function["name"]}
                sent += self._open_part("tool_calls", **named)
            if piece := function["arguments"]:
                sent += self._continue_part(piece)
        return sent

    def _open_part(self, kind: str, **named: str) -> bytes:
        """Return the events that close the open part and open one of a kind."""
        sent, items = self._close_part("stop"), self._values["items"]
        self._state, self._kind = "began", kind
        part = f"{self._values['id']}-{len(items)}"
        self._values |= {"at": len(items), "part": part, "text": "", **named}
        return sent + self._write_events("opened")

    def _continue_part(self, piece: str) -> bytes:
        """Return the events of a piece of the open part's text."""
        self._values |= {"piece": piece, "text": self._values["text"] + piece}
        return self._write_events("continued")

    def _close_part(self, state: str) -> bytes:
        """Return the events that close the open part, if any; `state` names how it, or the answer, ended."""
        self._state, sent = state, b""
        if self._kind:
            if self._kind == "tool_calls":
                self._values["arguments"] = json.loads(self._values["text"])
            sent = self._write_events("closed")
            self._values["items"] = [*self._values["items"], self._fill_shape("$item")]
        self._kind = ""
        return sent

    def _write_events(self, phase: str) -> bytes:
        """Return the form's events of a phase of the stream or of a part, each with the next number."""
        sent = b""
        for shape in self._get_shape(phase):
            event = self._fill_shape(shape)
            self._values["number"] += 1
            sent += f"event: {event['type']}\n".encode()
            sent += _format_sse_event(json.dumps(event).encode())
        return sent

    def _get_shape(self, name: str) -> Any:
        """Return the shape of a name: that of the open part's kind, else of the state, else of the form."""
        form = self._form
        return ChainMap(form["parts"].get(self._kind, {}), form["states"][self._state], form)[name]

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
                found = self._values[name] if known else self._fill_shape(self._get_shape(name))
                return prefix + found if prefix else found
        return shape


def _format_sse_event(data: bytes) -> bytes:
    """Return bytes of JSON as a server-sent event: "data: ", the bytes and a blank line."""
    return b"data: " + data + b"\n\n"
