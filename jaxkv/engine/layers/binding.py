"""`make_cache_layer`: the kind of view of a layer's entries, selected while a step is traced."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Int

from jaxkv.attention.shaping import PLAIN, LogitShaping
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.layers.dense import FullAttentionCacheLayer
from jaxkv.engine.layers.evicting import ScoredCacheLayer
from jaxkv.engine.layers.filtered import OffloadedCacheLayer, SparseCacheLayer
from jaxkv.engine.layers.paged import QuestCacheLayer
from jaxkv.engine.layers.sliding_window import SlidingWindowCacheLayer
from jaxkv.engine.layers.terms import DecodeAttentionConfig
from jaxkv.engine.layers.unencoded import ResidualCacheLayer
from jaxkv.engine.sparse import Loaded


def make_cache_layer(
    terms: DecodeAttentionConfig,
    pool: EntryPool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    *,
    shaping: LogitShaping = PLAIN,
    sliding_window: int | None = None,
    choosable: Int[Array, "B K"] | None = None,
    loaded: Loaded | None = None,
    index: int = 0,
    rotated: Callable[[Array], Array] | None = None,
) -> FullAttentionCacheLayer:
    """Return an object to append tokens to a layer and attend: a `FullAttentionCacheLayer`, or a subclass of it.

    Args:
        terms: static config.
        pool: entries, with free places behind every segment for new ones.
        start: first pool row of each segment.
        length: number of entries per segment.
        shaping: sink logits and soft cap of the layer's logits.
        sliding_window: number of last tokens that the layer's tokens attend to; None for all.
        choosable: number of first entries per segment that need a filter's selection; None without selection.
        loaded: the selected entries, if loaded from host memory.
        index: index of the layer in the step's work table.
        rotated: function that rotates keys before attention; None if the pool holds rotated keys.

    Returns:
        The view; its `append_tokens_and_attend` runs the step.
    """
    own: dict[str, Any] = {"terms": terms, "pool": pool, "start": start, "length": length}
    own |= {"shaping": shaping, "index": index, "rotated": rotated}
    if sliding_window is not None:
        return SlidingWindowCacheLayer(**own, window=sliding_window)
    if pool.bounds is not None:
        return QuestCacheLayer(**own)
    if pool.residual is not None:
        return ResidualCacheLayer(**own)
    if choosable is None:
        return (
            ScoredCacheLayer(**own)
            if terms.uses_attention_scores
            else FullAttentionCacheLayer(**own)
        )
    if loaded is None:
        return SparseCacheLayer(**own, choosable=choosable)
    return OffloadedCacheLayer(**own, choosable=choosable, loaded=loaded)
