"""Models with a learned logit per query head in the softmax, without a value (gpt-oss): oracles, policies, meshes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import tiny
from meshes import mesh_of
from test_windows import LENGTHS, NEW, SHAPE, prompts

import jaxkv
from jaxkv import attention
from jaxkv.attention import Implementation, backend_of, columns, xla
from jaxkv.attention.xla import Walk
from jaxkv.models.layers import linear
from jaxkv.models.rope import angles, rotate

# Alternate layers of a window, as in gpt-oss; and a model without any.
SUNK = dataclasses.replace(SHAPE, sink_logits=True)
WHOLE = dataclasses.replace(tiny.shape(layers=3, kv_heads=2, group=3, dim=16), sink_logits=True)
OPTIONS = {"max_new_tokens": 12, "stop_at_eos": False}
POLICIES = {
    "full": jaxkv.FullKV(),
    "snapkv": jaxkv.SnapKV(budget=16, window=6),
    "snapkv, int4": jaxkv.SnapKV(budget=16, window=6, store="int4"),
    "adakv": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=16, window=6)),
    "h2o": jaxkv.H2O(budget=16),
    "tova": jaxkv.TOVA(budget=16),
}
# What is not built beside windows.
MORE = {
    "every": jaxkv.SnapKV(budget=16, window=6, every=3),
    "global": jaxkv.GlobalBudget(base=jaxkv.SnapKV(budget=16, window=6)),
    "variance": jaxkv.D2O(budget=16),
    "quest": jaxkv.Quest(budget=12, page=4, dense_layers=1),
    "omnikv": jaxkv.OmniKV(budget=12, filter_layers=(0,)),
    "kvzip": jaxkv.KVzip(
        budget=16, **{"chunk": 24, "tail": 3, "first": (1, 2, 3), "following": (4, 5), "closing": (6,)}
    ),
}


def attended(q, k, v, sinks):
    """Oracle of one query in float64: output, log-sum-exp and the share of each key, a sink logit in the softmax."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    logits = np.append(k @ q / math.sqrt(len(q)), float(sinks))
    weights = np.exp(logits - logits.max())
    shares = weights / weights.sum()
    return shares[:-1] @ v, logits.max() + math.log(weights.sum()), shares[:-1]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def test_softmaxes_by_an_oracle():
    """Of a mask's keys, of the last queries on all keys, and merged behind any attention."""
    q, k, v, sinks = 2 * normal(0, 3, 4, 8), normal(1, 9, 8), normal(2, 9, 8), normal(3, 3) + 1
    seen = np.tril(np.ones((4, 9), bool), 5)
    out = xla.masked(q, k, v, jnp.asarray(seen), sinks)
    shares = columns.probabilities(q, k, jnp.arange(5, 9, dtype=jnp.int32), sinks)
    plain = columns.probabilities(q, k, jnp.arange(5, 9, dtype=jnp.int32))
    for group, token in np.ndindex(3, 4):
        rows = seen[token]
        want, _, share = attended(q[group, token], k[rows], v[rows], sinks[group])
        np.testing.assert_allclose(out[group, token], want, atol=1e-5)
        np.testing.assert_allclose(shares[group, token, rows], share, atol=1e-6)
        assert shares[group, token].sum() < plain[group, token].sum() - 1e-3


@pytest.mark.parametrize("implementation", [Implementation.XLA, Implementation.INTERPRETED])
@pytest.mark.parametrize("walk", Walk, ids=str)
def test_a_pools_output_and_scores(walk, implementation):
    """Scores are shares of a softmax with the sink logits, and so is the output; an empty segment gives zeros."""
    heads, group, dim, each = 2, 3, 16, 150
    q, score, sinks = 2 * normal(0, 2, heads, group, dim), normal(3, 2, heads * each), normal(4, heads, group) + 1
    k, v = (normal(seed, 2, heads * each, dim) for seed in (1, 2))
    length = np.asarray([[150, 150], [3, 0]] if walk is Walk.STRIDES else [[140, 9], [0, 30]], np.int32)
    start = np.asarray([[0, 150]] * 2 if walk is Walk.STRIDES else [[4, 144], [6, 200]], np.int32)
    expected, outs = np.asarray(score, np.float64), np.zeros(q.shape)
    for row, head, member in np.ndindex(2, heads, group):
        span = slice(start[row, head], start[row, head] + length[row, head])
        query = q[row, head, member]
        outs[row, head, member], _, share = attended(query, k[row, span], v[row, span], sinks[head, member])
        expected[row, span] += share / group
    begin, rows, counts = jnp.asarray(start), jnp.asarray(length), jnp.asarray([True, True])
    for options in ({}, {"widest": 150}):
        given = dict(options, walk=walk, sink_logits=sinks)
        out, found = backend_of(implementation).attend_scored(q, k, v, begin, rows, score, counts, **given)
        if isinstance(found, attention.Received):
            found = attention.add_received(score, found, begin, counts)
        np.testing.assert_allclose(out, outs, atol=2e-5)
        np.testing.assert_allclose(found, expected, atol=2e-5)


