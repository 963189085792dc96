"""Mixtures of experts: the rows of a plain loop, none dropped those who is chosen, and no more work than that."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax

from jaxkv.models.decoder import named_parameters
from jaxkv.models.mixture import (
    ExpertInputs,
    MixtureMLP,
    apply_experts_by_token,
    apply_experts_in_blocks,
    apply_experts_on_tensor_cores,
    choose_block_rows,
    multiply_clipped,
    multiply_gated,
    sum_expert_biases,
)
from jaxkv.models.stored import StoredWeight
from jaxkv.models.values import ExpertsConfig

SMALL = tiny.shape(layers=1, kv_heads=1, group=1, dim=8)
in_kernels = jax.jit(
    functools.partial(apply_experts_on_tensor_cores, interpret=True), static_argnames="activate"
)
WAYS = {
    name: jax.jit(
        lambda x, ids, shares, gate_up, down, bias=None, activate=multiply_gated, of=of: of(
            ExpertInputs(x, ids, shares, StoredWeight(gate_up), StoredWeight(down), bias),
            activate=activate,
        ),
        static_argnames="activate",
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
        given = ExpertInputs(x, ids, shares, gate_up, down, bias)
        found = in_kernels(given, activate=functools.partial(multiply_clipped, limit=limit))
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
    clipped = functools.partial(multiply_clipped, limit=0.75)
    found = WAYS[way](*of, up_bias, activate=clipped) + sum_expert_biases(ids, shares, down_bias)
    np.testing.assert_allclose(found, oracle_with_biases(*of, up_bias, down_bias, 0.75), atol=4e-6)


def mixture_of(experts, width=4, dtype="float32"):
    """A mixture of hidden width 4 without arrays."""
    config = dataclasses.replace(SMALL, embed=width, hidden=4, experts=experts)
    kinds = jnp.dtype(dtype)
    return MixtureMLP(config, dtype=kinds, weights=kinds)


def choose(logits, correction, experts):
    """A token's experts and their weights, in plain loops and float64."""
    if experts.jitter is not None:
        ids, shares = [], []
        for _ in range(2):
            left = [each for each in range(len(logits)) if each not in ids]
            best = max(left, key=lambda each: logits[each])
            top = logits[best]
            close = [
                each
                for each in left
                if (top - logits[each]) / max(abs(logits[each]), top) <= 2 * experts.jitter
            ]
            ids.append(best)
            shares.append(1 / sum(np.exp(logits[each] - top) for each in close))
        return ids, shares
    grown = np.exp(logits)
    scores = grown / (1 + grown) if experts.sigmoid else grown / grown.sum()
    ranked = scores + correction
    size = experts.count // experts.groups
    groups = [range(first, first + size) for first in range(0, experts.count, size)]
    worth = [sum(sorted(ranked[list(each)])[-experts.leaders :]) for each in groups]
    inside = [groups[each] for each in np.argsort(worth)[::-1][: experts.chosen_groups]]
    left = sorted((each for group in inside for each in group), key=lambda each: -ranked[each])
    shares = scores[left[: experts.chosen]] * experts.scale
    if experts.normalised:
        shares = shares / scores[left[: experts.chosen]].sum()
    return left[: experts.chosen], shares


