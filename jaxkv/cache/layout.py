"""Placement of segments in their pools; no other module computes a segment's first row."""

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from jaxkv._checks import namespace
from jaxkv.attention.xla import Walk

# numpy arrays on the host, or JAX arrays, which may be traced.
Numbers = TypeVar("Numbers", Array, np.ndarray)


class Layout(enum.Enum):
    """Enum of segment placements: equal parts of a layer's pool, consecutive in it, or one pool for all layers.

    EQUAL: each segment has P / K rows of its layer's pool, head k from k * P / K on, known at trace time.
    RAGGED: segments of any length, consecutive in the layer's own pool.
    SHARED: segments of any length, consecutive in one pool for all layers.
    """

    EQUAL = "equal"
    RAGGED = "ragged"
    SHARED = "shared"

    @property
    def one_pool(self) -> bool:
        """True if all layers share one pool."""
        return self is Layout.SHARED

    @property
    def walk(self) -> Walk:
        """`Walk` enum member: how attention reads a layer's segments in this layout (strides, entire pool, windows)."""
        return {Layout.EQUAL: Walk.STRIDES, Layout.RAGGED: Walk.WHOLE, Layout.SHARED: Walk.WINDOWS}[
            self
        ]

    def pool_of(self, layer: int) -> int:
        """Return the index of a layer's pool: 0 if all layers share one, else the layer's own index."""
        return 0 if self.one_pool else layer

    def groups(self, layers: Sequence[int]) -> list[Sequence[int]]:
        """Group layer indices by pool: one list of all layers, or one list per layer."""
        return [layers] if self.one_pool else [layers[at : at + 1] for at in range(len(layers))]

    def parts(self, layers: int) -> list[slice]:
        """Return a slice of consecutive layers for each pool: the layers that share it."""
        return [slice(group[0], group[-1] + 1) for group in self.groups(range(layers))]

    def widest(self, rows: int, heads: int) -> int:
        """Maximum number of entries of a segment in a pool of `rows` rows: P / K if EQUAL, else all."""
        return rows // heads if self is Layout.EQUAL else rows

    def takes(self, length: Int[np.ndarray, "n B K"]) -> Int[np.ndarray, " B"]:
        """Minimum number of pool rows, numpy `[B]`, for all segments of each sequence, given their lengths."""
        each = length.max(axis=2) * length.shape[2] if self is Layout.EQUAL else length.sum(axis=2)
        return each.sum(axis=0)

    def fullest(self, length: Int[np.ndarray, "n B K"], heads: int) -> int:
        """Number of entries of the fullest device's shard of a pool, if each device has `heads` of the K heads."""
        return int(self.takes(length.reshape(len(length), -1, heads)).max())

    def place(
        self,
        length: Numbers,
        rows: int | Int[Array, ""],
        headroom: Int[np.ndarray, " n"] | None = None,
    ) -> Numbers:
        """Return the first row of each segment, `i32[n, B, K]`, for segments of these lengths in a pool of P = `rows`.

        `length` is `i32[n, B, K]` of numpy or JAX, and so is the result. `headroom` is the minimum headroom of each
        segment of a layer; spare places are spread evenly.
        """
        xp, (layers, _, heads) = namespace(length), length.shape
        if self is Layout.EQUAL:
            # Derived from `length`, so that the result is sharded as `length` is.
            return xp.zeros_like(length) + xp.arange(heads, dtype=np.int32) * (rows // heads)
        behind = (
            np.zeros(layers * heads, np.int32)
            if headroom is None
            else np.repeat(headroom, heads).astype(np.int32)
        )
        taken = by_sequence(length) + behind
        before = xp.cumsum(taken, axis=-1, dtype=np.int32) - taken
        spare = (rows - taken.sum(axis=-1, keepdims=True, dtype=np.int32)) // (layers * heads)
        return by_layer(before + spare * xp.arange(layers * heads, dtype=np.int32), heads)

    def in_pools(
        self, start: Int[np.ndarray, "L B K"], pools: Sequence[int], kv_shards: int
    ) -> Int[np.ndarray, "L B K"]:
        """Convert first rows `[L, B, K]` from indices in a device's shard of a pool to indices in the complete pool."""
        each = np.asarray([pools[self.pool_of(layer)] // kv_shards for layer in range(len(start))])
        stretch = np.arange(start.shape[2]) * kv_shards // start.shape[2]
        return start + each[:, None, None] * stretch

    def free(self, start: Numbers, length: Numbers, pools: Sequence[int]) -> Numbers:
        """Headroom of each segment in entries, `[L, B, K]`, given P of each pool; numpy or JAX, as `start` is."""
        xp: Any = jnp if isinstance(start, Array) else np
        heads = start.shape[2]
        ends = []
        for rows, of in zip(pools, self.parts(len(start)), strict=True):
            first = by_sequence(start[of])
            following = xp.concatenate([first[:, 1:], xp.full_like(first[:, :1], rows)], axis=1)
            ends.append(by_layer(following, heads))
        return xp.concatenate(ends) - start - length


def by_sequence(segments: Numbers) -> Numbers:
    """Reshape an array `[L, B, K, ...]` to `[B, L * K, ...]`, with each sequence's layers consecutive."""
    layers, batch, heads, *rest = segments.shape
    return segments.swapaxes(0, 1).reshape(batch, layers * heads, *rest)


def by_layer(segments: Numbers, heads: int) -> Numbers:
    """Reshape an array `[B, L * K, ...]` to `[L, B, K, ...]`; inverse of `by_sequence`."""
    batch, each, *rest = segments.shape
    return segments.reshape(batch, each // heads, heads, *rest).swapaxes(0, 1)
