"""Compactor: attention within blocks through a model, in batches; robust leverage scores; what it rejects."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
import tiny

from jaxkv import Compactor
from jaxkv.engine.prefill import iterate_layer_outputs
from jaxkv.policies import BlockAttention, ScorerInputs
from jaxkv.policies.methods.compactor import BlockAttentionLeverageScorer
from jaxkv.policies.scorer import Needs

HEADS, GROUP, DIM = 2, 3, 16


@pytest.mark.parametrize(
    ("size", "first", "last", "zeros"), ((10, 8, 4, False), (16, 0, 0, True), (256, 3, 1, False))
)
def test_sums_of_a_model_are_those_of_its_queries_and_keys(size, first, last, zeros):
    model, lengths, slots = tiny.tiny(tiny.MODELS["gqa3"]), (50, 21, 9), 64
    asked = BlockAttention(size=size, first=first, last=last, zeros=zeros)
    tokens = np.zeros((len(lengths), slots), np.int32)
    for row, prompt in enumerate(tiny.prompts(3, lengths)):
        tokens[row, : len(prompt)] = prompt
    needs = Needs(queries=max(lengths), blocks=asked, unrotated=True)
    for out in iterate_layer_outputs(
        model.flat_decoder, jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32), needs=needs
    ):
        for row, n in enumerate(lengths):
            q = np.asarray(out.q)[row, :, :, max(lengths) - n :]
            expected = o.block_attention(
                q.reshape(-1, n, q.shape[-1]), np.asarray(out.k)[row, :, :n], *vars(asked).values()
            )
            ours = np.asarray(out.extras["blocks"])[row, :, :, first : n - last].mean(axis=1)
            np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-6)


def observed(dtype, n, scale=1.0, padding=5):
    """A sequence as a scorer sees it, padding not a number; and its sums, values and keys before RoPE."""
    rng = np.random.default_rng(5)
    k, v, raw = (jnp.asarray(scale * rng.standard_normal((HEADS, n, DIM)), dtype) for _ in range(3))
    sums = jnp.asarray(rng.uniform(0, 2, (HEADS, GROUP, n)), jnp.float32)
    pad = lambda a: jnp.pad(a, ((0, 0), (0, padding), (0, 0)), constant_values=np.nan)[None]  # noqa: E731
    return ScorerInputs(
        q_positions=jnp.zeros((1, 0), jnp.int32),
        k=pad(k),
        v=pad(v),
        extras={
            "unrotated": pad(raw),
            "blocks": jnp.pad(sums, ((0, 0), (0, 0), (0, padding)))[None],
        },
        length=jnp.asarray([n], jnp.int32),
        layer=jnp.int32(2),
        key=jax.random.key(7),
    ), (sums, v, raw)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_scores_are_those_of_the_formulas(dtype):
    n, (first, last) = 60, (8, 4)
    seen, given = observed(dtype, n)
    sums, v, raw = (np.asarray(each, np.float64) for each in given)
    scorer = BlockAttentionLeverageScorer(
        blocks=BlockAttention(first=first, last=last), blending=0.5, sketch=12
    )
    part = slice(first, n - last)
    received = (sums.mean(axis=1) * np.linalg.norm(v, axis=-1))[:, part]
    expected = o.normalised(np.array([o.pool_columns(row, 3, "avg") for row in received]))
    uses_key = np.asarray(
        jax.random.normal(jax.random.fold_in(seen.key, 2), (HEADS, DIM, 12)), np.float64
    )
    leverage = [o.leverage_scores(raw[h, part], uses_key[h] / 12**0.5) for h in range(HEADS)]
    expected = expected + 0.5 * o.normalised(np.array(leverage))
    np.testing.assert_allclose(
        np.asarray(scorer.score_entries(seen))[0, :, part], expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("n", "scale"), ((1, 1.0), (5, 1.0), (13, 1.0), (60, 1e4), (60, 1e-4), (60, 0.0))
)
def test_scores_are_finite(n, scale):
    """Prompts of first and last tokens alone; keys large, small and all the same; more columns than channels."""
    seen, _ = observed(jnp.float32, n, scale)
    scorer = BlockAttentionLeverageScorer(blocks=BlockAttention(first=8, last=4), sketch=48)
    assert np.isfinite(np.asarray(scorer.score_entries(seen))[0, :, 8 : n - 4]).all()
    assert np.isfinite(
        np.where(np.isnan(np.asarray(scorer.score_entries(seen))[..., :n]), np.nan, 0)
    ).all()


def test_blending_follows_the_share_that_is_dropped():
    weight = lambda **given: Compactor(**given).build_policy_parts().scorer.blending  # noqa: E731
    assert (weight(budget=0.25), weight(budget=64), weight(budget=0.25, blending=0.1)) == (
        0.75,
        0.35,
        0.1,
    )
    assert (
        Compactor(budget=64).build_policy_parts().uses_random_key
        and not Compactor(budget=64, blending=0.0).build_policy_parts().uses_random_key
    )


def test_a_block_beyond_the_prompt_is_the_prompt():
    """No logits of a block's size are made, and the plan counts none."""
    config = tiny.TWO_LAYERS
    runs = [
        tiny.run(tiny.tiny(config), tiny.prompts(2, (40, 11)), Compactor(budget=16, block=block))
        for block in (64, 10**6)
    ]
    (one, _, its), (other, _, own) = runs
    assert tiny.kept(one) == tiny.kept(other) and its.peak_bytes == own.peak_bytes
