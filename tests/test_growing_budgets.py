"""Budgets that are a share of all tokens seen so far: entries by an own count, slots, meshes, saves, plans."""

import dataclasses

import numpy as np
import pytest
import slot_runs
import tiny
from meshes import answers, mesh_of, model_of, prompts

import jaxkv
from jaxkv.engine.slots import Slots

EVERY, SHARE, NEW = 8, 0.5, 45
KNORM = jaxkv.KNorm(budget=SHARE, every=EVERY, grows=True)
SNAPKV = jaxkv.SnapKV(budget=SHARE, window=6, sinks=2, every=EVERY, grows=True)
# Heads that compete, layers that compete, layers of unequal budgets.
POLICIES = {
    "adakv": jaxkv.AdaKV(base=SNAPKV),
    "global": jaxkv.GlobalBudget(base=KNORM),
    "pyramidkv": jaxkv.PyramidKV(budget=SHARE, window=4, every=EVERY, grows=True),
}
LENGTHS = (61, 37, 50, 21)


def count_entries(length, new):
    """Entries per kv head after a prompt and `new` tokens: compressed again as soon as there are 8 too many."""
    held = limit = length // 2
    for seen in range(length + 1, length + new + 1):
        # The token before this one was appended; compression comes before the next.
        if held - limit >= EVERY:
            held = limit = (seen - 1) // 2
        held += 1
    return held


@pytest.mark.parametrize("name", POLICIES)
def test_a_cache_holds_the_share_of_what_was_seen(name):
    options = {"policy": POLICIES[name], "max_new_tokens": NEW, "stop_at_eos": False}
    out = jaxkv.generate(model_of(2), prompts(5, LENGTHS), progress=False, **options)
    expected = [count_entries(length, NEW) for length in LENGTHS]
    assert out.cache.kept.mean(axis=(0, 2)).tolist() == expected
    assert min(expected) > 21 // 2 + EVERY


def test_entries_are_those_of_the_largest_scores():
    """Keys of the lowest layer follow from tokens alone, so that KNorm's choice can be made by hand."""
    model = tiny.tiny(tiny.TWO_LAYERS)
    ids = [np.random.default_rng(2).permutation(tiny.VOCAB)[:60].tolist()] * 2
    full = jaxkv.Session(model, jaxkv.FullKV()).prefill([text[:50] for text in ids])
    norms = np.full((2, 50), np.nan)
    for layer, row, head, k, _, pos in tiny.segments(full):
        if (layer, row) == (0, 0):
            norms[head, pos] = np.linalg.norm(np.asarray(k, np.float64), axis=-1)
    session = jaxkv.Session(model, KNORM)
    cache = session.prefill([text[:20] for text in ids], new=31)
    for at in range(20, 50):
        cache = session.extend(cache, [text[at : at + 1] for text in ids], new=1)
    for head in range(2):
        held = np.argsort(norms[head, :20], kind="stable")[:10].tolist()
        limit = 10
        for seen in range(20, 50):
            held.append(seen)
            if len(held) - limit >= EVERY:
                limit = (seen + 1) // 2
                held = sorted(held, key=lambda at: norms[head, at])[:limit]
        assert sorted(held) == cache.positions(0, head)[0].tolist()


def test_slots():
    slot_runs.check(model_of(2), POLICIES["global"], slot_runs.requests(1, 9))


def test_slots_have_places_for_the_share_of_prompt_and_answer():
    session = jaxkv.Session(model_of(2), KNORM)
    short, long = (
        Slots(session, count=1, max_prompt=64, max_question=0, max_new_tokens=new, start=False)
        for new in (16, 384)
    )
    assert min(long.shape.rows) >= 2 * (64 + 384) // 2 > max(short.shape.rows)


def test_meshes_and_saved_caches_go_on_alike(tmp_path):
    of, policy = model_of(4), jaxkv.AdaKV(base=dataclasses.replace(SNAPKV, every=3))
    one, other = (
        answers(model, policy, prompts(5, LENGTHS), tmp_path / name)
        for name, model in (("one", of), ("mesh", of.on(mesh_of(2, 2))))
    )
    assert one == other


def test_a_plan_has_the_entries_of_the_whole_text():
    prompt, answer = 4096, 4096
    sizes = {
        grows: jaxkv.plan(
            "smollm2-135m-instruct",
            context=prompt,
            new=answer,
            policy=jaxkv.KNorm(budget=0.25, every=128, grows=grows),
            gpus="h100x1",
        )
        for grows in (False, True)
    }
    grown = sizes[True].sizes.grown - sizes[False].sizes.grown
    # 30 layers of 3 kv heads of 64 channels in 16 bits, with positions.
    assert grown >= 30 * 3 * (answer // 4) * (2 * 2 * 64 + 4)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: jaxkv.KNorm(budget=0.5, grows=True), "grows=True: it changes how"),
        (lambda: jaxkv.KNorm(budget=64, every=8, grows=True), "grows=True: a share of the tokens"),
        (
            lambda: jaxkv.CAKE(budget=0.5, grows=True, every=8),
            "grows=True: .* divides the prompt's budget",
        ),
        (lambda: jaxkv.KNorm(budget=0.5, every=8, grows="yes"), "grows='yes'"),
        (lambda: jaxkv.FullKV(every=8, grows=True), "every=8"),
        (
            lambda: jaxkv.compress(*np.zeros((2, 1, 1, 16, 8), np.float32), policy=KNORM),
            "policy=.*the budget grows",
        ),
    ],
)
def test_what_does_not_grow_is_rejected(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_rolling_positions_end_with_the_model():
    """A model of 512 positions, and half of 1,100 tokens."""
    policy = jaxkv.StreamingLLM(budget=0.5, rolling_positions=True, every=EVERY, grows=True)
    session = jaxkv.Session(model_of(2), policy)
    ids = [[*range(60)] * 5]
    for cache in (None, session.prefill(ids)):
        options = {"policy": policy} if cache is None else {"cache": cache}
        asked = ids if cache is None else [[5]]
        with pytest.raises(ValueError, match="^max_new_tokens=800: 55[0-9] entries would be kept"):
            jaxkv.generate(model_of(2), asked, max_new_tokens=800, **options)


def test_exports_reject_growing_budgets(tmp_path):
    with pytest.raises(ValueError, match="the budget grows with the answer: leave grows out"):
        jaxkv.export(model_of(2), tmp_path / "out", policy=KNORM, lengths=64, new=16)
    assert not (tmp_path / "out").exists()
