"""Trained gates, which belong to one model: the oracle, meshes, slots, saved caches, files that are rejected."""

import dataclasses
import functools
import pathlib
import tempfile

import jax
import meshes
import numpy as np
import oracles as o
import pytest
import tiny
from policy_row import Row
from policy_table import WINDOW
from safetensors.numpy import save, save_file
from test_invariants import check_alone, check_prefill
from test_replay import hidden

import jaxkv
from jaxkv import AdaKV, FastKVzip, GlobalBudget, KVzap
from jaxkv.policies import KVzapGate
from jaxkv.testing import tiny_model

FOLDER = pathlib.Path(tempfile.mkdtemp())
CONFIG, LENGTHS = tiny.MODELS["gqa3"], (61, 37, 12)


def zap_tensors(config, width=None, seed=0):
    """Tensors of a random gate, by the published names; with two layers of a GELU between if there is a width."""
    rng, found = np.random.default_rng(seed), {}

    def linear(name, rows, columns):
        found[f"{name}.weight"] = (
            rng.standard_normal((rows, columns)).astype(np.float32) / columns**0.5
        )
        found[f"{name}.bias"] = rng.standard_normal(rows).astype(np.float32)

    for layer in range(config.layers):
        if width is None:
            linear(f"layers.{layer}", config.kv_heads, config.embed)
        else:
            linear(f"layers.{layer}.0", width, config.embed)
            linear(f"layers.{layer}.2", config.kv_heads, width)
    return found


@functools.cache
def zap_file(config, width=None):
    """A file of such a gate."""
    path = FOLDER / f"zap-{config.layers}-{config.kv_heads}-{width}.safetensors"
    save_file(zap_tensors(config, width), path)
    return str(path)


def fast_tensors(config, width=4, bases=3, seed=0):
    """Tensors of a random gate of Fast KVzip, with as many learned queries per kv head as the model has."""
    rng, found, rows = np.random.default_rng(seed), {}, config.kv_heads * width
    shapes = {
        "q_proj.weight": (rows * config.group_size, config.embed),
        "q_proj.bias": (rows * config.group_size,),
        "k_proj.weight": (rows, config.embed),
        "q_norm.weight": (width,),
        "k_norm.weight": (width,),
        "k_base": (config.kv_heads, 1, bases, width),
        "b": (config.kv_heads, 1, config.group_size),
    }
    for layer in range(config.layers):
        for name, shape in shapes.items():
            found[f"{layer}.{name}"] = rng.standard_normal(shape).astype(np.float32)
    return found


@functools.cache
def fast_file(config):
    """A file of such a gate."""
    path = FOLDER / f"fast-{config.layers}-{config.kv_heads}.safetensors"
    save_file(fast_tensors(config), path)
    return str(path)


def zap(config, width=None, **options):
    return KVzap(gate=zap_file(config, width), window=WINDOW, sinks=2, **options)


def row_of(config):
    """A row of the policy table for models of this config; the oracle has no hidden states."""
    return Row(
        name="kvzap",
        make=lambda budget, **kw: zap(config, budget=budget, **kw),
        oracle=lambda qs, ks, budget: None,
        sinks=2,
        window=WINDOW,
    )


def check_kept(kept, scores, budget, n):
    """Kept rows [L][K] are the best of each head by the oracle's scores [L][K, n]."""
    always_kept, rows = (
        o.forced_positions(n, 2, WINDOW, ()),
        max(o.resolve_budget(budget, n), min(n, 2 + WINDOW)),
    )
    for layer, of_heads in enumerate(scores):
        for head, own in enumerate(of_heads):
            expected, gap = o.top_select(own, rows, always_kept, n)
            assert gap > o.MIN_GAP
            assert kept[layer][head] == expected


@pytest.mark.parametrize(("width", "budget"), ((None, 0.5), (7, 20)))
def test_prefill_keeps_the_oracles_rows(width, budget):
    model, ids, tensors = tiny.tiny(CONFIG), tiny.prompts(3, LENGTHS), zap_tensors(CONFIG, width)
    policy = zap(CONFIG, width, budget=budget, min_budget="clamp")
    cache, _, _ = tiny.run(model, ids, policy)
    scores = [
        [
            o.kvzap_scores(tensors, layer, hidden(model, layer, each))
            for layer in range(CONFIG.layers)
        ]
        for each in ids
    ]
    for row, each in enumerate(ids):
        check_kept([layer[row] for layer in tiny.kept(cache)], scores[row], budget, len(each))
    if width is None:
        wide = GlobalBudget(base=policy, alpha=0.0)
        shared = tiny.kept(tiny.run(model, ids, wide)[0])
        for row, each in enumerate(ids):
            n, always_kept = len(each), o.forced_positions(len(each), 2, WINDOW, ())
            expected, gap = o.global_select(
                scores[row], max(o.resolve_budget(budget, n), len(always_kept)), always_kept, n
            )
            assert gap > o.MIN_GAP
            assert [layer[row] for layer in shared] == expected


