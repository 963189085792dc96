"""Storage of linear weights: floats, 8-bit codes with a scale per output, or 4-bit codes in groups."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

# Elements of a row that share a scale and a minimum, in 4 bits; and the bytes of their codes.
GROUP = 32
GROUP_BYTES = 16


class StoredWeight(NamedTuple):
    """Linear weight `[*out, E]` as stored, a pytree: floats, or 8-bit or 4-bit codes with scales and minima.

    Attributes:
        codes: `[*out, E]` floats or int8; in 4 bits uint8 `[*out, E/2]`: byte j of a group of 16 has element j in the
            low half, and element j + 16 in the high half.
        scale: f32 `[*out]`, 8 bits only: a weight is code * scale.
        scales: f16 `[*out, E/32]`, 4 bits only: a weight is code * scale + minimum of its group.
        leasts: f16 `[*out, E/32]`, 4 bits only: the groups' minima.
    """

    codes: Num[Array, "*out n"]
    scale: Float[Array, "*out"] | None = None
    scales: Float[Array, "*out g"] | None = None
    leasts: Float[Array, "*out g"] | None = None

    @property
    def is_quantised(self) -> bool:
        """True if the weight is 8-bit or 4-bit codes, False for floats."""
        return self.scale is not None or self.scales is not None

    @property
    def supports_kernels(self) -> bool:
        """True if a GPU's kernels can multiply by the weight: rows of 16 n elements as stored, in all below 2**31."""
        return self.codes.shape[-1] % GROUP_BYTES == 0 and self.codes.size < 2**31

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Sizes of the weight's output axes, `*out`."""
        return self.codes.shape[:-1]

    def flatten_outputs(self, first: int = 0) -> "StoredWeight":
        """Return the weight with its output axes from the `first` on as one."""
        end = len(self.output_shape)
        return jax.tree.map(
            lambda leaf: leaf.reshape(*leaf.shape[:first], -1, *leaf.shape[end:]), self
        )

    def get_weight_matrix(self, dtype: jnp.dtype) -> Float[Array, "*out E"]:
        """Return the matrix to multiply by: floats as stored; as `dtype`, 8-bit codes unscaled, 4-bit dequantised."""
        if self.scales is None or self.leasts is None:
            # Codes up to 127 are exact in 16 bits: a GPU converts them while it multiplies.
            return self.codes if self.scale is None else self.codes.astype(dtype)
        bytes_ = self.codes.reshape(*self.scales.shape, GROUP_BYTES)
        codes = jnp.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1).astype(jnp.float32)
        wide = codes * self.scales[..., None].astype(jnp.float32) + self.leasts[..., None].astype(
            jnp.float32
        )
        return wide.reshape(*self.output_shape, -1).astype(dtype)

    def dequantise_to_float32(self) -> Float[Array, "*out E"]:
        """Return the weight `[*out, E]` in float32, dequantised if it is codes."""
        wide = self.get_weight_matrix(jnp.dtype(jnp.float32)).astype(jnp.float32)
        return wide if self.scale is None else wide * self.scale[..., None]
