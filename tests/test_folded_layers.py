"""Gemma 4: sliding-window layers whose kv heads share entries, beside others with fewer and wider heads."""

import dataclasses

import jax
import numpy as np
import pytest
import running
import slot_runs
import tiny
from meshes import answers, mesh_of, prompts
from policy_table import REPEATED

import jaxkv
from jaxkv.engine.plan import plan_prefill
from jaxkv.engine.slot_shape import compute_slot_shape
from jaxkv.evals.perplexity import measure_text_losses
from jaxkv.models.rope import compute_rope_frequencies
from jaxkv.models.values import (
    ExpertsConfig,
    FoldedLayerSpec,
    LayerSpec,
    ProportionalRope,
    Rope,
)
from jaxkv.planning.catalog import catalog
from jaxkv.policies import UniformLayers
from jaxkv.policies.scorer import Needs

WINDOW = 12
# Windows of 8 heads of 8 channels, 4 in an entry of 32; between them 2 heads of 16 channels.
CONFIG = dataclasses.replace(
    tiny.shape(layers=4, kv_heads=2, group=4, dim=16),
    norms="both",
    qk_norm=True,
    value_norm=True,
    block_multiplier=True,
    activation="gelu_tanh",
    kinds=(
        FoldedLayerSpec(scale=1.0, sliding_window=WINDOW, head_dim=8, folded=4),
        LayerSpec(rope=ProportionalRope(rotated=0.25), scale=1.0, values_from_keys=True),
    ),
)
# With 2 heads in an entry of 16: 8 devices have half the queries of one.
PAIRS = dataclasses.replace(
    CONFIG, kinds=(dataclasses.replace(CONFIG.kinds[0], folded=2), CONFIG.kinds[1])
)
MIXTURE = dataclasses.replace(
    CONFIG, experts=ExpertsConfig(count=4, chosen=2, shared=48, own_norms=True)
)
LENGTHS, NEW = (37, 21, 30), 6
POLICIES = {
    "snapkv": jaxkv.SnapKV(budget=16, window=8),
    "h2o": jaxkv.H2O(budget=16),
    "adakv": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=16, window=8)),
    "pyramidkv": jaxkv.PyramidKV(budget=16, window=8),
    "criticalkv": jaxkv.CriticalKV(base=jaxkv.SnapKV(budget=16, window=8)),
    "expected": jaxkv.ExpectedAttention(budget=16),
    "d2o": jaxkv.D2O(budget=16, layers=UniformLayers()),
    "every": jaxkv.SnapKV(budget=16, window=8, every=4),
    "quest": jaxkv.Quest(budget=16, page=4, dense_layers=0),
    "int8": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=16, window=8, store="int8")),
}
KVZIP = jaxkv.KVzip(budget=16, **REPEATED)
POLICIES["kvzip+"] = dataclasses.replace(KVZIP, over="layer", weighted=True)


def model_of(config=CONFIG):
    return tiny.tiny(config)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_batch_keeps_and_answers_as_its_sequences_alone(policy):
    """Windows keep their last tokens, other layers the policy's; bytes are as planned."""
    model, ids = model_of(), tiny.prompts(3, LENGTHS)
    cache, _, needed = tiny.run(model, ids, policy)
    assert cache.nbytes == needed.cache_bytes
    session = jaxkv.Session(model, policy)
    cache, alone = (session.prefill(each, new=NEW) for each in (ids, ids[1:2]))
    for at, head in np.ndindex(4, 2):
        assert cache.positions(at, head)[1].tolist() == alone.positions(at, head)[0].tolist()
        if at % 2 == 0:
            last = [[*range(length - WINDOW, length)] for length in LENGTHS]
            assert [each.tolist() for each in cache.positions(at, head)] == last
    if policy.composed.read.reads_all_entries:
        assert (cache.kept[1::2].sum(axis=(0, 2)) == 2 * 2 * 16).all()
    tokens, own = (session.sample(each, NEW)[1] for each in (cache, alone))
    assert tokens[1].tolist() == own[0].tolist()


@pytest.mark.parametrize("name", ["adakv", "d2o"])
def test_slots_give_the_tokens_of_a_sequence_alone(name):
    slot_runs.check(model_of(), POLICIES[name], slot_runs.requests(3, 5))


