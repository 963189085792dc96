"""Inputs of a backend's decode step other than queries and pools: new entries, and inputs of fused kernels."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from jaxkv._dataclasses import frozen_dataclass


@frozen_dataclass
class NewEntries:
    """N new entries of every kv head, the first `count` of which are written in each sequence.

    Attributes:
        k: keys in the pool's form.
        v: values.
        positions: positions in the sequence.
        count: number of entries of each sequence.
        end: pool row behind each segment, where the first entry is written.
        score: initial scores of the entries in a pool with scores; None for 0.
    """

    k: Float[Array, "B K N D"]
    v: Float[Array, "B K N D"]
    positions: Int[Array, "B N"]
    count: Int[Array, " B"]
    end: Int[Array, "B K"]
    score: Float[Array, "B K N"] | None = None


class GatheredEntries(NamedTuple):
    """Keys and values `[B, n, D]` outside a pool, with the attributes of a store that backends read."""

    k: Float[Array, "B n D"]
    v: Float[Array, "B n D"]

    @property
    def kernels(self) -> tuple[str, str]:
        """Forms of keys and of values as in `Store.kernels`: `rows` for both, because nothing is encoded."""
        return "rows", "rows"

    @property
    def kernel_inputs(self) -> tuple[Array, Array]:
        """Keys and values `[B, n, D]` as kernels read them: the arrays themselves, nothing is encoded."""
        return self.decode_entries()

    def decode_entries(self) -> tuple[Array, Array]:
        """Return the keys and values `[B, n, D]`, which are not encoded; compare `Store.decode_entries`."""
        return self.k, self.v


class UnrotatedProjections(NamedTuple):
    """Named tuple of a new token per sequence: unrotated queries, keys, values in n parts to be summed, RoPE cos, sin.

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
    """Named tuple for fused decode kernels: pool rows that each kernel program reads, one layer's selected entries.

    Attributes:
        chunks: table from `AttentionBackend.build_work_table`; None if steps are not fused.
        start: first row of each segment.
        scheduled: number of selected entries that the chunks cover, before those from `rest` on; None if no layer
            selects.
        rest: row, counted from the segment's first, from which layers that select read all; None if no layer selects.
        layer: index of the layer.
        rows: selected entries as rows counted from the segment's first, ascending; k is K, or 1 if all heads share
            them. None if all are read.
        held: number of valid indices in `rows`; None if all are read.
    """

    chunks: Any
    start: Int[Array, "L B K"]
    scheduled: Int[Array, " B"] | None = None
    rest: Int[Array, "L B K"] | None = None
    layer: int = 0
    rows: Int[Array, "B k T"] | None = None
    held: Int[Array, "B k"] | None = None
