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
MESH, QUESTIONS = (2, 4), prompts(6, (5, 19, 8))
OPTIONS = {"max_new_tokens": 8, "stop_at_eos": False, "progress": False}


def model(where):
    """On one device, or on a mesh."""
    alone = tiny.tiny(tiny.shape(layers=3, kv_heads=2, group=2, dim=8))
    return alone if where is None else alone.on(mesh_of(*where))


def waits(cache):
    """What waits of the sequences that are asked."""
    return np.stack([np.asarray(each)[: cache.batch] for each in cache.host_store.rows])


def told(made):
    return [each.tokens.tolist() for each in made], positions(made.cache)


@functools.cache
def asked(name, where):
    """Three prompts' answers, and those to a question on top of each: on a mesh for two groups, and apart."""
    on = model(where)
    made = jaxkv.generate(on, prompts(5, (61, 23, 37)), policy=POLICIES[name], **OPTIONS)
    return made, jaxkv.generate(on, QUESTIONS, cache=made.cache, **OPTIONS)


@pytest.mark.parametrize("name", POLICIES)
def test_answers_are_those_of_one_device(name):
    """Two kv heads on four devices."""
    out = []
    for where in (None, MESH):
        made, more = asked(name, where)
        out.append((told(made), told(more), waits(made.cache)))
    assert out[0][:2] == out[1][:2]
    # A device's sums round as they come.
    np.testing.assert_allclose(out[0][2], out[1][2], atol=1e-4)
    for rows in made.cache.host_store.rows:
        assert rows.sharding.memory_kind == "pinned_host" and rows.is_fully_addressable
        assert rows.sharding.shard_shape(rows.shape) == (2, 64, 2, 1, 8)
    assert made.stats.transferred_bytes > 0


def test_one_document_for_many_questions():
    out = []
    for on in (model(None), model(MESH)):
        cache = jaxkv.prefill(on, prompts(5, (60,))[0], policy=POLICIES["filters"], progress=False)
        out.append(told(jaxkv.generate(on, QUESTIONS, cache=cache, **OPTIONS)))
    assert out[0] == out[1]
    # One copy of the document beside each device's heads serves all questions.
    assert cache.host_store.rows[0].shape[0] == 2


@pytest.mark.parametrize("before, after", [(None, MESH), (MESH, None)])
def test_a_cache_moves_with_what_waits(tmp_path, before, after):
    made, here = asked("filters", before)
    moved = jaxkv.reshard(made.cache, None if after is None else mesh_of(*after))
    assert np.array_equal(waits(moved), waits(made.cache)) and positions(moved) == positions(
        made.cache
    )
    made.cache.save(tmp_path / "cache")
    loaded = jaxkv.load_cache(tmp_path / "cache", model(after))
    for each in (moved, loaded):
        assert told(jaxkv.generate(model(after), QUESTIONS, cache=each, **OPTIONS)) == told(here)
        assert all(rows.sharding.memory_kind == "pinned_host" for rows in each.host_store.rows)
