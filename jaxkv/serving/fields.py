"""Fields of JSON bodies: each reads one JSON value to a Python value, or raises ValueError, and has a JSON schema."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv import _checks
from jaxkv._errors import refusal, require

# A stop string is compared with the answer's end after each token, at each of its lengths.
_LONGEST_STOP, _MOST_STOPS = 256, 16
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# What OpenAI's clients send back of an answer's message, all empty here.
_EMPTY = {"refusal", "annotations", "audio", "function_call", "tool_calls"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a JSON body: a function from its name and JSON value to a Python value, and its JSON schema.

    Attributes:
        read: function of name and value; raises a ValueError that names the field, the value and the remedy.
        schema: JSON schema of the values that are taken, `null` left out.
    """

    read: Callable[[str, Any], Any]
    schema: Mapping[str, Any]


def strict_json(data: bytes, what: str = "the body") -> dict[str, Any]:
    """The JSON object in UTF-8; ValueError, naming `what` it is, for anything else, NaN and infinities included."""

    def constant(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=constant)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply: give one JSON object") from None
    except ValueError as error:
        raise ValueError(f"{what} is not JSON in UTF-8 ({error}): give one JSON object") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is JSON, but a {type(value).__name__}: give one object")
    return value


def whole(least: int, most: int) -> Field:
    """Field of an integer within [least, most]; 3.0 is one."""

    def read(name: str, value: Any) -> int:
        integral = isinstance(value, float) and value.is_integer()
        return _checks.whole(
            name,
            int(value) if integral else value,
            f"give an integer from {least} to {most}",
            least=least,
            most=most,
        )

    return Field(read=read, schema={"type": "integer", "minimum": least, "maximum": most})


def real(low: int | float, high: int | float, *, open_low: bool = False) -> Field:
    """Field of a number within [low, high], or (low, high]."""

    def read(name: str, value: Any) -> float:
        return _checks.real(name, value, low=low, high=high, open_low=open_low)

    return Field(
        read=read,
        schema={
            "type": "number",
            "exclusiveMinimum" if open_low else "minimum": low,
            "maximum": high,
        },
    )


def amount() -> Field:
    """Field of a budget: an integer of rows, or a share of the prompt such as 0.2."""

    def read(name: str, value: Any) -> int | float:
        number = _checks.real(
            name,
            value,
            "give rows, or a share of the prompt such as 0.2",
            high=2**31 - 1,
            open_low=True,
        )
        return value if isinstance(value, int) else number

    return Field(read=read, schema={"type": "number", "exclusiveMinimum": 0, "maximum": 2**31 - 1})


def flag() -> Field:
    """Field of true or false."""

    def read(name: str, value: Any) -> bool:
        require(isinstance(value, bool), name, value, "give true or false")
        return bool(value)

    return Field(read=read, schema={"type": "boolean"})


def text(*, least: int = 0, most: int | None = None) -> Field:
    """Field of a text with at least `least` and at most `most` characters."""

    def read(name: str, value: Any) -> str:
        require(isinstance(value, str), name, value, "give a text")
        require(len(value) >= least, name, value, f"give a text of at least {least} character")
        require(most is None or len(value) <= most, name, value, f"give at most {most} characters")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise refusal(
                name, ascii(value[:40]), f"half a character at {error.start}: give whole ones"
            ) from None
        return str(value)

    sizes = {"minLength": least} | ({} if most is None else {"maxLength": most})
    return Field(read=read, schema={"type": "string", **sizes})


def mapping() -> Field:
    """Field of any object."""

    def read(name: str, value: Any) -> dict[str, Any]:
        require(isinstance(value, dict), name, value, "give an object")
        return dict(value)

    return Field(read=read, schema={"type": "object"})


def fixed(*values: Any, remedy: str) -> Field:
    """Field that may only hold one of `values`, which say nothing: any other one asks for what is not there."""

    def read(name: str, value: Any) -> None:
        same = any(type(value) is type(each) and value == each for each in values)
        numbers = type(value) in (int, float) and any(
            type(each) is int and value == each for each in values
        )
        require(same or numbers, name, value, remedy)

    return Field(read=read, schema={"enum": list(values)} if values else {"type": "null"})


