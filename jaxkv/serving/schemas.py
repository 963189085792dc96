"""Pydantic models of OpenAI's requests and responses, of documents, and of lines of a batch file."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Json, model_validator

from jaxkv._errors import require
from jaxkv.engine.sampling import MOST_LOGPROBS, Sampling
from jaxkv.text.answer_parsing import AnswerFormat
from jaxkv.text.chat import Chat
from jaxkv.text.grammar import Grammar, build_answer_grammar
from jaxkv.text.prompts import Prompt
from jaxkv.text.tokenizer import ChatTokenizer

TEXTS, CHATS, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
# Neutral values of fields of OpenAI and vLLM that are not supported; null is always neutral.
_NEUTRAL = tomllib.loads(Path(__file__).with_name("neutral.toml").read_text("utf-8"))

Filled = Annotated[str, Field(min_length=1)]
# The end of the answer is compared with each stop string after each token.
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1)]
Budget = Annotated[int | float, Field(gt=0, lt=2**31)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
# JSON's keys are texts.
TokenKey = Annotated[Token, Field(strict=False)]
Effort = Literal["none", "low", "medium", "high"]
Alternatives = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
Ids = Annotated[list[Token], Field(min_length=1, fail_fast=True)]


_SETTINGS = {field.name for field in dataclasses.fields(Sampling)} - {"logprobs"}


class Body(BaseModel):
    """Base of request schemas: strict types; null is ignored; unknown fields are errors unless neutral."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _remove_neutral_fields(cls, body: Any) -> Any:
        """Return a body's dict for validation, without null fields and unsupported ones of no effect."""
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if value is not None
            and (name in cls.model_fields or not _is_neutral_value(name, value))
        }


def _is_neutral_value(name: str, value: Any) -> bool:
    """True if a value of an unsupported field has no effect; 0.0 equals 0, but False does not."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool)
        for each in _NEUTRAL.get(name, ())
    )


class Part(Body):
    """Text part of the content of a chat message, by OpenAI's or Anthropic's names; the cache needs no hints."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    cache_control: dict[str, Any] | None = None


class CalledFunction(Body):
    """Function and arguments of a tool call in a message; the arguments are JSON of an object."""

    name: str
    arguments: str


class MessageToolCall(Body):
    """Tool call in an assistant's message: an id, which the tool's message repeats, and the called function."""

    id: Filled
    type: Literal["function"]
    function: CalledFunction


class Message(Body):
    """Chat message: a role, a text or a list of text parts, an assistant's calls and reasoning; unused id, status."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(min_length=1)] | None = None
    name: str | None = None
    id: str | None = None
    status: str | None = None
    tool_calls: list[MessageToolCall] = []
    tool_call_id: str = ""
    reasoning_content: str = ""

    @property
    def template_message(self) -> dict[str, Any]:
        """The message for chat templates, its content one text, "developer" as "system"; ValueError without a field."""
        parts, role = self.content, self.role
        said = role == "assistant" or parts is not None
        require(said, "messages", role, "no content: use a text")
        answers = role != "tool" or bool(self.tool_call_id)
        require(answers, "messages", role, "no tool_call_id: use the id of the call")
        return self.model_dump(exclude_defaults=True, exclude={"id", "status"}) | {
            "role": "system" if role == "developer" else role,
            "content": "".join(each.text for each in parts)
            if isinstance(parts, list)
            else parts or "",
        }


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class StreamOptions(Body):
    """Options of a streamed answer: `include_usage` adds an event with token counts; others have no effect."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


def _read_response_format(form: dict[str, Any]) -> Grammar | None:
    """Return the grammar of OpenAI's form of an answer, also within the `text` of a response; None for any text."""
    match form:
        case {"format": dict() as inner} | {"type": "json_schema", "json_schema": dict() as inner}:
            return _read_response_format(inner)
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar.from_json_schema({"type": "object"})
        case {"schema": dict() as schema}:
            return Grammar.from_json_schema(schema)
    raise ValueError("use the type text, json_object, or json_schema with a schema")


