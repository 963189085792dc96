"""Products with weights in 8 and 4 bits, interpreted, against plain numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels import draw, wide

import pallas_kernels
from pallas_kernels.tiles import LinearTiles

# Outputs and elements: whole tiles, a part of one, several parts of the sum, fewer elements than a step reads.
DTYPES = ("bfloat16", "float32", "float16")
SIZES = ((64, 1024), (70, 96), (33, 4096), (5, 32))


def weight_of(seed, outputs, width, bits):
    """Arguments of `multiply_codes` behind the vectors, and the float64 weight that they stand for."""
    rng = np.random.default_rng(seed)
    if bits == 8:
        codes, scale = (
            rng.integers(-127, 128, (outputs, width)),
            rng.random(outputs).astype(np.float32),
        )
        codes[0, 0], codes[-1, -1] = -127, 127
        return (jnp.asarray(codes, jnp.int8), jnp.asarray(scale), None, None), codes * scale[
            :, None
        ].astype(np.float64)
    held = rng.integers(0, 256, (outputs, width // 2)).astype(np.uint8)
    scales, leasts = (
        rng.standard_normal((outputs, width // 32)).astype(np.float16) for _ in range(2)
    )
    codes = np.zeros((outputs, width))
    for element in range(width):
        group, inside = divmod(element, 32)
        byte = held[:, group * 16 + inside % 16]
        codes[:, element] = byte % 16 if inside < 16 else byte // 16
    whole = codes * np.repeat(scales, 32, axis=1).astype(np.float64) + np.repeat(leasts, 32, axis=1)
    return (jnp.asarray(held), None, jnp.asarray(scales), jnp.asarray(leasts)), whole


def check(outputs, width, bits, dtype, tiles=None):
    (x,) = draw(1, (1, width), dtype=jnp.dtype(dtype))
    given, whole = weight_of(2, outputs, width, bits)
    parts = pallas_kernels.multiply_codes(x, *given, tiles=tiles, interpret=True)
    assert parts.dtype == jnp.float32 and parts.shape[1:] == (1, outputs)
    want = wide(x) @ whole.T
    np.testing.assert_allclose(
        wide(parts).sum(axis=0), want, rtol=0, atol=5e-6 * np.abs(want).max()
    )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("outputs", "width", "dtype"),
    [(*size, DTYPES[at % len(DTYPES)]) for at, size in enumerate(SIZES)],
)
def test_products_with_codes(outputs, width, bits, dtype):
    """Codes are multiplied exactly, sums are float32; what lies beyond the weight is not read."""
    check(outputs, width, bits, dtype)


@pytest.mark.parametrize(
    ("bits", "tiles"),
    [
        (8, LinearTiles(outputs=8, pieces=16, ahead=3)),
        (4, LinearTiles(outputs=64, pieces=4, ahead=2)),
    ],
)
def test_other_tiles_give_the_same(bits, tiles):
    """More steps ahead than there are, and tiles of every form."""
    check(70, 1056, bits, "bfloat16", tiles)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("outputs", "width", "vectors", "dtype"),
    [
        (64, 1024, 2, "bfloat16"),
        (70, 96, 16, "float16"),
        (130, 1056, 5, "bfloat16"),
        (5, 32, 3, "float16"),
    ],
)
def test_products_of_several_vectors_on_tensor_cores(outputs, width, bits, vectors, dtype):
    """Weights and vectors are rounded to float16 at most, sums are float32; large and tiny vectors keep their scale."""
    (x,) = draw(1, (vectors, width), dtype=jnp.dtype(dtype))
    x = x * jnp.asarray([[1.0], [3e3], *[[1e-5]] * vectors], x.dtype)[:vectors]
    given, whole = weight_of(2, outputs, width, bits)
    ids, alone = jnp.zeros(1, jnp.int32), [None if each is None else each[None] for each in given]
    multiply = pallas_kernels.multiply_blocks_by_tensor_cores
    parts = multiply(x[None], ids, *alone, interpret=True)
    assert parts.dtype == jnp.float32 and parts.shape[1:] == (1, vectors, outputs)
    want = wide(x) @ whole.T
    # A vector's own scale: that of others says nothing.
    off = np.abs(wide(parts).sum(axis=0)[0] - want).max(axis=1)
    assert (off <= (5e-6 if bits == 8 else 5e-4) * np.abs(want).max(axis=1)).all()


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(
    ("outputs", "width", "vectors", "dtype"),
    [(64, 1024, 16, "bfloat16"), (70, 96, 3, "float16")],
)
def test_each_block_is_multiplied_by_its_own_weight(outputs, width, bits, vectors, dtype):
    """Weights are chosen in any order, twice or not at all; a block without one is not computed."""
    ids = [2, 0, 2, -1, 3]
    (x,) = draw(1, (len(ids), vectors, width), dtype=jnp.dtype(dtype))
    if bits == 16:
        (codes,) = draw(3, (4, outputs, width), dtype=jnp.dtype(dtype))
        given, whole = (codes,), wide(codes)
    else:
        made = [weight_of(seed, outputs, width, bits) for seed in range(4)]
        given = [
            None if each[0] is None else jnp.stack(each)
            for each in zip(*(one for one, _ in made), strict=True)
        ]
        whole = np.stack([each for _, each in made])
    multiply = pallas_kernels.multiply_blocks_by_tensor_cores
    parts = multiply(x, jnp.asarray(ids, jnp.int32), *given, interpret=True)
    assert parts.dtype == jnp.float32 and parts.shape[1:] == (5, vectors, outputs)
    for at in (0, 1, 2, 4):
        want = wide(x)[at] @ whole[ids[at]].T
        off = np.abs(wide(parts).sum(axis=0)[at] - want).max()
        assert off <= (5e-4 if bits == 4 else 5e-6) * np.abs(want).max()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_lowers_for_a_gpu(bits, several):
    """As far as a machine without a GPU's compiler goes: the PTX that joins bytes and floats is there."""
    x, given = jnp.ones((1 + several, 1024), jnp.bfloat16), weight_of(0, 64, 1024, bits)[0]
    by = pallas_kernels.multiply_codes
    if several:
        by, given = (
            pallas_kernels.multiply_blocks_by_tensor_cores,
            jax.tree.map(lambda each: each[None], given),
        )
        x, given = x[None], (jnp.zeros(1, jnp.int32), *given)
    text = by.trace(x, *given).lower(lowering_platforms=("cuda",)).as_text()
    assert by.__name__ in text and "custom_call" in text
