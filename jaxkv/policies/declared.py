"""`Observed` as a scorer is given it: what the scorer did not ask for by its properties cannot be read."""

import dataclasses
import functools
from typing import Any

import jax

from jaxkv.policies.scorer import Observed, Scorer

# Fields of `Observed` that not every scorer is given, by the property that asks for them.
_FIELDS = {
    "queries": ("q", "q_positions"),
    "norms": ("norms", "norm_totals"),
    "blocks": ("blocks", "unrotated"),
    "gate": ("hidden", "gate"),
    "draws": ("key",),
    "sums": ("sums",),
    "future": ("moments",),
    "replay": ("replayed",),
}
_SETTINGS = ("softcap", "implementation", "axes", "group_axes")


def seen_by(scorer: Scorer, seen: Observed, *also: str) -> Observed:
    """A layer as a scorer is given it: only fields that its properties, or those in `also`, ask for can be read."""
    view = _without(
        tuple(each for each in _FIELDS if each not in also and not getattr(scorer, each, None))
    )
    return view(**{field.name: vars(seen)[field.name] for field in dataclasses.fields(view)})


@functools.cache
def _without(properties: tuple[str, ...]) -> type[Observed]:
    """Subclass of `Observed`, a pytree, without the fields of some properties; reading one of these raises TypeError.

    Its dataclass fields are those that are there, so that `dataclasses.replace` works as well.
    """
    hidden = {field: _unasked(field, each) for each in properties for field in _FIELDS[each]}
    fields = {
        name: field for name, field in Observed.__dataclass_fields__.items() if name not in hidden
    }
    body = {
        "__init__": _init,
        "__repr__": object.__repr__,
        "__dataclass_fields__": fields,
        **hidden,
    }
    arrays = [name for name in fields if name not in _SETTINGS]
    return jax.tree_util.register_dataclass(
        type("Observed", (Observed,), body), arrays, list(_SETTINGS)
    )


def _init(seen: Observed, **fields: Any) -> None:
    """Stores fields, whose values may be traced, without validation."""
    vars(seen).update(fields)


def _unasked(field: str, name: str) -> property:
    """Property that raises TypeError and names the property of a scorer that asks for a field of `Observed`."""

    def read(seen: Observed) -> Any:
        raise TypeError(
            f"seen.{field}: it is computed for a scorer whose property `{name}` asks for it: define this"
        )

    return property(read)
