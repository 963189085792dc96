"""Filter layers: the map they are found in, the search, what is saved of it; and the task OmniKV is judged by."""

import itertools
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv import checkpoints
from jaxkv.analysis import Similarity, best_filters, filter_layers, similarity
from jaxkv.checkpoints import named_models
from jaxkv.cli import filters, main
from jaxkv.engine.prefill import read_layers
from jaxkv.evals import COLOURS, two_stage
from jaxkv.policies.reading import WHOLE, sources, whole_layers
from jaxkv.policies.scorer import Needs

CONFIG = tiny.shape(layers=6, kv_heads=2, group=3, dim=8)
NAME = "smollm2-135m-instruct"


def oracle(ids, queries, share):
    """The map of one text by plain loops over queries, layers and keys."""
    model, count = tiny.tiny(CONFIG), len(ids)
    layers = list(
        read_layers(
            model.flat,
            jnp.asarray([ids], jnp.int32),
            jnp.asarray([count]),
            needs=Needs(queries=queries),
        )
    )
    out = np.zeros((CONFIG.layers, CONFIG.layers))
    for row in range(queries):
        at, weights = count - queries + row, []
        for shown in layers:
            q, k = shown.q, shown.k
            best = np.zeros(at + 1)
            for head, group in np.ndindex(CONFIG.kv_heads, CONFIG.group):
                logits = (
                    np.asarray(k[0, head, : at + 1], np.float64)
                    @ np.asarray(q[0, head, group, row])
                    / 8**0.5
                )
                shares = np.exp(logits - logits.max())
                best = np.maximum(best, shares / shares.sum())
            weights.append(best / best.sum())
        for lower, upper in itertools.combinations_with_replacement(range(CONFIG.layers), 2):
            order = sorted(range(at + 1), key=lambda key: -weights[lower][key])
            out[lower, upper] += weights[upper][order[: max(1, int(share * (at + 1)))]].sum()
    return out / queries


def test_similarity_is_the_oracles():
    texts = tiny.prompts(0, (48, 30))
    found = similarity(tiny.tiny(CONFIG), texts, share=0.2, queries=5)
    expected = (oracle(texts[0], 5, 0.2) + oracle(texts[1], 5, 0.2)) / 2
    np.testing.assert_allclose(found.mass, expected, atol=1e-5)
    assert found.lengths == (48, 30)


def test_the_map_of_a_model_on_a_mesh():
    texts, mesh = (
        tiny.prompts(0, (48, 30)),
        jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4]),
    )
    alone = similarity(tiny.tiny(CONFIG), texts, share=0.2, queries=5)
    split = similarity(tiny.tiny(CONFIG).on(mesh), texts, share=0.2, queries=5)
    np.testing.assert_allclose(split.mass, alone.mass, atol=1e-6)
    one, two = (
        filter_layers(model, texts, m=1)
        for model in (tiny.tiny(CONFIG), tiny.tiny(CONFIG).on(mesh))
    )
    assert one.filters == two.filters


def a_map(layers, seed=0):
    mass = np.triu(np.random.default_rng(seed).random((layers, layers))).astype(np.float32)
    return Similarity(mass=mass, share=0.1, queries=4, lengths=(9,))


@pytest.mark.parametrize(
    ("layers", "m", "most"), [(12, 3, 7), (12, 2, None), (9, 1, None), (10, 3, 8)]
)
def test_the_best_filters_are_the_best_of_all_sets(layers, m, most):
    found = best_filters(a_map(layers), m=m, most_whole=most)
    most = -(-layers // 4) if most is None else most
    scores = {}
    for layer_set in itertools.combinations(range(layers - 1), m):
        whole = whole_layers(layer_set, 1, layers)
        if len(whole) <= most and len(whole) < layers:
            reads = sources(layer_set, 1, layers)
            scores[layer_set] = np.mean(
                [a_map(layers).mass[s, at] for at, s in enumerate(reads) if s != WHOLE]
            )
    assert found.filters == max(scores, key=scores.get)
    assert found.carried == pytest.approx(scores[found.filters])


def test_found_layers_can_be_used_and_written():
    found = filter_layers(tiny.tiny(CONFIG), tiny.prompts(1, (40,)), m=1, queries=8)
    record = json.loads(found.to_json())
    assert tuple(record["filters"]) == found.filters
    assert np.shape(record["similarity"]["mass"]) == (6, 6)
    jaxkv.OmniKV(filter_layers=found.filters).for_model(6, None)


def test_a_picture_needs_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"jaxkv\[plots\]"):
        a_map(4).picture(tmp_path / "map.png")
    assert a_map(4)._repr_png_() is None, "Jupyter shows text then"


