"""Models on a mesh of eight devices: the tokens and the kept rows of a single device, or a rejection by name."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float
from meshes import BUDGET, mesh_of, model_of, positions, prompts, roomy

import jaxkv
from jaxkv.attention import Implementation
from jaxkv.engine.embedding import embed_tokens
from jaxkv.models import decoder
from jaxkv.sharding.collectives import sum_over_devices
from jaxkv.sharding.mesh import ShardingMesh, place_host_array
from jaxkv.sharding.parameters import make_model_mesh
from jaxkv.sharding.sharded_program import sharded_jit
from jaxkv.testing import tiny_model

NEW = 10
LENGTHS = (61, 37)


def run(model, policy, **options):
    """Tokens, and what is kept behind the prompts and behind the answers."""
    given = {"policy": policy, "key": 3, "progress": False}
    ids = prompts(5, LENGTHS)
    asked = jaxkv.prefill(model, ids, **given, **options)
    made = jaxkv.generate(model, ids, max_new_tokens=NEW, stop_at_eos=False, **given, **options)
    return (
        [tokens.tokens.tolist() for tokens in made],
        [positions(each) for each in (asked, made.cache)],
        made,
    )


def test_the_whole_job():
    """Two kv heads on four devices."""
    policy, of = roomy("adakv"), model_of(2)
    tokens, kept, _ = run(of, policy)
    there, rows, made = run(of, policy, mesh=mesh_of(2, 4))
    assert there == tokens
    assert rows == kept
    assert made.cache.axes == ShardingMesh(mesh=make_model_mesh(mesh_of(2, 4), of.config))
    for pool in made.cache.pools:
        assert pool.k.sharding.shard_shape(pool.k.shape)[:2] == (1, pool.row_count // 2)


def test_sequences_end_apart():
    """A group of devices whose sequences have ended goes on until the others' have."""
    of = model_of(4)
    ids = prompts(5, LENGTHS)
    options = {"policy": jaxkv.SnapKV(budget=BUDGET, window=8), "progress": False}
    session, both = jaxkv.Session(of, options["policy"]), []
    # Ends the first sequence early, and the second one only if it samples the same.
    end = int(session.sample(session.prefill(ids, new=NEW), NEW)[1][0, 2])
    for model in (of, of.on(mesh_of(2, 4))):
        session = jaxkv.Session(model, options["policy"])
        cache, tokens = session.sample(session.prefill(ids, new=NEW), NEW, eos=(end,))
        both.append((tokens.tolist(), np.asarray(cache.seen).tolist(), positions(cache)))
    assert both[0] == both[1]
    assert (np.asarray(both[0][0][0]) == -1).any()


def test_a_model_is_moved_once():
    of, mesh = model_of(4), mesh_of(2, 4)
    moved = of.on(mesh)
    assert of.on(mesh) is moved and moved.on(mesh) is moved and of.axes is None
    assert moved.fingerprint == of.fingerprint
    assert moved.decoder.embedding.get_value().sharding.shard_shape((64, 24)) == (16, 24)


def test_parameters_that_are_replaced_go_where_their_parts_are_looked_for():
    """By arrays that are on one device, or whole on every one."""
    policy, alone = roomy("snapkv"), tiny_model(model_of(4).config, seed=4)
    moved = alone.on(mesh_of(2, 4))
    whole = jax.sharding.NamedSharding(moved.axes.mesh, jax.sharding.PartitionSpec())
    for model, there in ((alone, None), (moved, whole)):
        attention, table = model.decoder.blocks[0].attention, model.decoder.embedding
        attention.q.set_value(jnp.asarray(-np.asarray(attention.q.get_value())))
        attention.out.set_value(jax.device_put(-np.asarray(attention.out.get_value()), there))
        table.set_value(jnp.asarray(-np.asarray(table.get_value())))
    (tokens, kept, _), (there, rows, made) = run(alone, policy), run(moved, policy)
    assert (there, rows) == (tokens, kept)
    assert made.cache.axes == moved.axes is not None


def test_a_cache_is_copied_and_pickled():
    of, mesh, ids = model_of(4), mesh_of(2, 4), prompts(9, (5, 8))
    cache = jaxkv.prefill(
        of, prompts(5, LENGTHS), policy=roomy("snapkv"), mesh=mesh, progress=False
    )
    asked = [
        [
            answer.tokens
            for answer in jaxkv.generate(
                of, ids, cache=each, mesh=mesh, max_new_tokens=4, progress=False
            )
        ]
        for each in (cache, pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache))
    ]
    np.testing.assert_array_equal(asked[1:], [asked[0]] * 2)
    make, (platform, _) = cache.axes.__reduce__()
    with pytest.raises(
        ValueError, match=r"devices=\[99\]: this process has 8 of cpu: .*jaxkv\.load_cache"
    ):
        make(platform, [[[0], [99]]])
    with pytest.raises(
        ValueError, match=r"cache\.axes=None: its arrays are on Mesh.*pass the original cache"
    ):
        jaxkv.generate(of, ids, cache=dataclasses.replace(cache, axes=None), progress=False)


