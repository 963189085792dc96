"""What analysis measures, against float64 loops over the same queries, keys and values; `jaxkv filters`."""

import dataclasses
import functools
import itertools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
import tiny
from looking import CONFIG, HEADS, TEXTS, shown, weights
from matplotlib.figure import Figure

import jaxkv
from jaxkv import (
    H2O,
    AdaKV,
    CriticalKV,
    FullKV,
    PyramidKV,
    RandomKV,
    SnapKV,
    analysis,
    checkpoints,
)
from jaxkv.checkpoints import named_models
from jaxkv.cli import main, models
from jaxkv.evals import COLOURS, TwoStage
from jaxkv.evals.retrieval import measure_visible_attention
from jaxkv.models.values import LayerSpec
from jaxkv.policies.reads import WHOLE, find_unfiltered_layers, map_layers_to_filters
from jaxkv.policies.wrapper import replace_policy_budget

DEEP = tiny.shape(layers=6, kv_heads=2, group=2, dim=16)
NAME = "smollm2-135m-instruct"
FOLLOWING, LEAST, BINS, QUERIES, SHARES = 5, 0.05, 4, 6, (0.1, 0.5, 1.0)
SNAP = SnapKV(window=4)
# Layers with budgets of their own and heads that compete, sums over all queries; what a mesh compiles for comes last.
POLICIES = (
    FullKV(),
    CriticalKV(base=AdaKV(base=PyramidKV(window=4))),
    H2O(),
    AdaKV(base=SNAP, alpha=0.0),
)
BUDGETS = (16, 0.5)


@functools.cache
def kept(policy, budget, row):
    """Positions that a cache holds behind a text's prompt, by layer and head."""
    prompt = [TEXTS[row][:-FOLLOWING]]
    cache, _, _ = tiny.run(tiny.tiny(CONFIG), prompt, replace_policy_budget(policy, budget))
    return [layer[0] for layer in tiny.kept(cache)]


@functools.cache
def measured(mesh=None):
    """All measurements by name; on a mesh of the last policy."""
    model = tiny.tiny(CONFIG) if mesh is None else tiny.tiny(CONFIG).on(mesh)
    policies = POLICIES if mesh is None else POLICIES[-1:]
    of = {"policies": policies, "budgets": BUDGETS, "following": FOLLOWING}
    return {
        "density": analysis.density(model, TEXTS, least=LEAST, bins=BINS),
        "retained": analysis.retained(model, TEXTS, shares=SHARES, queries=QUERIES),
        "similarity": analysis.similarity(model, TEXTS, share=0.2, queries=QUERIES),
        "budgets": analysis.budgets(model, TEXTS, **of),
        "recall": analysis.recall(model, TEXTS, **of),
        "loss": analysis.eviction_loss(model, TEXTS, **of),
    }


