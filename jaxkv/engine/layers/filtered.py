"""Layers that attend to the selection of the last filter layer (OmniKV), in the pool or loaded from host memory."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv import attention
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.steps import NewEntries, WorkTable
from jaxkv.attention.xla import SegmentRanges, SegmentReadMode
from jaxkv.engine.layers.dense import FullAttentionCacheLayer, Read
from jaxkv.engine.layers.step import AttentionResult, StepState
from jaxkv.engine.sparse import Loaded, SelectedPositions, find_pool_rows
from jaxkv.engine.tokens import TokenProjections


@frozen_dataclass
class SparseCacheLayer(FullAttentionCacheLayer):
    """One layer's cache in a decode step: attends to selected entries of the first `choosable`, and to all later ones.

    If generated tokens are selected as well, only the new token's own entry needs no selection.
    """

    choosable: Int[Array, "B K"]

    def get_attended_range(self, length: Int[Array, "B K"]) -> SegmentRanges:
        """Return the `SegmentRanges` of entries that need no selection: after `choosable` ones, or the new one only."""
        first = self.length if self.terms.reading.include_generated else self.choosable
        return self.make_attended_range(self.start + first, length - first, SegmentReadMode.WINDOWS)

    def find_selected_rows(
        self, chosen: SelectedPositions
    ) -> tuple[Int[Array, "B K T"], Int[Array, "B K"]]:
        """Return the pool rows `[B, K, T]` of selected positions in each head, -1 beyond, and their number `[B, K]`."""
        return find_pool_rows(chosen, self.pool, self.start, self.choosable, self.terms.reading)

    def attend_selected_entries(self, q: Float[Array, "B K G N D"], step: StepState) -> Read:
        """Return attention output and log-sum-exp over the selected entries, gathered from the pool."""
        assert step.chosen is not None
        rows, count = self.find_selected_rows(step.chosen)
        gathered = self.terms.backend.gather_pool_rows(self.pool.k, self.pool.v, rows)
        return self.attend_gathered_entries(q, *gathered, count)

    def attend_older_entries(self, q: Float[Array, "B K G N D"], step: StepState) -> Read:
        """Return several tokens' attention output and log-sum-exp over entries selected among all before the step."""
        return self.attend_selected_entries(q, step)

    def fill_work_table(self, step: StepState, work: WorkTable) -> WorkTable:
        """Return a single token's work table with the selected entries; one set if all heads hold the same entries."""
        chosen = step.chosen
        assert chosen is not None
        if self.terms.reading.every_entry:
            rows = chosen.positions[:, None]
            held = chosen.count[:, None]
        else:
            rows, held = self.find_selected_rows(chosen)
            rows = rows - self.start[..., None]
        return work._replace(rows=rows, held=held)


@frozen_dataclass
class OffloadedCacheLayer(SparseCacheLayer):
    """One layer's cache in a decode step, its prompt in a host store: attends to `loaded` and to device entries."""

    loaded: Loaded

    def attend_single_token(
        self, token: TokenProjections, new: NewEntries, step: StepState
    ) -> AttentionResult:
        """Append a single token's entry; attend to entries on the device and to loaded ones; return output and pool."""
        reach = self.get_attended_range(self.length + new.count[:, None])
        q = token.q[..., 0, :]
        append = partial(self.terms.backend.append_and_attend, shaping=self.shaping)
        out, lse, pool = append(q, new, self.pool, reach)
        read = attention.merge_attention_outputs(
            *self.attend_selected_entries(token.q, step), out[..., None, :], lse[..., None]
        )
        return AttentionResult(read, pool)

    def attend_selected_entries(self, q: Float[Array, "B K G N D"], step: StepState) -> Read:
        """Return attention output and log-sum-exp over the selected entries in `loaded`."""
        assert step.chosen is not None
        batch, *_, dim = self.loaded.shape
        both = (self.loaded[:, :, each] for each in (0, 1))
        k, v = (jnp.swapaxes(each, 1, 2).reshape(batch, -1, dim) for each in both)
        count = jnp.broadcast_to(step.chosen.count[:, None], self.start.shape)
        return self.attend_gathered_entries(q, k, v, count)

    def attend_older_entries(self, q: Float[Array, "B K G N D"], step: StepState) -> Read:
        """Return several tokens' attention output and log-sum-exp over older entries, on the device and loaded."""
        return attention.merge_attention_with_lse(
            *FullAttentionCacheLayer.attend_older_entries(self, q, step),
            *self.attend_selected_entries(q, step),
        )
