"""Mergers: D2O's `Merge` averages evicted entries into kept ones, CaM's `ValueMerge` adds values to later values."""

import enum
import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv._checks import (
    validate_bool,
    validate_enum,
    validate_field,
    validate_float,
    validate_int,
    validate_optional_field,
)
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.merger import EntryPerSegment, Joined, Merged, Merger
from jaxkv.sharding.collectives import (
    all_gather_shards,
    any_over_devices,
    get_shard_offset,
    slice_own_shard,
)
from jaxkv.sharding.mesh import ShardingMesh

# Evicted entries, and kept entries, compared at a time.
_DROPPED_BLOCK = 256
_KEPT_BLOCK = 512


class MergeMetric(enum.Enum):
    """Enum of cosines that decide how keys and values merge: those of KEY, of VALUE, or BOTH (each by its own)."""

    KEY = "key"
    VALUE = "value"
    BOTH = "both"


class MergeWeights(enum.Enum):
    """Enum of merged entries' weights in a kept one: exp of cosine (SOFTMAX), equal (AVERAGE), cosine (SCATTER_MEAN).

    SOFTMAX: evicted entries weigh exp(cosine), the kept entry e, over their sum. AVERAGE: all entries weigh the same.

    SCATTER_MEAN: evicted entries are multiplied by their cosine, and the sum is divided by their number plus one; the
    weights do not sum to one.
    """

    SOFTMAX = "softmax"
    AVERAGE = "average"
    SCATTER_MEAN = "scatter_mean"


class ThresholdScope(enum.Enum):
    """Enum of a running merge threshold's scope: one per kv head (HEAD), or one per layer (LAYER)."""

    HEAD = "head"
    LAYER = "layer"


class MergeDecision(enum.Enum):
    """Cosine that decides a merge: the entry's own (TOKEN), or the mean of heads' i-th evicted ones (SHARED_POSITION).

    SHARED_POSITION, as in published code, decides for the i-th evicted entries of all heads together.
    """

    TOKEN = "token"
    SHARED_POSITION = "shared_position"


