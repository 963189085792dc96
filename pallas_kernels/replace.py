"""Eviction in place: the newest row of a segment takes the evicted one's place in all pool leaves, in one pass.

`replace_rows` is given the evicted row; `evict_rows` also finds it, without writing ranks to memory.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._compat import BlockSpec, Launch, call, call_named, load, pad_dim, store, when

# Rows that a program ranks at a time.
_BLOCK = 1024


@partial(jax.jit, static_argnames=("interpret",))
def replace_rows(
    k: jax.Array,
    v: jax.Array,
    pos: jax.Array,
    score: jax.Array | None,
    place: jax.Array,
    last: jax.Array,
    over: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Moves row `last` of each segment in mask `over` to row `place`, and empties its old row; returns the pool.

    Args:
        k: `[B, P, D]` pool rows; written in place if donated, as all pool leaves.
        v: `[B, P, D]`.
        pos: `i32[B, P]` positions.
        score: `f32[B, P]`, or None.
        place: `i32[B, K]` row that is overwritten.
        last: `i32[B, K]` row that is moved.
        over: `bool[B, K]` segments in which a row is moved; the others stay unchanged.
        interpret: run on any device, to check it.

    Returns:
        Keys, values, positions (-1 in the moved row's old place) and scores (0 there).
    """
    batch, pool_rows, dim = k.shape
    heads, scored = place.shape[1], score is not None
    given = (k, v, pos) if score is None else (k, v, pos, score)

    # Blocks of a program (h, b): place, last and over of head h of sequence b, scalars; then k, v [P, D], pos and score
    # [P] of sequence b, whole, and the same again as outputs.
    def kernel(place_ref, last_ref, over_ref, *refs):
        pools = refs[len(given) :]

        @when(over_ref[...] != 0)
        def _():
            _move(pools, place_ref[...], last_ref[...], dim)

    scalar = BlockSpec((None, None), lambda h, b: (b, h))
    blocks = [_whole(each) for each in given]
    out = call(
        kernel,
        place,
        last,
        over.astype(jnp.int32),
        *given,
        name="replace_rows",
        grid=(heads, batch),
        inputs=[scalar, scalar, scalar, *blocks],
        outputs=blocks,
        shapes=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in given],
        launch=Launch(warps=1, stages=1),
        interpret=interpret,
        aliases={3 + index: index for index in range(len(given))},
    )
    return (*out, None)[:4] if not scored else tuple(out)


