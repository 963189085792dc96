"""ValueErrors that name the field, its value and the remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

_LONGEST = 300


def require(condition: bool, field: str, value: Any, remedy: str) -> None:
    """Raise a ValueError with the text `field=value: remedy` unless `condition` holds."""
    if not condition:
        raise build_value_error(field, value, remedy)


def build_value_error(field: str, value: Any, remedy: str) -> ValueError:
    """Return, without raising, a ValueError `field=value: remedy`, the value cut to 300 characters."""
    # The `str` of a path omits its class, that of a policy the fields with default values.
    plain = hasattr(value, "__fspath__") or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )
    shown = str(value) if plain else repr(value)
    if len(shown) > _LONGEST:  # Values from files may have any length.
        shown = f"{shown[:_LONGEST]}..."
    return ValueError(f"{field}={shown}: {remedy}")
