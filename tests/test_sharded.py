"""Models on a mesh of eight devices: the tokens and the kept rows of a single device, or a refusal by name."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from policy_table import BY_NAME

import jaxkv
from jaxkv.axes import Axes
from jaxkv.engine import loop
from jaxkv.engine.program import program_for
from jaxkv.sharding import model_mesh

BUDGET, NEW = 24, 10
LENGTHS = (61, 37)
# Of the policy table: every way of choosing that runs on a mesh, and every one that goes on after the prompt.
ROWS = (
    "full",
    "snapkv",
    "adakv-pyramid",
    "streaming",
    "knorm",
    "random",
    "criticalkv",
    "h2o",
    "roco",
    "tova",
    "adakv",
    "adakv-critical",
    "pyramidinfer",
    "adakv-entropy",
    "d2o",
    "d2o-raw",
)


def mesh_of(data: int, model: int):
    return jax.make_mesh((data, model), ("data", "model"), devices=jax.devices()[: data * model])


@functools.cache
def model_of(kv_heads: int):
    return tiny.tiny(tiny.shape(layers=2, kv_heads=kv_heads, group=2, dim=8))


def prompts(seed: int, lengths):
    """Token ids none of which comes twice: rows of one token tie, and are told apart by rounding alone."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(tiny.VOCAB)[:length].tolist() for length in lengths]


def run(model, policy, **options):
    """Tokens, and what is kept behind the prompts and behind the answers."""
    given = {"policy": policy, "key": 3, "progress": False}
    ids = prompts(5, LENGTHS)
    asked = jaxkv.prefill(model, ids, **given, **options)
    made = jaxkv.generate(model, ids, max_new_tokens=NEW, stop_at_eos=False, **given, **options)
    return [tokens.tolist() for tokens in made.tokens], [positions(each) for each in (asked, made.cache)], made


def positions(cache):
    return {part[:3]: sorted(part.pos.tolist()) for part in tiny.segments(cache)}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("data, model, kv_heads", [(2, 4, 8), (2, 4, 4), (2, 4, 2)])
