"""Select the entries to keep, by scores and head budgets; on a mesh, among the heads of all devices."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import ENDLESS
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.cache.arrays import EntryOverflowCounts
from jaxkv.cache.packing import UnpackedEntries
from jaxkv.models.config import SlidingWindows
from jaxkv.policies.head_budgets import (
    HeadBudgets,
    ScoredEntries,
    SelectionOrder,
    ThresholdHeads,
    get_competing_budgets,
    limit_entries_per_device,
    multiply_rounding_down,
    remove_score_threshold,
)
from jaxkv.policies.survivors import mask_surviving_candidates
from jaxkv.policies.topk import compute_candidate_sort_keys, count_true, mask_top_k
from jaxkv.sharding.collectives import all_gather_shards, slice_own_shard
from jaxkv.sharding.mesh import ShardingMesh, is_inside_shard_map
from jaxkv.sharding.sharded_program import sharded_jit


@jax.tree_util.register_dataclass
@frozen_dataclass
class Candidates:
    """Candidate entries of one layer: scores, positions, masks; optional value norms, budget claim, ranks.

    Attributes:
        scores: scores of entries; None keeps all entries.
        inside: mask of entries; the others are padding.
        always_kept: mask of entries that are kept regardless of their scores.
        positions: positions of entries.
        seen: number of tokens, from which the most recent entries are counted back.
        norms: norms of values.
        claim: the layer's claim on a budget that layers compete for.
        first: rank of each entry in its head. Entries with a rank below a head's even share of the entries to select
            come before all others.
    """

    scores: Float[Array, "B K S"] | None
    inside: Bool[Array, "B #K S"]  # noqa: F821
    always_kept: Bool[Array, "B #K S"]  # noqa: F821
    positions: Int[Array, "#B #K S"]
    seen: Int[Array, " B"]
    norms: Float[Array, "B K S"] | None = None
    claim: Float[Array, " B"] | None = None
    first: Int[Array, "B K S"] | None = None


@jax.jit
def create_prompt_candidates(
    scores: Float[Array, "B K S"] | None, always_kept: Bool[Array, "B S"], length: Int[Array, " B"]
) -> Candidates:
    """Return `Candidates` of one layer of right-padded prompts from given scores; masks exclude padding."""
    positions = jnp.arange(always_kept.shape[-1], dtype=jnp.int32)[None, None]
    inside = positions < length[:, None, None]
    return Candidates(
        scores=scores,
        inside=inside,
        always_kept=always_kept[:, None] & inside,
        positions=positions,
        seen=length,
    )


def keep_last_entries(rows: Candidates, window: int | None) -> Candidates:
    """Return `Candidates` masked to the last `window` tokens, which later tokens attend to; None keeps all."""
    return _keep_last_entries(rows, window) if window else rows


@partial(jax.jit, static_argnames=("window",))
def _keep_last_entries(rows: Candidates, window: int) -> Candidates:
    """Compiled: return `Candidates` with only the entries of the last `window` tokens in the mask `inside`."""
    return dataclasses.replace(
        rows, inside=rows.inside & (rows.positions >= rows.seen[:, None, None] - window)
    )


def apply_sliding_window(
    rows: UnpackedEntries,
    layer: Candidates,
    window: int | None,
    *,
    cut: bool,
    axes: ShardingMesh | None,
) -> tuple[UnpackedEntries, Candidates]:
    """Return entries, and `Candidates` masked to the last `window` tokens (None: all); or, if `cut`, both sliced."""
    if not (window and cut):
        return rows, keep_last_entries(layer, window)
    return _slice_window(rows, layer, window=min(window, rows.k.shape[2]), axes=axes)


@sharded_jit(static=("window", "axes"))
def _slice_window(
    rows: UnpackedEntries, layer: Candidates, *, window: int, axes: ShardingMesh | None
) -> tuple[UnpackedEntries, Candidates]:
    """Compiled: return copies of each sequence's last `window` entries, and `Candidates` that keep all of them."""
    index = layer.seen[:, None] - window + jnp.arange(window, dtype=jnp.int32)
    shape = (*rows.k.shape[:2], window)
    at = jnp.maximum(index, 0)
    k, v = (jnp.take_along_axis(each, at[:, None, :, None], axis=2) for each in (rows.k, rows.v))
    inside, positions = (jnp.broadcast_to(each[:, None], shape) for each in (index >= 0, at))
    cut = dataclasses.replace(
        layer, inside=inside, always_kept=jnp.zeros_like(inside), positions=positions
    )
    return UnpackedEntries(k, v, inside, positions=positions), cut


