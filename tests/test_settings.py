"""jaxkv's answers do not depend on what else a process has set JAX to."""

import jax
import numpy as np
import pytest
import tiny
from policy_table import BY_NAME

import jaxkv

HOT = {"sampling": jaxkv.Sampling(top_k=5, temperature=0.7), "key": 1, "stream": True}
ROWS = {"streaming-rolling": {}, "d2o": HOT}


@pytest.mark.parametrize("name", ROWS)
def test_64_bits_and_ranks(name):
    """The likeliest tokens on top of rolling positions, and tokens sampled as a stream on top of merged rows."""
    model, ids = tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(0, (60, 37))
    policy = BY_NAME[name].policy(20)

    def answers():
        options = {"max_new_tokens": 5, "stop_at_eos": False}
        cache = jaxkv.prefill(model, ids, policy=policy)
        made = jaxkv.generate(model, [[1, 2, 3], [4, 5]], cache=cache, **options, **ROWS[name])
        if "stream" in ROWS[name]:
            assert list(made)
            made = made.result
        return [each.tokens for each in made], made.cache

    expected, _ = answers()
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        found, cache = answers()
        assert jax.numpy.arange(3).dtype == np.int64
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)} == {4}
