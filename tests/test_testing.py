"""`check_policy` passes what keeps its promises, and names the promise that is broken."""

import dataclasses

import jax.numpy as jnp
import pytest
import tiny
from policy_table import BY_NAME

from jaxkv import AdaKV, CustomPolicy, OmniKV, SnapKV
from jaxkv.policies import (
    KeyNorm,
    Merged,
    Merger,
    Scorer,
    UniformRandomScores,
)
from jaxkv.testing import check_policy

SHIPPED = ("streaming-rolling", "random", "d2o")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_policies_keep_their_promises(name):
    check_policy(BY_NAME[name].policy(24), model=tiny.tiny(tiny.TWO_LAYERS))


@pytest.mark.parametrize(
    "policy",
    [
        AdaKV(base=SnapKV(budget=0.4, window=8, min_budget="clamp")),
        OmniKV(filter_layers=(0,), adjacent=0, budget=12, base=SnapKV(budget=24, window=8)),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_compositions_keep_them_too(policy):
    check_policy(policy, model=tiny.tiny(tiny.TWO_LAYERS), seed=3)


@dataclasses.dataclass(frozen=True)
class LooksAtMates(Scorer):
    """Rows of the whole batch count."""

    def score_entries(self, seen):
        own = KeyNorm().score_entries(seen)
        return own + own[::-1]


@dataclasses.dataclass(frozen=True)
class LooksAtPadding(Scorer):
    """Padding counts as much as rows do."""

    def score_entries(self, seen):
        norm = KeyNorm().score_entries(seen)
        middle = norm.mean(axis=-1, keepdims=True)
        return -jnp.abs(norm - middle)


@dataclasses.dataclass(frozen=True)
class Infinite(Merger):
    """Values that are no numbers any more."""

    def merge_evicted_entries(self, k, v, kept, inside, mass, tau, key):
        return Merged(k, v * jnp.inf, tau)


@dataclasses.dataclass(frozen=True)
class DrawsInSilence(UniformRandomScores):
    """It looks at the key, and says that it does not."""

    @property
    def uses_random_key(self):
        return False


@pytest.mark.parametrize(
    "policy, message",
    [
        (CustomPolicy(budget=24, scorer=DrawsInSilence()), "another random key"),
        (CustomPolicy(budget=24, scorer=LooksAtMates()), "another sequence in the batch"),
        (CustomPolicy(budget=24, scorer=LooksAtPadding()), "padding"),
        (CustomPolicy(budget=24, scorer=KeyNorm(), merge=Infinite()), "entries are finite"),
    ],
    ids=["uses_key", "mates", "padding", "infinite"],
)
def test_a_broken_promise_is_named(policy, message):
    with pytest.raises(AssertionError, match=message):
        check_policy(policy)
