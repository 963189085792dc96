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
from jaxkv.attention.merging import with_sinks
from jaxkv.attention.xla import Walk


class Xla(Backend):
    """Backend in plain XLA for every device, the oracle of the others; prompts are processed one by one."""

    at_once = False
    windows = True

    def prefill(
        self,
        q: Array,
        k: Array,
        v: Array,
        length: Array,
        first: Array | None = None,
        *,
        lse: bool = True,
        **masking: Any,
    ) -> tuple[Array, Array | None]:
        """Causal attention, prompt by prompt; returns output and log-sum-exp (None unless `lse`)."""

        def one(q, k, v, first=None):
            """Mapped over prompts: attention output and log-sum-exp of one prompt."""
            begin = jnp.int32(0) if first is None else first
            return xla.causal(q, k, v, begin, **masking)

        out, found = _each(one, q, k, v, *([] if first is None else [first]))
        return out, found if lse else None

    def column_sums(
        self,
        q: Array,
        k: Array,
        lse: Array,
        length: Array,
        first: Array | None = None,
        **capping: Any,
    ) -> Array:
        """Attention `f32[B, K, G, S]` that keys receive, summed over T queries, given the queries' log-sum-exp."""

        def one(q, k, lse, length, first=None):
            """Mapped over prompts: attention `f32[K, G, S]` that one prompt's keys receive, summed over its queries."""
            begin = jnp.int32(0) if first is None else first
            real = begin + jnp.arange(q.shape[2], dtype=jnp.int32) < length
            return columns.column_sums(q, k, jnp.where(real, lse, jnp.inf), begin, **capping)

        return _each(one, q, k, lse, length, *([] if first is None else [first]))

    def window_mean(
        self,
        q: Array,
        k: Array,
        positions: Array,
        length: Array,
        sink_logits: Array | None = None,
        **capping: Any,
    ) -> Array:
        """Mean attention `f32[B, K, S]` that each key receives from the last w queries, head by head."""

        def mean(p: Array, at: Array) -> Array:
            return columns.mean_over_window(p, at).mean(axis=0)

        return columns.window_mass(q, k, positions, mean, sink_logits=sink_logits, **capping)

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        start: Array,
        length: Array,
        *,
        walk: Walk,
        **capping: Any,
    ) -> tuple[Array, Array]:
        """Attention of R queries per kv head over its segment, read by `walk`; returns output and log-sum-exp."""
        return xla.over_pool(q, k, v, start, length, walk=walk, **capping)

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
        sink_logits: Array | None = None,
        **capping: Any,
    ) -> tuple[Array, Array | Received]:
        """One token per sequence attends to pool rows; returns output, and scores plus attention or a `Received`."""

        def joined(out: Array, lse: Array) -> tuple[Array, Array]:
            """Output and log-sum-exp with the learned sink logits, if there are any."""
            if sink_logits is None:
                return out, lse
            out, lse = with_sinks(out[..., None, :], lse[..., None], sink_logits)
            return out[..., 0, :], lse[..., 0]

        if walk is Walk.WINDOWS and widest is not None and columns.covers(k.shape[1], widest):
            out, received = columns.walk_scored(q, k, v, start, length, widest=widest, **capping)
            out, lse = joined(out, received.lse)
            return out, received._replace(lse=lse)
        out, lse = joined(*xla.over_pool(q, k, v, start, length, walk=walk, **capping))
        lse = jnp.where(counts[:, None, None], lse, jnp.inf)
        how = {"walk": walk, "weight": 1 / q.shape[2], **capping}
        return out, columns.pool_sums(q, k, lse, start, length, score, **how)


def _each(one: Callable[..., Any], *arrays: Array) -> Any:
    """Applies `one` to each sequence of `arrays` (first axis), one after the other; returns the stacked results."""
    if arrays[0].shape[0] > 1:
        return lax.map(lambda row: one(*row), arrays)
    alone = one(*(each.reshape(each.shape[1:]) for each in arrays))
    return jax.tree.map(lambda leaf: leaf.reshape(1, *leaf.shape), alone)
