"""Rows dropped below a threshold of scores: KVzap's and Fast KVzip's gates, under a budget that bounds their number."""

import dataclasses

import jax.numpy as jnp
import meshes
import numpy as np
import oracles as o
import pytest
import slot_runs
import test_gates as gates
import tiny
from policy_table import WINDOW
from test_replay import hidden

import jaxkv
from jaxkv import AdaKV, CriticalKV, FastKVzip, GlobalBudget
from jaxkv.policies import AdaptiveHeads, ScoredEntries, ThresholdHeads, TwoStageHeads

CONFIG, LENGTHS, BUDGET = gates.CONFIG, gates.LENGTHS, 20
# Near the middle of a random gate's scores: some heads have more rows above it than the budget, some fewer.
TAU = 0.2


def zap(config=CONFIG, **options):
    return gates.zap(config, **{"budget": BUDGET, "threshold": TAU, **options})


def forced_of(n):
    return o.forced_positions(n, 2, WINDOW, ())


@pytest.mark.parametrize("over_layers", (False, True))
def test_prefill_keeps_the_oracles_rows_and_counts_those_cut(over_layers):
    model, ids, tensors = tiny.tiny(CONFIG), tiny.prompts(3, LENGTHS), gates.zap_tensors(CONFIG)
    cache, _, needed = tiny.run(model, ids, GlobalBudget(base=zap()) if over_layers else zap())
    assert cache.nbytes == needed.cache_bytes
    kept, cut, fewer = tiny.kept(cache), np.asarray(cache.tally.cut)[: len(ids)], 0
    for row, each in enumerate(ids):
        scores = [
            o.kvzap_scores(tensors, layer, hidden(model, layer, each))
            for layer in range(CONFIG.layers)
        ]
        heads, n = [head for layer in scores for head in layer], len(each)
        groups, rows = (
            ([heads], len(heads) * BUDGET) if over_layers else ([[head] for head in heads], BUDGET)
        )
        picked = [
            o.threshold_select(group, min(rows, len(group) * n), TAU, forced_of(n), n)
            for group in groups
        ]
        assert min(gap for _, gap, _ in picked) > o.MIN_GAP
        expected = [head for group, _, _ in picked for head in group]
        assert [head for layer in kept for head in layer[row]] == expected
        left = np.asarray([count for _, _, counts in picked for count in counts]).reshape(
            CONFIG.layers, -1
        )
        np.testing.assert_array_equal(cut[row], left.sum(axis=0))
        fewer += sum(len(head) < min(n, BUDGET) for head in expected)
    # Both happen: heads with room left, and heads without headroom above the threshold.
    assert fewer > 0 and cut.sum() > 0 and (over_layers or not cut[-1].any())


def test_fast_kvzip_keeps_the_oracles_rows():
    model, ids, tau = tiny.tiny(CONFIG), tiny.prompts(3, LENGTHS), 0.3
    policy = FastKVzip(gate=gates.fast_file(CONFIG), budget=0.4, threshold=tau, sinks=2, recent=0.2)
    cache, _, _ = tiny.run(model, ids, policy)
    kept, cut, tensors = tiny.kept(cache), np.asarray(cache.tally.cut), gates.fast_tensors(CONFIG)
    for row, each in enumerate(ids):
        n, first = len(each), len(each) - int(0.2 * len(each))
        rows = CONFIG.layers * CONFIG.kv_heads * o.resolve_budget(0.4, n)
        heads = [
            head
            for layer in range(CONFIG.layers)
            for head in o.fastkvzip_scores(tensors, layer, hidden(model, layer, each))
        ]
        for own in heads:
            own[first:] = 1.0
        always_kept = [j for j in range(n) if j < 2 or j >= first]
        expected, gap, left = o.threshold_select(heads, rows, tau, always_kept, n)
        assert gap > o.MIN_GAP and cut[row].sum() == sum(left)
        assert [head for layer in kept for head in layer[row]] == expected
    assert cut.sum() > 0


def test_drawing_keeps_the_oracles_rows():
    """A prompt below the budget loses rows, and so do new tokens every `every`; the first layer's scores are known."""
    config, n, steps, every = tiny.TWO_LAYERS, 18, 60, 16
    model, tensors, (ids,) = tiny.tiny(config), gates.zap_tensors(config), tiny.prompts(6, (n,))
    session = jaxkv.Session(model, zap(config, every=every))
    cache, drawn = session.sample(session.prefill([ids], new=steps), steps, new=steps)
    scores = o.kvzap_scores(tensors, 0, hidden(model, 0, [*ids, *drawn[0].tolist()]))
    stops, found = range(n + every, n + steps, every), tiny.kept(cache)[0][0]
    for head, own in enumerate(scores):
        (kept,), gap, _ = o.threshold_select([own], min(BUDGET, n), TAU, forced_of(n), n)
        for seen in stops:
            there = sorted({*kept, *range(seen - every, seen)})
            must = [at for at, j in enumerate(there) if j < 2 or j >= seen - WINDOW]
            (best,), own_gap, _ = o.threshold_select([own[there]], BUDGET, TAU, must, len(there))
            kept, gap = [there[at] for at in best], min(gap, own_gap)
        assert gap > o.MIN_GAP
        assert [j for j in found[head] if j < stops[-1]] == kept


