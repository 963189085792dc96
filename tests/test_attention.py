"""The pieces of attention against float64 and plain loops: every walk, empty segments, 16-bit inputs."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import attention
from jaxkv.attention import xla
from jaxkv.attention.xla import SegmentReadMode

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}


def draw(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def wide(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


def reference(q, k, v):
    """One query over some keys: the output and the log-sum-exp."""
    if not len(k):
        return np.zeros(len(q)), -math.inf
    logits = k @ q / math.sqrt(len(q))
    weights = np.exp(logits - logits.max())
    return weights @ v / weights.sum(), logits.max() + math.log(weights.sum())


@pytest.mark.parametrize(
    ("slots", "queries", "first", "window", "dtype"),
    [
        (16, 16, 0, None, "float16"),
        (768, 256, 0, None, "bfloat16"),
        (1024, 512, 512, None, "bfloat16"),
        (600, 600, 0, None, "float32"),
        (1024, 512, 0, 7, "float32"),
        (1024, 512, 512, 1, "float32"),
        (1024, 512, 512, 700, "bfloat16"),
        (1024, 512, 512, 2000, "float32"),
    ],
)
def test_causal(slots, queries, first, window, dtype):
    """Blocks that lie before all of a block's windows are not read: NaN in them does not show."""
    heads, group, dim = 2, 3, 8
    q = 2 * draw(0, heads, group, queries, dim, dtype=dtype)
    k, v = (draw(seed, heads, slots, dim, dtype=dtype) for seed in (1, 2))
    unread = 0 if window is None else max(0, first - window + 1) // 512 * 512
    hidden = (each.at[:, :unread].set(jnp.nan) for each in (k, v))
    out, lse = attention.compute_causal_attention(q, *hidden, jnp.int32(first), window=window)
    assert out.dtype == q.dtype and lse.dtype == jnp.float32
    for index in np.ndindex(heads, group):
        for at in {0, 1, queries // 2, queries - 1}:
            end = first + at + 1
            near = slice(0 if window is None else max(0, end - window), end)
            keys, values = wide(k)[index[0], near], wide(v)[index[0], near]
            expected, expected_lse = reference(wide(q)[index][at], keys, values)
            np.testing.assert_allclose(wide(out)[index][at], expected, atol=TOLERANCE[dtype])
            np.testing.assert_allclose(
                wide(lse)[index][at], expected_lse, atol=2 * TOLERANCE[dtype]
            )


LENGTHS = {
    # Per sequence and head: none, one, some of a block, more than a block.
    2: [[0, 300], [1, 40]],
    8: [[0, 1, 2, 300, 5, 257, 256, 9], [4] * 8],
}
# From 1024 rows on the sum over values is cut into equal chunks, if the number of rows has a divisor for it.
MANY = [(1040, "float32"), (1031, "bfloat16"), (1040, "float16")]


@pytest.mark.parametrize("walk", SegmentReadMode, ids=str)
@pytest.mark.parametrize(
    ("heads", "batch", "dtype"),
    [(heads, batch, "float32") for heads in LENGTHS for batch in (2, 6)]
    + [(2, 6, dtype) for dtype in TOLERANCE if dtype != "float32"],
)
def test_over_pool(walk, heads, batch, dtype):
    check_over_pool(walk, (LENGTHS[heads] * batch)[:batch], dtype, 310)


@pytest.mark.parametrize(("size", "dtype"), MANY)
def test_over_pool_of_many_rows(size, dtype):
    check_over_pool(SegmentReadMode.STRIDES, [[size, 7], [size - 3, 0]], dtype, size)


def check_over_pool(walk, lengths, dtype, size):
    # Beyond 4 heads and up to 3 sequences other formulations are chosen, so both sides of either are here.
    rows, dim = 3, 8
    length = np.asarray(lengths, np.int32)
    batch, heads = length.shape
    if walk is SegmentReadMode.STRIDES:
        start, slots = np.broadcast_to(np.arange(heads) * size, length.shape), heads * size
    else:
        # Other layers' rows lie around this layer's in a shared pool.
        before = 50 if walk is SegmentReadMode.WINDOWS else 0
        start = before + np.cumsum(length + 2, axis=1) - length - 2
        slots = int((start + length).max()) + before + 3
    q = 2 * draw(3, batch, heads, rows, dim, dtype=dtype)
    k, v = (draw(seed, batch, slots, dim, dtype=dtype) for seed in (4, 5))
    start_of, length_of = (jnp.asarray(each, jnp.int32) for each in (start, length))
    reach = xla.SegmentRanges(start=start_of, length=length_of, walk=walk)
    out, lse = xla.attend_over_pool(q, k, v, reach)
    assert out.dtype == q.dtype and lse.dtype == jnp.float32
    for row, head, query in np.ndindex(batch, heads, rows):
        span = slice(start[row, head], start[row, head] + length[row, head])
        expected, expected_lse = reference(
            wide(q)[row, head, query], wide(k)[row, span], wide(v)[row, span]
        )
        np.testing.assert_allclose(wide(out)[row, head, query], expected, atol=TOLERANCE[dtype])
        np.testing.assert_allclose(
            wide(lse)[row, head, query], expected_lse, atol=2 * TOLERANCE[dtype]
        )


@pytest.mark.parametrize(("first", "dtype"), [(0, "float32"), (1, "bfloat16"), (7, "float16")])
def test_merge_joins_two_sets_of_keys(first, dtype):
    q, k, v = wide(draw(6, 8)), wide(draw(7, 20, 8)), wide(draw(8, 20, 8))
    (out, lse), (other, other_lse) = (
        reference(q, k[:first], v[:first]),
        reference(q, k[first:], v[first:]),
    )
    merged = attention.merge_attention_outputs(
        jnp.asarray(out, dtype), jnp.float32(lse), jnp.asarray(other, dtype), jnp.float32(other_lse)
    )
    assert merged.dtype == dtype
    np.testing.assert_allclose(wide(merged), reference(q, k, v)[0], atol=TOLERANCE[dtype])


def test_merge_of_far_apart_sums_stays_finite():
    a, b = jnp.ones((1, 4), jnp.float32), jnp.zeros((1, 4), jnp.float32)
    for gap, share in ((1e4, 1.0), (-1e4, 0.0)):
        merged = attention.merge_attention_outputs(
            a, jnp.full((1,), gap, jnp.float32), b, jnp.zeros((1,), jnp.float32)
        )
        np.testing.assert_array_equal(merged, np.full((1, 4), share))


# --- what each key receives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "queries", "n", "dtype"),
    [(48, 48, 37, "float32"), (768, 256, 700, "bfloat16"), (1024, 512, 1024, "float32")],
)
def test_column_sums(slots, queries, n, dtype):
    """Blocks of queries, blocks of keys, padding: every key's sum over all real queries, of each query head."""
    heads, group, dim = 2, 2, 8
    q = 2 * draw(0, heads, group, slots, dim, dtype=dtype)
    k = draw(1, heads, slots, dim, dtype=dtype)
    sums = jnp.zeros((heads, group, slots), jnp.float32)
    for first in range(0, slots, queries):
        part, at = q[:, :, first : first + queries], jnp.int32(first)
        _, lse = attention.compute_causal_attention(part, k, k, at)
        real = first + jnp.arange(queries) < n
        sums = sums + attention.sum_attention_per_key(part, k, jnp.where(real, lse, jnp.inf), at)
    expected = np.zeros(sums.shape)
    for head, member in np.ndindex(heads, group):
        logits = wide(q)[head, member, :n] @ wide(k)[head, :n].T / math.sqrt(dim)
        weights = np.where(
            np.tri(n, dtype=bool), np.exp(logits - logits.max(axis=1, keepdims=True)), 0
        )
        expected[head, member, :n] = (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
    np.testing.assert_allclose(
        sums, expected, rtol=20 * TOLERANCE[dtype], atol=20 * TOLERANCE[dtype]
    )
