"""`compress` of layers with windows and with sink logits: attention by an oracle, what is kept, what is rejected."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv

HEADS, GROUP, DIM, SLOTS, LENGTHS, NEW = 2, 3, 8, 40, (40, 17), 12


@functools.cache
def arrays(seed=0):
    """Keys and values of prompts and of what follows, queries of both, and sink logits of a layer."""
    rng = np.random.default_rng(seed)
    shape = (2, HEADS, SLOTS + NEW, DIM)
    k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    q = 2 * rng.standard_normal((2, HEADS * GROUP, SLOTS + NEW, DIM)).astype(np.float32)
    return k, v, q, rng.standard_normal(HEADS * GROUP).astype(np.float32) + 1


def oracle(rows, q, sinks, window, last, cap):
    """Output of one query head over the rows of a head up to position `last`, its window's alone if it has one."""
    pos, k, v = rows
    near = (pos <= last) & (pos > last - (window or 10**9))
    logits = k[near].astype(np.float64) @ q / math.sqrt(DIM)
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    weights = np.exp(logits)
    return weights @ v[near] / (weights.sum() + (0 if sinks is None else math.exp(sinks)))


@pytest.mark.parametrize(
    ("window", "sunk", "cap", "tokens"),
    [
        (None, True, 0.7, 4),
        (6, True, None, 1),
        (100, False, 0.7, 4),
    ],
)
def test_attention_by_an_oracle(window, sunk, cap, tokens):
    """A prompt compressed, then tokens one by one and several at a time, past the window."""
    k, v, q, sinks = arrays()
    sinks, policy = sinks if sunk else None, jaxkv.SnapKV(budget=12, window=4)
    of_prompt = [a[:, :, :SLOTS] for a in (k, v, q)]
    given = {
        "queries": of_prompt[2],
        "length": np.asarray(LENGTHS),
        "headroom": NEW,
        "sliding_window": window,
        "softcap": cap,
    }
    rows = jaxkv.compress(*of_prompt[:2], policy=policy, sink_logits=sinks, **given)
    for row, length in enumerate(LENGTHS):
        held = min(length, window or 12)
        assert np.asarray(rows.length)[0, row].tolist() == [held] * HEADS
        if window is not None:
            assert rows.positions()[row][0].tolist() == list(range(length - held, length))
    for first in range(0, NEW, tokens):
        new = slice(SLOTS + first, SLOTS + first + tokens)
        rows = rows.append(k[:, :, new], v[:, :, new])
        out = np.asarray(rows.attend(q[:, :, new]))
        for row, head, at in np.ndindex(2, HEADS * GROUP, tokens):
            kv, pos = head // GROUP, rows.positions()[row][head // GROUP]
            start, length = (
                int(np.asarray(each)[0, row, kv]) for each in (rows.segment_starts, rows.length)
            )
            held = tuple(
                np.asarray(each)[row, start : start + length]
                for each in (rows.get_layer_pool().k, rows.get_layer_pool().v)
            )
            one = None if sinks is None else sinks[head]
            want = oracle(
                (pos, *held),
                q[row, head, SLOTS + first + at],
                one,
                window,
                LENGTHS[row] + first + at,
                cap,
            )
            np.testing.assert_allclose(out[row, head, at], want, atol=2e-5)


def test_sinks_enter_scores():
    """What the window's queries pay is less where more of it goes to a sink: heads of a group weigh differently."""
    k, v, q, _ = arrays(3)
    given = {"policy": jaxkv.SnapKV(budget=10, window=4), "queries": q[:, :, :SLOTS]}
    heavy = np.asarray([20.0, -20.0, -20.0] * HEADS, np.float32)
    plain, sunk = (
        jaxkv.compress(k[:, :, :SLOTS], v[:, :, :SLOTS], **given, sink_logits=each).positions()
        for each in (None, heavy)
    )
    without = (
        q[:, :, :SLOTS].reshape(2, HEADS, GROUP, SLOTS, DIM)[:, :, 1:].reshape(2, -1, SLOTS, DIM)
    )
    given["queries"] = without
    others = jaxkv.compress(k[:, :, :SLOTS], v[:, :, :SLOTS], **given).positions()
    same = [
        np.array_equal(a, b)
        for mine, its in zip(sunk, others, strict=True)
        for a, b in zip(mine, its, strict=True)
    ]
    assert all(same)
    assert any(
        not np.array_equal(a, b)
        for mine, its in zip(sunk, plain, strict=True)
        for a, b in zip(mine, its, strict=True)
    )


