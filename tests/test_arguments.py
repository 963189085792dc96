"""What `prefill` and `generate` are given besides prompts, and what they give back, as a user types and prints it."""

import dataclasses
import inspect
import re
from typing import get_args, get_overloads

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from lettered import DOC, DRAWING
from lettered import tiny as speaking

import jaxkv
from jaxkv import AdaKV, KVCache, OmniKV, SnapKV
from jaxkv.attention import Implementation
from jaxkv.engine.plan import plan_prefill

pytestmark = pytest.mark.usefixtures("as_users_call")
GQA = tiny.TWO_LAYERS
AWAY = OmniKV(filter_layers=(0,), adjacent=0, offload=True, budget=8)


@pytest.fixture(scope="module")
def model():
    return speaking()


def test_the_typed_forms_of_generate_take_what_it_takes():
    own = inspect.signature(jaxkv.generate)
    kinds = {
        name: given.annotation
        for name, given in own.parameters.items()
        if given.kind is given.KEYWORD_ONLY
    }
    forms = get_overloads(jaxkv.generate)
    assert forms
    for form in forms:
        (options,) = get_args(inspect.signature(form).parameters["options"].annotation)
        assert options.__annotations__ | {"stream": bool} == kinds


def test_what_may_be(model):
    out = jaxkv.generate(model, DOC, **DRAWING)
    wanted = out.tokens.tolist()
    for options in (
        {"max_new_tokens": np.int64(12)},
        {"stop": {"~"}},
        {"key": 0},
        {"key": jax.random.PRNGKey(0)},
        {"implementation": Implementation.XLA},
        {"raw": np.False_},
    ):
        assert jaxkv.generate(model, DOC, **{**DRAWING, **options}).tokens.tolist() == wanted, (
            options
        )
    for options in ({"temperature": 0, "top_p": 0.9}, {"top_p": None}):
        assert jaxkv.generate(model, DOC, **DRAWING, **options).tokens.tolist() == wanted, options
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "seed": 5}
    hot = jaxkv.generate(
        model, DOC, sampling=jaxkv.Sampling(top_p=0.9, temperature=0.7), key=5, **DRAWING
    ).tokens.tolist()
    assert jaxkv.generate(model, DOC, **given, **DRAWING).tokens.tolist() == hot != wanted
    drawn = [
        jaxkv.generate(model, DOC, sampling=jaxkv.Sampling(), key=key, **DRAWING).tokens.tolist()
        for key in (5, np.int8(5), jax.random.key(5), jax.random.PRNGKey(5))
    ]
    assert drawn[0] != wanted and all(each == drawn[0] for each in drawn)
    with pytest.raises(TypeError, match=r"cache=Generation: pass its \.cache"):
        jaxkv.generate(model, " why?", cache=out)


# --- what is printed --------------------------------------------------------------------------------------------------


def test_a_cache_a_generation_and_a_plan_print_in_a_line(model):
    policy = SnapKV(budget=16, window=4)
    out = jaxkv.generate(model, [DOC, "Hi, you"], policy=policy, **DRAWING)
    shown, seen = repr(out.cache), np.asarray(out.cache.seen)
    size = f"{out.cache.nbytes / 1e6:.2f} MB"
    wanted = f"SnapKV(budget=16, window=4)|2 sequences|{seen.min()} to {seen.max()} tokens|{size}|turn: answer"
    assert all(each in shown for each in wanted.split("|")) and str(out.cache) == shown
    assert re.search(r"\d+ to \d+ entries in each of 3 x 2 heads", shown), shown
    assert repr(out) == f"Generation(2 answers, 24 tokens; {shown})"
    one = jaxkv.generate(model, DOC, **DRAWING)
    assert repr(one).startswith(f"Generation(text={one.text!r}, 12 tokens; KVCache(")
    for value in (
        one,
        out.cache,
        out.stats,
        dataclasses.replace(one, completions=(dataclasses.replace(one[0], text="x" * 500),)),
    ):
        assert "\n" not in repr(value) and len(repr(value)) < 300, repr(value)
    plan = plan_prefill(model.config, AdaKV(budget=16, base="knorm"), [60, 30])
    assert "2 prompts of padded length 64; 16 to 16 entries per kv head" in repr(plan)
    assert "tokens/s" in repr(out.stats)
    mixed = jaxkv.prefill(model, [DOC, [5, 6, 7]])
    assert "turn: user, raw" in repr(mixed)


def test_a_cache_prints_whatever_its_leaves_are():
    cache = jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(1, (40, 20)), policy=AWAY)
    assert "0.02 MB; 0.02 MB in host memory" in repr(cache)
    seen = []
    jax.jit(lambda cache: seen.append(repr(cache)) or cache.seen)(
        jaxkv.prefill(tiny.tiny(GQA), [[1, 2]], policy="knorm")
    )
    assert seen[0].startswith("KVCache(KNorm(); 1 sequence; ")
    shapes = jax.eval_shape(lambda cache: cache, dataclasses.replace(cache, host_store=None))
    deleted = jax.tree.map(jnp.copy, cache)
    for leaf in jax.tree.leaves(deleted):
        leaf.delete()
    others = [jax.tree.map(np.asarray, cache), shapes, deleted, jax.tree.map(lambda _: 1.5, cache)]
    start = "KVCache(OmniKV(budget=8, filter_layers=(0,)"
    assert all(repr(each).startswith(start) and "\n" not in repr(each) for each in others)
    assert repr(others[0]) == repr(cache)
    with pytest.raises(ValueError, match="cache='deleted': .*prefill again"):
        jaxkv.generate(tiny.tiny(GQA), [[1], [2]], cache=deleted, max_new_tokens=1)


# --- caches as pytrees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        AWAY,
        AdaKV(base="h2o", budget=16),
    ],
    ids=["offloaded", "evicting"],
)
def test_a_cache_goes_to_numpy_and_back(policy):
    model = tiny.tiny(GQA)
    cache = jaxkv.prefill(model, tiny.prompts(2, (40, 20)), policy=policy)
    host = jax.tree.map(np.asarray, cache)
    assert isinstance(host, KVCache) and all(
        isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(host)
    )
    for name in ("nbytes", "host_nbytes", "entry_bytes", "full_nbytes", "kept_nbytes", "batch"):
        assert getattr(host, name) == getattr(cache, name), name
    np.testing.assert_array_equal(host.compute_layer_headroom(), cache.compute_layer_headroom())
    expected = jaxkv.generate(
        model, [[1, 2], [3]], cache=cache, max_new_tokens=4, stop_at_eos=False
    )
    before = [leaf.copy() for leaf in jax.tree.leaves(host)]
    for given in (host, jax.device_put(cache)):
        out = jaxkv.generate(model, [[1, 2], [3]], cache=given, max_new_tokens=4, stop_at_eos=False)
        for one, other in zip(
            (each.tokens for each in out), (each.tokens for each in expected), strict=True
        ):
            np.testing.assert_array_equal(one, other)
        assert (
            out.cache.host_nbytes == expected.cache.host_nbytes
            and out.stats.transfers == expected.stats.transfers
        )
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(out.cache.host_store)}
        assert kinds <= {"pinned_host"}
    for old, new in zip(before, jax.tree.leaves(host), strict=True):
        np.testing.assert_array_equal(old, new)
