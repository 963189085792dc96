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


class UnknownClassError(ValueError):
    """ValueError for an encoded value whose class is not imported in this process."""


def encode_as_json(value: Any, arrays: dict[str, np.ndarray] | None, name: str = "") -> Any:
    """Encode a frozen dataclass or plain value as JSON data, else ValueError; put its arrays in dict `arrays` by path.

    The value is a frozen dataclass of numbers, text, tuples, enums, classes, arrays and such dataclasses; ValueError
    names the path of any other value. With `arrays=None` arrays are rejected, too. `name` is the path of `value`
    itself.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) is tuple:
        return [
            encode_as_json(each, arrays, _join_path(name, index))
            for index, each in enumerate(value)
        ]
    if isinstance(value, (jax.Array, np.ndarray)) and arrays is not None:
        arrays[name] = np.asarray(value)
        return {"array": name}
    if isinstance(value, type):
        return {"type": _build_class_path(value)}
    if isinstance(value, enum.Enum):
        return {"enum": _build_class_path(type(value)), "member": value.name}
    kinds = "numbers, text, tuples, enums" + (" and" if arrays is None else ", arrays and")
    remedy = f"cannot be saved: give {kinds} frozen dataclasses of these"
    require(_is_frozen_dataclass(type(value)), name or "value", type(value).__name__, remedy)
    fields = [field.name for field in dataclasses.fields(value) if field.init]
    return {
        "class": _build_class_path(type(value)),
        "fields": {
            each: encode_as_json(getattr(value, each), arrays, _join_path(name, each))
            for each in fields
        },
    }


def decode_from_json(encoded: Any, array: Callable[[str], Any]) -> Any:
    """Return the value that `encode_as_json` encoded; `array` reads arrays by path; ValueError for unimported classes.

    UnknownClassError for a class that this process has not imported (decoding imports nothing). ValueError for JSON
    that `encode_as_json` does not write, and for fields that the class does not have.
    """
    if type(encoded) in _PLAIN:
        return encoded
    if isinstance(encoded, list):
        return tuple(decode_from_json(each, array) for each in encoded)
    kind = frozenset(encoded) if isinstance(encoded, dict) else None
    if kind == {"array"}:
        return array(encoded["array"])
    if kind == {"type"}:
        return _find_class(encoded["type"])
    if kind == {"enum", "member"}:
        members = getattr(_find_class(encoded["enum"]), "__members__", {})
        remedy = f"{encoded['enum']} has no such member in this version: {CACHE.again}"
        require(encoded["member"] in members, "member", encoded["member"], remedy)
        return members[encoded["member"]]
    sound = kind == {"class", "fields"} and isinstance(encoded["fields"], dict)
    require(sound, "manifest", encoded, f"not a value that KVCache.save writes: {CACHE.again}")
    cls = _find_class(encoded["class"])
    require(
        _is_frozen_dataclass(cls),
        "class",
        encoded["class"],
        f"not a frozen dataclass: {CACHE.again}",
    )
    try:
        return cls(
            **{name: decode_from_json(each, array) for name, each in encoded["fields"].items()}
        )
    except TypeError as error:
        raise ValueError(
            f"class={encoded['class']!r}: its fields differ in this version ({error}): {CACHE.again}"
        ) from error


def _is_frozen_dataclass(cls: Any) -> bool:
    """True if `cls` is a dataclass declared with `frozen=True`."""
    made = getattr(cls, "__dataclass_params__", None)
    return made is not None and made.frozen


def _join_path(name: str, part: object) -> str:
    """Return `name.part`, the path of a field or element inside `name`; `part` alone if `name` is empty."""
    return f"{name}.{part}" if name else str(part)


def _build_class_path(cls: type) -> str:
    """Return a class's path as text, `module:qualname`, with the public module that exports the class, else its own.

    Internal modules may move.
    """
    public = (
        name for name in _PUBLIC if getattr(sys.modules.get(name), cls.__qualname__, None) is cls
    )
    return f"{next(public, cls.__module__)}:{cls.__qualname__}"


def _find_class(path: Any) -> Any:
    """Return the class at a path `module:qualname` in imported modules; UnknownClassError if there is none."""
    module, _, names = path.partition(":") if isinstance(path, str) else ("", "", "")
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, type):
        raise UnknownClassError(f"class={path!r}: not in this process: import its module first")
    return found
