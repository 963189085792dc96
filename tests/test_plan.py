"""What a plan promises, against what prefill then makes; and caches copied into larger ones."""

import dataclasses
import functools
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import segments

import jaxkv
from jaxkv.cache import repack_cache
from jaxkv.cache.layout import SegmentLayout
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.plan import plan_prefill
from jaxkv.policies import (
    EntropyLayers,
    ExponentialLayers,
    GeometricLayers,
    KVPressLayers,
    LinearLayers,
    OfficialLayers,
)

FOLDER = Path(__file__).parent / "golden" / "models" / "llama_gqa"
EQUAL = jaxkv.SnapKV(budget=16, window=4)
RAGGED = jaxkv.AdaKV(base=jaxkv.PyramidKV(budget=16, window=4, sinks=2))
SHARED = jaxkv.PyramidKV(budget=16, window=4, layers=EntropyLayers())
POLICIES = {
    "ratio": dataclasses.replace(EQUAL, budget=0.3),
    "ada-pyramid": RAGGED,
    "more than there is": jaxkv.SnapKV(budget=500),
}
WIDE = jaxkv.ModelConfig(
    vocab=8, layers=7, embed=8, hidden=8, heads=4, kv_heads=2, head_dim=4, max_positions=1 << 20
)

many = st.integers(1, 1 << 20)


@functools.cache
def model(dtype="float32"):
    return jaxkv.load(FOLDER, dtype=dtype)


def ids(*lengths):
    rng = np.random.default_rng(7)
    return [rng.integers(3, 96, n).tolist() for n in lengths]


# --- buckets --------------------------------------------------------------------------------------------------------


@given(many, many)
def test_buckets(n, m):
    one, other = round_up_to_bucket(n), round_up_to_bucket(m)
    assert one >= n and round_up_to_bucket(one) == one
    assert (one <= other) if n <= m else (one >= other)
    assert one % 256 == 0 if n > 256 else one & (one - 1) == 0
    # What padding costs: at most a quarter where prompts are long.
    assert n <= 1024 or one <= n * 1.25 + 1


def test_buckets_are_few():
    assert len({round_up_to_bucket(n) for n in range(1, 32_769)}) <= 5 + 3 + 4 * 5


# --- promises -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_bytes_are_those_promised(name, lengths=(64, 38, 45)):
    policy, config = POLICIES[name], model().config
    plan = plan_prefill(config, policy, list(lengths))
    cache = jaxkv.prefill(model(), ids(*lengths), policy=policy)
    assert cache.nbytes == plan.cache_bytes <= plan.peak_bytes
    assert plan.padded_len == 64 and policy.composed.cache_layout is cache.layout
    assert (
        plan.full_bytes == sum(lengths) * config.layers * config.kv_heads * 2 * config.head_dim * 4
    )
    np.testing.assert_array_equal(cache.seen, lengths)
    # On average over layers and heads, every prompt keeps its budget exactly.
    np.testing.assert_allclose(cache.kept.mean(axis=(0, 2)), plan.budget)
    if plan.rows is not None:
        np.testing.assert_array_equal(cache.kept.sum(axis=2), plan.rows * config.kv_heads)


def test_dtype_and_room_are_counted():
    narrow = plan_prefill(model().config, EQUAL, [60], dtype="bfloat16")
    plan = plan_prefill(model().config, EQUAL, [60], dtype=model("bfloat16").cache_dtype)
    assert narrow.cache_bytes < plan.cache_bytes
    assert jaxkv.prefill(model("bfloat16"), ids(60), policy=EQUAL).nbytes == plan.cache_bytes
    roomy = plan_prefill(model().config, EQUAL, [60], headroom=10)
    copy = repack_cache(jaxkv.prefill(model(), ids(60), policy=EQUAL), headroom=10)
    assert copy.nbytes == roomy.cache_bytes


def test_ratios_are_of_each_prompt():
    policy = jaxkv.SnapKV(budget=0.1, window=8)
    plan = plan_prefill(WIDE, policy, [600, 100, 1000])
    assert plan.budget.tolist() == [60, 10, 100] and plan.numbers.always_kept.tolist() == [8, 8, 8]
    # Room for the longest prompt of the bucket: shapes repeat.
    assert plan.capacity == (102,) * 7 and plan.padded_len == 1024
    assert plan_prefill(WIDE, dataclasses.replace(policy, budget=1.0), [600]).budget.tolist() == [
        600
    ]


