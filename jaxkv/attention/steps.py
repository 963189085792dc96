"""Records that a decode step hands to a backend beside queries and pools: new entries, inputs of fused kernels."""

import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewEntries:
    """N new entries of every kv head, of which the first `count` of each sequence are written.

    Attributes:
        k: keys as the pool holds them.
        v: values.
        positions: in the sequence.
        count: number of entries of each sequence.
        end: pool row behind each segment, to which the first one goes.
        score: with which entries begin in a pool that keeps scores; None for 0.
    """

    k: Float[Array, "B K N D"]
    v: Float[Array, "B K N D"]
    positions: Int[Array, "B N"]
    count: Int[Array, " B"]
    end: Int[Array, "B K"]
    score: Float[Array, "B K N"] | None = None


class Gathered(NamedTuple):
    """Keys and values outside of a pool, as attention takes a store: arrays that hold heads one after another."""

    k: Float[Array, "B n D"]
    v: Float[Array, "B n D"]

    @property
    def kernels(self) -> tuple[str, str]:
        """Names of kernels for gathered entries, which are unencoded; compare `Store.kernels`."""
        return "rows", "rows"

    @property
    def held(self) -> tuple[Array, Array]:
        """Pair of keys and values `[B, n, D]` as kernels take them; compare `Store.held`."""
        return self.view()

    def view(self) -> tuple[Array, Array]:
        """Pair of keys and values `[B, n, D]`; compare `Store.view`."""
        return self.k, self.v


class Unrotated(NamedTuple):
    """One new token of each sequence as projections leave it: before rotation, in n parts to be summed.

    Attributes:
        q: queries; M is B, or more with padding sequences.
        kv: keys and values.
        cos: cosines of the token's rotary position.
        sin: sines.
    """

    q: Float[Array, "n M K G D"]
    kv: Float[Array, "n M two K D"]
    cos: Float[Array, "B half"]
    sin: Float[Array, "B half"]


class WorkTable(NamedTuple):
    """Work table of a fused kernel: entries that each program reads, of all layers; and the chosen entries of one layer.

    Attributes:
        chunks: from `Backend.work_table`; None where steps are not fused.
        start: first row of each segment.
        scheduled: number of chosen entries that chunks have been dealt for, before those of `rest`; None if no layer chooses.
        rest: row from which on such layers read all, counted from a segment's first; None if no layer chooses.
        layer: index of the layer.
        rows: chosen entries, counted as well, ascending; k is K, or 1 for all heads alike. None if all are read.
        held: number of these that are real; None if all are read.
    """

    chunks: Any
    start: Int[Array, "L B K"]
    scheduled: Int[Array, " B"] | None = None
    rest: Int[Array, "L B K"] | None = None
    layer: int = 0
    rows: Int[Array, "B k T"] | None = None
    held: Int[Array, "B k"] | None = None
