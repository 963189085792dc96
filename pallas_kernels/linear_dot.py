"""`multiply_codes_by_tensor_cores`: products of 2 to 16 vectors and a linear weight in 8 or 4 bits.

Codes are converted to float16 in registers, where those of 8 bits are exact, and multiplied by tensor cores. Vectors
are padded to 16, the least that these multiply.
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
)
from pallas_kernels.linear import choose_split_k
from pallas_kernels.rows import make_whole_operand
from pallas_kernels.tiles import LinearDotTiles

# Maximum number of vectors, and that of elements in a group of 4-bit codes, whose halves share bytes.
MOST_VECTORS, _GROUP = 16, 32
# Target number of programs per multiprocessor.
_RESIDENT = 4


@partial(jax.jit, static_argnames=("tiles", "interpret"))
def multiply_codes_by_tensor_cores(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array | None = None,
    scales: jax.Array | None = None,
    leasts: jax.Array | None = None,
    *,
    tiles: LinearDotTiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply M vectors by a weight of 8-bit or 4-bit codes; return float32 split-K parts `[n, M, O]` to be summed.

    Args:
        x: `[M, E]` float, M at most 16; E is a multiple of 16 (8 bits) or 32 (4 bits). Each vector is rounded to
            float16 relative to the power of two of its largest element.
        codes: `i8[O, E]`, or in 4 bits `u8[O, E/2]`: byte j of a group of 16 holds elements j and j + 16.
        scale: `f32[O]`, 8 bits only: a weight is code * scale.
        scales: `f16[O, E/32]`, 4 bits only: a weight is code * scale + minimum of its group.
        leasts: `f16[O, E/32]`, 4 bits only: the groups' minima.
        tiles: block sizes and launch.
        interpret: True runs on any device, for tests.

    Returns:
        `f32[n, M, O]`.
    """
    vectors, (outputs, row_bytes) = x.shape[0], codes.shape
    tiles, narrow = tiles or LinearDotTiles(), scales is not None
    tile, block = tiles.outputs, tiles.bytes
    wide = jnp.pad(x.astype(jnp.float32), ((0, MOST_VECTORS - vectors), (0, 0)))
    _, exponent = jnp.frexp(jnp.abs(wide).max(axis=1, keepdims=True))
    half = jnp.ldexp(wide, -exponent).astype(jnp.float16)
    halves = [half]
    if narrow:
        # The first and the last 16 elements of all groups, which the two codes of a byte multiply.
        groups = half.reshape(MOST_VECTORS, -1, 2, _GROUP // 2)
        halves = [groups[:, :, at].reshape(MOST_VECTORS, -1) for at in (0, 1)]
    parts = choose_split_k(-(-outputs // tile), row_bytes, block, resident=_RESIDENT)
    steps = -(-row_bytes // (parts * block))

    # Blocks of a program (o, p): complete arrays; out [M, O] of part p; it writes tile columns.
    def kernel(refs):
        output = program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
        inside, begin = output < outputs, program_id(1) * (steps * block)

        def load_matrix(ref, row, mask, first, size):
            column = first + jnp.arange(size, dtype=jnp.int32)
            mask = mask[:, None] & (column < row_bytes)[None, :]
            return load(ref.at[row[:, None], column[None, :]], mask=mask, other=0)

        def load_vectors(ref, first, size):
            row = jnp.arange(MOST_VECTORS, dtype=jnp.int32)
            return load_matrix(ref, row, row >= 0, first, size)

        def multiply_group(total, first):
            held = load_matrix(refs.codes, output, inside, first, _GROUP // 2)
            at = output, jnp.broadcast_to(first // (_GROUP // 2), output.shape)
            mask = inside & (first < row_bytes)
            factor, least = (
                jnp.broadcast_to(load(ref.at[at], mask=mask, other=0)[:, None], held.shape)
                for ref in (refs.scales, refs.leasts)
            )
            for index, ref in enumerate((refs.low, refs.high)):
                weight = dequantise_nibbles(held, factor, least, index=index, interpret=interpret)
                given = load_vectors(ref, first, _GROUP // 2)
                total += multiply_matrices(weight, given, transpose_b=True)
            return total

        def step(index, total):
            first = begin + index * block
            if narrow:
                for group in range(block // (_GROUP // 2)):
                    total = multiply_group(total, first + group * (_GROUP // 2))
                return total
            held = load_matrix(refs.codes, output, inside, first, block).astype(jnp.float16)
            given = load_vectors(refs.x, first, block)
            return total + multiply_matrices(held, given, transpose_b=True)

        total = lax.fori_loop(0, steps, step, jnp.zeros((tile, MOST_VECTORS), jnp.float32))
        if not narrow:
            total *= load(refs.scale.at[output], mask=inside, other=0)[:, None]
        row = jnp.arange(MOST_VECTORS, dtype=jnp.int32)
        mask = jnp.broadcast_to(inside[:, None], total.shape)
        store(refs.out.at[row[None, :], output[:, None]], total, mask=mask)

    names = ("low", "high") if narrow else ("x",)
    beside = {"scales": scales, "leasts": leasts} if narrow else {"scale": scale}
    given = {"codes": codes, **dict(zip(names, halves, strict=True)), **beside}
    shape = jax.ShapeDtypeStruct((parts, MOST_VECTORS, outputs), jnp.float32)
    of_part = BlockSpec((None, MOST_VECTORS, outputs), lambda o, p: (p, 0, 0))
    out = call_triton_kernel(
        kernel,
        name="multiply_codes_dot",
        grid=(-(-outputs // tile), parts),
        inputs={name: make_whole_operand(leaf) for name, leaf in given.items()},
        outputs={"out": (shape, of_part)},
        launch=tiles.launch,
        interpret=interpret,
    )["out"]
    return jnp.ldexp(out, exponent)[:, :vectors]
