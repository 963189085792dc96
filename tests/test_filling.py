"""A batch of a new size is filled up to a compiled one: the answers and the cache are those of the exact batch."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from lettered import characters
from meshes import mesh_of

import jaxkv
from jaxkv import memory
from jaxkv.engine import filling
from jaxkv.models.decoder import Took
from jaxkv.testing import tiny_model

# A shape of no other test's: what is compiled here has not been compiled before.
CONFIG = dataclasses.replace(tiny.shape(layers=2, kv_heads=2, group=2, dim=12), vocab=96, max_positions=512)
OPTIONS = {"max_new_tokens": 12, "stop_at_eos": False, "progress": False}
LENGTHS = (50, 33, 61, 40)
POLICIES = {
    "full": jaxkv.FullKV(),
    "d2o": jaxkv.D2O(budget=16),
    "adakv-again": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=16, window=4, every=5)),
}


def ids(seed, lengths=LENGTHS):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 95, n).tolist() for n in lengths]


def model(seed=0):
    made = tiny_model(CONFIG, seed=seed)
    made.text = characters()
    return made


def same_caches(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for mine, its in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("name", POLICIES)
def test_a_new_size_is_filled_once_and_compiled_when_it_comes_again(name):
    """Drawn with a temperature: keys go by the sequence's number, which copies do not shift."""
    params, policy, prompts = model(), POLICIES[name], ids(0)
    given = {"policy": policy, "sampling": jaxkv.Temperature(temperature=1.0), "key": 5, **OPTIONS}
    whole, filled, exact, last = (jaxkv.generate(params, prompts[:n], **given) for n in (4, 3, 3, 3))
    assert [each.stats.copies for each in (whole, filled, exact, last)] == [0, 1, 0, 0]
    # But for cutting the copies off.
    assert filled.stats.compiled_programs < 8 < exact.stats.compiled_programs and not last.stats.compiled_programs
    for number in range(3):
        assert filled.tokens[number].tolist() == exact.tokens[number].tolist() == whole.tokens[number].tolist()
    assert filled.text == exact.text
    same_caches(filled.cache, exact.cache)
    sizes = ("full_bytes", "kept_bytes", "cache_bytes", "allocated_bytes", "slack_bytes", "kept")
    for count in ("prompt_tokens", "new_tokens", *sizes):
        assert getattr(filled.stats, count) == getattr(exact.stats, count)
    assert filled.cache.batch == len(filled.cache.seen) == 3


def test_turns_stops_streams_and_saves_of_a_filled_batch(tmp_path):
    params, policy, prompts = model(1), jaxkv.SnapKV(budget=16, window=4), ids(1)
    free = jaxkv.generate(params, prompts, policy=policy, **OPTIONS)
    stops = [free.text[0][2:5], free.text[1][8:10]]
    given = {"policy": policy, "stop": stops, "stream": True, **OPTIONS}
    streams = [jaxkv.generate(params, prompts[:3], **given) for _ in range(2)]
    pieces = [list(each) for each in streams]
    filled, exact = (each.result for each in streams)
    assert (filled.stats.copies, exact.stats.copies) == (1, 0)
    assert pieces[0] == pieces[1] and filled.text == exact.text and filled.cache.turn == exact.cache.turn
    assert min(len(each) for each in filled.tokens) < OPTIONS["max_new_tokens"]
    filled.cache.save(tmp_path / "cache")
    same_caches(jaxkv.load_cache(tmp_path / "cache", params), filled.cache)
    more = [jaxkv.generate(params, ids(2, (5, 9, 3)), cache=each.cache, **OPTIONS) for each in (filled, exact)]
    assert more[0].text == more[1].text
    same_caches(more[0].cache, more[1].cache)


@pytest.fixture(scope="module")
def met():
    """A model to which a batch of four has been given."""
    params = model(2)
    jaxkv.generate(params, ids(3), policy=POLICIES["d2o"], **OPTIONS)
    return params


def copies(params, lengths, *, policy="d2o", new=OPTIONS["max_new_tokens"]):
    """Copies that a batch would be filled with if its size had not been met."""
    session = jaxkv.Session(params, POLICIES[policy])
    encoded = session.encoded(ids(3, lengths))
    params.flat.filled.clear()
    return filling.planned(session, encoded, new).copies


def test_what_is_not_filled(met, monkeypatch):
    (signature,) = met.flat.took
    monkeypatch.setitem(met.flat.took, signature, Took(10.0, 1.0))
    assert copies(met, LENGTHS[:3]) == 1
    # Half of the sequences copies, a size that has been met, another bucket, another room, another policy.
    assert copies(met, LENGTHS[:2]) == copies(met, LENGTHS) == 0
    assert copies(met, (70, 33, 61)) == copies(met, LENGTHS[:3], policy="full") == 0
    on_mesh = met.on(mesh_of(2, 1))
    assert copies(on_mesh, LENGTHS[:3]) == 0
    # A quarter of the seconds of a run against those of compiling.
    monkeypatch.setitem(met.flat.took, signature, Took(10.0, 39.0))
    assert copies(met, LENGTHS[:3]) == 1
    monkeypatch.setitem(met.flat.took, signature, Took(10.0, 41.0))
    assert copies(met, LENGTHS[:3]) == 0


def test_where_memory_is_short_the_batch_is_as_large_as_asked(met, monkeypatch):
    (signature,) = met.flat.took
    monkeypatch.setitem(met.flat.took, signature, Took(10.0, 1.0))
    session = jaxkv.Session(met, POLICIES["d2o"])
    alone, filled = (session.plan(np.asarray(LENGTHS[:3] + more), 12) for more in ((), LENGTHS[2:3]))
    for free, expected in (
        (alone.peak_bytes, 0),
        (filled.peak_bytes - 1, 0),
        (max(filled.peak_bytes, filled.cache_bytes + alone.cache_bytes), 1),
    ):
        monkeypatch.setattr(memory, "available_bytes", lambda device, free=free: free)
        assert copies(met, LENGTHS[:3]) == expected