@partial(jax.jit, static_argnames=("weigh", "interpret"))
def evict_rows(
    k: jax.Array,
    v: jax.Array,
    pos: jax.Array,
    score: jax.Array | None,
    start: jax.Array,
    length: jax.Array,
    limit: jax.Array,
    recent: jax.Array,
    seen: jax.Array,
    prompt: jax.Array,
    *,
    weigh: Callable[..., tuple[jax.Array, jax.Array]],
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """Evicts the lowest-ranked row of segments over their limit for the newest; returns the pool, and 1 where evicted.

    Args:
        k: `[B, P, D]` pool rows; written in place if donated, as all pool leaves.
        v: `[B, P, D]`.
        pos: `i32[B, P]` positions, distinct within a segment.
        score: `f32[B, P]`, or None.
        start: `i32[B, K]` first row of each segment.
        length: `i32[B, K]` its rows; the last one is the newest.
        limit: `i32[B, K]` rows that may stay.
        recent: `i32[B, K]` newest positions that always stay.
        seen: `i32[B]` tokens seen.
        prompt: `i32[B]` tokens of the prompt.
        weigh: hashable function of rows' scores (0 without any), positions, seen and prompt, traced inside the kernel;
            returns float32 ranks, of which the lowest goes and of equal ones the latest, and the evictable rows.
        interpret: run on any device, to check it.

    Returns:
        Keys, values, positions (-1 in the newest row's old place), scores (0 there), and `i32[B, K]` 1 where a row was
        evicted.
    """
    heads, dim = start.shape[1], k.shape[2]

    # Blocks of a program (h, b): start, length, limit, recent and moved of head h of sequence b, seen and prompt of b,
    # scalars; k, v [P, D], pos and score [P] of sequence b, whole, and the same again as outputs.
    def kernel(refs):
        first, rows = refs.start[...], refs.length[...]
        seen, prompt, recent = refs.seen[...], refs.prompt[...], refs.recent[...]

        def step(index, best):
            offset = index * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
            inside, at = offset < rows, first + offset
            mine = load(refs.pos.at[at], mask=inside, other=-1)
            scores = jnp.zeros((_BLOCK,), jnp.float32)
            if score is not None:
                scores = load(refs.score.at[at], mask=inside, other=0.0)
            ranks, may = weigh(scores, mine, seen, prompt)
            free = inside & may & (mine < seen - recent)
            ranks = jnp.where(free, ranks, jnp.inf)
            low = ranks.min()
            latest = jnp.where(free & (ranks == low), mine, -1).max()
            row = jnp.where(free & (mine == latest), at, -1).max()
            better = (low < best[0]) | ((low == best[0]) & (latest > best[1]))
            return tuple(
                jnp.where(better, new, old)
                for new, old in zip((low, latest, row), best, strict=True)
            )

        none = (jnp.float32(jnp.inf), jnp.int32(-1), jnp.int32(-1))
        over = rows > refs.limit[...]
        # Segments within their limit are not read.
        _, _, place = lax.fori_loop(
            0, jnp.where(over, (rows + _BLOCK - 1) // _BLOCK, 0), step, none
        )
        moves = over & (place >= 0)
        refs.moved[...] = moves.astype(jnp.int32)

        @when(moves)
        def _():
            out = [getattr(refs, f"{name}_out") for name in pools]
            _move(out, place, first + rows - 1, dim)

    pools = {"k": k, "v": v, "pos": pos} | ({} if score is None else {"score": score})
    scalar, of_sequence = (
        BlockSpec((None, None), lambda h, b: (b, h)),
        BlockSpec((None,), lambda h, b: (b,)),
    )
    tables = {"start": start, "length": length, "limit": limit, "recent": recent}
    inputs = {name: (each, scalar) for name, each in tables.items()}
    inputs |= {name: (each, of_sequence) for name, each in (("seen", seen), ("prompt", prompt))}
    shapes = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in pools.items()}
    outputs = {f"{name}_out": (shape, _whole(shape)) for name, shape in shapes.items()}
    found = call_named(
        kernel,
        name="evict_rows",
        grid=(heads, start.shape[0]),
        inputs=inputs | {name: (each, _whole(each)) for name, each in pools.items()},
        outputs=outputs | {"moved": (jax.ShapeDtypeStruct(start.shape, jnp.int32), scalar)},
        launch=Launch(warps=4, stages=1),
        interpret=interpret,
        aliases={name: f"{name}_out" for name in pools},
    )
    return found["k_out"], found["v_out"], found["pos_out"], found.get("score_out"), found["moved"]


def _whole(leaf):
    """Block spec by which a program sees all of one sequence's part of a pool leaf."""
    return BlockSpec((None, *leaf.shape[1:]), lambda h, b: (b,) + (0,) * (leaf.ndim - 1))


def _move(pools, to, at, dim):
    """Copies row `at` of a sequence's pool leaves to row `to`, then marks row `at` empty (position -1, score 0)."""
    column = jnp.arange(pad_dim(dim), dtype=jnp.int32)
    mask = None if pad_dim(dim) == dim else column < dim
    for ref in pools[:2]:
        row = load(ref.at[at, column], mask=mask, other=None if mask is None else 0.0)
        store(ref.at[to, column], row, mask=mask)
    for ref, empty in zip(pools[2:], (-1, 0), strict=False):
        cell = load(ref.at[at])
        store(ref.at[to], cell)
        # Last, because the newest row may itself be the evicted one.
        store(ref.at[at], jnp.full_like(cell, empty))