PYRAMIDS = [LinearLayers(), GeometricLayers(), ExponentialLayers(), KVPressLayers()]


@pytest.mark.parametrize("budget", [64, 0.1, 0.77], ids=str)
@pytest.mark.parametrize("layers", [*PYRAMIDS, OfficialLayers()], ids=lambda a: type(a).__name__)
def test_capacity_holds_every_length_of_the_bucket(layers, budget):
    policy = jaxkv.PyramidKV(budget=budget, layers=layers)
    protected = dataclasses.replace(policy, protect=((3, 9), (-20, -12)), min_budget="clamp")
    rng = np.random.default_rng(0)
    for each in (policy, protected) if budget != 0.1 else (protected,):
        for low, top in ((97, 128), (257, 512), (7169, 8192)):
            capacity = {plan_prefill(WIDE, each, [n]).capacity for n in (low, top)}
            assert len(capacity) == 1  # one shape for the whole bucket
            most = np.asarray(capacity.pop())
            lengths = np.unique([low, top, *rng.integers(low, top, 60)])
            plan = plan_prefill(WIDE, each, lengths.tolist())
            assert (plan.rows <= most[:, None]).all() and (plan.rows <= lengths).all()
            assert (most <= top).all()


# --- repack ---------------------------------------------------------------------------------------------------------


def assert_same(one, other):
    for a, b in zip(segments(one), segments(other), strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("policy", [EQUAL, RAGGED, SHARED], ids=["equal", "ragged", "shared"])
def test_repack(policy):
    cache = jaxkv.prefill(model(), ids(60, 38), policy=policy)
    layers, batch, heads = cache.start.shape
    layouts = {
        EQUAL: SegmentLayout.EQUAL,
        RAGGED: SegmentLayout.RAGGED,
        SHARED: SegmentLayout.SHARED,
    }
    assert cache.layout is layouts[policy] and cache.compute_layer_headroom().min() == 0
    before = [np.array(leaf) for leaf in jax.tree.leaves(cache)]
    row, headroom = 2 * cache.config.head_dim * 4 + 4, 5
    grown = repack_cache(cache, headroom=headroom)
    assert_same(grown, cache)
    assert (
        grown.compute_layer_headroom().min() >= headroom
        and grown.layout is cache.layout
        and grown.policy == policy
    )
    assert grown.nbytes == cache.nbytes + headroom * layers * batch * heads * row
    np.testing.assert_array_equal(grown.limit, cache.limit)
    # No row where no segment is.
    filled = sum(int((np.asarray(pool.pos) >= 0).sum()) for pool in grown.pools)
    assert filled == int(cache.kept.sum())
    for old, new in zip(before, jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(old, new)
    released = repack_cache(grown, headroom=3, release=True)
    assert_same(released, cache)
    assert released.compute_layer_headroom().min() >= headroom + 3
    assert all(leaf.is_deleted() for pool in grown.pools for leaf in jax.tree.leaves(pool))


@pytest.mark.parametrize("policy", [EQUAL, RAGGED, SHARED], ids=["equal", "ragged", "shared"])
def test_one_sequence_becomes_many(policy):
    one = jaxkv.prefill(model(), ids(60), policy=policy)
    many = repack_cache(one, headroom=5, batch=3)
    assert (
        many.batch == 3
        and many.compute_layer_headroom().min() >= 5
        and many.seen.tolist() == [60] * 3
    )
    want = {(layer, head): rest for layer, _, head, *rest in segments(one)}
    for layer, _, head, *rest in segments(many):
        for x, y in zip(rest, want[layer, head], strict=True):
            np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match="^cache="):
        repack_cache(many, headroom=5, batch=2)


@pytest.mark.parametrize("share", [1 / 3, 0.1 + 0.2])
def test_shares_of_many_decimals(share):
    policy = jaxkv.H2O(budget=4096, recent=share)
    recent = policy.build_policy_parts().count_recent_entries(
        np.asarray([[4096, 100_000]]), np.asarray([8000, 200_000]), np.asarray([1, 1])
    )
    exact = [int(Fraction(repr(share)) * rows) for rows in (4096, 100_000)]
    assert recent.tolist() == [exact]
    ids = np.random.default_rng(0).integers(3, 96, 60).tolist()
    critical = jaxkv.CriticalKV(base=jaxkv.SnapKV(budget=24, window=8), first=share)
    assert (jaxkv.prefill(model(), ids, policy=critical).kept == 24).all()
