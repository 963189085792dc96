"""TriAttention, whose statistics belong to one model: the oracle, meshes, slots, files, fitting, rejections."""

import dataclasses
import os
import pathlib
import pickle
import tempfile
import zipfile

import jax.numpy as jnp
import meshes
import numpy as np
import oracles as o
import pytest
import slot_runs
import test_again
import test_export
import tiny
from cli_runs import refused
from policy_row import Row
from running import GOLDEN
from safetensors.numpy import load_file
from test_invariants import check_alone, check_prefill
from test_latents import CONFIG as LATENT
from test_moments import ROPES
from test_state_layers import SHORT as STATES
from test_windows import ALL as ALL_WINDOWS
from test_windows import SHAPE as WINDOWS

import jaxkv
from jaxkv import AdaKV, TriAttention, cli
from jaxkv.analysis import fit_query_statistics
from jaxkv.engine.prefill import iterate_layer_outputs
from jaxkv.exporting import runtime
from jaxkv.models.rope import compute_rope_frequencies
from jaxkv.models.values import Llama3Rope, Rope
from jaxkv.policies import Needs, QueryStatistics
from jaxkv.testing import tiny_model

FOLDER = pathlib.Path(tempfile.mkdtemp())
GQA, LENGTHS = tiny.TWO_LAYERS, (61, 37, 5)
NAMES = ("q_mean_real", "q_mean_imag", "q_abs_mean")
KINDS = ROPES | {
    # The last quarter of the channels, and of the pairs, does not turn.
    "partial": Rope(theta=100.0, share=0.5),
    "llama3": Llama3Rope(
        theta=100.0,
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=32,
    ),
}


