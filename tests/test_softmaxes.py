"""Models that change the softmax: capped logits, c * tanh(logit / c) (Gemma 2), and sink logits (gpt-oss)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from meshes import mesh_of
from oracles.scores import pool_columns
from test_layer_specs import capped, forward
from test_windows import LENGTHS, SHAPE, prompts

import jaxkv
from jaxkv.attention import (
    Implementation,
    columns,
    filters,
    get_attention_backend,
    max_attention_per_key,
    xla,
)
from jaxkv.attention.shaping import LogitShaping
from jaxkv.attention.steps import GatheredEntries
from jaxkv.attention.xla import SegmentRanges, SegmentReadMode
from jaxkv.models.values import LayerSpec

# So small that it changes most logits.
CAP = 1.5
CAPPED = LogitShaping(softcap=CAP)
WHOLE = tiny.shape(layers=2, kv_heads=2, group=3, dim=16)
# By what changes: a layer of a window below one that attends to everything, and a model without any.
WINDOWS = {
    "caps": dataclasses.replace(
        SHAPE,
        kinds=tuple(dataclasses.replace(each, softcap=CAP) for each in SHAPE.kinds),
        logit_softcap=0.5,
    ),
    "sinks": dataclasses.replace(SHAPE, sink_logits=True),
}
MODELS = {
    "caps": dataclasses.replace(
        WHOLE, kinds=(LayerSpec(softcap=CAP, scale=1.0),), logit_softcap=0.5
    ),
    "sinks": dataclasses.replace(WHOLE, sink_logits=True),
}
# The same weights, without.
PLAIN = {
    "caps": dataclasses.replace(MODELS["caps"], kinds=(LayerSpec(scale=1.0),)),
    "sinks": WHOLE,
}
POLICIES = {
    "tova": jaxkv.TOVA(budget=16),
    "int4": jaxkv.SnapKV(budget=16, window=6, store="int4"),
    "global": jaxkv.GlobalBudget(base=jaxkv.SnapKV(budget=16, window=6)),
    "variance": jaxkv.D2O(budget=16),
    "quest": jaxkv.Quest(budget=12, page=4, dense_layers=1),
    "omnikv": jaxkv.OmniKV(budget=12, filter_layers=(0,), adjacent=0),
    "kvzip": jaxkv.KVzip(
        budget=16,
        **{"chunk": 24, "tail": 3, "first": (1, 2, 3), "following": (4, 5), "closing": (6,)},
    ),
}
BOTH = pytest.mark.parametrize("change", MODELS)
BACKENDS = [Implementation.XLA, Implementation.INTERPRETED]


def normal(seed, *shape):
    return 2 * jax.random.normal(jax.random.key(seed), shape)


# --- oracles ---------------------------------------------------------------------------------------------------------


def attended(q, k, v, sinks=None, *, cap=None):
    """One query in float64: output, log-sum-exp and the share of each key; logits capped, a sink in the softmax."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    logits = capped(k @ q / math.sqrt(len(q)), cap)
    logits = logits if sinks is None else np.append(logits, float(sinks))
    weights = np.exp(logits - logits.max())
    shares = (weights / weights.sum())[: len(k)]
    return shares @ v, logits.max() + math.log(weights.sum()), shares


def kept_by_snapkv(model, ids, *, budget, window):
    """Mask `[L, K, n]` of rows that SnapKV keeps: the window, and the best means of what its queries pay, pooled."""
    shares, count = forward(model, ids)[1], len(ids)
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


# --- pieces of attention ---------------------------------------------------------------------------------------------


