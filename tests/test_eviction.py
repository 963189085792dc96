"""Eviction and merging, step by step on random tensors, against the oracle's plain loops in float64."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import DIM, HEADS, LENGTHS, draw, follow, held, one_step, prefilled, terms_of

from jaxkv import D2O, H2O, TOVA, CustomPolicy, RoCo
from jaxkv.cache import DenseStore, EntryPool
from jaxkv.cache.layout import SegmentLayout
from jaxkv.engine import evict as evicting
from jaxkv.engine.evict import EvictionConfig, evict_entries
from jaxkv.engine.segments import Segments
from jaxkv.engine.tokens import TokenProjections
from jaxkv.policies import (
    ByAttention,
    CumulativeAttention,
    Joined,
    Keep,
    KeyNorm,
    Merge,
    Merged,
    Merger,
    Rank,
    UniformLayers,
)
from jaxkv.policies.merger import UNSET

MERGES = {
    "plain": {},
    "both": {"metric": "both"},
    "official": {
        "beta": 0.5,
        "weights": "scatter_mean",
        "tau_scope": "layer",
        "decision": "shared",
    },
    "nothing": {"threshold": np.inf},
    "everything": {"threshold": -np.inf, "weights": "average"},
}


def _merge(options):
    names = {"tau_scope": "scope"}
    given = {names.get(name, name): value for name, value in options.items()}
    if given.get("decision") == "shared":
        given["decision"] = "shared_position"
    return Merge(**given)


def _case(policy, sinks, accumulate, share, merge=None):
    return policy, sinks, accumulate, share, merge


@dataclasses.dataclass(frozen=True)
class ByNorm(Rank):
    """A user's rank: long keys go first, whatever attention they receive."""

    def score_new_entries(self, k, v):
        return -jnp.sqrt((k.astype(jnp.float32) ** 2).sum(axis=-1))


@dataclasses.dataclass(frozen=True)
class Halving(Merger):
    """A user's merger: while decoding, the mean of the dropped value and that of the row with the nearest key."""

    compared_tensors = ("k",)

    def merge_evicted_entries(self, k, v, kept, inside, mass, tau, key):
        return Merged(k, v, tau)

    def merge_entry_while_decoding(self, index, cosine, dropped, nearest, goes, tau):
        return Joined(goes, None, (dropped.v + nearest.v) / 2, tau)


HEAVY = {"scorer": CumulativeAttention(), "keep": Keep(window=1, recent=0.5)}

CASES = {
    "h2o": _case(partial(H2O), 0, "sum", 0.5),
    "h2o-sinks": _case(partial(H2O, sinks=3, recent=0.25), 3, "sum", 0.25),
    "roco": _case(partial(RoCo), 0, "mean", 0.5),
    "tova": _case(partial(TOVA), 0, "last", 0.0),
    "fading": _case(partial(CustomPolicy, evict=ByAttention(decay=0.8), **HEAVY), 0, 0.8, 0.5),
    "norm": _case(
        partial(CustomPolicy, scorer=KeyNorm(), keep=Keep(window=1), evict=ByNorm()), 0, "norm", 0.0
    ),
    "halving": _case(partial(H2O, merge=Halving()), 0, "sum", 0.5, o.halve_values),
    **{
        f"d2o-{name}": _case(
            partial(D2O, merge=_merge(options), layers=UniformLayers()),
            4,
            "sum",
            0.25,
            dict(options),
        )
        for name, options in MERGES.items()
    },
}


def _tau(given, head, number):
    """The oracle's thresholds of one head, of which there are so many."""
    pairs = given if number == 2 and given is not None else (given,) * number
    return [UNSET if one is None else one[head] for one in pairs]


def check_rows(pool, segments, expected, accumulate, merge):
    """Asserts that positions, keys, values, scores and thresholds are those of the oracle, sequence by sequence."""
    for row, oracle in enumerate(expected):
        for head in range(HEADS):
            pos, k, v, score = held(pool, segments, row, head)
            assert pos == list(oracle["positions"][head]), (row, head)
            np.testing.assert_allclose(k, oracle["k"][head], atol=1e-5)
            np.testing.assert_allclose(v, oracle["v"][head], atol=1e-5)
            if accumulate != "last":
                np.testing.assert_allclose(score, oracle["scores"][head], rtol=1e-4, atol=1e-5)
            if isinstance(merge, dict):
                ours = np.asarray(segments.tau)[row, head]
                wanted = _tau(oracle["tau"], head, len(ours))
                np.testing.assert_allclose(ours, wanted, atol=1e-6)


def check_steps(
    case, seed, group, budget, layout, lengths=LENGTHS, *, widest=None, **options
) -> bool:
    """Asserts equality with the oracle at every step; False where its choices are too narrow to tell."""
    make, sinks, accumulate, share, merge = CASES[case]
    drawn, policy = draw(seed, group, **options), make(budget=budget)
    expected, smallest = [], np.inf
    for row, n in enumerate(lengths):
        recent = max(1, int((budget - sinks) * share))
        prefill, steps, gap = o.simulate(
            *drawn.of(row, n),
            rows=budget,
            sinks=sinks,
            recent=recent,
            accumulate=accumulate,
            merge=merge,
        )
        expected.append([prefill, *steps])
        smallest = min(smallest, gap)
    if smallest < o.MIN_GAP:
        return False
    for at, (pool, segments, out) in enumerate(
        follow(policy, drawn, lengths, layout, widest=widest)
    ):
        check_rows(pool, segments, [each[at] for each in expected], accumulate, merge)
        for row, oracle in enumerate(expected):
            if out is not None:
                np.testing.assert_allclose(out[row].reshape(-1, DIM), oracle[at]["out"], atol=1e-5)
    return True


