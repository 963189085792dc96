"""Eviction in place: the newest entry of a segment overwrites the evicted one in all pool leaves, in one pass.

`overwrite_evicted_rows` accepts the evicted row; `evict_lowest_entries` also finds it, without writing ranks to memory.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._compat import (
    BlockSpec,
    LaunchParameters,
    call_triton_kernel,
    load,
    make_sequence_operand,
    round_up_head_dim,
    store,
    when,
)

# Rows that a program ranks at a time.
_BLOCK = 1024
# Block of one number per head of a sequence.
_SCALAR = BlockSpec((None, None), lambda h, b: (b, h))


@partial(jax.jit, static_argnames=("interpret",))
def overwrite_evicted_rows(
    k: Array,
    v: Array,
    pos: Array,
    score: Array | None,
    place: Array,
    last: Array,
    over: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array | None]:
    """In segments where `over`, move the entry in row `last` to evicted row `place`; return the pool's arrays.

    Args:
        k: `[B, P, D]` keys of the pool; written in place if donated, as all pool leaves.
        v: `[B, P, D]` values of the pool.
        pos: `i32[B, P]` positions.
        score: `f32[B, P]`, or None.
        place: `i32[B, K]` row to overwrite.
        last: `i32[B, K]` row to move.
        over: `bool[B, K]` segments in which an entry is moved; others are unchanged.
        interpret: True runs on any device, for tests.

    Returns:
        Keys, values, positions (-1 in row `last`) and scores (0 in row `last`).
    """

    # Blocks of a program (h, b): place, last and over of head h of sequence b, scalars; then k, v [P, D], pos and score
    # [P] of sequence b, complete, and the same again as outputs.
    def kernel(refs):
        @when(refs.over[...] != 0)
        def _():
            _move_row(refs, pools, refs.place[...], refs.last[...])

    pools = _collect_pool_arrays(k, v, pos, score)
    tables = {"place": place, "last": last, "over": over.astype(jnp.int32)}
    found = call_triton_kernel(
        kernel,
        name="replace_rows",
        grid=(place.shape[1], place.shape[0]),
        inputs={name: (each, _SCALAR) for name, each in tables.items()}
        | {name: make_sequence_operand(each) for name, each in pools.items()},
        outputs=_make_pool_outputs(pools),
        launch=LaunchParameters(warps=1, stages=1),
        interpret=interpret,
        aliases={name: f"{name}_out" for name in pools},
    )
    return found["k_out"], found["v_out"], found["pos_out"], found.get("score_out")


@partial(jax.jit, static_argnames=("weigh", "interpret"))
def evict_lowest_entries(
    k: Array,
    v: Array,
    pos: Array,
    score: Array | None,
    start: Array,
    length: Array,
    limit: Array,
    recent: Array,
    seen: Array,
    prompt: Array,
    *,
    weigh: Callable[..., tuple[Array, Array]],
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array | None, Array]:
    """Overwrite the lowest-ranked evictable entry of segments over limits by the newest; return pool, flags.

    Args:
        k: `[B, P, D]` keys of the pool; written in place if donated, as all pool leaves.
        v: `[B, P, D]` values of the pool.
        pos: `i32[B, P]` positions, distinct within a segment.
        score: `f32[B, P]`, or None.
        start: `i32[B, K]` first row of each segment.
        length: `i32[B, K]` entries of each segment; the last one is the newest.
        limit: `i32[B, K]` maximum number of entries.
        recent: `i32[B, K]` number of newest positions that are never evicted.
        seen: `i32[B]` tokens seen.
        prompt: `i32[B]` tokens of the prompt.
        weigh: hashable function of entries' scores (0 without any), positions, seen and prompt, traced inside the
            kernel. It returns float32 ranks and a mask of evictable entries. The lowest rank is evicted, of equal ranks
            the latest.
        interpret: True runs on any device, for tests.

    Returns:
        Keys, values, positions (-1 in the newest entry's old row), scores (0 in that row), and `i32[B, K]`, 1 where an
        entry was evicted.
    """

    # Blocks of a program (h, b): start, length, limit, recent and moved of head h of sequence b, seen and prompt of b,
    # scalars; k, v [P, D], pos and score [P] of sequence b, complete, and the same again as outputs.
    def kernel(refs):
        first = refs.start[...]
        rows = refs.length[...]
        seen = refs.seen[...]
        prompt = refs.prompt[...]
        recent = refs.recent[...]

        def step(index, best):
            offset = index * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
            inside = offset < rows
            at = first + offset
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
            _move_row(refs, pools, place, first + rows - 1)

    pools = _collect_pool_arrays(k, v, pos, score)
    tables = {"start": start, "length": length, "limit": limit, "recent": recent}
    inputs = {name: (each, _SCALAR) for name, each in tables.items()}
    inputs |= {"seen": make_sequence_operand(seen), "prompt": make_sequence_operand(prompt)}
    found = call_triton_kernel(
        kernel,
        name="evict_rows",
        grid=(start.shape[1], start.shape[0]),
        inputs=inputs | {name: make_sequence_operand(each) for name, each in pools.items()},
        outputs=_make_pool_outputs(pools)
        | {"moved": (jax.ShapeDtypeStruct(start.shape, jnp.int32), _SCALAR)},
        launch=LaunchParameters(warps=4, stages=1),
        interpret=interpret,
        aliases={name: f"{name}_out" for name in pools},
    )
    return found["k_out"], found["v_out"], found["pos_out"], found.get("score_out"), found["moved"]


def _collect_pool_arrays(k, v, pos, score):
    """Return pool arrays by name, "k", "v", "pos", and "score" if given."""
    return {"k": k, "v": v, "pos": pos} | ({} if score is None else {"score": score})


def _make_pool_outputs(pools):
    """Return kernel outputs, (shape, block spec) by "name_out", for the pool arrays, to be aliased to the inputs."""
    shapes = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in pools.items()}
    return {f"{name}_out": make_sequence_operand(shape) for name, shape in shapes.items()}


def _move_row(refs, pools, to, at):
    """Copy row `at` of a sequence's pool arrays to row `to`, then clear row `at`: position -1, score 0."""
    dim = pools["k"].shape[2]
    column = jnp.arange(round_up_head_dim(dim), dtype=jnp.int32)
    mask = None if round_up_head_dim(dim) == dim else column < dim
    for ref in (refs.k_out, refs.v_out):
        row = load(ref.at[at, column], mask=mask, other=None if mask is None else 0.0)
        store(ref.at[to, column], row, mask=mask)
    for name, empty in (("pos", -1), ("score", 0)):
        if name in pools:
            ref = getattr(refs, f"{name}_out")
            cell = load(ref.at[at])
            store(ref.at[to], cell)
            # Last, because the newest entry may itself be the evicted one.
            store(ref.at[at], jnp.full_like(cell, empty))
