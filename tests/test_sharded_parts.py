"""Parts of policies on meshes: mergers whose heads decide together, filters that choose, and what users write."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import BUDGET, LENGTHS, NEW, QUESTIONS, mesh_of, model_of, prompts, ran

import jaxkv
from jaxkv import D2O, CustomPolicy, OmniKV, Policy
from jaxkv.policies import (
    ByAttention,
    CumulativeAttention,
    HeadBudgets,
    Joined,
    Keep,
    KeyNorm,
    Merge,
    Merged,
    Merger,
    Needs,
    ObservationWindowAttention,
    Scorer,
    UniformHeads,
)
from jaxkv.policies.topk import mask_top_k
from jaxkv.sharding.collectives import all_gather_shards, slice_own_shard


def agree(policy, *, kv_heads=4, group=2, mesh=(2, 4)):
    """The run of a mesh that is that of one device."""
    of = model_of(kv_heads, group)
    split = ran(of.on(mesh_of(*mesh)), policy)
    assert split == ran(of, policy)
    return split


# --- merging ---------------------------------------------------------------------------------------------------------


def test_heads_that_merge_together():
    merge = Merge(scope="layer", metric="both", weights="average")
    agree(D2O(budget=BUDGET, merge=merge), kv_heads=2)


# --- what users write ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Loudest(Scorer):
    """The most that any query head pays to a row with the last query; together, heads of larger keys count more."""

    needs: ClassVar[Needs] = Needs(queries=1)
    group: ClassVar[str] = "max"
    together: bool = False

    def score_entries(self, seen):
        logits = jnp.einsum("bkgwd,bksd->bkgs", seen.queries, seen.k)
        inside = jnp.arange(logits.shape[-1]) < seen.length[:, None, None, None]
        most = jax.nn.softmax(jnp.where(inside, logits, -1e30)).max(axis=2)
        if not self.together:
            return most
        size = jnp.where(inside[:, :, 0], jnp.abs(seen.k).mean(axis=-1), 0.0).sum(axis=-1)
        every = all_gather_shards(size, "K", 1, seen.axes)
        return (
            most
            * slice_own_shard(every / every.mean(axis=1, keepdims=True), "K", 1, seen.axes)[
                ..., None
            ]
        )


@dataclasses.dataclass(frozen=True)
class Lowest(UniformHeads):
    """As many rows in each head, of which the first head's decide; derived from what looks at each head alone."""

    def choose_entries(self, rows):
        mine = jnp.broadcast_to(rows.scores[:, :1], rows.scores.shape)
        return mask_top_k(rows._replace(scores=mine).sort_keys, rows.base[:, None])


@dataclasses.dataclass(frozen=True)
class Greedy(HeadBudgets):
    """All rows of a layer to whichever heads have the best."""

    def choose_entries(self, rows):
        batch, heads, slots = rows.scores.shape
        keys = rows.sort_keys.reshape(batch, heads * slots)
        return mask_top_k(keys, heads * rows.base).reshape(rows.scores.shape)


@dataclasses.dataclass(frozen=True)
class Halving(Merger):
    """A dropped row's value goes half into the nearest kept one, where most heads' are alike."""

    depends_on_other_heads: ClassVar[bool] = True
    compared_tensors: ClassVar[tuple[str, ...]] = ("k",)

    def merge_evicted_entries(self, k, v, kept, inside, mass, tau, key, axes=None):
        each = (inside & ~kept).sum(axis=2, dtype=jnp.int32)
        every = all_gather_shards(each, "K", 1, axes).sum(axis=1)
        scale = (1 + every.astype(jnp.float32) / 64)[:, None, None, None]
        return Merged(k, jnp.where(kept[..., None], v * scale, v), tau)

    def merge_entry_while_decoding(self, index, cosine, dropped, nearest, goes, tau, axes=None):
        joins = goes & (all_gather_shards(cosine, "K", 1, axes).mean(axis=1, keepdims=True) > 0)
        return Joined(joins, None, (dropped.v + nearest.v) / 2, tau)


@dataclasses.dataclass(frozen=True)
class Fading(ByAttention):
    """Older attention fades, and rows begin with what their keys weigh."""

    decay: float = 0.5

    def score_new_entries(self, k, v):
        return jnp.abs(k.astype(jnp.float32)).mean(axis=-1)


HEAVY = {"budget": BUDGET, "scorer": CumulativeAttention(), "keep": Keep(sinks=1, window=1)}


@pytest.mark.parametrize(
    "policy",
    [
        CustomPolicy(budget=BUDGET, scorer=Loudest(together=True), heads=Greedy(), every=3),
        CustomPolicy(
            budget=BUDGET,
            scorer=ObservationWindowAttention(window=8, group="max"),
            heads=Lowest(),
            keep=Keep(window=8),
        ),
        CustomPolicy(**HEAVY, evict=Fading(), merge=Halving()),
    ],
    ids=["scorer", "heads", "merger"],
)
def test_parts_of_users(policy):
    """Four devices have two kv heads of two query heads: each device one query head."""
    agree(policy, kv_heads=2, group=2)


# --- filters ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filtered(Policy):
    """Rows are dropped, and others not read."""

    def build_policy_parts(self):
        read = (
            OmniKV(budget=12, filter_layers=(0,), adjacent=0, selector="uniform", window=3)
            .build_policy_parts()
            .read
        )
        return self.compose(scorer=KeyNorm(), read=read)


def test_filters_choose_among_kept_rows():
    agree(Filtered(budget=40), kv_heads=2)


def test_filters_choose_for_questions():
    """For chunks of a prompt, several tokens on top, then one at a time; query buffers lie where their heads do."""
    choice = {"selector": "exponential", "window": 5, "include_generated": True}
    chunks = {"prefill_ratio": 1.0, "prefill_chunk": 16}
    policy = OmniKV(budget=BUDGET, filter_layers=(0,), adjacent=0, **choice, **chunks)
    out = []
    for model in (model_of(2), model_of(2).on(mesh_of(2, 4))):
        session = jaxkv.Session(model, policy)
        cache = session.prefill(prompts(5, LENGTHS))
        (query_buffer,) = cache.state.query_buffers
        cache = session.extend(cache, prompts(6, QUESTIONS), new=NEW)
        cache, tokens = session.sample(cache, NEW)
        out.append((tokens.tolist(), np.asarray(cache.seen).tolist()))
    assert out[0] == out[1]
    assert query_buffer.sharding.shard_shape(query_buffer.shape) == (
        len(LENGTHS) // 2,
        1,
        1,
        *query_buffer.shape[3:],
    )
