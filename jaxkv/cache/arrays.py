"""The arrays of a cache on the device: pools of rows, tables of where rows lie, and what the policy remembers."""

import dataclasses
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxkv.cache.pools import Pool


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["prompt", "budget", "recent", "choosable", "tau", "rings"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """What policies remember that go on after the prompt.

    Attributes:
        prompt: `i32[B]` tokens of the prompt, which protected spans refer to.
        budget: `i32[B]` rows per kv head and layer on average, fixed with the prompt; where nothing is dropped, tokens
            of it that are read.
        recent: `i32[L, B]` most recent rows that are never dropped.
        choosable: `i32[L, B, K]` first rows of each segment that filter layers choose from, those of the prompt; rows
            that wait in host memory are not among them. None where every layer reads everything.
        tau: `f32[L, B, K, n]` merging's running thresholds, -inf before the first dropped row; None without merging.
        rings: one per layer, or per filter layer, `f32[B, K, G, R, D]`: the query at position p stands in slot p % R;
            none where nobody asks for queries of before.
    """

    prompt: Int[Array, " B"]
    budget: Int[Array, " B"]
    recent: Int[Array, "L B"]
    choosable: Int[Array, "L B K"] | None = None
    tau: Float[Array, "L B K n"] | None = None
    rings: tuple[Float[Array, "B K G R D"], ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """Where the rows of every segment lie in their pools, tokens of each sequence, and what the policy remembers.

    Attributes:
        start: `i32[L, B, K]` first row of each segment.
        length: `i32[L, B, K]` rows in each segment.
        limit: `i32[L, B, K]` the policy's target size of each segment; appended rows go beyond it where the policy
            does not drop rows.
        seen: `i32[B]` tokens the sequence has had, and so the next position. Never derived from length.
        state: what the policy remembers; None for policies that only act on the prompt.
    """

    start: Int[Array, "L B K"]
    length: Int[Array, "L B K"]
    limit: Int[Array, "L B K"]
    seen: Int[Array, " B"]
    state: State | None = None

    def of_layers(self, layers: Int[Array, " n"]) -> "Tables":
        """The tables of a few layers; queries remembered stay those of all.

        Args:
            layers: `i32[n]` their indices.

        Returns:
            Tables of n layers.
        """
        state = self.state
        if state is not None:
            some = lambda table: None if table is None else table[layers]  # noqa: E731
            tables: dict[str, Any] = {name: some(getattr(state, name)) for name in ("recent", "choosable", "tau")}
            state = dataclasses.replace(state, **tables)
        start, length, limit = (table[layers] for table in (self.start, self.length, self.limit))
        return Tables(start=start, length=length, limit=limit, seen=self.seen, state=state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """All arrays of a cache on the device: what programs take and give.

    Attributes:
        pools: one per layer, or a single one shared by all layers.
        tables: where their rows lie, and what the policy remembers.
    """

    pools: tuple[Pool, ...]
    tables: Tables

    def updated(self, *, pools: tuple[Pool, ...] | None = None, **tables: Any) -> "Cache":
        """A copy with other pools, or other tables by name."""
        pools = self.pools if pools is None else pools
        return Cache(pools=pools, tables=dataclasses.replace(self.tables, **tables))
