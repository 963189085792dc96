"""Backend in plain XLA: runs on every device, and is the reference of the others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxkv.attention import columns, xla
from jaxkv.attention.backend import Backend, Capabilities
from jaxkv.attention.shaping import PLAIN, Shaping
from jaxkv.attention.xla import Reach, Walk


class Xla(Backend):
    """Backend in plain XLA for every device, the reference of the others; prompts are processed one by one."""

    can = Capabilities(at_once=False, sliding_windows=True)

    def prefill(
        self,
        q: Array,
        k: Array,
        v: Array,
        length: Array,
        first: Array | None = None,
        *,
        lse: bool = True,
        shaping: Shaping = PLAIN,
        window: int | None = None,
    ) -> tuple[Array, Array | None]:
        """Compute causal attention, prompt by prompt; return output and log-sum-exp (None unless `lse`)."""

        def one(q, k, v, first=None):
            """Return attention output and log-sum-exp of one prompt."""
            begin = jnp.int32(0) if first is None else first
            return xla.causal(q, k, v, begin, window=window, softcap=shaping.softcap)

        out, found = shaping.joined(*_each(one, q, k, v, *([] if first is None else [first])))
        return out, found if lse else None

    def column_sums(
        self,
        q: Array,
        k: Array,
        lse: Array,
        length: Array,
        first: Array | None = None,
        *,
        shaping: Shaping = PLAIN,
    ) -> Array:
        """Return the attention `f32[B, K, G, S]` that keys receive, summed over T queries."""

        def one(q, k, lse, length, first=None):
            """Return the attention `f32[K, G, S]` that one prompt's keys receive, summed over its queries."""
            begin = jnp.int32(0) if first is None else first
            real = begin + jnp.arange(q.shape[2], dtype=jnp.int32) < length
            total = jnp.where(real, lse, jnp.inf)
            return columns.column_sums(q, k, total, begin, softcap=shaping.softcap)

        return _each(one, q, k, lse, length, *([] if first is None else [first]))

    def window_mean(
        self,
        q: Array,
        k: Array,
        positions: Array,
        length: Array,
        *,
        shaping: Shaping = PLAIN,
    ) -> Array:
        """Return attention `f32[B, K, S]` to each key: mean over the last w queries and the kv head's query heads."""

        def mean(p: Array, at: Array) -> Array:
            return columns.mean_over_window(p, at).mean(axis=0)

        return columns.window_mass(q, k, positions, mean, shaping=shaping)

    def attend(
        self, q: Array, store: Any, reach: Reach, *, shaping: Shaping = PLAIN
    ) -> tuple[Array, Array]:
        """Compute attention of R queries per kv head over its segment; return output and log-sum-exp."""
        return shaping.joined(*xla.over_pool(q, *reach.view(store), reach, shaping.softcap))

    def attend_scored(
        self,
        q: Array,
        store: Any,
        reach: Reach,
        score: Array,
        counts: Array,
        *,
        shaping: Shaping = PLAIN,
    ) -> tuple[Array, Array]:
        """Attend to pool rows with one token per sequence; return output, and entries' scores plus attention."""
        (k, v), widest, cap = reach.view(store), reach.widest, shaping.softcap
        if reach.walk is Walk.WINDOWS and widest is not None and columns.covers(k.shape[1], widest):
            return columns.walk_scored(q, k, v, reach, score, counts, shaping)
        out, lse = shaping.joined(*xla.over_pool(q, k, v, reach, cap))
        lse = jnp.where(counts[:, None, None], lse, jnp.inf)
        weight = 1 / q.shape[2]
        return out, columns.pool_sums(q, k, lse, reach, score, weight=weight, softcap=cap)


def _each(one: Callable[..., Any], *arrays: Array) -> Any:
    """Apply `one` to each sequence of `arrays` (first axis) in turn; return the stacked results."""
    if arrays[0].shape[0] > 1:
        return lax.map(lambda row: one(*row), arrays)
    alone = one(*(each.reshape(each.shape[1:]) for each in arrays))
    return jax.tree.map(lambda leaf: leaf.reshape(1, *leaf.shape), alone)
