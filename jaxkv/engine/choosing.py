"""Which of a layer's rows stay: what a choice sees of them, and the choice, on a mesh over all devices' heads."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._values import Typed
from jaxkv.policies.heads import HeadBudgets, chooses_apart, most_rows, own_budgets, within_capacity
from jaxkv.policies.topk import sortable, top
from jaxkv.sharding.collectives import gathered, own
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["scores", "inside", "forced", "positions", "seen", "norms", "claim"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """One layer's rows, in order of position, as a choice among them sees them.

    Attributes:
        scores: `f32[B, K, S]` higher stays; None where everything does.
        inside: `bool[B, K|1, S]` slots that hold a row.
        forced: `bool[B, K|1, S]` rows that stay whatever their score, the most recent ones left out.
        positions: `i32[B|1, K|1, S]` of the rows.
        seen: `i32[B]` tokens of the text: the most recent rows count from there.
        norms: `f32[B, K, S]` of the values, for choices that look at them.
        claim: `f32[B]` the layer's claim on the budget, where budgets follow from what layers claim.
    """

    scores: Float[Array, "B K S"] | None
    inside: Bool[Array, "B #K S"]
    forced: Bool[Array, "B #K S"]
    positions: Int[Array, "#B #K S"]
    seen: Int[Array, " B"]
    norms: Float[Array, "B K S"] | None = None
    claim: Float[Array, " B"] | None = None


@jax.jit
def of_prompt(scores: Float[Array, "B K S"] | None, forced: Bool[Array, "B S"], length: Int[Array, " B"]) -> Candidates:
    """A prompt's rows, every head's alike.

    Args:
        scores: float32, higher stays; None where everything does.
        forced: rows that stay whatever their score.
        length: tokens of each sequence.

    Returns:
        The rows, without norms and claim.
    """
    positions = jnp.arange(forced.shape[-1], dtype=jnp.int32)[None, None]
    inside = positions < length[:, None, None]
    return Candidates(scores=scores, inside=inside, forced=forced[:, None] & inside, positions=positions, seen=length)


class Choice(NamedTuple):
    """Which rows of a layer stay.

    Attributes:
        mask: `bool[B, K, S]`.
        moved: `i32[B]` how many of them are there in place of better ones, for which a device had no room; None where
            there is no such limit.
    """

    mask: Bool[Array, "B K S"]
    moved: Int[Array, " B"] | None


def moved_in_all(one: Int[Array, " B"] | None, other: Int[Array, " B"] | None) -> Int[Array, " B"] | None:
    """Two counts of moved rows together; where one choice had no limit, the other's."""
    return other if one is None else one if other is None else one + other


def choose(
    layer: Candidates,
    rows: Int[Array, " B"],
    recent: Int[Array, " B"] | None = None,
    allowed: Bool[Array, "B S"] | None = None,
    due: Bool[Array, " B"] | None = None,
    *,
    heads: HeadBudgets,
    axes: Axes | None = None,
) -> Choice:
    """Chooses the rows of one layer that stay.

    Args:
        layer: what is known of its rows.
        rows: rows per kv head in this layer, forced ones included; K times as many stay.
        recent: last rows that stay, too.
        allowed: the only rows that can be chosen, if not all.
        due: sequences whose rows are chosen, all rows of the others stay; all by default.
        heads: how they spread over heads.
        axes: of the mesh that they lie on, if they do.

    Returns:
        The choice; ties go to the lowest head, then to the lowest position.
    """
    if layer.scores is None:
        return Choice(layer.inside, None)
    return _choose(layer, rows, recent, allowed, due, heads=Typed(heads), axes=axes)


def choose_over_layers(
    layers: Sequence[Candidates],
    rows: Int[Array, " B"],
    recent: Int[Array, " B"],
    due: Bool[Array, " B"] | None = None,
    *,
    heads: HeadBudgets,
    axes: Axes | None = None,
) -> list[Choice]:
    """Chooses the rows of all layers that stay, where the kv heads of all layers compete for one budget.

    Args:
        layers: each layer's rows.
        rows: rows per kv head and layer on average, forced ones included; L * K times as many stay.
        recent: last rows that stay in every layer, too.
        due: as for `choose`.
        heads: how the rows spread over the L * K heads.
        axes: of the mesh that they lie on, if they do.

    Returns:
        One choice per layer; the first one counts the moved rows of all layers. Ties go to the lowest head, then to the
        lowest layer, then to the lowest position.
    """
    masks, moved = _choose_over_layers(tuple(layers), rows, recent, due, heads=Typed(heads), axes=axes)
    return [Choice(mask, None if index else moved) for index, mask in enumerate(masks)]


class _Masks(NamedTuple):
    """Masks of the rows of each layer that stay, and the moved rows of all layers."""

    masks: tuple[Bool[Array, "B K S"], ...]
    moved: Int[Array, " B"] | None