def stops() -> Field:
    """Field of one stop string, or a list of them; read as a tuple."""
    one = text(least=1, most=_LONGEST_STOP)

    def read(name: str, value: Any) -> tuple[str, ...]:
        given = value if isinstance(value, list) else [value]
        require(
            len(given) <= _MOST_STOPS, name, f"{len(given)} texts", f"give at most {_MOST_STOPS}"
        )
        return tuple(one.read(name, each) for each in given)

    many = {"type": "array", "items": one.schema, "maxItems": _MOST_STOPS}
    return Field(read=read, schema={"anyOf": [one.schema, many]})


def prompts() -> Field:
    """Field of one prompt or a list of them, each a text or a list of token ids; read as a list of prompts."""
    one, index = text(least=1), whole(0, 2**31 - 1)

    def ids(name: str, value: Any) -> list[int]:
        require(
            isinstance(value, list) and bool(value),
            name,
            value,
            "give a text or token ids, or a list of them",
        )
        return [index.read(name, each) for each in value]

    def read(name: str, value: Any) -> list[Any]:
        if isinstance(value, str):
            return [one.read(name, value)]
        require(
            isinstance(value, list) and bool(value),
            name,
            value,
            "give a text or token ids, or a list of them",
        )
        if isinstance(value[0], str):
            return [one.read(name, each) for each in value]
        return (
            [ids(name, each) for each in value]
            if isinstance(value[0], list)
            else [ids(name, value)]
        )

    tokens = {"type": "array", "items": index.schema, "minItems": 1}
    several = [{"type": "array", "items": each, "minItems": 1} for each in (one.schema, tokens)]
    return Field(read=read, schema={"anyOf": [one.schema, tokens, *several]})


def messages() -> Field:
    """Field of a list of chat messages of text; read as a list of {"role", "content"}."""

    def read(name: str, value: Any) -> list[dict[str, str]]:
        require(
            isinstance(value, list) and bool(value),
            name,
            value,
            "give a list of at least one message",
        )
        return [_message(f"{name}[{at}]", each) for at, each in enumerate(value)]

    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    }
    contents = [{"type": "string"}, {"type": "array", "items": part, "minItems": 1}]
    message = {
        "type": "object",
        "properties": {
            "role": {"enum": list(_ROLES)},
            "content": {"anyOf": contents},
            "name": {"type": ["string", "null"]},
            **{name: {"enum": [None, []]} for name in sorted(_EMPTY)},
        },
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    return Field(read=read, schema={"type": "array", "items": message, "minItems": 1})


def _message(name: str, given: Any) -> dict[str, str]:
    """One chat message as {"role", "content"}, its parts of text joined; ValueError for tools, pictures and sound."""
    require(
        isinstance(given, dict),
        name,
        given,
        'give objects such as {"role": "user", "content": "Hi"}',
    )
    for key in given.keys() - {"role", "content", "name"}:
        empty = key in _EMPTY and given[key] in (None, [])
        require(empty, f"{name}.{key}", given[key], "messages have a role and a text: leave it out")
    role, content = given.get("role"), given.get("content")
    require(
        isinstance(role, str) and role in _ROLES,
        f"{name}.role",
        role,
        f"give one of {', '.join(_ROLES)}",
    )
    require(
        given.get("name") is None or isinstance(given["name"], str),
        f"{name}.name",
        given.get("name"),
        "give text",
    )
    if isinstance(content, list):
        require(bool(content), f"{name}.content", content, "give a text")
        content = "".join(_part(f"{name}.content", each) for each in content)
    return {"role": _ROLES[str(role)], "content": text().read(f"{name}.content", content)}


def _part(name: str, given: Any) -> str:
    """Text of one part of a message's content; ValueError for other kinds of parts."""
    fine = (
        isinstance(given, dict)
        and given.get("type") == "text"
        and isinstance(given.get("text"), str)
    )
    fine = fine and given.keys() == {"type", "text"}
    require(fine, name, given, 'only text is read: give {"type": "text", "text": "..."}')
    return str(given["text"])
