"""State passed from layer to layer in a decode step: new tokens, a filter's selection, a fused kernel's work table."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.steps import WorkTable
from jaxkv.cache import CacheArrays, EntryPool
from jaxkv.engine.pages import count_full_pages, find_newest_page
from jaxkv.engine.segments import restrict_to_window
from jaxkv.engine.sparse import SelectedPositions, find_dense_offset
from jaxkv.engine.spec import DecodeSpec
from jaxkv.engine.tokens import NewTokens


@frozen_dataclass
class StepState:
    """State passed from layer to layer in a decode step: new tokens, work table, the last filter layer's selection.

    Attributes:
        new: the new tokens.
        work: work table of the fused kernels; None if steps are not fused.
        chosen: positions selected by the last filter layer; None below the first one.
    """

    new: NewTokens
    work: WorkTable | None = None
    chosen: SelectedPositions | None = None

    @property
    def has_several_tokens(self) -> bool:
        """True if the step has several new tokens per sequence."""
        return self.new.positions.shape[1] > 1


class AttentionResult(NamedTuple):
    """New tokens' attention output, undefined in padding sequences, and the layer's pool with their entries."""

    out: Float[Array, "M K G N D"]
    pool: EntryPool


def build_work_table(cache: CacheArrays, spec: DecodeSpec, new: NewTokens) -> WorkTable | None:
    """Return the work table of all layers for a fused decode kernel; None if steps are not fused or positions roll."""
    if spec.rolling or not spec.uses_fused_step(new.positions.shape[1]):
        return None
    tables = cache.tables
    picked = None
    rest = None
    start = tables.start
    length = tables.length
    sparse = np.asarray([spec.is_sparse_layer(layer, 1) for layer in range(len(start))])
    if new.candidates is not None and sparse.any():
        # The kernel counts selected entries as if they were right before the always-attended ones, from row 0 on.
        some = sparse[:, None, None]
        if page := spec.reading.page:
            full = count_full_pages(length, new.candidates.budget[:, None], page)
            picked = full.max(axis=(0, 2)) * page
            rest = find_newest_page(length, page)
        else:
            picked = jnp.minimum(*new.candidates)
            rest = find_dense_offset(spec, tables)
        length = jnp.where(some, picked[:, None] + length - rest, length)
        start = jnp.where(some, 0, start)
    if any(spec.config.sliding_windows):
        # The new entry is appended, and is one of the window's.
        endless = np.iinfo(np.int32).max
        widths = [endless if each is None else each - 1 for each in spec.config.sliding_windows]
        start, length = restrict_to_window(
            start, length, jnp.asarray(widths, jnp.int32)[:, None, None]
        )
    itemsize = cache.pools[0].store.element_bytes
    chunks = spec.backend.build_work_table(
        start, length, dim=spec.config.head_dim, itemsize=itemsize
    )
    return WorkTable(chunks, tables.start, picked, rest)
