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

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.serving.errors import convert_to_http_error
from jaxkv.serving.limits import RequestLimits
from jaxkv.serving.schemas import BatchLine

PREFIX, _DIGITS = "batch_req_", 32


@frozen_dataclass
class ParsedBatchLine:
    """One line of a batch file after parsing: a request, or the reason why it is invalid.

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
    def default_seed(self) -> int:
        """Seed of 32 bits, from the line's id, for a request without a seed; equal in every run of the same file."""
        return int(self.id[-8:], 16)


def read_batch_lines(path: Path, about: str) -> Iterator[ParsedBatchLine]:
    """Yield the parsed lines of a batch file, without blank ones; `about` is text hashed into their answer ids."""
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
                yield ParsedBatchLine(
                    number=number, id=_compute_answer_id(about, number), custom_id=None, fault=fault
                )
            elif data.strip():
                yield _parse_batch_line(data, number, about)


def _parse_batch_line(data: bytes, number: int, about: str) -> ParsedBatchLine:
    """Parse one line of a batch file to a `ParsedBatchLine`; an invalid one has its error text as `fault`."""
    given: Any = None
    try:
        given = from_json(data, allow_inf_nan=False)
        read = BatchLine.model_validate(given)
    except ValueError as error:
        told = convert_to_http_error(error) if isinstance(error, ValidationError) else error
        named = given.get("custom_id") if isinstance(given, dict) else None
        return ParsedBatchLine(
            number=number,
            id=_compute_answer_id(about, [number, hashlib.sha256(data).hexdigest()]),
            custom_id=named if isinstance(named, str) else None,
            fault=f"line {number}: {told}",
        )
    digest = _compute_answer_id(about, [read.custom_id, read.url, read.body])
    return ParsedBatchLine(
        number=number, id=digest, custom_id=read.custom_id, url=read.url, body=read.body
    )


def _compute_answer_id(about: str, what: Any) -> str:
    """Return an answer's id: a prefix and 32 hex digits of SHA-256 of `about` and `what`, request or line number."""
    whole = json.dumps([about, what], sort_keys=True)
    return f"{PREFIX}{hashlib.sha256(whole.encode()).hexdigest()[:_DIGITS]}"


def make_error_output(line: ParsedBatchLine, code: str, message: str) -> dict[str, Any]:
    """Return OpenAI's output object of an invalid line: an error code and message, without a response."""
    error = {"code": code, "message": message}
    return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}


def make_response_output(
    line: ParsedBatchLine, status: int, body: Mapping[str, Any]
) -> dict[str, Any]:
    """Return OpenAI's output object of a line with an HTTP response: its status and body."""
    response = {"status_code": status, "request_id": f"req-{line.id[-16:]}", "body": body}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}
