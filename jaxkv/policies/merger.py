"""The protocol `Merger`, the part of a policy that folds dropped rows into kept ones; and its arguments and results."""

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxkv._errors import require
from jaxkv.policies.checks import instance
from jaxkv.sharding.mesh import Axes

# A threshold before the first row was dropped.
UNSET = -math.inf


class Merged(NamedTuple):
    """Rows after merging: all keys and values of a layer, with the kept ones changed.

    Attributes:
        k: `[B, K, S, D]` keys, kept rows changed.
        v: `[B, K, S, D]` values likewise.
        tau: `f32[B, K, n]` thresholds, or None.
    """

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    tau: Float[Array, "B K n"] | None


class Row(NamedTuple):
    """One row of each of several segments: key and value.

    Attributes:
        k: `f32[N, K, D]` its key.
        v: `f32[N, K, D]` its value.
    """

    k: Array
    v: Array


class Joined(NamedTuple):
    """Result of merging one dropped row per segment into its nearest kept row: a mask, and the new key and value.

    Attributes:
        joins: `bool[N, K]` where the kept row changes.
        k: `f32[N, K, D]` its key then; None leaves all keys as they are.
        v: `f32[N, K, D]` its value likewise.
        tau: `f32[N, K, n]` thresholds from now on; None without any.
    """

    joins: Array
    k: Array | None
    v: Array | None
    tau: Array | None


@runtime_checkable
class Merger(Protocol):
    """Protocol that folds dropped rows into kept ones. Subclass it in a frozen dataclass and write `merge`.

    A merger that says what rows are compared by (`compares`) goes on while tokens are drawn: its `merge_one` is then
    called for every row that is dropped.

    On a mesh both are called on every device, for the kv heads that lie there. A merger whose heads look at one another
    says so with `across_heads`.
    """

    @property
    def thresholds(self) -> int:
        """Number n of running thresholds per kv head, the last axis of tau; 0 for none."""
        return 0

    @property
    def needs_equal_heads(self) -> bool:
        """True if every head must drop as many rows."""
        return False

    @property
    def across_heads(self) -> bool:
        """True if a head's result depends on other heads, or on the head's number.

        If so, both methods are given `axes=` as well: those of the mesh whose devices have some of the heads each, None
        where all heads are here. `gathered(x, "K", 1, axes)`, of jaxkv.sharding.collectives, brings all heads' numbers,
        `own` takes the device's of them; keys and values are better left where they are.
        """
        return False

    @property
    def draws(self) -> bool:
        """True if `merge` uses the random key."""
        return False

    @property
    def compares(self) -> tuple[str, ...]:
        """Rows by which a single dropped row finds its nearest kept row: keys ("k"), values ("v"), each in turn.

        With () it merges prompts, and caches that are compressed again; rows dropped one by one are then not merged.
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
        """Merges all dropped rows of a layer into its kept ones.

        Args:
            k: keys, in order of position.
            v: values.
            kept: mask of rows that stay.
            inside: mask of rows that are no padding.
            mass: the scorer's `observe` of each row.
            tau: thresholds so far; -inf where there was none yet.
            key: random key, for mergers that draw.

        Returns:
            The rows and thresholds.
        """
        ...

    def merge_one(
        self,
        index: int,
        cosine: Float[Array, "N K"],
        dropped: Row,
        nearest: Row,
        goes: Bool[Array, "N K"],
        tau: Float[Array, "N K n"] | None,
    ) -> Joined:
        """Merges one dropped row of each segment into its nearest kept row, while tokens are drawn.

        Args:
            index: position in `compares` of what found the nearest row.
            cosine: of the dropped row and the nearest one.
            dropped: the dropped row.
            nearest: the kept row.
            goes: mask of segments that drop a row; elsewhere the other arguments hold anything, and nothing may change.
            tau: thresholds so far; -inf where there was none yet.

        Returns:
            The kept row's change. All kv heads of a layer that are here are given together: they may decide together.
        """
        return Joined(jnp.zeros_like(goes), None, None, tau)


def axes_for(merger: Merger, axes: Axes | None) -> dict[str, Any]:
    """Keyword `axes` for a merger's methods, if its heads look at one another; else no keyword."""
    return {"axes": axes} if merger.across_heads else {}


def check_merger(label: str, merge: Any) -> None:
    """Refuses what is neither a merger nor None: a ValueError for other values, a TypeError for missing methods."""
    if merge is None:
        return
    instance(label, merge, Merger, "give Merge(...), or None")
    named = isinstance(merge.compares, tuple) and set(merge.compares) <= {"k", "v"}
    require(named, f"{label}.compares", merge.compares, "give ('k',), ('v',), both, or () for prompts only")
    for name, wanted in (("merge", True), ("merge_one", bool(merge.compares))):
        if wanted and getattr(type(merge), name) is getattr(Merger, name):
            raise TypeError(f"{label}={type(merge).__name__}: write its method `{name}`")
