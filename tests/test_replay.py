"""KVzip's second pass over prompts, against float64 attention over prompt and repeated chunk in one text."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
import tiny
from policy_table import REPEATED

import jaxkv
from jaxkv import GlobalBudget, KVzip
from jaxkv.engine import replay
from jaxkv.engine.embedding import embed_tokens
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.plan import plan_prefill
from jaxkv.engine.prefill import run_layer
from jaxkv.engine.progress import run_generator
from jaxkv.engine.tokens import compute_angles_by_rope
from jaxkv.models.values import LayerSpec
from jaxkv.policies.scorer import Needs, PromptReplay, ReplayWeighting

LENGTHS = (61, 24, 5)
SINKS = 2
# Tokens of the longest text in which a chunk is read again.
MOST_AGAIN = 30
# A window shorter than a chunk, and one longer than the shorter prompt.
KINDS = (LayerSpec(sliding_window=7), LayerSpec(), LayerSpec(sliding_window=40), LayerSpec())
WINDOWS = dataclasses.replace(tiny.shape(layers=4, kv_heads=2, group=3, dim=16), kinds=KINDS)


def read(model, texts, needs):
    """What each layer of the model returns for texts, padded on the right to a bucket; layer by layer."""
    slots, lengths = (
        round_up_to_bucket(max(map(len, texts))),
        jnp.asarray([len(ids) for ids in texts], jnp.int32),
    )
    flat, x = (
        model.flat_decoder,
        jnp.asarray([ids + [0] * (slots - len(ids)) for ids in texts], jnp.int32),
    )
    x, tables = embed_tokens(flat.ends, x, graphs=flat.graphs), compute_angles_by_rope(flat, slots)
    for index in range(len(flat.blocks)):
        out = run_layer(flat, index, x, lengths, tables, needs, jaxkv.attention.Implementation.XLA)
        x = out.x
        yield out


def layers_of(model, ids, needs):
    """What each layer of the model returns for one text."""
    return read(model, [ids], needs)


def oracle(model, ids, *, weighted):
    """The second pass's attention [K, n] of layers without a window: each chunk in one text behind the whole prompt."""
    n, config = len(ids), model.config
    found = [np.zeros((config.kv_heads, n)) for _ in range(config.layers)]
    texts = {name: REPEATED[name] for name in ("first", "following", "closing", "tail")}
    for begin, again in o.replay_ids(ids, REPEATED["chunk"], **texts):
        for index, out in enumerate(layers_of(model, ids + again, Needs(queries=MOST_AGAIN))):
            if config.sliding_windows[index] is not None:
                continue
            q = out.q[0, :, :, MOST_AGAIN - len(again) :]
            k, v = (np.asarray(each, np.float64)[0, :, : n + len(again)] for each in (out.k, out.v))
            weights = weights_of(model, index, ids, again, v[:, :n]) if weighted else None
            peaks = o.replay_peaks(q, k, n, begin, REPEATED["chunk"], SINKS, weights)
            found[index] = np.maximum(found[index], peaks)
    return found


def weights_of(model, index, ids, again, v):
    """KVzip+'s factors [K, G, N, n]: norms of values at the output over norms of the queries' normed hidden states."""
    config = model.config
    x = np.asarray(hidden(model, index, ids + again), np.float64)[len(ids) : len(ids) + len(again)]
    weight = np.asarray(model.decoder.blocks[index].attention.out[...], np.float64)
    weight = weight.reshape(config.embed, config.kv_heads, config.group_size, config.head_dim)
    values = np.linalg.norm(np.einsum("knd,ekgd->kgne", v, weight), axis=-1)
    return values[:, :, None] / np.linalg.norm(x, axis=-1)[None, None, :, None]


def hidden(model, index, ids):
    """Normed hidden states [n, E] that enter attention of one layer, by blocks run without any cache."""
    x = model.flat_decoder.graphs.rebuild_embedding_and_head(model.flat_decoder.ends).embed_tokens(
        jnp.asarray([ids], jnp.int32)
    )
    for _, out in zip(range(index), layers_of(model, ids, Needs()), strict=False):
        # The next block takes the buffer.
        x = jnp.copy(out.x)
    return model.decoder.blocks[index].normalise_for_attention(x)[0, : len(ids)]


def peaks_of(model, prompts, asked):
    """The library's second pass over a padded batch: [layer][sequence] -> [K, n]."""
    lengths = np.asarray([len(ids) for ids in prompts])
    slots = round_up_to_bucket(int(lengths.max()))
    tokens = np.asarray([ids + [0] * (slots - len(ids)) for ids in prompts], np.int32)
    layers = read(model, prompts, Needs())
    padded = replay.PaddedPrompts(
        tokens, lengths, replay.encode_second_pass_texts(asked, None, model.config)
    )
    walk = replay.compute_peak_attention(
        model.flat_decoder,
        dict(enumerate(layers)),
        padded,
        asked,
        implementation=jaxkv.attention.Implementation.XLA,
        worth=1.0,
    )
    shares = []
    found = run_generator(walk, shares.append)
    assert sum(shares) == pytest.approx(1.0)
    return [[np.asarray(layer)[row, :, :n] for row, n in enumerate(lengths)] for layer in found]


