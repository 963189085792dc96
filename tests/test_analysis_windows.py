"""Figures of models with window layers: of the other layers alone, with their indices in the model."""

import dataclasses

import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv.analysis import budgets, filter_layers
from jaxkv.analysis.choosing import grid, kept_rows
from jaxkv.analysis.density import DensityMeasure
from jaxkv.analysis.measuring import measured
from jaxkv.analysis.recall import RecallMeasure
from jaxkv.analysis.retained import RetainedMeasure
from jaxkv.analysis.similarity import SimilarityMeasure
from jaxkv.evals.visible import visible_attention
from jaxkv.models.values import LayerSpec
from jaxkv.policies import VarianceLayers
from jaxkv.text.prompts import encode

PLAIN = tiny.shape(layers=6, kv_heads=2, group=2, dim=16)
# Windows that hide nothing, and windows that hide most.
AS_IF, NEAR = (
    dataclasses.replace(PLAIN, kinds=(LayerSpec(window=width), LayerSpec())) for width in (4096, 8)
)
WHOLE, TEXTS = (1, 3, 5), tiny.prompts(0, (48, 30))


def test_figures_are_those_of_the_layers_without_a_window():
    """Of a model whose windows hide nothing: what the same layers are in a model without windows."""

    def figures(model):
        of_policies = grid(model, {"snapkv": jaxkv.SnapKV(window=4)}, [12])
        measures = [
            SimilarityMeasure(queries=4),
            DensityMeasure(bins=4),
            RetainedMeasure(),
            RecallMeasure(of_policies),
        ]
        return measured(model, TEXTS, measures, following=4)

    plain, found = (figures(tiny.tiny(config)) for config in (PLAIN, AS_IF))
    at = np.asarray(WHOLE)
    for name, index, one, other in (
        ("mass", np.ix_(at, at), plain[0], found[0]),
        ("variance", at, plain[1], found[1]),
        ("maps", at, plain[1], found[1]),
        ("mass", at, plain[2], found[2]),
        ("recall", np.index_exp[:, :, :, at], plain[3], found[3]),
    ):
        np.testing.assert_allclose(
            getattr(other, name), getattr(one, name)[index], rtol=1e-4, atol=1e-6
        )
    assert {figure.layers for figure in found} == {WHOLE} and {
        figure.layers for figure in plain
    } == {tuple(range(6))}
    assert [each["layer"] for each in found[1].records()] == list(WHOLE)
    assert [each["layer"] for each in found[0].records()] == [1, 3]


def test_rows_that_are_counted_are_those_that_caches_hold():
    model, table = tiny.tiny(NEAR), np.random.default_rng(0).uniform(0.1, 1.0, (6, 2))
    policies = [
        jaxkv.AdaKV(base=jaxkv.SnapKV(budget=12, window=4)),
        jaxkv.HeadKV(scores=tuple(map(tuple, table.tolist())), budget=12, window=4),
        jaxkv.D2O(budget=20, allocation=VarianceLayers(dense_layers=(-1,)), merge=None),
    ]
    prompt = encode(TEXTS[0], model.text, model.config, raw=True, close=False)
    for policy, mask in kept_rows(model, prompt, policies).items():
        held = jaxkv.Session(model, policy).prefill([TEXTS[0]]).holds(0, len(TEXTS[0]))
        np.testing.assert_array_equal(mask, held[np.asarray(WHOLE)])
    figure = budgets(model, TEXTS, policies=policies[:2], budgets=[12])
    assert figure.rows.shape[2] == 3 and (figure.totals == 12 * 3 * 2).all()


def test_filter_layers_are_taken_by_omnikv(tmp_path):
    model = tiny.tiny(NEAR)
    found = filter_layers(model, TEXTS, m=1, adjacent=0, queries=4)
    # Of three layers one may read everything: the lowest.
    assert found.filters == (1,) and found.similarity.mass.shape == (3, 3)
    policy = jaxkv.OmniKV(filter_layers=found.filters, adjacent=0, budget=16)
    drawn = jaxkv.generate(model, TEXTS[0], policy=policy, max_new_tokens=4, stop_at_eos=False)
    assert drawn.stats.filter_layers == (1,)
    found.similarity.picture(tmp_path / "map.png", found.filters)
    with pytest.raises(ValueError, match="filters=2: give some of 1, 3, 5"):
        found.similarity.picture(tmp_path / "map.png", (2,))


def test_what_is_refused():
    near = dataclasses.replace(NEAR, kinds=(LayerSpec(window=8),))
    for config, told in (
        (near, "every layer has a window, and none attends to the whole text"),
        (dataclasses.replace(NEAR, sink_logits=True), "attention with sinks is not analysed"),
    ):
        with pytest.raises(ValueError, match=told):
            filter_layers(tiny.tiny(config), TEXTS, m=1, most_whole=1)
    with pytest.raises(ValueError, match="some layers have windows: this looks at models"):
        visible_attention(
            tiny.tiny(NEAR), jaxkv.SnapKV(budget=12, window=4), TEXTS[0][:-4], TEXTS[0][-4:]
        )
