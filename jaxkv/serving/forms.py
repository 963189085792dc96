"""Forms of the HTTP interface: tables of fields, and bodies read by them to arguments of the engine."""

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from jaxkv._errors import refusal, require
from jaxkv.sampling import Sampling
from jaxkv.serving import fields
from jaxkv.serving.fields import Field
from jaxkv.text.prompts import Prompt

# OpenAI's defaults: of /v1/completions, and of both.
_USUAL_TOKENS, _USUAL_TEMPERATURE = 16, 1.0
_NO_TOOLS = "there are no tools: leave it out"
_NO_PENALTY = "there are no penalties: leave it out"
_NO_LOGPROBS = "log-probabilities are not returned: leave it out"
_NOT_KEPT = "answers are not kept here: leave it out"
_TEXT_ONLY = "only text goes in and out: leave it out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """The fields of one route's body by name, and those without which there is nothing to do.

    Attributes:
        fields: fields by name; null stands for a field that is left out.
        required: names of which at least one must be given, for each group.
    """

    fields: Mapping[str, Field]
    required: tuple[tuple[str, ...], ...]

    def read(self, body: Mapping[str, Any], *, inside: str = "") -> dict[str, Any]:
        """Values of the fields that a body gives, by name; ValueError for unknown names, junk, or a missing field.

        `inside` stands before the names in errors, where the body is a field of another one.
        """
        for name in body:
            if name not in self.fields:
                raise refusal(
                    inside + name[:64],
                    "...",
                    f"there is no such field here; there are {', '.join(self.fields)}",
                )
        given = {name: value for name, value in body.items() if value is not None}
        for names in self.required:
            require(
                any(name in given for name in names), names[0], None, f"give {' or '.join(names)}"
            )
        return {name: self.fields[name].read(inside + name, value) for name, value in given.items()}

    def schema(self) -> dict[str, Any]:
        """JSON schema of the body."""
        must = [names[0] for names in self.required if len(names) == 1]
        some = [{"required": [name]} for names in self.required if len(names) > 1 for name in names]
        properties = {
            name: field.schema if name in must else {"anyOf": [field.schema, {"type": "null"}]}
            for name, field in self.fields.items()
        }
        return {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
            **({"required": must} if must else {}),
            **({"anyOf": some} if some else {}),
        }


def _stream_options() -> Field:
    """Field of OpenAI's `stream_options`; read as True if usage is asked for."""
    known = {"include_usage": fields.flag(), "include_obfuscation": fields.flag()}
    inner = Form(fields=known, required=())

    def read(name: str, value: Any) -> bool:
        require(
            isinstance(value, dict), name, value, 'give an object such as {"include_usage": true}'
        )
        return bool(inner.read(value, inside=f"{name}.").get("include_usage", False))

    return Field(read=read, schema=inner.schema())


def _shared(most_tokens: int, most_answers: int) -> dict[str, Field]:
    """Fields that both routes of completions have."""
    return {
        "model": fields.text(),
        "document": fields.text(),
        "budget": fields.amount(),
        "max_tokens": fields.whole(1, most_tokens),
        "temperature": fields.real(0, 2),
        "top_p": fields.real(0, 1, open_low=True),
        "top_k": fields.whole(-1, 2**31 - 1),
        "min_p": fields.real(0, 1),
        "seed": fields.whole(-(2**63), 2**63 - 1),
        "n": fields.whole(1, most_answers),
        "stop": fields.stops(),
        "stream": fields.flag(),
        "stream_options": _stream_options(),
        "ignore_eos": fields.flag(),
        # They say who asks, and nothing of the answer.
        "user": fields.text(),
        "metadata": fields.mapping(),
        "presence_penalty": fields.fixed(0, remedy=_NO_PENALTY),
        "frequency_penalty": fields.fixed(0, remedy=_NO_PENALTY),
        "logit_bias": fields.fixed({}, remedy="tokens cannot be favoured: leave it out"),
    }


def text_form(*, most_tokens: int, most_answers: int) -> Form:
    """Form of POST /v1/completions."""
    own = {
        "prompt": fields.prompts(),
        "best_of": fields.fixed(1, remedy="answers are not ranked: give n for several"),
        "echo": fields.fixed(False, remedy="the prompt is not repeated: leave it out"),
        "logprobs": fields.fixed(remedy=_NO_LOGPROBS),
        "suffix": fields.fixed("", remedy="text is only continued: leave it out"),
    }
    return Form(fields=own | _shared(most_tokens, most_answers), required=(("prompt",),))


