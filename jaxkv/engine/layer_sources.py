"""Layer sources: the interface that `compress` uses, and the base of sources of prompts."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv._checks import is_traced
from jaxkv._errors import require
from jaxkv.cache.packing import UnpackedEntries
from jaxkv.engine.lengths import EntryCounts, Numbers, compute_layer_budgets
from jaxkv.engine.observing import observe
from jaxkv.engine.selection import Candidates, apply_sliding_window, create_prompt_candidates
from jaxkv.models.config import SlidingWindows
from jaxkv.policies.parts import Parts
from jaxkv.policies.scorer import ExtraInputs, ScorerInputs
from jaxkv.sharding.mesh import ShardingMesh, copy_to_host, place_host_array


class LayerEntrySource(abc.ABC):
    """Abstract source that gives compression each layer's candidates, entry counts, pool size, keys and values.

    Attributes:
        indices: indices of the layers in the model.
        kept_entries: entries per kv head to keep in each layer, `[L, B]`, on the host or traced; None until known.
        recents: most recent entries among these, `[L, B]`; None until known.
        sliding_windows: sliding window of each layer of the model, None without one; budgets apply to the other layers.
        axes: axes of the mesh that the layers are on; None without a mesh.
        ahead: number of layers that may be in flight while the next one is dispatched, as memory allows.
        dtype: dtype of the pools; None for the dtype of the entries.
    """

    indices: Sequence[int]
    sliding_windows: SlidingWindows
    kept_entries: Any
    recents: Any
    axes: ShardingMesh | None = None
    ahead: int = 0
    dtype: jnp.dtype | None = None

    @abc.abstractmethod
    def get_layer_candidates(self, index: int) -> Candidates:
        """Return the `Candidates` of layer `index`: scores, positions, masks of valid and always-kept entries."""

    def count_entries_to_keep(
        self, group: Sequence[int], layer_weights: list[Array | None]
    ) -> tuple[Int[Array, "n B"], Int[Array, "n B"]]:
        """Return two counts `[n, B]` for a group of n layers: entries to keep per kv head, recent ones among these."""
        part = slice(group[0], group[-1] + 1)
        rows, recents = (
            place_host_array(table[part], "n B", self.axes, jnp.int32)
            for table in (self.kept_entries, self.recents)
        )
        return rows, recents

    def bound_entries_to_keep(
        self, layer_weights: list[Array | None]
    ) -> tuple[Int[Array, "n B"], Int[Array, "n B"]]:
        """Return upper bounds `[n, B]` of `count_entries_to_keep` before all layers ran; by default raise TypeError."""
        raise TypeError(f"{type(self).__name__}: not supported before all layers have run.")

    @abc.abstractmethod
    def compute_pool_size(self, group: Sequence[int], kept: Int[Array, "n B K"]) -> int:
        """Return the pool size P in entries for layers that keep `kept` entries; on a mesh, of one device's part."""

    def compute_packing_size(self, index: int, size: int) -> int:
        """Return the size P >= `size` in entries of a layer's pool before it is cut to `size`; by default `size`."""
        return size

    @abc.abstractmethod
    def take_layer_entries(self, index: int) -> UnpackedEntries:
        """Return the keys, values and scores of one layer as `UnpackedEntries`, ready to be packed into a pool."""


