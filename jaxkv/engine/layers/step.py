"""Records that a decode step hands from layer to layer: new tokens, a filter's choice, a fused kernel's work table."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv.attention.steps import WorkTable
from jaxkv.cache import Cache, Pool
from jaxkv.engine.pages import full_pages, rest_from
from jaxkv.engine.segments import in_window
from jaxkv.engine.sparse import Chosen, rest_of
from jaxkv.engine.spec import Spec
from jaxkv.engine.tokens import NewTokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A decode step between two layers.

    Attributes:
        new: the new tokens.
        work: table of the fused kernels; None where steps are not fused.
        chosen: positions that the last filter layer chose; None below the first one.
    """

    new: NewTokens
    work: WorkTable | None = None
    chosen: Chosen | None = None

    @property
    def several(self) -> bool:
        """True for several new tokens of each sequence."""
        return self.new.positions.shape[1] > 1


class Attended(NamedTuple):
    """New tokens' attention, undefined in padding sequences, and the layer's pool with their entries."""

    out: Float[Array, "M K G N D"]
    pool: Pool


def work_table(cache: Cache, spec: Spec, new: NewTokens) -> WorkTable | None:
    """Table of row chunks that programs of a fused decode kernel read, for all layers; None if steps are not fused."""
    if spec.rolling or not spec.streams(new.positions.shape[1]):
        return None
    tables, picked, rest = cache.tables, None, None
    start, length = tables.start, tables.length
    sparse = np.asarray([spec.sparse(layer, 1) for layer in range(len(start))])
    if new.candidates is not None and sparse.any():
        # The kernel counts chosen entries as if they lay right before the entries that are always read, from row 0 on.
        some = sparse[:, None, None]
        if page := spec.reading.page:
            full = full_pages(length, new.candidates.budget[:, None], page)
            picked, rest = full.max(axis=(0, 2)) * page, rest_from(length, page)
        else:
            picked, rest = jnp.minimum(*new.candidates), rest_of(spec, tables)
        length = jnp.where(some, picked[:, None] + length - rest, length)
        start = jnp.where(some, 0, start)
    if any(spec.config.sliding_windows):
        # The new entry joins behind, and is one of the window's.
        endless = np.iinfo(np.int32).max
        widths = [endless if each is None else each - 1 for each in spec.config.sliding_windows]
        start, length = in_window(start, length, jnp.asarray(widths, jnp.int32)[:, None, None])
    itemsize = cache.pools[0].store.element_bytes
    chunks = spec.backend.work_table(start, length, dim=spec.config.head_dim, itemsize=itemsize)
    return WorkTable(chunks, tables.start, picked, rest)