# --- the manifest ----------------------------------------------------------------------------------------------------


@pytest.fixture
def own_manifests(monkeypatch, tmp_path):
    """A copy of the package's manifests, which can be written."""
    shutil.copytree(Path(checkpoints.__file__).parent / "manifests", tmp_path / "manifests")
    # Its own name alone: other modules' data lie where they lay.
    monkeypatch.setattr(named_models, "resources", SimpleNamespace(files=lambda package: tmp_path))
    named_models._manifests.cache_clear()
    yield tmp_path / "manifests"
    named_models._manifests.cache_clear()


def test_the_named_model_ships_its_filter_layers():
    assert checkpoints.manifest(NAME).filter_layers == (2, 6, 19)
    assert len(whole_layers((2, 6, 19), 1, 30)) == 8


def test_filter_layers_are_saved_whole(own_manifests):
    before = json.loads((own_manifests / f"{NAME}.json").read_text())
    checkpoints.save_filter_layers(NAME, (1, 5))
    after = json.loads((own_manifests / f"{NAME}.json").read_text())
    assert after == before | {"filter_layers": [1, 5]}
    assert checkpoints.manifest(NAME).filter_layers == (1, 5)
    assert sorted(path.stem for path in own_manifests.iterdir()) == sorted(checkpoints.names())
    with pytest.raises(ValueError, match="no such model"):
        checkpoints.save_filter_layers("nobody", (1,))


@pytest.mark.real
def test_the_command_finds_prints_and_saves(own_manifests, tmp_path, capsys, monkeypatch):
    # A setting of the whole process: switched on here, it would serve the tests that count compilations.
    monkeypatch.setattr(filters, "enable_compilation_cache", lambda: None)
    text = tmp_path / "text.txt"
    text.write_text(
        "It was a bright cold day in April, and the clocks were striking thirteen. " * 12
    )
    assert main(["filters", "--text-file", str(text), "--tokens", "60", "--json", "--save"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["similarity"]["lengths"] == [60] and len(record["filters"]) == 3
    assert list(checkpoints.manifest(NAME).filter_layers) == record["filters"]
    assert main(["filters", "--text-file", str(text), "--model", "elsewhere", "--save"]) == 2
    assert "only named models" in capsys.readouterr().err
    assert main(["filters", "--text-file", str(tmp_path / "none.txt")]) == 2


def test_the_command_refuses_a_picture_that_cannot_be_before_its_work(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(filters, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(filters, "load", None)
    text = tmp_path / "text.txt"
    text.write_text("Some text.")
    given = ["filters", "--text-file", str(text), "--picture"]
    assert main([*given, str(tmp_path / "nowhere" / "map.png")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*given, str(tmp_path / "map.png")]) == 2
    assert "jaxkv[plots]" in capsys.readouterr().err


# --- 2StageRetr ------------------------------------------------------------------------------------------------------


def test_sums_are_keys_and_answers_their_colours():
    for case in two_stage(20, seed=3) + two_stage(4, reason=True):
        entries = case.prompt[case.prompt.index("{") + 1 : case.prompt.index("}")].split(", ")
        table = dict(entry.split(": ") for entry in entries)
        first, second = (
            int(part) for part in case.prompt.split("equation is ")[1].split(" =")[0].split(" + ")
        )
        assert first >= 1 and second >= 1 and first + second == case.key
        assert [int(key) for key in table] == list(range(case.size))
        assert table[str(case.key)] == case.answer in COLOURS
        assert case.answer in COLOURS and case.answer in case.prompt
    assert len(set(COLOURS)) == 23
    assert two_stage(5, seed=1) == two_stage(5, seed=1) != two_stage(5, seed=2)
    assert {case.size for case in two_stage(17)} == set(range(40, 201, 10))
