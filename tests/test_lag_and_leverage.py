"""LagKV, CurDKV and CAPKV where the policy table does not look: options, short prompts, rows alike, zero norms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table_oracles as t
import test_oracle_agreement as agreement
import tiny
from policy_row import Row

from jaxkv import CAPKV, CurDKV, LagKV
from jaxkv.policies import QueryMoments, ScorerInputs

GQA = tiny.MODELS["gqa3"]
EACH = {
    "lagkv": LagKV(lag=4),
    "lagkv-cross": LagKV(lag=4, cross_scoring=True),
    "curdkv": CurDKV(),
    "curdkv-average": CurDKV(leverage="kv_avg", local_window=1000),
    "capkv": CAPKV(),
}


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def observed(policy, k, v, lengths, mean=None):
    """The scorer's observations of one layer of keys and values `[B, K, S, D]`."""
    scorer, (batch, heads, _, dim) = policy.build_policy_parts().scorer, k.shape
    seen = ScorerInputs(
        q_positions=jnp.zeros((batch, 0), jnp.int32),
        k=jnp.asarray(k),
        v=jnp.asarray(v),
        length=jnp.asarray(lengths, jnp.int32),
        layer=jnp.int32(0),
        key=jax.random.key(0),
    )
    if scorer.needs.moments is not None:
        mean = drawn(batch, heads, 2, dim, seed=7) if mean is None else mean
        moments = QueryMoments(mean=jnp.asarray(mean), covariance=None)
        seen = dataclasses.replace(seen, extras={"moments": moments})
    return scorer.score_entries(seen)


def _row(make, oracle):
    return Row(name="", make=lambda budget, **kw: make(budget=budget, **kw), oracle=oracle)


OPTIONS = {
    "lagkv-cross": _row(
        lambda **kw: LagKV(lag=4, cross_scoring=True, **kw), t.lagkv(lag=4, ranks=False)
    ),
    "lagkv-long": _row(lambda **kw: LagKV(lag=17, **kw), t.lagkv(lag=17)),
    "curdkv-key": _row(lambda **kw: CurDKV(leverage="key", **kw), t.curdkv(leverage="key")),
    "curdkv-value": _row(
        lambda **kw: CurDKV(leverage="value", local_window=7, **kw),
        t.curdkv(leverage="value", local_window=7),
    ),
    "curdkv-average": _row(
        lambda **kw: CurDKV(leverage="kv_avg", local_window=100, **kw),
        t.curdkv(leverage="kv_avg", local_window=100),
    ),
    "capkv-flat": _row(lambda **kw: CAPKV(tau=0.0, **kw), t.capkv(tau=0.0)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_agree_with_the_oracle(name):
    check = agreement.check_agreement
    assert any([check(OPTIONS[name], seed, 3, (48, 30), 20) for seed in range(3)])


@pytest.mark.parametrize(
    ("policy", "oracle"),
    [
        (EACH["lagkv"], lambda k, v, mean: t.o.lag_scores(k, v, lag=4)[0]),
        (EACH["lagkv-cross"], lambda k, v, mean: t.o.lag_scores(k, v, lag=4, ranks=False)[0]),
        (CurDKV(leverage="key"), lambda k, v, mean: t.o.cur_scores(k, v, leverage="key")),
        (CurDKV(leverage="value"), lambda k, v, mean: t.o.cur_scores(k, v, leverage="value")),
        (EACH["curdkv"], lambda k, v, mean: t.o.cur_scores(k, v)),
        (EACH["capkv"], lambda k, v, mean: t.o.cap_scores(mean, k, v)),
    ],
)
def test_keys_and_values_are_not_mixed_up(policy, oracle):
    """In the policy table the values are the keys."""
    k, v, mean = (
        drawn(2, 2, 40, 8, seed=1),
        0.3 + drawn(2, 2, 40, 8, seed=2),
        drawn(2, 2, 2, 8, seed=3),
    )
    found = np.asarray(observed(policy, k, v, [40, 25], mean))
    for row, n in enumerate((40, 25)):
        expected = oracle(k[row, :, :n], v[row, :, :n], mean[row].reshape(-1, 8))
        np.testing.assert_allclose(found[row, :, 4:n], expected[:, 4:], rtol=2e-5)


def test_rows_alike_rank_by_position_in_every_partition():
    k = np.tile(drawn(1, 1, 1, 8), (1, 2, 30, 1))
    found = np.asarray(observed(LagKV(lag=8), k, k, [30]))
    # Constant channels: no partition has a range, and no row stands out.
    np.testing.assert_array_equal(found[0, :, 4:20] * 8, [[*range(7, -1, -1)] * 2] * 2)
    assert (found[0, :, 20:] >= 1).all() and (np.diff(found[0, :, 20:]) > 0).all()


@pytest.mark.parametrize("n", [1, 12, 20])
def test_a_budget_below_the_last_rows_keeps_the_last_of_them(n):
    """Texts with less than two partitions, and one with just two."""
    cache, logits, _ = tiny.run(tiny.tiny(GQA), tiny.prompts(0, (n, 30)), LagKV(budget=6, lag=8))
    assert np.isfinite(logits).all()
    expected = sorted({*range(min(n, 4)), *range(max(0, n - 2), n)})
    assert all(head == expected for layer in tiny.kept(cache) for head in layer[0])


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e18])
@pytest.mark.parametrize("policy", EACH.values(), ids=EACH)
def test_scores_of_extreme_rows_are_finite(policy, scale):
    k, v = (drawn(2, 2, 40, 8, seed=seed) * np.float32(scale) for seed in (1, 2))
    # The second text's padding holds anything, and few rows of one direction make a matrix of low rank.
    k[1, :, 25:], v[1, :, 25:], v[0] = np.nan, np.nan, v[0, :, :1]
    found = np.asarray(observed(policy, k, v, [40, 25]))
    assert np.isfinite(found[0]).all() and np.isfinite(found[1, :, :25]).all()
    assert np.isfinite(np.asarray(observed(policy, k, v, [2, 1]))[:, :, 0]).all()


@pytest.mark.parametrize("policy", EACH.values(), ids=EACH)
def test_scores_of_16_bits_are_computed_in_float32(policy):
    k, v = (jnp.asarray(drawn(1, 2, 40, 8, seed=seed), "bfloat16") for seed in (1, 2))
    found = observed(policy, k, v, [40])
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(
        found, observed(policy, k.astype("float32"), v.astype("float32"), [40]), rtol=1e-6
    )


def test_capacity_takes_texts_of_several_blocks():
    k, v = (drawn(1, 1, 1100, 8, seed=seed) for seed in (1, 2))
    mean = drawn(1, 1, 2, 8)
    expected = t.o.cap_scores(mean[0, 0], k[0], v[0])
    np.testing.assert_allclose(
        observed(CAPKV(), k, v, [1100], mean)[0], expected, rtol=1e-4, atol=1e-7
    )
