"""Refit: values of kept entries by another least-squares solver; batches, stores, capped logits, sinks; rejections."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from oracles.attention import softmax
from test_layer_specs import capped
from test_softmaxes import CAP, MODELS, WHOLE

from jaxkv import AdaKV, GlobalBudget, KVzip, Refit, SnapKV
from jaxkv.engine.prefill import iterate_layer_outputs
from jaxkv.policies import Needs, ScorerInputs
from jaxkv.policies.methods.refit import ValueRefit

LENGTHS, COUNT, RIDGE = (61, 37, 5), 16, 0.5
SNAPKV = SnapKV(budget=16, window=4)


def fitted(q, at, k, v, kept, *, sinks=None, cap=None):
    """One kv head's kept values in float64, by queries `[G, r, D]` at positions `at`, held back by `RIDGE`.

    A query weighs as much as the share of its attention that kept entries, and any sink, have.
    """
    q, k, v = (np.asarray(each, np.float64) for each in (q, k, v))
    given, wanted = [], []
    for of, place in np.ndindex(q.shape[:2]):
        logits = capped(k @ q[of, place] / np.sqrt(q.shape[-1]), cap)
        logits[at[place] + 1 :] = -np.inf
        beside = [] if sinks is None else [float(sinks[of])]
        whole, total = softmax(np.append(logits, beside))
        mine, left = softmax(np.append(logits[kept], beside))
        share = np.exp(left - total)
        wanted.append(share * whole[: len(k)] @ v)
        given.append(share * mine[: len(kept)])
    still = np.sqrt(RIDGE) * np.eye(len(kept))
    x, y = np.concatenate([given, still]), np.concatenate([wanted, still @ v[kept]])
    return np.linalg.lstsq(x, y, rcond=None)[0]


def segments(model, ids, policy):
    cache, _, needed = tiny.run(model, ids, policy)
    assert cache.nbytes == needed.cache_bytes
    return {part[:3]: part[3:] for part in tiny.segments(cache)}


@pytest.mark.parametrize(
    ("config", "base"),
    [
        (WHOLE, SNAPKV),
        (WHOLE, AdaKV(base=SNAPKV)),
        (MODELS["sinks"], GlobalBudget(base=SNAPKV)),
    ],
    ids=("equal", "ragged", "shared-sinks"),
)
def test_values_of_a_batch_are_the_oracles(config, base):
    """Queries are those of tokens spread over each prompt; positions and keys are the base policy's."""
    model, ids = tiny.tiny(config), tiny.prompts(4, LENGTHS)
    plain = segments(model, ids, base)
    moved, seen = [], []
    found = segments(model, ids, Refit(base=base, references=COUNT, ridge=RIDGE))
    for text in ids:
        n = len(text)
        given = jnp.asarray([text], jnp.int32), jnp.asarray([n], jnp.int32)
        outs = iterate_layer_outputs(model.flat_decoder, *given, needs=Needs(queries=n))
        seen.append([(out.q[0], out.k[0], out.v[0], out.sink_logits) for out in outs])
    for (layer, row, head), (k, v, pos) in found.items():
        own_k, own_v, own_pos = plain[layer, row, head]
        np.testing.assert_array_equal(pos, own_pos)
        np.testing.assert_allclose(k, own_k, atol=1e-5)
        q, keys, values, sinks = seen[row][layer]
        at = [index * LENGTHS[row] // COUNT for index in range(COUNT)]
        sinks = None if sinks is None else sinks[0, head]
        want = fitted(q[head][:, at], at, keys[head], values[head], pos, sinks=sinks)
        np.testing.assert_allclose(v, want, atol=2e-5)
        moved.append(np.abs(v - own_v).max())
        if len(pos) == LENGTHS[row]:
            np.testing.assert_allclose(v, own_v, atol=1e-6, err_msg="nothing was evicted")
    assert np.median(moved) > 0.05


@pytest.mark.parametrize("over", ["head", "model"])
def test_queries_are_those_that_repeat_the_prompt_if_the_base_repeats_it(over):
    """The oracle prefills each prompt, each chunk's texts and the chunk as one sequence; chunks end within a prompt."""
    model, ids = tiny.tiny(WHOLE), tiny.prompts(6, LENGTHS[:2])
    texts = {"first": (3, 4), "following": (5,), "closing": (6, 7), "chunk": 24, "tail": 3}
    base = KVzip(budget=16, over=over, **texts)
    plain = segments(model, ids, base)
    found = segments(model, ids, Refit(base=base, references=COUNT, ridge=RIDGE))
    moved = []
    for row, text in enumerate(ids):
        n = len(text)
        queries = [[] for _ in range(model.config.layers)]
        for first in range(0, n, 24):
            chunk = text[first : first + 24]
            before = [5, *text[first - 3 : first]] if first else [3, 4]
            line = [*text, *before, 6, 7, *chunk]
            given = jnp.asarray([line], jnp.int32), jnp.asarray([len(line)], jnp.int32)
            needs = Needs(queries=len(chunk))
            outs = [*iterate_layer_outputs(model.flat_decoder, *given, needs=needs)]
            for of, out in zip(queries, outs, strict=True):
                of.append(out.q[0])
        for layer, (of, out) in enumerate(zip(queries, outs, strict=True)):
            q = jnp.concatenate(of, axis=2)[:, :, np.arange(COUNT) * n // COUNT]
            for head in range(WHOLE.kv_heads):
                k, v, pos = found[layer, row, head]
                own_k, own_v, own_pos = plain[layer, row, head]
                np.testing.assert_array_equal(pos, own_pos)
                keys, values = (each[0, head, :n] for each in (out.k, out.v))
                want = fitted(q[head], [n - 1] * COUNT, keys, values, pos)
                np.testing.assert_allclose(v, want, atol=2e-5)
                moved.append(np.abs(v - own_v).max())
    assert np.median(moved) > 0.05


def test_capped_logits_and_sixteen_bits():
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (2, 2, 12, 8)
    k, v = (2 * jax.random.normal(each, shape) for each in keys[:2])
    q = 2 * jax.random.normal(keys[2], (2, 2, 3, 5, 8))
    kept = jax.random.bernoulli(keys[3], 0.4, shape[:3]).at[..., 0].set(True)
    length = jnp.asarray([12, 7], jnp.int32)
    inside = jnp.broadcast_to(jnp.arange(12) < length[:, None, None], shape[:3])
    for dtype, atol in ((jnp.float32, 2e-5), (jnp.bfloat16, 0.02)):
        given = [each.astype(dtype) for each in (q, k, v)]
        seen = ScorerInputs(
            q_positions=jnp.zeros((2, 0), jnp.int32),
            k=given[1],
            v=given[2],
            length=length,
            layer=jnp.int32(0),
            key=keys[0],
            extras={"references": given[0]},
            softcap=CAP,
        )
        out = ValueRefit(references=5, ridge=RIDGE).merge_evicted_entries(
            *given[1:], kept & inside, inside, jnp.zeros(shape[:3]), None, keys[0], seen
        )
        assert out.v.dtype == dtype and out.k is given[1]
        wide = [np.asarray(each, np.float64) for each in given]
        for row, head in np.ndindex(2, 2):
            n = int(length[row])
            rows = np.flatnonzero(np.asarray(kept[row, head, :n]))
            at = [index * n // 5 for index in range(5)]
            q_head, k_head, v_head = (each[row, head] for each in wide)
            want = fitted(q_head, at, k_head[:n], v_head[:n], rows, cap=CAP)
            got = np.asarray(out.v[row, head].astype(jnp.float32))[rows]
            np.testing.assert_allclose(got, want, atol=atol, rtol=atol)


def test_values_of_four_bits_are_transformed_and_refit():
    """The store's transform of keys and values does not change what is fitted."""
    model, ids = tiny.tiny(WHOLE), tiny.prompts(5, LENGTHS[:2])
    logits = {}
    for store in ("dense", "int4"):
        policy = Refit(base=SnapKV(budget=16, window=4, store=store), references=COUNT)
        cache, _, _ = tiny.run(model, ids, policy)
        logits[store], _ = tiny.decode(model, cache, [[3, 4], [5, 6]])
    np.testing.assert_allclose(logits["int4"], logits["dense"], atol=0.4)
