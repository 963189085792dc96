"""The pieces of attention against float64 and plain loops: every walk, empty segments, 16-bit inputs."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import attention
from jaxkv.attention import backend_of, columns, xla
from jaxkv.attention.xla import Walk

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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("slots", "queries", "first"),
    [(16, 16, 0), (768, 256, 512), (768, 256, 0), (1024, 512, 512), (600, 600, 0)],
)
def test_causal(slots, queries, first, dtype):
    heads, group, dim = 2, 3, 8
    q = 2 * draw(0, heads, group, queries, dim, dtype=dtype)
    k, v = (draw(seed, heads, slots, dim, dtype=dtype) for seed in (1, 2))
    out, lse = attention.causal(q, k, v, jnp.int32(first))
    assert out.dtype == q.dtype and lse.dtype == jnp.float32
    for index in np.ndindex(heads, group):
        for at in {0, 1, queries // 2, queries - 1}:
            end = first + at + 1
            keys, values = wide(k)[index[0], :end], wide(v)[index[0], :end]
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


@pytest.mark.parametrize("walk", Walk, ids=str)
@pytest.mark.parametrize(
    ("heads", "batch", "dtype"),
    [(heads, batch, "float32") for heads in LENGTHS for batch in (2, 6)]
    + [(2, 6, dtype) for dtype in TOLERANCE if dtype != "float32"],
)
def test_over_pool(walk, heads, batch, dtype):
    # Beyond 4 heads and up to 3 sequences other formulations are chosen, so both sides of either are here.
    rows, dim = 3, 8
    length = np.asarray((LENGTHS[heads] * batch)[:batch], np.int32)
    if walk is Walk.STRIDES:
        size = 310
        start, slots = np.broadcast_to(np.arange(heads) * size, length.shape), heads * size
    else:
        # Other layers' rows lie around this layer's in a shared pool.
        before = 50 if walk is Walk.WINDOWS else 0
        start = before + np.cumsum(length + 2, axis=1) - length - 2
        slots = int((start + length).max()) + before + 3
    q = 2 * draw(3, batch, heads, rows, dim, dtype=dtype)
    k, v = (draw(seed, batch, slots, dim, dtype=dtype) for seed in (4, 5))
    out, lse = xla.over_pool(
        q, k, v, jnp.asarray(start, jnp.int32), jnp.asarray(length, jnp.int32), walk=walk
    )
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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1040, 1031])
def test_over_pool_of_many_rows(size, dtype):
    """From 1024 rows on the sum over values is cut into equal chunks, if the number of rows has a divisor for it."""
    batch, heads, rows, dim = 2, 2, 3, 8
    length = np.asarray([[size, 7], [size - 3, 0]], np.int32)
    start = np.broadcast_to(np.arange(heads, dtype=np.int32) * size, length.shape)
    q = 2 * draw(9, batch, heads, rows, dim, dtype=dtype)
    k, v = (draw(seed, batch, heads * size, dim, dtype=dtype) for seed in (10, 11))
    out, _ = xla.over_pool(q, k, v, jnp.asarray(start), jnp.asarray(length), walk=Walk.STRIDES)
    for row, head, query in np.ndindex(batch, heads, rows):
        span = slice(start[row, head], start[row, head] + length[row, head])
        expected, _ = reference(wide(q)[row, head, query], wide(k)[row, span], wide(v)[row, span])
        np.testing.assert_allclose(wide(out)[row, head, query], expected, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("first", [0, 1, 7])
def test_merge_joins_two_sets_of_keys(first, dtype):
    q, k, v = wide(draw(6, 8)), wide(draw(7, 20, 8)), wide(draw(8, 20, 8))
    (out, lse), (other, other_lse) = (
        reference(q, k[:first], v[:first]),
        reference(q, k[first:], v[first:]),
    )
    merged = attention.merge(
        jnp.asarray(out, dtype), jnp.float32(lse), jnp.asarray(other, dtype), jnp.float32(other_lse)
    )
    assert merged.dtype == dtype
    np.testing.assert_allclose(wide(merged), reference(q, k, v)[0], atol=TOLERANCE[dtype])


def test_merge_of_far_apart_sums_stays_finite():
    a, b = jnp.ones((1, 4), jnp.float32), jnp.zeros((1, 4), jnp.float32)
    for gap, share in ((1e4, 1.0), (-1e4, 0.0)):
        merged = attention.merge(
            a, jnp.full((1,), gap, jnp.float32), b, jnp.zeros((1,), jnp.float32)
        )
        np.testing.assert_array_equal(merged, np.full((1, 4), share))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_window_mass(dtype):
    batch, heads, group, window, dim, slots = 2, 3, 2, 5, 8, 24
    q = 2 * draw(9, batch, heads, group, window, dim, dtype=dtype)
    k = draw(10, batch, heads, slots, dim, dtype=dtype)
    length = np.asarray([20, 3])
    positions = length[:, None] - window + np.arange(window)
    weight = np.random.default_rng(11).random((group, window))

    def reduce(probabilities, position):
        exists = (position >= 0).astype(jnp.float32)
        return (probabilities * (jnp.asarray(weight, jnp.float32) * exists)[..., None]).sum(
            axis=(0, 1)
        )

    mass = attention.window_mass(q, k, jnp.asarray(positions, jnp.int32), reduce)
    assert mass.dtype == jnp.float32
    expected = np.zeros(mass.shape)
    for row, head, member, at in np.ndindex(batch, heads, group, window):
        if positions[row, at] >= 0:
            end = positions[row, at] + 1
            logits = wide(k)[row, head, :end] @ wide(q)[row, head, member, at] / math.sqrt(dim)
            shares = np.exp(logits - logits.max())
            expected[row, head, :end] += weight[member, at] * shares / shares.sum()
    np.testing.assert_allclose(wide(mass), expected, atol=2e-6)


# --- what each key receives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize(
    ("slots", "queries", "n"), [(48, 48, 37), (768, 256, 700), (1024, 512, 1024)]
)
def test_column_sums(slots, queries, n, dtype):
    """Blocks of queries, blocks of keys, padding: every key's sum over all real queries, of each query head."""
    heads, group, dim = 2, 2, 8
    q = 2 * draw(0, heads, group, slots, dim, dtype=dtype)
    k = draw(1, heads, slots, dim, dtype=dtype)
    sums = jnp.zeros((heads, group, slots), jnp.float32)
    for first in range(0, slots, queries):
        part, at = q[:, :, first : first + queries], jnp.int32(first)
        _, lse = attention.causal(part, k, k, at)
        real = first + jnp.arange(queries) < n
        sums = sums + attention.column_sums(part, k, jnp.where(real, lse, jnp.inf), at)
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


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("walk", Walk, ids=str)
def test_a_pool_s_scores(walk, dtype):
    """A token's attention joins its rows' scores, in one pass or two; sequences that do not count stay as they are."""
    heads, group, dim, each = 2, 3, 8, 150
    length = np.asarray(
        [[150, 150], [3, 3]] if walk is Walk.STRIDES else [[140, 9], [0, 30]], np.int32
    )
    start = np.asarray([[0, 150]] * 2 if walk is Walk.STRIDES else [[4, 144], [6, 200]], np.int32)
    _check_scores(walk, dtype, heads, group, dim, each, start, length, widest=150)


