"""Caches of transformed rows: attention, choices and answers are those over the rows themselves, but for rounding."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import tiny
from policy_table import TABLE
from scipy.linalg import hadamard
from test_windows import SHAPE

import jaxkv
from jaxkv.cache import DenseStore
from jaxkv.engine import hadamard as own
from jaxkv.testing import segments

PROMPTS, QUESTIONS, NEW = (61, 40), (9, 5), 12
ROWS = {row.name: row for row in TABLE}
# One of each way in which rows are chosen, packed, scored again and read.
NAMES = ("full", "adakv", "h2o", "kvzip")


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole(DenseStore):
    """Rows as the model computes them, transformed."""

    transformed = True


def drawn(model, policy):
    """Cache of two prompts, of questions on top of them, tokens, and the logits after each of these."""
    session = jaxkv.Session(model, policy, key=3)
    cache = session.prefill(tiny.prompts(1, PROMPTS), new=NEW)
    first = np.asarray(cache.logits)
    asked = session.extend(cache, tiny.prompts(2, QUESTIONS), new=NEW)
    second = np.asarray(asked.logits)
    last, tokens = session.sample(asked, NEW)
    return cache, last, tokens.tolist(), (first, second, np.asarray(last.logits))


def compare(model, policy, stored):
    """Tokens and kept rows are the same, logits and rows are as close as float32 is."""
    cache, last, tokens, logits = drawn(model, policy)
    its, its_last, its_tokens, its_logits = drawn(model, stored)
    assert cache.tables.centre is None and its.tables.centre is not None
    assert tokens == its_tokens and tiny.kept(last) == tiny.kept(its_last)
    for ours, theirs in zip(logits, its_logits, strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-3)
    for ours, theirs in zip(segments(last), segments(its_last), strict=True):
        np.testing.assert_array_equal(ours.pos, theirs.pos)
        np.testing.assert_allclose(theirs.k, ours.k, atol=1e-4)
        np.testing.assert_allclose(theirs.v, ours.v, atol=1e-4)


@pytest.mark.parametrize("dim", [2, 8, 64, 80, 96, 128, 256])
def test_the_matrix_is_hadamards(dim):
    """Blocks of the largest power of two; times itself it is the unit matrix."""
    size = max(each for each in (2, 4, 8, 16, 32, 64, 128, 256) if dim % each == 0)
    want = np.kron(np.eye(dim // size), hadamard(size) / np.sqrt(size))
    np.testing.assert_allclose(own.hadamard_matrix(dim), want, rtol=1e-6)
    x = np.random.default_rng(0).standard_normal((3, dim)).astype(np.float32)
    np.testing.assert_allclose(own.apply_hadamard(own.apply_hadamard(jnp.asarray(x))), x, atol=1e-5)


def test_centres_are_means_of_the_last_real_tokens():
    """Over a prompt's last 1,024 tokens and 16 zeros, padding and older tokens left out."""
    k = np.random.default_rng(0).standard_normal((2, 3, 1500, 8)).astype(np.float32)
    found = own.compute_mean_key(jnp.asarray(k), jnp.asarray([1400, 4], jnp.int32))
    want = np.stack([k[0, :, 376:1400].sum(axis=1) / 1040, k[1, :, :4].sum(axis=1) / 20])
    np.testing.assert_allclose(found, want, atol=1e-6)
    stored = own.centre_and_transform_keys(jnp.asarray(k), found)
    np.testing.assert_allclose(own.restore_original_keys(stored, found), k, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_over_keys(name):
    """Prompts, questions on top of them, and tokens."""
    row = ROWS[name]
    # Equal tokens have equal keys in the first layer, which come back a bit apart: no second choice by keys alone.
    given = {} if row.keeps_all or row.evicts or name == "kvzip" else {"every": 4}
    compare(tiny.tiny(tiny.TWO_LAYERS), row.make(24, **given), stored(row, given))


def stored(row, given):
    """A row's policy with `Whole` rows."""
    if row.keeps_all:
        return dataclasses.replace(row.make(24, **given), store=Whole)
    return row.make(24, store=Whole, **given)


def test_windows_read_the_same():
    """Models with sliding-window layers: rows of these layers are transformed as well."""
    policy = jaxkv.H2O(budget=24)
    compare(tiny.tiny(SHAPE), policy, dataclasses.replace(policy, store=Whole))


def test_meshes_transform_their_own_heads():
    """Over two kv heads' devices and groups of sequences: as on one device, planned bytes included."""
    policy, model = (
        meshes.roomy("adakv", store=Whole),
        tiny.tiny(tiny.shape(layers=2, kv_heads=4, group=2, dim=8)),
    )
    assert meshes.ran(model.on(meshes.mesh_of(2, 4)), policy, asks=True) == meshes.ran(
        model, policy, asks=True
    )


@pytest.mark.parametrize("name", ["d2o", "snapkv-merge", "streaming-rolling", "quest", "omnikv"])
def test_what_compares_keys_holds_them(name):
    """Mergers compare keys, pages bound them, rolling positions rotate them: these caches hold them as they are."""
    row = ROWS[name]
    policy = stored(row, {})
    assert not own.uses_hadamard(policy.build_policy_parts())
    cache = jaxkv.Session(tiny.tiny(tiny.TWO_LAYERS), policy).prefill(tiny.prompts(1, PROMPTS))
    assert cache.tables.centre is None
