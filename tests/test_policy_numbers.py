"""Numbers in policies: numpy's, JAX's and others become plain ones of the same value."""

import dataclasses
from decimal import Decimal
from fractions import Fraction

import jax
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv import D2O, AdaKV, KNorm, OmniKV, SnapKV
from jaxkv.engine.plan import plan_prefill
from jaxkv.policies import (
    AdaptiveHeads,
    GroupReduce,
    LinearLayers,
    MaxPool,
    ObservationWindowAttention,
    PoolOrder,
    VarianceLayers,
)
from jaxkv.policies.reads import QueryWeighting

GQA = tiny.MODELS["gqa3"]
pytestmark = pytest.mark.usefixtures("as_users_call")


@pytest.mark.parametrize(
    "given, plain",
    [
        (np.float32(0.2), 0.2),
        (np.int64(64), 64),
        (np.asarray(64), 64),
        (jax.numpy.int32(64), 64),
        (Fraction(1, 4), 0.25),
        (Decimal("0.2"), 0.2),
    ],
    ids=repr,
)
def test_budgets_of_numpy_and_others_are_plain(given, plain):
    policy, same = SnapKV(budget=given), SnapKV(budget=plain)
    assert type(policy.budget) is type(plain) and policy == same and hash(policy) == hash(same)
    # 0.2 of 600 is 120, whatever float32 makes of it.
    rows = plan_prefill(GQA, dataclasses.replace(policy, min_budget="clamp"), [600]).budget[0]
    assert rows == (plain if isinstance(plain, int) else round(plain * 600))


def test_every_other_number_is_plain_too():
    n, x = np.int64, np.float32
    policy = SnapKV(
        budget=64,
        window=n(8),
        sinks=n(2),
        every=n(5),
        pooling=MaxPool(n(5)),
        layers=LinearLayers(beta=n(3)),
    )
    assert policy == SnapKV(
        budget=64, window=8, sinks=2, every=5, pooling=MaxPool(5), layers=LinearLayers(beta=3)
    )
    assert (
        SnapKV(protect=np.asarray([[0, 4]]))
        == SnapKV(protect=[(n(0), n(4))])
        == SnapKV(protect=((0, 4),))
    )
    assert AdaKV(budget=64, alpha=x(0.3)).build_policy_parts().heads == AdaptiveHeads(alpha=0.3)
    assert VarianceLayers(dense_layers=np.asarray([0, -1])) == VarianceLayers(dense_layers=(0, -1))
    assert SnapKV(group="max", order="first") == SnapKV(
        group=GroupReduce.MAX, order=PoolOrder.FIRST
    )
    assert OmniKV(selector="uniform").selector is QueryWeighting.UNIFORM


def test_lengths_and_room_of_a_plan_may_be_numpys():
    plan = plan_prefill(GQA, SnapKV(budget=0.5, window=8), [60, 40], headroom=3)
    same = plan_prefill(
        GQA, SnapKV(budget=0.5, window=8), np.asarray([60, 40]), headroom=np.int64(3)
    )
    assert (
        same.cache_bytes == plan.cache_bytes
        and same.budget.tolist() == plan.budget.tolist() == [30, 20]
    )


def test_numbers_beyond_any_text_mean_all_of_it():
    model, ids = tiny.tiny(GQA), tiny.prompts(1, (40,))
    full = jaxkv.generate(model, ids, max_new_tokens=3, stop_at_eos=False)
    far = ((10**12, 10**30), (-(10**30), -(10**12)))
    for policy in (
        SnapKV(budget=10**12),
        D2O(budget=2**40, merge=None, protect=far),
    ):
        out = jaxkv.generate(model, ids, policy=policy, max_new_tokens=3, stop_at_eos=False)
        assert out.stats.kept == 40
        np.testing.assert_array_equal(out[0].tokens, full[0].tokens)
    # A span that begins within the text and never ends.
    kept, _, _ = tiny.run(model, ids, KNorm(budget=10, protect=((35, 10**20),)))
    assert all(set(range(35, 40)) <= set(head) for layer in tiny.kept(kept) for head in layer[0])


def test_prompts_shorter_than_the_window():
    """Queries before a prompt's beginning count nothing, whichever is done first: pooling or the mean over queries."""
    scorer = ObservationWindowAttention(window=8, order="first")
    policy = jaxkv.CustomPolicy(scorer=scorer, keep=jaxkv.policies.Keep(window=8), budget=12)
    made = jaxkv.generate(
        tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(0, (5, 20)), policy=policy, max_new_tokens=2
    )
    assert made.cache.kept[:, 0].max() <= 12
