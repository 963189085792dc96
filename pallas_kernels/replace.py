"""Eviction in place: the newest row of a segment takes the evicted one's place in all pool leaves, in one pass.

`replace_rows` is given the evicted row; `evict_rows` also finds it, without writing ranks to memory.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._compat import BlockSpec, Launch, call, load, pad_dim, store, when

# Rows that a program ranks at a time.
_BLOCK = 1024
# Block of a number of each head of a sequence.
_SCALAR = BlockSpec((None, None), lambda h, b: (b, h))


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
    """Move row `last` of each segment in mask `over` to row `place`, and empties its old row; return the pool.

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

    # Blocks of a program (h, b): place, last and over of head h of sequence b, scalars; then k, v [P, D], pos and score
    # [P] of sequence b, whole, and the same again as outputs.
    def kernel(refs):
        @when(refs.over[...] != 0)
        def _():
            _move(refs, pools, refs.place[...], refs.last[...])

    pools = _pools(k, v, pos, score)
    tables = {"place": place, "last": last, "over": over.astype(jnp.int32)}
    found = call(
        kernel,
        name="replace_rows",
        grid=(place.shape[1], place.shape[0]),
        inputs={name: (each, _SCALAR) for name, each in tables.items()}
        | {name: _whole(each) for name, each in pools.items()},
        outputs=_written(pools),
        launch=Launch(warps=1, stages=1),
        interpret=interpret,
        aliases={name: f"{name}_out" for name in pools},
    )
    return found["k_out"], found["v_out"], found["pos_out"], found.get("score_out")


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
    """Evict the lowest-ranked row of segments over their limit for the newest; return the pool, and 1 where evicted.

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
            _move(refs, pools, place, first + rows - 1)

    pools = _pools(k, v, pos, score)
    of_sequence = BlockSpec((None,), lambda h, b: (b,))
    tables = {"start": start, "length": length, "limit": limit, "recent": recent}
    inputs = {name: (each, _SCALAR) for name, each in tables.items()}
    inputs |= {name: (each, of_sequence) for name, each in (("seen", seen), ("prompt", prompt))}
    found = call(
        kernel,
        name="evict_rows",
        grid=(start.shape[1], start.shape[0]),
        inputs=inputs | {name: _whole(each) for name, each in pools.items()},
        outputs=_written(pools)
        | {"moved": (jax.ShapeDtypeStruct(start.shape, jnp.int32), _SCALAR)},
        launch=Launch(warps=4, stages=1),
        interpret=interpret,
        aliases={name: f"{name}_out" for name in pools},
    )
    return found["k_out"], found["v_out"], found["pos_out"], found.get("score_out"), found["moved"]


def _pools(k, v, pos, score):
    """Pool leaves by name; without a score three."""
    return {"k": k, "v": v, "pos": pos} | ({} if score is None else {"score": score})


def _whole(leaf):
    """Kernel operand of a pool leaf, of which a program sees all of one sequence's part."""
    return leaf, BlockSpec((None, *leaf.shape[1:]), lambda h, b: (b,) + (0,) * (leaf.ndim - 1))


def _written(pools):
    """Kernel outputs of pool leaves, which are written in place."""
    shapes = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in pools.items()}
    return {f"{name}_out": _whole(shape) for name, shape in shapes.items()}


def _move(refs, pools, to, at):
    """Copy row `at` of a sequence's pool leaves to row `to`, then marks row `at` empty (position -1, score 0)."""
    dim = pools["k"].shape[2]
    column = jnp.arange(pad_dim(dim), dtype=jnp.int32)
    mask = None if pad_dim(dim) == dim else column < dim
    for ref in (refs.k_out, refs.v_out):
        row = load(ref.at[at, column], mask=mask, other=None if mask is None else 0.0)
        store(ref.at[to, column], row, mask=mask)
    for name, empty in (("pos", -1), ("score", 0)):
        if name in pools:
            ref = getattr(refs, f"{name}_out")
            cell = load(ref.at[at])
            store(ref.at[to], cell)
            # Last, because the newest row may itself be the evicted one.
            store(ref.at[at], jnp.full_like(cell, empty))