@frozen_dataclass
class Merge(Merger):
    """D2O's merger: average evicted entries into their most similar kept ones above a running or fixed threshold.

    Attributes:
        beta: weight of the latest similarity in the running threshold.
        metric: `MergeMetric`, or its value: cosines of keys or of values.
        weights: `MergeWeights`, or its value: weights of the averaged entries.
        scope: `ThresholdScope`, or its value: one threshold per head or per layer.
        decision: `MergeDecision`, or its value: decide for each entry, or for several heads together.
        threshold: a fixed threshold instead of the running one: -inf merges every entry, +inf none.

    References:
        Wan et al., D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language
        Models, arXiv:2406.13035, equations 9 to 12; evicted entries' weights in equation 12 are normalised per kept
        entry, so that all sum to one.
    """

    beta: float = 0.7
    metric: MergeMetric | str = MergeMetric.KEY
    weights: MergeWeights | str = MergeWeights.SOFTMAX
    scope: ThresholdScope | str = ThresholdScope.HEAD
    decision: MergeDecision | str = MergeDecision.TOKEN
    threshold: float | None = None

    def __post_init__(self) -> None:
        validate_field(self, "beta", validate_float, "give a weight between 0 and 1", high=1.0)
        for name, kind in (
            ("metric", MergeMetric),
            ("weights", MergeWeights),
            ("scope", ThresholdScope),
            ("decision", MergeDecision),
        ):
            validate_field(self, name, validate_enum, kind)
        remedy = "give a cosine, an infinity, or None"
        validate_optional_field(self, "threshold", validate_float, remedy, low=-math.inf)

    @property
    def threshold_count(self) -> int:
        """Number of running merge thresholds per kv head: 2 with `MergeMetric.BOTH`, else 1."""
        return len(self.compared_tensors)

    @property
    def needs_equal_evictions(self) -> bool:
        """True if kv heads must evict equally many entries: with `MergeDecision.SHARED_POSITION`."""
        return self.decision is MergeDecision.SHARED_POSITION

    @property
    def depends_on_other_heads(self) -> bool:
        """True if kv heads share a merge threshold or decision, so that a head's merges depend on other heads."""
        return self.scope is ThresholdScope.LAYER or self.decision is MergeDecision.SHARED_POSITION

    @property
    def compared_tensors(self) -> tuple[str, ...]:
        """Names of tensors whose cosines find an evicted entry's nearest kept entry: ("k",), ("v",) or ("k", "v")."""
        return {MergeMetric.KEY: ("k",), MergeMetric.VALUE: ("v",), MergeMetric.BOTH: ("k", "v")}[
            MergeMetric(self.metric)
        ]

    def _list_merged_tensors(self, index: int) -> str:
        """Return names of the tensors that merge by cosines of `compared_tensors[index]`: "k", "v" or "kv" (both)."""
        return self.compared_tensors[index] if self.metric is MergeMetric.BOTH else "kv"

    def update_thresholds(
        self,
        tau: Float[Array, "B K"],
        similarity: Float[Array, "B K N"],
        dropped: Bool[Array, "B K N"],
    ) -> Float[Array, "B K"]:
        """Return running thresholds `[B, K]`: beta * evicted entries' mean cosine + (1 - beta) * `tau`; first the mean.

        Args:
            tau: thresholds so far; -inf before the first eviction.
            similarity: cosine of each entry and its nearest kept entry.
            dropped: mask of evicted entries.

        Returns:
            The thresholds; unchanged without evicted entries.
        """
        if self.scope is ThresholdScope.LAYER:
            axes: tuple[int, ...] = (1, 2)
        else:
            axes = (2,)
        count = dropped.sum(axis=axes, keepdims=True, dtype=jnp.int32)
        total = jnp.where(dropped, similarity, 0.0).sum(axis=axes, keepdims=True)
        latest = (total / jnp.maximum(count, 1).astype(jnp.float32))[..., 0]
        latest = jnp.broadcast_to(latest, tau.shape)
        after = jnp.where(jnp.isneginf(tau), latest, self.beta * latest + (1 - self.beta) * tau)
        return jnp.where(jnp.broadcast_to(count[..., 0] > 0, tau.shape), after, tau)

    def mask_entries_to_merge(
        self,
        tau: Float[Array, "B K"],
        similarity: Float[Array, "B K N"],
        dropped: Bool[Array, "B K N"],
    ) -> Bool[Array, "B K N"]:
        """Return the mask `[B, K, N]` of evicted entries whose deciding cosine reaches `tau` (or `threshold` if set).

        Args:
            tau: thresholds, updated by these evicted entries.
            similarity: cosine of each entry and its nearest kept entry.
            dropped: mask of evicted entries.

        Returns:
            The mask.
        """
        level = tau if self.threshold is None else jnp.full_like(tau, self.threshold)
        if self.decision is MergeDecision.SHARED_POSITION:
            # The i-th evicted entries of all heads, in order of position, are different tokens.
            order = jnp.argsort(~dropped, axis=-1, stable=True)
            together = jnp.take_along_axis(similarity, order, axis=-1).mean(axis=1, keepdims=True)
            rank = jnp.maximum(jnp.cumsum(dropped, axis=-1, dtype=jnp.int32) - 1, 0)
            similarity = jnp.take_along_axis(
                jnp.broadcast_to(together, similarity.shape), rank, axis=-1
            )
        return dropped & (similarity >= level[..., None])

    def _decide_merges(
        self,
        tau: Array | None,
        index: int,
        similarity: Array,
        dropped: Array,
        axes: ShardingMesh | None,
    ) -> tuple[Array, Array]:
        """Return `tau`, updated for the `index`-th compared tensor, and the mask `[B, K, N]` of entries to merge."""
        assert tau is not None
        over = axes if self.depends_on_other_heads else None
        level, similarity, dropped = (
            all_gather_shards(each, "K", 1, over) for each in (tau[..., index], similarity, dropped)
        )
        level = self.update_thresholds(level, similarity, dropped)
        joins = self.mask_entries_to_merge(level, similarity, dropped)
        return tau.at[..., index].set(slice_own_shard(level, "K", 1, over)), slice_own_shard(
            joins, "K", 1, over
        )

    def compute_merge_weights(
        self, similarity: Float[Array, "..."]
    ) -> tuple[Float[Array, "..."], Float[Array, "..."], float]:
        """Return three weights: evicted entries' in the sum and in the divisor, by cosine, and the kept one's in both.

        Args:
            similarity: cosines of evicted entries and their nearest kept entries.

        Returns:
            Each evicted entry's weight in the sum, its weight in the divisor, and the kept entry's weight in both.
        """
        if self.weights is MergeWeights.SOFTMAX:
            weight = jnp.exp(similarity)
            return weight, weight, math.e
        one = jnp.ones_like(similarity)
        return (one if self.weights is MergeWeights.AVERAGE else similarity), one, 1.0

    def merge_evicted_entries(
        self,
        k: Float[Array, "B K S D"],
        v: Float[Array, "B K S D"],
        kept: Bool[Array, "B K S"],
        inside: Bool[Array, "B K S"],
        mass: Float[Array, "B K S"],
        tau: Float[Array, "B K n"] | None,
        key: PRNGKeyArray,
        axes: ShardingMesh | None = None,
    ) -> Merged:
        """Merge a layer's evicted entries into nearest kept ones if cosines reach the threshold; return `Merged`.

        Entries are compared in blocks: memory is O(S).
        """
        dropped = inside & ~kept
        given = {"k": k, "v": v}
        rows = dict(given)
        for index, metric in enumerate(self.compared_tensors):
            similarity, nearest = find_nearest_kept(given[metric], kept, dropped)
            tau, joins = self._decide_merges(tau, index, similarity, dropped, axes)
            for name in self._list_merged_tensors(index):
                rows[name] = self._average_into_nearest(rows[name], similarity, nearest, joins)
        return Merged(rows["k"], rows["v"], tau)

    def merge_entry_while_decoding(
        self,
        index: int,
        cosine: Float[Array, "N K"],
        dropped: EntryPerSegment,
        nearest: EntryPerSegment,
        goes: Bool[Array, "N K"],
        tau: Float[Array, "N K n"] | None,
        axes: ShardingMesh | None = None,
    ) -> Joined:
        """Return `Joined`: nearest kept entries averaged with evicted ones if cosines reach the updated threshold."""
        tau, joins = self._decide_merges(tau, index, cosine[..., None], goes[..., None], axes)
        add, divide, own = self.compute_merge_weights(cosine)
        new = {
            name: (own * getattr(nearest, name) + add[..., None] * getattr(dropped, name))
            / (own + divide)[..., None]
            for name in self._list_merged_tensors(index)
        }
        return Joined(joins[..., 0], new.get("k"), new.get("v"), tau)

    def _average_into_nearest(
        self, rows: Array, similarity: Array, nearest: Array, joins: Array
    ) -> Array:
        """Return keys or values `[B, K, S, D]`, entries of the mask `joins` averaged into their nearest kept ones."""
        add, divide, own = self.compute_merge_weights(similarity)
        add = jnp.where(joins, add, 0.0)
        divide = jnp.where(joins, divide, 0.0)

        @jax.vmap
        @jax.vmap
        def one(rows, add, divide, nearest):
            wide = rows.astype(jnp.float32)
            total = jnp.full(add.shape, own, jnp.float32).at[nearest].add(divide)
            summed = (own * wide).at[nearest].add(add[:, None] * wide)
            return jnp.where((total != own)[:, None], summed / total[:, None], wide).astype(
                rows.dtype
            )

        return one(rows, add, divide, nearest)


