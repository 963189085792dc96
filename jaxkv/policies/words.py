"""Refusals of fields that a policy's constructor does not take: by position, or by other libraries' names."""

import dataclasses
import difflib
import functools
import inspect
from typing import Any, TypeVar

from jaxkv._values import as_real, brief, shortened

C = TypeVar("C", bound=type)

# Other libraries' names of fields: ours, and what to write.
_WORDS = {
    "press": ("base", "give base=, the policy that this one is built on"),
    "window_size": ("window", "give window={}"),
    "n_sink": ("sinks", "give sinks={}"),
    "num_sinks": ("sinks", "give sinks={}"),
    "sink_size": ("sinks", "give sinks={}"),
    "kernel_size": ("pooling", "give pooling=AvgPool({0}), as kvpress pools, or MaxPool({0})"),
    "alpha_safeguard": ("safeguard", "give alpha={0}; kvpress' meaning of it is safeguard=ProtectedHeads(alpha={0})"),
    "max_capacity_prompt": ("budget", "give budget={}, window and sinks included"),
    "cache_size": ("budget", "give budget={}, window and sinks included"),
    "ratio": ("budget", "give budget=, the share that is kept, 0.25 say"),
}


def by_name(cls: C) -> C:
    """Class decorator that makes a constructor raise TypeError, with a hint, for positional or unknown arguments.

    Arguments that the constructor takes are passed on; a class without a constructor of its own is left as it is.
    """
    made = vars(cls).get("__init__")
    if made is None or hasattr(made, "named"):
        return cls
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    signature = inspect.signature(made)

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        unknown = [name for name in options if name not in fields]
        if args or unknown:
            try:
                signature.bind(self, *args, **options)
            except TypeError:
                raise _refusal(type(self).__name__, fields, args, {name: options[name] for name in unknown}) from None
        made(self, *args, **options)

    __init__.named = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def share_kept(removed: Any) -> str:
    """Text "budget=0.75" for kvpress' compression ratio of 0.25; "budget=1 - compression_ratio" if out of [0, 1)."""
    number = as_real(removed)
    # Rounded: in floats 1 - 0.9 is a little less than 0.1.
    return "budget=1 - compression_ratio" if number is None or not 0 <= number < 1 else f"budget={round(1 - number, 9)}"


def _refusal(name: str, fields: list[str], args: tuple[Any, ...], unknown: dict[str, Any]) -> TypeError:
    """Makes, without raising it, the TypeError with a remedy for the first positional or unknown argument."""
    if args:
        given = shortened(args[0].__name__ if isinstance(args[0], type) else brief(args[0]))
        number = as_real(args[0]) is not None
        # Anything but a number is taken to be the base policy, its class or its name, if the class has a base.
        mine = "budget" if number or "base" not in fields else "base"
        how = f"{mine}={given}" if number or mine == "base" else ", ".join(f"{field}=..." for field in fields[:3])
        return TypeError(f"{name}({given}): a policy's fields are given by name: write {name}({how})")
    word, value = next(iter(unknown.items()))
    if word == "compression_ratio":
        remedy = f"it is kvpress' share of rows removed: give {share_kept(value)}, the share that is kept"
    elif word in _WORDS and _WORDS[word][0] in fields:
        remedy = _WORDS[word][1].format(shortened(brief(value)))
    else:
        near = difflib.get_close_matches(word, fields, n=2)
        remedy = f"{name} has no such field; "
        remedy += f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(fields)}"
    return TypeError(f"{word}={shortened(brief(value))}: {remedy}")
