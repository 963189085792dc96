"""Splits an answer into text, reasoning and tool calls, while it arrives in pieces, by the markers of its format."""

import dataclasses
import json
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.text.chat import Chat
from jaxkv.text.tokenizer import ChatTokenizer

_FORMATS = tomllib.loads(Path(__file__).with_name("answer_formats.toml").read_text("utf-8"))
PARSERS = {"tool_parser": ("auto", *_FORMATS), "reasoning_parser": ("auto", "none")}
_CONTENT, _REASONING, _CALL, _HEADER = "content", "reasoning_content", "call", "header"
# In harmony's format, the header of a section has a marker, and a text that shows the kind of the section.
_CHANNEL, _CONTROL = "<|channel|>", "<|"
_HEADER_SIGNS = {_CALL: "to=functions.", _REASONING: "analysis", _CONTENT: ""}
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_NAMED_CALL = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
# Models write line breaks into strings, which strict JSON escapes.
_JSON = json.JSONDecoder(strict=False)
# A piece of an answer as OpenAI's `delta`, with content, reasoning_content or tool_calls.
Delta = dict[str, Any]


@frozen_dataclass
class AnswerFormat:
    """Format of an answer: the markers of reasoning and tool calls, as in `answer_formats.toml`; by default, none.

    Attributes:
        markers: for each kind of section, the markers that end it, each with the kind that it begins; the answer
            begins with the first kind.
        initial: the markers that count only before other text.
        id_length: number of characters of a call's id.
        parallel: False to leave out all calls but the first.
        reasons: True if the prompt ends with the marker that begins reasoning.
        rules: rules of Lark for a content, a call and reasoning.
    """

    markers: Mapping[str, Mapping[str, str]]
    initial: Sequence[str] = ()
    id_length: int = 0
    parallel: bool = True
    reasons: bool = False
    rules: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts that the answer's text must keep, if they are special tokens."""
        return (_CHANNEL, *(marker for ends in self.markers.values() for marker in ends))


PLAIN = AnswerFormat(markers={_CONTENT: {}})


