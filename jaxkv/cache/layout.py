"""Placement of segments in their pools; no other module computes a segment's first row."""

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from jaxkv._checks import select_array_module
from jaxkv.attention.xla import SegmentReadMode

# numpy arrays on the host, or JAX arrays, which may be traced.
Numbers = TypeVar("Numbers", Array, np.ndarray)


class SegmentLayout(enum.Enum):
    """Enum of segment placements: equal parts of a layer's pool, consecutive in it, or one pool for all layers.

    EQUAL: each segment has P / K rows of its layer's pool, head k from k * P / K on, known at trace time.
    RAGGED: segments of any length, consecutive in the layer's own pool.
    SHARED: segments of any length, consecutive in one pool for all layers.
    """

    EQUAL = "equal"
    RAGGED = "ragged"
    SHARED = "shared"

    @property
    def uses_shared_pool(self) -> bool:
        """True if all layers' segments are in one pool (SHARED)."""
        return self is SegmentLayout.SHARED

    @property
    def segment_read_mode(self) -> SegmentReadMode:
        """`SegmentReadMode` for attention: STRIDES if EQUAL, WHOLE if RAGGED, WINDOWS if SHARED."""
        return {
            SegmentLayout.EQUAL: SegmentReadMode.STRIDES,
            SegmentLayout.RAGGED: SegmentReadMode.WHOLE,
            SegmentLayout.SHARED: SegmentReadMode.WINDOWS,
        }[self]

    def get_pool_index(self, layer: int) -> int:
        """Return the index of a layer's pool: 0 if all layers share one, else the layer's own index."""
        return 0 if self.uses_shared_pool else layer

    def group_layers_by_pool(self, layers: Sequence[int]) -> list[Sequence[int]]:
        """Return layer indices grouped by pool: one group of all layers if SHARED, else one group per layer."""
        return (
            [layers]
            if self.uses_shared_pool
            else [layers[at : at + 1] for at in range(len(layers))]
        )

    def slice_layers_by_pool(self, layers: int) -> list[slice]:
        """Return, for each pool, the slice of layer indices whose segments it holds: all layers if SHARED, else one."""
        return [
            slice(group[0], group[-1] + 1) for group in self.group_layers_by_pool(range(layers))
        ]

    def get_max_segment_length(self, rows: int, heads: int) -> int:
        """Return the maximum entries of a segment in a pool of `rows` rows: `rows` // `heads` if EQUAL, else `rows`."""
        return rows // heads if self is SegmentLayout.EQUAL else rows

    def count_required_pool_rows(self, length: Int[np.ndarray, "n B K"]) -> Int[np.ndarray, " B"]:
        """Return pool rows `[B]` for segments of lengths `[n, B, K]`: sum; if EQUAL, sum of K * a layer's longest."""
        each = (
            length.max(axis=2) * length.shape[2]
            if self is SegmentLayout.EQUAL
            else length.sum(axis=2)
        )
        return each.sum(axis=0)

    def count_fullest_shard_rows(self, length: Int[np.ndarray, "n B K"], heads: int) -> int:
        """Return the most pool rows that a sequence needs on any device, if each device has `heads` of the K heads."""
        return int(self.count_required_pool_rows(length.reshape(len(length), -1, heads)).max())

    def compute_segment_starts(
        self,
        length: Numbers,
        rows: int | Int[Array, ""],
        headroom: Int[np.ndarray, " n"] | None = None,
    ) -> Numbers:
        """Return segments' first rows `i32[n, B, K]` in a pool of `rows`: fixed if EQUAL, else by length and headroom.

        `length` is `i32[n, B, K]` of numpy or JAX, and so is the result. `headroom` is the minimum headroom of each
        segment of a layer; spare places are spread evenly.
        """
        xp = select_array_module(length)
        layers, _, heads = length.shape
        if self is SegmentLayout.EQUAL:
            # Derived from `length`, so that the result is sharded as `length` is.
            return xp.zeros_like(length) + xp.arange(heads, dtype=np.int32) * (rows // heads)
        behind = (
            np.zeros(layers * heads, np.int32)
            if headroom is None
            else np.repeat(headroom, heads).astype(np.int32)
        )
        taken = flatten_layers_and_heads(length) + behind
        before = xp.cumsum(taken, axis=-1, dtype=np.int32) - taken
        spare = (rows - taken.sum(axis=-1, keepdims=True, dtype=np.int32)) // (layers * heads)
        return unflatten_layers_and_heads(
            before + spare * xp.arange(layers * heads, dtype=np.int32), heads
        )

    def convert_shard_to_pool_rows(
        self, start: Int[np.ndarray, "L B K"], pools: Sequence[int], kv_shards: int
    ) -> Int[np.ndarray, "L B K"]:
        """Convert first rows `[L, B, K]` counted in a device's shard of a pool to rows of the complete pool."""
        each = np.asarray(
            [pools[self.get_pool_index(layer)] // kv_shards for layer in range(len(start))]
        )
        stretch = np.arange(start.shape[2]) * kv_shards // start.shape[2]
        return start + each[:, None, None] * stretch

    def compute_segment_headroom(
        self, start: Numbers, length: Numbers, pools: Sequence[int]
    ) -> Numbers:
        """Return each segment's headroom in entries, `[L, B, K]`; `pools` are the pools' row counts; numpy or JAX."""
        xp: Any = jnp if isinstance(start, Array) else np
        heads = start.shape[2]
        ends = []
        for rows, of in zip(pools, self.slice_layers_by_pool(len(start)), strict=True):
            first = flatten_layers_and_heads(start[of])
            following = xp.concatenate([first[:, 1:], xp.full_like(first[:, :1], rows)], axis=1)
            ends.append(unflatten_layers_and_heads(following, heads))
        return xp.concatenate(ends) - start - length


def flatten_layers_and_heads(segments: Numbers) -> Numbers:
    """Reshape an array `[L, B, K, ...]` to `[B, L * K, ...]`, with each sequence's layers consecutive; numpy or JAX."""
    layers, batch, heads, *rest = segments.shape
    return segments.swapaxes(0, 1).reshape(batch, layers * heads, *rest)


def unflatten_layers_and_heads(segments: Numbers, heads: int) -> Numbers:
    """Reshape an array `[B, L * K, ...]`, K = `heads`, to `[L, B, K, ...]`; inverse of `flatten_layers_and_heads`."""
    batch, each, *rest = segments.shape
    return segments.reshape(batch, each // heads, heads, *rest).swapaxes(0, 1)