@pytest.mark.parametrize(
    "experts",
    [
        ExpertsConfig(count=8, chosen=3, sigmoid=True, corrected=True, scale=2.5),
        ExpertsConfig(count=8, chosen=3, corrected=True, groups=4, chosen_groups=2),
        ExpertsConfig(count=8, chosen=3, groups=4, chosen_groups=2, leaders=1, normalised=False),
        ExpertsConfig(count=8, chosen=2, jitter=0.2),
    ],
    ids=["sigmoid", "groups", "groups by their best", "SparseMixer"],
)
def test_routers(experts):
    rng = np.random.default_rng(3)
    router, x = rng.standard_normal((8, 12)), rng.standard_normal((50, 12))
    correction = 0.3 * rng.standard_normal(8) if experts.corrected else np.zeros(8)
    mixture = mixture_of(experts, width=12)
    mixture.router.set_value(jnp.asarray(router, jnp.float32))
    if experts.corrected:
        mixture.correction.set_value(jnp.asarray(correction, jnp.float32))
    ids, shares = mixture.select_experts(jnp.asarray(x, jnp.float32))
    plain = mixture_of(ExpertsConfig(count=8, chosen=experts.chosen), width=12)
    plain.router.set_value(mixture.router[...])
    differ = 0
    for row, logits in enumerate(x @ router.T):
        chosen, weights = choose(logits, correction, experts)
        assert ids[row].tolist() == chosen
        np.testing.assert_allclose(shares[row], weights, rtol=2e-5)
        differ += {*chosen} != {*plain.select_experts(jnp.asarray(x, jnp.float32))[0][row].tolist()}
    # Of tokens in a group that is not chosen, or with another order; SparseMixer's two are the two highest.
    assert differ > 5 or experts.jitter


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"groups": 3}, "groups"),
        ({"groups": 4, "chosen_groups": 5}, "chosen_groups"),
        ({"groups": 4, "chosen": 3}, "chosen"),
        ({"groups": 8, "chosen": 1}, "leaders"),
        ({"chosen": 3, "jitter": 0.1}, "jitter"),
        ({"shared": 0}, "shared"),
        ({"shared_gate": True}, "shared_gate"),
        ({"shared": 8, "own_norms": True, "bias": True}, "own_norms"),
        ({"shared": 8, "own_norms": True, "shared_gate": True}, "own_norms"),
        *(
            ({"jitter": 0.1} | other, "jitter")
            for other in (
                {"sigmoid": True},
                {"corrected": True},
                {"groups": 2, "chosen_groups": 2},
                {"normalised": False},
                {"scale": 2.0},
            )
        ),
    ],
)
def test_choices_that_are_none(fields, name):
    with pytest.raises(ValueError, match=f"^{name}="):
        ExpertsConfig(**{"count": 8, "chosen": 2} | fields)


def test_equal_logits_of_zero_are_close():
    """In SparseMixer: of four experts, then of the three others."""
    mixture = mixture_of(ExpertsConfig(count=4, chosen=2, jitter=0.1))
    mixture.router.set_value(jnp.zeros((4, 4)))
    ids, shares = mixture.select_experts(jnp.ones((2, 4)))
    assert ids.tolist() == [[0, 1]] * 2
    np.testing.assert_allclose(shares, [[1 / 4, 1 / 3]] * 2, rtol=1e-6)


@pytest.mark.parametrize("wide", [False, True])
def test_a_wide_router_tells_what_bfloat16_rounds(wide):
    """Two logits of bfloat16 vectors, 1 and 1 + 2**-12."""
    mixture = mixture_of(ExpertsConfig(count=2, chosen=1, wide_router=wide), dtype="bfloat16")
    router = jnp.asarray([[1.0, 0, 0, 0], [1 + 2**-12, 0, 0, 0]])
    mixture.router.set_value(router.astype(mixture.router.get_value().dtype))
    ids, _ = mixture.select_experts(jnp.ones((3, 4), jnp.bfloat16))
    assert ids.tolist() == [[int(wide)]] * 3


def test_shared_experts_run_for_every_token():
    """Beside the others, times the sigmoid of a gate."""
    rng = np.random.default_rng(5)
    experts = ExpertsConfig(count=4, chosen=2, shared=6, shared_gate=True)
    mixture = mixture_of(experts)
    for _, parameter in named_parameters(mixture):
        held = rng.standard_normal(parameter.get_value().shape)
        parameter.set_value(jnp.asarray(held, jnp.float32))
    x = jnp.asarray(rng.standard_normal((2, 3, 4)), jnp.float32)
    flat = x.reshape(-1, 4)
    held = mixture.experts_gate_up[...], mixture.experts_down[...]
    want = oracle(flat, *mixture.select_experts(flat), *held)
    gates, ups = np.einsum("tfe,ne->tnf", mixture.shared.gate_up[...], flat)
    beside = gates / (1 + np.exp(-gates)) * ups @ np.asarray(mixture.shared.down[...]).T
    want += beside / (1 + np.exp(-flat @ mixture.shared_gate[...].T))
    np.testing.assert_allclose(mixture(x).reshape(-1, 4), want, atol=2e-5)


def test_the_routers_bias_chooses():
    mixture = mixture_of(ExpertsConfig(count=5, chosen=2, bias=True))
    mixture.router.set_value(jnp.zeros((5, 4)))
    mixture.router_bias.set_value(jnp.asarray([0.0, 3, 1, 2, 0]))
    ids, shares = mixture.select_experts(jnp.ones((2, 4)))
    assert ids.tolist() == [[1, 3], [1, 3]]
    # Softmax over the chosen ones alone.
    np.testing.assert_allclose(shares, [[np.e / (1 + np.e), 1 / (1 + np.e)]] * 2, rtol=1e-6)


def test_the_router_takes_the_lowest_of_equals():
    mixture = mixture_of(ExpertsConfig(count=5, chosen=2))
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