def test_letters():
    axes = ShardingMesh(mesh=make_model_mesh(mesh_of(2, 4), model_of(4).config))
    spec = jax.sharding.PartitionSpec
    assert axes.get_array_spec("L B K n", (2, 4, 4, 1)) == spec(None, "data", "kv")
    assert axes.get_array_spec("#B #K S", (1, 1, 9)) == spec() and axes.get_array_spec(
        "#B #K S", (2, 4, 9)
    ) == spec("data", "kv")
    fewer = ShardingMesh(mesh=make_model_mesh(mesh_of(1, 4), model_of(2).config))
    assert fewer.get_array_spec("V E", (64, 24)) == spec(("kv", "rep")) and fewer.get_array_spec(
        "B K", (3, 2)
    ) == spec(None, "kv")
    with pytest.raises(ValueError, match=r"B=3: not divisible over data=2: give a multiple of 2"):
        axes.get_array_spec("B K", (3, 4))


@sharded_jit(static=("axes",), donate=("x",))
def _shares(x: Float[Array, "B V"], *, axes: ShardingMesh | None) -> Float[Array, "B V"]:
    return x / sum_over_devices(x.sum(axis=1, keepdims=True), axes)


def test_programs_are_traced_for_shapes_alone():
    """As for the arrays themselves, whose devices need not be there."""
    x = jnp.ones((2, 8))
    for axes in (ShardingMesh(mesh=make_model_mesh(mesh_of(2, 4), model_of(4).config)), None):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        assert (
            _shares.trace(shape, axes=axes).lower().as_text()
            == _shares.trace(x, axes=axes).lower().as_text()
        )
    np.testing.assert_array_equal(_shares(x, axes=None), np.full((2, 8), 1 / 8))


def test_embeddings_of_a_prompt_in_blocks(monkeypatch):
    """As on TPUs: devices sum those of a block of tokens at a time, and have the same numbers."""
    monkeypatch.setattr(decoder, "_SUMMED_AT_ONCE", (4, 8))
    flat = model_of(4).on(mesh_of(2, 4)).flat_decoder
    for slots, loops in ((24, 1), (9, 0), (8, 0)):
        tokens = np.random.default_rng(slots).integers(0, flat.config.vocab, (2, slots), np.int32)
        given = flat.ends, place_host_array(tokens, "B S", flat.axes)
        ways = Implementation.XLA, Implementation.TPU
        whole, blocks = ({"graphs": flat.graphs, "implementation": each} for each in ways)
        np.testing.assert_array_equal(embed_tokens(*given, **blocks), embed_tokens(*given, **whole))
        assert (
            embed_tokens.trace(*given, **blocks).lower().as_text().count("stablehlo.while") == loops
        )


def test_a_mesh_around_calls_changes_nothing():
    """Users' own programs may run on the same devices with other axes."""
    of, policy, mesh = model_of(4), roomy("snapkv"), jax.make_mesh((2, 4), ("data", "model"))
    tokens, kept, _ = run(of, policy)
    around = jax.make_mesh((8,), ("x",))
    with jax.set_mesh(around):
        there, rows, made = run(of, policy, mesh=mesh)
        pieces = jaxkv.generate(
            of, prompts(5, LENGTHS), cache=made.cache, mesh=mesh, max_new_tokens=2, stream=True
        )
        assert len(list(pieces)) and jax.sharding.get_abstract_mesh() == around.abstract_mesh
    assert (there, rows) == (tokens, kept)


def test_a_cache_stays_on_its_mesh():
    of, ids = model_of(4), prompts(5, LENGTHS)
    options = {"policy": jaxkv.SnapKV(budget=BUDGET, window=8), "progress": False}
    there = jaxkv.prefill(of, ids, mesh=mesh_of(2, 4), **options)
    for model in (of, of.on(mesh_of(1, 4))):
        with pytest.raises(
            ValueError,
            match=r"cache=Mesh.*the model is on.*pass jaxkv\.reshard\(cache, .*or prefill",
        ):
            jaxkv.generate(model, ids, cache=there, progress=False)
    turned = jax.sharding.Mesh(mesh_of(2, 4).devices[::-1], ("data", "model"))
    with pytest.raises(ValueError, match=r"the model is on Mesh.*: pass"):
        jaxkv.generate(of, ids, cache=there, mesh=turned, progress=False)