def forward(model, ids):
    """Oracle: logits behind each token of one text, the whole attention matrix in float64, block by block."""
    config, x = model.config, model.decoder.embedding[...][jnp.asarray(ids)]
    position = np.arange(len(ids))
    for layer, block in enumerate(model.decoder.blocks):
        spec = config.spec_of(layer)
        by = angles(jnp.asarray(position, jnp.int32)[None], spec.rope, config.head_dim)
        normed = block.normed(x[None])
        q = np.asarray(rotate(jnp.moveaxis(linear(block.attention, "q", normed), 1, 3), by), np.float64)[0]
        kv = linear(block.attention, "kv", normed)
        k = np.asarray(rotate(jnp.moveaxis(kv[:, :, 0], 1, 2), by), np.float64)[0]
        v = np.asarray(jnp.moveaxis(kv[:, :, 1], 1, 2), np.float64)[0]
        sinks, out = np.asarray(block.attention.sink_logits[...]), np.zeros(q.shape)
        for head, group, token in np.ndindex(q.shape[:3]):
            first = 0 if spec.window is None else max(0, token - spec.window + 1)
            rows = slice(first, token + 1)
            out[head, group, token] = attended(q[head, group, token], k[head, rows], v[head, rows], sinks[head, group])[
                0
            ]
        x = block.finish(x[None], jnp.asarray(out[None], x.dtype))[0]
    normed = model.decoder.norm(x)
    return np.asarray(
        linear(model.decoder, "head", normed)
        if model.decoder.head is not None
        else normed @ model.decoder.embedding[...].T
    )


@pytest.mark.parametrize("config", [SUNK, WHOLE], ids=["windows", "whole"])
def test_texts_by_an_oracle(config):
    """Prompts, questions of several tokens on top of them, and drawn tokens."""
    model = tiny.tiny(config)
    session, rng, texts = jaxkv.Session(model, jaxkv.FullKV()), np.random.default_rng(1), prompts()
    cache = session.prefill(texts)
    for lengths in ((3, 11, 1), (1, 1, 1), (19, 2, 8)):
        for row, text in enumerate(texts):
            np.testing.assert_allclose(cache.logits[row], forward(model, text)[-1], rtol=1e-4, atol=5e-5)
        asked = [rng.integers(3, config.vocab, n).tolist() for n in lengths]
        cache, drawn = session.draw(session.extend(cache, asked), 3)
        texts = [text + more + new for text, more, new in zip(texts, asked, drawn.tolist(), strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drawn_tokens_are_those_of_the_longer_prompt(dtype):
    """Past several windows; in 16 bits rows wait beside the pools of a CPU."""
    session = jaxkv.Session(tiny.tiny(SUNK, dtype=dtype), jaxkv.FullKV())
    _, drawn = session.draw(session.prefill(prompts(), new=NEW), NEW)
    texts = [text + tokens for text, tokens in zip(prompts(), drawn.tolist(), strict=True)]
    again = session.prefill([text[: size + NEW - 1] for text, size in zip(texts, LENGTHS, strict=True)])
    assert np.asarray(again.logits).argmax(axis=-1).tolist() == [text[-1] for text in texts]


@pytest.mark.parametrize(
    ("config", "name"),
    [*((SUNK, name) for name in POLICIES), *((WHOLE, name) for name in MORE)],
    ids=lambda each: str(each)[:9],
)
def test_kernels_and_meshes(config, name):
    """Prefill, scores, steps and evictions by interpreted kernels, and split by heads: the same tokens."""
    model, policy = tiny.tiny(config), (POLICIES | MORE)[name]
    plain = jaxkv.generate(model, prompts(), **OPTIONS, policy=policy)
    for given in ({"implementation": "pallas"}, {"mesh": mesh_of(2, 2)}):
        found = jaxkv.generate(model, prompts(), **OPTIONS, policy=policy, **given)
        assert [each.tolist() for each in found.tokens] == [each.tolist() for each in plain.tokens], given
    meshes.forget()


@pytest.mark.parametrize("name", ["adakv", "h2o", "tova"])
def test_a_budget_of_the_whole_prompt_gives_the_full_caches_tokens(name):
    model, policy = tiny.tiny(SUNK), POLICIES[name]
    wide = (
        jaxkv.AdaKV(base=jaxkv.SnapKV(budget=64, window=6))
        if name == "adakv"
        else dataclasses.replace(policy, budget=64)
    )
    full, ours = (jaxkv.generate(model, prompts(), **OPTIONS, policy=each) for each in (jaxkv.FullKV(), wide))
    assert [each.tolist() for each in ours.tokens] == [each.tolist() for each in full.tokens]


def test_sinks_change_what_is_kept_and_drawn():
    """They are read: without them answers and choices are others."""
    sunk, plain = (tiny.tiny(dataclasses.replace(WHOLE, sink_logits=given)) for given in (True, False))
    caches = [jaxkv.Session(model, jaxkv.SnapKV(budget=16, window=6)).prefill(prompts()) for model in (sunk, plain)]
    assert np.abs(np.asarray(caches[0].logits) - np.asarray(caches[1].logits)).max() > 1e-2