class EntrySelection(NamedTuple):
    """Masks of kept entries, by layer; counts of entries moved to other devices, or evicted above threshold."""

    masks: tuple[Bool[Array, "B K S"], ...]
    tally: EntryOverflowCounts


def compute_entry_limits(
    heads: HeadBudgets,
    kept: Int[Array, "L B K"],
    usual: Int[Array, "L B K"],
    axes: ShardingMesh | None,
    sliding_windows: SlidingWindows,
    of: slice = slice(None),
) -> Int[Array, "L B K"]:
    """Return entry limits `[L, B, K]`: `usual`, or if heads have fixed limits, the larger of these and `kept`.

    `sliding_windows` are those of all layers; a layer with one has no limit. `of` selects the layers.
    """
    own_of = heads.get_segment_limits()
    if own_of is None:
        return usual
    windowed = np.asarray([width is not None for width in sliding_windows])
    limits = jnp.asarray(np.where(windowed[:, None], ENDLESS, own_of)[of], jnp.int32)[:, None]
    return jnp.maximum(
        kept, slice_own_shard(limits, "K", 2, axes) if is_inside_shard_map() else limits
    )


def select_entries(
    layers: Sequence[Candidates],
    rows: Int[Array, " B"],
    recent: Int[Array, " B"] | None = None,
    allowed: Bool[Array, "B S"] | None = None,
    due: Bool[Array, " B"] | None = None,
    *,
    heads: HeadBudgets,
    axes: ShardingMesh | None = None,
    index: int = 0,
) -> EntrySelection:
    """Select by score which entries of several layers to keep; return `EntrySelection`: masks `[B, K, S]` and counts.

    Ties go to the lowest head, then to the lowest layer, then to the lowest position.

    Args:
        layers: candidates of L layers.
        rows: average number of entries per kv head and layer, always-kept ones included; L * K times as many are kept.
        recent: number of last entries that every layer keeps.
        allowed: mask of entries that may be selected; all if None.
        due: mask of sequences to compress; the others keep all entries. All if None.
        heads: how the entries are divided among heads.
        axes: axes of the mesh; None without a mesh.
        index: index of the first layer among those without a sliding window.

    Returns:
        A mask `[B, K, S]` per layer, and counts of entries moved and cut.
    """
    if layers[0].scores is None:
        return EntrySelection(tuple(layer.inside for layer in layers), EntryOverflowCounts())
    layer = jnp.int32(index) if heads.needs_layer_index else None
    return _choose(tuple(layers), rows, recent, allowed, due, layer, heads=heads, axes=axes)