def test_a_segment_of_nearly_the_whole_pool_has_its_scores():
    """P is not a multiple of the walk's blocks, and one segment is longer than all whole blocks together."""
    length, start = (
        np.asarray([[198, 2], [2, 197]], np.int32),
        np.asarray([[0, 198], [0, 3]], np.int32),
    )
    _check_scores(Walk.WINDOWS, "float32", 2, 3, 8, 100, start, length, widest=200)


def _check_scores(walk, dtype, heads, group, dim, each, start, length, *, widest):
    """Output and scores of a token over pools of `heads * each` rows are those of numpy, whichever way they come."""
    q = 2 * draw(0, 3, heads, group, dim, dtype=dtype)[:2]
    k, v = (draw(seed, 2, heads * each, dim, dtype=dtype) for seed in (1, 2))
    score = draw(3, 2, heads * each)
    expected = np.asarray(score, np.float64)
    for row, head in np.ndindex(2, heads):
        span = slice(start[row, head], start[row, head] + length[row, head])
        for member in range(group):
            logits = wide(k)[row, span] @ wide(q)[row, head, member] / math.sqrt(dim)
            weights = np.exp(logits - logits.max(initial=-math.inf)) if len(logits) else logits
            expected[row, span] += weights / max(weights.sum(), 1e-30) / group
    begin, rows = jnp.asarray(start), jnp.asarray(length)
    plain, plain_lse = xla.over_pool(q, k, v, begin, rows, walk=walk)

    def scored(counts, **options):
        backend = backend_of(attention.Implementation.XLA)
        out, found = backend.attend_scored(
            q, k, v, begin, rows, score, counts, walk=walk, **options
        )
        if isinstance(found, attention.Received):
            return out, attention.add_received(score, found, begin, counts), found
        return out, found, None

    for options in ({}, {"widest": widest}):
        out, ours, received = scored(jnp.asarray([True, True]), **options)
        np.testing.assert_allclose(ours, expected, atol=5 * TOLERANCE[dtype])
        np.testing.assert_allclose(wide(out), wide(plain), atol=5 * TOLERANCE[dtype])
        _, ours, _ = scored(jnp.asarray([False, True]), **options)
        np.testing.assert_array_equal(ours[0], score[0])
        np.testing.assert_allclose(ours[1], expected[1], atol=5 * TOLERANCE[dtype])
        later = (
            walk is Walk.WINDOWS and "widest" in options and columns.covers(heads * each, widest)
        )
        assert (received is not None) == later
        if received is not None:
            np.testing.assert_allclose(received.lse, plain_lse, atol=5 * TOLERANCE[dtype])


def test_sums_over_a_long_prompt_take_no_more_memory():
    """32,768 tokens: what a layer's prefill needs with every key's sum, against the same without."""
    import jax
    import tiny

    from jaxkv.attention import Implementation
    from jaxkv.engine.prefill_layer import layer
    from jaxkv.models.rope import Angles, angles
    from jaxkv.policies.scorer import Needs

    slots, model = 32768, tiny.tiny(tiny.MODELS["gqa4"])
    flat = model.flat
    positions = jnp.arange(slots, dtype=jnp.int32)[None]
    inputs = (
        jax.ShapeDtypeStruct((1, slots, model.config.embed), jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        *jax.tree.leaves(angles(positions, model.config.rope, model.config.head_dim)),
    )

    def peak(needs):
        options = {"needs": needs, "last": False, "implementation": Implementation.XLA}
        run = lambda leaves, x, length, cos, sin: layer(  # noqa: E731
            leaves, x, length, Angles(cos=cos, sin=sin), graphs=flat.graphs, **options
        )
        memory = (
            jax.jit(run, donate_argnums=1)
            .lower(flat.blocks[0], *inputs)
            .compile()
            .memory_analysis()
        )
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    without = peak(Needs())
    assert without < peak(Needs(sums=True)) <= 1.3 * without