class PromptEntrySource(LayerEntrySource):
    """Base of layer sources over right-padded prompts, whose entries are scored by the policy's scorer.

    Attributes:
        parts: the policy's parts; `make_scored_candidates` requires parts with a scorer.
        lengths: number of tokens of each prompt, on the host or traced; `length` is the same on the device.
        numbers: the policy's numbers for these lengths.
        held: keys and values of layers that wait to be packed.
        nans: for each scored layer, whether a score is NaN.
    """

    def __init__(
        self,
        parts: Parts,
        lengths: Numbers,
        numbers: EntryCounts,
        *,
        heads: int,
        padded_len: int,
        indices: Sequence[int],
        sliding_windows: SlidingWindows,
        axes: ShardingMesh | None = None,
    ):
        """Prepare masks of `padded_len`-token prompts for layers of `heads` kv heads (in `shard_map`, a device's)."""
        self.parts = parts
        self.lengths = lengths
        self.numbers = numbers
        self.indices = indices
        self.sliding_windows = sliding_windows
        self.axes = axes
        self.kept_entries = numbers.rows
        self.recents = numbers.recent
        self.length = place_host_array(lengths, "B", axes, jnp.int32)
        self.always_kept = place_host_array(
            parts.keep.mask_always_kept(lengths, padded_len), "B S", axes
        )
        # Candidates of a layer without scores, and of a layer that keeps all entries.
        self.unscored = create_prompt_candidates(None, self.always_kept, self.length)
        everything = jnp.broadcast_to(self.unscored.inside, (*self.length.shape, heads, padded_len))
        self.all_kept = dataclasses.replace(self.unscored, inside=everything)
        self.held = dict[int, UnpackedEntries]()
        self.nans = list[Array]()
        self.checked = 0

    def make_unscored_candidates(self, index: int, rows: UnpackedEntries) -> Candidates:
        """Return the `Candidates` of a layer that keeps all entries or its window's; hold its keys and values."""
        # Entries of layers that share a pool wait for the last layer, so hold those of the window only.
        cut = self.parts.cache_layout.uses_shared_pool
        self.held[index], candidates = apply_sliding_window(
            rows, self.all_kept, self.sliding_windows[index], cut=cut, axes=self.axes
        )
        return candidates

    def make_scored_candidates(
        self,
        index: int,
        rows: UnpackedEntries,
        seen: ScorerInputs,
        norms: Float[Array, "B K S"] | None = None,
    ) -> Candidates:
        """Score a layer's entries by the policy's scorer; return its `Candidates`; hold its keys and values."""
        parts = self.parts
        result = observe(
            seen, self.always_kept, scorer=parts.scorer, layers=parts.layers, axes=self.axes
        )
        self.nans.append(result.nan)
        score = result.mass if parts.stores_scores else None
        if parts.needs.references:
            # Layers may wait: what scorers alone read is freed.
            extras = ExtraInputs(references=seen.references)
            rows = rows._replace(seen=dataclasses.replace(seen, extras=extras))
        self.held[index] = rows._replace(mass=result.mass, score=score)
        return dataclasses.replace(
            self.unscored,
            scores=result.scores,
            norms=norms,
            claim=result.claim,
            first=result.first,
        )

    def count_entries_to_keep(
        self, group: Sequence[int], layer_weights: list[Array | None]
    ) -> tuple[Int[Array, "n B"], Int[Array, "n B"]]:
        """Return two counts `[n, B]`, by layer weights if needed: entries to keep per kv head, recent ones of these."""
        if self.parts.uses_layer_weights:
            of = (
                self.lengths,
                self.numbers.always_kept,
                self.sliding_windows,
                self.stack_layer_budget_weights(layer_weights),
            )
            self.kept_entries, self.recents = compute_layer_budgets(
                self.parts, self.numbers.budget, *of
            )
        return super().count_entries_to_keep(group, layer_weights)

    def stack_layer_budget_weights(self, layer_weights: list[Array | None]) -> Any:
        """Stack layers' budget weights to `[n, B]`: traced, or on the host with a ValueError for NaN scores."""
        known = [each for each in layer_weights if each is not None]
        if is_traced(known[0]):
            return jnp.stack(known)
        self.require_no_nan_scores()
        return np.stack([copy_to_host(claim) for claim in known])

    def take_layer_entries(self, index: int) -> UnpackedEntries:
        """Remove one layer's keys and values from the source and return them as `UnpackedEntries`."""
        return self.held.pop(index)

    def require_no_nan_scores(self) -> None:
        """Wait for the scores since the last call; raise ValueError with the layers' indices if any is NaN."""
        first = self.checked
        new = self.nans[self.checked :]
        self.checked = len(self.nans)
        for each in new:
            each.copy_to_host_async()
        scored = [layer for layer in self.indices if self.sliding_windows[layer] is None][first:]
        layers = [
            layer for layer, each in zip(scored, new, strict=False) if bool(copy_to_host(each))
        ]
        remedy = f"{self.parts.scorer} returned NaN in layers {layers}: correct the scorer, or the model "
        require(not layers, "scores", "NaN", remedy + "if its activations are not finite")
