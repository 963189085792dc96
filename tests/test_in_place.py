"""The compiled decode loop writes new rows into its pools, and copies none."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import tiny

import jaxkv
from jaxkv.engine import token_loop as looping
from jaxkv.engine.spec import create_cache_spec
from jaxkv.models.values import DeltaNetSpec, LayerSpec

LENGTHS = [37, 21]


def check_in_place(policy, dtype="float32"):
    """A loop that reads a pool and writes rows of it copies no pool."""
    pool, text = compiled(tiny.tiny(tiny.MODELS["mha"], dtype=dtype), policy)
    shape = f"f32[{','.join(map(str, pool.k.shape))}]"
    assert shape in text
    assert not re.findall(rf"= {re.escape(shape)}\S* copy\(", text)


@pytest.mark.parametrize(
    "policy", (jaxkv.H2O(budget=16), jaxkv.D2O(budget=16)), ids=lambda each: type(each).__name__
)
def test_rows_are_dropped_in_place(policy):
    check_in_place(policy)


def test_a_model_of_16_bits_appends_in_place():
    check_in_place(jaxkv.FullKV(), "bfloat16")


def test_states_advance_in_place():
    """The matrices of a gated delta net, which a token reads and changes."""
    spec = DeltaNetSpec(key_heads=2, value_heads=6, key_dim=8, value_dim=5)
    config = dataclasses.replace(
        tiny.MODELS["mha"], kinds=(LayerSpec(below=(spec,)), LayerSpec()), norm_offset=True
    )
    _, text = compiled(tiny.tiny(config), jaxkv.FullKV())
    assert "f32[2,2,3,8,5]" in text
    assert not re.findall(r"= f32\[2,2,3,8,5\]\S* copy\(", text)


def compiled(model, policy):
    """A pool of a short prompt's cache, and what XLA makes of the loop that samples on top of it."""
    cache, logits, _ = tiny.run(model, tiny.prompts(2, LENGTHS), policy, headroom=16)
    spec = create_cache_spec(model.flat_decoder, cache)
    none = jnp.asarray([-2], jnp.int32)
    draw = looping.create_sampling_state(
        jnp.asarray(logits), jnp.zeros(2, bool), jax.random.key(0), none
    )
    given = looping.collect_loop_arguments(
        model.flat_decoder, cache.arrays, draw, 4, jaxkv.Sampling(temperature=0), 0, spec=spec
    )
    leaves, structure = jax.tree.flatten(given)
    first, end = (len(jax.tree.leaves(given[:count])) for count in (1, 3))
    loop = partial(looping._loop.__wrapped__, spec=spec, size=16)
    run = lambda *each: loop(*jax.tree.unflatten(structure, each))  # noqa: E731
    # What it writes is donated, as it is by the library.
    return cache.pools[0], jax.jit(run, donate_argnums=tuple(range(first, end))).lower(
        *leaves
    ).compile().as_text()
