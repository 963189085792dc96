"""Kept sets against the float64 oracles, index for index; ties; and Ada-KV's theorems on the library's selection."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from policy_row import Row
from policy_table import BY_NAME, TABLE
from table_oracles import critical_norms, replayed

from jaxkv import attention
from jaxkv.cache.packing import UnpackedEntries
from jaxkv.engine import compress, layer_sources, observing, progress, selection
from jaxkv.policies import (
    AdaptiveHeads,
    LayerBudgetInputs,
    ProtectedHeads,
    QueryMoments,
    QueryPairs,
    ScorerInputs,
    UniformHeads,
    topk,
)

SLOTS, DIM, LAYERS = 48, 8, 3
SHAPES = {1: 3, 3: 2, 4: 2, 8: 1}  # GQA ratio to kv heads

seeds = st.integers(0, 2**32 - 1)
lengths_of_two = st.tuples(st.integers(34, SLOTS), st.integers(14, 40))


def draw_layers(seed: int, group: int, lengths):
    """Queries `[L, B, K, G, S, D]` and keys `[L, B, K, S, D]`, float32, peaked but tame; padding is finite."""
    rng = np.random.default_rng(seed)
    heads = SHAPES[group]
    q = 1.5 * rng.standard_normal((LAYERS, len(lengths), heads, group, SLOTS, DIM))
    k = rng.standard_normal((LAYERS, len(lengths), heads, SLOTS, DIM))
    for row, n in enumerate(lengths):
        k[:, row, :, n:] *= 4
    return q.astype(np.float32), k.astype(np.float32)


@dataclasses.dataclass
class _Drawn(layer_sources.LayerEntrySource):
    """Layers of queries and keys, as `compress` takes them."""

    policy: object
    q: np.ndarray
    k: np.ndarray
    lengths: np.ndarray

    def __post_init__(self):
        self.indices, self.parts = range(len(self.k)), self.policy.build_policy_parts()
        self.sliding_windows = (None,) * len(self.k)
        self.length = jnp.asarray(self.lengths, jnp.int32)
        self.always_kept = self.parts.keep.mask_always_kept(self.lengths, SLOTS)
        self.prompts = selection.create_prompt_candidates(
            None, jnp.asarray(self.always_kept), self.length
        )

    def get_layer_candidates(self, index):
        parts, window = self.parts, self.parts.scorer.needs.queries
        positions = (self.lengths - window)[:, None] + np.arange(window)
        at = np.maximum(positions, 0)[:, None, None, :, None]
        k = self.k[index]
        seen = ScorerInputs(
            q_positions=jnp.asarray(positions, jnp.int32),
            k=jnp.asarray(k),
            v=jnp.asarray(k),
            length=self.length,
            layer=jnp.int32(index),
            key=jax.random.key(0),
            extras=self.extras(index)
            | {"queries": jnp.asarray(np.take_along_axis(self.q[index], at, axis=3))},
        )
        norms = jnp.asarray(critical_norms(k)) if parts.heads.needs_value_norms else None
        of = {"scorer": parts.scorer, "layers": parts.layers}
        found = observing.observe(seen, jnp.asarray(self.always_kept), **of)
        return dataclasses.replace(
            self.prompts, scores=found.scores, norms=norms, claim=found.claim, first=found.first
        )

    def extras(self, index):
        """What the scorer, or the layers' budgets, ask for beside queries."""
        k, needs = self.k[index], self.parts.scorer.needs
        found = {"unrotated": jnp.asarray(k)}
        if self.parts.needs.sums:
            found["sums"] = all_sums(self.q[index], k, self.lengths)
        if needs.norms:
            found["norms"] = jnp.asarray(critical_norms(k))
        if needs.moments is not None:
            found["moments"] = self.moments(index, needs.moments)
        if needs.pairs is not None:
            found["pairs"] = self.pairs(index, needs.queries)
        if needs.replay is not None:
            found["replay"] = jnp.asarray(replayed(k))
        if needs.blocks is not None:
            found["blocks"] = self.blocks(index, needs.blocks)
        return found

    def moments(self, index, asked):
        """Mean and covariance of the prompts' queries as they come."""
        q = [
            row[:, :, asked.skip : n].astype(np.float64)
            for row, n in zip(self.q[index], self.lengths, strict=True)
        ]
        off = [row - row.mean(axis=2, keepdims=True) for row in q]
        outer = np.stack([np.einsum("kgni,kgnj->kgij", each, each) / each.shape[2] for each in off])
        mean = np.stack([row.mean(axis=2) for row in q])
        covariance = jnp.asarray(outer, jnp.float32) if asked.covariance else None
        return QueryMoments(mean=jnp.asarray(mean, jnp.float32), covariance=covariance)

    def pairs(self, index, window):
        """Mean, and excess norm of channel pairs, of the prompts' last queries as they come."""
        mean, excess = [], []
        for row, n in zip(self.q[index], self.lengths, strict=True):
            last = row[:, :, max(0, n - window) : n].astype(np.float64)
            pairs = np.stack(np.split(last, 2, axis=-1))
            mean.append(last.mean(axis=2))
            norm = np.sqrt((pairs**2).sum(axis=0)).mean(axis=2)
            excess.append(norm - np.sqrt((pairs.mean(axis=3) ** 2).sum(axis=0)))
        of = (jnp.asarray(np.stack(each), jnp.float32) for each in (mean, excess))
        return QueryPairs(**dict(zip(("mean", "excess"), of, strict=True)))

    def blocks(self, index, asked):
        """Attention that each key receives within its block, block by block."""
        sums = np.zeros(self.q[index].shape[:-1], np.float32)
        for first in range(asked.first, SLOTS, asked.size):
            at = np.arange(first, min(first + asked.size, SLOTS))
            inside = jnp.asarray(at < self.lengths[:, None] - asked.last)
            q, k = (jnp.asarray(each[index][..., at, :]) for each in (self.q, self.k))
            sums[..., at] = attention.sum_attention_in_block(q, k, inside)
        return jnp.asarray(sums)

    def count_entries_to_keep(self, group, layer_weights):
        parts, lengths, always_kept = self.parts, self.lengths, self.always_kept.sum(axis=1)
        weights = np.stack(layer_weights) if parts.uses_layer_weights else None
        of = {"layers": len(self.k), "window": parts.keep.window, "weights": weights}
        rows = parts.layers.compute_layer_entries(
            LayerBudgetInputs(
                parts.compute_prompt_budgets(lengths, always_kept), lengths, always_kept, **of
            )
        )
        recent = parts.count_recent_entries(rows, lengths, always_kept, weights)
        return tuple(jnp.asarray(a[group[0] : group[-1] + 1], jnp.int32) for a in (rows, recent))

    def compute_pool_size(self, group, kept):
        return len(group) * self.k.shape[2] * SLOTS

    def take_layer_entries(self, index):
        k = jnp.asarray(self.k[index])
        return UnpackedEntries(k, k, self.prompts.inside)


