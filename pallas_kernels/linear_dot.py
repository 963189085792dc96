"""`multiply_blocks_by_tensor_cores`: products of blocks of up to 16 vectors, each with a weight of its own.

A weight in 8 or 4 bits is read as stored: codes are converted to float16 in registers, where those of 8 bits are exact,
and multiplied by tensor cores. Vectors are padded to 16, the least that these multiply. Blocks are the batch of a
decode step, which share a weight, or the tokens of one expert each of a mixture.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._compat import (
    BlockSpec,
    call_triton_kernel,
    dequantise_nibbles,
    load,
    multiply_matrices,
    program_id,
    store,
    when,
)
from pallas_kernels.linear import choose_split_k
from pallas_kernels.rows import make_whole_operand
from pallas_kernels.tiles import LinearDotTiles

# Maximum number of vectors of a block, and that of elements in a group of 4-bit codes, whose halves share bytes.
MOST_VECTORS, _GROUP = 16, 32
# Target number of programs per multiprocessor.
_RESIDENT = 4


@partial(jax.jit, static_argnames=("tiles", "interpret"))
def multiply_blocks_by_tensor_cores(
    x: jax.Array,
    ids: jax.Array,
    codes: jax.Array,
    scale: jax.Array | None = None,
    scales: jax.Array | None = None,
    leasts: jax.Array | None = None,
    *,
    tiles: LinearDotTiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply each block of M vectors by one of X weights; return float32 split-K parts `[n, N, M, O]` to be summed.

    Args:
        x: `[N, M, E]` float, M at most 16; E is a multiple of 16, of 32 for 4 bits. For codes each vector is rounded to
            float16 relative to the power of two of its largest element.
        ids: `i32[N]`, each block's weight, 0 to X - 1; a negative one leaves the block's output undefined.
        codes: `[X, O, E]` weights in x's dtype of 16 bits; or `i8[X, O, E]`; or in 4 bits `u8[X, O, E/2]`: byte j of a
            group of 16 holds elements j and j + 16.
        scale: `f32[X, O]`, 8 bits only: a weight is code * scale.
        scales: `f16[X, O, E/32]`, 4 bits only: a weight is code * scale + minimum of its group.
        leasts: `f16[X, O, E/32]`, 4 bits only: the groups' minima.
        tiles: block sizes and launch.
        interpret: True runs on any device, for tests.

    Returns:
        `f32[n, N, M, O]`.
    """
    (blocks, vectors, _), (_, outputs, row_length) = x.shape, codes.shape
    tiles, narrow = tiles or LinearDotTiles(), scales is not None
    coded = narrow or scale is not None
    tile, step_length = tiles.outputs, tiles.bytes
    given, exponent = jnp.pad(x, ((0, 0), (0, MOST_VECTORS - vectors), (0, 0))), None
    if coded:
        given = given.astype(jnp.float32)
        _, exponent = jnp.frexp(jnp.abs(given).max(axis=-1, keepdims=True))
        given = jnp.ldexp(given, -exponent).astype(jnp.float16)
    halves = [given]
    if narrow:
        # The first and the last 16 elements of all groups, which the two codes of a byte multiply.
        groups = given.reshape(blocks, MOST_VECTORS, -1, 2, _GROUP // 2)
        halves = [groups[:, :, :, at].reshape(blocks, MOST_VECTORS, -1) for at in (0, 1)]
    columns = -(-outputs // tile)
    parts = choose_split_k(columns * blocks, row_length, step_length, resident=_RESIDENT)
    steps = -(-row_length // (parts * step_length))

    # Blocks of a program (o, n, p): complete arrays; out [M, O] of part p of block n; it writes tile columns.
    def kernel(refs):
        column, block, part = (program_id(axis) for axis in range(3))
        expert = load(refs.ids.at[block])

        @when(expert >= 0)
        def _():
            multiply_block(refs, column, block, expert, part * (steps * step_length))

    def multiply_block(refs, column, block, expert, begin):
        output = column * tile + jnp.arange(tile, dtype=jnp.int32)
        inside = output < outputs
        row = jnp.arange(MOST_VECTORS, dtype=jnp.int32)

        def load_matrix(ref, at, rows, mask, first, size):
            column = first + jnp.arange(size, dtype=jnp.int32)
            mask = mask[:, None] & (column < row_length)[None, :]
            zero = 0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0
            return load(ref.at[at, rows[:, None], column[None, :]], mask=mask, other=zero)

        def load_vectors(ref, first, size):
            return load_matrix(ref, block, row, row >= 0, first, size)

        def multiply_group(total, first):
            held = load_matrix(refs.codes, expert, output, inside, first, _GROUP // 2)
            at = expert, output, jnp.broadcast_to(first // (_GROUP // 2), output.shape)
            mask = inside & (first < row_length)
            factor, least = (
                jnp.broadcast_to(load(ref.at[at], mask=mask, other=0)[:, None], held.shape)
                for ref in (refs.scales, refs.leasts)
            )
            for index, ref in enumerate((refs.low, refs.high)):
                weight = dequantise_nibbles(held, factor, least, index=index, interpret=interpret)
                half = load_vectors(ref, first, _GROUP // 2)
                total += multiply_matrices(weight, half, transpose_b=True)
            return total

        def step(index, total):
            first = begin + index * step_length
            if narrow:
                for group in range(step_length // (_GROUP // 2)):
                    total = multiply_group(total, first + group * (_GROUP // 2))
                return total
            held = load_matrix(refs.codes, expert, output, inside, first, step_length)
            vector = load_vectors(refs.x, first, step_length)
            return total + multiply_matrices(held.astype(vector.dtype), vector, transpose_b=True)

        total = lax.fori_loop(0, steps, step, jnp.zeros((tile, MOST_VECTORS), jnp.float32))
        if scale is not None:
            total *= load(refs.scale.at[expert, output], mask=inside, other=0)[:, None]
        mask = jnp.broadcast_to(inside[:, None], total.shape)
        store(refs.out.at[row[None, :], output[:, None]], total, mask=mask)

    names = ("low", "high") if narrow else ("x",)
    beside = {"scale": scale, "scales": scales, "leasts": leasts}
    arrays = {"ids": ids, "codes": codes, **dict(zip(names, halves, strict=True)), **beside}
    shape = jax.ShapeDtypeStruct((parts, blocks, MOST_VECTORS, outputs), jnp.float32)
    of_part = BlockSpec((None, None, MOST_VECTORS, outputs), lambda o, n, p: (p, n, 0, 0))
    out = call_triton_kernel(
        kernel,
        name="multiply_blocks",
        grid=(columns, blocks, parts),
        inputs={k: make_whole_operand(leaf) for k, leaf in arrays.items() if leaf is not None},
        outputs={"out": (shape, of_part)},
        launch=tiles.launch,
        interpret=interpret,
    )["out"]
    return (out if exponent is None else jnp.ldexp(out, exponent))[:, :, :vectors]
