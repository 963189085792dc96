"""A backend of the required functions alone runs the whole engine, and what a backend says of itself is so."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_implementations import POLICIES

import jaxkv
from jaxkv.attention import AttentionBackend, Implementation, get_attention_backend
from jaxkv.attention.xla_backend import XlaBackend

FUSED = {
    "steps": ("build_work_table", "compute_decode_attention", "add_norm"),
    "evicts": ("evict_lowest_entries", "move_segment_entries"),
}


class Plain(AttentionBackend):
    """The required functions, by matrices of all queries and all rows."""

    def compute_prefill_attention(
        self, q, k, v, length, first=None, *, lse=True, shaping=None, window=None
    ):
        logits = self._causal(q, k, first)
        total = jax.nn.logsumexp(logits, axis=-1) if lse else None
        return jnp.einsum("bkgts,bksd->bkgtd", self._shares(logits), v).astype(q.dtype), total

    def sum_attention_per_key(self, q, k, lse, length, first=None, *, shaping=None):
        at = jnp.arange(q.shape[3]) + (0 if first is None else first[:, None])
        real = jnp.broadcast_to(at < length[:, None], (len(length), q.shape[3]))[
            :, None, None, :, None
        ]
        return jnp.where(real, jnp.exp(self._causal(q, k, first) - lse[..., None]), 0).sum(axis=3)

    def average_window_attention(self, q, k, positions, length, *, shaping=None):
        logits, real = self._causal(q, k, positions[:, 0]), (positions >= 0)[:, None, None, :, None]
        return jnp.where(real, self._shares(logits), 0).sum(axis=3).mean(axis=2) / real.sum(
            axis=3
        ).mean(axis=2)

    def attend_to_segments(self, q, store, reach, *, shaping=None):
        logits, v = self._pool(q, store, reach), reach.decode_rotated_entries(store)[1]
        out = jnp.einsum("bkrp,bpd->bkrd", self._shares(logits), v).astype(q.dtype)
        return out, jax.nn.logsumexp(logits, axis=-1)

    def attend_and_score(self, q, store, reach, score, counts, *, shaping=None):
        received = self._shares(self._pool(q, store, reach)).mean(axis=2).sum(axis=1)
        return self.attend_to_segments(q, store, reach)[0], score + jnp.where(
            counts[:, None], received, 0
        )

    @staticmethod
    def _shares(logits):
        highest = jnp.maximum(logits.max(axis=-1, keepdims=True), -1e30)
        weights = jnp.exp(logits - highest)
        return weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)

    @staticmethod
    def _causal(q, k, first):
        at = jnp.arange(q.shape[3])[None] + (0 if first is None else first[:, None])
        seen = jnp.arange(k.shape[2]) <= at[:, None, None, :, None]
        return jnp.where(seen, jnp.einsum("bkgtd,bksd->bkgts", q, k) / q.shape[-1] ** 0.5, -jnp.inf)

    @staticmethod
    def _pool(q, store, reach):
        k, _ = reach.decode_rotated_entries(store)
        row, start = jnp.arange(k.shape[1]), reach.start[..., None]
        inside = (row >= start) & (row < start + reach.length[..., None])
        return jnp.where(
            inside[:, :, None], jnp.einsum("bkrd,bpd->bkrp", q, k) / q.shape[-1] ** 0.5, -jnp.inf
        )


def named(name, backend):
    """An implementation that no list knows."""
    member = object.__new__(Implementation)
    member._name_, member._value_, member.backend = name.upper(), name, backend
    return member


class Fused(XlaBackend):
    """XLA that takes steps of one token as kernels do."""

    can = dataclasses.replace(XlaBackend.can, steps=frozenset(("rows", "bytes", "nibbles")))


FUSED_XLA = named("fused", f"{__name__}:Fused")
PLAIN = named("plain", f"{__name__}:Plain")


@pytest.mark.parametrize("name", ["adakv", "d2o", "omnikv"])
def test_the_required_functions_are_enough(name):
    """Two unequal prompts are compressed, for D2O questions follow, and tokens: XLA's rows, and XLA's tokens."""
    model, ids = tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(0, [37, 21])
    found = []
    for each in ("xla", PLAIN):
        session = jaxkv.Session(model, POLICIES[name], implementation=each)
        cache = session.prefill(ids)
        kept = tiny.kept(cache)
        if name == "d2o":
            cache = session.extend(cache, tiny.prompts(2, [7, 3]))
        cache, drawn = session.sample(cache, 5)
        found.append((kept, [list(map(int, row)) for row in np.asarray(drawn)]))
    assert str(session.implementations) == "plain"
    assert found[0] == found[1]


@pytest.mark.parametrize("implementation", [each for each in Implementation if each.backend])
def test_a_backend_says_what_it_has(implementation):
    """Fused functions are there exactly where their flag says so."""
    backend = get_attention_backend(implementation)
    for flag, names in FUSED.items():
        for name in names:
            own = getattr(type(backend), name) is not getattr(AttentionBackend, name)
            assert own == bool(getattr(backend.can, flag)), name


@pytest.mark.parametrize("name", ["adakv", "d2o", "omnikv", "quest", "snapkv, int8"])
def test_fused_steps_have_an_oracle(name):
    """Steps of one token through `compute_decode_attention` and `add_norm` sample what separate operations do."""
    model, ids = tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(0, [37, 21])
    found = []
    for each in ("xla", FUSED_XLA):
        session = jaxkv.Session(model, POLICIES[name], implementation=each)
        cache, drawn = session.sample(session.prefill(ids), 6)
        found.append((tiny.kept(cache), [list(map(int, row)) for row in np.asarray(drawn)]))
    assert found[0] == found[1]


def test_without_a_required_function_there_is_no_backend():
    with pytest.raises(TypeError, match="abstract"):
        type("Lacking", (Plain,), {"attend": AttentionBackend.attend_to_segments})()
