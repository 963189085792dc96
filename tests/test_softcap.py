"""Models that cap the logits of attention, c * tanh(logit / c), and their last ones (Gemma 2): oracles, policies."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_oracle
import tiny
from test_windows import SHAPE, prompts
from text_oracle import (
    capped,
    check_drawn,
    check_kept,
    check_kernels_and_meshes,
    check_texts,
    check_wide,
)

import jaxkv
from jaxkv import attention
from jaxkv.attention import Implementation, backend_of, chunk_peaks, columns, filters, xla
from jaxkv.attention.xla import Walk
from jaxkv.models.config import ModelConfig
from jaxkv.models.values import LayerSpec
from jaxkv.planning.catalog import catalog

# So small that it changes most logits; alternate layers of a window, as in Gemma 2, and a model without any.
CAP = 1.5
CAPPED = dataclasses.replace(
    SHAPE,
    kinds=tuple(dataclasses.replace(each, softcap=CAP) for each in SHAPE.kinds),
    logit_softcap=0.5,
)
WHOLE = dataclasses.replace(
    tiny.shape(layers=3, kv_heads=2, group=3, dim=16),
    kinds=(LayerSpec(softcap=CAP, scale=1.0),),
    logit_softcap=0.5,
)
POLICIES = {
    "full": jaxkv.FullKV(),
    "snapkv": jaxkv.SnapKV(budget=16, window=6),
    "adakv": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=16, window=6)),
    "h2o": jaxkv.H2O(budget=16),
    "tova": jaxkv.TOVA(budget=16),
}
# With the fused step, and what is not built beside windows.
MORE = {
    "scores": jaxkv.H2O(budget=16),
    "int8": jaxkv.SnapKV(budget=16, window=6, store="int8"),
    "int4": jaxkv.SnapKV(budget=16, window=6, store="int4"),
    "global": jaxkv.GlobalBudget(base=jaxkv.SnapKV(budget=16, window=6, every=3)),
    "variance": jaxkv.D2O(budget=16),
    "quest": jaxkv.Quest(budget=12, page=4, dense_layers=1),
    "omnikv": jaxkv.OmniKV(budget=12, filter_layers=(0,)),
    "kvzip": jaxkv.KVzip(
        budget=16,
        **{"chunk": 24, "tail": 3, "first": (1, 2, 3), "following": (4, 5), "closing": (6,)},
    ),
}
BACKENDS = [Implementation.XLA, Implementation.INTERPRETED]


attended = partial(text_oracle.attended, cap=CAP)


def normal(seed, *shape):
    return 2 * jax.random.normal(jax.random.key(seed), shape)


def test_softmaxes_by_an_oracle():
    """Of a mask's keys, and of the last queries on all keys."""
    q, k, v = normal(0, 3, 4, 8), normal(1, 9, 8), normal(2, 9, 8)
    seen = np.tril(np.ones((4, 9), bool), 5)
    at = jnp.arange(5, 9, dtype=jnp.int32)
    out = xla.masked(q, k, v, jnp.asarray(seen), softcap=CAP)
    shares, plain = columns.probabilities(q, k, at, softcap=CAP), columns.probabilities(q, k, at)
    assert np.abs(shares - plain).max() > 0.1
    for group, token in np.ndindex(3, 4):
        rows = seen[token]
        want, _, share = attended(q[group, token], k[rows], v[rows])
        np.testing.assert_allclose(out[group, token], want, atol=1e-5)
        np.testing.assert_allclose(shares[group, token, rows], share, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", BACKENDS)
def test_prompts_and_their_sums_by_an_oracle(implementation, dtype):
    """Output, log-sum-exp, what keys receive from all queries, and from the last ones."""
    heads, group, slots, dim, window = 2, 3, 96, 16, 6
    q, k, v = (
        normal(seed, 2, heads, *shape, slots, dim).astype(dtype)
        for seed, shape in enumerate(((group,), (), ()))
    )
    backend, length = backend_of(implementation), jnp.asarray([96, 37], jnp.int32)
    out, lse = backend.prefill(q, k, v, length, softcap=CAP)
    sums = backend.column_sums(q, k, lse, length, softcap=CAP)
    at = length[:, None] - window + jnp.arange(window, dtype=jnp.int32)
    last = jnp.take_along_axis(q, at[:, None, None, :, None], axis=3)
    means = backend.window_mean(last, k, at, length, softcap=CAP)
    close = {"atol": 5e-6 if dtype == jnp.float32 else 2e-2}
    for row, head in np.ndindex(2, heads):
        size = int(length[row])
        mass, late = np.zeros((group, slots)), np.zeros(slots)
        for member, token in np.ndindex(group, size):
            rows = slice(0, token + 1)
            found = attended(q[row, head, member, token], k[row, head, rows], v[row, head, rows])
            np.testing.assert_allclose(
                np.asarray(out[row, head, member, token], np.float32), found[0], **close
            )
            np.testing.assert_allclose(lse[row, head, member, token], found[1], **close)
            mass[member, rows] += found[2]
            late[rows] += found[2] * (token >= size - window) / window / group
        np.testing.assert_allclose(
            sums[row, head], mass, atol=1e-4 if dtype == jnp.float32 else 0.3
        )
        np.testing.assert_allclose(means[row, head], late, **close)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("walk", Walk, ids=str)
def test_a_pools_output_and_scores(walk, implementation):
    """Also of many queries at once; an empty segment gives zeros."""
    heads, group, dim, each = 2, 3, 16, 150
    q, score = normal(0, 2, heads, group, dim), normal(3, 2, heads * each)
    k, v = (normal(seed, 2, heads * each, dim) for seed in (1, 2))
    length = np.asarray(
        [[150, 150], [3, 0]] if walk is Walk.STRIDES else [[140, 9], [0, 30]], np.int32
    )
    start = np.asarray([[0, 150]] * 2 if walk is Walk.STRIDES else [[4, 144], [6, 200]], np.int32)
    expected, outs, lses = (
        np.asarray(score, np.float64),
        np.zeros(q.shape),
        np.full(q.shape[:-1], -np.inf),
    )
    for row, head, member in np.ndindex(2, heads, group):
        span = slice(start[row, head], start[row, head] + length[row, head])
        if length[row, head]:
            found = attended(q[row, head, member], k[row, span], v[row, span])
            outs[row, head, member], lses[row, head, member] = found[:2]
            expected[row, span] += found[2] / group
    begin, rows, counts, backend = (
        jnp.asarray(start),
        jnp.asarray(length),
        jnp.ones(2, bool),
        backend_of(implementation),
    )
    for options in ({}, {"widest": 150}):
        given = dict(options, walk=walk, softcap=CAP)
        out, found = backend.attend_scored(q, k, v, begin, rows, score, counts, **given)
        if isinstance(found, attention.Received):
            found = attention.add_received(score, found, begin, counts)
        np.testing.assert_allclose(out, outs, atol=2e-5)
        np.testing.assert_allclose(found, expected, atol=2e-5)
    many = jnp.tile(q, (1, 1, 20, 1))
    out, lse = backend.attend(many, k, v, begin, rows, walk=walk, softcap=CAP)
    np.testing.assert_allclose(out, np.tile(outs, (1, 1, 20, 1)), atol=2e-5)
    np.testing.assert_allclose(lse, np.tile(lses, (1, 1, 20)), atol=2e-5)


def test_several_tokens_scores_by_an_oracle():
    """What rows receive from queries of known log-sum-exp, by each walk."""
    q, k, lse = normal(0, 1, 2, 4, 16), normal(1, 1, 260, 16), normal(2, 1, 2, 4) + 3
    start, length = jnp.asarray([[0, 130]], jnp.int32), jnp.asarray([[130, 70]], jnp.int32)
    want = np.zeros(260)
    for head, row in np.ndindex(2, 4):
        span = slice(int(start[0, head]), int(start[0, head] + length[0, head]))
        logits = capped(
            np.asarray(k[0, span], np.float64) @ np.asarray(q[0, head, row], np.float64) / 4, CAP
        )
        want[span] += np.exp(logits - float(lse[0, head, row]))
    for walk in Walk:
        found = columns.pool_sums(
            q, k, lse, start, length, jnp.zeros((1, 260)), walk=walk, weight=1.0, softcap=CAP
        )
        np.testing.assert_allclose(found[0], want, rtol=1e-4, atol=1e-6)


def test_choices_and_peaks_by_an_oracle(monkeypatch):
    """Scores of positions by a filter layer's queries, in one block or several; largest attention of a second pass."""
    q, k, at = (
        normal(0, 1, 2, 3, 4, 16),
        normal(1, 1, 2, 40, 16),
        jnp.arange(36, 40, dtype=jnp.int32)[None],
    )
    asked = filters.Asking(q=q, positions=at, weights=jnp.ones((1, 4)), softcap=CAP)
    shares = np.zeros((2, 3, 4, 40))
    for head, group, query in np.ndindex(2, 3, 4):
        rows = slice(0, int(at[0, query]) + 1)
        shares[head, group, query, rows] = attended(
            q[0, head, group, query], k[0, head, rows], k[0, head, rows]
        )[2]
    want, below, pool = (
        shares.max(axis=(0, 1)).sum(axis=0),
        jnp.asarray([40], jnp.int32),
        k.reshape(1, 80, 16),
    )
    start, pos = (
        jnp.asarray([[0, 40]], jnp.int32),
        jnp.tile(jnp.arange(40, dtype=jnp.int32), 2)[None],
    )
    for size in (1 << 24, 24 * 16):
        monkeypatch.setattr(filters, "_LOGITS", size)
        found = filters.by_row(asked, pool, below, None)
        np.testing.assert_allclose(found[0], want, atol=1e-5)
        found = filters.by_position(
            asked, pool, pos, start, jnp.full((1, 2), 40, jnp.int32), 40, None
        )
        np.testing.assert_allclose(found[0], want, atol=1e-5)
    own = jnp.full((1, 2, 3, 4), -jnp.inf)
    peaks = chunk_peaks(
        q, own, k[:, :, :30], jnp.asarray([4]), jnp.ones((1, 30), bool), softcap=CAP
    )
    for head in range(2):
        each = [
            attended(q[0, head, g, n], k[0, head, :30], k[0, head, :30])[2]
            for g, n in np.ndindex(3, 4)
        ]
        np.testing.assert_allclose(peaks[0, head], np.max(each, axis=0), atol=1e-5)


@pytest.mark.parametrize("config", [CAPPED, WHOLE], ids=["windows", "whole"])
def test_texts_by_an_oracle(config):
    check_texts(config, least=0.8 * config.logit_softcap)


def test_drawn_tokens_are_those_of_the_longer_prompt():
    check_drawn(CAPPED)


@pytest.mark.parametrize(
    ("config", "name"),
    [*((CAPPED, name) for name in ("adakv", "tova")), *((WHOLE, name) for name in MORE)],
    ids=lambda each: (
        str(each)[:12] if isinstance(each, str) else "windows" if any(each.windows) else "whole"
    ),
)
def test_kernels_and_meshes(config, name):
    check_kernels_and_meshes(config, (POLICIES | MORE)[name])


@pytest.mark.parametrize("name", ["adakv", "h2o"])
def test_a_budget_of_the_whole_prompt_gives_the_full_caches_tokens(name):
    check_wide(CAPPED, POLICIES[name])


def test_caps_change_what_is_drawn_and_kept():
    """A cap above all logits changes nothing; it is part of what programs are compiled for."""
    low, high, none = (
        dataclasses.replace(WHOLE, kinds=(LayerSpec(softcap=cap, scale=1.0),))
        for cap in (CAP, 1e4, None)
    )
    check_kept(low, apart_from=none)
    policy = jaxkv.SnapKV(budget=16, window=6)
    caches = [jaxkv.Session(tiny.tiny(each), policy).prefill(prompts()) for each in (high, none)]
    np.testing.assert_allclose(caches[0].logits, caches[1].logits, atol=1e-4)


def test_published_configs():
    """Of all three sizes: caps, scales, and windows of layers 0, 2, 4 and so on; keys of older files beside them."""
    for size, scale in (("2b", 256), ("9b", 256), ("27b", 144)):
        raw = catalog()[f"gemma-2-{size}"].raw
        config = ModelConfig.from_hf(raw | {"sliding_window_size": 4096})
        assert (
            config.windows == (4096, None) * (config.layers // 2)
            and config.tied
            and config.tanh_gelu
        )
        assert {config.spec_of(layer).softcap for layer in range(config.layers)} == {50.0}
        assert (config.logit_softcap, config.spec_of(1).scale) == (30.0, scale**-0.5)
        assert (config.embedding_scale, config.norms) == (config.embed**0.5, "both")
        plain = ModelConfig.from_hf(
            raw | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        )
        assert (plain.spec_of(0).softcap, plain.logit_softcap) == (None, None)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan")])
def test_caps_that_are_none(cap):
    with pytest.raises(ValueError, match="softcap=.*: give a positive"):
        LayerSpec(softcap=cap)
    with pytest.raises(ValueError, match="logit_softcap=.*: give a positive"):
        dataclasses.replace(WHOLE, logit_softcap=cap)
