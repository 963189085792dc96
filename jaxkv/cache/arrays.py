"""Device arrays of a cache, the inputs and outputs of compiled programs: pools, segment tables, policy state."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.cache.pools import EntryPool
from jaxkv.models.states import DeltaState
from jaxkv.sharding.mesh import list_leaves_with_axes


@jax.tree_util.register_dataclass
@frozen_dataclass
class PolicyState:
    """Policy decode state (pytree): prompt lengths, budgets, recent and selectable counts, thresholds, queries.

    Only policies that evict or recompress after the prompt have this state.

    Attributes:
        prompt: `i32[B]` tokens of the prompt, which protected spans refer to.
        budget: `i32[B]` mean number of entries per kv head and layer, fixed with the prompt. If nothing is evicted, the
            number of entries that are read.
        recent: `i32[L, B]` number of most recent entries that are never evicted.
        choosable: `i32[L, B, K]` number of entries at the head of each segment that filter layers select from: the
            prompt's entries on the device. None if every layer reads all entries.
        tau: `f32[L, B, K, n]` running merging thresholds, -inf before the first evicted entry; None without merging.
        query_buffers: one per layer, or per filter layer, `f32[B, K, G, R, D]`: the query at position p is at index p %
            R. Empty if the policy needs no past queries.
    """

    prompt: Int[Array, " B"]
    budget: Int[Array, " B"]
    recent: Int[Array, "L B"]
    choosable: Int[Array, "L B K"] | None = None
    tau: Float[Array, "L B K n"] | None = None
    query_buffers: tuple[Float[Array, "B K G R D"], ...] = ()


@jax.tree_util.register_dataclass
@frozen_dataclass
class SegmentTables:
    """Pytree of segments' first rows, lengths, target sizes `[L, B, K]`, tokens seen `[B]`, policy state, key centres.

    Attributes:
        start: `i32[L, B, K]` first row of each segment.
        length: `i32[L, B, K]` entries in each segment.
        limit: `i32[L, B, K]` the policy's target size of each segment; only policies that evict keep appended entries
            within it.
        seen: `i32[B]` tokens seen by each sequence, which is its next position; never derived from `length`.
        state: the policy's state; None for policies that only compress the prompt.
        centre: `f32[L, B, K, D]` vector subtracted from all keys of a head before the Hadamard transform of keys and
            values; None if pools hold entries untransformed.
    """

    start: Int[Array, "L B K"]
    length: Int[Array, "L B K"]
    limit: Int[Array, "L B K"]
    seen: Int[Array, " B"]
    state: PolicyState | None = None
    centre: Float[Array, "L B K D"] | None = None

    def select_layer_tables(self, layers: Int[Array, " n"]) -> "SegmentTables":
        """Return `SegmentTables` of the n layers at indices `layers`: arrays `[L, ...]` become `[n, ...]`."""
        leaves = [
            leaf[layers] if logical_axes.startswith("L ") else leaf
            for _, logical_axes, leaf in list_leaves_with_axes(self)
        ]
        return jax.tree.unflatten(jax.tree.structure(self), leaves)

    @property
    def query_buffers(self) -> tuple[Float[Array, "B K G R D"], ...]:
        """Query buffers of the policy's state, in the order of layers; empty without a state."""
        return () if self.state is None else self.state.query_buffers

    def replace_query_buffers(
        self, buffers: Sequence[Float[Array, "B K G R D"]]
    ) -> "SegmentTables":
        """Return the tables with other query buffers in the policy's state; the same tables without a state."""
        if self.state is None:
            return self
        state = dataclasses.replace(self.state, query_buffers=tuple(buffers))
        return dataclasses.replace(self, state=state)

    def join_layer_groups(self, parts: Sequence["SegmentTables"]) -> "SegmentTables":
        """Return these tables with lengths, thresholds and query buffers of consecutive groups of all layers."""
        length = jnp.concatenate([part.length for part in parts])
        states = [part.state for part in parts if part.state is not None]
        taus = [each.tau for each in states if each.tau is not None]
        joined = dataclasses.replace(self, length=length).replace_query_buffers(
            [each for part in parts for each in part.query_buffers]
        )
        if not taus or joined.state is None:
            return joined
        return dataclasses.replace(
            joined, state=dataclasses.replace(joined.state, tau=jnp.concatenate(taus))
        )


@jax.tree_util.register_dataclass
@frozen_dataclass
class EntryOverflowCounts:
    """Pytree of counts: places `[B]` that `capacity` gave other devices' heads; `[B, K]` evicted despite `threshold`.

    Attributes:
        moved: `i32[B]` entries of each sequence that moved to another device's heads because the policy's `capacity`
            was reached; None if it cannot be reached.
        cut: `i32[B, K]` entries of each kv head whose scores reached the policy's `threshold`, evicted because the
            budget was full; None without a threshold.
    """

    moved: Int[Array, " B"] | None = None
    cut: Int[Array, "B K"] | None = None

    def add_counts(self, other: "EntryOverflowCounts") -> "EntryOverflowCounts":
        """Return the sum of two `EntryOverflowCounts` by field; a None counts as 0, two Nones stay None."""
        return EntryOverflowCounts(
            moved=_sum_present_arrays(self.moved, other.moved),
            cut=_sum_present_arrays(self.cut, other.cut),
        )


def _sum_present_arrays(one: Array | None, other: Array | None) -> Array | None:
    """Return the sum of two arrays; if one is None the other array, and None if both are."""
    present = [each for each in (one, other) if each is not None]
    return functools.reduce(jnp.add, present) if present else None


@jax.tree_util.register_dataclass
@frozen_dataclass
class CacheArrays:
    """Pytree of a KV cache's pools, `SegmentTables` (segments, tokens seen, policy state), states; no logits or tally.

    Attributes:
        pools: entries of the layers that have them.
        tables: their segments.
        states: states of the layers that have one instead, in order.
    """

    pools: tuple[EntryPool, ...]
    tables: SegmentTables
    states: tuple[DeltaState, ...] = ()

    def replace_arrays(
        self,
        *,
        pools: tuple[EntryPool, ...] | None = None,
        states: tuple[DeltaState, ...] | None = None,
        **tables: Any,
    ) -> "CacheArrays":
        """Return a copy of the `CacheArrays` with `pools`, `states`, and fields of `tables` by name, replaced."""
        return CacheArrays(
            pools=self.pools if pools is None else pools,
            tables=dataclasses.replace(self.tables, **tables),
            states=self.states if states is None else states,
        )
