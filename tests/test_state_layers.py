"""Policies over models with state layers: batches, slots, meshes, saves and prefixes give equal tokens."""

import dataclasses

import lettered
import numpy as np
import pytest
import slot_runs
import tiny
from meshes import mesh_of, prompts
from policy_table import REPEATED
from test_delta_nets import SHAPE, SPEC, states
from test_prefix_cache import ANSWER, LIMITS, turns
from test_serving_room import LIMITS as ROOM
from test_serving_room import allocated

import jaxkv
from jaxkv.engine.headroom import compute_prefill_headroom
from jaxkv.engine.plan import plan_prefill
from jaxkv.loading import LanguageModel
from jaxkv.machine import memory
from jaxkv.models.values import LayerSpec
from jaxkv.policies.wrapper import replace_policy_budget
from jaxkv.serving.prefix_cache import PrefixCache, PrefixOwner
from jaxkv.serving.slot_memory import count_fitting_slots

LENGTHS, NEW = (61, 37, 50, 44), 10
# A layer with entries above one with a state and one of its own: what more of them prove is seen in test_delta_nets.
KINDS = (LayerSpec(below=(SPEC,)), LayerSpec())
SHORT = dataclasses.replace(SHAPE, layers=2, kinds=KINDS)
# One policy of each kind: prompts alone, layer budgets, head budgets, one shared pool, a second pass, eviction,
# recompression, merging, pages, selected tokens; these also in chunks.
POLICIES = {
    "full": jaxkv.FullKV(),
    "snapkv": jaxkv.SnapKV(budget=24, window=6),
    "pyramidkv": jaxkv.PyramidKV(budget=24, window=6),
    "adakv": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=24, window=6)),
    "global": jaxkv.GlobalBudget(base=jaxkv.SnapKV(budget=24, window=6)),
    "kvzip": jaxkv.KVzip(budget=24, **REPEATED),
    "h2o": jaxkv.H2O(budget=24),
    "every": jaxkv.SnapKV(budget=24, window=6, every=3),
    "d2o": jaxkv.D2O(budget=24),
    "quest": jaxkv.Quest(budget=24, page=4, dense_layers=1),
    "omnikv": jaxkv.OmniKV(filter_layers=(0,), budget=24, adjacent=0),
    "chunked": jaxkv.OmniKV(
        filter_layers=(0,), budget=24, adjacent=0, prefill_ratio=0.5, prefill_chunk=16
    ),
}


def texts():
    return prompts(5, LENGTHS)


def answer(model, policy, ids, **options):
    options |= {"max_new_tokens": NEW, "stop_at_eos": False, "progress": False}
    out = [*jaxkv.generate(model, ids, policy=policy, **options)]
    return [each.tokens.tolist() for each in out]


@pytest.mark.parametrize("name", POLICIES)
def test_a_batch_gives_each_prompts_tokens(name):
    model, policy = tiny.tiny(SHORT), POLICIES[name]
    found = answer(model, policy, texts())
    assert found[1:3] == [answer(model, policy, [text])[0] for text in texts()[1:3]]


@pytest.mark.parametrize("name", ["adakv", "kvzip", "h2o", "every", "chunked"])
def test_a_mesh_gives_the_tokens_of_one_device(name):
    model, policy = tiny.tiny(SHORT), POLICIES[name]
    assert answer(model, policy, texts(), mesh=mesh_of(2, 2)) == answer(model, policy, texts())


@pytest.mark.parametrize("name", ["full", "every"])
def test_saved_caches_and_questions(name, tmp_path):
    """A question on a cache of one sequence that was saved on a mesh, against one on the cache itself."""
    model, policy = tiny.tiny(SHORT), POLICIES[name]
    session = jaxkv.Session(model, policy)
    cache = session.prefill(texts()[:1])
    split = jaxkv.Session(model.on(mesh_of(1, 2)), policy).prefill(texts()[:1])
    split.save(tmp_path / "cache")
    loaded = jaxkv.load_cache(tmp_path / "cache", model)
    asked = [[5, 9, 33], [4]]
    sampled = [
        session.sample(session.extend(each, asked, new=NEW), NEW)[1].tolist()
        for each in (cache, loaded, cache)
    ]
    assert sampled[0] == sampled[1] == sampled[2]
    for ours, theirs in zip(states(cache), states(loaded), strict=True):
        assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("name", ["adakv", "h2o", "every"])
def test_slots(name):
    slot_runs.check(tiny.tiny(SHORT), POLICIES[name], slot_runs.requests(1, 9))


@pytest.mark.parametrize("name", ["adakv", "every"])
def test_a_budget_of_the_whole_prompt_gives_the_full_caches_tokens(name):
    policy = replace_policy_budget(POLICIES[name], 96)
    assert answer(tiny.tiny(SHORT), policy, texts()) == answer(
        tiny.tiny(SHORT), POLICIES["full"], texts()
    )


