"""Pure functions on 200 examples each: top-k, rounding of budgets, placement of segments, packing, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.cache.layout import SegmentLayout
from jaxkv.cache.packing import UnpackedEntries, pack_layer_entries, truncate_pools
from jaxkv.policies import topk
from jaxkv.policies.layer_budgets import round_to_sum

many = settings(max_examples=200)
seeds = st.integers(0, 2**32 - 1)
# One shape each, so that each function is compiled once.
HEADS, SLOTS = 3, 16
top = jax.jit(lambda scores, count: topk.mask_top_k(topk.encode_sort_keys(scores), count))


@many
@given(seed=seeds, levels=st.integers(1, 40), count=st.integers(0, SLOTS))
def test_top_takes_the_highest_and_of_equals_the_first(seed, levels, count):
    rng = np.random.default_rng(seed)
    scores = (rng.integers(-levels, levels, (HEADS, SLOTS)) / 8).astype(np.float32)
    found = np.asarray(top(jnp.asarray(scores), jnp.full(HEADS, count, jnp.int32)))
    for row, taken in zip(scores, found, strict=True):
        best = sorted(range(SLOTS), key=lambda at: (-row[at], at))[:count]
        assert np.flatnonzero(taken).tolist() == sorted(best)


@many
@given(seed=seeds, layers=st.integers(1, 9), most=st.integers(1, 50), share=st.floats(0, 1))
def test_rounded_budgets_have_the_exact_sum(seed, layers, most, share):
    values = np.random.default_rng(seed).uniform(-5, 2 * most, (layers, 2))
    total = np.asarray([int(share * layers * most), layers * most // 2])
    rows = np.asarray(round_to_sum(values, total, np.full(2, most)))
    np.testing.assert_array_equal(rows.sum(axis=0), total)
    assert rows.min() >= 0 and rows.max() <= most
    # A layer that asks for more gets no less, and of equals the lower one no less.
    for asked, got in zip(values.T, rows.T, strict=True):
        assert (np.diff(got[np.argsort(-asked, kind="stable")]) <= 0).all()


@many
@given(seed=seeds, layers=st.integers(1, 4), spare=st.integers(0, 30))
def test_segments_are_disjoint_in_order_and_inside(seed, layers, spare):
    length = np.random.default_rng(seed).integers(0, 20, (layers, 2, HEADS)).astype(np.int32)
    rows = int(length.sum(axis=(0, 2)).max()) + spare
    start = SegmentLayout.SHARED.compute_segment_starts(length, rows)
    taken = np.zeros((2, rows), int)
    for layer, sequence, head in np.ndindex(length.shape):
        first = start[layer, sequence, head]
        assert 0 <= first and first + length[layer, sequence, head] <= rows
        taken[sequence, first : first + length[layer, sequence, head]] += 1
    assert taken.max(initial=0) <= 1
    free = SegmentLayout.SHARED.compute_segment_headroom(start, length, [rows])
    assert free.min() >= 0 and (free.sum(axis=(0, 2)) + length.sum(axis=(0, 2)) <= rows).all()


@many
@given(seed=seeds, share=st.floats(0, 1))
def test_packing_copies_the_chosen_entries_in_order(seed, share):
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, 2, HEADS, SLOTS, 4)).astype(np.float32)
    mask = rng.random((2, HEADS, SLOTS)) < share
    size = min(int(mask.sum(axis=(1, 2)).max()) + 3, HEADS * SLOTS)
    inside = jnp.ones((2, 1, SLOTS), bool)
    pool, first = pack_layer_entries(
        UnpackedEntries(jnp.asarray(k), jnp.asarray(v), inside),
        jnp.asarray(mask),
        jnp.int32(size),
        rows=HEADS * SLOTS,
        layout=SegmentLayout.RAGGED,
    )
    (pool,) = truncate_pools((pool,), rows=(size,))
    pos, packed_k, packed_v = (np.asarray(each) for each in (pool.pos, pool.k, pool.v))
    start = np.asarray(first[0])
    for sequence, head in np.ndindex(2, HEADS):
        chosen = np.flatnonzero(mask[sequence, head])
        at = start[sequence, head] + np.arange(len(chosen))
        np.testing.assert_array_equal(pos[sequence, at], chosen)
        np.testing.assert_array_equal(packed_k[sequence, at], k[sequence, head, chosen])
        np.testing.assert_array_equal(packed_v[sequence, at], v[sequence, head, chosen])
    assert (pos >= 0).sum() == mask.sum()
