"""R-KV's scores where the policy table does not look: blocks, repeated keys, short prompts, 16 bits, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest

from jaxkv import RKV
from jaxkv.policies import ScorerInputs
from jaxkv.policies.methods import rkv

HEADS, GROUP, DIM, WINDOW, PADDING = 2, 3, 16, 8, 5


def layer(q, k, lengths):
    """One layer's `ScorerInputs` of queries `[B, K, G, n, D]` and keys `[B, K, n, D]`, with NaN padding."""
    at = np.asarray(lengths)[:, None] - WINDOW + np.arange(WINDOW)
    inside = (np.arange(k.shape[2]) < np.asarray(lengths)[:, None])[:, None, :, None]
    k = jnp.pad(
        jnp.where(inside, k, np.nan), ((0, 0), (0, 0), (0, PADDING), (0, 0)), constant_values=np.nan
    )
    return ScorerInputs(
        extras={
            "queries": jnp.take_along_axis(q, np.maximum(at, 0)[:, None, None, :, None], axis=3)
        },
        q_positions=jnp.asarray(at, jnp.int32),
        k=k,
        v=k,
        length=jnp.asarray(lengths, jnp.int32),
        layer=jnp.int32(0),
        key=jax.random.key(0),
    )


def drawn(lengths, dtype=jnp.float32):
    """Queries and keys of a batch; every third key nearly repeats the one three before, and the last are equal."""
    rng, n = np.random.default_rng(3), max(lengths)
    q, k = (rng.standard_normal((len(lengths), HEADS, *shape, n, DIM)) for shape in ((GROUP,), ()))
    for j in range(3, n, 3):
        k[:, :, j] = 1.5 * k[:, :, j - 3] + 0.2 * k[:, :, j]
    k[:, :, 10:14] = k[:, :, 9:10]
    return jnp.asarray(2 * q, dtype), jnp.asarray(k, dtype)


def check(policy, q, k, lengths, **options):
    """Asserts that a policy's scores of the rows before the window are the oracle's."""
    ours = np.asarray(
        jax.jit(policy.build_policy_parts().scorer.score_entries)(layer(q, k, lengths))
    )
    for row, n in enumerate(lengths):
        exact = (np.asarray(x[row], np.float64)[..., :n, :].reshape(-1, n, DIM) for x in (q, k))
        expected, gap = o.rkv_scores(*exact, WINDOW, **options)
        assert gap > o.MIN_GAP
        np.testing.assert_allclose(ours[row, :, : n - WINDOW], expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize("cells", (1, 200, 1 << 22), ids=("rows", "blocks", "whole"))
def test_scores_are_those_of_the_definition_however_many_rows_a_block_has(
    monkeypatch, cells, dtype
):
    monkeypatch.setattr(rkv, "COSINES", cells)
    lengths = (30, 19)
    check(RKV(), *drawn(lengths, dtype), lengths)


def test_options_agree_with_the_oracle():
    lengths = (30, 19)
    for options in (
        {"mix_lambda": 0.07, "threshold": 0.9},
        {"mix_lambda": 1.0},
        {"mix_lambda": 0.0, "threshold": 0.1},
    ):
        check(RKV(**options), *drawn(lengths), lengths, **options)


def test_the_last_of_equal_keys_stays():
    """Attention left out, the last of equal keys counts as much as keys that no other resembles; the others less."""
    n = 2 * WINDOW
    k = jnp.asarray(np.eye(DIM)[None, None, :n], jnp.float32).repeat(HEADS, axis=1)
    k = k.at[:, :, 1:6].set(k[:, :, :1])
    q = jnp.zeros((1, HEADS, GROUP, n, DIM))
    scores = np.asarray(
        RKV(mix_lambda=0.0).build_policy_parts().scorer.score_entries(layer(q, k, [n]))
    )[0, :, :WINDOW]
    np.testing.assert_allclose(scores[:, 6:], scores[:, 5:6].repeat(2, axis=1), rtol=1e-6)
    assert (scores[:, :5] < 1.2 * scores[:, 5:6]).all()


@pytest.mark.parametrize("n", (1, WINDOW, WINDOW + 1))
def test_prompts_no_longer_than_the_window_have_finite_scores(n):
    q, k = drawn((n + 20,))
    assert np.isfinite(
        RKV().build_policy_parts().scorer.score_entries(layer(q[..., :n, :], k[:, :, :n], [n]))
    ).all()


def test_cosines_of_all_pairs_are_never_in_memory_at_once():
    slots = 8192
    q, k, _ = (
        jax.ShapeDtypeStruct((1, 1, *shape), jnp.float32)
        for shape in ((1, WINDOW, 64), (slots, 64), ())
    )
    positions, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, WINDOW), (1,)))

    def observe(q, k, positions, length):
        seen = ScorerInputs(
            extras={"queries": q},
            q_positions=positions,
            k=k,
            v=k,
            length=length,
            layer=jnp.int32(0),
            key=jax.random.key(0),
        )
        return RKV().build_policy_parts().scorer.score_entries(seen)

    used = (
        jax.jit(observe)
        .lower(q, k, positions, length)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )
    # A quarter of what all of them would take.
    assert used < slots**2
