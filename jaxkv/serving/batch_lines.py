"""Lines of a batch's file: requests in OpenAI's batch format, read one at a time."""

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
    """One line of a batch's file: a request, or what is wrong with it.

    Attributes:
        number: number of the line, from 1 on.
        id: id of its answer: a digest of the request, and of what else decides the answer.
        custom_id: the user's name of the request; None if it cannot be read.
        url: route that it is for.
        body: body of the request.
        fault: why it is no request; None if it is one.
    """

    number: int
    id: str
    custom_id: str | None
    url: str = ""
    body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fault: str | None = None

    @property
    def seed(self) -> int:
        """Seed of 32 bits for a request that gives none: the same file is answered in the same way again."""
        return int(self.id[-8:], 16)


def lines_of(path: Path, about: str) -> Iterator[Line]:
    """Yields the lines of a file, blank ones left out; `about` says what decides the answers besides the requests."""
    most = RequestLimits().body_bytes
    with open(path, "rb") as file:
        number = 0
        while data := file.readline(most + 1):
            number += 1
            # A byte order mark, which SlidingWindows' programs write.
            data = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
            long = len(data) > most
            while long and data and not data.endswith(b"\n"):
                data = file.readline(most)
            if long:
                fault = f"line {number}: it is longer than {most} bytes: send a shorter request"
                yield Line(number=number, id=_id(about, number), custom_id=None, fault=fault)
            elif data.strip():
                yield _line(data, number, about)


def _line(data: bytes, number: int, about: str) -> Line:
    """Reads one line; what is wrong with it is its `fault`."""
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
    """Id of an answer from what decides it."""
    whole = json.dumps([about, what], sort_keys=True)
    return f"{PREFIX}{hashlib.sha256(whole.encode()).hexdigest()[:_DIGITS]}"


def failed(line: Line, code: str, message: str) -> dict[str, Any]:
    """OpenAI's output object of a line that is no request."""
    error = {"code": code, "message": message}
    return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}


def responded(line: Line, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's output object of a request that has a response."""
    response = {"status_code": status, "request_id": f"req-{line.id[-16:]}", "body": body}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}