@BOTH
def test_softmaxes_by_an_oracle(change):
    """Of a mask's keys, and of the last queries on all keys."""
    q, k, v, sinks = normal(0, 3, 4, 8), normal(1, 9, 8), normal(2, 9, 8), normal(3, 3) / 2 + 1
    seen = np.tril(np.ones((4, 9), bool), 5)
    at = jnp.arange(5, 9, dtype=jnp.int32)
    given = LogitShaping(softcap=CAP) if change == "caps" else LogitShaping(sink_logits=sinks)
    out = np.asarray(xla.attend_masked_keys(q, k, v, jnp.asarray(seen), given))
    shares, plain = (
        np.asarray(columns.compute_attention_probabilities(q, k, at, each))
        for each in (given, LogitShaping())
    )
    q, k, v = map(np.asarray, (q, k, v))
    for group, token in np.ndindex(3, 4):
        rows = seen[token]
        changed = {"cap": CAP} if change == "caps" else {"sinks": sinks[group]}
        want, _, share = attended(q[group, token], k[rows], v[rows], **changed)
        np.testing.assert_allclose(out[group, token], want, atol=1e-5)
        np.testing.assert_allclose(shares[group, token, rows], share, atol=1e-6)
    assert np.abs(shares - plain).max() > 0.1


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [*((each, jnp.float32) for each in BACKENDS), (Implementation.INTERPRETED, jnp.bfloat16)],
)
def test_prompts_and_their_sums_by_an_oracle(implementation, dtype):
    """Output, log-sum-exp, what keys receive from all queries, and from the last ones."""
    heads, group, slots, dim, window = 2, 3, 48, 16, 6
    q, k, v = (
        normal(seed, 2, heads, *shape, slots, dim).astype(dtype)
        for seed, shape in enumerate(((group,), (), ()))
    )
    backend, length = get_attention_backend(implementation), jnp.asarray([48, 4], jnp.int32)
    out, lse = backend.compute_prefill_attention(q, k, v, length, shaping=CAPPED)
    sums = backend.sum_attention_per_key(q, k, lse, length, shaping=CAPPED)
    at = length[:, None] - window + jnp.arange(window, dtype=jnp.int32)
    last = jnp.take_along_axis(q, jnp.maximum(at, 0)[:, None, None, :, None], axis=3)
    means = backend.average_window_attention(last, k, at, length, shaping=CAPPED)
    close = {"atol": 5e-6 if dtype == jnp.float32 else 2e-2}
    q, k, v, out, lse = (np.asarray(each, np.float32) for each in (q, k, v, out, lse))
    whole, logs = np.zeros_like(out), np.zeros_like(lse)
    for row, head in np.ndindex(2, heads):
        size = int(length[row])
        mass, late = np.zeros((group, slots)), np.zeros(slots)
        for member, token in np.ndindex(group, size):
            rows = slice(0, token + 1)
            found = attended(
                q[row, head, member, token], k[row, head, rows], v[row, head, rows], cap=CAP
            )
            whole[row, head, member, token], logs[row, head, member, token] = found[:2]
            mass[member, rows] += found[2]
            late[rows] += found[2] * (token >= size - window) / min(size, window) / group
        np.testing.assert_allclose(
            sums[row, head], mass, atol=1e-4 if dtype == jnp.float32 else 0.3
        )
        np.testing.assert_allclose(means[row, head], late, **close)
        np.testing.assert_allclose(out[row, head, :, :size], whole[row, head, :, :size], **close)
        np.testing.assert_allclose(lse[row, head, :, :size], logs[row, head, :, :size], **close)


def spread(walk):
    """First rows and lengths of two sequences' two segments, among 300 rows."""
    if walk is SegmentReadMode.STRIDES:
        return [[0, 150]] * 2, [[150, 150], [3, 0]]
    return [[4, 144], [6, 200]], [[140, 9], [0, 30]]


# The last: the rows are no multiple of the walk's blocks, and a segment is longer than all whole blocks together.
SPREADS = [
    *((walk, *spread(walk)) for walk in SegmentReadMode),
    (SegmentReadMode.WINDOWS, [[0, 298], [0, 3]], [[298, 2], [2, 297]]),
]


# Each spread by each backend, with each change in turn.
POOLS = [
    (("plain", *MODELS)[(at + turn) % 3], *spread, backend)
    for at, spread in enumerate(SPREADS)
    for turn, backend in enumerate(BACKENDS)
]