def statistics_of(config, seed=0):
    """Random means, and mean norms that are no smaller, for a model of this config: `[L, H, 3 * D/2]`."""
    rng = np.random.default_rng(seed)
    mean = rng.standard_normal((2, config.layers, config.heads, config.head_dim // 2))
    norm = np.hypot(*mean) + rng.random(mean.shape[1:])
    array = np.concatenate([*mean, norm], axis=-1).astype(np.float32)
    return QueryStatistics.create_from_array(array)


def tri(config, seed=0, **options):
    return TriAttention(statistics=statistics_of(config, seed), **options)


def row_of(config):
    return Row(
        name="triattention",
        make=lambda budget, **kw: tri(config, budget=budget, **kw),
        oracle=None,
        sinks=4,
    )


def unrotated_queries(model, ids):
    """Queries before RoPE of one text, by layer: `[H, n, D]`, float64."""
    flat, found = model.flat_decoder, []
    for layer, out in enumerate(
        iterate_layer_outputs(
            flat,
            jnp.asarray([ids], jnp.int32),
            jnp.asarray([len(ids)], jnp.int32),
            needs=Needs(hidden=True),
        )
    ):
        block = flat.graphs.rebuild_block(flat.blocks[layer])
        q = np.asarray(block.compute_unrotated_queries(out.extras["hidden"]), np.float64)[0]
        found.append(q.reshape(-1, len(ids), q.shape[-1]))
    return found


def of_heads(statistics, layer):
    """Complex means and norms of a layer's query heads, as the oracle takes them."""
    real, imaginary, norm = np.split(np.float64(statistics.host_arrays[layer]), 3, axis=-1)
    return list(zip(real + 1j * imaginary, norm, strict=True))


def expected_kept(model, full, row, n, found, budget, **options):
    """The oracle's kept positions of one sequence by layer and head; None where rounding might choose."""
    config, out = model.config, {}
    turn = compute_rope_frequencies(config.rope, config.head_dim)
    for layer, sequence, head, k, _, pos in tiny.segments(full):
        if sequence == row:
            mine = found[layer][head * config.group_size : (head + 1) * config.group_size]
            order = np.argsort(pos)
            scores = o.tri_scores(mine, k[order], n, pos[order], *turn, **options)
            kept, gap = o.top_select(scores, budget, list(range(min(4, n))), n)
            out[layer, head] = kept if gap > 1e-3 else None
    return out


@pytest.mark.parametrize(
    ("rope", "normalise"), [*((rope, True) for rope in KINDS), ("yarn", False)]
)
def test_kept_rows_are_the_oracles(rope, normalise):
    config = dataclasses.replace(GQA, rope=KINDS[rope])
    model, ids = tiny.tiny(config), meshes.prompts(3, LENGTHS)
    policies = {
        "file": tri(config, budget=14, normalise=normalise),
        "queries": TriAttention(budget=14, remembered=9, normalise=normalise),
    }
    full, _, _ = tiny.run(model, ids, jaxkv.FullKV())
    for name, policy in policies.items():
        cache, _, _ = tiny.run(model, ids, policy)
        kept, sure = tiny.kept(cache), 0
        for row, n in enumerate(LENGTHS):
            if name == "file":
                found = [of_heads(policy.statistics, layer) for layer in range(config.layers)]
            else:
                found = [
                    [o.query_statistics(head[-9:]) for head in layer]
                    for layer in unrotated_queries(model, ids[row])
                ]
            wanted = expected_kept(model, full, row, n, found, 14, normalise=normalise)
            for (layer, head), positions in wanted.items():
                if positions is not None:
                    assert kept[layer][row][head] == positions
                    sure += 1
        assert sure >= 8


def test_rows_kept_again_are_the_oracles():
    """Some entries are gone: positions are not places in the cache."""
    model, ids = tiny.tiny(GQA), meshes.prompts(3, (40, 33))
    policy = tri(GQA, budget=14, every=3)
    cache, _, _ = tiny.run(model, ids, policy)
    grown = test_again.feed(model, cache, np.asarray([[1, 2, 3], [4, 5, 6]], np.int32), chunk=3)
    found = [of_heads(policy.statistics, layer) for layer in range(GQA.layers)]
    after, sure = jaxkv.Session(model, policy).recompress_sequences(grown), 0
    kept = tiny.kept(after)
    for row, n in enumerate((43, 36)):
        for layer, sequence, head, k, _, pos in tiny.segments(grown):
            if sequence == row and len(pos) > 14:
                order = np.argsort(pos)
                scores = o.tri_scores(
                    found[layer][head * 3 : head * 3 + 3],
                    k[order],
                    n,
                    pos[order],
                    *compute_rope_frequencies(GQA.rope, GQA.head_dim),
                )
                chosen, gap = o.top_select(scores, 14, [0, 1, 2, 3], len(pos))
                if gap > 1e-3:
                    assert kept[layer][row][head] == pos[order][chosen].tolist()
                    sure += 1
    assert sure >= 6


@pytest.mark.parametrize("kind", ("file", "adaptive", "queries"))
def test_choosing_again_is_choosing_at_once(kind):
    given = {"budget": test_again.ROWS, "every": test_again.EVERY}
    policy = TriAttention(remembered=8, **given) if kind == "queries" else tri(GQA, **given)
    policy = AdaKV(base=policy) if kind == "adaptive" else policy
    test_again.check_chooses_again(policy, 8, test_again.once(policy))


def test_invariants():
    model = tiny.tiny(GQA)
    check_prefill(row_of(GQA), model, 3, (61, 7, 30), 20)
    check_alone(row_of(GQA), model, 4, (45, 6), 20)


@pytest.mark.parametrize("kv_heads", (2, 4))
def test_meshes(kv_heads):
    config = meshes.model_of(kv_heads, 4).config
    meshes.check_row(row_of(config), kv_heads, group=4, every=3)


def test_slots():
    model = tiny.tiny(GQA)
    policy = tri(GQA, budget=20, every=4)
    slot_runs.check(model, policy, slot_runs.requests(5, 6, sampled=True, shortest=24))


def test_exports(tmp_path):
    """Programs hold the statistics: what they choose is what is chosen here."""
    model, policy = tiny.tiny(test_export.MODEL), tri(test_export.MODEL, budget=24, every=4)
    prompts, _ = test_export.asked()
    folder = jaxkv.export(
        model, tmp_path / "export", policy=policy, batch=(3,), lengths=64, new=2 * test_export.NEW
    )
    ours, *_ = runtime.Model(folder).generate(prompts, test_export.NEW)
    theirs = jaxkv.generate(model, prompts, policy=policy, max_new_tokens=test_export.NEW)
    assert ours == [row.tokens.tolist() for row in theirs]


@pytest.mark.parametrize("store", ("int8", "int4"))
def test_stores(store):
    """Codes are decoded, and transformed keys turned back, before they are scored."""
    config = dataclasses.replace(GQA, head_dim=32)
    model, ids = tiny.tiny(config), meshes.prompts(3, (50, 44))
    kept = []
    for each in ("dense", store):
        session = jaxkv.Session(model, tri(config, budget=20, every=4, store=each))
        cache = session.prefill(ids, new=8)
        kept.append(tiny.kept(session.extend(cache, [[1, 2, 3, 4], [5, 6, 7, 8]], new=8)))
    same = [
        len(set(own) & set(other)) / len(own)
        for layers in zip(*kept, strict=True)
        for rows in zip(*layers, strict=True)
        for own, other in zip(*rows, strict=True)
    ]
    assert np.mean(same) > 0.8


@pytest.mark.parametrize("config", (WINDOWS, LATENT, STATES), ids=("windows", "latents", "states"))
def test_other_layers(config):
    """Windows have no scores, latents are scored as entries are read, states are not in the cache."""
    model, ids = tiny_model(config), tiny.prompts(4, (40, 23))
    remembered = TriAttention(budget=12, remembered=6, every=3)
    for policy in (tri(config, budget=12, every=3), *([remembered] if config is LATENT else [])):
        session = jaxkv.Session(model, policy)
        together = session.sample(session.prefill(ids, new=9), 9)[1]
        for row, each in enumerate(ids):
            alone = session.sample(session.prefill([each], new=9), 9)[1]
            assert together[row].tolist() == alone[0].tolist()


def test_saved_caches_hold_a_digest(tmp_path):
    model, policy = tiny.tiny(GQA), tri(GQA, budget=14, every=3)
    ids = tiny.prompts(1, (40, 20))
    cache = jaxkv.prefill(model, ids, policy=policy)
    cache.save(tmp_path / "cache")
    loaded = jaxkv.load_cache(tmp_path / "cache", model, policy=policy)
    answers = [
        jaxkv.generate(model, [[1, 2], [3, 4]], cache=each, max_new_tokens=8)
        for each in (cache, loaded)
    ]
    mine, theirs = ([row.tokens.tolist() for row in each] for each in answers)
    assert mine == theirs
    with pytest.raises(ValueError, match="another policy compressed the cache"):
        jaxkv.load_cache(tmp_path / "cache", model, policy=tri(GQA, 1, budget=14, every=3))
    alone = jaxkv.load_cache(tmp_path / "cache", model)
    with pytest.raises(ValueError, match=r"^statistics=QueryStatistics.*as in a saved cache"):
        jaxkv.generate(model, [[1, 2], [3, 4]], cache=alone, max_new_tokens=8)


def test_statistics_of_texts_are_those_of_their_queries(tmp_path, capsys):
    path, out = tmp_path / "text.txt", tmp_path / "out.safetensors"
    words = "the grass is green and the sky is blue again here we go there and back".split()
    path.write_text(" ".join(np.random.default_rng(0).choice(words, 60)))
    asked = ["fit-tri", "tiny-retrieval", str(path), "--out", str(out), "--tokens", "50"]
    assert cli.main([*asked, "--chunk", "32"]) == 0
    assert "statistics of tiny-retrieval from 50 tokens" in capsys.readouterr().out
    params, found = jaxkv.load("tiny-retrieval"), load_file(out)
    ids = params.tokenizer.encode(path.read_text(), bos=True)[:50]
    pieces = [unrotated_queries(params, ids[at : at + 32]) for at in range(0, 50, 32)]
    for layer in range(params.config.layers):
        q = np.concatenate([piece[layer] for piece in pieces], axis=1)
        for head, own in enumerate(q):
            mean, norm = o.query_statistics(own)
            wanted = np.real(mean), np.imag(mean), norm
            for name, each in zip(NAMES, wanted, strict=True):
                np.testing.assert_allclose(found[name][layer, head], each, rtol=1e-3, atol=1e-3)
    read = QueryStatistics.load_from_file("statistics", out)
    assert read.encode_safetensors() == out.read_bytes()
    cache = jaxkv.prefill(
        params, path.read_text(), policy=TriAttention(budget=24, statistics=str(out))
    )
    assert cache.policy.statistics == read and (np.asarray(cache.length) == 24).all()
    assert "--out=" in refused(capsys, *asked[:4], str(tmp_path / "none" / "file"))


def test_statistics_of_windows_are_zero():
    """Also where attention has sink logits, as in gpt-oss."""
    found = fit_query_statistics(
        tiny_model(dataclasses.replace(WINDOWS, sink_logits=True)), tiny.prompts(3, (30, 17))
    )
    assert not found.host_arrays[0].any() and found.host_arrays[1].all()
    with pytest.raises(ValueError, match="every layer has a sliding window"):
        fit_query_statistics(tiny_model(ALL_WINDOWS), tiny.prompts(3, (30,)))


def test_statistics_on_a_mesh():
    model = meshes.model_of(2, 4)
    one = fit_query_statistics(model, tiny.prompts(3, (30, 17)))
    there = model.on(meshes.mesh_of(2, 4))
    np.testing.assert_allclose(
        fit_query_statistics(there, tiny.prompts(3, (30, 17))).host_arrays,
        one.host_arrays,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", ("tiny-retrieval", "smollm2-135m-instruct"))
def test_statistics_come_with_jaxkv(name):
    found = TriAttention(statistics=name).statistics
    real, imaginary, norm = np.split(found.host_arrays, 3, axis=-1)
    assert (np.hypot(real, imaginary) <= norm * (1 + 1e-3)).all()


def test_published_files_are_read_without_running_them(tmp_path):
    path = GOLDEN / "query_statistics.pt"
    found = QueryStatistics.load_from_file("statistics", path)
    layer, head, of, pair = np.meshgrid(*map(np.arange, (2, 3, 3, 4)), indexing="ij")
    wanted = (pair + 10 * head + 100 * layer + 1000 * of).reshape(2, 3, 12)
    np.testing.assert_array_equal(found.host_arrays, wanted)
    assert (found.layers, found.heads, found.dim) == (2, 3, 8)

    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    evil = tmp_path / "evil.pt"
    with zipfile.ZipFile(evil, "w") as archive:
        archive.writestr("evil/data.pkl", pickle.dumps({"stats": Runs()}))
    (tmp_path / "cut.pt").write_bytes(path.read_bytes()[:3000])
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("other/data.pkl", pickle.dumps({"stats": {"layer00_head00": {}}}))
    for name in ("evil", "cut", "other", "absent"):
        with pytest.raises(ValueError, match=rf"^statistics='.*{name}.pt'.*: give the statistics"):
            TriAttention(statistics=str(tmp_path / f"{name}.pt"))
    assert not (tmp_path / "ran").exists()


def test_what_does_not_fit(as_users_call):
    model = tiny.tiny(GQA)
    for changed, message in (
        ({"layers": 5}, "layers=5.: the model has 2"),
        ({"heads": 12, "kv_heads": 4}, "heads=12.: the model has 6"),
        ({"head_dim": 4}, "dim=4.: the model has 8"),
    ):
        other = dataclasses.replace(GQA, **changed)
        with pytest.raises(ValueError, match=rf"^statistics=.{message}"):
            jaxkv.Session(model, tri(other, budget=20))
    turned = dataclasses.replace(GQA, qk_norm=True, qk_norm_rotated=True)
    with pytest.raises(ValueError, match="scales behind RoPE"):
        jaxkv.Session(tiny_model(turned), TriAttention(budget=20))
    k = np.zeros((1, 1, 9, 8), np.float32)
    with pytest.raises(ValueError, match="reads more than keys, values and queries"):
        jaxkv.compress(k, k, policy=TriAttention(budget=8))
    with pytest.raises(ValueError, match="remembered=0: give at least 1 query"):
        TriAttention(remembered=0)
    with pytest.raises(ValueError, match="normalise='yes'"):
        TriAttention(normalise="yes")
    assert tri(GQA) == tri(GQA) != tri(GQA, 1)
    assert dataclasses.replace(tri(GQA).statistics).host_arrays is not None
