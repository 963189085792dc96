"""Decode attention by a backend's kernel that writes a new token's row into the pool and attends, at once."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.cache.pools import Pool, append_places
from jaxkv.cache.stores import Dense
from jaxkv.engine.bookkeeping import scores_of
from jaxkv.engine.segments import Segments, in_window
from jaxkv.engine.spec import Spec
from jaxkv.engine.tokens import NewTokens, Token


def joins(spec: Spec, pool: Pool) -> bool:
    """True if new rows are written by the kernel that attends: rows as they are, which attention does not score."""
    return isinstance(pool.store, Dense) and not spec.scored and not spec.rolling and spec.backend.joins(pool.store.k)


def attend_joining(
    spec: Spec, token: Token, pool: Pool, segments: Segments, window: int | None, new: NewTokens
) -> tuple[Float[Array, "B K G one D"], Pool]:
    """Appends one token's row and attends to its segment, or the last `window` rows of it; returns output and pool."""
    start, length, counts = segments.start, segments.length, new.count[:, None]
    near, held = in_window(start, length + counts, window)
    out, lse, k, v = spec.backend.append_and_attend(
        token.q[..., 0, :],
        (token.stored[:, :, 0], token.v[:, :, 0]),
        pool.store.view(),
        near,
        held - counts,
        new.count,
        **spec.capping,
    )
    end = jnp.where(counts > 0, start + length, pool.rows)
    begun = scores_of(token, spec)
    pool = append_places(pool, new.positions[:, 0], end, None if begun is None else begun[..., 0])
    pool = dataclasses.replace(pool, store=pool.store.holding(k, v))
    return token.with_sinks(out[..., None, :], lse[..., None])[0], pool
