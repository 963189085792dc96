"""Windows of layers, and which layers have them, as a Hugging Face config gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv._checks import whole
from jaxkv._errors import require
from jaxkv.models.hub_reader import Keys
from jaxkv.models.values import LayerSpec, Rope

_TYPES = ("full_attention", "sliding_attention")
# One layer in so many attends to the whole prompt where a config of the family has no `layer_types`.
_EVERY = {"cohere2": 4, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4}


def read_windows(
    keys: Keys, layers: int, max_positions: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Width of each layer's window in tokens, None for none; and mask of the layers that are of the type with windows.

    A window as wide as the model's positions leaves nothing out, and counts as none; ValueError for unknown types.
    """
    kinds, pattern = keys.take("layer_types"), keys.take("sliding_window_pattern")
    typed = isinstance(kinds, (list, tuple)) and all(each in _TYPES for each in kinds)
    require(typed or kinds is None, "layer_types", kinds, f"give {' and '.join(_TYPES)} alone")
    count = layers if kinds is None else len(kinds)
    require(
        count == layers,
        "layer_types",
        f"{count} entries",
        f"give as many as num_hidden_layers={layers}, or none",
    )
    if not keys.has("layer_types"):
        remedy = f"no {keys.family} has types of layers in transformers: leave it out"
        require(kinds is None or _TYPES[1] not in kinds, "layer_types", kinds, remedy)
        kinds = None
    width = _width(keys)
    if width is not None and not keys.has("sliding_window"):
        remedy = (
            f"no {keys.family} has windows in transformers: give null, or use_sliding_window=false"
        )
        require(width >= max_positions, "sliding_window", width, remedy)
    sliding = (
        [each == _TYPES[1] for each in kinds]
        if kinds is not None
        else _usual(keys, layers, pattern)
    )
    if width is None:
        remedy = f"layers of type {_TYPES[1]} need a width: give sliding_window"
        needy = any(sliding) and (kinds is not None or keys.family in _EVERY)
        require(not needy, "layer_types", kinds, remedy)
        return (None,) * layers, (False,) * layers
    narrow = width < max_positions
    return tuple(width if each and narrow else None for each in sliding), tuple(sliding)


def _width(keys: Keys) -> int | None:
    """Width of the windows that a config switches on; None without."""
    window, used = keys.take("sliding_window"), keys.flag("use_sliding_window")
    if keys.has("sliding_window"):
        # Mistral's and Mixtral's classes, among others, have no such switch and ignore it.
        used = used or not keys.has("use_sliding_window")
    else:
        # Llama's and Falcon's classes have no windows, but transformers' caches still drop rows beyond one.
        used = used or keys.take("use_sliding_window") is None
    return whole("sliding_window", window) if used and window is not None else None


def _usual(keys: Keys, layers: int, pattern: Any) -> list[bool]:
    """Mask of a family's layers that have the config's window where `layer_types` do not say which."""
    if keys.has("max_window_layers"):
        # Of Qwen2 and Qwen3 the layers below have none.
        first = keys.whole("max_window_layers", least=0)
        return [layer >= first for layer in range(layers)]
    every = _EVERY.get(keys.family)
    if every is None:
        return [True] * layers
    every = every if pattern is None else whole("sliding_window_pattern", pattern)
    return [(layer + 1) % every != 0 for layer in range(layers)]


def with_windows(fields: Mapping[str, Any], windows: Sequence[int | None]) -> dict[str, Any]:
    """`ModelConfig` fields `rope` and `kinds` of layers with these windows, whose other properties are in `fields`."""
    kinds = fields.get("kinds") or (LayerSpec(rope=fields["rope"]),)
    specs = [
        dataclasses.replace(kinds[at % len(kinds)], window=each) for at, each in enumerate(windows)
    ]
    return {"rope": Rope(), "kinds": period_of(specs)}


def period_of(specs: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Shortest tuple of specs that, repeated in turn, gives those of all layers."""
    count = len(specs)
    period = next(
        n for n in range(1, count + 1) if all(specs[at] == specs[at % n] for at in range(count))
    )
    return tuple(specs[:period])
