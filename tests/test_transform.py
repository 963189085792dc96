"""The transform: what it keeps, against `prefill` and the oracles, and which policies need more."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
import tiny
from policy_row import Row
from policy_table import BY_NAME, SPANS, TABLE
from transforming import LENGTHS, SLOTS, SNAP, WINDOW, draw, kept, segments

import jaxkv
from jaxkv import FullKV, RandomKV, SnapKV
from jaxkv.engine import prefill as prefilling
from jaxkv.policies.scorer import Needs

GQA = tiny.TWO_LAYERS


def invalid(row: Row) -> str | None:
    """What the message says where a row of the table is rejected."""
    if row.rolling:
        return "RoPE"
    if row.name == "omnikv":
        return "selects for other layers"
    names = ("capkv", "compactor", "kvzip", "qfilters")
    more = row.name in names or any(
        each in row.name for each in ("expected", "critical", "defensive")
    )
    return "more than keys" if more else None


# Without and with a scorer, a window, spans; of each way to share rows among heads and layers.
TAKEN = (
    "streaming",
    "knorm-protect",
    "pyramidkv-entropy",
    "adakv-protected",
    "adakv-variance",
    "full",
    "h2o-prefill",
    "pyramidinfer",
    "chunkkv",
)
REFUSED = {invalid(row): row for row in TABLE if invalid(row) is not None}


def poisoned(array, lengths=LENGTHS):
    """What is not a number in place of padding."""
    inside = np.arange(array.shape[2]) < np.asarray(lengths)[:, None]
    return jnp.where(inside[:, None, :, None], array, jnp.nan)


@pytest.fixture(scope="module")
def layers():
    """Keys, values and queries of every layer of a tiny model over two prompts, padding poisoned."""
    model, ids = tiny.tiny(GQA), tiny.prompts(0, LENGTHS)
    cache, _, needed = tiny.run(model, ids, FullKV())
    tokens = np.zeros((2, needed.padded_len), np.int32)
    for row, each in enumerate(ids):
        tokens[row, : len(each)] = each
    length = jnp.asarray(LENGTHS, jnp.int32)
    read = prefilling.iterate_layer_outputs(
        model.flat_decoder, jnp.asarray(tokens), length, needs=Needs(queries=needed.padded_len)
    )
    out = []
    for pool, shown in zip(cache.pools, read, strict=True):
        k, v = (
            leaf.reshape(2, GQA.kv_heads, needed.padded_len, GQA.head_dim)
            for leaf in (pool.k, pool.v)
        )
        q = shown.q.reshape(2, GQA.heads, needed.padded_len, GQA.head_dim)
        # They come with the last one last: each sequence's first one to the front.
        q = jnp.stack(
            [
                jnp.roll(each, n - needed.padded_len, axis=1)
                for each, n in zip(q, LENGTHS, strict=True)
            ]
        )
        out.append([poisoned(each) for each in (k, v, q)])
    return [list(each) for each in zip(*out, strict=True)]


# --- what it keeps ---------------------------------------------------------------------------------------------------


# Shares of each prompt with a row of each kind of budgets.
SHARES = ("adakv", "pyramidkv-linear")


@pytest.mark.parametrize(
    ("name", "budget"), [(name, 20) for name in TAKEN] + [(name, 0.5) for name in SHARES]
)
def test_keeps_what_prefill_keeps(name, budget, layers):
    policy = dataclasses.replace(BY_NAME[name].policy(budget), every=None)
    cache, _, _ = tiny.run(tiny.tiny(GQA), tiny.prompts(0, LENGTHS), policy)
    k, v, q = layers
    rows = jaxkv.compress_layers(
        k, v, queries=q, length=jnp.asarray(LENGTHS), policy=policy, headroom=3
    )
    assert kept(rows) == tiny.kept(cache)
    for ours, theirs in zip(segments(rows), tiny.segments(cache), strict=True):
        for mine, its in zip(ours[3:], theirs[3:], strict=True):
            np.testing.assert_allclose(mine, its, atol=2e-5)
    np.testing.assert_array_equal(rows.seen, np.broadcast_to(LENGTHS, rows.seen.shape))
    assert all(
        (np.asarray(rows.compute_remaining_headroom(layer)) >= 3).all()
        for layer in range(GQA.layers)
    )
    parts = policy.build_policy_parts()
    if parts.cache_layout.uses_shared_pool or parts.nested:
        return
    for layer in range(GQA.layers):
        options = {
            "layer": layer,
            "layers": GQA.layers,
            "length": jnp.asarray(LENGTHS),
            "headroom": 3,
        }
        alone = jaxkv.compress(k[layer], v[layer], queries=q[layer], policy=policy, **options)
        assert kept(alone) == [kept(rows)[layer]]
        assert alone.get_layer_pool().k.shape == rows.get_layer_pool(layer).k.shape


@pytest.mark.parametrize(
    "policy",
    [jaxkv.D2O(budget=20, mode="prefill", official=True), jaxkv.GlobalBudget(base=SNAP)],
    ids=["d2o", "globalbudget"],
)
def test_a_sequence_without_a_token(policy, layers):
    """It keeps none, and the other one knows nothing of it."""
    (k, v, q), both = layers, []
    for lengths in (LENGTHS, (0, LENGTHS[1])):
        both.append(
            kept(jaxkv.compress_layers(k, v, queries=q, length=jnp.asarray(lengths), policy=policy))
        )
    assert not any(head for layer in both[1] for head in layer[0])
    assert [layer[1] for layer in both[1]] == [layer[1] for layer in both[0]]


@pytest.mark.parametrize("told", REFUSED)
def test_what_needs_more_is_refused_by_name(told, layers):
    (k, v, q), policy = (each[0] for each in layers), REFUSED[told].policy(20)
    with pytest.raises(ValueError, match=f"^policy=.*{told}"):
        jaxkv.compress(k, v, queries=q, policy=policy, layers=GQA.layers)


def test_a_window_of_queries_does_as_well_as_all():
    k, v, q = draw()
    length = jnp.asarray([50, 5])
    last = jnp.stack([q[0, :, 50 - WINDOW : 50], jnp.roll(q[1], 3, axis=1)[:, :WINDOW]])
    every = jaxkv.compress(k, v, queries=q, length=length, policy=SNAP)
    assert kept(jaxkv.compress(k, v, queries=last, length=length, policy=SNAP)) == kept(every)


def test_draws_follow_the_key():
    k, v, _ = draw()
    policy = RandomKV(budget=16)
    rows = [
        kept(jaxkv.compress(k, v, policy=policy, key=key)) for key in (None, jax.random.key(0), 1)
    ]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize("budget", [7, 1 / 3, 0.30000000000000004])
def test_traced_budgets_are_exact_for_every_length(budget):
    policy = SnapKV(window=4, sinks=2, protect=SPANS)
    if isinstance(budget, float):
        policy = dataclasses.replace(policy, min_budget="clamp")
    policy = dataclasses.replace(policy, budget=budget)
    k, v, q = draw(batch=SLOTS + 1, heads=1, group=1, dim=2)
    lengths = jnp.arange(SLOTS + 1, dtype=jnp.int32)
    rows = jax.jit(lambda n: jaxkv.compress(k, v, queries=q, length=n, policy=policy))(lengths)
    first, last = policy.build_policy_parts().keep.sinks, policy.build_policy_parts().keep.window
    for n, length in enumerate(np.asarray(rows.length)[0, :, 0].tolist()):
        always_kept = len(o.forced_positions(n, first, last, policy.protect)) if n else 0
        assert length == (max(o.resolve_budget(budget, n), always_kept) if n else 0), n
