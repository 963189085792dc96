"""`Merger`, the base of what folds dropped entries into kept ones; and its arguments and results."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxkv._checks import instance
from jaxkv.sharding.mesh import Axes

# A threshold before the first row was dropped.
UNSET = -math.inf


class Merged(NamedTuple):
    """Result of `Merger.merge`: all keys and values of a layer, the kept ones changed, and the running thresholds.

    Attributes:
        k: `[B, K, S, D]` keys, kept entries changed.
        v: `[B, K, S, D]` values as well.
        tau: `f32[B, K, n]` thresholds, or None.
    """

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    tau: Float[Array, "B K n"] | None


class Row(NamedTuple):
    """One cache row of each of N * K segments: its key and its value, float32.

    Attributes:
        k: `f32[N, K, D]` its key.
        v: `f32[N, K, D]` its value.
    """

    k: Array
    v: Array


class Joined(NamedTuple):
    """Result of `Merger.merge_one`: mask of kept entries that change, their new keys and values, and the thresholds.

    Attributes:
        joins: `bool[N, K]` where the kept entry changes.
        k: `f32[N, K, D]` the kept entries' new keys; None leaves all keys unchanged.
        v: `f32[N, K, D]` the kept entries' new values; None as well.
        tau: `f32[N, K, n]` thresholds from now on; None without any.
    """

    joins: Array
    k: Array | None
    v: Array | None
    tau: Array | None


class Merger:
    """Base of what merges dropped entries into kept ones: `merge` a layer's, `merge_one` single entries while decoding.

    Subclass it in a frozen dataclass and write `merge`.

    A merger that says what entries are compared by (`compares`) goes on while tokens are sampled: its `merge_one` is then
    called for every entry that is dropped.

    On a mesh both are called on every device, for the kv heads that lie there. A merger whose heads look at one another
    says so with `across_heads`.
    """

    @property
    def thresholds(self) -> int:
        """Number n of running thresholds per kv head, the size of tau's last axis; 0 without thresholds."""
        return 0

    @property
    def needs_equal_heads(self) -> bool:
        """True if all kv heads of a layer must drop the same number of entries."""
        return False

    @property
    def across_heads(self) -> bool:
        """True if a kv head's result depends on other heads or on the head's index.

        If so, both methods are given `axes=` as well: those of the mesh whose devices have some of the heads each, None
        where all heads are here. `gathered(x, "K", 1, axes)`, of jaxkv.sharding.collectives, brings all heads' numbers,
        `own` takes the device's of them; keys and values are better left where they are.
        """
        return False

    @property
    def uses_key(self) -> bool:
        """True if `merge` uses random numbers from its argument `key`."""
        return False

    @property
    def compares(self) -> tuple[str, ...]:
        """Names of tensors ("k", "v") whose cosines find the entry that an evicted entry joins; () if only prompts merge.

        With () it merges prompts, and caches that are recompressed; entries dropped one by one are then not merged.
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
        """Merges all dropped entries of a layer into its kept ones; returns `Merged`: all keys and values, the thresholds.

        Args:
            k: keys, in order of position.
            v: values.
            kept: mask of entries that stay.
            inside: mask of entries that are no padding.
            mass: the scorer's `observe` of each entry.
            tau: thresholds so far; -inf where there was none yet.
            key: random key, for mergers that sample.

        Returns:
            The entries and thresholds.
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
        """Merges one dropped entry per segment into its nearest kept entry while decoding; `Joined`, by default no change.

        Args:
            index: position in `compares` of what found the nearest row.
            cosine: cosine of the dropped entry and the nearest one.
            dropped: the dropped entry.
            nearest: the kept entry.
            goes: mask of segments that drop an entry; elsewhere the other arguments hold anything, and nothing may change.
            tau: thresholds so far; -inf where there was none yet.

        Returns:
            The kept entry's change. All kv heads of a layer that are here are given together: they may decide together.
        """
        return Joined(jnp.zeros_like(goes), None, None, tau)


def axes_for(merger: Merger, axes: Axes | None) -> dict[str, Any]:
    """Keyword arguments for a merger's methods: `{"axes": axes}` if it works across heads, else {}."""
    return {"axes": axes} if merger.across_heads else {}


def check_merger(label: str, merge: Any) -> None:
    """Raises TypeError unless `merge` is None or a Merger with the methods that it needs."""
    if merge is None:
        return
    instance(label, merge, Merger, "give Merge(...), or None")
    for name, wanted in (("merge", True), ("merge_one", bool(merge.compares))):
        if wanted and getattr(type(merge), name) is getattr(Merger, name):
            raise TypeError(f"{label}={type(merge).__name__}: write its method `{name}`")