def test_budgets_count_what_caches_hold():
    found = measured()["budgets"]
    assert found.shape == (len(POLICIES), 2, 2, 3, 2)
    for (at, policy), row in itertools.product(enumerate(POLICIES), range(2)):
        lengths = [[len(head) for head in layer] for layer in kept(policy, 16, row)]
        np.testing.assert_array_equal(found[at, 0, row], lengths, err_msg=repr(policy))
    lengths = [len(ids) - FOLLOWING for ids in TEXTS]
    sums = np.asarray([[16 * 6] * 2, [n // 2 * 6 for n in lengths]])
    np.testing.assert_array_equal(found[0].sum(axis=(2, 3)), [[n * 6 for n in lengths]] * 2)
    for each in found[1:]:
        np.testing.assert_array_equal(each.sum(axis=(2, 3)), sums)


def test_density_is_the_oracles():
    found = measured()["density"]
    for layer in range(CONFIG.layers):
        variance, dense, maps = np.zeros(HEADS), np.zeros(HEADS), np.zeros((BINS, BINS))
        for row, ids in enumerate(TEXTS):
            count, mine = len(ids), weights(row, layer)
            variance += mine.sum(axis=1).var(axis=-1, ddof=1) / 2
            mass, pairs = np.zeros((BINS, BINS)), np.zeros((BINS, BINS))
            for i in range(count):
                for j in range(i + 1):
                    large = mine[:, i, j] >= LEAST * mine[:, i].max(axis=-1)
                    dense += large / (count * (count + 1))
                    at = i * BINS // count, j * BINS // count
                    mass[at] += mine[:, i, j].mean()
                    pairs[at] += 1
            maps += mass / np.maximum(pairs, 1) / 2
        np.testing.assert_allclose(found.variance[layer], variance, rtol=1e-4)
        np.testing.assert_allclose(found.dense[layer], dense, atol=1e-6)
        np.testing.assert_allclose(found.maps[layer], maps, atol=1e-6)


def test_retained_attention_is_the_oracles():
    found = measured()["retained"]
    for layer, head in np.ndindex(CONFIG.layers, CONFIG.kv_heads):
        expected = np.zeros(len(SHARES))
        for row, ids in enumerate(TEXTS):
            by_head = weights(row, layer).reshape(CONFIG.kv_heads, CONFIG.group_size, len(ids), -1)
            order = sorted(by_head[head, :, -QUERIES:].mean(axis=(0, 1)), reverse=True)
            sizes = [max(1, math.floor(share * len(ids))) for share in SHARES]
            expected += [math.fsum(order[:size]) / 2 for size in sizes]
        np.testing.assert_allclose(found[layer, head], expected, atol=1e-6)


def test_similarity_is_the_oracles():
    expected = np.zeros((CONFIG.layers, CONFIG.layers))
    for row, ids in enumerate(TEXTS):
        for at in range(len(ids) - QUERIES, len(ids)):
            best = [weights(row, layer)[:, at].max(axis=0) for layer in range(CONFIG.layers)]
            best = [each / each.sum() for each in best]
            count = max(1, int(0.2 * (at + 1)))
            for low, high in itertools.combinations_with_replacement(range(CONFIG.layers), 2):
                order = sorted(range(at + 1), key=lambda key: -best[low][key])  # noqa: B023
                expected[low, high] += best[high][order[:count]].sum() / QUERIES / 2
    np.testing.assert_allclose(measured()["similarity"], expected, atol=1e-5)


@pytest.mark.parametrize("at", range(len(POLICIES)))
def test_recall_is_the_oracles_over_kept_positions(at):
    found = measured()["recall"]
    np.testing.assert_array_equal(found.rows, measured()["budgets"].sum(axis=(3, 4)))
    for row, layer, head in np.ndindex(len(TEXTS), CONFIG.layers, HEADS):
        count = len(TEXTS[row])
        paid = weights(row, layer)[head, count - FOLLOWING :]
        prompt, behind = paid[:, : count - FOLLOWING].sum(), paid[:, count - FOLLOWING :].sum()
        mine = paid[:, kept(POLICIES[at], 16, row)[layer][head // CONFIG.group_size]].sum()
        where = (at, 0, row, layer, head)
        assert found.recall[where] == pytest.approx(mine / prompt, abs=1e-5)
        assert found.visible[where] == pytest.approx((mine + behind) / FOLLOWING, abs=1e-5)


@pytest.mark.parametrize("at", [1, 3])
def test_eviction_loss_and_its_bound_are_the_oracles(at):
    found = measured()["loss"]
    assert (found.loss <= found.bound + 1e-3).all()
    np.testing.assert_allclose(found.loss[0], 0, atol=1e-4)
    for row, layer, step in np.ndindex(len(TEXTS), CONFIG.layers, FOLLOWING):
        now = len(TEXTS[row]) - FOLLOWING + step
        q, k, v, w_o = shown(row)[layer]
        since = list(range(len(TEXTS[row]) - FOLLOWING, now + 1))
        rows = [head + since for head in kept(POLICIES[at], 16, row)[layer]]
        given = (q[:, now], k[:, : now + 1], v[:, : now + 1], w_o, rows)
        where = (at, 0, row, layer, step)
        assert found.loss[where] == pytest.approx(o.eviction_loss(*given), rel=1e-3, abs=1e-4)
        assert found.bound[where] == pytest.approx(o.eps_bound(*given), rel=1e-4, abs=1e-4)


def test_a_model_on_a_mesh():
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    alone, split = measured(), measured(mesh)
    for name in ("density", "retained", "similarity"):
        for one, two in zip(alone[name], split[name], strict=True):
            np.testing.assert_allclose(two, one, rtol=2e-4, atol=2e-4, err_msg=name)
    np.testing.assert_array_equal(split["budgets"], alone["budgets"][-1:])
    for name in ("recall", "loss"):
        for one, two in zip(alone[name], split[name], strict=True):
            np.testing.assert_allclose(two, one[-1:], rtol=2e-4, atol=2e-4, err_msg=name)


def test_layers_with_a_window_are_left_out():
    """Of a model whose windows hide nothing: what the same layers are in a model without windows."""
    model, whole = tiny.tiny(DEEP), (1, 3, 5)
    kinds = (LayerSpec(sliding_window=4096), LayerSpec())
    windowed = tiny.tiny(dataclasses.replace(DEEP, kinds=kinds))
    one, two = (analysis.similarity(each, TEXTS, queries=4) for each in (model, windowed))
    np.testing.assert_allclose(two, one[np.ix_(whole, whole)], rtol=1e-4, atol=1e-6)
    # Of three layers one may read everything: the lowest.
    found = analysis.find_filter_layers(windowed, TEXTS, m=1, adjacent=0, queries=4)
    assert found.filters == (1,) and found.mass.shape == (3, 3)
    with pytest.raises(ValueError, match="model="):
        measure_visible_attention(windowed, SNAP, TEXTS[0][:-4], TEXTS[0][-4:])


def test_gated_outputs_have_no_eviction_loss():
    gated = tiny.tiny(dataclasses.replace(CONFIG, attention_gate=True))
    with pytest.raises(ValueError, match="params=.*gates"):
        analysis.eviction_loss(gated, TEXTS, budgets=(16,))


@pytest.mark.parametrize(("m", "adjacent", "most"), [(1, 1, None), (2, 1, 5), (2, 0, 4)])
def test_filter_layers_are_the_best_of_all_sets(m, adjacent, most):
    given = {"m": m, "adjacent": adjacent, "most_whole": most}
    found = analysis.find_filter_layers(tiny.tiny(DEEP), TEXTS[1:], queries=4, **given)
    most, scores = 2 if most is None else most, {}
    for chosen in itertools.combinations(range(5), m):
        if len(find_unfiltered_layers(chosen, adjacent, 6)) <= most:
            reads = enumerate(map_layers_to_filters(chosen, adjacent, 6))
            scores[chosen] = np.mean([found.mass[s, at] for at, s in reads if s != WHOLE])
    assert found.filters == max(scores, key=scores.get)
    assert found.carried == pytest.approx(scores[found.filters])
    jaxkv.OmniKV(filter_layers=found.filters, adjacent=adjacent).fill_model_fields(DEEP, None)


def test_a_policy_that_draws_takes_a_seed_or_a_key():
    of = {"policies": [RandomKV()], "budgets": [8], "following": 4}
    keys = (3, jax.random.key(3), 4)
    one, two, other = (
        analysis.recall(tiny.tiny(CONFIG), TEXTS, **of, key=key).recall for key in keys
    )
    np.testing.assert_array_equal(one, two)
    assert (one != other).any()


def test_attention_that_is_not_finite_is_no_measurement():
    broken = tiny.tiny(CONFIG, seed=5)
    weight = broken.decoder.blocks[1].attention.q
    before = weight[...]
    weight[...] = jnp.full_like(before, jnp.nan)
    try:
        with pytest.raises(ValueError, match="params="):
            analysis.retained(broken, TEXTS[:1])
    finally:
        weight[...] = before


def test_pictures():
    lines = {"one": (np.arange(3), np.arange(3)), "two": (np.arange(2), np.arange(2))}
    analysis.plot_lines(figure := Figure(), lines, across="x", up="y", log="x")
    assert [each.get_label() for each in figure.axes[0].get_lines()] == ["one", "two"]


# --- the manifest ----------------------------------------------------------------------------------------------------


@pytest.fixture
def own_manifests(monkeypatch, tmp_path):
    """A copy of the package's manifests, which can be written."""
    shutil.copytree(checkpoints.find_manifests_folder(), tmp_path / "manifests")
    monkeypatch.setattr(named_models, "find_data_folder", lambda: tmp_path)
    named_models._read_manifests.cache_clear()
    yield tmp_path / "manifests"
    named_models._read_manifests.cache_clear()


def test_the_named_model_ships_its_filter_layers():
    assert checkpoints.get_manifest(NAME).filter_layers == (2, 6, 19)
    assert len(find_unfiltered_layers((2, 6, 19), 1, 30)) == 8


def test_filter_layers_are_saved_whole(own_manifests):
    before = json.loads((own_manifests / f"{NAME}.json").read_text())
    checkpoints.save_filter_layers(NAME, (1, 5))
    after = json.loads((own_manifests / f"{NAME}.json").read_text())
    assert after == before | {"filter_layers": [1, 5]}
    assert checkpoints.get_manifest(NAME).filter_layers == (1, 5)
    assert sorted(path.stem for path in own_manifests.iterdir()) == sorted(
        checkpoints.list_model_names()
    )
    with pytest.raises(ValueError, match="unknown model"):
        checkpoints.save_filter_layers("nobody", (1,))


@pytest.mark.real
def test_the_command_finds_prints_and_saves(own_manifests, tmp_path, capsys, monkeypatch):
    # A setting of the whole process: switched on here, it would serve the tests that count compilations.
    monkeypatch.setattr(models, "enable_compilation_cache", lambda: None)
    text = tmp_path / "text.txt"
    text.write_text(
        "It was a bright cold day in April, and the clocks were striking thirteen. " * 12
    )
    assert main(["filters", "--text-file", str(text), "--tokens", "60", "--json", "--save"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["filters"]) == 3 and np.shape(record["similarity"]["mass"]) == (30, 30)
    assert list(checkpoints.get_manifest(NAME).filter_layers) == record["filters"]
    assert main(["filters", "--text-file", str(text), "--model", "elsewhere", "--save"]) == 2
    assert "not a named model" in capsys.readouterr().err
    assert main(["filters", "--text-file", str(tmp_path / "none.txt")]) == 2


# --- 2StageRetr ------------------------------------------------------------------------------------------------------


def test_sums_are_keys_and_answers_their_colours():
    model = tiny.tiny(CONFIG)
    made = TwoStage(count=20, seed=3).samples(model)
    for case in made + TwoStage(count=4, reason=True).samples(model):
        entries = case.context[case.context.index("{") + 1 : case.context.index("}")].split(", ")
        table = dict(entry.split(": ") for entry in entries)
        first, second = map(int, case.question.split("equation is ")[1].split(" =")[0].split(" + "))
        assert first >= 1 and second >= 1 and first + second == case.tags["key"]
        assert [int(key) for key in table] == list(range(case.tags["size"]))
        assert (table[str(case.tags["key"])],) == case.answers and case.answers[0] in COLOURS
    assert len(set(COLOURS)) == 23
    assert made == TwoStage(count=20, seed=3).samples(model)
    assert made[0] != TwoStage(count=20, seed=2).samples(model)[0]
    assert {case.tags["size"] for case in made} == set(range(40, 201, 10))
