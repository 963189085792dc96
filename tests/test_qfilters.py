"""QFilters, whose filters belong to one model: the oracle, meshes, files, rejections."""

import dataclasses

import meshes
import numpy as np
import oracles as o
import pytest
import tiny
from policy_row import Row
from safetensors.numpy import save_file
from test_invariants import check_alone, check_prefill
from test_oracle_agreement import DIM, LAYERS, draw_layers, library_kept

import jaxkv
from jaxkv import AdaKV, QFilters


@pytest.fixture
def written(tmp_path):
    def make(*shape, name="q_filters", seed=3, dtype=np.float32):
        array = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
        save_file({name: array}, tmp_path / "model.safetensors")
        return str(tmp_path), array

    return make


def row_of(path):
    return Row(
        name="qfilters",
        make=lambda budget, **kw: QFilters(budget=budget, q_filters=path, **kw),
        oracle=None,
    )


@pytest.mark.parametrize(("group", "budget"), ((1, 10), (4, 0.5)))
def test_kept_rows_are_the_oracles(written, group, budget):
    lengths, sure = (48, 29), 0
    q, k = draw_layers(group, group, lengths)
    path, filters = written(LAYERS, k.shape[2], DIM)
    kept = library_kept(QFilters(budget=budget, q_filters=path), q, k, lengths)
    for row, n in enumerate(lengths):
        for layer in range(LAYERS):
            scores = o.qfilter_scores(filters[layer], k[layer, row, :, :n])
            for head, mine in enumerate(scores):
                expected, gap = o.top_select(mine, o.resolve_budget(budget, n), [], n)
                if gap > o.MIN_GAP:
                    assert kept[layer][row][head] == expected
                    sure += 1
    assert sure > LAYERS


def test_invariants(written):
    config = tiny.TWO_LAYERS
    row = row_of(written(config.layers, config.kv_heads, config.head_dim)[0])
    check_prefill(row, tiny.tiny(config), 3, (61, 7, 30), 20)
    check_alone(row, tiny.tiny(config), 4, (45, 6), 20)


def test_meshes(written):
    meshes.check_row(row_of(written(meshes.LAYERS, 2, meshes.DIM)[0]), 2)


def test_files_and_what_does_not_fit(as_users_call, written, tmp_path):
    model, config = tiny.tiny(tiny.TWO_LAYERS), tiny.TWO_LAYERS
    path, _ = written(config.layers, config.kv_heads, config.head_dim)
    filters = QFilters(q_filters=tmp_path).q_filters
    assert dataclasses.replace(filters).host_arrays is filters.host_arrays
    assert (
        QFilters(q_filters=tmp_path)
        == QFilters(q_filters=f"{path}/model.safetensors")
        != QFilters()
    )
    assert (
        AdaKV(base=QFilters(budget=20, q_filters=path)).build_policy_parts().scorer
        == QFilters(q_filters=path).build_policy_parts().scorer
    )
    for shape, message in (
        ((5, 2, 8), "layers=5.: the model has 2"),
        ((2, 7, 8), "heads=7.: the model has 2"),
        ((2, 2, 4), "dim=4.: the model has 8"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxkv.Session(model, QFilters(budget=20, q_filters=written(*shape)[0]))
    for shape, name in (((2, 2), "q_filters"), ((2, 2, 8), "filters")):
        with pytest.raises(
            ValueError, match="q_filters=.*: give the filters of your model, a safetensors"
        ):
            QFilters(q_filters=written(*shape, name=name)[0])
    with pytest.raises(
        ValueError, match="q_filters=.*: give the filters of your model, a safetensors"
    ):
        QFilters(q_filters=written(2, 2, 8, dtype=np.int8)[0])
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="q_filters=.*safetensors"):
        QFilters(q_filters=path)


def test_saved_caches_need_no_file(written, tmp_path):
    """They have the filters' digest: the file may be gone, moved or changed."""
    model, config = tiny.tiny(tiny.TWO_LAYERS), tiny.TWO_LAYERS
    path = written(config.layers, config.kv_heads, config.head_dim)[0]
    policy = QFilters(budget=20, q_filters=path)
    jaxkv.prefill(model, tiny.prompts(1, (40,)), policy=policy).save(tmp_path / "cache")
    other = QFilters(
        budget=20, q_filters=written(config.layers, config.kv_heads, config.head_dim, seed=4)[0]
    )
    assert other != policy
    for given in (None, policy):
        loaded = jaxkv.load_cache(tmp_path / "cache", model, policy=given)
        assert loaded.policy == policy and (np.asarray(loaded.length) == 20).all()
    with pytest.raises(ValueError, match="another policy compressed the cache"):
        jaxkv.load_cache(tmp_path / "cache", model, policy=other)
    alone = jaxkv.load_cache(tmp_path / "cache", model).policy
    with pytest.raises(ValueError, match=r"^q_filters=QFilterVectors.*as in a saved cache"):
        jaxkv.prefill(model, tiny.prompts(2, (70,)), policy=alone)


def test_arrays_of_other_layers_are_refused(as_users_call, written):
    policy = QFilters(budget=4, q_filters=written(2, 1, 8)[0])
    k = np.zeros((1, 1, 9, 8), np.float32)
    for make, message in (
        (
            lambda: jaxkv.compress(k, k, policy=policy),
            "layers=None: QFilters keeps different entries in each layer: give layer=",
        ),
        (
            lambda: jaxkv.compress(k, k, policy=policy, layer=2, layers=3),
            "layers=3: .* a model of 2 layers",
        ),
        (
            lambda: jaxkv.compress_layers([k] * 3, [k] * 3, policy=policy),
            "layers=3: .* a model of 2 layers",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    assert jaxkv.compress(k, k, policy=policy, layer=1, layers=2).length.tolist() == [[[4]]]
