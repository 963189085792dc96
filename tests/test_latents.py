"""Multi-head latent attention: one vector of a token for all heads, stored once under policies, slots and meshes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import running
import slot_runs
import tiny
from meshes import answers, mesh_of, prompts
from policy_table import REPEATED
from published import PUBLISHED

import jaxkv
from jaxkv.attention import Implementation, choose_attention_implementations
from jaxkv.cache import DenseLatentStore, Int8LatentStore
from jaxkv.engine.plan import plan_prefill
from jaxkv.models.decoder import Decoder, named_parameters
from jaxkv.models.rope import join_rotated_channels, split_rotated_channels
from jaxkv.models.values import LatentConfig, LayerSpec, Rope, count_rotated_channels
from jaxkv.planning.catalog import catalog
from jaxkv.policies import CustomPolicy, Keep, KeyNorm, Merge
from jaxkv.policies.scorer import Needs
from jaxkv.testing import check_policy

LATENT = LatentConfig(rank=16, rotated=8, unrotated=12, value=10, query_rank=20)
CONFIG = dataclasses.replace(
    tiny.shape(layers=2, kv_heads=1, group=4, dim=LATENT.entry_dim),
    latent=LATENT,
    kinds=(LayerSpec(rope=Rope(share=8 / 24), scale=0.3),),
)
# Values wider than keys, queries of hidden states.
WIDE = dataclasses.replace(
    CONFIG, latent=dataclasses.replace(LATENT, value=26, query_rank=None), heads=2
)
LENGTHS = (37, 21, 30)
POLICIES = {
    "snapkv": jaxkv.SnapKV(budget=16, window=8),
    "h2o": jaxkv.H2O(budget=16),
    "adakv": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=16, window=8)),
    "global": jaxkv.GlobalBudget(base=jaxkv.SnapKV(budget=16, window=8)),
    "criticalkv": jaxkv.CriticalKV(base=jaxkv.SnapKV(budget=16, window=8)),
    "expected": jaxkv.ExpectedAttention(budget=16),
    "kvzip": jaxkv.KVzip(budget=16, **REPEATED),
    "cake": jaxkv.CAKE(budget=16, window=8),
    "rkv": jaxkv.RKV(budget=16, window=8),
    "d2o": jaxkv.D2O(budget=16),
    "every": jaxkv.SnapKV(budget=16, window=8, every=4),
    "values again": jaxkv.CurDKV(budget=16, every=4),
    "rolling": jaxkv.StreamingLLM(budget=16, rolling_positions=True),
    "quest": jaxkv.Quest(budget=16, page=4, dense_layers=1),
    "omnikv": jaxkv.OmniKV(budget=16, filter_layers=(0,), adjacent=0),
    "int8": jaxkv.SnapKV(budget=16, window=8, store="int8"),
    "int4": jaxkv.H2O(budget=16, store="int4"),
}


def model_of(config=CONFIG):
    return tiny.tiny(config)


def forward(model, ids):
    """Logits of the token after one sequence in float64, with keys and values of every head."""
    config, latent = model.config, model.config.latent
    spec = config.get_layer_spec(0)
    of = {
        name: np.asarray(each.get_value(), np.float64)
        for name, each in named_parameters(model.decoder)
    }

    def normed(x, scale, eps):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * scale

    half = latent.rotated // 2
    angle = np.arange(len(ids))[:, None] * spec.rope.theta ** (-np.arange(half) / half)

    def turned(x):
        one, other = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)

    def rotated_first(x, other):
        """A head's rotated and other channels, of channels in the library's order."""
        first, second = np.split(x, 2, axis=-1)
        return (
            np.concatenate([first[..., :half], second[..., :half]], axis=-1),
            np.concatenate([first[..., half:], second[..., half:]], axis=-1),
        )

    x = of["embedding"][np.asarray(ids)]
    for index in range(config.layers):
        part = lambda name, index=index: of[f"blocks.{index}.{name}"]  # noqa: E731
        own = normed(x, part("attention_norm.scale"), config.norm_eps)
        low = own
        if latent.query_rank is not None:
            low = normed(
                own @ part("attention.q_down").T, part("attention.q_down_norm.scale"), 1e-6
            )
        q = np.einsum("ne,hce->hnc", low, part("attention.q")[0])
        q_turned, q_rest = rotated_first(q, latent.unrotated)
        both = own @ part("attention.latent").T
        latents = normed(both[:, : latent.rank], part("attention.latent_norm.scale"), 1e-6)
        k_rest = np.einsum("nr,hur->hnu", latents, part("attention.key_up")[0])
        values = np.einsum("nr,hvr->hnv", latents, part("attention.value_up")[0])
        logits = np.einsum("hnu,hmu->hnm", q_rest, k_rest)
        logits += np.einsum("hnr,mr->hnm", turned(q_turned), turned(both[:, latent.rank :]))
        logits = np.where(np.tri(len(x), dtype=bool), logits * spec.scale, -np.inf)
        share = np.exp(logits - logits.max(axis=-1, keepdims=True))
        share /= share.sum(axis=-1, keepdims=True)
        out = np.einsum("hnm,hmv->nhv", share, values).reshape(len(x), -1)
        x = x + out @ part("attention.out").T
        own = normed(x, part("mlp_norm.scale"), config.norm_eps)
        gate, up = (own @ part("mlp.gate_up")[index].T for index in range(2))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ part("mlp.down").T
    return normed(x[-1], of["norm.scale"], config.norm_eps) @ of["head"].T


@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=["narrow", "wide"])
def test_logits_are_those_of_keys_and_values_of_every_head(config):
    model, ids = model_of(config), tiny.prompts(3, LENGTHS)
    expected = np.stack([forward(model, each) for each in ids])
    _, prefilled = running.prefill(model, ids)
    decoded = np.stack([rows[-1] for rows in running.by_tokens(model, ids)])
    scale = np.abs(expected).max()
    assert running.gap(prefilled, expected) < 8e-6 * scale
    assert running.gap(decoded, expected) < 8e-6 * scale


def test_prompts_run_at_once_give_the_same_hidden_states_and_sums():
    """What GPUs run, and what a CPU does; attention sums of every head's keys are those of queries of latents."""
    needs = Needs(queries=32, sums=True, norms=True)
    outs, real = running.layer_by_each_implementation(model_of(), 0, needs, (32, 19))
    one, _ = outs
    for name in ("x", "k", "v"):
        mine, its = (np.asarray(getattr(out, name)) for out in outs)
        mine, its = (each if each.ndim == 3 else each[:, 0] for each in (mine, its))
        np.testing.assert_allclose(mine[real], its[real], rtol=2e-5, atol=2e-5)
    q, k = (np.asarray(each, np.float64) for each in (one.q[0, 0], one.k[0, 0]))
    logits = np.where(np.tri(32, dtype=bool), q @ k.T / np.sqrt(LATENT.entry_dim), -np.inf)
    share = np.exp(logits - logits.max(axis=-1, keepdims=True))
    sums = (share / share.sum(axis=-1, keepdims=True)).sum(axis=1)
    for out in outs:
        assert out.extras["sums"].shape == (2, 1, 4, 32)
        np.testing.assert_allclose(out.extras["sums"][0, 0], sums, rtol=1e-4, atol=1e-4)


