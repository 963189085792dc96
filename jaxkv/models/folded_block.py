"""Block whose kv heads share entries: windows of models with wider, fewer kv heads in other layers (Gemma 4)."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.models.decoder_blocks import DecoderBlock, Hidden, rotate_heads
from jaxkv.models.rope import RopeTables
from jaxkv.models.values import FoldedLayerSpec
from jaxkv.sharding.collectives import get_shard_offset


class FoldedBlock(DecoderBlock):
    """Block with several kv heads in an entry: a query is 0 in the channels of the others, so its logits are its own.

    Within a prompt, every head has its own keys and values: on a device, the A kv heads of its queries.
    """

    spec: FoldedLayerSpec

    @property
    def prompt_shape(self) -> tuple[int, int, int]:
        """Kv heads of this device's queries, queries of each, and channels of a head."""
        heads = max(1, self.spec.folded // self._query_shards)
        return self.config.kv_heads * heads, self.config.group_size // heads, self.spec.head_dim

    @property
    def _query_shards(self) -> int:
        """Number of devices that share the query heads of an entry."""
        return 1 if self.axes is None else self.axes.count_axis_shards("G")

    @property
    def _own_heads(self) -> Int[Array, " G"]:
        """Place of each query head's kv head in an entry."""
        group = self.config.group_size
        index = get_shard_offset("G", group, self.axes) + jnp.arange(group, dtype=jnp.int32)
        return index * self.spec.folded // (group * self._query_shards)

    def compute_rotated_queries(self, normed: Hidden, by: RopeTables) -> Float[Array, "B K G N D"]:
        """Return rotated queries of entries, each in the channels of its kv head, 0 in others."""
        wide = self.compute_unrotated_queries(normed).astype(jnp.float32)
        q = rotate_heads(wide, by.scale_for_queries(), wide.dtype, self.attention.q_norm)
        # Attention divides by the root of an entry's channels.
        own = jax.nn.one_hot(self._own_heads, self.spec.folded) * math.sqrt(self.spec.folded)
        spread = q[..., None, :] * own[:, None, :, None]
        return spread.reshape(*q.shape[:-1], self.spec.entry_dim).astype(normed.dtype)

    def rotate_keys(
        self, k: Float[Array, "B K N D"], by: RopeTables, dtype: jnp.dtype
    ) -> Float[Array, "B K N D"]:
        """Return the heads' keys, rotated, in `dtype`."""
        return _join_heads(super().rotate_keys(self._split_heads(k), by, dtype))

    def compute_prompt_queries(self, normed: Hidden, by: RopeTables) -> Float[Array, "B A G N C"]:
        """Return rotated queries by kv head."""
        q = super().compute_rotated_queries(normed, by)
        heads, group, _ = self.prompt_shape
        return q.reshape(len(q), heads, group, *q.shape[3:])

    def expand_entries(
        self, k: Float[Array, "B K S D"], v: Float[Array, "B K S D"]
    ) -> tuple[Float[Array, "B A S C"], Float[Array, "B A S C"]]:
        """Return the keys and values of the kv heads of this device's queries."""
        heads, group, dim = self.prompt_shape
        own = self._own_heads[::group]
        shape = len(k), heads, k.shape[2], dim
        k, v = (self._split_heads(each)[:, :, own].reshape(shape) for each in (k, v))
        return k, v

    def apply_prompt_output_and_mlp(
        self, x: Hidden, attended: Float[Array, "B A G N C"], *, apart: bool = False
    ) -> Hidden:
        """Return hidden states after the output projection, the MLP and both sums, from each head's mean values."""
        shape = self.config.kv_heads, self.config.group_size
        by_entry = attended.reshape(len(x), *shape, *attended.shape[3:])
        return super().apply_output_and_mlp(x, by_entry, apart=apart)

    def apply_output_and_mlp(
        self, x: Hidden, attended: Float[Array, "B K G N D"], *, apart: bool = False
    ) -> Hidden:
        """Return hidden states after the output projection, the MLP and both sums, from each head's mean entries."""
        heads = attended.reshape(*attended.shape[:-1], self.spec.folded, self.spec.head_dim)
        own = self._own_heads[None, None, :, None, None, None]
        mine = jnp.take_along_axis(heads, own, axis=-2)[..., 0, :]
        return super().apply_output_and_mlp(x, mine, apart=apart)

    def _normalise_keys(self, k: Float[Array, "B K N D"]) -> Float[Array, "B K N D"]:
        """Return keys, normed by head."""
        return _join_heads(super()._normalise_keys(self._split_heads(k)))

    def _normalise_values(self, v: Float[Array, "B K N D"]) -> Float[Array, "B K N D"]:
        """Return values, normed by head."""
        return _join_heads(super()._normalise_values(self._split_heads(v)))

    def _split_heads(self, x: Float[Array, "B K N D"]) -> Float[Array, "B K J N C"]:
        """Return the keys or values of each head in an entry."""
        heads = x.reshape(*x.shape[:-1], self.spec.folded, self.spec.head_dim)
        return jnp.moveaxis(heads, 3, 2)


def _join_heads(x: Float[Array, "B K J N C"]) -> Float[Array, "B K N D"]:
    """Return entries' keys or values of the heads that share them."""
    return jnp.moveaxis(x, 2, 3).reshape(*x.shape[:2], x.shape[3], x.shape[2] * x.shape[4])
