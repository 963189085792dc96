"""Endpoints /v1/responses (OpenAI's) and /v1/messages (Anthropic's): chats with text in the forms of other APIs."""

import dataclasses
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request as HttpRequest

from jaxkv.serving.completing import answer_body
from jaxkv.serving.reply_writers import TranslatingWriter
from jaxkv.serving.schemas import (
    MESSAGES,
    ChatBody,
    Count,
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


def _wrap_text(given: Any) -> Any:
    """Return a text as a list of one message of the user; other values unchanged."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _unwrap_type(given: Any) -> Any:
    """Return the type of a `{"type": ...}` without other fields; other values unchanged."""
    return given["type"] if isinstance(given, dict) and {*given} == {"type"} else given


class TranslatedBody(ChatBody):
    """Base of a chat's body in another API's form: for one answer; a subclass renames fields, later also of tools."""

    n: Literal[1] = 1
    system: str | Annotated[list[Part], Field(min_length=1)] | None = None

    tools: Annotated[list[Tool], Field(max_length=0)] = []
    tool_choice: Annotated[str | dict[str, Any], BeforeValidator(_unwrap_type)] = "auto"

    @property
    def chat(self) -> Chat:
        """Prompt of the body: its system text and its messages."""
        chat = super().chat
        if self.system is None:
            return chat
        first = Message(role="system", content=self.system)
        return dataclasses.replace(chat, messages=[first.template_message, *chat.messages])


class ResponsesBody(TranslatedBody):
    """Body of POST /v1/responses: a text or messages, and instructions; nothing is stored."""

    messages: Annotated[
        Messages, BeforeValidator(_wrap_text, json_schema_input_type=str | Messages)
    ] = Field(validation_alias="input")
    system: str | None = Field(None, validation_alias="instructions")
    max_completion_tokens: Count | None = Field(None, validation_alias="max_output_tokens")
    response_format: OutputForm | None = Field(None, validation_alias="text")


class MessagesBody(TranslatedBody):
    """Body of POST /v1/messages: messages, a system text, and the maximum tokens of the answer."""

    max_tokens: Count
    stop: Annotated[list[Stop], Field(max_length=16)] | None = Field(
        None, validation_alias="stop_sequences"
    )


@routes.post("/v1/responses", summary="Answer in the form of OpenAI's responses")
async def create_response(body: ResponsesBody, request: HttpRequest, service: Served) -> Any:
    """Answer POST /v1/responses with the model's chat template; return the response or an event stream."""
    request.state.record.prompt = "input"
    return await answer_body(service, request, body, TranslatingWriter("responses", body))


@routes.post(MESSAGES, summary="Answer in the form of Anthropic's messages")
async def create_message(body: MessagesBody, request: HttpRequest, service: Served) -> Any:
    """Answer POST /v1/messages with the model's chat template; return the message or an event stream."""
    request.state.record.prompt = "messages"
    return await answer_body(service, request, body, TranslatingWriter("messages", body))