OutputForm = Annotated[dict[str, Any], AfterValidator(_read_response_format)]
GRAMMAR_FIELDS = "response_format", "guided_json", "guided_regex", "guided_grammar", "guided_choice"


class CompletionBody(Body):
    """Base of the bodies of POST /v1/completions and /v1/chat/completions: their shared fields."""

    model: str | None = None
    document: str | None = None
    budget: Budget | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    # `Sampling` checks their ranges, OpenAI's.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[TokenKey, float] = {}
    stop_token_ids: Annotated[tuple[Token, ...], Field(strict=False)] = ()
    prompt_logprobs: Alternatives | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Count = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    response_format: OutputForm | None = None
    guided_json: (
        Annotated[dict[str, Any] | Json[dict[str, Any]], AfterValidator(Grammar.from_json_schema)]
        | None
    ) = None
    guided_regex: Annotated[str, AfterValidator(Grammar.from_regex)] | None = None
    guided_grammar: Annotated[str, AfterValidator(lambda it: Grammar(rules=it))] | None = None
    guided_choice: (
        Annotated[list[str], Field(min_length=1), AfterValidator(Grammar.from_choices)] | None
    ) = None
    # These identify the client and do not affect the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten_structured_outputs(cls, body: Any) -> Any:
        """Return a body's dict with the fields of vLLM's `structured_outputs` under their earlier names."""
        match body:
            case {"structured_outputs": dict() as given, **rest}:
                return {**rest, **{f"guided_{name}": value for name, value in given.items()}}
        return body

    @property
    def content_grammar(self) -> Grammar | None:
        """Grammar of the answer's content; None if it may be any text; ValueError for several."""
        given = [*filter(None, map(vars(self).get, GRAMMAR_FIELDS))]
        require(len(given) < 2, "response_format", f"{len(given)} constraints", "give only one")
        return given[0] if given else None

    def combine_sampling(self, defaults: Mapping[str, Any], **given: int | None) -> Sampling:
        """Return `defaults`, then the body's own settings of sampling, then `given` ones as a `Sampling`."""
        own = self.model_dump(include=_SETTINGS, exclude_unset=True)
        made = Sampling(**{**defaults, **own, **given})
        streams = self.stream and made.prompt_logprobs is not None
        require(not streams, "stream", True, "a scored prompt is not streamed: leave it out")
        return made