@sharded_jit(static=("heads", "axes"))
def _choose(
    layers: tuple[Candidates, ...],
    rows: Int[Array, " B"],
    recent: Int[Array, " B"] | None,
    allowed: Bool[Array, "B S"] | None,
    due: Bool[Array, " B"] | None,
    index: Int[Array, ""] | None,
    *,
    heads: HeadBudgets,
    axes: ShardingMesh | None,
) -> EntrySelection:
    """Compiled: select entries of scored layers; return `EntrySelection`: a keep mask per layer, overflow counts."""
    budgets = remove_score_threshold(heads)
    layer = _join_layers(layers)
    local = layer.inside
    # Heads that compete need the scores of all devices.
    over = None if budgets.selection_order is SelectionOrder.OWN else axes
    layer = dataclasses.replace(layer, always_kept=_mask_always_kept(layer, recent))
    scores, inside, always_kept, norms, first = _gather_all_heads(layer, over)
    assert scores is not None and inside is not None and always_kept is not None
    candidates = (
        inside & ~always_kept if allowed is None else inside & ~always_kept & allowed[:, None]
    )
    limited = isinstance(heads, ThresholdHeads)
    base, anyway = _count_entries_per_head(candidates, always_kept, rows, uneven=limited)
    scores = _prioritise_first_ranks(scores, first, base)
    scored = ScoredEntries(scores, candidates, base, anyway, norms, index)
    chosen = budgets.choose_entries(scored)
    shared = not budgets.is_uniform and budgets.get_segment_limits() is None
    if shared and (candidates.shape[1] > 1 or index is not None):
        # A head's budget can exceed its entries; the best entries of other heads use the rest.
        chosen = chosen & candidates
        left = compute_candidate_sort_keys(scores, candidates & ~chosen).reshape(len(base), -1)
        missing = scores.shape[1] * base - chosen.sum(axis=(1, 2), dtype=jnp.int32)
        chosen = chosen | mask_top_k(left, missing).reshape(chosen.shape)
    moved = None
    cut = None
    uneven = get_competing_budgets(budgets)
    devices = 1 if over is None else over.count_axis_shards("K")
    # In recompression heads may hold fewer entries than the budget allows.
    chosen = chosen & candidates if limited else chosen
    if uneven is not None and uneven.capacity < devices:
        # Keep only the entries that fit into each device's part of the pool.
        heads_here = chosen.shape[1] // devices
        headroom = (
            multiply_rounding_down(uneven.capacity, heads_here * (base + anyway))
            - heads_here * anyway
        )
        keys = compute_candidate_sort_keys(scores, candidates)
        chosen, moved = limit_entries_per_device(
            chosen, keys, uneven.count_guaranteed_entries(base, anyway), headroom, devices
        )
    if isinstance(heads, ThresholdHeads):
        chosen, cut = heads.apply_score_threshold(chosen, scored)
        cut = (
            slice_own_shard(cut, "K", 1, over)
            .reshape(len(base), -1, len(layers))
            .sum(axis=-1, dtype=jnp.int32)
        )
    mask = slice_own_shard(always_kept | chosen, "K", 1, over)
    if due is not None:
        mask = jnp.where(due[:, None, None], mask, local)
        moved = None if moved is None else jnp.where(due, moved, 0)
        cut = None if cut is None else jnp.where(due[:, None], cut, 0)
    masks = [mask]
    if len(layers) > 1:
        batch, _, padded_len = mask.shape
        masks = list(jnp.moveaxis(mask.reshape(batch, -1, len(layers), padded_len), 2, 0))
    return EntrySelection(tuple(masks), EntryOverflowCounts(moved=moved, cut=cut))


def mask_possible_survivors(
    layer: Candidates,
    rows: Int[Array, " B"],
    recent: Int[Array, " B"],
    there: Bool[Array, "K 1"],
    *,
    heads: HeadBudgets,
    most: int,
) -> Bool[Array, "B K S"]:
    """Return the mask `[B, K, S]` of at most `most` of a device's entries that may survive the remaining layers.

    `layer` has the heads of all layers; heads outside `there` have no entries yet. Other arguments are as in
    `select_entries`.
    """
    always_kept = _mask_always_kept(layer, recent)
    candidates = layer.inside & ~always_kept
    base, anyway = _count_entries_per_head(candidates, always_kept, rows)
    assert layer.scores is not None
    headroom = most - layer.scores.shape[1] * anyway
    rows_here = ScoredEntries(layer.scores, candidates & there, base, anyway, layer.norms)
    chosen = mask_surviving_candidates(heads, rows_here, headroom)
    return chosen | always_kept & there