def test_fast_kvzip_keeps_the_oracles_rows():
    model, ids, tensors = tiny.tiny(CONFIG), tiny.prompts(3, LENGTHS), fast_tensors(CONFIG)
    recent = 0.2
    policy = FastKVzip(gate=fast_file(CONFIG), budget=0.6, sinks=2, recent=recent)
    kept = tiny.kept(tiny.run(model, ids, policy)[0])
    for row, each in enumerate(ids):
        n = len(each)
        scores = [
            o.fastkvzip_scores(tensors, layer, hidden(model, layer, each))
            for layer in range(CONFIG.layers)
        ]
        first = n - int(recent * n)
        for own in scores:
            own[:, first:] = 1.0
        always_kept = [j for j in range(n) if j < 2 or j >= first]
        expected, gap = o.global_select(scores, o.resolve_budget(0.6, n), always_kept, n)
        assert gap > o.MIN_GAP
        assert [layer[row] for layer in kept] == expected


def kept_again(own, n, stops, budget, every):
    """One head's rows by the oracle's scores: the prompt's best, then at each stop the best of these and new ones."""
    kept, gap = o.top_select(own[:n], budget, o.forced_positions(n, 2, WINDOW, ()), n)
    assert gap > o.MIN_GAP
    for seen in stops:
        there = sorted({*kept, *range(seen - every, seen)})
        always_kept = [at for at, j in enumerate(there) if j < 2 or j >= seen - WINDOW]
        best, gap = o.top_select(own[there], budget, always_kept, len(there))
        assert gap > o.MIN_GAP
        kept = [there[at] for at in best]
    return kept


def test_drawing_keeps_the_oracles_rows():
    """Over 100 sampled tokens, in the first layer, whose hidden states do not follow from what was kept before."""
    config, budget, n, steps, every = tiny.TWO_LAYERS, 24, 40, 100, 16
    model, tensors, (ids,) = tiny.tiny(config), zap_tensors(config), tiny.prompts(6, (n,))
    session = jaxkv.Session(model, zap(config, budget=budget, every=every))
    cache, drawn = session.sample(session.prefill([ids], new=steps), steps, new=steps)
    scores = o.kvzap_scores(tensors, 0, hidden(model, 0, [*ids, *drawn[0].tolist()]))
    # A cache is compressed before the next token is sampled.
    stops = range(n + every, n + steps, every)
    for head, own in enumerate(scores):
        found = [j for j in tiny.kept(cache)[0][0][head] if j < stops[-1]]
        assert found == kept_again(own, n, stops, budget, every)


def test_new_tokens_of_all_layers_keep_the_oracles_rows():
    """Over 100 tokens of which none comes twice, by a model whose hidden states do not follow from attention."""
    config, width = dataclasses.replace(tiny.TWO_LAYERS, vocab=512), 7
    budget, n, steps, every = 24, 40, 100, 20
    model, tensors = tiny_model(config, seed=3), zap_tensors(config, width)
    for block in model.decoder.blocks:
        block.attention.out[...] = jax.numpy.zeros_like(block.attention.out[...])
    text = np.random.default_rng(0).permutation(512)[: n + steps].tolist()
    session = jaxkv.Session(model, zap(config, width, budget=budget, every=every))
    cache = session.prefill([text[:n]], new=every)
    for seen in range(n, n + steps):
        cache = session.recompress_sequences(
            session.extend(cache, [[text[seen]]], new=every, donate=True), headroom=every
        )
    stops = range(n + every, n + steps + 1, every)
    for layer, of_heads in enumerate(tiny.kept(cache)):
        scores = o.kvzap_scores(tensors, layer, hidden(model, layer, text))
        assert of_heads[0] == [kept_again(own, n, stops, budget, every) for own in scores]


def test_invariants():
    model, row = tiny.tiny(CONFIG), row_of(CONFIG)
    check_prefill(row, model, 3, (61, 7, 30), 20)
    check_alone(row, model, 4, (45, 6), 20)


def test_fast_kvzip_on_a_mesh():
    config, row = meshes.model_of(2).config, row_of(meshes.model_of(2).config)
    make = lambda budget, **kw: FastKVzip(gate=fast_file(config), budget=budget, **kw)  # noqa: E731
    meshes.check_row(dataclasses.replace(row, name="fastkvzip", make=make), 2, every=3)


def test_gates_are_compared_by_their_weights(tmp_path):
    other = tmp_path / "other.safetensors"
    save_file(
        {name: array.astype(np.float64) for name, array in zap_tensors(CONFIG).items()}, other
    )
    one, same = zap(CONFIG), KVzap(gate=str(other), window=WINDOW, sinks=2)
    assert one == same and hash(one) == hash(same) and one.gate is not same.gate
    assert one != zap(CONFIG, 7) and one != KVzap(gate=None, window=WINDOW, sinks=2)
    assert dataclasses.replace(one, budget=5000).gate is one.gate
    assert (
        dataclasses.replace(one.gate) == one.gate
        and dataclasses.replace(one.gate).host_weights is one.gate.host_weights
    )
    (tmp_path / "folder").mkdir()
    other.rename(tmp_path / "folder" / "model.safetensors")
    assert KVzapGate.load_from_file("gate", tmp_path / "folder") == one.gate
    # Programs are kept by a policy's fields, which must not hold weights.
    assert {type(value) for value in dataclasses.astuple(one.gate)} == {str, int}