@pytest.mark.parametrize(
    "policy",
    [
        jaxkv.PyramidKV(budget=12, window=4),
        jaxkv.GlobalBudget(base=jaxkv.SnapKV(budget=12, window=4)),
    ],
    ids=["pyramidkv", "globalbudget"],
)
def test_layers_with_and_without(policy):
    """Layers with a window hold their last entries, the others what they hold in a model of these alone."""
    k, v, q, sinks = (
        [each[:, :, :SLOTS] if each.ndim == 4 else each for each in pair]
        for pair in zip(*(arrays(s) for s in range(3)), strict=True)
    )
    windows, length = (None, 6, None), jnp.asarray(LENGTHS)

    def run(k, v, q, sinks, length):
        return jaxkv.compress_layers(
            k,
            v,
            policy=policy,
            queries=q,
            length=length,
            headroom=3,
            sliding_windows=windows,
            sink_logits=sinks,
        )

    found, again = run(k, v, q, sinks, length), jax.jit(run)(k, v, q, sinks, length)
    few = [[each[at] for at in (0, 2)] for each in (k, v, q, sinks)]
    alone = jaxkv.compress_layers(
        few[0], few[1], policy=policy, queries=few[2], length=length, sink_logits=few[3]
    )
    for at, layer in enumerate((0, 2)):
        for mine, its in zip(found.positions(layer), alone.positions(at), strict=True):
            assert [each.tolist() for each in mine] == [each.tolist() for each in its]
    for layer in range(3):
        for mine, its in zip(found.positions(layer), again.positions(layer), strict=True):
            assert [each.tolist() for each in mine] == [each.tolist() for each in its]
    assert [each.tolist() for row in found.positions(1) for each in row] == [
        list(range(n - 6, n)) for n in LENGTHS for _ in range(HEADS)
    ]
    found = found.append(k[1][:, :, -1:], v[1][:, :, -1:], layer=1)
    out = found.attend(q[1][:, :, -1:], layer=1)
    assert out.shape == (2, HEADS * GROUP, 1, DIM)


def test_what_is_refused():
    k, v, q, sinks = ([each[:, :, :SLOTS] if each.ndim == 4 else each] * 2 for each in arrays())
    policy = jaxkv.SnapKV(budget=12, window=4)
    for given, told in (
        ({"sliding_window": 0}, "sliding_window=0: give 1 or more tokens, or None"),
        ({"softcap": 0.0}, r"softcap=0\.0: give a positive, finite number"),
        (
            {"sink_logits": sinks[0][:4]},
            r"sink_logits=\[4\]: wrong shape: give one number for each query head, .*H = 6",
        ),
        (
            {"sink_logits": np.arange(6)},
            r"sink_logits='int32\[6\]': not floating point: give floating-point numbers",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            jaxkv.compress(k[0], v[0], policy=policy, queries=q[0], **given)
    with pytest.raises(
        ValueError, match="sliding_windows='1 layers': wrong number of layers: give 2, as for k"
    ):
        jaxkv.compress_layers(k, v, policy=policy, queries=q, sliding_windows=[6])
    with pytest.raises(
        ValueError, match="scores='of 1 layers': all are 0 in the layers without a sliding window"
    ):
        scores = jaxkv.HeadKV(scores=((1.0, 2.0), (0.0, 0.0)), budget=12, window=4)
        jaxkv.compress_layers(k, v, policy=scores, queries=q, sliding_windows=[6, None])
