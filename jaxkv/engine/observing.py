"""Scores of one layer's entries, their attention mass, and the layer's claim on a shared budget."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import require_shape_and_dtype
from jaxkv.policies.layer_budgets import LayerBudgets
from jaxkv.policies.scorer import GroupReduce, Scorer, ScorerInputs
from jaxkv.sharding.collectives import (
    all_gather_shards,
    any_over_mesh,
    average_over_devices,
    max_over_devices,
    sum_over_devices,
)
from jaxkv.sharding.mesh import ShardingMesh
from jaxkv.sharding.sharded_program import sharded_jit


class LayerScores(NamedTuple):
    """Scores `[B, K, S]` of a layer's entries, attention mass, claim on a shared budget, first-stage ranks, NaN flag.

    Attributes:
        scores: scores of entries.
        mass: observed mass, such as attention, from which scores are computed.
        claim: the layer's claim on a shared budget; None unless budgets depend on claims.
        first: rank of entries that a two-stage scorer selects first, S for others; None for one stage.
        nan: True if a score is NaN, padding excluded.
    """

    scores: Float[Array, "B K S"]
    mass: Float[Array, "B K S"]
    claim: Float[Array, " B"] | None
    first: Int[Array, "B K S"] | None
    nan: Bool[Array, ""]


@sharded_jit(static=("scorer", "layers", "axes"))
def observe(
    seen: ScorerInputs,
    always_kept: Bool[Array, "B S"],
    *,
    scorer: Scorer,
    layers: LayerBudgets,
    axes: ShardingMesh | None = None,
) -> LayerScores:
    """Compiled: score one layer's entries; return `LayerScores`, whose claim on a budget ignores `always_kept` ones.

    Raise TypeError for a scorer whose results are not float32 (ranks: int32) of the entries' shape.
    """
    claim = first = None
    if "norms" in seen.extras:
        # All kv heads hold the same entries during prefill.
        of_heads = sum_over_devices(seen.norms.sum(axis=1, keepdims=True), axes, "K")
        seen = dataclasses.replace(seen, extras={**seen.extras, "norm_totals": of_heads})
    scores, mass = run_scorer(scorer, seen, axes)
    if layers.depends_on_scores and not layers.uses_joint_budget:
        each = layers.compute_head_statistic(
            mass, seen.mask_entries_between() & ~always_kept[:, None], seen
        )
        each = all_gather_shards(each, "K", 1, axes)
        each = all_gather_shards(each, "G", 2, axes) if each.ndim > 2 else each
        claim = layers.compute_layer_weight(each.reshape(len(each), -1, *each.shape[3:]))
    if scorer.has_first_stage:
        ranks: Any = scorer.rank_first_stage(seen)
        named = "kv head and entry, [B, K, S]"
        first = require_shape_and_dtype(scorer, "first", ranks, seen.k.shape[:3], named, jnp.int32)
    nan = any_over_mesh((jnp.isnan(scores) & seen.mask_entries_between()).any(), axes)
    return LayerScores(scores=scores, mass=mass, claim=claim, first=first, nan=nan)


def run_scorer(
    scorer: Scorer, seen: ScorerInputs, axes: ShardingMesh | None
) -> tuple[Float[Array, "B K S"], Float[Array, "B K S"]]:
    """Run a scorer on one layer's entries; return scores and mass (such as attention), both `[B, K, S]`."""
    shape = seen.k.shape[:3]
    named = "kv head and entry, [B, K, S]"
    mass = require_shape_and_dtype(
        scorer, "score_entries", scorer.score_entries(seen), shape, named
    )
    # Scorers without query heads observe the same on all devices.
    if scorer.needs.uses_query_heads:
        largest = GroupReduce(scorer.group) is GroupReduce.MAX
        mass = (max_over_devices if largest else average_over_devices)(mass, "G", axes)
    return require_shape_and_dtype(
        scorer, "finalise_scores", scorer.finalise_scores(mass, seen.length), shape, named
    ), mass