def mask_best_entries(
    layer: Candidates, most: Int[Array, "B K"], recent: Int[Array, " B"], there: Bool[Array, "K 1"]
) -> Bool[Array, "B K S"]:
    """Return the mask `[B, K, S]` of the `most[b, k]` best entries, always-kept ones included, of the heads `there`.

    If `most` only decreases as layers run, no entry is evicted that the last layer would have kept.
    """
    always_kept = _mask_always_kept(layer, recent) & there
    candidates = layer.inside & ~always_kept & there
    anyway, each = (count_true(mask) for mask in (always_kept, candidates))
    assert layer.scores is not None
    keys = compute_candidate_sort_keys(layer.scores, candidates)
    return mask_top_k(keys, jnp.clip(most - anyway, 0, each)) | always_kept


def _mask_always_kept(layer: Candidates, recent: Int[Array, " B"] | None) -> Bool[Array, "B #K S"]:  # noqa: F821
    """Return the mask of entries kept regardless of their scores: `always_kept` ones and the `recent` last ones."""
    kept = layer.always_kept
    if recent is not None:
        kept = kept | (layer.positions >= (layer.seen - recent)[:, None, None])
    return kept & layer.inside


def prioritise_first_stage(
    layer: Candidates, rows: Int[Array, " B"], recent: Int[Array, " B"]
) -> Float[Array, "B K S"]:
    """Return scores `[B, K, S]`, infinite for entries that a two-stage scorer selects first; the same for one stage."""
    assert layer.scores is not None
    always_kept = _mask_always_kept(layer, recent)
    return _prioritise_first_ranks(
        layer.scores,
        layer.first,
        _count_entries_per_head(layer.inside & ~always_kept, always_kept, rows)[0],
    )


def _prioritise_first_ranks(
    scores: Float[Array, "B K S"], first: Int[Array, "B K S"] | None, base: Int[Array, " B"]
) -> Float[Array, "B K S"]:
    """Return scores, infinite for entries whose first-stage rank is below `base`; unchanged if `first` is None."""
    return scores if first is None else jnp.where(first < base[:, None, None], jnp.inf, scores)


def _count_entries_per_head(
    candidates: Bool[Array, "B #K S"],  # noqa: F821
    always_kept: Bool[Array, "B #K S"],  # noqa: F821
    rows: Int[Array, " B"],
    *,
    uneven: bool = False,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Return two counts `[B]` per head: entries to select, `rows` less always-kept, capped by candidates; always-kept.

    The first count is at most the heads' average number of entries; with `uneven`, their maximum.
    """
    anyway, each = (count_true(mask) for mask in (always_kept[:, 0], candidates))
    most = (
        each.max(axis=-1) if uneven else each.sum(axis=-1, dtype=jnp.int32) // candidates.shape[1]
    )
    return jnp.clip(rows - anyway, 0, most), anyway


def _join_layers(layers: tuple[Candidates, ...]) -> Candidates:
    """Join the `Candidates` of L layers into one with K * L heads, so that the heads of all layers compete.

    The layers of a kv head are adjacent, so that each device's heads are contiguous on a mesh.
    """
    first = layers[0]
    if len(layers) == 1 or first.scores is None:
        return first
    _, heads, padded_len = first.scores.shape

    def join_arrays(*leaves: Array) -> Array:
        """Interleave all layers' arrays to `[B, K * L, S]`; return the first one if its heads share one mask."""
        if leaves[0].shape[1] < heads:
            return leaves[0]
        return jnp.stack(leaves, axis=2).reshape(leaves[0].shape[0], -1, padded_len)

    names = ("scores", "inside", "always_kept", "positions", "norms", "first")
    of_layers = [{name: getattr(layer, name) for name in names} for layer in layers]
    return dataclasses.replace(first, **jax.tree.map(join_arrays, *of_layers))


def _gather_all_heads(layer: Candidates, axes: ShardingMesh | None) -> list[Array | None]:
    """Return a layer's scores, masks, norms and ranks as a list; with `axes`, gathered from all devices."""
    known = [layer.scores, layer.inside, layer.always_kept, layer.norms, layer.first]
    if axes is None or layer.scores is None:
        return known
    shape = layer.scores.shape
    return jax.tree.map(
        lambda each: all_gather_shards(jnp.broadcast_to(each, shape), "K", 1, axes), known
    )
