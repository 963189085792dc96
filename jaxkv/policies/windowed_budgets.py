"""Budgets of models with window layers: tables by layer lose the rows of layers that take part in no budget."""

import dataclasses
from functools import lru_cache
from typing import Any

from jaxkv._errors import require
from jaxkv.policies.heads import inner_budgets, needs_layer, own_limits, within_stages


@lru_cache(maxsize=256)
def cut_to_whole(parts: Any, windows: tuple[int | None, ...]) -> Any:
    """Copy of a policy's `Parts` whose layer and head budgets are those of the layers without a window; memoised.

    `windows` are `ModelConfig.windows`. Budgets with a method `among` cut their tables, others are kept as they are;
    ValueError if a table names layers with windows, or if head budgets that differ by layer cannot be cut.
    """
    layers, heads = parts.layers, parts.heads
    inner = inner_budgets(heads)
    by_layer = needs_layer(heads) or own_limits(heads) is not None
    remedy = "they differ by layer, and some layers of this model have windows: give them a method among(windows), "
    remedy += "which returns those of the other layers alone"
    require(not by_layer or hasattr(inner, "among"), "heads", heads, remedy)
    if hasattr(layers, "among"):
        layers = layers.among(windows)
    if hasattr(inner, "among"):
        heads = within_stages(heads, inner.among(windows))
    return dataclasses.replace(parts, layers=layers, heads=heads)