class TextBody(CompletionBody):
    """Body of POST /v1/completions: prompts as texts or token ids."""

    prompt: (
        Filled
        | Ids
        | Annotated[list[Filled], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
    )
    logprobs: Alternatives | None = None
    echo: bool = False
    max_tokens: Annotated[int, Field(ge=0)] | None = None

    def make_sampling(self, defaults: Mapping[str, Any]) -> Sampling:
        """Return the body's settings of sampling as a `Sampling`; `defaults` of fields that it leaves out."""
        require(self.echo or self.max_tokens != 0, "max_tokens", 0, "use 1 or more, or echo=true")
        if not self.echo:
            return self.combine_sampling(defaults, logprobs=self.logprobs)
        top = max(self.logprobs or 0, self.prompt_logprobs or 0)
        return self.combine_sampling(defaults, logprobs=self.logprobs, prompt_logprobs=top)

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts of a /v1/completions body as a list, also for one: texts or lists of token ids."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]

    @property
    def max_answer_tokens(self) -> int:
        """Requested maximum tokens of an answer of /v1/completions; 16, OpenAI's default, if None."""
        return 16 if self.max_tokens is None else self.max_tokens


class FunctionSchema(Body):
    """Function that a model may call: its name, and a JSON schema of its parameters."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """Tool that a model may call, a function."""

    type: Literal["function"]
    function: FunctionSchema


class ChatBody(CompletionBody):
    """Body of POST /v1/chat/completions: the messages of one chat, and tools that the answer may call."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Alternatives = 0
    tools: list[Tool] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Effort | None = None

    @property
    def chat(self) -> Chat:
        """Prompt of a chat body: its messages, tools, and arguments of the chat template; ValueError for unfit ones."""
        effort, tools = self.reasoning_effort, [] if self.tool_choice == "none" else self.tools
        thinks = {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}
        return Chat(
            messages=[each.template_message for each in self.messages],
            tools=[each.model_dump(exclude_unset=True) for each in tools],
            template_arguments=thinks | self.chat_template_kwargs,
        )

    def make_sampling(self, defaults: Mapping[str, Any]) -> Sampling:
        """Return the body's settings of sampling as a `Sampling`; `defaults` of fields that it leaves out."""
        fine = self.logprobs or not self.top_logprobs
        require(fine, "top_logprobs", self.top_logprobs, "set logprobs=true, or leave it out")
        top = self.top_logprobs if self.logprobs else None
        return self.combine_sampling(defaults, logprobs=top)

    def build_grammar(self, format: AnswerFormat, text: ChatTokenizer) -> Grammar | None:
        """Build the grammar of an answer in a model's format; None if it may be any text.

        Raises ValueError if the answer must call a tool, but cannot.
        """
        choice, content, chat = self.tool_choice, self.content_grammar, self.chat
        free = choice in ("auto", "none")
        if free and content is None:
            return None
        tools = []
        for tool in chat.tools if "call" in format.markers else ():
            named = {"type": "function", "function": {"name": tool["function"]["name"]}}
            tools += [tool] * (choice in ("auto", "required", named))
        require(
            free or tools != [],
            "tool_choice",
            choice,
            "no such call: use auto, none, required or a tool's name, for a model with calls",
        )
        return build_answer_grammar(format, text, content=content if free else None, tools=tools)

    @property
    def prompts(self) -> list[Prompt]:
        """List of a chat body's one prompt."""
        return [self.chat]

    @property
    def max_answer_tokens(self) -> int | None:
        """Requested maximum tokens of an answer to a chat; None for the engine's limit."""
        return self.max_completion_tokens or self.max_tokens


class DocumentBody(Body):
    """Body of POST /v1/documents: a text, or messages."""

    text: Filled | None = None
    messages: Messages | None = None
    raw: bool = False
    model: str | None = None
    budget: Budget | None = None


class KeptQuery(Body):
    """Query of GET /v1/documents/{id}/kept: all layers, one layer, or one kv head of a layer."""

    model_config = ConfigDict(strict=False)
    layer: Annotated[int, Field(ge=0)] | None = None
    head: Annotated[int, Field(ge=0)] | None = None


class BatchLine(Body):
    """Line of a batch file in OpenAI's format: custom_id, method, URL and body of one request."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]


class Usage(BaseModel):
    """Token counts of a response: each prompt once for all of its answers, a document as cached tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Choice(BaseModel):
    """Base of one answer in a response, or of a piece of it in a stream: index, finish reason, met stop string."""

    index: int
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None
    stop_reason: str | None = None


class TextChoice(Choice):
    """One answer of /v1/completions, or a piece of it: its text, with an echo the prompt's before it."""

    text: str
    prompt_logprobs: list[Any] | None = None


class ChatChoice(Choice):
    """One complete answer of /v1/chat/completions: its message."""

    message: dict[str, Any]


class ChatPiece(Choice):
    """Piece of an answer of /v1/chat/completions in a stream: its delta."""

    delta: dict[str, Any]


class Reply(BaseModel):
    """Response of a text or chat completion, or one event of its stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice | ChatChoice | ChatPiece]
    prompt_logprobs: list[Any] | None = None
    usage: Usage | None = None


class Error(BaseModel):
    """OpenAI's error object in a response body; `param` is the invalid field of the request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every error response, with OpenAI's error object in the field `error`."""

    error: Error
