"""The kernels of a decode step beside attention: residual and norm, products in parts, a row in another's place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from jaxkv.engine.evict import _find_lowest_rank, _find_lowest_rank_fused
from jaxkv.models.layers import multiply_by_weight, multiply_split_k
from jaxkv.models.stored import StoredWeight

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


@pytest.mark.parametrize(
    ("dtype", "parts", "width"), [("float32", 1, 64), ("float16", 4, 96), ("bfloat16", 8, 200)]
)
def test_add_norm(dtype, parts, width):
    """The sum and its norm, of widths that are no power of two, in parts."""
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=(3, 1, width)), rng.normal(size=width)
    added = rng.normal(size=(parts, 3, 1, width)).astype(np.float32)
    of = (jnp.asarray(x, dtype), jnp.asarray(added), jnp.asarray(scale, dtype))
    total, normed = pallas_kernels.add_norm(*of, eps=1e-5, interpret=True)
    wide = np.asarray(of[0], np.float64) + added.sum(axis=0, dtype=np.float64)
    np.testing.assert_allclose(
        np.asarray(total, np.float64), wide, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    # The norm is that of the sum as it has been rounded.
    wide = np.asarray(total, np.float64)
    expected = (
        wide
        / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + 1e-5)
        * np.asarray(of[2], np.float64)
    )
    np.testing.assert_allclose(
        np.asarray(normed, np.float64), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert (total.dtype, normed.dtype, total.shape, normed.shape) == (
        x_dtype := of[0].dtype,
        x_dtype,
        x.shape,
        x.shape,
    )


def test_add_norm_in_another_dtype():
    """A sum kept in float32 is not rounded before it is normed."""
    x, added = jnp.full((2, 64), 1.0, jnp.bfloat16), jnp.full((1, 2, 64), 1 / 1024, jnp.float32)
    total, normed = pallas_kernels.add_norm(
        x, added, x[0], eps=0.0, dtype=jnp.dtype("float32"), interpret=True
    )
    assert (total.dtype, normed.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(total), 1 + 1 / 1024)


@pytest.mark.parametrize("scored", [True, False])
def test_replace_rows(scored):
    """The newest row in the place of another, segment by segment; what is not over stays, bit for bit."""
    rng = np.random.default_rng(1)
    k, v = (rng.normal(size=(2, 40, 80)).astype(np.float32) for _ in range(2))
    pos, score = (
        rng.permutation(80).reshape(2, 40).astype(np.int32),
        rng.normal(size=(2, 40)).astype(np.float32),
    )
    place, last = (
        np.asarray([[3, 12, 39], [0, 19, 30]], np.int32),
        np.asarray([[9, 19, 39], [8, 19, 35]], np.int32),
    )
    over = np.asarray([[True, False, True], [True, True, False]])
    given = [jnp.asarray(each) for each in (k, v, pos, score)]
    rest = [jnp.asarray(each) for each in (place, last, over)]
    given = given if scored else [*given[:3], None]
    found = pallas_kernels.overwrite_evicted_rows(*given, *rest, interpret=True)
    for b in range(2):
        for h in range(3):
            if over[b, h]:
                to, at = place[b, h], last[b, h]
                k[b, to], v[b, to] = k[b, at], v[b, at]
                pos[b, to], score[b, to] = pos[b, at], score[b, at]
                # A row that takes its own place goes.
                pos[b, at], score[b, at] = -1, 0
    for ours, theirs in zip(found[:3], (k, v, pos), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)
    assert (found[3] is None) is not scored
    if scored:
        np.testing.assert_array_equal(np.asarray(found[3]), score)


@pytest.mark.parametrize(
    ("rows", "outputs", "width", "parts"),
    [(2, (3, 5), 96, 1), (2, (96,), 1024, 8), (80, (96,), 1024, 1)],
)
def test_products_add_up(rows, outputs, width, parts):
    """Parts of a product, as many as fill a GPU, add up to it."""
    rng = np.random.default_rng(2)
    x, weight = (
        jnp.asarray(rng.normal(size=(rows, 1, width)), "float32"),
        jnp.asarray(rng.normal(size=(*outputs, width)), "float32"),
    )
    found = multiply_split_k(x, StoredWeight(weight))
    assert found.shape == (parts, rows, 1, *outputs)
    np.testing.assert_allclose(
        np.asarray(found.sum(axis=0)),
        np.asarray(multiply_by_weight(x, StoredWeight(weight))),
        rtol=1e-4,
        atol=1e-4,
    )


def by_score(score, pos, seen, prompt):
    """A rule of eviction: the first two positions stay, of the others the lowest score for each token of age goes."""
    return score / jnp.maximum(seen - pos, 1).astype(jnp.float32), (pos >= 2) & (pos < 2 * prompt)


@pytest.mark.parametrize("scored", [True, False])
def test_evict_rows(scored):
    """Segments above their limit lose the lowest, the latest of equals; others, and rows that must stay, do not."""
    rng = np.random.default_rng(5)
    start = np.asarray([[0, 20, 1150], [0, 1300, 1310]], np.int32)
    length, limit = (
        np.asarray([[12, 1100, 9], [1200, 4, 0]], np.int32),
        np.asarray([[11, 1099, 9], [1100, 3, 0]], np.int32),
    )
    recent = np.asarray([[1, 3, 1], [0, 9, 1]], np.int32)
    k, v = (rng.normal(size=(2, 1400, 16)).astype(np.float32) for _ in range(2))
    pos, score = (
        np.full((2, 1400), -1, np.int32),
        rng.choice([0.0, 0.5, 1.0], size=(2, 1400)).astype(np.float32),
    )
    for b, h in np.ndindex(2, 3):
        at = slice(start[b, h], start[b, h] + length[b, h])
        pos[b, at] = rng.permutation(length[b, h])
    seen, prompt = np.asarray([1200, 1300], np.int32), np.asarray([900, 400], np.int32)
    given = [jnp.asarray(each) for each in (k, v, pos, score)]
    given = given if scored else [*given[:3], None]
    tables = [jnp.asarray(each) for each in (start, length, limit, recent, seen, prompt)]
    found = pallas_kernels.evict_lowest_entries(*given, *tables, weigh=by_score, interpret=True)
    went = np.zeros((2, 3), np.int32)
    for b, h in np.ndindex(2, 3):
        rows = np.arange(start[b, h], start[b, h] + length[b, h])
        mine = pos[b, rows]
        free = (mine >= 2) & (mine < 2 * prompt[b]) & (mine < seen[b] - recent[b, h])
        if length[b, h] <= limit[b, h] or not free.any():
            continue
        ranks = (score[b, rows] if scored else np.zeros(len(rows), np.float32)) / np.maximum(
            seen[b] - mine, 1, dtype=np.float32
        )
        lowest = free & (ranks == ranks[free].min())
        to, at = rows[lowest][np.argmax(mine[lowest])], rows[-1]
        went[b, h] = 1
        k[b, to], v[b, to], pos[b, to], score[b, to] = k[b, at], v[b, at], pos[b, at], score[b, at]
        pos[b, at], score[b, at] = -1, 0
    assert went.tolist() == [[1, 1, 0], [1, 1, 0]]
    np.testing.assert_array_equal(np.asarray(found[4]), went)
    for ours, theirs in zip(found[:3], (k, v, pos), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)
    if scored:
        np.testing.assert_array_equal(np.asarray(found[3]), score)


def test_the_lowest_in_one_reduction():
    """As `_find_lowest_rank` finds it, with ties, endless ranks and segments without a free place."""
    rng = np.random.default_rng(3)
    rank = jnp.asarray(rng.choice([-np.inf, 0.0, 0.5, np.inf], size=(50, 3, 9)), jnp.float32)
    free = jnp.asarray(rng.random((50, 3, 9)) < 0.4)
    pos = jnp.asarray(np.argsort(rng.random((50, 3, 9)), axis=-1), jnp.int32)
    row = jnp.broadcast_to(jnp.asarray(rng.permutation(9), jnp.int32), pos.shape)
    assert bool((~free.any(axis=-1)).any())
    ours, theirs = (
        jax.jit(f)(free, rank, pos, row) for f in (_find_lowest_rank_fused, _find_lowest_rank)
    )
    for mine, its in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, its)