def normalise_vectors(rows: Float[Array, "*n D"], least: float = 1e-6) -> Float[Array, "*n D"]:
    """Return float32 vectors `[..., D]` divided by their L2 norm; norms below `least` count as `least`."""
    wide = rows.astype(jnp.float32)
    return wide / jnp.maximum(jnp.sqrt((wide**2).sum(axis=-1, keepdims=True)), least)


def find_nearest_kept(
    rows: Float[Array, "B K S D"], kept: Bool[Array, "B K S"], dropped: Bool[Array, "B K S"]
) -> tuple[Float[Array, "B K S"], Int[Array, "B K S"]]:
    """Return, per evicted entry, the largest cosine to a kept entry of its head and that entry's index: `[B, K, S]`.

    Entries are compared in blocks: the matrix of all cosines is never in memory. Heads that evict entries must keep at
    least one. Entries that are not evicted get 0 and 0. Ties go to the lowest index.
    """
    batch, heads, padded_len, dim = rows.shape
    take = min(_DROPPED_BLOCK, padded_len)
    across = min(_KEPT_BLOCK, padded_len)
    index = jnp.arange(padded_len, dtype=jnp.int32)

    def head(inputs):
        rows, kept, dropped = inputs
        # Kept entries first, then evicted ones, each in order of position.
        order = jnp.argsort(jnp.where(kept, 0, jnp.where(dropped, 1, 2)), stable=True).astype(
            jnp.int32
        )
        count = kept.sum(dtype=jnp.int32)
        end = count + dropped.sum(dtype=jnp.int32)
        units = normalise_vectors(rows[order])

        def block(number, found):
            begin = jnp.minimum(count + number * take, padded_len - take)
            mine = lax.dynamic_slice_in_dim(units, begin, take)

            def compare(number, best):
                top, at = best
                first = jnp.minimum(number * across, padded_len - across)
                column = first + jnp.arange(across, dtype=jnp.int32)
                others = lax.dynamic_slice_in_dim(units, first, across)
                cosine = lax.dot_general(
                    mine, others, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
                )
                cosine = jnp.where(column < count, cosine, -jnp.inf)
                most = cosine.max(axis=1)
                lowest = jnp.where(cosine == most[:, None], column, padded_len).min(axis=1)
                return jnp.where(most > top, most, top), jnp.where(most > top, lowest, at)

            none = (jnp.full((take,), -jnp.inf, jnp.float32), jnp.zeros((take,), jnp.int32))
            best = lax.fori_loop(0, (count + across - 1) // across, compare, none)
            return tuple(
                lax.dynamic_update_slice_in_dim(a, b, begin, 0)
                for a, b in zip(found, best, strict=True)
            )

        nothing = (jnp.zeros((padded_len,), jnp.float32), jnp.zeros((padded_len,), jnp.int32))
        cosine, at = lax.fori_loop(0, (end - count + take - 1) // take, block, nothing)
        place = jnp.zeros((padded_len,), jnp.int32).at[order].set(index, unique_indices=True)
        back = cosine[place]
        return jnp.where(dropped, back, 0.0), jnp.where(dropped, order[at[place]], 0)

    cosine, at = lax.map(
        head, tuple(each.reshape(batch * heads, *each.shape[2:]) for each in (rows, kept, dropped))
    )
    return cosine.reshape(batch, heads, padded_len), at.reshape(batch, heads, padded_len)


@frozen_dataclass
class ValueMerge(Merger):
    """CaM's merger: by chance, according to its attention, a value adds 1 / `window` of itself to the next `window`.

    Attributes:
        window: number of following tokens that get a share; the policy's window.
        start: first share of the prompt whose values are not merged.
        expected: multiply by the probability instead of sampling.

    References:
        Zhang et al., CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024, section 4, in the form of
        KVCache-Factory. It changes a copy: the prompt's own attention uses the original values.
    """

    depends_on_other_heads = True
    # Another compression would add the sums again.
    only_prompts = True

    window: int = 32
    start: float = 0.1
    expected: bool = False

    def __post_init__(self) -> None:
        validate_field(self, "window", validate_int, "give at least 1 token")
        validate_field(
            self,
            "start",
            validate_float,
            "give a share from 0 to below 1",
            high=math.nextafter(1, 0),
        )
        validate_field(self, "expected", validate_bool)

    @property
    def uses_random_key(self) -> bool:
        """True if merging samples random numbers; False with `expected`, which multiplies by the probability."""
        return not self.expected

    def merge_evicted_entries(
        self,
        k: Float[Array, "B K S D"],
        v: Float[Array, "B K S D"],
        kept: Bool[Array, "B K S"],
        inside: Bool[Array, "B K S"],
        mass: Float[Array, "B K S"],
        tau: Float[Array, "B K n"] | None,
        key: PRNGKeyArray,
        axes: ShardingMesh | None = None,
    ) -> Merged:
        """Return `Merged`, keys unchanged: if a sequence evicts, values, kept or not, may add to later ones."""
        batch, heads, padded_len, _ = v.shape
        head = jnp.arange(heads, dtype=jnp.int32)
        if axes is not None:
            head = head + get_shard_offset("K", heads, axes)
        keys = jax.vmap(lambda h: jax.random.fold_in(key, h))(head)
        each = jax.vmap(
            lambda k, at: jax.random.uniform(jax.random.fold_in(k, at)), in_axes=(None, 0)
        )
        samples = jax.vmap(each, in_axes=(0, None))(keys, jnp.arange(padded_len, dtype=jnp.int32))
        length = inside.sum(axis=-1, dtype=jnp.int32)
        fold = jax.vmap(jax.vmap(self._spread_head_values), in_axes=(0, 0, 0, None))
        if padded_len <= self.window:
            return Merged(k, v, tau)
        drops = any_over_devices((inside & ~kept).any(axis=(1, 2)), "K", axes)[:, None, None, None]
        return Merged(k, jnp.where(drops, fold(v, mass, length, samples), v), tau)

    @partial(jax.jit, static_argnums=0)
    def _spread_head_values(
        self,
        v: Float[Array, "S D"],
        mass: Float[Array, " S"],
        length: Array,
        samples: Float[Array, " S"],
    ):
        """Return values `[S, D]` of a kv head after each adds a sampled or expected share to the next `window` ones."""
        padded_len = v.shape[0]
        window = self.window
        index = jnp.arange(padded_len, dtype=jnp.int32)
        share = Fraction(repr(float(self.start))).limit_denominator(1000)
        begin = -(-(length * share.numerator) // share.denominator)
        first_top = jnp.where(index < begin, mass, 0.0).max()
        padded = jnp.pad(mass, (0, window - 1))
        # The largest attention of each entry and the window - 1 entries after it.
        around = lax.reduce_window(padded, 0.0, lax.max, (window,), (1,), "VALID")
        top = jnp.maximum(first_top, around)
        chance = jnp.where(
            top > 0,
            jnp.clip(mass / jnp.where(top > 0, top, 1.0), 0, 1),
            jnp.where(mass > 0, 1.0, 0.0),
        )
        factor = chance if self.expected else (samples < chance).astype(jnp.float32)
        acts = (index >= begin) & (index + window < length)
        factor = jnp.where(acts, factor, 0.0) / window

        def step(at, wide):
            mine = lax.dynamic_slice_in_dim(wide, at, 1)
            behind = lax.dynamic_slice_in_dim(wide, at + 1, window)
            return lax.dynamic_update_slice_in_dim(wide, behind + factor[at] * mine, at + 1, 0)

        wide = lax.fori_loop(
            begin, jnp.maximum(length - window, begin), step, v.astype(jnp.float32)
        )
        return wide.astype(v.dtype)