@pytest.mark.parametrize(("change", "walk", "start", "length", "implementation"), POOLS)
def test_a_pools_output_and_scores(change, walk, start, length, implementation):
    """An empty segment gives zeros; also of many queries at once, and of a sequence that does not count."""
    heads, group, dim, each = 2, 3, 16, 150
    start, length = np.asarray(start, np.int32), np.asarray(length, np.int32)
    q, score, sinks = (
        normal(0, 2, heads, group, dim),
        normal(3, 2, heads * each),
        normal(4, heads, group) / 2 + 1,
    )
    k, v = (normal(seed, 2, heads * each, dim) for seed in (1, 2))
    expected = np.asarray(score, np.float64)
    outs, lses = np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
    queries, keys, values, held = map(np.asarray, (q, k, v, sinks))
    for row, head, member in np.ndindex(2, heads, group):
        span = slice(start[row, head], start[row, head] + length[row, head])
        if length[row, head]:
            sink = held[head, member] if change == "sinks" else None
            changed = {"cap": CAP if change == "caps" else None, "sinks": sink}
            found = attended(
                queries[row, head, member], keys[row, span], values[row, span], **changed
            )
            outs[row, head, member], lses[row, head, member] = found[:2]
            expected[row, span] += found[2] / group
    begin, rows = jnp.asarray(start), jnp.asarray(length)
    backend = get_attention_backend(implementation)
    changes = {"plain": LogitShaping(), "caps": CAPPED, "sinks": LogitShaping(sink_logits=sinks)}
    given, store, widest = {"shaping": changes[change]}, GatheredEntries(k, v), int(length.max())
    reach = SegmentRanges(start=begin, length=rows, walk=walk)
    bounded = dataclasses.replace(reach, widest=widest)
    for read, second in ((reach, True), (bounded, True), (reach, False)):
        counts = jnp.asarray([True, second])
        out, found = backend.attend_and_score(q, store, read, score, counts, **given)
        np.testing.assert_allclose(out, outs, atol=2e-5)
        np.testing.assert_allclose(found[0], expected[0], atol=2e-5)
        np.testing.assert_allclose(found[1], expected[1] if second else score[1], atol=2e-5)
    many, times = jnp.repeat(q, 20, axis=2), np.repeat(lses, 20, axis=2)
    # The sink logits alone are the softmax over no rows.
    times = np.where(np.isinf(times) & (change == "sinks"), np.repeat(held, 20, axis=1), times)
    out, lse = backend.attend_to_segments(many, store, reach, **given)
    np.testing.assert_allclose(out, np.repeat(outs, 20, axis=2), atol=2e-5)
    np.testing.assert_allclose(lse, times, atol=2e-5)


def test_several_tokens_scores_by_an_oracle():
    """What rows receive from queries of known log-sum-exp, by each walk."""
    q, k, lse = normal(0, 1, 2, 4, 16), normal(1, 1, 260, 16), normal(2, 1, 2, 4) + 3
    start, length = jnp.asarray([[0, 130]], jnp.int32), jnp.asarray([[130, 70]], jnp.int32)
    want, queries, keys, logs = np.zeros(260), *map(np.asarray, (q, k, lse))
    for head, row in np.ndindex(2, 4):
        span = slice(int(start[0, head]), int(start[0, head] + length[0, head]))
        logits = capped(
            keys[0, span].astype(np.float64) @ queries[0, head, row].astype(np.float64) / 4, CAP
        )
        want[span] += np.exp(logits - logs[0, head, row])
    for walk in SegmentReadMode:
        reach = SegmentRanges(start=start, length=length, walk=walk)
        found = columns.add_attention_to_scores(
            q, k, lse, reach, jnp.zeros((1, 260)), weight=1.0, softcap=CAP
        )
        np.testing.assert_allclose(found[0], want, rtol=1e-4, atol=1e-6)


