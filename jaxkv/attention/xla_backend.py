"""Backend in plain XLA: runs everywhere, and is the oracle of the others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxkv.attention import columns, xla
from jaxkv.attention.backend import Backend
from jaxkv.attention.columns import Received
from jaxkv.attention.xla import Walk


class Xla(Backend):
    """Attention by `xla` and `columns`: prompts one by one; keys of a shared pool are read once for all uses."""

    at_once = False
    keeps_norms = True

    def prefill(
        self, q: Array, k: Array, v: Array, length: Array, first: Array | None = None, *, lse: bool = True
    ) -> tuple[Array, Array | None]:
        """Causal attention of prompts, one after the other, with log-sum-exp or None."""

        def one(q, k, v, first=None):
            """Output and log-sum-exp of one prompt."""
            return xla.causal(q, k, v, jnp.int32(0) if first is None else first)

        out, found = _each(one, q, k, v, *([] if first is None else [first]))
        return out, found if lse else None

    def column_sums(self, q: Array, k: Array, lse: Array, length: Array, first: Array | None = None) -> Array:
        """Attention that each key receives from T consecutive queries of each prompt, one prompt after the other."""

        def one(q, k, lse, length, first=None):
            """Sums of one prompt."""
            begin = jnp.int32(0) if first is None else first
            real = begin + jnp.arange(q.shape[2], dtype=jnp.int32) < length
            return columns.column_sums(q, k, jnp.where(real, lse, jnp.inf), begin)

        return _each(one, q, k, lse, length, *([] if first is None else [first]))

    def window_mean(self, q: Array, k: Array, positions: Array, length: Array) -> Array:
        """Mean attention that each key receives from the last w queries, one kv head after the other."""
        return columns.window_mass(q, k, positions, lambda p, at: columns.mean_over_window(p, at).mean(axis=0))

    def attend(self, q: Array, k: Array, v: Array, start: Array, length: Array, *, walk: Walk) -> tuple[Array, Array]:
        """Attention of R queries per kv head over its segment, with log-sum-exp, in the walk's formulation."""
        return xla.over_pool(q, k, v, start, length, walk=walk)

    def attend_scored(
        self,
        q: Array,
        k: Array,
        v: Array,
        start: Array,
        length: Array,
        score: Array,
        counts: Array,
        *,
        walk: Walk,
        widest: int | None = None,
        other: Array | None = None,
    ) -> tuple[Array, Array | Received]:
        """Attention of one token, and updated scores, or a `Received` where `widest` allows to read keys once."""
        if walk is Walk.WINDOWS and widest is not None:
            return columns.walk_scored(q, k, v, start, length, widest=widest, other=other)
        out, lse = xla.over_pool(q, k, v, start, length, walk=walk)
        lse = jnp.where(counts[:, None, None], lse, jnp.inf)
        return out, columns.pool_sums(q, k, lse, start, length, score, walk=walk, weight=1 / q.shape[2])


def _each(one: Callable[..., Any], *arrays: Array) -> Any:
    """Results of a function over sequences, one after the other; without a loop for a single one."""
    if arrays[0].shape[0] > 1:
        return lax.map(lambda row: one(*row), arrays)
    alone = one(*(each.reshape(each.shape[1:]) for each in arrays))
    return jax.tree.map(lambda leaf: leaf.reshape(1, *leaf.shape), alone)
