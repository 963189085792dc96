"""Gated delta nets: chunks and single steps against the plain recurrence in float64; padding changes no state."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv.models.delta_nets import (
    DeltaInputs,
    apply_delta_rule_in_chunks,
    apply_delta_rule_once,
)
from jaxkv.models.states import DeltaState
from jaxkv.models.values import DeltaNetSpec, LayerSpec

HEADS, GROUP, KEY, VALUE = 2, 3, 8, 5
SPEC = DeltaNetSpec(key_heads=HEADS, value_heads=HEADS * GROUP, key_dim=KEY, value_dim=VALUE)


def recurrence(given, memory):
    """Every token in turn: decay, then correct what the key reads by a share of its error, then read by the query."""
    q, k, v, log_decay, rate = (np.asarray(each, np.float64) for each in given)
    memory, out = np.array(memory, np.float64), np.zeros(v.shape)
    for row, head, each in np.ndindex(*v.shape[:3]):
        state = memory[row, head, each]
        for at in range(v.shape[3]):
            state = state * np.exp(log_decay[row, head, each, at])
            error = v[row, head, each, at] - k[row, head, at] @ state
            state = state + rate[row, head, each, at] * np.outer(k[row, head, at], error)
            out[row, head, each, at] = q[row, head, at] @ state
        memory[row, head, each] = state
    return out, memory


def tokens_of(seed, tokens, *, slowest=0.0):
    """Random tokens of two sequences, as the heads see them: unit queries and keys, decays from e^-3 to `slowest`."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, 2, HEADS, tokens, KEY))
    q, k = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (q, k))
    v = rng.standard_normal((2, HEADS, GROUP, tokens, VALUE))
    log_decay = rng.uniform(-3, slowest, v.shape[:-1])
    rate = rng.uniform(0, 1, v.shape[:-1])
    memory = rng.standard_normal((2, HEADS, GROUP, KEY, VALUE))
    return DeltaInputs(*(each.astype(np.float32) for each in (q, k, v, log_decay, rate))), memory


def on_device(given):
    return DeltaInputs(*map(jnp.asarray, given))


def assert_near(ours, theirs):
    for mine, want in zip(ours, theirs, strict=True):
        assert np.abs(np.asarray(mine) - want).max() < 5e-6 * max(1, np.abs(want).max())


@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 200])
def test_chunks_are_the_recurrence(tokens):
    given, memory = tokens_of(tokens, tokens)
    ours = apply_delta_rule_in_chunks(on_device(given), jnp.asarray(memory, jnp.float32))
    assert_near(ours, recurrence(given, memory))


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_repeated_keys_without_decay(rate):
    """The worst system: every token corrects what all before it wrote."""
    given, memory = tokens_of(3, 130)
    same = np.broadcast_to(given.k[:, :, :1], given.k.shape) + 1e-3 * given.k
    given = given._replace(
        k=same / np.linalg.norm(same, axis=-1, keepdims=True),
        log_decay=np.zeros_like(given.log_decay),
        rate=np.full_like(given.rate, rate),
    )
    ours = apply_delta_rule_in_chunks(on_device(given), jnp.asarray(memory, jnp.float32))
    assert_near(ours, recurrence(given, memory))


def test_steps_are_the_recurrence():
    given, memory = tokens_of(5, 9)
    want, last = recurrence(given, memory)
    state = jnp.asarray(memory, jnp.float32)
    for at in range(9):
        q, k = (jnp.asarray(each[:, :, at : at + 1]) for each in given[:2])
        rest = (jnp.asarray(each[:, :, :, at : at + 1]) for each in given[2:])
        out, state = apply_delta_rule_once(DeltaInputs(q, k, *rest), state)
        assert_near((out[..., 0, :],), (want[..., at, :],))
    assert_near((state,), (last,))


# Two delta nets below the first layer, one below the third, none below the second.
KINDS = (LayerSpec(below=(SPEC, SPEC)), LayerSpec(), LayerSpec(below=(SPEC,)))
SHAPE = dataclasses.replace(
    tiny.shape(layers=3, kv_heads=2, group=2, dim=16),
    kinds=KINDS,
    qk_norm=True,
    norm_offset=True,
    attention_gate=True,
    max_positions=1024,
)


def states(cache):
    return [np.asarray(leaf) for each in cache.arrays.states for leaf in (each.window, each.memory)]


def test_padding_and_batch_mates_change_no_state():
    """Prompts longer than a block of tokens, and shorter than the convolution."""
    lengths = (700, 2, 300)
    session = jaxkv.Session(tiny.tiny(SHAPE), jaxkv.FullKV())
    ids = tiny.prompts(1, lengths)
    together = session.prefill(ids)
    assert len(together.arrays.states) == 3
    for row, text in enumerate(ids):
        for ours, alone in zip(states(together), states(session.prefill(text)), strict=True):
            assert np.abs(ours[row] - alone[0]).max() < 2e-4 * np.abs(alone).max()


def test_a_question_and_steps_carry_the_state_on():
    """Prefill of the whole text, a question on top, and token by token: equal logits and states."""
    session = jaxkv.Session(tiny.tiny(SHAPE), jaxkv.FullKV())
    ids = tiny.prompts(2, (90, 37))
    whole = session.prefill(ids)
    begun = session.prefill([each[:-20] for each in ids])
    for chunk in (None, 1, 7):
        asked = session.extend(begun, [each[-20:] for each in ids], chunk=chunk)
        for ours, want in zip(
            (np.asarray(asked.logits), *states(asked)),
            (np.asarray(whole.logits), *states(whole)),
            strict=True,
        ):
            # Rounding of the lower layers grows on its way up.
            assert np.abs(ours - want).max() < 2e-4 * np.abs(want).max(), chunk


def test_an_empty_state_is_zero_and_a_sequence_without_tokens_keeps_its_own():
    session = jaxkv.Session(tiny.tiny(SHAPE), jaxkv.FullKV())
    cache = session.prefill(tiny.prompts(3, (9, 20)))
    _, sampled = session.sample(cache, 5, eos=())
    first = int(sampled[0, 1])
    after, _ = session.sample(cache, 5, eos=(first,))
    kept = np.asarray(after.seen) - np.asarray(cache.seen)
    assert kept[0] < 5
    again = session.prefill([[*ids, *row[:n]] for ids, row, n in zip(
        tiny.prompts(3, (9, 20)), sampled.tolist(), kept, strict=True)])  # fmt: skip
    for ours, want in zip(states(after), states(again), strict=True):
        assert np.abs(ours - want).max() < 2e-4 * np.abs(want).max()
    empty = DeltaState.make_empty(SPEC, 2, HEADS)
    assert not np.asarray(empty.memory).any() and empty.window.shape == (2, 3, HEADS, 31)