# The others run in a pool of one layer, by the public transform: test_transform_steps.py.
SHARED = ("roco", "norm", "halving", "d2o-both", "d2o-official")


@pytest.mark.parametrize("case", SHARED)
def test_every_step_agrees_with_the_oracle_in_a_shared_pool(case):
    assert any(check_steps(case, seed, 3, 29, SegmentLayout.SHARED, like=0.7) for seed in range(3))


@pytest.mark.parametrize(("group", "budget", "widest"), [(4, 40, 41), (1, 120, 121)])
def test_eviction_begins_when_the_budget_is_reached(group, budget, widest):
    # Above the prompts' lengths, and above all that comes: rows go later, and never. What is
    # known of a segment's width changes how a shared pool is read.
    assert any(
        check_steps("d2o-plain", seed, group, budget, SegmentLayout.SHARED, like=0.7, widest=widest)
        for seed in range(3)
    )


def test_rows_below_every_threshold_are_dropped():
    # Keys in all directions, and a threshold that starts high: most dropped rows are like nothing that stays.
    found = [
        check_steps("d2o-plain", seed, 2, 14, SegmentLayout.EQUAL, like=0.0) for seed in range(4)
    ]
    assert any(found)


# --- ties, with scores that float32 holds exactly --------------------------------------------------------------------

scores_of_few_kinds = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(1, 3), st.sampled_from(list(SegmentLayout))
)


@settings(max_examples=15)
@given(scores_of_few_kinds)
def test_among_equals_the_latest_goes(drawn):
    seed, levels, layout = drawn
    rng = np.random.default_rng(seed)
    rows, sinks, recent, seen = 12, 2, 3, 40
    pos = np.stack([rng.permutation(seen)[:rows] for _ in range(HEADS)])
    scores = rng.integers(0, levels, pos.shape).astype(np.float32)
    around = 0 if layout is SegmentLayout.EQUAL else 5
    leaf = lambda a, none: jnp.asarray(np.pad(a.reshape(-1), around, constant_values=none)[None])  # noqa: E731
    zeros = jnp.zeros((1, HEADS * rows + 2 * around, DIM))
    pool = EntryPool(
        store=DenseStore(k=zeros, v=zeros),
        pos=leaf(pos.astype(np.int32), 0),
        score=leaf(scores, -1),
    )
    one = jnp.ones((1,), jnp.int32)
    segments = Segments(
        start=(jnp.arange(HEADS, dtype=jnp.int32) * rows + around)[None],
        length=jnp.full((1, HEADS), rows, jnp.int32),
        limit=jnp.full((1, HEADS), rows - 1, jnp.int32),
        recent=jnp.full((1, HEADS), recent, jnp.int32),
        tau=None,
        prompt=one,
        seen=seen * one,
    )
    policy = H2O(budget=rows, sinks=sinks)
    for widest in (None, rows):
        how = EvictionConfig(terms=terms_of(policy, layout, widest), heads=HEADS)
        at = evicting.find_lowest_ranked_entry(pool, segments, how)
        for head in range(HEADS):
            free = [i for i in range(rows) if sinks <= pos[head, i] < seen - recent]
            worst = min(free, key=lambda i, h=head: (scores[h, i], -pos[h, i]), default=None)
            assert int(at[0, head]) == (-1 if worst is None else head * rows + worst + around)


# --- properties ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=9),
    st.sampled_from(("softmax", "average")),
)
def test_merge_weights_are_convex_and_the_kept_row_weighs_most(cosines, weights):
    add, divide, own = Merge(weights=weights).compute_merge_weights(
        jnp.asarray(cosines, jnp.float32)
    )
    total = own + np.asarray(divide, np.float64).sum()
    shares = np.asarray(add, np.float64) / total
    assert (shares >= 0).all() and shares.sum() + own / total == pytest.approx(1, abs=1e-6)
    assert own / total >= shares.max() - 1e-7


def test_a_finished_sequence_keeps_its_rows():
    drawn, policy = draw(1, 2), D2O(budget=16, layers=UniformLayers())
    pool, segments = prefilled(policy, drawn, LENGTHS, SegmentLayout.EQUAL)
    spec = terms_of(policy, SegmentLayout.EQUAL)
    k = jnp.asarray(drawn.k_new[:, :, :1])
    new = TokenProjections(q=jnp.asarray(drawn.q_new[..., :1, :]), k=k, v=k, stored=k)
    count = jnp.asarray([1, 0], jnp.int32)
    _, after, left = one_step(spec, new, pool, segments, count)
    for leaf, old in zip(jax.tree.leaves(after), jax.tree.leaves(pool), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf)[1], np.asarray(old)[1])
        assert not np.array_equal(np.asarray(leaf)[0], np.asarray(old)[0])
    np.testing.assert_array_equal(np.asarray(left.tau)[1], np.asarray(segments.tau)[1])
    np.testing.assert_array_equal(left.length, segments.length)


def test_attention_that_is_not_a_number_drops_nothing():
    drawn, policy = draw(1, 2), H2O(budget=16)
    pool, segments = prefilled(policy, drawn, LENGTHS, SegmentLayout.EQUAL)
    full = dataclasses.replace(segments, limit=segments.length - 1)
    attended = jnp.asarray([[np.nan, 1.0], [1.0, np.nan]], jnp.float32)
    how = EvictionConfig(terms=terms_of(policy, SegmentLayout.EQUAL), heads=HEADS)
    _, left = evict_entries(pool, full, attended, how)
    np.testing.assert_array_equal(np.asarray(segments.length) - left.length, [[0, 1], [1, 0]])