@program(static=("heads", "axes"))
def _choose_over_layers(
    layers: tuple[Candidates, ...],
    rows: Int[Array, " B"],
    recent: Int[Array, " B"],
    due: Bool[Array, " B"] | None,
    *,
    heads: Typed,
    axes: Axes | None,
) -> _Masks:
    assert layers[0].scores is not None
    batch, mine, slots = layers[0].scores.shape

    def joined(name: str) -> Any:
        """One array of all layers, `[B, K * L, S]`: a device's heads stay side by side."""
        leaves = [getattr(layer, name) for layer in layers]
        if leaves[0] is None or leaves[0].shape[1] < mine:
            # What is the same for all heads is a prompt's, and the same for all layers.
            return leaves[0]
        return jnp.stack(leaves, axis=2).reshape(leaves[0].shape[0], -1, slots)

    together: dict[str, Any] = {name: joined(name) for name in ("scores", "inside", "forced", "positions", "norms")}
    every = dataclasses.replace(layers[0], **together)
    mask, moved = _chosen(every, rows, recent, None, due, heads.part, axes)
    each = jnp.moveaxis(mask.reshape(batch, mine, len(layers), slots), 2, 0)
    return _Masks(tuple(each), moved)


@program(static=("heads", "axes"))
def _choose(
    layer: Candidates,
    rows: Int[Array, " B"],
    recent: Int[Array, " B"] | None,
    allowed: Bool[Array, "B S"] | None,
    due: Bool[Array, " B"] | None,
    *,
    heads: Typed,
    axes: Axes | None,
) -> Choice:
    return _chosen(layer, rows, recent, allowed, due, heads.part, axes)


def _chosen(
    layer: Candidates,
    rows: Int[Array, " B"],
    recent: Int[Array, " B"] | None,
    allowed: Bool[Array, "B S"] | None,
    due: Bool[Array, " B"] | None,
    budgets: HeadBudgets,
    axes: Axes | None,
) -> Choice:
    """Choice among the rows of the heads given, which share `rows` per head on average."""
    mine = layer.inside
    # Where heads look at one another, every device looks at all of them.
    over = None if chooses_apart(budgets) else axes
    stays = layer.forced
    if recent is not None:
        stays = stays | (layer.positions >= (layer.seen - recent)[:, None, None])
    layer = dataclasses.replace(layer, forced=stays & layer.inside)
    scores, inside, forced, norms = _of_all_heads(layer, over)
    assert scores is not None and inside is not None and forced is not None
    candidates = inside & ~forced if allowed is None else inside & ~forced & allowed[:, None]
    anyway = forced[:, 0].sum(axis=-1, dtype=jnp.int32)
    most = candidates.sum(axis=(1, 2), dtype=jnp.int32) // candidates.shape[1]
    base = jnp.clip(rows - anyway, 0, most)
    chosen = budgets.choose(scores, candidates, base, anyway, norms)
    if candidates.shape[1] > 1 and not budgets.uniform:
        # A head's share can be more than it has; what it leaves goes to the best rows of the others.
        chosen = chosen & candidates
        left = jnp.where(candidates & ~chosen, sortable(scores), jnp.uint32(0)).reshape(len(base), -1)
        missing = scores.shape[1] * base - chosen.sum(axis=(1, 2), dtype=jnp.int32)
        chosen = chosen | top(left, missing).reshape(chosen.shape)
    chosen, moved = _on_devices(chosen, candidates, scores, base, anyway, budgets, over)
    mask = own(forced | chosen, "K", 1, over)
    if due is None:
        return Choice(mask, moved)
    return Choice(jnp.where(due[:, None, None], mask, mine), None if moved is None else jnp.where(due, moved, 0))


def _on_devices(
    chosen: Bool[Array, "B K S"],
    candidates: Bool[Array, "B #K S"],
    scores: Float[Array, "B K S"],
    base: Int[Array, " B"],
    anyway: Int[Array, " B"],
    budgets: HeadBudgets,
    axes: Axes | None,
) -> tuple[Bool[Array, "B K S"], Int[Array, " B"] | None]:
    """The choice of all heads as far as each device has room for its own; how many rows had none."""
    devices = 1 if axes is None else axes.size("K")
    uneven = own_budgets(budgets)
    if uneven is None or uneven.capacity >= devices:
        return chosen, None
    mine = chosen.shape[1] // devices
    most = most_rows(uneven.capacity, mine * (base + anyway)) - mine * anyway
    keys = jnp.where(candidates, sortable(scores), jnp.uint32(0))
    return within_capacity(chosen, keys, uneven.floor(base, anyway), most, devices)


def _of_all_heads(layer: Candidates, axes: Axes | None) -> list[Array | None]:
    """Scores, rows that are there and that stay anyway, and norms: of all heads, where a device has some of them."""
    known = [layer.scores, layer.inside, layer.forced, layer.norms]
    if axes is None or layer.scores is None:
        return known
    shape = layer.scores.shape
    return [None if each is None else gathered(jnp.broadcast_to(each, shape), "K", 1, axes) for each in known]