def test_saved_caches_have_the_digest(tmp_path):
    model, ids = tiny.tiny(CONFIG), tiny.prompts(3, LENGTHS)
    policy = zap(CONFIG, budget=20)
    cache, _, _ = tiny.run(model, ids, policy)
    cache.save(tmp_path / "cache")
    for loaded in (
        jaxkv.load_cache(tmp_path / "cache"),
        jaxkv.load_cache(tmp_path / "cache", policy=policy),
    ):
        assert loaded.policy == policy
        assert tiny.kept(loaded) == tiny.kept(cache)
        after, expected = (tiny.decode(model, each, [[5] * 3] * 2)[0] for each in (loaded, cache))
        np.testing.assert_array_equal(after, expected)
    alone = jaxkv.load_cache(tmp_path / "cache").policy
    with pytest.raises(
        ValueError, match=r"^gate=KVzapGate\(.*a digest without arrays, as in a saved cache"
    ):
        tiny.run(model, ids, alone)


def test_the_last_two_gates_stay_on_the_device():
    model, (ids,) = tiny.tiny(CONFIG), tiny.prompts(3, (20,))
    model.flat_decoder.gates.clear()
    made = [
        KVzap(
            gate=KVzapGate.create_from_weights(zap(CONFIG).gate.host_weights[:1] * CONFIG.layers),
            window=WINDOW,
        )
    ]
    made += [zap(CONFIG, budget=12), zap(CONFIG, 7, budget=12)]
    for policy in (*made, made[1]):
        tiny.run(model, [ids], policy)
    assert list(model.flat_decoder.gates) == [made[2].gate, made[1].gate]
    assert all(
        list(kept) == list(range(CONFIG.layers)) for kept in model.flat_decoder.gates.values()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"layers.1.weight": None}, r"tensor layers\.1\..* is missing"),
        (
            {"layers.0.bias": np.zeros(3, np.float32)},
            r"tensor layers\.0\.bias has the shape \[3\], not \[2\]",
        ),
        ({"layers.1.bias": np.zeros(2, np.int32)}, r"layers\.1\.bias is of int32"),
        (
            {"layers.1.weight": np.full((2, 24), np.nan, np.float32)},
            r"layers\.1\.weight holds numbers that are not",
        ),
        (
            {"layers.1.scale": np.zeros(2, np.float32)},
            r"tensor layers\.1\.scale belongs to no such gate",
        ),
    ),
)
def test_files_are_refused_by_name(tmp_path, change, message):
    path, tensors = tmp_path / "gate.safetensors", zap_tensors(CONFIG) | change
    save_file({name: array for name, array in tensors.items() if array is not None}, path)
    with pytest.raises(
        ValueError,
        match=rf"^gate='.*no KVzapGate in it: .*{message}.*: give the gate of your model",
    ):
        KVzap(gate=str(path))


def test_other_files_and_models_are_refused(tmp_path):
    path = tmp_path / "gate.safetensors"
    path.write_bytes(save(zap_tensors(CONFIG))[:-9])
    for given, message in ((path, "a complete safetensors file"), (tmp_path / "none", "missing")):
        with pytest.raises(ValueError, match=rf"^gate='.*{message}"):
            KVzap(gate=str(given))
    with pytest.raises(
        TypeError, match=r"^gate=3: give the gate of your model, a safetensors file"
    ):
        KVzapGate.load_from_file("gate", 3)
    with pytest.raises(ValueError, match=r"^gate=None: give the gate of your model"):
        jaxkv.Session(tiny.tiny(CONFIG), KVzap())
    with pytest.raises(ValueError, match=r"^gate='layers=3': the model has 4"):
        jaxkv.Session(tiny.tiny(tiny.MODELS["gqa4"]), AdaKV(base=zap(CONFIG)))
    heads = tiny.shape(layers=3, kv_heads=3, group=2, dim=8)
    with pytest.raises(ValueError, match=r"^gate='heads=2': the model has 3"):
        jaxkv.Session(tiny.tiny(heads), zap(CONFIG, budget=12))
    k = jax.numpy.zeros((1, 2, 20, 8))
    with pytest.raises(ValueError, match="reads more than keys"):
        jaxkv.compress(k, k, policy=zap(CONFIG, budget=12))
    with pytest.raises(ValueError, match="exported programs do not contain"):
        jaxkv.export(
            tiny.tiny(CONFIG), tmp_path / "out", policy=zap(CONFIG, budget=12), lengths=64, new=8
        )