def test_values_are_keys_without_the_rotated_channels():
    x = jnp.arange(24, dtype=jnp.float32)
    rotated, others = split_rotated_channels(x, 8)
    assert rotated.tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert join_rotated_channels(rotated, others).tolist() == x.tolist()
    cache, _ = running.prefill(model_of(), tiny.prompts(3, LENGTHS))
    assert all(pool.k is pool.v for pool in cache.pools)


def test_a_cache_weighs_one_vector_a_token_and_layer():
    """Bytes by hand: D numbers of 4 bytes and a position; plans and allocators agree."""
    model, ids = model_of(), tiny.prompts(3, (32, 32))
    cache, _, needed = tiny.run(model, ids, jaxkv.FullKV())
    pools = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.pools))
    assert pools == 2 * 2 * 32 * (4 * LATENT.entry_dim + 4)
    assert cache.nbytes == needed.cache_bytes
    assert cache.entry_bytes == 4 * LATENT.entry_dim and cache.full_nbytes == 2 * 2 * 32 * 96
    int8, _, needed = tiny.run(model, ids, jaxkv.FullKV(store="int8"))
    assert int8.entry_bytes == LATENT.entry_dim + 2 and int8.nbytes == needed.cache_bytes
    half = jaxkv.Session(model, jaxkv.SnapKV(budget="3000 B", window=8)).policy
    assert half.composed.budget.value == 3000 // (2 * 100)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_keep_their_promises(name):
    check_policy(POLICIES[name], model=model_of())


@pytest.mark.parametrize("name", ["adakv", "d2o", "int4"])
def test_slots_give_the_tokens_of_a_sequence_alone(name):
    slot_runs.check(model_of(), POLICIES[name], slot_runs.requests(3, 5))


@pytest.mark.parametrize("name", ["adakv", "h2o", "d2o", "every", "quest", "int8"])
def test_meshes_and_saved_caches_go_on_alike(name, tmp_path):
    model, policy, ids = model_of(), POLICIES[name], prompts(5, LENGTHS[:2])
    found = answers(model.on(mesh_of(2, 4)), policy, ids, tmp_path / "split")
    assert found == answers(model, policy, ids, tmp_path / "alone")


