"""Device arrays of a cache, the inputs and outputs of compiled programs: pools, segment tables, policy state."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.cache.pools import Pool
from jaxkv.sharding.mesh import with_logical_axes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["prompt", "budget", "recent", "choosable", "tau", "query_buffers"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """Pytree of a policy's decode state: prompt lengths, budgets, protected entries, merging thresholds, past queries.

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
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """Pytree of first row, length and target size of each segment, `[L, B, K]`, tokens seen `[B]`, and policy state.

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
    state: State | None = None
    centre: Float[Array, "L B K D"] | None = None

    def of_layers(self, layers: Int[Array, " n"]) -> "Tables":
        """Return the tables of n layers by index: arrays `[L, ...]` become `[n, ...]`, other fields are unchanged."""
        leaves = [
            leaf[layers] if logical_axes.startswith("L ") else leaf
            for _, logical_axes, leaf in with_logical_axes(self)
        ]
        return jax.tree.unflatten(jax.tree.structure(self), leaves)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tally:
    """Pytree of counts of entries, over all layers, that the budget cut or that moved to another device.

    Attributes:
        moved: `i32[B]` entries of each sequence that moved to another device's heads because the policy's `capacity`
            was reached; None if it cannot be reached.
        cut: `i32[B, K]` entries of each kv head whose scores reached the policy's `threshold`, evicted because the
            budget was full; None without a threshold.
    """

    moved: Int[Array, " B"] | None = None
    cut: Int[Array, "B K"] | None = None

    def plus(self, other: "Tally") -> "Tally":
        """Add two tallies field by field; None counts as zero, but None plus None is None."""
        return Tally(moved=_sum(self.moved, other.moved), cut=_sum(self.cut, other.cut))


def _sum(one: Array | None, other: Array | None) -> Array | None:
    """Sum the arrays that are not None; None without any."""
    present = [each for each in (one, other) if each is not None]
    return functools.reduce(jnp.add, present) if present else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """Pytree of all device arrays of a KV cache: pools of entries, and tables of segments, tokens, policy state."""

    pools: tuple[Pool, ...]
    tables: Tables

    def updated(self, *, pools: tuple[Pool, ...] | None = None, **tables: Any) -> "Cache":
        """Return a copy of the cache with `pools`, and fields of its `tables` by name, replaced."""
        pools = self.pools if pools is None else pools
        return Cache(pools=pools, tables=dataclasses.replace(self.tables, **tables))
