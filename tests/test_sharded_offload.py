"""Rows in host memory on a mesh: beside each device wait those of its own heads, and only those come back."""

import functools

import numpy as np
import pytest
import tiny
from meshes import mesh_of, positions, prompts

import jaxkv
from jaxkv import BrutalOffload, OmniKV

POLICIES = {
    "filters": OmniKV(budget=12, filter_layers=(0,), adjacent=0, offload=True),
    "loaded": BrutalOffload(resident_layers=1),
}
OPTIONS = {"max_new_tokens": 8, "stop_at_eos": False, "progress": False}


@functools.cache
def model_of(kv_heads):
    return tiny.tiny(tiny.shape(layers=3, kv_heads=kv_heads, group=2, dim=8))


def waits(cache):
    """What waits of the sequences that are asked."""
    return np.stack([np.asarray(each)[: cache.batch] for each in cache.bank.rows])


def told(made):
    return [each.tolist() for each in made.tokens], positions(made.cache)


@pytest.mark.parametrize("name, kv_heads", [("filters", 2), ("loaded", 4)])
def test_answers_are_those_of_one_device(name, kv_heads):
    """Three prompts for two groups, and a question on top of each."""
    of, out = model_of(kv_heads), []
    for model in (of, of.on(mesh_of(2, 4))):
        made = jaxkv.generate(model, prompts(5, (61, 23, 37)), policy=POLICIES[name], **OPTIONS)
        more = jaxkv.generate(model, prompts(6, (5, 19, 8)), cache=made.cache, **OPTIONS)
        out.append((told(made), told(more), waits(made.cache)))
    assert out[0][:2] == out[1][:2]
    # A device's sums round as they come.
    np.testing.assert_allclose(out[0][2], out[1][2], atol=1e-4)
    for rows in made.cache.bank.rows:
        assert rows.sharding.memory_kind == "pinned_host" and rows.is_fully_addressable
        assert rows.sharding.shard_shape(rows.shape) == (2, 64, 2, max(1, kv_heads // 4), 8)
    assert made.stats.transferred_bytes > 0


def test_one_document_for_many_questions():
    of, out = model_of(4), []
    for model in (of, of.on(mesh_of(2, 2))):
        cache = jaxkv.prefill(
            model, prompts(5, (60,))[0], policy=POLICIES["filters"], progress=False
        )
        out.append(told(jaxkv.generate(model, prompts(6, (5, 19, 8)), cache=cache, **OPTIONS)))
    assert out[0] == out[1]
    # One copy of the document beside each device's heads serves all questions.
    assert cache.bank.rows[0].shape[0] == 2


def test_a_cache_moves_with_what_waits(tmp_path):
    of, before, after = model_of(4), (2, 4), (1, 2)
    on = lambda where: of.on(mesh_of(*where))  # noqa: E731
    made = jaxkv.generate(
        on(before), prompts(5, (61, 23, 37)), policy=POLICIES["filters"], **OPTIONS
    )
    moved = jaxkv.reshard(made.cache, mesh_of(*after))
    assert np.array_equal(waits(moved), waits(made.cache)) and positions(moved) == positions(
        made.cache
    )
    made.cache.save(tmp_path / "cache")
    loaded = jaxkv.load_cache(tmp_path / "cache", on(after))
    asked = [
        jaxkv.generate(on(after), prompts(6, (5, 19, 8)), cache=each, **OPTIONS)
        for each in (moved, loaded)
    ]
    here = jaxkv.generate(on(before), prompts(6, (5, 19, 8)), cache=made.cache, **OPTIONS)
    assert told(asked[0]) == told(asked[1]) == told(here)
    assert all(
        rows.sharding.memory_kind == "pinned_host"
        for each in (moved, loaded)
        for rows in each.bank.rows
    )
