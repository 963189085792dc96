"""One way to refuse: name the field, the value and the remedy."""

from __future__ import annotations

from typing import Any

_LONGEST = 1000


def require(condition: bool, field: str, value: Any, remedy: str) -> None:
    """Raises a ValueError unless `condition` holds.

    Args:
        condition: what must be true.
        field: the argument, file or key at fault.
        value: what it was.
        remedy: what is wrong and what to do instead.

    Raises:
        ValueError: `field=value: remedy`.
    """
    if not condition:
        raise refusal(field, value, remedy)


def refusal(field: str, value: Any, remedy: str) -> ValueError:
    """Makes the error without raising it, so that it can be chained to a cause.

    Args:
        field: the argument, file or key at fault.
        value: what it was.
        remedy: what is wrong and what to do instead.

    Returns:
        The ValueError, not raised.
    """
    shown = str(value) if hasattr(value, "__fspath__") else repr(value)
    if len(shown) > _LONGEST:  # what comes from a file may be of any length
        shown = f"{shown[:_LONGEST]}..."
    return ValueError(f"{field}={shown}: {remedy}")