def test_tokens_and_rows_are_those_of_one_device(name, data, model, kv_heads):
    policy, of = BY_NAME[name].make(BUDGET), model_of(kv_heads)
    tokens, kept, _ = run(of, policy)
    there, rows, made = run(of, policy, mesh=mesh_of(data, model))
    assert there == tokens
    assert rows == kept
    assert made.cache.axes == Axes(mesh=model_mesh(mesh_of(data, model), of.config))
    for pool in made.cache.pools:
        assert pool.k.sharding.shard_shape(pool.k.shape)[:2] == (2 // data, pool.rows // min(kv_heads, model))


def test_tokens_drawn_from_logits_with_keys():
    """Random numbers count sequences over all groups of devices."""
    of, sampling = model_of(4), jaxkv.Temperature(temperature=0.9)
    ids = prompts(6, (40, 40, 23, 31))
    options = {"policy": jaxkv.SnapKV(budget=BUDGET, window=8), "sampling": sampling, "key": 11, "progress": False}
    alone = jaxkv.generate(of, ids, max_new_tokens=NEW, stop_at_eos=False, **options)
    split = jaxkv.generate(of, ids, max_new_tokens=NEW, stop_at_eos=False, mesh=mesh_of(4, 2), **options)
    assert [each.tolist() for each in split.tokens] == [each.tolist() for each in alone.tokens]


def test_sequences_end_apart():
    """A group of devices whose sequences have ended goes on until the others' have."""
    of = model_of(4)
    ids = prompts(5, LENGTHS)
    options = {"policy": jaxkv.SnapKV(budget=BUDGET, window=8), "progress": False}
    session, both = jaxkv.Session(of, options["policy"]), []
    # Ends the first sequence early, and the second one only if it draws the same.
    end = int(session.draw(session.prefill(ids, new=NEW), NEW)[1][0, 2])
    for model in (of, of.on(mesh_of(2, 4))):
        session = jaxkv.Session(model, options["policy"])
        cache, tokens = session.draw(session.prefill(ids, new=NEW), NEW, eos=(end,))
        both.append((tokens.tolist(), np.asarray(cache.seen).tolist(), positions(cache)))
    assert both[0] == both[1]
    assert (np.asarray(both[0][0][0]) == -1).any()


@pytest.mark.parametrize("name", ["snapkv", "adakv", "adakv-critical", "knorm", "random", "h2o", "adakv-entropy"])
def test_compressed_again(name):
    attended = jaxkv.H2O(budget=BUDGET, mode="prefill", every=4)
    policy = attended if name == "h2o" else BY_NAME[name].make(BUDGET, every=4)
    tokens, kept, _ = run(model_of(4), policy)
    there, rows, _ = run(model_of(4), policy, mesh=mesh_of(2, 4))
    assert there == tokens and rows == kept


@pytest.mark.parametrize("name", ["full", "snapkv", "adakv", "h2o"])
def test_a_cache_is_asked_more(name):
    """A question on top of a cache, and another one on top of the answer, with one cache for all questions."""
    of, policy = model_of(4), BY_NAME[name].make(BUDGET)
    (document,), questions = prompts(8, (60,)), prompts(9, (5, 11, 3, 8))
    out = []
    for model in (of, of.on(mesh_of(1, 4))):
        session = jaxkv.Session(model, policy)
        cache = session.extend(session.prefill([document]), questions, new=NEW)
        cache, first = session.draw(cache, NEW)
        cache, again = session.draw(session.extend(cache, questions[::-1], new=NEW), NEW)
        out.append((first.tolist(), again.tolist(), positions(cache)))
    assert out[0] == out[1]


def test_a_model_is_moved_once():
    of, mesh = model_of(4), mesh_of(2, 4)
    moved = of.on(mesh)
    assert of.on(mesh) is moved and moved.on(mesh) is moved and of.axes is None
    assert moved.fingerprint == of.fingerprint
    assert moved.decoder.embedding.get_value().sharding.shard_shape((64, 24)) == (16, 24)


def test_letters():
    axes = Axes(mesh=model_mesh(mesh_of(2, 4), model_of(4).config))
    spec = jax.sharding.PartitionSpec
    assert axes.spec("L B K n", (2, 4, 4, 1)) == spec(None, "data", "kv")
    assert axes.spec("#B #K S", (1, 1, 9)) == spec() and axes.spec("#B #K S", (2, 4, 9)) == spec("data", "kv")
    assert axes.spec("V E", (64, 24)) == spec(("kv", "rep")) and axes.spec("B ...", (2, 3, 3)) == spec("data")
    with pytest.raises(ValueError, match=r"letters='K P': two of them want one axis of the mesh \(kv, kv\)"):
        axes.spec("K P", (4, 8))
    with pytest.raises(ValueError, match=r"B=3: it is split over data=2: give a multiple of 2"):
        axes.spec("B K", (3, 4))
    with pytest.raises(ValueError, match=r"mesh=.*give what model_mesh makes"):
        Axes(mesh=mesh_of(2, 4))


REFUSED = {
    "policy.read": "omnikv",
    "policy.merge": "cam",
    "policy.scorer": None,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_run_there_yet_is_refused(what):
    class Own(jaxkv.policies.Scorer):
        def observe(self, seen):
            return seen.k[..., 0]

    name = REFUSED[what]
    policy = jaxkv.Policy(budget=BUDGET, scorer=Own()) if name is None else BY_NAME[name].make(BUDGET)
    with pytest.raises(ValueError, match=rf"{what}=.*not on a mesh yet"):
        jaxkv.generate(model_of(4), prompts(5, LENGTHS), policy=policy, mesh=mesh_of(2, 4), progress=False)


def test_meshes_and_batches_that_do_not_fit(as_users_call):
    of, ids = model_of(4), prompts(5, (20, 21, 22))
    options = {"policy": jaxkv.SnapKV(budget=BUDGET, window=8), "progress": False}
    with pytest.raises(ValueError, match=r"prompts=3: not on a mesh yet: give a multiple of mesh.data=2"):
        jaxkv.generate(of, ids, mesh=mesh_of(2, 4), **options)
    with pytest.raises(TypeError, match=r"mesh=tuple: give jax\.make_mesh"):
        jaxkv.generate(of, ids, mesh=(2, 4), **options)


def test_a_cache_stays_on_its_mesh(tmp_path):
    of, ids = model_of(4), prompts(5, LENGTHS)
    options = {"policy": jaxkv.SnapKV(budget=BUDGET, window=8), "progress": False}
    there = jaxkv.prefill(of, ids, mesh=mesh_of(2, 4), **options)
    for model in (of, of.on(mesh_of(1, 4))):
        with pytest.raises(ValueError, match=r"cache=Mesh.*the model lies on.*prefill with this one"):
            jaxkv.generate(model, ids, cache=there, progress=False)
    with pytest.raises(ValueError, match=r"cache='on a mesh': not on a mesh yet"):
        there.save(tmp_path / "cache")


@pytest.mark.parametrize("name", ["snapkv", "h2o", "adakv", "tova", "d2o"])
def test_no_keys_or_values_travel_while_tokens_are_drawn(as_users_call, name):
    """What the decode loop sends: hidden states after attention and MLP, the embedding, logits, scores at most."""
    of = model_of(4).on(mesh_of(2, 4))
    session = jaxkv.Session(of, BY_NAME[name].make(BUDGET))
    cache = session.prefill(prompts(5, LENGTHS), new=NEW)
    program = program_for(of.flat, cache)
    draw = loop.Draw(logits=cache.logits, done=jnp.zeros((2,), bool), key=jax.random.key(0))
    running = loop.begin(cache, program=program, size=16)
    given = loop.loop_arguments(of.flat, running, draw, jnp.asarray([-2], jnp.int32), NEW, jaxkv.Greedy())
    lowered = loop._loop.lower(*given, program=program, size=16)
    text = lowered.compile().as_text()
    sent = re.findall(r"= \(?(.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(", text)
    shapes = [tuple(map(int, each.split(","))) for line, _ in sent for each in re.findall(r"\[([\d,]+)\]", line)]
    kinds = [kind for _, kind in sent]
    layers, rows = of.config.layers, {pool.rows // 4 for pool in cache.pools}
    # Hidden states are [1, 1, 24], logits [1, 64]; only heads that decide together say what each row is worth.
    assert (1, 1, 24) in shapes and (1, 64) in shapes and kinds.count("all-gather") == 1
    assert kinds.count("all-reduce") <= 2 * layers + 2 + layers * (name == "tova")
    assert all(math.prod(shape) <= max(64, *rows) for shape in shapes)
    aliased = text[text.index("input_output_alias") : text.index("entry_computation_layout")]
    assert aliased.count("may-alias") + aliased.count("must-alias") >= len(jax.tree.leaves(cache.pools))
    # Shapes alone are enough to compile for devices that are not there.
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), given[2:])
    again = loop._loop.trace(of.flat.ends, of.flat.blocks, *shapes, program=program, size=16).lower()
    assert again.as_text() == lowered.as_text()
