"""Statistics of queries rotated as they would be after a text, value norms of rows, and one choice over all layers."""

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
import tiny
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv.cache.packing import UnpackedEntries
from jaxkv.engine import moments, prefill_layer, recompress, selection
from jaxkv.models.rope import apply_rope, compute_rope_frequencies, compute_rope_tables
from jaxkv.models.values import LongRope, Ministral3Rope, YarnRope
from jaxkv.policies import (
    AdaptiveHeads,
    FutureQuerySettings,
    ProtectedHeads,
    TwoStageHeads,
)
from jaxkv.testing import segments

GQA = tiny.MODELS["gqa3"]
LENGTHS = (61, 37, 2)
ROPES = {
    "plain": GQA.rope,
    # With an attention factor: rotations stretch.
    "yarn": YarnRope(theta=100.0, factor=4.0, original_max_position=32),
    # With a factor on queries that grows every 8 positions, too.
    "ministral3": Ministral3Rope(
        theta=100.0, factor=4.0, original_max_position=8, llama_4_scaling_beta=0.5
    ),
    "longrope": LongRope(
        theta=100.0,
        short_factor=(1.0,) * (GQA.head_dim // 2),
        long_factor=tuple(1.0 + pair for pair in range(GQA.head_dim // 2)),
        original_max_position=32,
        factor=4.0,
    ),
}


def _rotation(config, n, positions):
    frequencies, factors = compute_rope_frequencies(config.rope, config.head_dim)
    if not isinstance(config.rope, Ministral3Rope):
        return o.mean_rotation(frequencies, n, positions, factors[0])
    grown = [1 + 0.5 * np.log(1 + position // 8) for position in range(n, n + positions)]
    each = [
        factor * o.mean_rotation(frequencies, position, 1, factors[0])
        for position, factor in enumerate(grown, start=n)
    ]
    return np.mean(each, axis=0)


def _expected(q, config, n, asked):
    """Mean and covariance `[K, G, ...]` in float64 of one text's unrotated queries `[K, G, n, D]`."""
    turn = _rotation(config, n, asked.positions)
    pairs = [
        [o.mean_and_covariance(head[asked.skip : n]) for head in group]
        for group in np.asarray(q, np.float64)
    ]
    mean = np.array([[turn @ m for m, _ in group] for group in pairs])
    return mean, np.array([[turn @ c @ turn.T for _, c in group] for group in pairs])


def check_moments(found, row, expected):
    mean, covariance = expected
    np.testing.assert_allclose(found.mean[row], mean, atol=2e-5 * (1 + np.abs(mean).max()))
    if found.covariance is not None:
        np.testing.assert_allclose(
            found.covariance[row], covariance, atol=2e-5 * (1 + np.abs(covariance).max())
        )


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(
    "asked",
    [FutureQuerySettings(skip=4, positions=16), FutureQuerySettings(positions=3, covariance=False)],
)
def test_moments_of_prompts_are_the_oracle_s(rope, asked):
    config = dataclasses.replace(GQA, rope=ROPES[rope], qkv_bias=True)
    flat = tiny.tiny(config).flat_decoder
    block = flat.graphs.rebuild_block(flat.blocks[0])
    # Queries far from zero: sums of squares alone would lose the covariance.
    block.attention.q_bias = nnx.Param(jnp.full_like(block.attention.q_bias[...], 100.0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 64, config.embed)), jnp.float32)
    length = jnp.asarray(LENGTHS, jnp.int32)
    q = np.asarray(block.compute_unrotated_queries(block.normalise_for_attention(x)))
    found = moments.compute_prompt_query_moments(block, x, length, asked, size=16)
    assert (found.covariance is None) == (not asked.covariance)
    for row, n in enumerate(LENGTHS):
        check_moments(found, row, _expected(q[row], config, n, asked))


@pytest.mark.parametrize("rope", ROPES)
def test_moments_of_the_last_queries_are_those_of_the_text_s_end(rope):
    config, asked = (
        dataclasses.replace(GQA, rope=ROPES[rope]),
        FutureQuerySettings(skip=4, positions=8),
    )
    rng, window = np.random.default_rng(1), 20
    raw = rng.standard_normal((3, 2, 3, 64, config.head_dim)) + 5
    by = compute_rope_tables(jnp.arange(64, dtype=jnp.int32)[None], config.rope, config.head_dim)
    rotated = np.asarray(apply_rope(jnp.asarray(raw, jnp.float32), by.scale_for_queries()))
    last = np.stack(
        [rotated[row][:, :, np.arange(n - window, n) % 64] for row, n in enumerate(LENGTHS)]
    )
    found = moments.compute_last_query_moments(
        jnp.asarray(last), jnp.asarray(LENGTHS, jnp.int32), config.rope, asked
    )
    for row, n in enumerate(LENGTHS):
        first = max(0, n - window)
        later = dataclasses.replace(asked, skip=max(asked.skip, first))
        check_moments(found, row, _expected(raw[row], config, n, later))


def test_a_text_no_longer_than_its_sinks_has_no_moments_and_keeps_its_rows():
    policy = jaxkv.ExpectedAttention(budget=4, future=8)
    cache, logits, _ = tiny.run(tiny.tiny(GQA), tiny.prompts(0, (3, 40)), policy)
    assert np.isfinite(logits).all()
    assert {tuple(pos.tolist()) for _, row, _, _, _, pos in segments(cache) if row == 0} == {
        (0, 1, 2)
    }
    assert {tuple(pos.tolist()) for _, row, _, _, _, pos in segments(cache) if row == 1} == {
        (0, 1, 2, 3)
    }


# --- norms of values, where heads hold rows of their own --------------------------------------------------------------


def test_norms_are_summed_over_the_heads_that_hold_the_position():
    model = tiny.tiny(GQA)
    slots, heads, block = (
        12,
        GQA.kv_heads,
        model.flat_decoder.graphs.rebuild_block(model.flat_decoder.blocks[0]),
    )
    rng, counts = np.random.default_rng(0), [[12, 5], [7, 9]]
    last = np.iinfo(np.int32).max
    held = [[np.sort(rng.permutation(16)[:count]) for count in row] for row in counts]
    positions = np.array(
        [[[*each, *[last] * (slots - len(each))] for each in row] for row in held], np.int32
    )
    v = rng.standard_normal((2, heads, slots, GQA.head_dim)).astype(np.float32)
    v[1, 1, 9:] = np.nan
    rows = UnpackedEntries(
        jnp.asarray(v),
        jnp.asarray(v),
        jnp.asarray(positions < last),
        positions=jnp.asarray(positions),
    )
    norms_of = partial(prefill_layer.compute_value_norms, block)
    norms, totals = (np.asarray(a) for a in recompress._sum_value_norms(norms_of, rows, None))
    weight = np.asarray(
        model.flat_decoder.graphs.rebuild_block(model.flat_decoder.blocks[0]).attention.out[...],
        np.float64,
    )
    weight = weight.reshape(-1, heads, GQA.group_size, GQA.head_dim)
    for row in range(2):
        by_position = dict.fromkeys(range(16), 0.0)
        for head, there in enumerate(held[row]):
            for at, position in enumerate(there):
                seen = np.einsum("d,egd->ge", v[row, head, at], weight[:, head])
                norm = np.abs(seen).sum(axis=-1).mean()
                np.testing.assert_allclose(norms[row, head, at], norm, rtol=1e-4)
                by_position[int(position)] += norm
        for head, there in enumerate(held[row]):
            expected = [by_position[int(position)] for position in there]
            np.testing.assert_allclose(totals[row, head, : len(there)], expected, rtol=1e-4)


# --- one choice over all layers --------------------------------------------------------------------------------------

LAYERS, N = 3, 24


def _candidates(scores):
    """Layers `[L, K, n]` of one sequence, of which the first and the last two rows stay anyway."""
    always_kept = jnp.asarray(np.isin(np.arange(N), FORCED)[None])
    length = jnp.asarray([N], jnp.int32)
    return [
        selection.create_prompt_candidates(
            jnp.asarray(layer, jnp.float32)[None], always_kept, length
        )
        for layer in scores
    ]


FORCED = (0, 22, 23)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), levels=st.integers(1, 5), base=st.integers(0, 21))
def test_ties_go_to_the_lowest_head_then_layer_then_position(alpha, seed, levels, base):
    scores = np.random.default_rng(seed).integers(-1, levels, (LAYERS, 2, N)).astype(np.float64)
    rows = jnp.asarray([base + len(FORCED)], jnp.int32)
    nothing = jnp.zeros((1,), jnp.int32)
    chosen = selection.select_entries(
        _candidates(scores), rows, nothing, heads=AdaptiveHeads(alpha=alpha)
    )
    expected, _ = o.global_select(scores, base + len(FORCED), list(FORCED), N, alpha)
    assert [
        [np.flatnonzero(head).tolist() for head in np.asarray(mask)[0]] for mask in chosen.masks
    ] == expected
    assert chosen.tally.moved is None


def test_a_layer_whose_rows_matter_more_takes_them_from_the_others():
    model, ids = tiny.tiny(GQA), tiny.prompts(5, (60, 40))
    cache, _, needed = tiny.run(model, ids, jaxkv.LayerDefensiveKV(budget=20, window=8))
    by_layer = cache.kept.sum(axis=2)
    assert needed.rows is None and len(set(by_layer[:, 0].tolist())) > 1
    assert (cache.kept.sum(axis=(0, 2)) == GQA.layers * GQA.kv_heads * 20).all()
    same, _, _ = tiny.run(
        model, ids, jaxkv.GlobalBudget(base=jaxkv.DefensiveKV(budget=20, window=8))
    )
    assert tiny.kept(same) == tiny.kept(cache)
    # All of it guaranteed is no competition.
    even, _, _ = tiny.run(model, ids, jaxkv.GlobalBudget(base=jaxkv.KeyDiff(budget=20), alpha=1.0))
    assert tiny.kept(even) == tiny.kept(tiny.run(model, ids, jaxkv.KeyDiff(budget=20))[0])


def test_a_base_with_its_own_heads_keeps_them():
    base = jaxkv.AdaKV(base=jaxkv.KeyDiff(budget=20), heads=ProtectedHeads(alpha=0.5, capacity=2.0))
    assert jaxkv.GlobalBudget(base=base).build_policy_parts().heads == ProtectedHeads(
        alpha=0.5, capacity=2.0
    )
    critical = jaxkv.GlobalBudget(base=jaxkv.CriticalKV(base=jaxkv.SnapKV(budget=40)), alpha=0.25)
    assert critical.build_policy_parts().heads == TwoStageHeads(budgets=AdaptiveHeads(alpha=0.25))