def chat_form(*, most_tokens: int, most_answers: int) -> Form:
    """Form of POST /v1/chat/completions."""
    plain = "answers are plain text: leave it out"
    own = {
        "messages": fields.messages(),
        "max_completion_tokens": fields.whole(1, most_tokens),
        "logprobs": fields.fixed(False, remedy=_NO_LOGPROBS),
        "top_logprobs": fields.fixed(0, remedy=_NO_LOGPROBS),
        "response_format": fields.fixed({"type": "text"}, remedy=plain),
        "tools": fields.fixed([], remedy=_NO_TOOLS),
        "tool_choice": fields.fixed("none", "auto", remedy=_NO_TOOLS),
        "parallel_tool_calls": fields.flag(),
        "functions": fields.fixed([], remedy=_NO_TOOLS),
        "function_call": fields.fixed("none", "auto", remedy=_NO_TOOLS),
        "modalities": fields.fixed(["text"], remedy=_TEXT_ONLY),
        "audio": fields.fixed(remedy=_TEXT_ONLY),
        "prediction": fields.fixed(remedy="answers are not predicted: leave it out"),
        "web_search_options": fields.fixed(remedy="nothing is searched: leave it out"),
        "reasoning_effort": fields.fixed(
            "none", remedy="the model decides by itself: leave it out"
        ),
        "verbosity": fields.fixed("medium", remedy="the model decides by itself: leave it out"),
        "store": fields.fixed(False, remedy=_NOT_KEPT),
        "service_tier": fields.fixed("auto", "default", remedy="there is one: leave it out"),
        "safety_identifier": fields.text(),
        "prompt_cache_key": fields.text(),
    }
    return Form(fields=own | _shared(most_tokens, most_answers), required=(("messages",),))


def document_form() -> Form:
    """Form of POST /v1/documents."""
    own = {
        "text": fields.text(least=1),
        "messages": fields.messages(),
        "raw": fields.flag(),
        "model": fields.text(),
        "budget": fields.amount(),
    }
    return Form(fields=own, required=(("text", "messages"),))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A body of a completion, read: prompts, answers to each, and arguments of `Engine.submit` that all share.

    Attributes:
        prompts: texts, lists of token ids, or one list of chat messages.
        n: answers to each prompt.
        seed: of the random draws, 64 bits; None for greedy answers without one.
        options: other arguments of `Engine.submit`.
        document: id of the document that is asked; None for none.
        stream: True to answer piece by piece.
        usage: True to end a stream with its numbers of tokens.
    """

    prompts: list[Prompt]
    n: int
    seed: int | None
    options: dict[str, Any]
    document: str | None
    stream: bool
    usage: bool

    @property
    def answers(self) -> int:
        """Number of answers to all prompts."""
        return len(self.prompts) * self.n


def asked_by(
    body: Mapping[str, Any], form: Form, *, chat: bool, most_answers: int, usual_tokens: int
) -> Asked:
    """Reads a body of a completion by its form; ValueError names the field at fault."""
    given = form.read(body)
    prompts = [given["messages"]] if chat else given["prompt"]
    n, document = given.get("n", 1), given.get("document")
    remedy = (
        f"with n={n} these are {len(prompts) * n} answers: ask for {most_answers} at most at a time"
    )
    require(
        len(prompts) * n <= most_answers,
        "n" if chat else "prompt",
        f"{len(prompts)} prompts",
        remedy,
    )
    stream = given.get("stream", False)
    require(
        stream or "stream_options" not in given,
        "stream_options",
        body.get("stream_options"),
        "give stream, too",
    )
    drawn = _sampling(given)
    seed = given.get("seed")
    if seed is None and given.get("temperature", _USUAL_TEMPERATURE) > 0:
        seed = secrets.randbits(32)
    options = {
        "max_new_tokens": _tokens(
            given, usual_tokens if chat else min(_USUAL_TOKENS, usual_tokens)
        ),
        "sampling": drawn,
        "stop": given.get("stop", ()),
        "budget": given.get("budget"),
        "stop_at_eos": not given.get("ignore_eos", False),
        # A document's turn says whether its question is plain text.
        "raw": not chat and document is None,
    }
    return Asked(
        prompts=prompts,
        n=n,
        seed=seed,
        options=options,
        document=document,
        stream=stream,
        usage=given.get("stream_options", False),
    )


def _tokens(given: Mapping[str, Any], usual: int) -> int:
    """Most tokens of an answer: `max_tokens`, or as chats call it now `max_completion_tokens`."""
    old, new = given.get("max_tokens"), given.get("max_completion_tokens")
    require(
        old is None or new in (None, old),
        "max_tokens",
        old,
        f"max_completion_tokens={new} says another number",
    )
    return next((each for each in (new, old) if each is not None), usual)


def _sampling(given: Mapping[str, Any]) -> Sampling:
    """Sampler of a body; OpenAI's default is a temperature of 1, and 0 draws the likeliest token."""
    names = ("temperature", "top_k", "top_p", "min_p")
    numbers = {name: given[name] for name in names if given.get(name) is not None}
    return Sampling(**{"temperature": _USUAL_TEMPERATURE} | numbers)
