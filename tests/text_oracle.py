"""Models that change the softmax, by sink logits or capped logits: an oracle of whole texts, and checks of both."""

import dataclasses
import math

import jax.numpy as jnp
import meshes
import numpy as np
import tiny
from meshes import mesh_of
from oracles.scores import pool_columns
from test_windows import LENGTHS, NEW, prompts

import jaxkv
from jaxkv.models.layers import linear
from jaxkv.models.rope import angles, rotate

OPTIONS = {"max_new_tokens": 12, "stop_at_eos": False}


def capped(logits, cap):
    logits = np.asarray(logits, np.float64)
    return logits if cap is None else cap * np.tanh(logits / cap)


def attended(q, k, v, sinks=None, *, cap=None, scale=None):
    """One query in float64: output, log-sum-exp and the share of each key; logits capped, a sink in the softmax."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    logits = capped(k @ q * (1 / math.sqrt(len(q)) if scale is None else scale), cap)
    logits = logits if sinks is None else np.append(logits, float(sinks))
    weights = np.exp(logits - logits.max())
    shares = (weights / weights.sum())[: len(k)]
    return shares @ v, logits.max() + math.log(weights.sum()), shares


def read(model, ids):
    """Logits behind each token of one text, and each layer's shares `[K, G, n, n]` of attention, block by block."""
    config, x = model.config, model.decoder.embedding[...][jnp.asarray(ids)]
    position, paid = np.arange(len(ids)), []
    for layer, block in enumerate(model.decoder.blocks):
        spec = config.spec_of(layer)
        by = angles(jnp.asarray(position, jnp.int32)[None], spec.rope, config.head_dim)
        normed = block.normed(x[None])
        q = np.asarray(
            rotate(jnp.moveaxis(linear(block.attention, "q", normed), 1, 3), by), np.float64
        )[0]
        kv = linear(block.attention, "kv", normed)
        k = np.asarray(rotate(jnp.moveaxis(kv[:, :, 0], 1, 2), by), np.float64)[0]
        v = np.asarray(jnp.moveaxis(kv[:, :, 1], 1, 2), np.float64)[0]
        sinks = np.asarray(block.attention.sink_logits[...]) if config.sink_logits else None
        out, shares = np.zeros(q.shape), np.zeros((*q.shape[:3], len(ids)))
        for head, group, token in np.ndindex(q.shape[:3]):
            rows = slice(0 if spec.window is None else max(0, token - spec.window + 1), token + 1)
            of = (
                q[head, group, token],
                k[head, rows],
                v[head, rows],
                None if sinks is None else sinks[head, group],
            )
            out[head, group, token], _, shares[head, group, token, rows] = attended(
                *of, cap=spec.softcap, scale=spec.scale
            )
        paid.append(shares)
        x = block.finish(x[None], jnp.asarray(out[None], x.dtype))[0]
    normed, decoder = model.decoder.norm(x), model.decoder
    last = (
        normed @ decoder.embedding[...].T
        if decoder.head is None
        else linear(decoder, "head", normed)
    )
    return capped(last, config.logit_softcap), paid


def kept_by_snapkv(model, ids, *, budget, window):
    """Mask `[L, K, n]` of rows that SnapKV keeps: the window, and the best means of what its queries pay, pooled."""
    shares, count = read(model, ids)[1], len(ids)
    kept = np.zeros((len(shares), len(shares[0]), count), bool)
    kept[..., max(0, count - window) :] = True
    for layer, head in np.ndindex(kept.shape[:2]):
        if count > budget:
            mean = shares[layer][head, :, count - window :, : count - window].mean(axis=(0, 1))
            best = np.argsort(-pool_columns(mean, 7, "max"), kind="stable")[: budget - window]
            kept[layer, head, best] = True
        else:
            kept[layer, head] = True
    return kept


def check_texts(config, least=0.0):
    """Prompts, questions of several tokens on top of them, and drawn tokens; logits reach `least`."""
    model = tiny.tiny(config)
    session, rng, texts = jaxkv.Session(model, jaxkv.FullKV()), np.random.default_rng(1), prompts()
    cache = session.prefill(texts)
    for lengths in ((3, 11, 1), (1, 1, 1), (19, 2, 8)):
        for row, text in enumerate(texts):
            want = read(model, text)[0][-1]
            assert np.abs(want).max() > least
            np.testing.assert_allclose(cache.logits[row], want, rtol=1e-4, atol=5e-5)
        asked = [rng.integers(3, config.vocab, n).tolist() for n in lengths]
        cache, drawn = session.draw(session.extend(cache, asked), 3)
        texts = [
            text + more + new for text, more, new in zip(texts, asked, drawn.tolist(), strict=True)
        ]


def check_kept(config, *, apart_from):
    """Rows that SnapKV keeps are the oracle's, and others than those of the model `apart_from`; so are the logits."""
    policy, found = jaxkv.SnapKV(budget=16, window=6), []
    for model in (tiny.tiny(config), tiny.tiny(apart_from)):
        cache = jaxkv.Session(model, policy).prefill(prompts())
        held = [cache.holds(row, count) for row, count in enumerate(LENGTHS)]
        for mask, text in zip(held, prompts(), strict=True):
            np.testing.assert_array_equal(mask, kept_by_snapkv(model, text, budget=16, window=6))
        found.append((held, np.asarray(cache.logits)))
    (held, logits), (other, plain) = found
    # Prompts below the budget are kept whole.
    differ = [bool((mine != its).any()) for mine, its in zip(held, other, strict=True)]
    assert differ == [count > 16 for count in LENGTHS]
    assert np.abs(logits - plain).max() > 1e-2


def check_drawn(config):
    """Past several windows."""
    session = jaxkv.Session(tiny.tiny(config), jaxkv.FullKV())
    _, drawn = session.draw(session.prefill(prompts(), new=NEW), NEW)
    texts = [text + tokens for text, tokens in zip(prompts(), drawn.tolist(), strict=True)]
    again = session.prefill(
        [text[: size + NEW - 1] for text, size in zip(texts, LENGTHS, strict=True)]
    )
    assert np.asarray(again.logits).argmax(axis=-1).tolist() == [text[-1] for text in texts]


def tokens_of(model, policy, **given):
    made = jaxkv.generate(model, prompts(), **OPTIONS, policy=policy, **given)
    return [each.tolist() for each in made.tokens]


def check_kernels_and_meshes(config, policy):
    """Prefill, scores, steps and evictions by interpreted kernels, and split by heads: the same tokens."""
    model = tiny.tiny(config)
    plain = tokens_of(model, policy)
    for given in ({"implementation": "pallas"}, {"mesh": mesh_of(2, 2)}):
        assert tokens_of(model, policy, **given) == plain, given
    meshes.forget()


def check_wide(config, policy):
    """A budget of the whole prompt gives the full cache's tokens."""
    model = tiny.tiny(config)
    if isinstance(policy, jaxkv.AdaKV):
        wide = jaxkv.AdaKV(base=jaxkv.SnapKV(budget=64, window=6))
    else:
        wide = dataclasses.replace(policy, budget=64)
    assert tokens_of(model, wide) == tokens_of(model, jaxkv.FullKV())
