"""Caches that move: between meshes, to one device, to disk and back. Rows are exact, answers those of before."""

import functools

import jax
import numpy as np
import pytest
import tiny
from meshes import BUDGET, NEW, mesh_of, model_of, prompts, roomy

import jaxkv
from jaxkv.sharding.mesh import ShardingMesh
from jaxkv.sharding.parameters import make_model_mesh

# Every form of pool, and all that a cache may remember; from one device, back to it, and between meshes.
MOVES = (("every", "2x4", "4x2"), ("adakv-entropy", "2x4", "one"), ("d2o", "one", "2x4"))
PLACES = {"one": None, "2x4": (2, 4), "4x2": (4, 2)}
OPTIONS = {"max_new_tokens": NEW, "stop_at_eos": False, "progress": False}


def place(name):
    return None if PLACES[name] is None else mesh_of(*PLACES[name])


def on(name):
    return model_of(4) if PLACES[name] is None else model_of(4).on(place(name))


@functools.cache
def asked(name, where):
    """Three prompts and a first answer, so that segments have grown and room is left."""
    policy = roomy("adakv", every=4) if name == "every" else roomy(name)
    return jaxkv.generate(
        on(where), prompts(5, (61, 23, 37)), policy=policy, key=3, **OPTIONS
    ).cache


@functools.cache
def answers(name):
    made = jaxkv.generate(model_of(4), prompts(6, (5, 19, 8)), cache=asked(name, "one"), **OPTIONS)
    return [tokens.tokens.tolist() for tokens in made]


def rows(cache):
    """Every segment, bit by bit, with its scores."""
    return {
        part[:3]: (part.k.tobytes(), part.v.tobytes(), part.pos.tolist())
        for part in tiny.segments(cache)
    }


def remembered(cache):
    """What is no row: tables and states of the sequences that are asked."""
    of = cache.batch
    state = cache.state
    tables = [np.asarray(cache.limit)[:, :of], np.asarray(cache.seen)[:of]]
    if state is not None:
        tables += [
            np.asarray(each)[:of] for each in (state.prompt, state.budget, *state.query_buffers)
        ]
        tables += [
            np.asarray(each)[:, :of] for each in (state.recent, state.tau) if each is not None
        ]
    return [each.tolist() for each in tables]


@pytest.mark.parametrize("name, before, after", MOVES)
def test_a_cache_goes_on_elsewhere(name, before, after):
    cache = asked(name, before)
    held, moved = rows(cache), jaxkv.reshard(cache, place(after))
    assert rows(moved) == held and remembered(moved) == remembered(cache) and rows(cache) == held
    axes = (
        None
        if PLACES[after] is None
        else ShardingMesh(mesh=make_model_mesh(place(after), cache.config))
    )
    assert moved.axes == axes and moved.batch == 3 and moved.turn == cache.turn
    for pool in moved.pools:
        parts = (1, 1) if axes is None else PLACES[after]
        assert pool.pos.sharding.shard_shape(pool.pos.shape) == (
            len(moved.seen) // parts[0],
            pool.row_count // parts[1],
        )
    made = jaxkv.generate(on(after), prompts(6, (5, 19, 8)), cache=moved, **OPTIONS)
    assert [tokens.tokens.tolist() for tokens in made] == answers(name)


def test_rows_that_no_share_allows_stay():
    """A device whose heads hold more than a capacity gets a larger pool, now and when the policy chooses anew."""
    base = jaxkv.SnapKV(budget=BUDGET, window=8, every=4)
    policy = jaxkv.AdaKV(base=base, capacity=1.0, alpha=0.0)
    alone = jaxkv.prefill(model_of(4), prompts(5, (61, 37)), policy=policy, progress=False)
    moved = jaxkv.reshard(alone, mesh_of(1, 4))
    assert rows(moved) == rows(alone)
    assert moved.pools[0].row_count > 4 * BUDGET and (moved.kept.sum(axis=2) == 4 * BUDGET).all()
    # The second sequence is not due while the first one is: it stays as it is, beyond its share.
    session = jaxkv.Session(model_of(4).on(mesh_of(1, 4)), policy)
    grown = session.extend(moved, [[1, 2, 3, 4, 5], [1]])
    again = session.recompress_sequences(grown)
    assert {at: one for at, one in rows(again).items() if at[1]} == {
        at: one for at, one in rows(grown).items() if at[1]
    }
    assert (again.kept.sum(axis=2)[:, 0] == 4 * BUDGET).all() and (
        again.kept.sum(axis=2)[:, 1] == 4 * BUDGET + 4
    ).all()


def test_what_lies_there_is_not_moved():
    cache = asked("d2o", "2x4")
    assert jaxkv.reshard(cache, mesh_of(2, 4)) is not None
    again = jaxkv.reshard(cache, mesh_of(2, 4))
    assert again.pools[0].k is cache.pools[0].k


def test_saved_on_a_mesh_and_loaded_on_another(tmp_path):
    name = "quest"
    cache = asked(name, "2x4")
    cache.save(tmp_path / "cache")
    for where in ("one", "4x2"):
        loaded = jaxkv.load_cache(tmp_path / "cache", mesh=place(where))
        assert rows(loaded) == rows(cache) and remembered(loaded) == remembered(cache)
    # Where a model is on a mesh, the cache comes there.
    there = jaxkv.load_cache(tmp_path / "cache", on("4x2"))
    assert jax.tree.structure(there) == jax.tree.structure(loaded) and rows(there) == rows(cache)
    # Or both go there, as `generate` takes them.
    assert jaxkv.load_cache(tmp_path / "cache", on("one"), mesh=place("4x2")).axes == there.axes
    # A file says nothing of meshes: what one device had is written as ever.
    asked(name, "one").save(tmp_path / "alone")
    one, two = (jaxkv.load_cache(tmp_path / each) for each in ("alone", "cache"))
    assert [leaf.shape for leaf in jax.tree.leaves(one.state)] == [
        leaf.shape for leaf in jax.tree.leaves(two.state)
    ]


def test_a_cache_that_was_given_up_cannot_be_moved():
    cache = asked("d2o", "one")
    copy = cache.replace_arrays(seen=cache.seen + 0)
    copy.seen.delete()
    with pytest.raises(ValueError, match=r"cache='deleted'"):
        jaxkv.reshard(copy, mesh_of(2, 4))
