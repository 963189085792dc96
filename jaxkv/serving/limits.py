"""`RequestLimits`: limits of one HTTP request, the API keys, and the parsers of answers."""

import dataclasses
from collections.abc import Mapping

from jaxkv import _checks
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.text.answer_parsing import PARSERS


@frozen_dataclass
class RequestLimits:
    """Limits of one HTTP request: bytes of its body, seconds, answers; the API keys; the parsers of answers.

    Attributes:
        api_key: key that clients send as `Authorization: Bearer KEY` or `x-api-key: KEY`; its clients have no name.
        api_keys: further keys, each with the public name of its client. Without any key, every client is accepted.
        body_bytes: maximum size of a body in bytes.
        body_seconds: maximum time in seconds for a body to arrive.
        seconds: maximum time in seconds from the arrival of a body to the complete answer.
        answers: maximum number of answers to one body, which is prompts times `n`.
        tool_parser: as in `choose_answer_format`.
        reasoning_parser: as in `choose_answer_format`.
        generation_config: "auto" takes settings of sampling that a body leaves out from the model's
            `generation_config.json`, "none" OpenAI's defaults.
    """

    api_key: str | None = dataclasses.field(default=None, repr=False)
    api_keys: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    body_bytes: int = 8 << 20
    body_seconds: int | float = 30.0
    seconds: int | float = 600.0
    answers: int = 64
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    generation_config: str = "auto"

    def __post_init__(self) -> None:
        """Validate the request limits, and that the API key, if any, has only visible ASCII characters."""
        _checks.validate_field(
            self, "body_bytes", _checks.validate_int, "allow bodies of at least 1 byte"
        )
        _checks.validate_field(self, "answers", _checks.validate_int, "allow at least 1 answer")
        for name in ("body_seconds", "seconds"):
            _checks.validate_field(
                self, name, _checks.validate_float, "give seconds above 0", open_low=True, high=1e9
            )
        for name, known in {**PARSERS, "generation_config": ("auto", "none")}.items():
            given = getattr(self, name)
            require(given in known, name, given, f"unknown: use one of {', '.join(known)}")
        for key in self.clients:
            require(
                bool(key) and key.isascii() and key.isprintable() and " " not in key,
                "api_key",
                "...",
                "not a valid key: use visible ASCII characters without blanks, or None for no key",
            )

    @property
    def clients(self) -> dict[str, str]:
        """Names of clients by API key; the name of the clients of `api_key` is empty."""
        own = {} if self.api_key is None else {self.api_key: ""}
        return {**self.api_keys, **own}