def choose_answer_format(
    text: ChatTokenizer, chat: Chat, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> AnswerFormat:
    """Choose the format of a model's answers to a chat, by the chat template or by name.

    Args:
        text: the model's tokenizer.
        chat: the prompt; without tools, answers have no tool calls.
        tool_parser: name of a format of tool calls, "auto" for the template's, or "none" for no calls.
        reasoning_parser: "auto" to split off reasoning by the template's markers, "none" to leave it in the text.

    Returns:
        The format.
    """
    source, name = text.template or "", tool_parser
    if name in ("auto", "none"):
        name = next(name for name, each in _FORMATS.items() if each["sign"] in source)
    table = _FORMATS[name]
    ends_reasoning = any(marker in source for marker in table["markers"][_REASONING])
    is_text = {
        _REASONING: reasoning_parser == "none" or not ends_reasoning,
        _CALL: tool_parser == "none" or not chat.tools,
    }
    markers = {
        kind: {marker: begun for marker, begun in ends.items() if not is_text.get(begun)}
        for kind, ends in table["markers"].items()
        if not is_text.get(kind)
    }
    begin = tuple(marker for marker, kind in markers[_CONTENT].items() if kind == _REASONING)
    prompt = text.render_chat(**chat.template_inputs, generation_prompt=True) if begin else ""
    return AnswerFormat(
        markers=markers,
        initial=table["initial"],
        id_length=table["id_length"],
        reasons=prompt.rstrip().endswith(begin),
        rules=table["rules"],
    )


class AnswerParser:
    """Incremental parser of one answer: text in, OpenAI's deltas out; malformed tool calls remain text.

    How the text is cut into pieces changes nothing but where deltas are cut.

    Attributes:
        message: OpenAI's message of the answer so far, with content, reasoning_content and tool_calls.
    """

    def __init__(self, format: AnswerFormat):
        """Start an answer of a format."""
        self._format = format
        self.message: Delta = {"role": "assistant", "content": "", "refusal": None}
        self._kind = _REASONING if format.reasons else next(iter(format.markers))
        # The text of the section that is left, and the marker or header before it.
        self._left = self._opening = ""
        # Whether whitespace is left out, as between sections.
        self._trims = len(format.markers) > 1

    def push_text(self, text: str) -> list[Delta]:
        """Add text of the answer; return the deltas that it completes."""
        self._left, deltas = self._left + text, list[Delta]()
        while (found := self._find_marker()) is not None:
            at, marker = found
            section, self._left = self._left[:at], self._left[at + len(marker) :]
            deltas += self._end_section(section, marker)
        if self._kind in (_CONTENT, _REASONING):
            # The end of the text may be the beginning of a marker.
            held = (
                length
                for marker in self._format.markers[self._kind]
                for length in range(1, len(marker))
                if self._left.endswith(marker[:length])
            )
            end = len(self._left) - max(held, default=0)
            deltas += self._pass_text(self._kind, self._left[:end])
            self._left = self._left[end:]
        return deltas

    def flush_text(self) -> list[Delta]:
        """End the answer; return the rest of its deltas."""
        return self._end_section(self._left, "")

    def rename_finish_reason(self, reason: str) -> str:
        """Return why the answer ended: "tool_calls" if it has calls and was not cut, else the given reason."""
        return "tool_calls" if reason == "stop" and "tool_calls" in self.message else reason

    def _find_marker(self) -> tuple[int, str] | None:
        """Return index and text of the first marker that ends the current section; None without one."""
        left, initial = self._left, self._format.initial
        found = (
            (at, marker)
            for marker in self._format.markers[self._kind]
            if (at := left.find(marker)) >= 0
            and (marker not in initial or (self._trims and not left[:at].strip()))
        )
        return min(found, default=None)

    def _end_section(self, text: str, marker: str) -> list[Delta]:
        """End a section with the rest of its text, at a marker or, if empty, the answer's end; return its deltas."""
        markers, ended, opening = self._format.markers, self._kind, self._opening
        self._kind, self._opening = markers[ended].get(marker, ended), marker
        if ended == _HEADER and marker:
            signs = _HEADER_SIGNS.items()
            self._kind = next(kind for kind, sign in signs if sign in text and kind in markers)
            self._opening, self._trims = text, True
            return []
        if ended == _HEADER:
            return [] if _CONTROL in text else self._pass_text(_CONTENT, text)
        if ended != _CALL:
            deltas = self._pass_text(ended, text)
            self._trims = self._trims or self._kind not in (ended, _CALL)
            return deltas
        try:
            calls = _parse_calls(opening, text)
        except (ValueError, TypeError, AttributeError, RecursionError):
            closing = "" if self._kind == _CALL else marker
            return self._pass_text(
                _CONTENT, text if _HEADER in markers else opening + text + closing
            )
        self._trims = True
        return [delta for call in calls for delta in self._pass_call(*call)]

    def _pass_text(self, kind: str, text: str) -> list[Delta]:
        """Return text of a kind as deltas, without whitespace between sections."""
        text = text.lstrip() if self._trims else text
        if not text:
            return []
        self._trims = False
        self.message[kind] = self.message.get(kind, "") + text
        return [{kind: text}]

    def _pass_call(self, name: str, arguments: str) -> list[Delta]:
        """Return a call as deltas, first its name, then its arguments; empty for a second call unless `parallel`."""
        calls = self.message.setdefault("tool_calls", [])
        if calls and not self._format.parallel:
            return []
        id = f"call_{secrets.token_hex(12)}"[-self._format.id_length :]
        function, index = {"name": name, "arguments": arguments}, {"index": len(calls)}
        call = {"id": id, "type": "function", "function": function}
        calls.append(call)
        named = call | index | {"function": function | {"arguments": ""}}
        return [
            {"tool_calls": [each]}
            for each in (named, index | {"function": {"arguments": arguments}})
        ]


def _parse_calls(opening: str, text: str) -> list[tuple[str, str]]:
    """Return names and JSON arguments of the calls after a marker or header: NAME{...}, or JSON objects or lists.

    Malformed ones raise ValueError, TypeError, AttributeError or RecursionError.
    """
    calls: list[Any] = []
    # An answer of Llama 3 without a marker begins with the call.
    text, at = f"{opening}{text}" if opening == "{" else text, 0
    if named := _RECIPIENT.search(opening) or _NAMED_CALL.fullmatch(text):
        calls = [(named[1], _JSON.decode(named[2] if named.re is _NAMED_CALL else text))]
    else:
        while text := text[at:].lstrip(" \n\t;,"):
            value, at = _JSON.raw_decode(text)
            found = value if isinstance(value, list) else [value]
            calls += [
                (each.get("name"), each.get("arguments", each.get("parameters"))) for each in found
            ]
    fits = (_NAME.fullmatch(name) and isinstance(arguments, dict) for name, arguments in calls)
    if not (calls and all(fits)):
        raise ValueError("malformed call")
    return [(name, json.dumps(arguments, allow_nan=False)) for name, arguments in calls]
