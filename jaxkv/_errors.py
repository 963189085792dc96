"""One way to refuse: name the field, the value and the remedy."""

from typing import Any

_LONGEST = 1000


def require(condition: bool, field: str, value: Any, remedy: str) -> None:
    """Raises a ValueError of jaxkv's one form unless `condition` holds.

    Args:
        condition: what must be true.
        field: the argument or config key at fault.
        value: what it was.
        remedy: what to do instead.

    Raises:
        ValueError: `field=value: remedy`.
    """
    if not condition:
        shown = repr(value)
        # What comes from a file may be of any length.
        raise ValueError(f"{field}={shown if len(shown) <= _LONGEST else shown[:_LONGEST] + '...'}: {remedy}")
