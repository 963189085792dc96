"""`Merger`, the base of mergers, which merge evicted entries into kept ones; their arguments and results."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxkv._checks import instance
from jaxkv.sharding.mesh import Axes

# The threshold before the first eviction.
UNSET = -math.inf


class Merged(NamedTuple):
    """Result of `Merger.merge`: all keys and values of a layer, after merging, and the running thresholds.

    Attributes:
        k: `[B, K, S, D]` keys, those of kept entries changed.
        v: `[B, K, S, D]` values, those of kept entries changed.
        tau: `f32[B, K, n]` thresholds, or None.
    """

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    tau: Float[Array, "B K n"] | None


class Row(NamedTuple):
    """Key and value of one entry of each of N * K segments, in float32.

    Attributes:
        k: `f32[N, K, D]` keys.
        v: `f32[N, K, D]` values.
    """

    k: Array
    v: Array


class Joined(NamedTuple):
    """Result of `Merger.merge_one`: mask of kept entries that change, their new keys and values, and the thresholds.

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
    """Base of mergers of evicted entries: `merge` for a layer's, `merge_one` for single entries while decoding.

    Subclass it in a frozen dataclass and write `merge`.

    A merger that names tensors in `compares` also merges while decoding: `merge_one` is then called for every evicted
    entry.

    On a mesh, both methods run on every device, for the device's kv heads. A merger whose heads depend on one another
    sets `across_heads`.
    """

    @property
    def thresholds(self) -> int:
        """Number n of running thresholds per kv head, the size of tau's last axis; 0 without thresholds."""
        return 0

    @property
    def needs_equal_heads(self) -> bool:
        """True if all kv heads of a layer must evict the same number of entries."""
        return False

    @property
    def across_heads(self) -> bool:
        """True if a kv head's result depends on other heads or on the head's index.

        Both methods then receive `axes=`: the mesh axes over which the heads are sharded, None if one device has them
        all. The functions of jaxkv.sharding.collectives help: `gathered(x, "K", 1, axes)` all-gathers all heads'
        numbers, `own` selects the device's. All-gather statistics rather than keys and values.
        """
        return False

    @property
    def uses_key(self) -> bool:
        """True if `merge` uses random numbers from its argument `key`."""
        return False

    @property
    def compares(self) -> tuple[str, ...]:
        """Names of tensors ("k", "v") whose cosines find the kept entry nearest to an evicted one; () by default.

        With (), prompts and recompressed caches are merged; single entries evicted while decoding are not.
        """
        return ()

    def merge(
        self,
        k: Float[Array, "B K S D"],
        v: Float[Array, "B K S D"],
        kept: Bool[Array, "B K S"],
        inside: Bool[Array, "B K S"],
        mass: Float[Array, "B K S"],
        tau: Float[Array, "B K n"] | None,
        key: PRNGKeyArray,
    ) -> Merged:
        """Merge all evicted entries of a layer into its kept ones.

        Args:
            k: keys, in order of position.
            v: values.
            kept: mask of kept entries.
            inside: mask of entries that are not padding.
            mass: the scorer's `observe` of each entry.
            tau: thresholds so far; -inf before the first eviction.
            key: random key, for mergers that sample.

        Returns:
            All keys and values, and the thresholds.
        """
        raise NotImplementedError

    def merge_one(
        self,
        index: int,
        cosine: Float[Array, "N K"],
        dropped: Row,
        nearest: Row,
        goes: Bool[Array, "N K"],
        tau: Float[Array, "N K n"] | None,
    ) -> Joined:
        """Merge one evicted entry per segment into its nearest kept entry while decoding; by default no change.

        All kv heads on the device are passed together, so that they may decide together.

        Args:
            index: index in `compares` of the tensor that found the nearest entry.
            cosine: cosine of the evicted entry and the nearest one.
            dropped: the evicted entry.
            nearest: the kept entry.
            goes: mask of segments that evict an entry; elsewhere other arguments are arbitrary, and nothing may change.
            tau: thresholds so far; -inf before the first eviction.

        Returns:
            The kept entry's change.
        """
        return Joined(jnp.zeros_like(goes), None, None, tau)


def axes_for(merger: Merger, axes: Axes | None) -> dict[str, Any]:
    """Return keyword arguments for a merger's methods: `{"axes": axes}` if it works across heads, else {}."""
    return {"axes": axes} if merger.across_heads else {}


def check_merger(label: str, merge: Any) -> None:
    """Raise TypeError unless `merge` is None or a Merger with the methods that it needs."""
    if merge is None:
        return
    instance(label, merge, Merger, "give Merge(...), or None")
    for name, wanted in (("merge", True), ("merge_one", bool(merge.compares))):
        if wanted and getattr(type(merge), name) is getattr(Merger, name):
            raise TypeError(f"{label}={type(merge).__name__}: no `{name}`. Write the method.")