def library_kept(policy, q, k, lengths):
    """Kept positions `[L][B][K]` by the library's own `compress`; what is merged into them is another oracle's."""
    lengths, parts = np.asarray(lengths), policy.build_policy_parts()
    if not parts.compresses_prompts:
        return [[[list(range(n))] * k.shape[2] for n in lengths] for _ in k]
    parts = parts.replace(merge=None)
    made = progress.run_generator(
        compress.compress_layer_by_layer(
            _Drawn(policy, q, k, lengths), parts, key=jax.random.key(0)
        )
    )
    start, count = np.asarray(made.start), np.asarray(made.length)
    pos = [np.asarray(pool.pos) for pool in made.pools] * (len(k) // len(made.pools))
    segment = lambda at: pos[at[0]][at[1], start[at] : start[at] + count[at]].tolist()  # noqa: E731
    layers, batch, heads = start.shape
    return [
        [[segment((i, row, head)) for head in range(heads)] for row in range(batch)]
        for i in range(layers)
    ]


@jax.jit
def _sums(q, k, n):
    first = jnp.int32(0)
    _, lse = attention.compute_causal_attention(q, k, k, first)
    return attention.sum_attention_per_key(
        q, k, jnp.where(jnp.arange(q.shape[2]) < n, lse, jnp.inf), first
    )


def all_sums(q, k, lengths):
    """Attention each key receives from all queries, one sequence after the other."""
    return jnp.stack(
        [
            _sums(jnp.asarray(q[row]), jnp.asarray(k[row]), n)
            for row, n in enumerate(lengths.tolist())
        ]
    )


def oracle_kept(row: Row, q, k, lengths, budget):
    """The same from the row's oracle, sequence by sequence without padding; and the smallest gap."""
    kept, smallest = [], np.inf
    for index, n in enumerate(lengths):
        qs = [layer[index, :, :, :n].reshape(-1, n, DIM).astype(np.float64) for layer in q]
        ks = [layer[index, :, :n].astype(np.float64) for layer in k]
        own, gap = row.oracle(qs, ks, budget)
        kept.append(own)
        smallest = min(smallest, gap)
    return [
        [kept[index][layer] for index in range(len(lengths))] for layer in range(len(k))
    ], smallest


def check_agreement(row: Row, seed: int, group: int, lengths, budget) -> bool:
    """Asserts equal sets; False where the scores at a cut are too near one another to tell."""
    q, k = draw_layers(seed, group, lengths)
    policy = row.policy(budget)
    expected, gap = oracle_kept(row, q, k, lengths, budget)
    if gap < o.MIN_GAP:
        return False
    assert library_kept(policy, q, k, lengths) == expected
    return True


# Every row where query heads share kv heads, one of each kind at the other ratios.
KINDS = ("snapkv", "adakv", "pyramidkv-linear", "pyramidkv-entropy", "h2o", "d2o")
CASES = [(row, 3) for row in TABLE] + [
    (BY_NAME[name], group) for name in KINDS for group in SHAPES if group != 3
]


@pytest.mark.parametrize(
    ("row", "group"), CASES, ids=lambda each: getattr(each, "name", f"G{each}")
)
@settings(max_examples=3)
@given(seed=seeds, lengths=lengths_of_two, budget=st.sampled_from((20, 0.45)))
def test_kept_sets_agree_with_the_oracle(row, group, seed, lengths, budget):
    assume(check_agreement(row, seed, group, lengths, budget))


# --- ties, with scores that every precision holds exactly ------------------------------------------------------------

tied = st.integers(1, 4).flatmap(
    lambda levels: st.tuples(seeds, st.just(levels), st.integers(0, 20))
)
N, HEADS, FORCED = 24, 3, (0, 1, 22, 23)


def _tied_scores(seed, levels):
    return np.random.default_rng(seed).integers(-1, levels, (HEADS, N)).astype(np.float64)


def library_choice(heads, scores, base, always_kept=FORCED):
    """Kept positions of one layer of one sequence, the forced ones included."""
    mask = jnp.asarray(np.isin(np.arange(scores.shape[1]), always_kept)[None])
    length, rows = (
        jnp.asarray([scores.shape[1]], jnp.int32),
        jnp.asarray([base + len(always_kept)], jnp.int32),
    )
    layer = selection.create_prompt_candidates(jnp.asarray(scores, jnp.float32)[None], mask, length)
    chosen = selection.select_entries([layer], rows, heads=heads).masks[0]
    return [np.flatnonzero(head).tolist() for head in np.asarray(chosen)[0]]


def check_ties(heads, oracle, seed, levels, base):
    """The library's choice among tied scores is the oracle's: lowest head first, then lowest position."""
    scores = _tied_scores(seed, levels)
    expected, _ = oracle(scores, base + len(FORCED), list(FORCED), N)
    assert library_choice(heads, scores, base) == expected


def _uniform(scores, rows, always_kept, n):
    return [o.top_select(row, rows, always_kept, n)[0] for row in scores], None


@settings(max_examples=20)
@given(tied)
def test_ties_in_uniform_heads(drawn):
    check_ties(UniformHeads(), _uniform, *drawn)


@pytest.mark.parametrize("alpha", (0.0, 0.2, 1.0))
@settings(max_examples=15)
@given(drawn=tied)
def test_ties_in_adaptive_heads(alpha, drawn):
    check_ties(AdaptiveHeads(alpha=alpha), lambda *a: o.ada_select(*a, alpha=alpha), *drawn)


@pytest.mark.parametrize("alpha", (0.0, 0.25, 1.0))
@settings(max_examples=15)
@given(drawn=tied)
def test_ties_in_protected_heads(alpha, drawn):
    check_ties(ProtectedHeads(alpha=alpha), lambda *a: o.protect_select(*a, alpha=alpha), *drawn)


def test_minus_zero_ties_with_zero_and_order_is_kept():
    values = jnp.asarray(
        [-jnp.inf, -3.4e38, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 3.4e38], jnp.float32
    )
    keys = np.asarray(topk.encode_sort_keys(values)).astype(np.int64)
    assert keys[4] == keys[5]
    assert (np.diff(keys) > 0).tolist() == [True, True, True, True, False, True, True, True]
    assert keys.min() > 0


# --- Ada-KV's theory, on what AdaptiveHeads selects ------------------------------------------------------------------


def _step(seed, group=1, heads=3, n=7, width=5):
    """One decode step: q `[H, D]`, k, v `[K, n, D]`, W_o `[H, D, E]`, and the summed weights of each kv head."""
    rng = np.random.default_rng(seed)
    q = 2 * rng.standard_normal((heads * group, 4))
    k, v = rng.standard_normal((2, heads, n, 4))
    w_o = rng.standard_normal((heads * group, 4, width))
    return q, k, v, w_o, o.decode_weights(q, k)


def _kv_weights(weights, group):
    return weights.reshape(-1, group, weights.shape[1]).sum(axis=1)


@settings(max_examples=15)
@given(seed=seeds, base=st.integers(1, 6), alpha=st.sampled_from((0.0, 0.2, 0.7, 1.0)))
def test_theorem_3_1_loss_is_below_its_bound(seed, base, alpha):
    group = 2
    q, k, v, w_o, weights = _step(seed, group)
    kept = library_choice(AdaptiveHeads(alpha=alpha), _kv_weights(weights, group), base, ())
    assert o.eviction_loss(q, k, v, w_o, kept) <= o.eps_bound(q, k, v, w_o, kept) + 1e-9


@settings(max_examples=15)
@given(seed=seeds, base=st.integers(1, 6), alpha=st.sampled_from((0.0, 0.2, 0.7, 1.0)))
def test_theorem_3_2_top_rows_are_the_best_of_their_number(seed, base, alpha):
    q, k, v, w_o, weights = _step(seed)
    kept = library_choice(AdaptiveHeads(alpha=alpha), weights, base, ())
    bound = o.eps_bound(q, k, v, w_o, kept)
    rng = np.random.default_rng(seed)
    for _ in range(5):
        other = [
            sorted(rng.choice(weights.shape[1], len(head), replace=False).tolist()) for head in kept
        ]
        assert bound <= o.eps_bound(q, k, v, w_o, other) + 1e-6
    assert o.retained_mass(weights, kept) == pytest.approx(
        o.allocation_mass(weights, [len(head) for head in kept]), abs=1e-6
    )


@settings(max_examples=15)
@given(seed=seeds, base=st.integers(1, 6))
def test_theorem_3_3_no_allocation_beats_alpha_zero(seed, base):
    *_, weights = _step(seed)
    kept = library_choice(AdaptiveHeads(alpha=0.0), weights, base, ())
    _, best = o.best_allocation(weights, base * len(weights))
    assert sum(map(len, kept)) == base * len(weights)
    assert o.retained_mass(weights, kept) == pytest.approx(best, abs=1e-6)


@settings(max_examples=15)
@given(seed=seeds, base=st.integers(1, 11), alpha=st.sampled_from((0.1, 0.2, 0.5, 0.9)))
def test_uniform_retains_least_and_adaptive_most(seed, base, alpha):
    weights = _step(seed, 3, n=12)[-1]
    scores = _kv_weights(weights, 3)
    choices = [UniformHeads(), AdaptiveHeads(alpha=alpha), AdaptiveHeads(alpha=0.0)]
    masses = [
        o.retained_mass(weights, library_choice(heads, scores, base, ())) for heads in choices
    ]
    assert masses[0] <= masses[1] + 1e-6 and masses[1] <= masses[2] + 1e-6
    assert library_choice(AdaptiveHeads(alpha=1.0), scores, base, ()) == library_choice(
        choices[0], scores, base, ()
    )
