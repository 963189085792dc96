"""Batches that a mesh's groups do not divide: copies of the last prompt fill them, and nobody sees those."""

import numpy as np
import pytest
from meshes import BUDGET, NEW, mesh_of, model_of, positions, prompts, roomy

import jaxkv
from jaxkv.engine.headroom import count_steps_until_full

OPTIONS = {"max_new_tokens": NEW, "stop_at_eos": False, "progress": False}
LENGTHS = (61, 23, 37)
SEEN = ("prompt_tokens", "new_tokens", "full_bytes", "kept", "decode_steps")


def told(made):
    """What a user sees of a generation."""
    cache = made.cache
    tokens = [each.tokens for each in made]
    seen = {name: getattr(made.stats, name) for name in SEEN}
    shapes = (cache.batch, cache.kept.shape, cache.segment_first_rows.shape, cache.full_nbytes)
    return (
        [each.tolist() for each in tokens],
        positions(cache),
        seen,
        shapes,
        repr(cache).split(" MB;")[0][:40],
    )


def models():
    """On one device, and on four groups of two."""
    return model_of(4), model_of(4).on(mesh_of(4, 2))


def test_three_prompts_for_four_groups():
    """Answers and what is kept of them are those of one device."""
    policy, both = roomy("h2o"), []
    for model in models():
        made = jaxkv.generate(model, prompts(5, LENGTHS), policy=policy, **OPTIONS)
        both.append(told(made))
    assert both[0] == both[1]
    assert made.cache.padding == 1 and len(made.cache.seen) == 4


def test_one_cache_for_three_questions():
    """One prompt for four groups, an answer, and three questions on top of that: copied from what has gone on."""
    both = []
    for model in models():
        made = jaxkv.generate(model, prompts(5, (50,))[0], policy=roomy("h2o"), **OPTIONS)
        more = jaxkv.generate(model, prompts(6, (5, 19, 8)), cache=made.cache, **OPTIONS)
        both.append((told(made), told(more)))
    assert both[0] == both[1]
    assert made.cache.padding == 3 and more.cache.padding == 1
    with pytest.raises(ValueError, match=r"prompt='2 prompts': the cache holds 3"):
        jaxkv.generate(model, prompts(6, (5, 19)), cache=more.cache, **OPTIONS)


def test_ends_and_draws_of_a_filled_batch():
    """Sequences that have ended, and random samples: each sequence's keys are those of its own place."""
    ids, sampling = prompts(6, LENGTHS), jaxkv.Sampling(temperature=0.9)
    out = []
    for model in models():
        session = jaxkv.Session(model, jaxkv.SnapKV(budget=BUDGET, window=8))
        cache = session.prefill(ids, new=NEW)
        free, drawn = session.sample(cache, NEW, sampling=sampling, key=11)
        end = int(session.sample(cache, NEW)[1][0, 2])
        ended, greedy = session.sample(cache, NEW, eos=(end,))
        drawing = session.start_decode_loop(free, new=NEW)
        drawing.sample_tokens(4)
        drawing.end_sequences(np.asarray([True, False, False]))
        drawing.roll_back_tokens(np.asarray([2, 0, 0]))
        back = drawing.finish_sampling()
        out.append(
            (
                drawn.tolist(),
                greedy.tolist(),
                positions(ended),
                positions(back),
                drawing.ended_sequences.tolist(),
            )
        )
    assert out[0] == out[1]
    assert greedy.shape[0] == 3 and (greedy[0] == -1).any()


def test_what_fills_the_groups_stands_still():
    """Copied three rows beyond its budget, it does not have the others stop after every token."""
    fit = []
    for model in models():
        session = jaxkv.Session(model, roomy("snapkv", every=4))
        cache, _ = session.sample(session.prefill(prompts(5, (50,)), new=3), 3)
        asked = session.extend(cache, prompts(6, (5, 19, 8)))
        fit.append(count_steps_until_full(session.recompress_sequences(asked, headroom=4)))
    assert fit == [4, 4]


def test_what_fills_the_groups_is_no_kept_entry():
    """Bytes are those that the devices really hold."""
    options = {"policy": jaxkv.SnapKV(budget=BUDGET, window=8), "progress": False}
    alone, there = (jaxkv.prefill(model, prompts(5, LENGTHS), **options) for model in models())
    assert there.nbytes == alone.nbytes * 4 // 3
    assert there.kept_nbytes == alone.kept_nbytes and there.full_nbytes == alone.full_nbytes