@pytest.mark.parametrize(
    "name, config, mesh",
    [
        ("int8", CONFIG, (2, 4)),
        ("d2o", CONFIG, (1, 8)),
        ("h2o", PAIRS, (2, 4)),
        ("snapkv", MIXTURE, (1, 8)),
    ],
)
def test_meshes_and_saved_caches_go_on_alike(name, config, mesh, tmp_path):
    """Two devices and four share an entry's query heads: one of its kv heads each, or half of one's queries."""
    model, policy, ids = model_of(config), POLICIES[name], prompts(5, LENGTHS[:2])
    alone = answers(model, policy, ids, tmp_path / "alone")
    assert answers(model.on(mesh_of(*mesh)), policy, ids, tmp_path / "mesh") == alone


def test_a_large_budget_gives_the_tokens_of_the_full_cache():
    ids, model = tiny.prompts(3, LENGTHS), model_of()
    tokens = []
    for policy in (jaxkv.FullKV(), jaxkv.AdaKV(base=jaxkv.SnapKV(budget=64, window=8))):
        out = jaxkv.generate(model, ids, policy=policy, max_new_tokens=NEW, progress=False)
        tokens.append([each.tokens.tolist() for each in out])
    assert tokens[0] == tokens[1]


def test_prompts_run_at_once_give_the_same_hidden_states():
    """What GPUs run, and what a CPU does, for both kinds of layers."""
    for index in range(2):
        needs = Needs(queries=4)
        outs, real = running.layer_by_each_implementation(model_of(), index, needs, (32, 19))
        one, other = (np.asarray(each.x)[real] for each in outs)
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
        assert outs[0].k.shape == (2, 2, 32, CONFIG.entry_dims[index])


def test_bytes_are_those_of_each_layer():
    """Entries of 3 heads of 8 channels, and of one of 16: by hand, by the plan, and by the allocator."""
    kinds = (dataclasses.replace(CONFIG.kinds[0], folded=3), CONFIG.kinds[1])
    config = dataclasses.replace(CONFIG, kinds=kinds, heads=6, kv_heads=2, layers=2)
    model, ids = model_of(config), tiny.prompts(3, (32, 32))
    cache, _, needed = tiny.run(model, ids, jaxkv.FullKV())
    pools = [sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) for pool in cache.pools]
    assert pools == [2 * 2 * WINDOW * (4 * 48 + 4), 2 * 2 * 32 * (4 * 32 + 4)]
    assert cache.nbytes == needed.cache_bytes and cache.entry_bytes == 4 * 32
    assert cache.full_nbytes == cache.kept_nbytes == 2 * 2 * 4 * (WINDOW * 48 + 32 * 32)
    ids = np.asarray(ids, np.int32)
    _, _, kept, nbytes = measure_text_losses(
        model, jaxkv.FullKV(), ids[:, :28].tolist(), ids[:, 28:]
    )
    # Windows hold their tokens and those since the last copy; the last token is not run.
    assert nbytes.tolist() == [4 * (2 * 48 * each + 2 * 32 * 31) for each in 2 * kept - 31]
    assert cache.headroom_nbytes((1, 2)) == 2 * (4 * 48 + 4 + 2 * (4 * 32 + 4))
    half = jaxkv.Session(model, jaxkv.SnapKV(budget="8000 B", window=8)).policy
    assert half.composed.budget.value == (8000 - 2 * WINDOW * 196) // (2 * 132)
    parts = half.composed
    shape = compute_slot_shape(parts, config, prompt=32, question=0, new=4, kv_shards=1)
    assert shape.compute_slot_bytes(parts, config, 4) == np.dot(shape.rows, (196, 132))


