"""kvpress' compression ratio, which is the share removed: constructors of policies name the share that is kept."""

import functools
from typing import Any, TypeVar

from jaxkv._values import as_real

C = TypeVar("C", bound=type)


def by_name(cls: C) -> C:
    """Class decorator that makes a constructor raise TypeError, with the budget, for kvpress' compression ratio.

    A class without a constructor of its own is left as it is.
    """
    made = vars(cls).get("__init__")
    if made is None or hasattr(made, "named"):
        return cls

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        if "compression_ratio" in options:
            kept = share_kept(options["compression_ratio"])
            raise TypeError(
                f"compression_ratio: it is kvpress' share removed. Give {kept}, the share that is kept."
            )
        made(self, *args, **options)

    __init__.named = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def share_kept(removed: Any) -> str:
    """Text "budget=0.75" for kvpress' compression ratio of 0.25; "budget=1 - compression_ratio" if out of [0, 1)."""
    number = as_real(removed)
    # Rounded: in floats 1 - 0.9 is a little less than 0.1.
    return (
        "budget=1 - compression_ratio"
        if number is None or not 0 <= number < 1
        else f"budget={round(1 - number, 9)}"
    )