@pytest.mark.parametrize("weighting", [ReplayWeighting.NONE, ReplayWeighting.VALUES])
def test_attention_of_the_second_pass_agrees_with_the_oracle(weighting):
    """Of layers with a window, which choose nothing, what they hand to the layers above them counts."""
    model, prompts = tiny.tiny(WINDOWS), tiny.prompts(3, (61, 20))
    found = peaks_of(model, prompts, PromptReplay(sinks=SINKS, weighting=weighting, **REPEATED))
    for row, ids in enumerate(prompts):
        expected = oracle(model, ids, weighted=weighting is ReplayWeighting.VALUES)
        for layer, each in enumerate(expected):
            if model.config.sliding_windows[layer] is not None:
                assert not found[layer][row].any()
                continue
            assert (each[:, SINKS:] > 0).all()
            np.testing.assert_allclose(found[layer][row], each, rtol=2e-4, atol=1e-7)


def test_chunks_may_be_longer_than_prompts():
    model, prompts = tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(4, (30, 9))
    texts = {name: REPEATED[name] for name in ("first", "following", "closing", "tail")}
    whole, large = (
        peaks_of(model, prompts, PromptReplay(chunk=chunk, **texts)) for chunk in (32, 2048)
    )
    for one, other in zip(whole, large, strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left, right)


def test_the_cache_is_the_full_prefill_compressed():
    """Logits are those of the full cache, rows are the prompt's own, and a budget of all rows changes nothing."""
    model, prompts = tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(5, LENGTHS)
    full, logits, _ = tiny.run(model, prompts, jaxkv.FullKV())
    for policy in (
        KVzip(budget=1.0, **REPEATED),
        KVzip(budget=0.5, over="layer", min_budget="clamp", **REPEATED),
    ):
        cache, mine, _ = tiny.run(model, prompts, policy)
        np.testing.assert_allclose(mine, logits, rtol=1e-5, atol=1e-5)
    assert tiny.kept(tiny.run(model, prompts, KVzip(budget=1.0, **REPEATED))[0]) == tiny.kept(full)


def test_three_ways_to_share_the_budget():
    model, prompts = tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(6, (60, 48))
    kept = {}
    for over in ("model", "layer", "head"):
        cache, _, _ = tiny.run(model, prompts, KVzip(budget=16, over=over, **REPEATED))
        kept[over] = np.asarray(cache.length)
        assert (kept[over].sum(axis=(0, 2)) == 16 * kept[over].shape[0] * kept[over].shape[2]).all()
    assert (kept["head"] == 16).all()
    assert (kept["layer"].mean(axis=2) == 16).all() and not (kept["layer"] == 16).all()
    assert not (kept["model"].mean(axis=2) == 16).all()
    # The paper's budget over all layers is also what `GlobalBudget` makes of rows that each head chooses alone.
    ours = tiny.run(model, prompts, KVzip(budget=16, **REPEATED))[0]
    other = tiny.run(model, prompts, GlobalBudget(base=KVzip(budget=16, over="head", **REPEATED)))[
        0
    ]
    assert tiny.kept(ours) == tiny.kept(other)


def test_texts_need_a_tokenizer_and_ids_a_vocabulary(as_users_call):
    model = tiny.tiny(tiny.TWO_LAYERS)
    with pytest.raises(ValueError, match="first='.*no tokenizer: pass token ids"):
        jaxkv.Session(model, KVzip(budget=16))
    with pytest.raises(ValueError, match=r"closing=\(64,\): token ids outside of \[0, 64\)"):
        jaxkv.Session(model, KVzip(budget=16, **REPEATED | {"closing": (64,)}))


def test_plans_count_texts_tails_and_sinks():
    """A plan's bytes grow with the tokens that are read before a chunk, up to the prompt's length for its tail."""
    model = tiny.tiny(tiny.TWO_LAYERS)

    def peak(**given):
        return plan_prefill(model.config, KVzip(budget=0.9, **REPEATED | given), [400]).peak_bytes

    assert peak(first=(1,) * 3000) > peak(first=(1,) * 1000) > peak()
    assert peak(tail=10**8) == peak(tail=512) > peak()
    assert peak(sinks=300) > peak()


def test_a_tail_may_be_longer_than_the_prompt():
    model, prompts = tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(8, (30, 9))
    caches = [
        tiny.run(model, prompts, KVzip(budget=8, **REPEATED | {"tail": tail}))[0]
        for tail in (24, 10**8)
    ]
    assert tiny.kept(caches[0]) == tiny.kept(caches[1])


def test_plans_for_gpus_count_all_layers_that_wait_for_the_second_pass():
    """Whichever heads compete: a layer runs while the rows of all those below are there, uncompressed."""
    kw = {"gpus": "h100x1", "context": 100_000}
    small, full = (
        jaxkv.plan("llama-3.1-8b", policy=policy, **kw)
        for policy in (KVzip(budget=0.1, over="layer"), jaxkv.SnapKV(budget=1.0))
    )
    assert small.sizes.peak_device_bytes >= 0.98 * full.sizes.peak_device_bytes
