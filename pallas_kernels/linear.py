"""`multiply_codes`: product of a vector and a linear weight in 8 or 4 bits, without dequantising it in memory.

A decode step of one sequence reads every weight once for little arithmetic, so it is limited by bytes. Each thread
loads 16 bytes of codes of one output, converts them to floats in registers, and multiplies them by the vector's
elements. Nothing wider than codes is written or read. `linear_dot.py` has the kernel of several vectors.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._compat import (
    BlockSpec,
    call_triton_kernel,
    load,
    multiply_add_int4,
    multiply_add_int8,
    program_id,
    store,
)
from pallas_kernels.rows import make_whole_operand
from pallas_kernels.tiles import LinearTiles, count_multiprocessors

# Bytes of codes that a thread loads in one step; the number of elements of a group of 4-bit codes in them.
_PIECE, _GROUP = 16, 32
# Target number of programs per multiprocessor, and maximum number of parts of a sum.
_RESIDENT, _MOST_PARTS = 8, 8


@partial(jax.jit, static_argnames=("tiles", "interpret"))
def multiply_codes(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array | None = None,
    scales: jax.Array | None = None,
    leasts: jax.Array | None = None,
    *,
    tiles: LinearTiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply a vector by a weight of 8-bit or 4-bit codes; return float32 split-K parts `[n, 1, O]` to be summed.

    Args:
        x: `[1, E]` float; E is a multiple of 16 (8 bits) or 32 (4 bits).
        codes: `i8[O, E]`, or in 4 bits `u8[O, E/2]`: byte j of a group of 16 holds elements j and j + 16.
        scale: `f32[O]`, 8 bits only: a weight is code * scale.
        scales: `f16[O, E/32]`, 4 bits only: a weight is code * scale + minimum of its group.
        leasts: `f16[O, E/32]`, 4 bits only: the groups' minima.
        tiles: block sizes and launch.
        interpret: True runs on any device, for tests.

    Returns:
        `f32[n, 1, O]`.
    """
    (_, width), (outputs, row_bytes) = x.shape, codes.shape
    narrow = scales is not None
    tiles = tiles or LinearTiles()
    tile, at_once = tiles.outputs, tiles.pieces
    pieces, each = row_bytes // _PIECE, _GROUP if narrow else _PIECE
    parts = choose_split_k(-(-outputs // tile), pieces, at_once, resident=_RESIDENT)
    steps = -(-pieces // (parts * at_once))
    full = pieces == parts * steps * at_once and outputs % tile == 0

    # Blocks of a program (o, p): x [1, E], codes [O, E] or [O, E/2], scales and leasts [O, E/32], scale [O], complete.
    # Out: [1, O] of part p; it writes tile columns.
    def kernel(refs):
        output = program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
        byte = jnp.arange(_PIECE, dtype=jnp.int32)
        begin = program_id(1) * (steps * at_once)

        def places(step):
            piece = begin + step * at_once + jnp.arange(at_once, dtype=jnp.int32)
            inside = None if full else (output < outputs)[:, None] & (piece < pieces)[None, :]
            return piece, inside

        def taken(step):
            piece, inside = places(step)
            at = refs.codes.at[
                output[:, None, None], (piece * _PIECE)[None, :, None] + byte[None, None, :]
            ]
            mask = (
                None
                if inside is None
                else jnp.broadcast_to(inside[:, :, None], (tile, at_once, _PIECE))
            )
            return _load_masked(at, mask)

        def elements(piece, first):
            at = (piece * each + first)[:, None] + byte[None, :]
            mask = None if full else at < width
            return _load_masked(refs.x.at[0, at], mask).astype(jnp.float32)

        def step(index, carry):
            (held, *ahead), total, rest = carry
            # The next codes are loaded while these are multiplied.
            ahead = (*ahead, taken(jnp.minimum(index + tiles.ahead, steps - 1)))
            piece, inside = places(index)
            of = lambda each: jnp.broadcast_to(each, held.shape)  # noqa: E731
            if not narrow:
                given = of(elements(piece, 0)[None])
                return ahead, multiply_add_int8(total, held, given, interpret=interpret), rest
            of_group = output[:, None], piece[None, :]
            factor, least = (
                _load_masked(ref.at[of_group], inside).astype(jnp.float32)
                for ref in (refs.scales, refs.leasts)
            )
            wide = of((128 * factor)[:, :, None])
            low, high = elements(piece, 0), elements(piece, _PIECE)
            # Before the codes are converted: after it, registers would be short.
            more = (low + high).sum(axis=1)[None] * (least - 128 * factor)
            total = multiply_add_int4(
                total, held, of(low[None]), of(high[None]), wide, interpret=interpret
            )
            return ahead, total, rest + more

        # In 4 bits the contribution of the groups' minima is a separate sum.
        total = jnp.zeros((tile, at_once, _PIECE), jnp.float32)
        rest = jnp.zeros((tile, at_once), jnp.float32)
        first = tuple(taken(min(index, steps - 1)) for index in range(tiles.ahead))
        _, total, rest = lax.fori_loop(0, steps, step, (first, total, rest))
        inside = None if outputs % tile == 0 else output < outputs
        out = (total.sum(axis=2) + rest).sum(axis=1)
        if not narrow:
            out *= _load_masked(refs.scale.at[output], inside)
        if inside is None:
            store(refs.out.at[0, output], out)
        else:
            store(refs.out.at[0, output], out, mask=inside)

    beside = {"scales": scales, "leasts": leasts} if narrow else {"scale": scale}
    shape = jax.ShapeDtypeStruct((parts, 1, outputs), jnp.float32)
    return call_triton_kernel(
        kernel,
        name="multiply_codes",
        grid=(-(-outputs // tile), parts),
        inputs={
            name: make_whole_operand(leaf)
            for name, leaf in {"x": x, "codes": codes, **beside}.items()
        },
        outputs={"out": (shape, BlockSpec((None, 1, outputs), lambda o, p: (p, 0, 0)))},
        launch=tiles.launch,
        interpret=interpret,
    )["out"]


def choose_split_k(tiles, pieces, at_once, *, resident):
    """Return the number of split-K parts, a power of two up to 8: doubled while programs are few and pieces divide.

    Programs are few below `resident` per multiprocessor. Each of `tiles` * parts programs multiplies an equal share of
    `pieces`, `at_once` in a step.
    """
    parts = 1
    while (
        parts < _MOST_PARTS
        and tiles * parts < count_multiprocessors() * resident
        and pieces % (2 * parts * at_once) == 0
    ):
        parts *= 2
    return parts


def _load_masked(at, mask):
    """Load the elements of a ref slice `at`, 0 where `mask` is False; all of them if it is None."""
    if mask is None:
        return load(at)
    return load(at, mask=mask, other=0 if jnp.issubdtype(at.ref.dtype, jnp.integer) else 0.0)
