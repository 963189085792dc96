"""`Chat`: chat messages with tools and arguments of the chat template, as one prompt."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.text.tokenizer import Message

# Variables of chat templates that jaxkv sets, and names of its functions' own arguments.
_RESERVED = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "generation_prompt",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "self",
    "edges",
}


@frozen_dataclass
class Chat:
    """Prompt of chat messages with tools and arguments of the chat template; without these, messages alone suffice.

    Attributes:
        messages: dicts as for OpenAI's API: "role" and "content", "tool_calls" of an assistant, "tool_call_id" of a
            tool's result. They end with the user or a tool.
        tools: OpenAI's descriptions of functions that the answer may call, as dicts.
        template_arguments: further variables of the chat template, such as `{"enable_thinking": False}`.
        kept_special_tokens: special tokens that the answer's text keeps, such as "[TOOL_CALLS]".
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kept_special_tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Validate the names of the template's arguments."""
        taken = sorted(_RESERVED & {*self.template_arguments})
        remedy = "jaxkv sets these variables of the template: leave them out"
        require(not taken, "template_arguments", taken, remedy)

    @property
    def template_inputs(self) -> dict[str, Any]:
        """Arguments of `ChatTokenizer.render_chat`: messages as templates expect them, and other variables.

        Raises:
            ValueError: for arguments of a tool call that are no JSON object.
        """
        messages = [_prepare_message(each) for each in self.messages]
        tools = list(self.tools) or None
        return {**self.template_arguments, "messages": messages, "tools": tools}


def _prepare_message(message: Message) -> Message:
    """Return a message with the arguments of its tool calls as dicts, and its reasoning under both usual names."""
    calls, reasoning = message.get("tool_calls"), message.get("reasoning_content")
    if calls:
        message = {**message, "tool_calls": [_parse_arguments(each) for each in calls]}
    # The template of gpt-oss reads "thinking", and rejects it next to a content.
    if reasoning and not message.get("content"):
        message = {"thinking": reasoning, **message}
    return message


def _parse_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool call with its arguments as a dict, if they are a text; ValueError unless JSON of an object."""
    function = call.get("function", {})
    given = function.get("arguments")
    if not isinstance(given, str):
        return call
    try:
        arguments = json.loads(given or "{}")
    except (ValueError, RecursionError):
        arguments = None
    remedy = "not a JSON object: a tool call's arguments are one, such as {}"
    require(isinstance(arguments, dict), "prompt", given, remedy)
    return {**call, "function": {**function, "arguments": arguments}}
