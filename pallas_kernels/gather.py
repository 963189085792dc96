"""`gather_kept_entries`: gather selected entries into a compressed pool in one pass."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels._compat import (
    LaunchParameters,
    call_triton_kernel,
    load,
    load_masked_rows,
    make_sequence_operand,
    program_id,
    round_up_head_dim,
    store,
    store_masked_rows,
)


@partial(jax.jit, static_argnames=("block", "interpret"))
def gather_kept_entries(
    k: Array,
    v: Array,
    source: Array,
    *,
    block: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Gather a layer's kept entries by source index into a pool; return keys, values and positions (-1 in free rows).

    Args:
        k: `[B, K, S, D]` keys of a layer.
        v: `[B, K, S, D]` values.
        source: `i32[B, P]` source of each pool row, as head * S + position; -1 for none.
        block: rows per program, a power of two; by default by the shape.
        interpret: True runs on any device, for tests.

    Returns:
        `[B, P, D]` keys, `[B, P, D]` values (rows without a source are 0), and `i32[B, P]` positions, else -1.
    """
    batch, heads, slots, dim = k.shape
    rows = source.shape[1]
    block = block or max(8, min(64, 16384 // (round_up_head_dim(dim) * k.dtype.itemsize)))

    # Blocks of a program (i, b): k and v [K*S, D], source [P] of sequence b, complete; out: k, v [P, D], pos [P], of
    # which it writes rows i * block on.
    def kernel(refs):
        row = program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
        mine = row < rows
        origin = load(refs.source.at[row], mask=mine, other=-1)
        real = origin >= 0
        at = jnp.where(real, origin, 0)
        store_masked_rows(refs.k_out, row, mine, dim, load_masked_rows(refs.k, at, real, dim))
        store_masked_rows(refs.v_out, row, mine, dim, load_masked_rows(refs.v, at, real, dim))
        store(refs.pos.at[row], jnp.where(real, at % slots, -1), mask=mine)

    found = call_triton_kernel(
        kernel,
        name="compact",
        grid=(-(-rows // block), batch),
        inputs={
            "k": make_sequence_operand(k.reshape(batch, heads * slots, dim)),
            "v": make_sequence_operand(v.reshape(batch, heads * slots, dim)),
            "source": make_sequence_operand(source),
        },
        outputs={
            "k_out": make_sequence_operand(jax.ShapeDtypeStruct((batch, rows, dim), k.dtype)),
            "v_out": make_sequence_operand(jax.ShapeDtypeStruct((batch, rows, dim), v.dtype)),
            "pos": make_sequence_operand(jax.ShapeDtypeStruct((batch, rows), jnp.int32)),
        },
        launch=LaunchParameters(warps=4, stages=1),
        interpret=interpret,
    )
    return found["k_out"], found["v_out"], found["pos"]
