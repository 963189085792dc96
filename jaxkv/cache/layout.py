"""How segments lie in pools: the one place that knows. Everybody else asks it."""

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from jaxkv.attention.xla import Walk

# On the host, or on a device, where they may be traced.
Numbers = TypeVar("Numbers", Array, np.ndarray)


class Layout(enum.Enum):
    """How the segments of a layer lie in its pool.

    EQUAL: every segment owns the same number of rows, head k from k * P/K on, known at trace time.
    RAGGED: segments of any length, one after the other, within the layer's own pool.
    SHARED: all layers' segments lie in one pool, one after the other.
    """

    EQUAL = "equal"
    RAGGED = "ragged"
    SHARED = "shared"

    @property
    def one_pool(self) -> bool:
        """Whether all layers share a pool."""
        return self is Layout.SHARED

    @property
    def walk(self) -> Walk:
        """How a layer's rows are reached where they lie like this."""
        return {Layout.EQUAL: Walk.STRIDES, Layout.RAGGED: Walk.WHOLE, Layout.SHARED: Walk.WINDOWS}[self]

    def pool_of(self, layer: int) -> int:
        """Which of the pools holds a layer's segments."""
        return 0 if self.one_pool else layer

    def groups(self, layers: Sequence[int]) -> list[Sequence[int]]:
        """Layers by the pool that they share."""
        return [layers] if self.one_pool else [layers[at : at + 1] for at in range(len(layers))]

    def widest(self, rows: int, heads: int) -> int:
        """Rows that a segment could hold at most in a pool of so many."""
        return rows // heads if self is Layout.EQUAL else rows

    def takes(self, length: Int[np.ndarray, "n B K"]) -> Int[np.ndarray, " B"]:
        """Rows of the pool that segments of these lengths take at least, for each sequence of a group of layers."""
        each = length.max(axis=2) * length.shape[2] if self is Layout.EQUAL else length.sum(axis=2)
        return each.sum(axis=0)

    def place(
        self, length: Int[Array, "n B K"], rows: int, room: Int[np.ndarray, " n"] | None = None
    ) -> Int[Array, "n B K"]:
        """Places the segments of layers that share a pool.

        Args:
            length: rows that each segment holds.
            rows: P.
            room: rows to leave behind each segment of a layer at least; what is then left is spread evenly.

        Returns:
            The first row of each segment.
        """
        layers, _, heads = length.shape
        if self is Layout.EQUAL:
            # Made of the lengths, so that both lie alike where a caller spreads heads over devices.
            return jnp.zeros_like(length) + jnp.arange(heads, dtype=jnp.int32) * (rows // heads)
        behind = np.zeros(layers * heads, np.int32) if room is None else np.repeat(room, heads).astype(np.int32)
        taken = by_sequence(length) + behind
        before = jnp.cumsum(taken, axis=-1, dtype=jnp.int32) - taken
        spare = (rows - taken.sum(axis=-1, keepdims=True, dtype=jnp.int32)) // (layers * heads)
        return by_layer(before + spare * jnp.arange(layers * heads, dtype=jnp.int32), heads)

    def in_pools(
        self, start: Int[np.ndarray, "L B K"], pools: Sequence[int], stretches: int
    ) -> Int[np.ndarray, "L B K"]:
        """First rows in whole pools, where `start` counts from the stretch of P that a device's heads have."""
        each = np.asarray([pools[self.pool_of(layer)] // stretches for layer in range(len(start))])
        stretch = np.arange(start.shape[2]) * stretches // start.shape[2]
        return start + each[:, None, None] * stretch

    def free(self, start: Numbers, length: Numbers, pools: Sequence[int]) -> Numbers:
        """Rows behind each segment that nothing lies in.

        Args:
            start: `[L, B, K]` first rows: on the host, or arrays that may be traced.
            length: `[L, B, K]` rows held, where the first rows are.
            pools: P of each pool.

        Returns:
            `[L, B, K]` rows, where the numbers are.
        """
        xp: Any = jnp if isinstance(start, Array) else np
        heads = start.shape[2]
        ends = []
        for rows, group in zip(pools, self.groups(range(len(start))), strict=True):
            of = slice(group[0], group[-1] + 1)
            first = by_sequence(start[of])
            following = xp.concatenate([first[:, 1:], xp.full_like(first[:, :1], rows)], axis=1)
            ends.append(by_layer(following, heads))
        return xp.concatenate(ends) - start - length


def by_sequence(segments: Numbers) -> Numbers:
    """Numbers of segments `[L, B, K, ...]` as `[B, L * K, ...]`: those of a sequence's layers one after the other."""
    layers, batch, heads, *rest = segments.shape
    return segments.swapaxes(0, 1).reshape(batch, layers * heads, *rest)


def by_layer(segments: Numbers, heads: int) -> Numbers:
    """Such numbers by layer again, `[L, B, K, ...]` for `[B, L * K, ...]`."""
    batch, each, *rest = segments.shape
    return segments.reshape(batch, each // heads, heads, *rest).swapaxes(0, 1)
