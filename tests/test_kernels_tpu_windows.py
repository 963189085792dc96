"""The TPU kernels over windows of a pool that layers share, copies simulated, against plain numpy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels import DTYPES, draw, wide
from test_kernels_tpu import COUNTS, LENGTH, ROWS, START, compare, drawn, with_rows
from test_kernels_tpu_scores import scored_oracle

from jaxkv.pallas_kernels import tpu_decode, tpu_rows, tpu_windows

WIDEST = 2571
SIZE = tpu_rows.width(WIDEST, ROWS)


def first_of(start):
    """First row of each window: the segment's tile, or the last chunk of the pool."""
    return np.minimum(start // 8 * 8, ROWS - 256)


def windows_of(leaf, start, length, size):
    """Windows of a pool's numbers: zeros outside of the segments."""
    found = np.zeros((*start.shape, size))
    for b, h in np.ndindex(start.shape):
        at = start[b, h] - first_of(start)[b, h]
        found[b, h, at : at + length[b, h]] = leaf[b, start[b, h] : start[b, h] + length[b, h]]
    return found


@pytest.mark.parametrize(("dim", "dtype", "group"), [(128, "bfloat16", 4), (64, "float32", 3)])
def test_a_token_joins_and_windows_receive_attention(dim, dtype, group):
    """As `test_a_token_joins_and_rows_receive_attention`, window by window; ended sequences' are zeros."""
    q, new_k, new_v, k, v = drawn(dim, dtype, group)
    tables = [jnp.asarray(each) for each in (START, LENGTH, COUNTS)]
    out, received, *pool = tpu_decode.append_and_score(
        q, (new_k, new_v), k, v, *tables, widest=WIDEST, windows=True, interpret=True
    )
    wanted = [with_rows(each, new, START, LENGTH, COUNTS) for each, new in ((k, new_k), (v, new_v))]
    for mine, its in zip(pool, wanted, strict=True):
        np.testing.assert_array_equal(wide(mine), its)
    held = LENGTH + COUNTS[:, None]
    expected, shares = scored_oracle(q, *wanted, START, held)
    compare((out,), (expected,), dtype)
    shares[COUNTS == 0] = 0
    tolerance = DTYPES[dtype][1]
    shares = windows_of(shares, START, held, SIZE)
    np.testing.assert_allclose(wide(received), shares, atol=tolerance / 10, rtol=tolerance)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_windows_are_taken(dtype):
    """Whatever lies in a segment, at its distance from the segment's tile."""
    leaf = np.arange(len(START) * ROWS, dtype=dtype).reshape(len(START), ROWS)
    first, found = tpu_windows.take(
        jnp.asarray(leaf), jnp.asarray(START), widest=WIDEST, interpret=True
    )
    assert found.dtype == leaf.dtype and (np.asarray(first) == first_of(START)).all()
    inside = windows_of(np.ones(leaf.shape), START, LENGTH, SIZE)
    np.testing.assert_array_equal(np.asarray(found) * inside, windows_of(leaf, START, LENGTH, SIZE))


def test_windows_are_added():
    """Each segment's rows get their window, rows of none stay."""
    leaf, new = (np.asarray(each) for each in draw(3, (len(START), ROWS), (len(START), ROWS)))
    inside = np.zeros(leaf.shape)
    for b, h in np.ndindex(START.shape):
        inside[b, START[b, h] : START[b, h] + LENGTH[b, h]] = 1
    given = jnp.asarray(windows_of(new, START, LENGTH, SIZE), jnp.float32)
    found = tpu_windows.add(jnp.asarray(leaf), jnp.asarray(START), given, interpret=True)
    np.testing.assert_allclose(np.asarray(found), leaf + new * inside, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dim", "dtype"), [(128, "bfloat16"), (64, "float32")])
def test_rows_are_compared(dim, dtype):
    """Cosines of a segment's rows with its vector; a vector of zeros has norm 1e-6."""
    rows, of = draw(dim, (len(START), ROWS, dim), (*START.shape, dim), dtype=DTYPES[dtype][0])
    rows = rows.at[0, 7].set(0)
    tables = [jnp.asarray(each) for each in (START, LENGTH)]
    found = tpu_windows.cosines(rows, of, *tables, widest=WIDEST, interpret=True)
    keys, vectors = wide(rows), wide(of)
    norms = np.maximum(np.linalg.norm(keys, axis=2), 1e-6)
    expected = (
        np.einsum("bhd,bpd->bhp", vectors, keys)
        / norms[:, None]
        / np.linalg.norm(vectors, axis=2)[..., None]
    )
    for b, h in np.ndindex(START.shape):
        mine = windows_of(expected[:, h], START[:, h : h + 1], LENGTH[:, h : h + 1], SIZE)[b, 0]
        np.testing.assert_allclose(np.asarray(found)[b, h], mine, rtol=1e-5, atol=1e-5)


def test_what_they_take():
    """Pools whose positions or scores fit VMEM, a sequence at a time, as do windows; tables that fit scalar memory."""
    assert tpu_windows.takes(262_400, 8, 256, 2786) and not tpu_windows.takes(
        (1 << 20) + 8, 8, 256, 2786
    )
    assert not tpu_windows.takes(262_400, 512, 256, 2786) and not tpu_windows.takes(
        262_400, 8, 256, 1 << 17
    )
