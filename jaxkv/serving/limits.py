"""`RequestLimits`: what the HTTP server takes of one request, and the key that clients must know."""

import dataclasses

from jaxkv import _checks
from jaxkv._errors import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of one HTTP request: bytes of its body, seconds, answers; and the API key.

    Attributes:
        api_key: key that clients send as `Authorization: Bearer KEY`; None lets everybody in.
        body_bytes: the most bytes of a body.
        body_seconds: the most seconds that a body may take to arrive.
        seconds: seconds from a body's arrival until the answer must be complete.
        answers: the most answers to one body, prompts times `n`.
    """

    api_key: str | None = dataclasses.field(default=None, repr=False)
    body_bytes: int = 8 << 20
    body_seconds: int | float = 30.0
    seconds: int | float = 600.0
    answers: int = 64

    def __post_init__(self) -> None:
        """Checks the numbers, and that the key has characters that a header can hold."""
        _checks.field(self, "body_bytes", _checks.whole, "take bodies of at least 1 byte")
        _checks.field(self, "answers", _checks.whole, "give at least 1 answer")
        for name in ("body_seconds", "seconds"):
            _checks.field(self, name, _checks.real, "give seconds above 0", open_low=True, high=1e9)
        key = self.api_key
        fine = key is None or (bool(key) and key.isascii() and key.isprintable() and " " not in key)
        require(
            fine,
            "api_key",
            "...",
            "give visible ASCII characters, without blanks; none at all for no key",
        )
