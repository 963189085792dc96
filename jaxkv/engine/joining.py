"""Decode attention by a backend's kernel that writes a new token's row into the pool and attends, at once."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkv.attention import merge
from jaxkv.cache.pools import Pool, append_places
from jaxkv.cache.stores import Dense
from jaxkv.engine.bookkeeping import scores_of
from jaxkv.engine.segments import Segments, in_window
from jaxkv.engine.sparse import Chosen, over_chosen, rest_segments
from jaxkv.engine.spec import Spec
from jaxkv.engine.tokens import NewTokens, Token, reads_codes


def joins(spec: Spec, token: Token, pool: Pool, window: int | None) -> bool:
    """True if new rows are written by the kernel that attends: rows as they are, scored where it can, or in codes."""
    if spec.rolling:
        return False
    if not isinstance(pool.store, Dense):
        return not spec.scored and reads_codes(spec, pool)
    if not spec.scored:
        return spec.backend.joins(pool.store.k)
    return window is None and spec.backend.joins_scored(
        token.q, pool.store.k, spec.layout.walk, _widest(spec, token, pool)
    )


def _widest(spec: Spec, token: Token, pool: Pool) -> int | None:
    """Most rows of a segment of a shared pool whose rows the backend reaches by windows; None for other pools."""
    if not spec.layout.one_pool:
        return None
    windowed = spec.backend.windowed(pool.k, spec.config.layers * token.q.shape[1], spec.widest)
    return spec.widest if windowed else None


def attend_joining(
    spec: Spec,
    token: Token,
    pool: Pool,
    segments: Segments,
    window: int | None,
    new: NewTokens,
    chosen: Chosen | None,
) -> tuple[Float[Array, "B K G one D"], Pool, Float[Array, "B K n"] | None]:
    """Appends one token's row, attends to its segment or the last `window` rows; output, pool, shares to add or None.

    `shares` are windows of the attention that rows of a shared pool received, for `bookkeeping.with_windows`.
    Of the rows that filter layers choose from only the `chosen` ones are read, if there are some: after the append, for
    a read before it would cost a copy.
    """
    if chosen is not None:
        out, lse, pool = _joined(spec, token, pool, rest_segments(spec, segments), None, new)
        return (
            merge(*over_chosen(spec, token.q, pool, segments, chosen, None), out, lse),
            pool,
            None,
        )
    if spec.scored:
        return _scored(spec, token, pool, segments, new)
    out, _, pool = _joined(spec, token, pool, segments, window, new)
    return out, pool, None


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
        **spec.capping,
    )
    pool = _placed(spec, token, pool, segments, new)
    pool = dataclasses.replace(pool, store=pool.store.holding(k, v))
    return *token.with_sinks(out[..., None, :], lse[..., None]), pool


def _placed(spec: Spec, token: Token, pool: Pool, segments: Segments, new: NewTokens) -> Pool:
    """Pool with position and first score of one token's rows behind their segments."""
    end = jnp.where(new.count[:, None] > 0, segments.start + segments.length, pool.rows)
    begun = scores_of(token, spec)
    return append_places(pool, new.positions[:, 0], end, None if begun is None else begun[..., 0])


def _scored(
    spec: Spec, token: Token, pool: Pool, segments: Segments, new: NewTokens
) -> tuple[Float[Array, "B K G one D"], Pool, Float[Array, "B K n"] | None]:
    """Appends one token's row, attends, scores rows by the attention they receive; output, pool, shares or None.

    In a shared pool, what rows receive is left in windows: added for all layers at once it costs one pass.
    """
    widest = _widest(spec, token, pool)
    out, received, k, v = spec.backend.append_and_score(
        token.q[..., 0, :],
        (token.stored[:, :, 0], token.v[:, :, 0]),
        pool.store.view(),
        segments.start,
        segments.length,
        new.count,
        walk=spec.layout.walk,
        widest=widest,
        **token.sinks,
        **spec.capping,
    )
    pool = _placed(spec, token, pool, segments, new)
    if widest is not None:
        return (
            out[..., None, :],
            dataclasses.replace(pool, store=pool.store.holding(k, v)),
            received,
        )
    assert pool.score is not None  # Only scored pools receive.
    # Together: else XLA adds up at the end of the step, and holds what all layers' rows received until then.
    out, score = lax.optimization_barrier((out, pool.score + received))
    return (
        out[..., None, :],
        dataclasses.replace(pool, store=pool.store.holding(k, v), score=score),
        None,
    )