def test_budgets_and_bytes_count_layers_with_entries_alone():
    model, policy = tiny.tiny(SHORT), POLICIES["snapkv"]
    cache = jaxkv.Session(model, policy).prefill(texts(), new=NEW)
    assert cache.kept.shape == (2, 4, 2) and cache.kept.sum() == 2 * 4 * 2 * 24
    headroom = compute_prefill_headroom(policy.composed, (None,) * 2, np.asarray(LENGTHS), NEW)
    planned = plan_prefill(SHORT, policy, LENGTHS, headroom=headroom)
    assert cache.nbytes == planned.cache_bytes
    # By hand: 3 inputs of 31 channels and 3 matrices of 8 x 5 for both key heads, in float32.
    assert SHORT.state_bytes == 4 * 2 * (3 * 31 + 3 * 8 * 5) and SHORT.blocks == 3
    without = dataclasses.replace(SHORT, kinds=())
    assert (
        planned.cache_bytes - plan_prefill(without, policy, LENGTHS, headroom=headroom).cache_bytes
        == 4 * SHORT.state_bytes
    )
    # Of 8,000 bytes more than the states, each token has entries of 2 heads of 2 layers, with positions.
    given = jaxkv.SnapKV(budget=f"{SHORT.state_bytes + 8000} B", window=6)
    entry = 4 * (2 * SHORT.head_dim + 1)
    assert jaxkv.Session(model, given).policy.budget == 8000 // (2 * 2 * entry)


def test_as_many_slots_fit_as_their_states_leave_room_for(monkeypatch):
    """Here a state takes most of a slot."""
    wide = dataclasses.replace(SPEC, key_dim=64, value_dim=64)
    config = dataclasses.replace(SHORT, kinds=(LayerSpec(below=(wide,)), LayerSpec()))
    session = jaxkv.Session(tiny.tiny(config), POLICIES["snapkv"])
    one = allocated(session, 1)
    assert config.state_bytes > 0.8 * one
    monkeypatch.setattr(memory, "get_machine_bytes", lambda: 20 * one)
    count = count_fitting_slots(session, **ROOM)
    assert 3 <= count <= 16 and allocated(session, count) == count * one


def test_a_forks_states_are_its_own():
    """Sampling donates states: of two answers to one cache, and of a recompressed cache, none changes another's."""
    session = jaxkv.Session(tiny.tiny(SHORT), POLICIES["every"])
    cache = session.prefill(texts())
    before = states(cache)
    grown, _ = session.sample(cache, NEW)
    renewed = session.recompress_sequences(session.extend(cache, texts()))
    session.sample(renewed, NEW, donate=True)
    session.sample(grown, NEW, donate=True)
    for ours, theirs in zip(states(cache), before, strict=True):
        assert (ours == theirs).all()
    cache.require_live_arrays()


def test_behind_a_stop_string_states_are_those_of_the_answer():
    """States cannot be rolled back, so that no token behind a stop string may run."""
    config = dataclasses.replace(SHORT, vocab=96)
    model = LanguageModel(tiny.tiny(config).decoder, text=lettered.characters(), name="states")
    options = {"stop_at_eos": False, "progress": False}
    rows = lettered.ids(1, 60, 38)
    free = jaxkv.generate(model, rows, max_new_tokens=16, **options)
    # Over the seam of two tokens of the first row.
    stop = free[0].text[1:3]
    out = jaxkv.generate(model, rows, stop=stop, max_new_tokens=16, **options)
    count = len(out[0].tokens)
    assert out[0].finish_reason == "stop" and count < 8
    exact = jaxkv.generate(model, rows[0], max_new_tokens=count, **options)
    assert int(out.cache.seen[0]) == int(exact.cache.seen[0])
    for ours, theirs in zip(states(out.cache), states(exact.cache), strict=True):
        np.testing.assert_allclose(ours[:1], theirs, atol=1e-5)


def test_prefixes_are_reused_whole_or_not_at_all():
    session = jaxkv.Session(tiny.tiny(SHORT), jaxkv.FullKV())
    ids = texts()[0]
    owner = PrefixOwner(policy=jaxkv.FullKV(), client="")
    prefixes = PrefixCache(most_bytes=1 << 20)
    prefixes.store_prefix(session.prefill([ids]), ids, owner)
    assert [each.tokens for each in prefixes.find_prefixes([*ids, 1, 2], owner)] == [61]
    assert not list(prefixes.find_prefixes([*ids[:-1], ids[-2], 1, 2], owner))


def test_a_conversation_reuses_states():
    """An engine stores them with the answers before, of which the last token did not run."""
    model, policy = tiny.tiny(SHORT), POLICIES["full"]
    with jaxkv.Engine(model, policy=policy, **LIMITS) as engine:
        for turn, (prompt, tokens, reused) in enumerate(turns(engine)):
            options = ANSWER | {"policy": policy, "progress": False}
            assert tokens == jaxkv.generate(model, prompt, **options).tokens.tolist()
            assert (reused > 0) == (turn > 0)


def test_what_needs_other_layers_is_rejected(tmp_path):
    model = tiny.tiny(SHORT)
    with pytest.raises(ValueError, match="layers that have a state"):
        jaxkv.Session(model, jaxkv.OmniKV(filter_layers=(0,), budget=24, adjacent=0, offload=True))
    with pytest.raises(ValueError, match="layers with a state cannot be exported"):
        jaxkv.export(model, tmp_path / "out", policy=jaxkv.FullKV(), lengths=16, new=4)
    with pytest.raises(ValueError, match=r"key_heads=2 of its state layers.*give one of \[1, 2\]"):
        answer(model, jaxkv.FullKV(), texts(), mesh=mesh_of(1, 4))
    with pytest.raises(ValueError, match="value_heads=5: give a multiple of key_heads=2"):
        dataclasses.replace(SPEC, value_heads=5)
