"""Rows of the table of rejections: a function, what is given to it, the error and its message."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One rejection. It is called in an empty folder, as users call: without the hook that checks annotations."""

    door: str
    call: Callable[[], Any]
    kind: type[Exception]
    told: str


def door(name: str, call: Callable[[Any], Any], *rows: tuple) -> list[Row]:
    """Entries `(bad, told)`, or `(bad, kind, told)` where the error is no ValueError; `call` takes what is bad."""
    return [
        Row(name, functools.partial(call, bad), *(kind or [ValueError]), told)
        for bad, *kind, told in rows
    ]


def calls(name: str, *rows: tuple) -> list[Row]:
    """The same where every entry is a call of its own: `(call, told)`, or `(call, kind, told)`."""
    return [Row(name, call, *(kind or [ValueError]), told) for call, *kind, told in rows]


def options(make: Callable[..., Any], *bad: dict[str, Any], kind: Any = ValueError) -> list[Row]:
    """Entries of keyword arguments that a class rejects by the name of the first of them."""
    name = getattr(make, "func", make).__name__
    return [
        Row(name, functools.partial(make, **each), kind, f"{next(iter(each))}=") for each in bad
    ]
