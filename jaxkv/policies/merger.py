"""What a merger is: a part of a policy that says what becomes of the rows it drops."""

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxkv._errors import require
from jaxkv.sharding.mesh import Axes

# A threshold before the first row was dropped.
UNSET = -math.inf


class Merged(NamedTuple):
    """Rows after merging.

    Attributes:
        k: `[B, K, S, D]` keys, kept rows changed.
        v: `[B, K, S, D]` values likewise.
        tau: `f32[B, K, n]` thresholds, or None.
    """

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    tau: Float[Array, "B K n"] | None


class Row(NamedTuple):
    """One row of each of several segments.

    Attributes:
        k: `f32[N, K, D]` its key.
        v: `f32[N, K, D]` its value.
    """

    k: Array
    v: Array


class Joined(NamedTuple):
    """What becomes of kept rows when others are dropped that resemble them.

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
    """What becomes of dropped rows. Subclass it in a frozen dataclass; `merge` is all that has to be written.

    A merger that names what rows are compared by goes on while tokens are drawn: `merge_one` is then asked each time
    that a row goes.

    On a mesh both are asked on every device, for the kv heads that lie there. A merger whose heads look at one another
    says so with `across_heads`.
    """

    @property
    def thresholds(self) -> int:
        """Running thresholds per kv head, n of tau; 0 for none."""
        return 0

    @property
    def needs_equal_heads(self) -> bool:
        """Whether every head must drop as many rows."""
        return False

    @property
    def across_heads(self) -> bool:
        """Whether what becomes of a head's rows depends on other heads, or on its number.

        If so, both methods are given `axes=`, too: those of the mesh whose devices have some of the heads each, None
        where all heads are here. `gathered(x, "K", 1, axes)`, of jaxkv.sharding.collectives, brings all heads' numbers,
        `own` takes the device's of them; keys and values are better left where they are.
        """
        return False

    @property
    def draws(self) -> bool:
        """Whether `merge` looks at the random key."""
        return False

    @property
    def compares(self) -> tuple[str, ...]:
        """By what a single dropped row finds its nearest kept row: keys ("k"), values ("v"), each in turn; () for none.

        With none it merges prompts, and what is compressed again; rows that go one by one are then not merged.
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
            kept: rows that stay.
            inside: rows there are.
            mass: what was observed of each row.
            tau: thresholds so far; -inf where there was none yet.
            key: for mergers that draw.

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
        """Merges one row of each segment, which is dropped while tokens are drawn, into the kept row most like it.

        Args:
            index: which of `compares` found it.
            cosine: between the two.
            dropped: the row that goes, as it was.
            nearest: the kept row.
            goes: where one goes at all; elsewhere the others hold anything, and nothing may change.
            tau: thresholds so far; -inf where there was none yet.

        Returns:
            What becomes of the kept row. All kv heads of a layer that are here are given together: they may decide
            together.
        """
        return Joined(jnp.zeros_like(goes), None, None, tau)


def told(merge: Merger, axes: Axes | None) -> dict[str, Any]:
    """What a merger is told beside rows, by name: the mesh's axes, if its heads look at one another."""
    return {"axes": axes} if merge.across_heads else {}


def check_merger(label: str, merge: Any) -> None:
    """Refuses what is no merger.

    Args:
        label: what to call it.
        merge: what a policy gave; None is allowed.

    Raises:
        ValueError: for anything else.
        TypeError: naming what a merger lacks.
    """
    if merge is None:
        return
    require(isinstance(merge, Merger) and not isinstance(merge, type), label, merge, "give Merge(...), or None")
    named = isinstance(merge.compares, tuple) and set(merge.compares) <= {"k", "v"}
    require(named, f"{label}.compares", merge.compares, "give ('k',), ('v',), both, or () for prompts only")
    for name, wanted in (("merge", True), ("merge_one", bool(merge.compares))):
        if wanted and getattr(type(merge), name) is getattr(Merger, name):
            raise TypeError(f"{label}={type(merge).__name__}: write its method `{name}`")
