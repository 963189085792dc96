"""A session's pieces give what `generate` gives, and change no cache that they are given."""

import copy
import dataclasses

import jax
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv import D2O, H2O, TOVA, FullKV, OmniKV, Session, SnapKV
from jaxkv.cache import repack_cache
from jaxkv.testing import segments

GQA = tiny.TWO_LAYERS
IDS, MORE = tiny.prompts(1, (37, 21)), tiny.prompts(2, (9, 4))
POLICIES = {
    "every": SnapKV(budget=16, window=8, every=8),
    "evicting": H2O(budget=20),
    "offloaded": OmniKV(filter_layers=(0,), adjacent=0, budget=12, offload=True),
}
PLAIN = {"stop_at_eos": False, "progress": False}


def leaves(cache):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache)]


@pytest.mark.parametrize("name", POLICIES)
def test_its_pieces_give_what_generate_gives(name):
    model, policy = tiny.tiny(GQA), POLICIES[name]
    first = jaxkv.generate(model, IDS, policy=policy, max_new_tokens=12, **PLAIN)
    second = jaxkv.generate(model, MORE, cache=first.cache, max_new_tokens=6, **PLAIN)
    session = Session(model, policy)
    prompt = session.prefill(IDS, new=12)
    before = leaves(prompt)
    answered, tokens = session.sample(prompt, 12)
    np.testing.assert_array_equal(tokens, np.stack([each.tokens for each in first]))
    assert leaves(prompt) == before
    asked = session.extend(session.recompress_sequences(answered), MORE, new=6)
    _, tokens = session.sample(asked, 6)
    np.testing.assert_array_equal(tokens, np.stack([each.tokens for each in second]))
    assert np.asarray(answered.seen).tolist() == [37 + 12, 21 + 12]


def test_draws_go_on_where_the_last_one_ended():
    session = Session(tiny.tiny(GQA), FullKV())
    cache = session.prefill(IDS)
    _, whole = session.sample(cache, 12)
    some, first = session.sample(cache, 5, new=12)
    _, rest = session.sample(some, 7, new=12, donate=True)
    np.testing.assert_array_equal(np.concatenate([first, rest], axis=1), whole)
    assert all(pool.k.is_deleted() for pool in some.pools) and not any(
        pool.k.is_deleted() for pool in cache.pools
    )


def test_chunks_of_any_size_give_the_same_rows():
    session = Session(tiny.tiny(GQA), FullKV())
    cache = session.prefill(IDS)
    before, whole = leaves(cache), session.extend(cache, MORE)
    for chunk in (1, 4):
        parts = session.extend(cache, MORE, chunk=chunk)
        np.testing.assert_allclose(np.asarray(parts.logits), np.asarray(whole.logits), atol=1e-4)
        assert tiny.kept(parts) == tiny.kept(whole)
    assert leaves(cache) == before


