"""One way to refuse: name the field, the value and the remedy."""

from typing import Any


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
        raise ValueError(f"{field}={value!r}: {remedy}")
