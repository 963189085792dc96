"""KVgrad's second pass, which also runs backwards: against kvpress, on a mesh, in other models; what it rejects."""

import dataclasses

import meshes
import numpy as np
import pytest
import running
import tiny
from policy_table import REPEATED
from test_replay import peaks_of

import jaxkv
from jaxkv import KVGrad, KVzip
from jaxkv.engine.plan import plan_prefill
from jaxkv.models.values import ExpertsConfig, LayerSpec
from jaxkv.policies.scorer import PromptReplay, ReplayWeighting

# Written by golden/make_kvgrad.py.
PEER = running.archive("kvgrad.npz")
PROMPTS = [PEER[f"{index}/ids"].tolist() for index in range(2)]
TEXTS = REPEATED | {"tail": 8}
ASKED = PromptReplay(**TEXTS, weighting=ReplayWeighting.GRADIENTS)


def test_scores_and_kept_entries_are_those_of_kvpress():
    """The padded batch here, each prompt alone there. Its objective is twice ours; sinks are kept at any score."""
    model = running.golden_model("llama_gqa")
    found = peaks_of(model, PROMPTS, ASKED)
    kept = tiny.kept(tiny.run(model, PROMPTS, KVGrad(budget=0.25, **TEXTS))[0])
    for row in range(2):
        scores, expected = (PEER[f"{row}/{name}"] for name in ("scores", "kept"))
        for layer, heads in enumerate(expected):
            ours = 2 * found[layer][row][:, 4:]
            np.testing.assert_allclose(ours, scores[layer][:, 4:], rtol=2e-4)
            assert kept[layer][row] == [np.flatnonzero(head).tolist() for head in heads]


def test_sixteen_bits():
    found = peaks_of(running.golden_model("llama_gqa", "bfloat16"), PROMPTS, ASKED)
    for row in range(2):
        ours, scores = np.stack([2 * each[row] for each in found]), PEER[f"{row}/scores"]
        off = np.abs(ours / scores - 1)[:, :, 4:]
        assert np.median(off) < 0.05 and off.max() < 0.5


def test_windows_and_meshes_hand_gradients_on():
    """A window of all tokens changes no other layer; each device has the part of a gradient through its heads."""
    model, prompts = meshes.model_of(2), tiny.prompts(3, (45, 20))
    kinds = (LayerSpec(), LayerSpec(sliding_window=480))
    windows = tiny.tiny(dataclasses.replace(model.config, kinds=kinds))
    ours, expected = (
        peaks_of(each, prompts, ASKED) for each in (windows.on(meshes.mesh_of(1, 2)), model)
    )
    for row in range(2):
        assert not ours[1][row].any() and (expected[1][row][:, 4:] > 0).all()
        np.testing.assert_allclose(ours[0][row], expected[0][row], rtol=1e-4)


def test_meshes_and_saved_caches_go_on_alike(tmp_path):
    of, policy = meshes.model_of(4), KVGrad(budget=20, capacity=8.0, **TEXTS)
    one, other = (
        meshes.answers(model, policy, tiny.prompts(5, (45, 20)), tmp_path / name)
        for name, model in (("one", of), ("mesh", of.on(meshes.mesh_of(2, 2))))
    )
    assert one == other


def test_plans_count_gradients():
    plans = [
        plan_prefill(tiny.TWO_LAYERS, policy(budget=0.9, **TEXTS), [400])
        for policy in (KVzip, KVGrad)
    ]
    chunk, group = TEXTS["chunk"], tiny.TWO_LAYERS.group_size
    assert plans[1].peak_bytes > plans[0].peak_bytes + 4 * group * chunk * 400


@pytest.mark.parametrize(
    "change",
    [
        {"parallel": True},
        {"attention_gate": True},
        {"experts": ExpertsConfig(count=4, chosen=2)},
    ],
)
def test_models_without_gradients_are_rejected(as_users_call, change):
    model = tiny.tiny(dataclasses.replace(tiny.TWO_LAYERS, **change))
    with pytest.raises(ValueError, match="policy='KVGrad': .*: use KVzip"):
        jaxkv.Session(model, KVGrad(budget=16, **TEXTS))
