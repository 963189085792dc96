"""Pydantic models of OpenAI's requests and responses, and of documents and lines of a batch's file."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxkv.engine.sampling import Sampling
from jaxkv.text.prompts import Prompt

TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
# Fields that OpenAI, vLLM and their clients have, by the values that ask for nothing; null is always one of them.
_NEUTRAL = tomllib.loads(Path(__file__).with_name("neutral.toml").read_text("utf-8"))

Filled = Annotated[str, Field(min_length=1)]
# It is compared with the answer's end after each token, at each of its lengths.
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1)]
Budget = Annotated[int | float, Field(gt=0, lt=2**31)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]


class Body(BaseModel):
    """A JSON object whose fields have exactly their types; null stands for a field that is left out."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, body: Any) -> Any:
        """Leaves out fields that ask for nothing."""
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if value is not None and (name in cls.model_fields or not _neutral(name, value))
        }


def _neutral(name: str, value: Any) -> bool:
    """True if a field asks for nothing by this value; 0.0 is 0, but False is not."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool)
        for each in _NEUTRAL.get(name, ())
    )


class Part(Body):
    """Part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """Chat message of text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(min_length=1)]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        """The message as {"role", "content"}, its parts joined."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(each.text for each in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class StreamOptions(Body):
    """Options of a streamed answer: numbers of tokens come once, at its end, where `include_usage` asks for them."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class CompletionBody(Body):
    """Fields that both routes of completions have."""

    model: str | None = None
    document: str | None = None
    budget: Budget | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Count = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    # They say who asks, and nothing of the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def sampling(self) -> Sampling:
        """The body's temperature and cuts."""
        return Sampling(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )


class TextBody(CompletionBody):
    """Body of POST /v1/completions."""

    prompt: (
        Filled
        | Ids
        | Annotated[list[Filled], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
    )

    @property
    def prompts(self) -> list[Prompt]:
        """Texts or lists of token ids."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]

    @property
    def most(self) -> int:
        """The most tokens of an answer; OpenAI's default is 16."""
        return self.max_tokens or 16


class ChatBody(CompletionBody):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """The one conversation."""
        return [[each.plain for each in self.messages]]

    @property
    def most(self) -> int | None:
        """The most tokens of an answer; None for the engine's."""
        return self.max_completion_tokens or self.max_tokens


class DocumentBody(Body):
    """Body of POST /v1/documents: a text or messages."""

    text: Filled | None = None
    messages: Messages | None = None
    raw: bool = False
    model: str | None = None
    budget: Budget | None = None


class KeptQuery(Body):
    """Query of GET /v1/documents/{id}/kept: one layer, or one kv head of it."""

    model_config = ConfigDict(strict=False)
    layer: Annotated[int, Field(ge=0)] | None = None
    head: Annotated[int, Field(ge=0)] | None = None


class BatchLine(Body):
    """Line of a batch's file."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]


class Usage(BaseModel):
    """Numbers of tokens: each prompt once for all of its answers, a document as cached."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Choice(BaseModel):
    """One answer, or a piece of it."""

    index: int
    logprobs: None = None
    finish_reason: str | None


class TextChoice(Choice):
    """Answer of /v1/completions."""

    text: str


class ChatChoice(Choice):
    """Answer of /v1/chat/completions."""

    message: dict[str, str | None]


class ChatPiece(Choice):
    """Piece of a chat's answer."""

    delta: dict[str, str]


class Reply(BaseModel):
    """Response of a completion, or an event of its stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice | ChatChoice | ChatPiece]
    usage: Usage | None = None


class Error(BaseModel):
    """OpenAI's error; `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every answer that is an error."""

    error: Error
