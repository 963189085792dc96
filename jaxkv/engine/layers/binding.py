"""`bound`: which kind of view a layer's entries have, decided while a step is traced."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Int

from jaxkv.attention.shaping import PLAIN, Shaping
from jaxkv.cache.pools import Pool
from jaxkv.engine.layers.dense import DenseLayer
from jaxkv.engine.layers.evicting import EvictingLayer
from jaxkv.engine.layers.filtered import FilteredLayer, OffloadedLayer
from jaxkv.engine.layers.paged import PagedLayer
from jaxkv.engine.layers.sliding_window import SlidingWindowLayer
from jaxkv.engine.layers.terms import Terms
from jaxkv.engine.sparse import Loaded


def bound(
    terms: Terms,
    pool: Pool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    *,
    shaping: Shaping = PLAIN,
    sliding_window: int | None = None,
    choosable: Int[Array, "B K"] | None = None,
    loaded: Loaded | None = None,
    index: int = 0,
    rotated: Callable[[Array], Array] | None = None,
) -> DenseLayer:
    """View of the entries of one layer before new tokens join them.

    Args:
        terms: static config.
        pool: entries, with room behind every segment for the new ones.
        start: first pool row of each segment.
        length: entries of each segment.
        shaping: of the layer's logits.
        sliding_window: number of last tokens that the layer's tokens attend to; None for all.
        choosable: first rows of each segment of which a filter's choice alone is read; None if all are.
        loaded: the chosen entries, if they come from host memory.
        index: of the layer in the step's work table.
        rotated: what turns keys as they are read; None if the pool holds them rotated.

    Returns:
        The view, whose `attended` runs the step.
    """
    own: dict[str, Any] = {"terms": terms, "pool": pool, "start": start, "length": length}
    own |= {"shaping": shaping, "index": index, "rotated": rotated}
    if sliding_window is not None:
        return SlidingWindowLayer(**own, window=sliding_window)
    if pool.bounds is not None:
        return PagedLayer(**own)
    if choosable is None:
        return EvictingLayer(**own) if terms.scored else DenseLayer(**own)
    if loaded is None:
        return FilteredLayer(**own, choosable=choosable)
    return OffloadedLayer(**own, choosable=choosable, loaded=loaded)