def test_choices_and_peaks_by_an_oracle(monkeypatch):
    """Scores of positions by a filter layer's queries, in one block or several; largest attention of a second pass."""
    q, k, at = (
        normal(0, 1, 2, 3, 4, 16),
        normal(1, 1, 2, 40, 16),
        jnp.arange(36, 40, dtype=jnp.int32)[None],
    )
    asked = filters.FilterQuery(q=q, positions=at, weights=jnp.ones((1, 4)), shaping=CAPPED)
    shares, queries, keys = np.zeros((2, 3, 4, 40)), np.asarray(q), np.asarray(k)
    for head, group, query in np.ndindex(2, 3, 4):
        rows = slice(0, 36 + query + 1)
        shares[head, group, query, rows] = attended(
            queries[0, head, group, query], keys[0, head, rows], keys[0, head, rows], cap=CAP
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
        found = filters.score_positions_by_row(asked, pool, below, None)
        np.testing.assert_allclose(found[0], want, atol=1e-5)
        found = filters.score_positions_in_pool(
            asked, pool, pos, start, jnp.full((1, 2), 40, jnp.int32), 40, None
        )
        np.testing.assert_allclose(found[0], want, atol=1e-5)
    own = jnp.full((1, 2, 3, 4), -jnp.inf)
    peaks = max_attention_per_key(
        q, own, k[:, :, :30], jnp.asarray([4]), jnp.ones((1, 30), bool), softcap=CAP
    )
    for head in range(2):
        each = [
            attended(queries[0, head, g, n], keys[0, head, :30], keys[0, head, :30], cap=CAP)[2]
            for g, n in np.ndindex(3, 4)
        ]
        np.testing.assert_allclose(peaks[0, head], np.max(each, axis=0), atol=1e-5)


# --- models ----------------------------------------------------------------------------------------------------------


@BOTH
def test_texts_by_an_oracle(change):
    """Prompts, questions of several tokens on top of them, and sampled tokens, past a window."""
    model, rng, texts = tiny.tiny(WINDOWS[change]), np.random.default_rng(1), prompts()
    session = jaxkv.Session(model, jaxkv.FullKV())
    cache, lengths = session.prefill(texts, new=3), [(3, 11, 1), (1, 1, 9)]
    while True:
        for row, text in enumerate(texts):
            want = forward(model, text)[0]
            assert np.abs(want).max() > 0.8 * (model.config.logit_softcap or 0)
            np.testing.assert_allclose(cache.logits[row], want, rtol=1e-4, atol=5e-5)
        if not lengths:
            break
        asked = [rng.integers(3, tiny.VOCAB, n).tolist() for n in lengths.pop()]
        cache, drawn = session.sample(session.extend(cache, asked, new=3), 3)
        texts = [
            text + more + new for text, more, new in zip(texts, asked, drawn.tolist(), strict=True)
        ]


def tokens_of(model, policy, **given):
    made = jaxkv.generate(
        model, prompts(), max_new_tokens=12, stop_at_eos=False, policy=policy, **given
    )
    return [each.tokens.tolist() for each in made]


# By kernels, or split by heads; some of both kinds of models.
KERNELS, MESH = {"implementation": "pallas"}, (2, 2)


@pytest.mark.parametrize(
    ("name", "change", "configs", "given"),
    [
        ("int4", "caps", WINDOWS, KERNELS),
        ("tova", "sinks", WINDOWS, KERNELS),
        ("global", "sinks", WINDOWS, MESH),
        ("variance", "caps", MODELS, KERNELS),
        ("quest", "sinks", MODELS, KERNELS),
        ("omnikv", "caps", MODELS, MESH),
        ("kvzip", "sinks", MODELS, KERNELS),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_kernels_and_meshes(name, change, configs, given):
    """Prefill, scores, steps and evictions by interpreted kernels, or on a mesh: the same tokens."""
    model, policy = tiny.tiny(configs[change]), POLICIES[name]
    options = {"mesh": mesh_of(*given)} if given is MESH else given
    assert tokens_of(model, policy, **options) == tokens_of(model, policy)


def test_a_budget_of_the_whole_prompt_gives_the_full_caches_tokens():
    model = tiny.tiny(WINDOWS["sinks"])
    assert tokens_of(model, jaxkv.H2O(budget=64)) == tokens_of(model, jaxkv.FullKV())


@BOTH
def test_choices_and_logits_change(change):
    """Rows that SnapKV keeps are the oracle's, and others than those of the model without; so are the logits."""
    policy, found = jaxkv.SnapKV(budget=16, window=6), []
    for model in (tiny.tiny(MODELS[change]), tiny.tiny(PLAIN[change])):
        cache = jaxkv.Session(model, policy).prefill(prompts())
        held = [cache.mask_kept_tokens(row, count) for row, count in enumerate(LENGTHS)]
        for mask, text in zip(held, prompts(), strict=True):
            np.testing.assert_array_equal(mask, kept_by_snapkv(model, text, budget=16, window=6))
        found.append((held, np.asarray(cache.logits)))
    (held, logits), (other, plain) = found
    # Prompts below the budget are kept whole.
    differ = [bool((mine != its).any()) for mine, its in zip(held, other, strict=True)]
    assert differ == [count > 16 for count in LENGTHS]
    assert np.abs(logits - plain).max() > 1e-2


def test_caps_that_are_none():
    with pytest.raises(ValueError, match="softcap="):
        LayerSpec(softcap=0.0)
    with pytest.raises(ValueError, match="logit_softcap="):
        dataclasses.replace(WHOLE, logit_softcap=-1.0)
