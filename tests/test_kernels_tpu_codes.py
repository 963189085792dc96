"""The TPU kernel of decode attention over rows in 8-bit codes, its copies simulated, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels import attend_oracle, draw, wide
from test_kernels_tpu import COUNTS, LENGTH, START, compare, drawn, with_rows

from jaxkv.cache.quantised import Int8Vectors
from pallas_kernels.tpu import codes, decode

# Head dims in one dtype or the other, groups of one to more than a register's sublanes, rows of a pool; of codes, whole
# registers of scales, none, and tiles of 8 or of 32 rows.
CASES = [
    (True, 64, "float32", 3, 2960),
    (True, 256, "bfloat16", 11, 2960),
    (False, 64, "float32", 3, 3072),
    (False, 128, "bfloat16", 4, 2976),
]
TABLES = (START, LENGTH, COUNTS)


def encoded(pool):
    """Keys or values as `Store.kernel_inputs` has them, a pair of codes and scales."""
    found = Int8Vectors.quantise_vectors(pool)
    return found.code, found.scale


def decoded(pair):
    """Numbers of codes and scales, float64."""
    code, scale = map(wide, pair)
    return code * scale[..., None]


@pytest.mark.parametrize(("dense", "dim", "dtype", "group", "rows"), CASES)
def test_a_token_joins_and_attends(dense, dim, dtype, group, rows):
    """A new row is rounded like those before it; rows around it keep their codes and scales to the bit."""
    q, new_k, new_v, k, v = drawn(dim, dtype, group, rows)
    # Rows of very different sizes: scales matter.
    sizes = jnp.exp(0.4 * jax.random.normal(jax.random.key(rows), (2, *k.shape[:2], 1))).astype(
        k.dtype
    )
    check(dense, q, (k * sizes[0], v * sizes[1]), (new_k, new_v * 3), TABLES, dtype)


def check(dense, q, pool, new, tables, dtype):
    """Rows that are appended, and the attention to them, of a pool as it is or in codes."""
    if not dense:
        pool, new = ([encoded(each) for each in rows] for rows in (pool, new))
    out, lse, *found = decode.append_and_attend(
        q, tuple(new), *pool, *map(jnp.asarray, tables), interpret=True
    )
    assert out.dtype == q.dtype and lse.dtype == jnp.float32
    for mine, old, one in zip(*map(jax.tree.leaves, (found, pool, new)), strict=True):
        assert mine.dtype == old.dtype
        np.testing.assert_array_equal(wide(mine), with_rows(old, one, *tables))
    numbers = found if dense else [jnp.asarray(decoded(each), jnp.float32) for each in found]
    start, length, counts = tables
    compare((out, lse), attend_oracle(q, *numbers, start, length + counts[:, None])[:2], dtype)


def test_codes_are_only_read():
    """Segments from any row, heads without rows, capped logits; what appending reads, attending reads."""
    q, new_k, new_v, k, v = drawn(64, "float32", 2)
    pool, new = (encoded(k), encoded(v)), (encoded(new_k), encoded(new_v))
    how = {"softcap": 2.0, "interpret": True}
    out, lse, *pool = decode.append_and_attend(q, new, *pool, *map(jnp.asarray, TABLES), **how)
    after = jnp.asarray(START), jnp.asarray(LENGTH + COUNTS[:, None])
    again = decode.attend(q, *pool, *after, **how)
    compare((out, lse), map(wide, again), "float32")
    plain = decode.attend(
        q, *(jnp.asarray(decoded(each), jnp.float32) for each in pool), *after, **how
    )
    compare(again, map(wide, plain), "float32")
    assert not wide(out)[1, 1].any() and np.isneginf(wide(lse)[1, 1]).all()


@pytest.mark.parametrize("dense", [True, False])
def test_many_heads_write_into_one_tile(dense):
    """A pool smaller than a block, segments of few rows, in any order; rows around them stay as they are."""
    start = np.asarray([[30, 1, 4, 9], [0, 20, 12, 4]], np.int32)
    length = np.asarray([[1, 2, 3, 0], [3, 3, 2, 7]], np.int32)
    tables = start, length, np.asarray([1, 1], np.int32)
    q, *new = draw(1, (2, 4, 2, 64), (2, 4, 64), (2, 4, 64), dtype=jnp.bfloat16)
    pool = draw(2, (2, 48, 64), (2, 48, 64), dtype=jnp.bfloat16)
    check(dense, q, pool, new, tables, "bfloat16")


def test_queries_of_float16_are_multiplied_in_float32():
    q, _, _, k, v = drawn(64, "float32", 2)
    half, pool = q.astype(jnp.float16), (encoded(k), encoded(v))
    out, lse = decode.attend(half, *pool, jnp.asarray(START), jnp.asarray(LENGTH), interpret=True)
    rows = [jnp.asarray(decoded(each), jnp.float32) for each in pool]
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(
        wide(out), attend_oracle(half, *rows, START, LENGTH)[0], rtol=2e-3, atol=2e-3
    )
    compare((lse,), attend_oracle(half, *rows, START, LENGTH)[1:2], "float32")


def test_what_it_takes_of_codes():
    """Whole tiles of 8 bits, of 8 rows or of 32, whose scales fit VMEM; no words of 4 bits."""
    assert decode.supports_pool(40, jnp.int8) and not decode.supports_pool(44, jnp.int8)
    assert not decode.supports_pool(48, jnp.uint16) and not decode.supports_pool(1 << 20, jnp.int8)
    tiles = [codes.get_tile_rows(jnp.zeros((1, rows, 8), jnp.int8)) for rows in (40, 64)]
    assert tiles == [8, 32] and codes.get_tile_rows(jnp.zeros((1, 64, 8), jnp.bfloat16)) == 8
