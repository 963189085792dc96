"""Scores averaged over recompressions: by an own count, without an effect on constant scores, slots, meshes, saves."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import slot_runs
import tiny
from meshes import answers, mesh_of, model_of, positions, prompts

import jaxkv
from jaxkv import CustomPolicy
from jaxkv.policies import Scorer

BUDGET, EVERY, WEIGHT = 12, 4, 0.7
LENGTHS, NEW = (40, 23), 20
SNAPKV = jaxkv.SnapKV(budget=24, window=6, every=EVERY, smoothing=0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waves(Scorer):
    """Scores that differ with each compression: they depend on all entries that are held."""

    def score_entries(self, seen):
        inside = jnp.arange(seen.k.shape[2]) < seen.length[:, None, None]
        total = jnp.where(inside, seen.k[..., 1], 0).sum(axis=-1, keepdims=True)
        return jnp.sin(3 * seen.k[..., 0] * total)


def test_scores_are_means_of_old_and_new_ones():
    """Keys of the lowest layer follow from tokens alone, so that all choices can be made by hand."""
    model = tiny.tiny(tiny.TWO_LAYERS)
    policy = CustomPolicy(scorer=Waves(), budget=BUDGET, every=EVERY, smoothing=WEIGHT)
    texts = [
        np.random.default_rng(at).permutation(tiny.VOCAB)[: n + NEW] for at, n in enumerate(LENGTHS)
    ]
    full = jaxkv.Session(model, jaxkv.FullKV()).prefill([text.tolist() for text in texts])
    keys = {}
    for layer, row, head, k, _, pos in tiny.segments(full):
        if layer == 0:
            keys[row, head] = np.asarray(k, np.float64)[np.argsort(pos), :2]
    session = jaxkv.Session(model, policy)
    cache = session.prefill(
        [text[:n].tolist() for text, n in zip(texts, LENGTHS, strict=True)], new=NEW
    )
    for at in range(NEW):
        asked = [[int(text[n + at])] for text, n in zip(texts, LENGTHS, strict=True)]
        cache = session.extend(cache, asked, new=1)
    differ = 0
    for row, head in np.ndindex(2, 2):
        chosen = {weight: choose(keys[row, head], LENGTHS[row], weight) for weight in (WEIGHT, 0.0)}
        assert cache.positions(0, head)[row].tolist() == chosen[WEIGHT]
        differ += chosen[WEIGHT] != chosen[0.0]
    assert differ >= 3


def choose(key, length, weight):
    """Positions that are held in the end, by dictionaries of scores."""

    def score(held):
        total = sum(key[at, 1] for at in held)
        return {at: np.sin(3 * key[at, 0] * total) for at in held}

    scores = score(range(length))
    held = sorted(scores, key=lambda at: (-scores[at], at))[:BUDGET]
    scores = {at: scores[at] for at in held}
    for seen in range(length, length + NEW):
        held.append(seen)
        if len(held) - BUDGET >= EVERY:
            for at, new in score(held).items():
                scores[at] = weight * scores.get(at, new) + (1 - weight) * new
            held = sorted(held, key=lambda at: (-scores[at], at))[:BUDGET]
            scores = {at: scores[at] for at in held}
    return sorted(held)


def test_scores_that_do_not_change_are_their_own_mean():
    found = []
    for smoothing in (0.0, 0.9):
        policy = jaxkv.KNorm(budget=16, every=EVERY, smoothing=smoothing)
        session = jaxkv.Session(model_of(2), policy)
        cache, tokens = session.sample(session.prefill(prompts(5, LENGTHS), new=NEW), NEW)
        found.append((tokens.tolist(), positions(cache)))
    assert found[0] == found[1]


def test_entries_of_the_last_queries_have_no_score():
    """SnapKV's window judges the entries before it; new tokens' entries have none, either."""
    session = jaxkv.Session(model_of(2), SNAPKV)
    cache = session.prefill(prompts(5, LENGTHS), new=NEW)
    cache, _ = session.sample(cache, 3, new=NEW)
    for pool in cache.pools:
        for row, length in enumerate(LENGTHS):
            held = np.asarray(pool.pos[row]) >= 0
            unknown = np.asarray(pool.pos[row])[held & np.isnan(np.asarray(pool.score[row]))]
            assert sorted(set(unknown.tolist()))[-9:] == [*range(length - 6, length + 3)]


def test_slots():
    slot_runs.check(model_of(2), jaxkv.GlobalBudget(base=SNAPKV), slot_runs.requests(1, 7))


def test_meshes_and_saved_caches_go_on_alike(tmp_path):
    of, policy = model_of(4), jaxkv.AdaKV(base=SNAPKV)
    one, other = (
        answers(model, policy, prompts(5, LENGTHS), tmp_path / name)
        for name, model in (("one", of), ("mesh", of.on(mesh_of(2, 2))))
    )
    assert one == other


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: jaxkv.KNorm(budget=8, smoothing=0.5), "smoothing=0.5: it changes how"),
        (
            lambda: jaxkv.KNorm(budget=8, every=4, smoothing=1.0),
            "smoothing=1.0: give a weight below 1",
        ),
        (lambda: jaxkv.KNorm(budget=8, every=4, smoothing=True), "smoothing=True"),
        (
            lambda: jaxkv.H2O(budget=8, mode="prefill", every=4, smoothing=0.5),
            "smoothing=0.5: .*scores of its own",
        ),
        (lambda: jaxkv.CAKE(budget=64, every=4, smoothing=0.5), "leave smoothing out"),
    ],
)
def test_what_cannot_be_averaged_is_rejected(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
