"""The newest row of a segment in the place of the one that goes: everything a pool keeps of it, in one pass."""

from functools import partial

import jax
import jax.numpy as jnp

from ._compat import BlockSpec, Launch, call, load, pad_dim, store, when


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
    """Moves one row of each segment into the place of another, and empties its own.

    Args:
        k: `[B, P, D]` pool rows, written in place if the caller gives them up; all others likewise.
        v: `[B, P, D]`.
        pos: `i32[B, P]` positions.
        score: `f32[B, P]`, or None.
        place: `i32[B, K]` where the row goes.
        last: `i32[B, K]` where it lies.
        over: `bool[B, K]` segments of which a row is moved; the others stay as they are.
        interpret: run on any device, to check it.

    Returns:
        Keys, values, positions (-1 where the row lay) and scores (0 there).
    """
    batch, pool_rows, dim = k.shape
    heads, scored = place.shape[1], score is not None
    given = (k, v, pos) if score is None else (k, v, pos, score)
    padded = pad_dim(dim)

    # Blocks of a program (h, b): place, last and over of head h of sequence b, scalars; then k, v [P, D], pos and score
    # [P] of sequence b, whole, and the same again as outputs.
    def kernel(place_ref, last_ref, over_ref, *refs):
        pools = refs[len(given) :]

        @when(over_ref[...] != 0)
        def _():
            to, at = place_ref[...], last_ref[...]
            column = jnp.arange(padded, dtype=jnp.int32)
            mask = None if padded == dim else column < dim
            for ref in pools[:2]:
                row = load(ref.at[at, column], mask=mask, other=None if mask is None else 0.0)
                store(ref.at[to, column], row, mask=mask)
            for ref, empty in zip(pools[2:], (-1, 0), strict=False):
                cell = load(ref.at[at])
                store(ref.at[to], cell)
                # Last: the newest row may itself be the one that goes.
                store(ref.at[at], jnp.full_like(cell, empty))

    scalar = BlockSpec((None, None), lambda h, b: (b, h))
    whole = lambda a: BlockSpec((None, *a.shape[1:]), lambda h, b: (b,) + (0,) * (a.ndim - 1))  # noqa: E731
    blocks = [whole(each) for each in given]
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