@pytest.mark.parametrize(
    "policy, message",
    [
        (jaxkv.CaM(budget=64), "merge=ValueMerge.*keys and values at once"),
        (CustomPolicy(budget=16, scorer=KeyNorm(), merge=Merge(metric="both")), "merge=Merge"),
        (
            jaxkv.OmniKV(budget=16, filter_layers=(0,), adjacent=0, offload=True),
            "policy=OmniKV.*host memory",
        ),
        (jaxkv.SnapKV(store="mixed"), "store='MixedStore'.*use 'dense'"),
    ],
)
def test_what_latents_do_not_support_is_rejected(policy, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.Session(model_of(), policy)


def test_stores_without_values_are_for_latents_alone():
    with pytest.raises(ValueError, match="store='DenseLatentStore': it drops values"):
        jaxkv.Session(tiny.tiny(tiny.TWO_LAYERS), jaxkv.SnapKV(store=DenseLatentStore))


def test_wrappers_pass_the_store_on():
    for policy in (
        jaxkv.AdaKV(budget=64),
        jaxkv.CriticalKV(base=jaxkv.AdaKV(base=jaxkv.SnapKV(budget=64))),
        jaxkv.Quest(base=jaxkv.SnapKV(budget=64), dense_layers=1),
        CustomPolicy(budget=16, scorer=KeyNorm(), keep=Keep(sinks=2)),
    ):
        fitted = jaxkv.Session(model_of(), policy).policy
        assert fitted.composed.store is DenseLatentStore
        assert jaxkv.Session(model_of(), fitted).policy == fitted
    quantised = jaxkv.Session(model_of(), jaxkv.AdaKV(budget=64, store="int8")).policy
    assert quantised.composed.store is Int8LatentStore


def test_kernels_leave_wide_entries_to_xla():
    """Of DeepSeek-V2: heads of 192 within a prompt, entries of 576."""
    options = {"dtype": jnp.dtype(jnp.bfloat16), "head_dim": 192, "entry_dim": 576}
    gpu = choose_attention_implementations("auto", platform="cuda", capability=(9, 0), **options)
    assert (gpu.prefill, gpu.decode) == (Implementation.CUDNN, Implementation.XLA)
    tpu = choose_attention_implementations("auto", platform="tpu", **options)
    assert (tpu.prefill, tpu.decode) == (Implementation.TPU, Implementation.XLA)


def test_published_configs():
    """Bytes of an entry and scales by hand."""
    lite = catalog()["deepseek-v2-lite"].config
    assert lite.latent == LatentConfig(rank=512, rotated=64, unrotated=128, value=128)
    assert (lite.kv_heads, lite.head_dim, lite.prompt_head_dim) == (1, 576, 192)
    planned = plan_prefill(lite, jaxkv.FullKV(), [1024], dtype="bfloat16")
    assert planned.full_bytes == 27 * 1024 * 576 * 2
    spec = lite.get_layer_spec(0)
    assert spec.scale == pytest.approx(192**-0.5 * (1 + 0.0707 * np.log(40)) ** 2)
    assert spec.rope.attention_factor == 1.0 and count_rotated_channels(spec.rope, 576) == 64
    kimi = jaxkv.ModelConfig.from_hf(PUBLISHED["kimi-k2"]["config"])
    assert kimi.get_layer_spec(0).scale == pytest.approx(192**-0.5 * (1 + 0.1 * np.log(32)) ** 2)


@pytest.mark.parametrize(
    "name, dtype, weights, bound",
    [("deepseek_v2", "bfloat16", None, 0.027), ("deepseek_v3", "float32", "int8", 0.067)],
)
def test_16_bits_and_8_bit_weights(name, dtype, weights, bound):
    """Bounds are one and a half times what was measured."""
    folder, ids = running.GOLDEN / "models" / name, prompts(2, LENGTHS)
    _, expected = running.prefill(running.golden_model(name), ids)
    narrow = jaxkv.load(folder, dtype=dtype, weights=weights, progress=False)
    _, logits = running.prefill(narrow, ids)
    decoded = np.stack([rows[-1] for rows in running.by_tokens(narrow, ids)])
    for each in (logits, decoded):
        assert np.sqrt(np.mean((each - expected) ** 2) / np.mean(expected**2)) < bound


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_weights(weights):
    config = dataclasses.replace(
        CONFIG, embed=32, hidden=32, latent=dataclasses.replace(LATENT, query_rank=32, value=16)
    )
    decoder = Decoder(config, weights=weights)
    kinds = {
        name.rsplit(".", 1)[-1]: each.get_value().dtype for name, each in named_parameters(decoder)
    }
    codes = jnp.int8 if weights == "int8" else jnp.uint8
    assert kinds["q"] == kinds["q_down"] == kinds["latent"] == kinds["out"] == codes
    assert kinds["key_up"] == kinds["value_up"] == jnp.float32


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"kv_heads": 2, "heads": 4}, "latent=.*kv_heads=1"),
        ({"head_dim": 32}, "latent=.*head_dim=24"),
        ({"qkv_bias": True}, "latent=.*biases"),
        ({"attention_gate": True}, "latent=.*gate"),
        ({"value_norm": True}, "latent=.*norms"),
        ({"norms": "after"}, "latent="),
    ],
)
def test_configs_that_latents_do_not_fit(changed, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changed)


@pytest.mark.parametrize(
    "changed, message",
    [({"rotated": 7}, "rotated=7: odd"), ({"rank": 10}, "rank=10: give at least unrotated=12")],
)
def test_widths(changed, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LATENT, **changed)


def test_a_configs_widths_are_numbers():
    config = json.loads((running.GOLDEN / "models" / "mistral4" / "config.json").read_text())
    with pytest.raises(ValueError, match="v_head_dim=None: give an integer"):
        jaxkv.ModelConfig.from_hf(config | {"v_head_dim": None})