def test_bases_of_other_head_budgets_keep_the_threshold():
    """Under a budget of the whole prompt all policies keep the same rows: those from the threshold up."""
    model, ids = tiny.tiny(CONFIG), tiny.prompts(3, LENGTHS)
    alone = tiny.kept(tiny.run(model, ids, zap(budget=1.0))[0])
    assert min(len(head) for head in alone[0][0]) < LENGTHS[0]
    for policy in (AdaKV(base=zap(budget=1.0)), CriticalKV(base=AdaKV(base=zap(budget=1.0)))):
        cache, _, _ = tiny.run(model, ids, policy)
        assert tiny.kept(cache) == alone and not np.asarray(cache.tally.cut).any()
    assert policy.build_policy_parts().heads == ThresholdHeads(
        threshold=TAU, budgets=TwoStageHeads(budgets=AdaptiveHeads())
    )


def test_results_tell_what_the_budget_cut():
    model, ids = tiny.tiny(CONFIG), tiny.prompts(3, LENGTHS)
    drawn = {"max_new_tokens": 12, "stop_at_eos": False}
    first = jaxkv.generate(model, ids, policy=zap(every=4), **drawn)
    assert first.stats.evicted_above_threshold == int(first.cache.tally.cut[: len(ids)].sum()) > 0
    # What was cut before is not told once more of the answer on top.
    again = jaxkv.generate(model, [[1, 2, 3]] * 3, cache=first.cache, **drawn)
    assert (
        again.stats.evicted_above_threshold
        == int(again.cache.tally.cut[: len(ids)].sum()) - first.stats.evicted_above_threshold
    )
    # Each sequence on top of one cache has what that one had cut.
    one = jaxkv.Session(model, zap(every=4)).prefill(ids[:1])
    thrice = jaxkv.generate(model, [[1, 2, 3]] * 3, cache=one, **drawn)
    had = 3 * int(one.tally.cut.sum())
    assert (
        thrice.stats.evicted_above_threshold == int(thrice.cache.tally.cut[:3].sum()) - had
        and had > 0
    )


def test_a_threshold_that_no_row_reaches():
    """Segments without a row are read, asked and recompressed like others; a low threshold changes nothing."""
    config = tiny.TWO_LAYERS
    model, ids = tiny.tiny(config), tiny.prompts(3, LENGTHS[:2])
    drawn = {"max_new_tokens": 9, "stop_at_eos": False}

    def policy(threshold):
        base = dataclasses.replace(zap(config, every=3, threshold=threshold), sinks=0, window=0)
        return GlobalBudget(base=base)

    none = jaxkv.generate(model, ids, policy=policy(1e30), **drawn)
    assert int(none.cache.kept.max()) <= 3
    assert none.stats.evicted_above_threshold == 0 and none.cache.tally.cut is not None
    assert np.isfinite(
        np.asarray(none.cache.logits if none.cache.logits is not None else 0.0)
    ).all()
    asked = jaxkv.generate(model, [[4, 5]] * 2, cache=none.cache, **drawn)
    assert all((each.tokens >= 0).all() for each in asked)
    low, without = (jaxkv.prefill(model, ids, policy=policy(tau)) for tau in (-1e30, None))
    assert tiny.kept(low) == tiny.kept(without)
    assert np.asarray(low.tally.cut).any() and without.tally.cut is None


def test_meshes():
    config = meshes.model_of(2).config
    make = lambda budget, **kw: zap(config, budget=budget, **kw)  # noqa: E731
    row = dataclasses.replace(gates.row_of(config), name="tau", make=make)
    meshes.check_row(row, 2, every=3)


def test_cut_rows_on_a_mesh():
    model = meshes.model_of(4)
    ids, policy = tiny.prompts(5, (61, 37)), GlobalBudget(base=zap(model.config), capacity=4.0)
    here = jaxkv.Session(model, policy).prefill(ids)
    there = jaxkv.Session(model.on(meshes.mesh_of(2, 4)), policy).prefill(ids)
    np.testing.assert_array_equal(np.asarray(there.tally.cut), np.asarray(here.tally.cut))
    assert np.asarray(here.tally.cut).any()
    np.testing.assert_array_equal(
        np.asarray(jaxkv.reshard(there, None).tally.cut), np.asarray(here.tally.cut)
    )


def test_slots():
    config = tiny.TWO_LAYERS
    given = slot_runs.requests(1, 6, shortest=33)
    slot_runs.check(tiny.tiny(config), zap(config, every=4), given)


def test_saved_caches_know_what_was_cut(tmp_path):
    model, ids, policy = tiny.tiny(CONFIG), tiny.prompts(3, LENGTHS), zap(every=4)
    cache = jaxkv.Session(model, policy).prefill(ids)
    cache.save(tmp_path / "cache")
    loaded = jaxkv.load_cache(tmp_path / "cache", policy=policy)
    assert loaded.policy == policy and tiny.kept(loaded) == tiny.kept(cache)
    np.testing.assert_array_equal(loaded.tally.cut, cache.tally.cut)


def test_a_score_equal_to_the_threshold_stays():
    scores = jnp.asarray([[[0.5, 0.25, 0.75, 0.5]]], jnp.float32)
    none = jnp.zeros(1, jnp.int32)
    rows = ScoredEntries(scores, jnp.ones((1, 1, 4), bool), base=none, always_kept=none)
    chosen, cut = ThresholdHeads(threshold=0.5).apply_score_threshold(
        jnp.asarray([[[True, True, False, False]]]), rows
    )
    assert chosen.tolist() == [[[True, False, False, False]]] and cut.tolist() == [[2]]