@pytest.mark.parametrize("policy", [H2O(budget=20), D2O(budget=20), H2O(budget=30)])
def test_tokens_that_evict_take_the_places_of_what_they_evict(policy):
    session = Session(tiny.tiny(GQA), policy)
    more = tiny.prompts(3, (60, 41))
    # A budget of 30 leaves the second prompt free places.
    cache = session.prefill(IDS, new=60)
    before = [pool.k.shape[1] for pool in cache.pools]
    roomy = session.extend(repack_cache(cache, headroom=64), more, chunk=1, donate=True)
    copied = session.extend(cache, more, chunk=1)
    read = session.extend(cache, more, chunk=1, donate=True)
    assert [pool.k.shape[1] for pool in read.pools] == before
    for found in (copied, read):
        for one, other in zip(segments(roomy), segments(found), strict=True):
            np.testing.assert_array_equal(one[-1], other[-1])
            assert one[:3] == other[:3]
        np.testing.assert_allclose(found.logits, roomy.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", [H2O(budget=12), TOVA(budget=12), D2O(budget=12)])
def test_a_finished_sequence_evicts_nothing_while_its_neighbour_goes_on(policy):
    """Questions read in one step leave both above their limits; then one has a single token, the other five."""
    session = Session(tiny.tiny(GQA), policy)
    asks, last = tiny.prompts(3, (6, 6)), tiny.prompts(4, (5, 1))
    both = session.extend(session.extend(session.prefill(IDS), asks), last, chunk=1)
    alone = session.extend(session.prefill(IDS[1:]), asks[1:])
    alone = session.extend(alone, last[1:], chunk=1)
    assert (alone.kept > np.asarray(alone.limit)).all()
    of_both = [part.pos.tolist() for part in segments(both) if part.sequence == 1]
    assert of_both == [part.pos.tolist() for part in segments(alone)]


def test_one_cache_serves_many_prompts():
    session = Session(tiny.tiny(GQA), FullKV())
    document = session.prefill(IDS[:1])
    together = session.extend(document, MORE)
    alone = session.extend(document, MORE[1:])
    np.testing.assert_allclose(np.asarray(together.logits)[1:], np.asarray(alone.logits), atol=1e-4)


def test_a_model_is_taken_apart_once_and_anew_for_new_weights():
    model = tiny.tiny(dataclasses.replace(GQA, hidden=40))
    flat, before = model.flat_decoder, Session(model).prefill(IDS).logits
    assert model.flat_decoder is flat and Session(model).params.flat_decoder is flat
    scale = model.decoder.norm.scale
    old = scale.get_value()
    scale.set_value(2 * old)
    try:
        np.testing.assert_allclose(
            np.asarray(Session(model).prefill(IDS).logits), 2 * np.asarray(before), rtol=1e-5
        )
    finally:
        scale.set_value(old)
    copied = copy.deepcopy(model)
    assert copied.flat_decoder is not model.flat_decoder
    np.testing.assert_array_equal(
        np.asarray(Session(copied).prefill(IDS).logits), np.asarray(before)
    )


def apart(cache):
    """Every segment holds positions of its own text, each once."""
    for part in segments(cache):
        assert len(set(part.pos.tolist())) == len(part.pos) and part.pos.min() >= 0
        assert part.pos.max() < int(cache.seen[part.sequence])


@pytest.mark.parametrize(
    ("policy", "donate"),
    [(H2O(budget=16), False), (jaxkv.D2O(budget=16, merge=None), True)],
    ids=("H2O", "D2O"),
)
def test_what_was_read_without_room_is_cut_back_before_tokens_are_drawn(policy, donate):
    model = tiny.tiny(GQA)
    session, more = Session(model, policy), tiny.prompts(5, (90, 70))
    cache = session.prefill(IDS, new=8)
    grown = session.extend(cache, more, donate=donate)
    assert (grown.kept > np.asarray(grown.limit)).any()
    drawn, tokens = session.sample(grown, 12, donate=donate)
    apart(drawn)
    assert (drawn.kept <= np.asarray(drawn.limit)).all()
    ready = session.extend(session.prefill(IDS, new=8), more, new=12)
    np.testing.assert_array_equal(tokens, session.sample(ready, 12, donate=donate)[1])
    one = session.extend(session.prefill(IDS, new=8), [[3], [4]], donate=True)
    for _ in range(3):
        one, _ = session.sample(one, 1, donate=True)
        apart(one)


@pytest.mark.parametrize(
    "policy", [FullKV(), OmniKV(filter_layers=(0,), adjacent=0, budget=12, offload=True)]
)
def test_logits_behind_an_end_are_those_of_the_last_row(policy):
    session = Session(tiny.tiny(GQA), policy)
    cache = session.prefill(IDS)
    _, free = session.sample(cache, 8)
    only_first = [token for token in free[0].tolist() if token not in free[1].tolist()]
    assert only_first, "both sequences sample the same tokens: give other prompts"
    ended, tokens = session.sample(cache, 8, eos=only_first[:1])
    stop = free[0].tolist().index(only_first[0])
    assert tokens[0].tolist() == [*free[0, : stop + 1].tolist(), *[-1] * (7 - stop)]
    np.testing.assert_array_equal(tokens[1], free[1])
    kept = [row[:count].tolist() for row, count in zip(tokens, (stop, 8), strict=True)]
    if not kept[0]:
        kept[0] = [0]
        expected = np.asarray(cache.logits)[0]
    else:
        expected = np.asarray(session.extend(cache, kept).logits)[0]
    np.testing.assert_allclose(np.asarray(ended.logits)[0], expected, atol=1e-4)
    assert ended.seen.tolist() == [37 + stop, 21 + 8]


def test_samples_need_a_key():
    model = tiny.tiny(GQA)
    plain, keyed, hot = Session(model), Session(model, key=3), jaxkv.Sampling(temperature=2.0)
    cache = plain.prefill(IDS)
    with pytest.raises(ValueError, match="key=None"):
        plain.sample(cache, 4, sampling=hot)
    same = [keyed.sample(cache, 12, sampling=hot)[1] for _ in range(2)]
    np.testing.assert_array_equal(*same)
    np.testing.assert_array_equal(plain.sample(cache, 12, sampling=hot, key=3)[1], same[0])
