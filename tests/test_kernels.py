"""The kernels, interpreted, against plain numpy in float64: ragged and empty segments, every dtype and head dim."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.tiles import DecodeTiles

DTYPES = {
    "float32": (jnp.float32, 2e-5),
    "bfloat16": (jnp.bfloat16, 2e-2),
    "float16": (jnp.float16, 3e-3),
}
# Every head dim, and each dtype at a padded and a whole one.
KINDS = [
    (64, "float32"),
    (80, "float32"),
    (80, "float16"),
    (96, "bfloat16"),
    (128, "bfloat16"),
    (256, "float16"),
]
SMALL = DecodeTiles(chunk=16, block=16, queries=16)


def draw(seed, *shapes, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


def wide(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


def attend_oracle(q, k, v, start, length, softcap=None):
    """Loops over sequences, heads and queries; out, lse, and each row's mean weight."""
    q, k, v = wide(q), wide(k), wide(v)
    batch, heads, rows, dim = q.shape
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    mass = np.zeros(k.shape[:2])
    for b, h in np.ndindex(batch, heads):
        span = slice(start[b, h], start[b, h] + length[b, h])
        for r in range(rows):
            if length[b, h] == 0:
                continue
            logits = k[b, span] @ q[b, h, r] / np.sqrt(dim)
            logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
            weights = np.exp(logits - logits.max())
            lse[b, h, r] = logits.max() + np.log(weights.sum())
            weights /= weights.sum()
            out[b, h, r] = weights @ v[b, span]
            mass[b, span] += weights / rows
    return out, lse, mass


def check_attend(
    seed, lengths, rows, dim, dtype, tiles, *, gap=0, scored=True, widest=None, counts=None
):
    """Segments one after the other, `gap` unused rows behind each."""
    length = np.asarray(lengths, np.int32)
    batch, heads = length.shape
    start = np.cumsum(length + gap, axis=1, dtype=np.int32) - length - gap
    pool = int((start + length).max()) + gap
    kind, tolerance = DTYPES[dtype]
    q, k, v = draw(
        seed, (batch, heads, rows, dim), (batch, pool, dim), (batch, pool, dim), dtype=kind
    )
    (score,) = draw(seed + 1, (batch, pool))
    # Rows of no segment may hold anything.
    unused = jnp.asarray(~inside_any(start, length, pool))[..., None]
    k, v = (jnp.where(unused, jnp.asarray(jnp.nan, kind), each) for each in (k, v))
    options = (
        {"scores": pallas_kernels.EntryScores(score=score, widest=widest, counts=counts)}
        if scored
        else {}
    )
    results = pallas_kernels.attend(
        q, k, v, jnp.asarray(start), jnp.asarray(length), **options, tiles=tiles, interpret=True
    )
    assert results[0].dtype == kind
    out, lse, mass = attend_oracle(q, k, v, start, length)
    told = np.ones(batch, bool) if counts is None else np.asarray(counts)
    wanted = (out, lse, np.asarray(score, np.float64) + mass * told[:, None])
    for ours, theirs in zip(results, wanted[: len(results)], strict=True):
        np.testing.assert_allclose(wide(ours), theirs, rtol=tolerance, atol=tolerance)
    outside = ~inside_any(start, length, pool) | ~told[:, None]
    if scored:
        np.testing.assert_array_equal(np.asarray(results[2])[outside], np.asarray(score)[outside])


def inside_any(start, length, pool):
    """Which rows are in some segment."""
    row = np.arange(pool)
    return ((row >= start[..., None]) & (row < (start + length)[..., None])).any(axis=1)


@pytest.mark.parametrize(("dim", "dtype"), KINDS)
def test_attend_every_dtype_and_dim(dim, dtype):
    """Ragged, with an empty segment in front, in the middle and at the end, in a batch of two."""
    check_attend(0, [[0, 70, 1, 33], [40, 0, 17, 0]], 3, dim, dtype, SMALL)


@pytest.mark.parametrize(("heads", "chunk", "gap"), [(1, 32, 0), (3, 16, 9), (8, 32, 4)])
def test_attend_any_lengths(heads, chunk, gap):
    """Chunks of one or several blocks, segments with room behind them."""
    lengths = np.random.default_rng(heads).integers(0, 90, (2, heads))
    tiles = dataclasses.replace(SMALL, chunk=chunk)
    check_attend(heads, lengths, 4, 64, "float32", tiles, gap=gap)


@pytest.mark.parametrize("rows", [16, 17, 128])
def test_attend_several_queries(rows):
    """A question on a cache, or a large group: more queries than one tile holds, and their scores."""
    check_attend(1, [[50, 3, 20], [1, 0, 64]], rows, 64, "float32", SMALL)


@pytest.mark.parametrize("widest", [33, 1000])
def test_attend_over_a_stretch_of_a_large_pool(widest):
    """Logits lie head after head where the pool's rows are many more; a sequence that has ended is not scored."""
    check_attend(
        4,
        [[0, 33, 9], [31, 2, 0]],
        3,
        64,
        "float32",
        SMALL,
        gap=40,
        widest=widest,
        counts=jnp.array([1, 0]) > 0,
    )


@pytest.mark.parametrize(("dtype", "dim"), [("float32", 80), ("bfloat16", 256), ("float16", 64)])
def test_compact(dtype, dim):
    """Every row where it belongs, bit for bit; rows without a source are empty."""
    kind, _ = DTYPES[dtype]
    k, v = draw(0, (2, 3, 20, dim), (2, 3, 20, dim), dtype=kind)
    source = np.random.default_rng(0).integers(-1, 60, (2, 37)).astype(np.int32)
    out_k, out_v, pos = pallas_kernels.gather_kept_entries(
        k, v, jnp.asarray(source), block=16, interpret=True
    )
    for b, p in np.ndindex(*source.shape):
        head, at = divmod(int(source[b, p]), 20)
        for ours, theirs in ((out_k, k), (out_v, v)):
            want = np.zeros(dim) if source[b, p] < 0 else wide(theirs)[b, head, at]
            np.testing.assert_array_equal(wide(ours)[b, p], want)
        assert pos[b, p] == (-1 if source[b, p] < 0 else at)
