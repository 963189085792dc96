"""Lines of a batch file: requests in OpenAI's batch format, read one at a time."""

import codecs
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from jaxkv.serving.errors import http_error
from jaxkv.serving.limits import RequestLimits
from jaxkv.serving.schemas import BatchLine

PREFIX, _DIGITS = "batch_req_", 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a batch file: a request, or the reason why it is invalid.

    Attributes:
        number: line number, from 1 on.
        id: id of the answer: a digest of the request and of everything else that decides the answer.
        custom_id: the user's name of the request; None if it cannot be read.
        url: HTTP path of the request.
        body: body of the request.
        fault: why the line is invalid; None for a valid request.
    """

    number: int
    id: str
    custom_id: str | None
    url: str = ""
    body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fault: str | None = None

    @property
    def seed(self) -> int:
        """Seed of 32 bits for a request without one; the same file gets the same answers again."""
        return int(self.id[-8:], 16)


def lines_of(path: Path, about: str) -> Iterator[Line]:
    """Yield the lines of a file without blank ones; `about` names what else decides the answers."""
    most = RequestLimits().body_bytes
    with open(path, "rb") as file:
        number = 0
        while data := file.readline(most + 1):
            number += 1
            # Programs on Windows write a byte order mark.
            data = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
            long = len(data) > most
            while long and data and not data.endswith(b"\n"):
                data = file.readline(most)
            if long:
                fault = f"line {number}: it is longer than {most} bytes: use a shorter request"
                yield Line(number=number, id=_id(about, number), custom_id=None, fault=fault)
            elif data.strip():
                yield _line(data, number, about)


def _line(data: bytes, number: int, about: str) -> Line:
    """Read one line; a fault becomes its `fault`."""
    given: Any = None
    try:
        given = from_json(data, allow_inf_nan=False)
        read = BatchLine.model_validate(given)
    except ValueError as error:
        told = http_error(error) if isinstance(error, ValidationError) else error
        named = given.get("custom_id") if isinstance(given, dict) else None
        return Line(
            number=number,
            id=_id(about, [number, hashlib.sha256(data).hexdigest()]),
            custom_id=named if isinstance(named, str) else None,
            fault=f"line {number}: {told}",
        )
    digest = _id(about, [read.custom_id, read.url, read.body])
    return Line(number=number, id=digest, custom_id=read.custom_id, url=read.url, body=read.body)


def _id(about: str, what: Any) -> str:
    """Return the id of an answer: a digest of what decides it."""
    whole = json.dumps([about, what], sort_keys=True)
    return f"{PREFIX}{hashlib.sha256(whole.encode()).hexdigest()[:_DIGITS]}"


def failed(line: Line, code: str, message: str) -> dict[str, Any]:
    """Return OpenAI's output object of an invalid line."""
    error = {"code": code, "message": message}
    return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}


def responded(line: Line, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's output object of a request with a response."""
    response = {"status_code": status, "request_id": f"req-{line.id[-16:]}", "body": body}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}
