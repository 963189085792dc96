"""Scores of one layer's entries, their attention mass, and the layer's claim on a shared budget."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import checked
from jaxkv.policies.layer_budgets import LayerBudgets
from jaxkv.policies.scorer import GroupReduce, Observed, Scorer
from jaxkv.sharding.collectives import (
    anywhere,
    gathered,
    mean_of_devices,
    most_of_devices,
    total,
)
from jaxkv.sharding.mesh import Axes
from jaxkv.sharding.sharded_program import sharded_jit


class Scored(NamedTuple):
    """Scores of one layer's entries and the statistics that come with them.

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
    seen: Observed,
    always_kept: Bool[Array, "B S"],
    *,
    scorer: Scorer,
    layers: LayerBudgets,
    axes: Axes | None = None,
) -> Scored:
    """Compiled: compute one layer's scores and its claim on a shared budget, without `always_kept` entries.

    Raise TypeError for a scorer whose results are not float32 (ranks: int32) of the entries' shape.
    """
    claim = first = None
    if "norms" in seen.extras:
        # All kv heads hold the same entries during prefill.
        of_heads = total(seen.norms.sum(axis=1, keepdims=True), axes, "K")
        seen = dataclasses.replace(seen, extras={**seen.extras, "norm_totals": of_heads})
    scores, mass = scored(scorer, seen, axes)
    if layers.from_scores and not layers.joint:
        each = layers.of_heads(mass, seen.between() & ~always_kept[:, None], seen)
        each = gathered(each, "K", 1, axes)
        each = gathered(each, "G", 2, axes) if each.ndim > 2 else each
        claim = layers.weight(each.reshape(len(each), -1, *each.shape[3:]))
    if scorer.two_stages:
        ranks: Any = scorer.first_stage(seen)
        named = "kv head and entry, [B, K, S]"
        first = checked(scorer, "first", ranks, seen.k.shape[:3], named, jnp.int32)
    nan = anywhere((jnp.isnan(scores) & seen.between()).any(), axes)
    return Scored(scores=scores, mass=mass, claim=claim, first=first, nan=nan)


def scored(
    scorer: Scorer, seen: Observed, axes: Axes | None
) -> tuple[Float[Array, "B K S"], Float[Array, "B K S"]]:
    """Call a scorer on one layer; return scores of entries and the observed mass, such as attention."""
    shape, named = seen.k.shape[:3], "kv head and entry, [B, K, S]"
    mass = checked(scorer, "observe", scorer.observe(seen), shape, named)
    # Scorers without query heads observe the same on all devices.
    if scorer.needs.query_heads:
        largest = GroupReduce(scorer.group) is GroupReduce.MAX
        mass = (most_of_devices if largest else mean_of_devices)(mass, "G", axes)
    return checked(scorer, "scores", scorer.scores(mass, seen.length), shape, named), mass