@pytest.mark.parametrize(
    "policy, message",
    [
        *(
            (policy, "policy=.*entries of different sizes")
            for policy in (
                jaxkv.GlobalBudget(base=jaxkv.KNorm(budget=16)),
                jaxkv.D2O(budget=16),
                jaxkv.CAKE(budget=64),
                jaxkv.SimLayerKV(),
                KVZIP,
            )
        ),
        (jaxkv.H2O(budget=16, store="int4"), "store='.*entries of different sizes: use 'int8'"),
    ],
)
def test_what_layers_of_two_sizes_do_not_support_is_rejected(policy, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.Session(model_of(), policy)


def test_proportional_rotation():
    """A quarter of the pairs, by the frequencies of the whole head."""
    frequencies, factors = compute_rope_frequencies(ProportionalRope(theta=100.0, rotated=0.25), 16)
    np.testing.assert_allclose(frequencies, [1, 100 ** (-2 / 16), *[0] * 6])
    assert factors.tolist() == [1] * 8
    with pytest.raises(ValueError, match="rotated=1.5"):
        ProportionalRope(rotated=1.5)


def test_published_configs():
    """Sizes by hand: 10 layers of 4 heads of 512 channels, and windows of 16 heads of 256."""
    config = catalog()["gemma-4-31b"].config
    local, whole = config.kinds[0], config.kinds[5]
    assert (config.kv_heads, config.head_dim, config.heads_per_entry) == (4, 512, 4)
    assert local.sliding_window == 1024 and config.entry_dims == (*[1024] * 5, 512) * 10
    assert whole.values_from_keys and not local.values_from_keys and whole.scale == 1.0
    assert whole.rope == ProportionalRope(theta=1e6, rotated=0.25) and local.rope == Rope()
    planned = plan_prefill(config, jaxkv.FullKV(), [32768], dtype="bfloat16")
    assert planned.full_bytes == 2 * 2 * (10 * 32768 * 4 * 512 + 50 * 1024 * 16 * 256)
    mixture = catalog()["gemma-4-26b-a4b"].config
    assert (mixture.hidden, mixture.experts.shared, mixture.experts.count) == (704, 2112, 128)


def text(**changes):
    return {**catalog()["gemma-4-31b"].raw["text_config"], **changes}


def test_keys_of_layers_are_those_of_published_files():
    raw = text()
    heads = {"head_dim": raw.pop("global_head_dim")}
    heads["num_key_value_heads"] = raw.pop("num_global_key_value_heads")
    raw["per_layer_config"] = {f"{at:02}": heads for at in range(5, 60, 6)}
    assert jaxkv.ModelConfig.from_hf(raw) == jaxkv.ModelConfig.from_hf(text())
    # Without it, values have weights, and as many heads as in windows.
    own = jaxkv.ModelConfig.from_hf(text(attention_k_eq_v=False))
    assert own.kv_heads == 16 and own.entry_dims[0] == 256 and not own.kinds[5].values_from_keys


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256: .*E2B"),
        ({"num_kv_shared_layers": 20}, "num_kv_shared_layers=20: .*E2B"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"num_key_value_heads": 12}, "num_key_value_heads=12: give a divisor of 32"),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads=3: give a divisor"),
        ({"per_layer_config": {"4": {"head_dim": 512}}}, "per_layer_config="),
        ({"layer_types": ["sliding_attention"] * 60}, "layer_types="),
        ({"attention_k_eq_v": "yes"}, "attention_k_eq_v='yes'"),
        ({"enable_moe_block": True, "num_experts": 8}, "top_k_experts=None"),
    ],
)
def test_configs_that_are_not_built(changes, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.ModelConfig.from_hf(text(**changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"heads": 6}, "kinds=.*heads as a multiple of 8"),
        ({"kinds": (CONFIG.kinds[0], LayerSpec())}, "kinds=.*one rotary embedding"),
        ({"experts": ExpertsConfig(count=4, chosen=2, own_norms=True)}, "experts=.*own_norms"),
        ({"norms": "before", "parallel": True}, "block_multiplier="),
    ],
)
def test_fields_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ValueError, match="sliding_window=None"):
        FoldedLayerSpec(head_dim=8, folded=2)


def test_devices_have_whole_heads_or_parts_of_one():
    kinds = (dataclasses.replace(CONFIG.kinds[0], folded=3), CONFIG.kinds[1])
    config = dataclasses.replace(CONFIG, heads=12, kinds=kinds, hidden=48)
    model = model_of(config)
    with pytest.raises(ValueError, match=r"mesh.model=4: .*give one of \[1, 2\]"):
        model.on(mesh_of(1, 4))


@pytest.mark.parametrize("config", [CONFIG, MIXTURE], ids=["dense", "mixture"])
def test_decoding_gives_the_logits_of_prefill(config):
    model, ids = model_of(config), tiny.prompts(3, LENGTHS)
    _, prefilled = running.prefill(model, ids)
    decoded = np.stack([rows[-1] for rows in running.by_tokens(model, ids)])
    assert running.gap(prefilled, decoded) < 2e-5 * np.abs(prefilled).max()
