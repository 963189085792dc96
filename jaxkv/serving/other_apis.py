"""Endpoints /v1/responses (OpenAI's) and /v1/messages (Anthropic's): chats in the forms of other APIs.

Validators rewrite what these APIs call or nest otherwise to a chat's fields, so that one core answers all of them.
"""

import dataclasses
import json
import operator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import AfterValidator, AliasPath, BeforeValidator, Field
from starlette.requests import Request as HttpRequest

from jaxkv.serving.completing import answer_body
from jaxkv.serving.reply_writers import TranslatingWriter
from jaxkv.serving.schemas import (
    GRAMMAR_FIELDS,
    MESSAGES,
    ChatBody,
    Count,
    Effort,
    Message,
    Messages,
    OutputForm,
    Part,
    Stop,
    Tool,
)
from jaxkv.serving.service import Served
from jaxkv.text.chat import Chat

routes = APIRouter()


# What other APIs call differently.
_CHOICES = {"any": "required", "disabled": "none", "enabled": "medium", "adaptive": "medium"}


def _read_part(part: Any) -> dict[str, Any] | None:
    """Return a call, a result or a thought of another API as a chat's message; None for texts and invalid parts."""
    match part:
        case {"type": "function_call", "call_id": id, "name": name, "arguments": arguments} | {
            "type": "tool_use",
            "id": id,
            "name": name,
            "input": dict(arguments),
        }:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            function = {"name": name, "arguments": text}
            calls = [{"id": id, "type": "function", "function": function}]
            return {"role": "assistant", "tool_calls": calls}
        case {"type": "function_call_output", "call_id": id} | {
            "type": "tool_result",
            "tool_use_id": id,
        }:
            result = part.get("output") or part.get("content") or ""
            return {"role": "tool", "tool_call_id": id, "content": result}
        case {"type": "reasoning", "content": [{"text": text}]} | {
            "type": "thinking",
            "thinking": text,
        }:
            return {"role": "assistant", "reasoning_content": text}
    return None


def _read_items(given: Any) -> Any:
    """Return the items of an input, or messages whose content has parts, as a chat's messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    messages = list[Any]()
    for item in given:
        match item:
            case {"role": _, "content": [*parts]}:
                read = [_read_part(each) for each in parts]
                messages += filter(None, read)
                texts = [part for part, made in zip(parts, read, strict=True) if not made]
                if texts or not parts:
                    messages.append(item | {"content": texts})
            case _:
                messages.append(_read_part(item) or item)
    return messages


def _join_turns(messages: list[Message]) -> list[Message]:
    """Join an assistant's messages without a text to those next to them: templates expect one message per turn."""
    joined = messages[:1]
    for each in messages[1:]:
        last = joined[-1]
        if last.role == each.role == "assistant" and None in (last.content, each.content):
            joined[-1] = last.model_copy(
                update={
                    "content": last.content or each.content,
                    "tool_calls": last.tool_calls + each.tool_calls,
                    "reasoning_content": last.reasoning_content + each.reasoning_content,
                }
            )
        else:
            joined.append(each)
    return joined


def _read_tool(given: Any) -> Any:
    """Return a tool, or the choice of one, as a chat has it; invalid ones unchanged."""
    match given:
        case {"name": name, "input_schema": schema}:
            described = {"description": given.get("description"), "parameters": schema}
            return {"type": "function", "function": {"name": name, **described}}
        case {"type": "tool", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "function", **function}:
            return {"type": "function", "function": function}
        case {"type": choice}:
            return _read_choice(choice)
    return given


def _read_choice(given: Any) -> Any:
    """Return a choice of tools, or how to think, as a chat has it; others unchanged."""
    return _CHOICES.get(given, given) if isinstance(given, str) else given


Items = Annotated[
    Messages,
    BeforeValidator(_read_items, json_schema_input_type=str | Messages),
    AfterValidator(_join_turns),
]


class TranslatedBody(ChatBody):
    """Base of a chat's body in another API's form: for one answer; a subclass renames fields."""

    n: Literal[1] = 1
    prompt_logprobs: None = None
    messages: Items
    system: str | Annotated[list[Part], Field(min_length=1)] | None = None
    tools: list[Annotated[Tool, BeforeValidator(_read_tool)]] = []
    tool_choice: Annotated[str | dict[str, Any], BeforeValidator(_read_tool)] = "auto"

    @property
    def chat(self) -> Chat:
        """Prompt of the body: its system text and its messages."""
        chat = super().chat
        if self.system is None:
            return chat
        first = Message(role="system", content=self.system)
        return dataclasses.replace(chat, messages=[first.template_message, *chat.messages])

    @property
    def repeated(self) -> dict[str, Any]:
        """Fields by name that an answer may repeat, with tools and a forced one in the form of responses."""
        fields = self.model_dump(exclude={"messages", *GRAMMAR_FIELDS})
        fields["tools"] = [{"type": "function"} | each["function"] for each in fields["tools"]]
        match fields["tool_choice"]:
            case {"function": dict() as function}:
                fields["tool_choice"] = {"type": "function"} | function
        return fields


class ResponsesBody(TranslatedBody):
    """Body of POST /v1/responses: a text or items, and instructions; nothing is stored."""

    messages: Items = Field(validation_alias="input")
    system: str | None = Field(None, validation_alias="instructions")
    max_completion_tokens: Count | None = Field(None, validation_alias="max_output_tokens")
    response_format: OutputForm | None = Field(None, validation_alias="text")
    reasoning_effort: Effort | None = Field(None, validation_alias=AliasPath("reasoning", "effort"))


class MessagesBody(TranslatedBody):
    """Body of POST /v1/messages: messages, a system text, and the maximum tokens of the answer."""

    max_tokens: Count
    stop: Annotated[list[Stop], Field(max_length=16)] | None = Field(
        None, validation_alias="stop_sequences"
    )
    reasoning_effort: Annotated[Effort | None, BeforeValidator(_read_choice)] = Field(
        None, validation_alias=AliasPath("thinking", "type")
    )
    parallel_tool_calls: Annotated[bool, AfterValidator(operator.not_)] = Field(
        True, validation_alias=AliasPath("tool_choice", "disable_parallel_tool_use")
    )


@routes.post("/v1/responses", summary="Answer in the form of OpenAI's responses")
async def create_response(body: ResponsesBody, request: HttpRequest, service: Served) -> Any:
    """Answer POST /v1/responses with the model's chat template; return the response or an event stream."""
    request.state.record.prompt = "input"
    writer = TranslatingWriter("responses", body.repeated)
    return await answer_body(service, request, body, writer)


@routes.post(MESSAGES, summary="Answer in the form of Anthropic's messages")
async def create_message(body: MessagesBody, request: HttpRequest, service: Served) -> Any:
    """Answer POST /v1/messages with the model's chat template; return the message or an event stream."""
    request.state.record.prompt = "messages"
    writer = TranslatingWriter("messages", body.repeated)
    return await answer_body(service, request, body, writer)
