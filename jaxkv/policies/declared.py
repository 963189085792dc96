"""`Observed` as a scorer is given it: what the scorer did not ask for by its properties cannot be read."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from jaxkv.policies.scorer import Observed, Scorer

# Fields of `Observed` that not every scorer is given, and the property by which a scorer asks for each.
_PROPERTIES = {
    **dict.fromkeys(("q", "q_positions"), "queries"),
    **dict.fromkeys(("norms", "norm_totals"), "norms"),
    **dict.fromkeys(("blocks", "unrotated"), "blocks"),
    **dict.fromkeys(("hidden", "gate"), "gate"),
    **{"key": "draws", "sums": "sums", "moments": "future", "replayed": "replay"},
}
_NAMES = tuple(field.name for field in dataclasses.fields(Observed))
_SETTINGS = ("softcap", "implementation", "axes", "group_axes")
_ARRAYS = tuple(name for name in _NAMES if name not in _SETTINGS)


class _Declared(Observed):
    """`Observed` of one scorer, None in fields that it did not ask for; reading one of these raises TypeError."""

    def __init__(self, **fields: Any):
        """Takes fields by name, whose values may be traced, without validation."""
        vars(self).update(dict.fromkeys(_NAMES) | fields)

    __repr__ = object.__repr__

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            """Attribute of that name; TypeError, which names the property to declare, for one not asked for."""
            value, held = super().__getattribute__(name), super().__getattribute__("__dict__")
            if name == "__dataclass_fields__":
                # `dataclasses.replace` reads every field that it finds here.
                return {each: kind for each, kind in value.items() if held[each] is not None}
            if value is None and name in _PROPERTIES:
                remedy = f"it is computed for a scorer whose property `{_PROPERTIES[name]}` asks for it: define this"
                raise TypeError(f"seen.{name}: {remedy}")
            return value


jax.tree_util.register_pytree_node(
    _Declared,
    lambda seen: ([vars(seen)[name] for name in _ARRAYS], tuple(vars(seen)[name] for name in _SETTINGS)),
    lambda settings, arrays: _Declared(**dict(zip((*_ARRAYS, *_SETTINGS), (*arrays, *settings), strict=True))),
)


def seen_by(scorer: Scorer, seen: Observed, *also: str) -> Observed:
    """A layer as a scorer is given it: only fields that its properties, or those in `also`, ask for can be read."""
    asked = {*also, *(name for name in _PROPERTIES.values() if getattr(scorer, name, None))}
    return _Declared(**{name: vars(seen)[name] for name in _NAMES if _PROPERTIES.get(name) in {None, *asked}})
