"""Layers that attend to the selection of the last filter layer (OmniKV), in the pool or loaded from host memory."""

import dataclasses
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv import attention
from jaxkv.attention.steps import NewEntries, WorkTable
from jaxkv.attention.xla import Reach, Walk
from jaxkv.engine.layers.dense import DenseLayer, Read
from jaxkv.engine.layers.step import Attended, Step
from jaxkv.engine.sparse import Chosen, Loaded, rows_of
from jaxkv.engine.tokens import Token


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilteredLayer(DenseLayer):
    """Entries of a layer that attends to selected ones of its first `choosable` entries, and to all later entries.

    If generated tokens are selected as well, only the new token's own entry needs no selection.
    """

    choosable: Int[Array, "B K"]

    def reach(self, length: Int[Array, "B K"]) -> Reach:
        """Return the entries attended to without a selection: few, at places known only at run time."""
        first = self.length if self.terms.reading.include_generated else self.choosable
        return self.reaching(self.start + first, length - first, Walk.WINDOWS)

    def places(self, chosen: Chosen) -> tuple[Int[Array, "B K T"], Int[Array, "B K"]]:
        """Return the pool rows of selected positions, and their number."""
        return rows_of(chosen, self.pool, self.start, self.choosable, self.terms.reading)

    def chosen(self, q: Float[Array, "B K G N D"], step: Step) -> Read:
        """Return attention to the selected entries in the pool."""
        assert step.chosen is not None
        rows, count = self.places(step.chosen)
        gathered = self.terms.backend.gathered(self.pool.k, self.pool.v, rows)
        return self.over(q, *gathered, count)

    def older(self, q: Float[Array, "B K G N D"], step: Step) -> Read:
        """Return attention of several tokens, which select among all entries from before the step."""
        return self.chosen(q, step)

    def work(self, step: Step, work: WorkTable) -> WorkTable:
        """Return a single token's work table with the selected entries; one set if all heads hold the same entries."""
        chosen = step.chosen
        assert chosen is not None
        if self.terms.reading.every_entry:
            rows, held = chosen.positions[:, None], chosen.count[:, None]
        else:
            rows, held = self.places(chosen)
            rows = rows - self.start[..., None]
        return work._replace(rows=rows, held=held)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadedLayer(FilteredLayer):
    """Entries of a layer whose prompt is in a host store; the selected entries are `loaded`."""

    loaded: Loaded

    def one(self, token: Token, new: NewEntries, step: Step) -> Attended:
        """Append a single token's entry; attend to entries on the device and to loaded ones."""
        reach, q = self.reach(self.length + new.count[:, None]), token.q[..., 0, :]
        append = partial(self.terms.backend.append_and_attend, shaping=self.shaping)
        out, lse, pool = append(q, new, self.pool, reach)
        read = attention.merge(*self.chosen(token.q, step), out[..., None, :], lse[..., None])
        return Attended(read, pool)

    def chosen(self, q: Float[Array, "B K G N D"], step: Step) -> Read:
        """Return attention to the selected entries, as loaded."""
        assert step.chosen is not None
        batch, *_, dim = self.loaded.shape
        both = (self.loaded[:, :, each] for each in (0, 1))
        k, v = (jnp.swapaxes(each, 1, 2).reshape(batch, -1, dim) for each in both)
        count = jnp.broadcast_to(step.chosen.count[:, None], self.start.shape)
        return self.over(q, k, v, count)

    def older(self, q: Float[Array, "B K G N D"], step: Step) -> Read:
        """Return attention of several tokens to entries from before the step, loaded or on the device."""
        return attention.merge_with_lse(*DenseLayer.older(self, q, step), *self.chosen(q, step))
