"""Decode attention by a backend's kernel that writes a new token's row into the pool and attends, at once."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.attention import merge
from jaxkv.cache.pools import Pool, append_places
from jaxkv.cache.stores import Dense
from jaxkv.engine.bookkeeping import scores_of
from jaxkv.engine.segments import Segments, in_window
from jaxkv.engine.sparse import Chosen, over_chosen, rest_segments
from jaxkv.engine.spec import Spec
from jaxkv.engine.tokens import NewTokens, Token, reads_codes


def joins(spec: Spec, pool: Pool) -> bool:
    """True if new rows are written by the kernel that attends: unscored rows, as they are or in codes."""
    if spec.rolling or spec.scored:
        return False
    if not isinstance(pool.store, Dense):
        return reads_codes(spec, pool)
    return spec.backend.joins(pool.store.k)


def attend_joining(
    spec: Spec,
    token: Token,
    pool: Pool,
    segments: Segments,
    window: int | None,
    new: NewTokens,
    chosen: Chosen | None,
) -> tuple[Float[Array, "B K G one D"], Pool]:
    """Appends one token's row, attends to its segment or the last `window` rows; output, pool.

    Of the rows that filter layers choose from only the `chosen` ones are read, if there are some: after the append, for
    a read before it would cost a copy.
    """
    if chosen is not None:
        out, lse, pool = _joined(spec, token, pool, rest_segments(spec, segments), None, new)
        return merge(*over_chosen(spec, token, pool, segments, chosen, None), out, lse), pool
    out, _, pool = _joined(spec, token, pool, segments, window, new)
    return out, pool


def _joined(
    spec: Spec, token: Token, pool: Pool, segments: Segments, window: int | None, new: NewTokens
) -> tuple[Float[Array, "B K G one D"], Float[Array, "B K G one"], Pool]:
    """Appends one token's row and attends to its segment, or its last `window` rows; output, log-sum-exp, pool."""
    start, length, counts = segments.start, segments.length, new.count[:, None]
    near, held = in_window(start, length + counts, window)
    out, lse, k, v = spec.backend.append_and_attend(
        token.q[..., 0, :],
        pool.store.of(token.stored[:, :, 0], token.v[:, :, 0]).held,
        pool.store.held,
        near,
        held - counts,
        new.count,
        shaping=token.shaping,
    )
    end, begun = jnp.where(counts > 0, start + length, pool.rows), scores_of(token, spec)
    pool = append_places(pool, new.positions[:, 0], end, None if begun is None else begun[..., 0])
    pool = dataclasses.replace(pool, store=pool.store.holding(k, v))
    return out[..., None, :], lse[..., None], pool
