"""Models with a learned logit per query head in the softmax, without a value (gpt-oss): oracles, policies, meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_windows import SHAPE
from text_oracle import (
    attended,
    check_drawn,
    check_kept,
    check_kernels_and_meshes,
    check_texts,
    check_wide,
)

import jaxkv
from jaxkv import attention
from jaxkv.attention import Implementation, backend_of, columns, xla
from jaxkv.attention.xla import Walk

# Alternate layers of a window, as in gpt-oss; and a model without any.
SUNK = dataclasses.replace(SHAPE, sink_logits=True)
WHOLE = dataclasses.replace(tiny.shape(layers=3, kv_heads=2, group=3, dim=16), sink_logits=True)
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
    "global": jaxkv.GlobalBudget(base=jaxkv.SnapKV(budget=16, window=6, every=3)),
    "variance": jaxkv.D2O(budget=16),
    "quest": jaxkv.Quest(budget=12, page=4, dense_layers=1),
    "omnikv": jaxkv.OmniKV(budget=12, filter_layers=(0,)),
    "kvzip": jaxkv.KVzip(
        budget=16,
        **{"chunk": 24, "tail": 3, "first": (1, 2, 3), "following": (4, 5), "closing": (6,)},
    ),
}


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
    q, score, sinks = (
        2 * normal(0, 2, heads, group, dim),
        normal(3, 2, heads * each),
        normal(4, heads, group) + 1,
    )
    k, v = (normal(seed, 2, heads * each, dim) for seed in (1, 2))
    length = np.asarray(
        [[150, 150], [3, 0]] if walk is Walk.STRIDES else [[140, 9], [0, 30]], np.int32
    )
    start = np.asarray([[0, 150]] * 2 if walk is Walk.STRIDES else [[4, 144], [6, 200]], np.int32)
    expected, outs = np.asarray(score, np.float64), np.zeros(q.shape)
    for row, head, member in np.ndindex(2, heads, group):
        span = slice(start[row, head], start[row, head] + length[row, head])
        query = q[row, head, member]
        outs[row, head, member], _, share = attended(
            query, k[row, span], v[row, span], sinks[head, member]
        )
        expected[row, span] += share / group
    begin, rows, counts = jnp.asarray(start), jnp.asarray(length), jnp.asarray([True, True])
    for options in ({}, {"widest": 150}):
        given = dict(options, walk=walk, sink_logits=sinks)
        out, found = backend_of(implementation).attend_scored(
            q, k, v, begin, rows, score, counts, **given
        )
        if isinstance(found, attention.Received):
            found = attention.add_received(score, found, begin, counts)
        np.testing.assert_allclose(out, outs, atol=2e-5)
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("config", [SUNK, WHOLE], ids=["windows", "whole"])
def test_texts_by_an_oracle(config):
    check_texts(config)


def test_drawn_tokens_are_those_of_the_longer_prompt():
    check_drawn(SUNK)


@pytest.mark.parametrize(
    ("config", "name"),
    [*((SUNK, name) for name in ("adakv", "tova")), *((WHOLE, name) for name in MORE)],
    ids=lambda each: str(each)[:9],
)
def test_kernels_and_meshes(config, name):
    check_kernels_and_meshes(config, (POLICIES | MORE)[name])


@pytest.mark.parametrize("name", ["adakv", "h2o"])
def test_a_budget_of_the_whole_prompt_gives_the_full_caches_tokens(name):
    check_wide(SUNK, POLICIES[name])


def test_sinks_change_what_is_kept_and_drawn():
    """They are read: without them answers and choices are others; both choices are the oracle's."""
    check_kept(WHOLE, apart_from=dataclasses.replace(WHOLE, sink_logits=False))
