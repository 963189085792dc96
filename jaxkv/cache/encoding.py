"""JSON encoding of frozen dataclasses with arrays by name, for the manifest of a saved cache; never pickles."""

import dataclasses
import enum
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxkv._errors import require
from jaxkv.checkpoints.orbax_files import CACHE

_PUBLIC = ("jaxkv", "jaxkv.policies", "jaxkv.cache")
_PLAIN = (bool, int, float, str, type(None))


class UnknownClass(ValueError):
    """Error for an encoded value whose class is not imported in this process."""


def encode(value: Any, arrays: dict[str, np.ndarray] | None, name: str = "") -> Any:
    """Encode a value as JSON (dicts, lists, numbers, text); put its arrays into `arrays` under their paths.

    The value is a frozen dataclass of numbers, text, tuples, enums, classes, arrays and such dataclasses; ValueError
    names the path of any other value. With `arrays=None` arrays are rejected, too. `name` is the path of `value`
    itself.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) is tuple:
        return [encode(each, arrays, _inside(name, index)) for index, each in enumerate(value)]
    if isinstance(value, (jax.Array, np.ndarray)) and arrays is not None:
        arrays[name] = np.asarray(value)
        return {"array": name}
    if isinstance(value, type):
        return {"type": _path(value)}
    if isinstance(value, enum.Enum):
        return {"enum": _path(type(value)), "member": value.name}
    kinds = "numbers, text, tuples, enums" + (" and" if arrays is None else ", arrays and")
    remedy = f"cannot be saved: give {kinds} frozen dataclasses of these"
    require(_is_frozen(type(value)), name or "value", type(value).__name__, remedy)
    fields = [field.name for field in dataclasses.fields(value) if field.init]
    return {
        "class": _path(type(value)),
        "fields": {
            each: encode(getattr(value, each), arrays, _inside(name, each)) for each in fields
        },
    }


def decode(encoded: Any, array: Callable[[str], Any]) -> Any:
    """Decode a value (dataclass, tuple, number, array) from `encode`'s JSON; `array` loads arrays by path.

    UnknownClass for a class that this process has not imported (decoding imports nothing). ValueError for JSON that
    `encode` does not write, and for fields that the class does not have.
    """
    if type(encoded) in _PLAIN:
        return encoded
    if isinstance(encoded, list):
        return tuple(decode(each, array) for each in encoded)
    kind = frozenset(encoded) if isinstance(encoded, dict) else None
    if kind == {"array"}:
        return array(encoded["array"])
    if kind == {"type"}:
        return _found(encoded["type"])
    if kind == {"enum", "member"}:
        members = getattr(_found(encoded["enum"]), "__members__", {})
        remedy = f"{encoded['enum']} has no such member in this version: {CACHE.again}"
        require(encoded["member"] in members, "member", encoded["member"], remedy)
        return members[encoded["member"]]
    sound = kind == {"class", "fields"} and isinstance(encoded["fields"], dict)
    require(sound, "manifest", encoded, f"not a value that KVCache.save writes: {CACHE.again}")
    cls = _found(encoded["class"])
    require(
        _is_frozen(cls),
        "class",
        encoded["class"],
        f"not a frozen dataclass: {CACHE.again}",
    )
    try:
        return cls(**{name: decode(each, array) for name, each in encoded["fields"].items()})
    except TypeError as error:
        raise ValueError(
            f"class={encoded['class']!r}: its fields differ in this version ({error}): {CACHE.again}"
        ) from error


def _is_frozen(cls: Any) -> bool:
    """True if `cls` is a dataclass declared with `frozen=True`."""
    made = getattr(cls, "__dataclass_params__", None)
    return made is not None and made.frozen


def _inside(name: str, part: object) -> str:
    """Join path `name` and field or element `part` by a dot; `part` alone at the top."""
    return f"{name}.{part}" if name else str(part)


def _path(cls: type) -> str:
    """Return a class's path `module:qualname`, with a public module that exports it if one does.

    Internal modules may move.
    """
    public = (
        name for name in _PUBLIC if getattr(sys.modules.get(name), cls.__qualname__, None) is cls
    )
    return f"{next(public, cls.__module__)}:{cls.__qualname__}"


def _found(path: Any) -> Any:
    """Look up a class by its path `module:qualname` in imported modules; raise UnknownClass if there is none."""
    module, _, names = path.partition(":") if isinstance(path, str) else ("", "", "")
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, type):
        raise UnknownClass(f"class={path!r}: not in this process: import its module first")
    return found
