"""`compact`: gathers chosen rows of keys and values into a compressed pool in one pass."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels._compat import BlockSpec, call, load, program_id, put_rows, store, take_rows
from pallas_kernels.tiles import GatherTiles, gather_tiles


@partial(jax.jit, static_argnames=("tiles", "interpret"))
def compact(
    k: jax.Array,
    v: jax.Array,
    source: jax.Array,
    *,
    tiles: GatherTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gathers one layer's chosen rows into a pool; returns its keys, values and positions.

    Args:
        k: `[B, K, S, D]` keys of a whole layer.
        v: `[B, K, S, D]` values.
        source: `i32[B, P]` source of each pool row, as head * S + position; -1 for none.
        tiles: block sizes and launch; by default by the shape.
        interpret: run on any device, to check it.

    Returns:
        `[B, P, D]` keys, `[B, P, D]` values (rows without a source are 0), and `i32[B, P]` positions, else -1.
    """
    batch, heads, slots, dim = k.shape
    rows = source.shape[1]
    tiles = tiles or gather_tiles(dim=dim, itemsize=k.dtype.itemsize)
    block = tiles.block

    # Blocks of a program (i, b): k and v [K*S, D], source [P] of sequence b, whole; out: k, v [P, D], pos [P], of which
    # it writes rows i * block on.
    def kernel(k_ref, v_ref, source_ref, k_out, v_out, pos_out):
        row = program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
        mine = row < rows
        origin = load(source_ref.at[row], mask=mine, other=-1)
        real = origin >= 0
        at = jnp.where(real, origin, 0)
        put_rows(k_out, row, mine, dim, take_rows(k_ref, at, real, dim))
        put_rows(v_out, row, mine, dim, take_rows(v_ref, at, real, dim))
        store(pos_out.at[row], jnp.where(real, at % slots, -1), mask=mine)

    def whole(*shape):
        return BlockSpec((None, *shape), lambda i, b: (b,) + (0,) * len(shape))

    return tuple(
        call(
            kernel,
            k.reshape(batch, heads * slots, dim),
            v.reshape(batch, heads * slots, dim),
            source,
            name="compact",
            grid=(-(-rows // block), batch),
            inputs=[whole(heads * slots, dim), whole(heads * slots, dim), whole(rows)],
            outputs=[whole(rows, dim), whole(rows, dim), whole(rows)],
            shapes=[
                jax.ShapeDtypeStruct((batch, rows, dim), k.dtype),
                jax.ShapeDtypeStruct((batch, rows, dim), v.dtype),
                jax.ShapeDtypeStruct((batch, rows), jnp.int32),
            ],
            launch=tiles.launch,
            interpret=interpret,
        )
    )
