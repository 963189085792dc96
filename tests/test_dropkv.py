"""DropKV's scores against their definition: also where one row has nearly all attention, and in 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest

from jaxkv.policies import ScorerInputs
from jaxkv.policies.methods.dropkv import OutputChangeScorer

HEADS, GROUP, DIM, WINDOW, PADDING = 2, 3, 16, 8, 5


def scores(q, k, v):
    """Library's scores of one sequence, in a batch of its own with padding that is not a number in the values."""
    n = k.shape[1]
    at = np.arange(n - WINDOW, n)
    seen = ScorerInputs(
        extras={"queries": q[None, :, :, np.maximum(at, 0)]},
        q_positions=jnp.asarray(at[None], jnp.int32),
        k=jnp.pad(k, ((0, 0), (0, PADDING), (0, 0)), constant_values=3)[None],
        v=jnp.pad(v, ((0, 0), (0, PADDING), (0, 0)), constant_values=np.nan)[None],
        length=jnp.asarray([n], jnp.int32),
        layer=jnp.int32(0),
        key=jax.random.key(0),
    )
    return np.asarray(OutputChangeScorer(window=WINDOW).score_entries(seen))[0]


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize(
    ("sharpness", "offset"), ((0.5, 0.0), (3.0, 0.0), (12.0, 0.0), (1.0, 100.0))
)
def test_scores_are_those_of_the_definition(dtype, sharpness, offset):
    rng, n = np.random.default_rng(3), 30
    q = jnp.asarray(sharpness * rng.standard_normal((HEADS, GROUP, n, DIM)), dtype)
    k, v = (
        jnp.asarray(shift + rng.standard_normal((HEADS, n, DIM)), dtype) for shift in (0.0, offset)
    )
    exact = (np.asarray(each, np.float64) for each in (q.reshape(-1, n, DIM), k, v))
    expected = o.dropkv_scores(*exact, WINDOW)
    ours = scores(q, k, v)[:, : n - WINDOW]
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-6 * expected.max())


def test_a_prompt_shorter_than_the_window_has_finite_scores():
    rng, n = np.random.default_rng(4), 3
    q = jnp.asarray(rng.standard_normal((HEADS, GROUP, n, DIM)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((HEADS, n, DIM)), jnp.float32) for _ in range(2))
    assert np.isfinite(scores(q, k, v)).all()
