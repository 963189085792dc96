"""Mixtures of experts: the rows of a plain loop, none dropped those who is chosen, and no more work than that."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxkv.models.mixture import (
    ExpertInputs,
    MixtureMLP,
    apply_experts_by_token,
    apply_experts_in_blocks,
    apply_experts_on_tensor_cores,
    choose_block_rows,
    sum_expert_biases,
)
from jaxkv.models.stored import StoredWeight
from jaxkv.models.values import ExpertsConfig

in_kernels = jax.jit(
    functools.partial(apply_experts_on_tensor_cores, interpret=True), static_argnames="limit"
)
WAYS = {
    name: jax.jit(
        lambda x, ids, shares, gate_up, down, bias=None, limit=None, of=of: of(
            ExpertInputs(x, ids, shares, StoredWeight(gate_up), StoredWeight(down), bias),
            limit=limit,
        ),
        static_argnames="limit",
    )
    for name, of in {
        "in_blocks": apply_experts_in_blocks,
        "one_by_one": apply_experts_by_token,
    }.items()
}


def weights(rng, count, width, hidden):
    made = lambda *shape: jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, jnp.float32)  # noqa: E731
    return made(count, 2, hidden, width), made(count, width, hidden)


def oracle(x, ids, shares, gate_up, down):
    out = np.zeros(x.shape)
    wide = [np.asarray(each, np.float64) for each in (x, shares, gate_up, down)]
    for row, rank in np.ndindex(*ids.shape):
        expert = int(ids[row, rank])
        gate, up = wide[2][expert] @ wide[0][row]
        out[row] += wide[3][expert] @ (gate / (1 + np.exp(-gate)) * up) * wide[1][row, rank]
    return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "tokens, count, chosen, among",
    [(1, 8, 2, 8), (5, 8, 3, 8), (70, 16, 2, 16), (70, 16, 2, 2)],
    ids=["one", "few", "sparse", "all for two"],
)
def test_every_row_goes_through_its_experts(way, tokens, count, chosen, among):
    """Among few experts too: a block of more tokens than fall to an expert on average drops none."""
    rng = np.random.default_rng(tokens + among)
    x = jnp.asarray(rng.standard_normal((tokens, 12)), jnp.float32)
    ids = jnp.asarray(np.stack([rng.permutation(among)[:chosen] for _ in range(tokens)]), jnp.int32)
    shares = jnp.asarray(rng.uniform(0.1, 1, ids.shape), jnp.float32)
    of = (x, ids, shares, *weights(rng, count, 12, 20))
    np.testing.assert_allclose(WAYS[way](*of), oracle(*of), atol=2e-6)


def oracle_with_biases(x, ids, shares, gate_up, down, up_bias, down_bias, limit):
    out = np.zeros(x.shape)
    wide = [np.asarray(each, np.float64) for each in (x, shares, gate_up, down, up_bias, down_bias)]
    for row, rank in np.ndindex(*ids.shape):
        expert, limited = int(ids[row, rank]), 0
        gates, ups = wide[2][expert] @ wide[0][row] + wide[4][expert]
        hidden = []
        for gate, up in zip(gates, ups, strict=True):
            limited += gate > limit or abs(up) > limit
            gate, up = min(gate, limit), max(-limit, min(up, limit))
            hidden.append((up + 1) * gate / (1 + np.exp(-1.702 * gate)))
        assert limited
        out[row] += (wide[3][expert] @ hidden + wide[5][expert]) * wide[1][row, rank]
    return out


def coded(rng, bits, *shape):
    """A weight in 16, 8 or 4 bits, and what it stands for in float64."""
    weight = rng.standard_normal(shape) / shape[-1] ** 0.5
    if bits == 16:
        held = jnp.asarray(weight, jnp.bfloat16)
        return StoredWeight(held), np.asarray(held, np.float64)
    if bits == 8:
        scale = (np.abs(weight).max(axis=-1) / 127).astype(np.float32)
        codes = np.round(weight / scale[..., None]).astype(np.int8)
        held = StoredWeight(jnp.asarray(codes), scale=jnp.asarray(scale))
        return held, codes * scale[..., None].astype(np.float64)
    group = (*shape[:-1], shape[-1] // 32)
    scales, leasts = (
        (rng.uniform(*each, group) / shape[-1] ** 0.5).astype(np.float16)
        for each in ((0.1, 0.3), (-3, 0))
    )
    codes = rng.integers(0, 16, (*group, 32))
    held = (codes[..., :16] | codes[..., 16:] << 4).astype(np.uint8)
    given = (jnp.asarray(each) for each in (held.reshape(*shape[:-1], -1), scales, leasts))
    codes_held, *groups = given
    whole = codes * scales[..., None].astype(np.float64) + leasts[..., None]
    return StoredWeight(codes_held, None, *groups), whole.reshape(shape)


@pytest.mark.parametrize(
    "bits, tokens, count, chosen, among, limit",
    [
        (8, 2, 8, 2, 8, 0.75),
        (4, 9, 8, 3, 8, None),
        (16, 40, 4, 2, 4, None),
        (4, 37, 8, 2, 2, 0.75),
        (16, 1, 4, 4, 4, 0.75),
    ],
    ids=["few", "some", "several blocks", "all for two", "one token"],
)
def test_kernels_of_experts(bits, tokens, count, chosen, among, limit):
    """Blocks of 16 tokens of one expert, in each width of weights, with and without biases and a limit."""
    rng = np.random.default_rng(tokens + bits)
    x = jnp.asarray(rng.standard_normal((tokens, 64)), jnp.bfloat16)
    ids = jnp.asarray(np.stack([rng.permutation(among)[:chosen] for _ in range(tokens)]), jnp.int32)
    shares = jnp.asarray(rng.uniform(0.1, 1, ids.shape), jnp.float32)
    (gate_up, ups), (down, downs) = (
        coded(rng, bits, count, *shape) for shape in ((2, 96, 64), (64, 96))
    )
    bias = jnp.asarray(rng.standard_normal((count, 2, 96)), jnp.float32)
    if limit is None:
        found, want = (
            in_kernels(ExpertInputs(x, ids, shares, gate_up, down)),
            oracle(x, ids, shares, ups, downs),
        )
    else:
        found = in_kernels(ExpertInputs(x, ids, shares, gate_up, down, bias), limit=limit)
        rest = bias, np.zeros((count, 64)), limit
        want = oracle_with_biases(x, ids, shares, ups, downs, *rest)
    assert found.dtype == jnp.float32
    # Hidden states are rounded to bfloat16.
    np.testing.assert_allclose(found, want, atol=0.01 * np.abs(want).max())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens, count, chosen", [(1, 8, 2), (64, 4, 2)], ids=["one", "many"])
def test_biases_and_a_limit(way, tokens, count, chosen):
    rng = np.random.default_rng(tokens)
    made = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    x, up_bias, down_bias = made(tokens, 12), made(count, 2, 20), made(count, 12)
    ids = jnp.asarray(np.stack([rng.permutation(count)[:chosen] for _ in range(tokens)]), jnp.int32)
    shares = jnp.asarray(rng.uniform(0.1, 1, ids.shape), jnp.float32)
    of = (x, ids, shares, *weights(rng, count, 12, 20))
    found = WAYS[way](*of, up_bias, limit=0.75) + sum_expert_biases(ids, shares, down_bias)
    np.testing.assert_allclose(found, oracle_with_biases(*of, up_bias, down_bias, 0.75), atol=4e-6)


def test_the_routers_bias_chooses():
    kinds = jnp.dtype("float32")
    mixture = MixtureMLP(
        4, 4, ExpertsConfig(count=5, chosen=2, bias=True), dtype=kinds, weights=kinds
    )
    mixture.router.set_value(jnp.zeros((5, 4)))
    mixture.router_bias.set_value(jnp.asarray([0.0, 3, 1, 2, 0]))
    ids, shares = mixture.select_experts(jnp.ones((2, 4)))
    assert ids.tolist() == [[1, 3], [1, 3]]
    # Softmax over the chosen ones alone.
    np.testing.assert_allclose(shares, [[np.e / (1 + np.e), 1 / (1 + np.e)]] * 2, rtol=1e-6)


def test_the_router_takes_the_lowest_of_equals():
    mixture = MixtureMLP(
        4,
        4,
        ExpertsConfig(count=5, chosen=2),
        dtype=jnp.dtype("float32"),
        weights=jnp.dtype("float32"),
    )
    mixture.router.set_value(jnp.asarray([[0.0] * 4, [1.0] * 4, [1.0] * 4, [1.0] * 4, [-1.0] * 4]))
    ids, shares = mixture.select_experts(jnp.ones((2, 4)))
    assert ids.tolist() == [[1, 2], [1, 2]]
    np.testing.assert_allclose(shares, 0.5, rtol=1e-6)
    mixture.experts = ExpertsConfig(count=5, chosen=2, normalised=False)
    likely = np.exp([0.0, 4, 4, 4, -4]) / np.exp([0.0, 4, 4, 4, -4]).sum()
    np.testing.assert_allclose(
        mixture.select_experts(jnp.ones((2, 4)))[1], [[likely[1]] * 2] * 2, rtol=1e-6
    )


def test_work_and_memory_beside_every_expert_for_every_token():
    tokens, chosen, count, width, hidden = 512, 2, 8, 64, 128
    shape = jax.ShapeDtypeStruct
    gate_up, down = (
        shape((count, 2, hidden, width), jnp.float32),
        shape((count, width, hidden), jnp.float32),
    )
    x, shares = shape((tokens, width), jnp.float32), shape((tokens, chosen), jnp.float32)
    ours = WAYS["in_blocks"].lower(x, shape((tokens, chosen), jnp.int32), shares, gate_up, down)
    rows = shape((tokens * chosen, width), jnp.float32)
    turned = shape((count, width, 2 * hidden), jnp.float32)
    ragged = jax.jit(lax.ragged_dot).lower(rows, turned, shape((count,), jnp.int32))

    def flops(lowered):
        return lowered.compile().cost_analysis()["flops"]

    # A loop's body is counted once. There are as many blocks as experts, and at most as many as full ones more.
    size = choose_block_rows(tokens, chosen, count)
    blocks = tokens * chosen // size + count
    product = 2 * tokens * chosen * width * hidden
    assert blocks * flops(ours) < 2.5 * 3 * product
    assert flops(ragged) > 0.9 * count * 2 * product
    memory = ours.compile().memory_analysis().temp_size_in_bytes
    # A block's hidden states and its expert's weights, the sums of all rows, and their order: nothing of [T, k, F].
    assert memory < 4 * (
        6 * size * hidden + 3 * width * hidden + 2 * tokens * width + 16 * tokens * chosen
    )
    assert memory < 4 * tokens * chosen * 2 * hidden
