"""`Merger`, the base of mergers, which merge evicted entries into kept ones; their arguments and results."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxkv._checks import require_instance
from jaxkv.sharding.mesh import ShardingMesh

# The threshold before the first eviction.
UNSET = -math.inf


class Merged(NamedTuple):
    """Result of `Merger.merge_evicted_entries`: a layer's keys and values after merging; merge thresholds or None.

    Attributes:
        k: `[B, K, S, D]` keys, those of kept entries changed.
        v: `[B, K, S, D]` values, those of kept entries changed.
        tau: `f32[B, K, n]` thresholds, or None.
    """

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    tau: Float[Array, "B K n"] | None


class EntryPerSegment(NamedTuple):
    """NamedTuple of float32 key and value vectors of one entry in each of N * K segments.

    Attributes:
        k: `f32[N, K, D]` keys.
        v: `f32[N, K, D]` values.
    """

    k: Array
    v: Array


class Joined(NamedTuple):
    """Result of `merge_entry_while_decoding`: mask of kept entries that change, new keys and values, merge thresholds.

    Attributes:
        joins: `bool[N, K]` where the kept entry changes.
        k: `f32[N, K, D]` the kept entries' new keys; None leaves all keys unchanged.
        v: `f32[N, K, D]` the kept entries' new values; None leaves all values unchanged.
        tau: `f32[N, K, n]` new thresholds; None without thresholds.
    """

    joins: Array
    k: Array | None
    v: Array | None
    tau: Array | None


class Merger:
    """Base of mergers of evicted entries: a layer's by `merge_evicted_entries`, single ones while decoding.

    Subclass it in a frozen dataclass and write `merge_evicted_entries`.

    A merger that names tensors in `compared_tensors` also merges while decoding: `merge_entry_while_decoding` is then
    called for every evicted entry.

    On a mesh, both methods run on every device, for the device's kv heads. A merger whose heads depend on one another
    sets `depends_on_other_heads`.
    """

    @property
    def threshold_count(self) -> int:
        """Number n of running merge thresholds per kv head, the size of tau's last axis; 0 without thresholds."""
        return 0

    @property
    def needs_equal_evictions(self) -> bool:
        """True if all kv heads of a layer must evict the same number of entries; False by default."""
        return False

    @property
    def depends_on_other_heads(self) -> bool:
        """True if a kv head's result depends on other heads or on the head's index; False by default.

        Both methods then receive `axes=`: the mesh axes over which the heads are sharded, None if one device has them
        all. The functions of jaxkv.sharding.collectives help: `all_gather_shards(x, "K", 1, axes)` all-gathers all
        heads' numbers, `slice_own_shard` selects the device's. All-gather statistics rather than keys and values.
        """
        return False

    @property
    def uses_random_key(self) -> bool:
        """True if merging uses random numbers, from the argument `key`; False by default."""
        return False

    @property
    def reference_count(self) -> int:
        """Number r of each prompt's queries, spread evenly over it, that merging reads; 0, the default, for none.

        `merge_evicted_entries` then receives `seen=`: the layer's `ScorerInputs`, with `seen.references`. Only prompts
        have these. If the scorer needs a second pass, they are those of the tokens that repeat the prompt.
        """
        return 0

    @property
    def only_prompts(self) -> bool:
        """True if recompressed caches cannot be merged; by default if merging reads queries."""
        return self.reference_count > 0

    @property
    def compared_tensors(self) -> tuple[str, ...]:
        """Tensors ("k", "v") whose cosines find the entry to merge into; (), the default: none while decoding.

        With (), prompts and recompressed caches are merged; single entries evicted while decoding are not.
        """
        return ()

    def merge_evicted_entries(
        self,
        k: Float[Array, "B K S D"],
        v: Float[Array, "B K S D"],
        kept: Bool[Array, "B K S"],
        inside: Bool[Array, "B K S"],
        mass: Float[Array, "B K S"],
        tau: Float[Array, "B K n"] | None,
        key: PRNGKeyArray,
    ) -> Merged:
        """Merge all evicted entries of a layer into its kept ones; return `Merged`. Subclasses implement it.

        Args:
            k: keys, in order of position.
            v: values.
            kept: mask of kept entries.
            inside: mask of entries that are not padding.
            mass: the scorer's `score_entries` of each entry; 0 in recompressed caches with `compared_tensors`.
            tau: thresholds so far; -inf before the first eviction.
            key: random key, for mergers that sample.

        Returns:
            All keys and values, and the thresholds.
        """
        raise NotImplementedError

    def merge_entry_while_decoding(
        self,
        index: int,
        cosine: Float[Array, "N K"],
        dropped: EntryPerSegment,
        nearest: EntryPerSegment,
        goes: Bool[Array, "N K"],
        tau: Float[Array, "N K n"] | None,
    ) -> Joined:
        """Merge one evicted entry per segment into its nearest kept entry; return `Joined`. By default no change.

        All kv heads on the device are passed together, so that they may decide together.

        Args:
            index: index in `compared_tensors` of the tensor that found the nearest entry.
            cosine: cosine of the evicted entry and the nearest one.
            dropped: the evicted entry.
            nearest: the kept entry.
            goes: mask of segments that evict an entry; elsewhere other arguments are arbitrary, and nothing may change.
            tau: thresholds so far; -inf before the first eviction.

        Returns:
            The kept entry's change.
        """
        return Joined(jnp.zeros_like(goes), None, None, tau)


def build_axes_argument(merger: Merger, axes: ShardingMesh | None) -> dict[str, Any]:
    """Return extra keyword arguments for a merger: `{"axes": axes}` if its heads depend on one another, else {}."""
    return {"axes": axes} if merger.depends_on_other_heads else {}


def check_merger(label: str, merge: Any) -> None:
    """Raise TypeError unless `merge` is None or a `Merger` that overrides the merge methods that it needs."""
    if merge is None:
        return
    require_instance(label, merge, Merger, "give Merge(...), or None")
    for name, wanted in (
        ("merge_evicted_entries", True),
        ("merge_entry_while_decoding", bool(merge.compared_tensors)),
    ):
        if wanted and getattr(type(merge), name) is getattr(Merger, name):
            raise TypeError(f"{label}={type(merge).__name__}: no `{name}`. Write the method.")
