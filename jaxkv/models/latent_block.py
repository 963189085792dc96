"""Block with multi-head latent attention: entries are latents, and prompts attend by head."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.models.decoder_blocks import DecoderBlock, Hidden
from jaxkv.models.rope import RopeTables, apply_rope, zero_rotated_channels


class LatentBlock(DecoderBlock):
    """Block with multi-head latent attention: one kv head of latents, or all heads' keys and values within a prompt."""

    @property
    def prompt_shape(self) -> tuple[int, int, int]:
        """Kv heads, one for each query head, queries of each, and head dim of attention within a prompt."""
        return self.config.heads, 1, self.config.prompt_head_dim

    def compute_unrotated_queries(self, normed: Hidden) -> Float[Array, "B K G N D"]:
        """Return scaled queries `[B, 1, H, N, D]` of latents before RoPE, float32."""
        return self._scale_queries(
            self.attention.absorb_queries(self.attention.project_queries(normed))
        )

    def compute_keys_values(
        self, normed: Hidden
    ) -> tuple[Float[Array, "B K N D"], Float[Array, "B K N D"]]:
        """Return unrotated entries, float32; and as values the same without the rotated channels."""
        k = self.attention.project_latents(normed)
        return k, zero_rotated_channels(k, self.spec.rope).astype(normed.dtype)

    def compute_prompt_queries(self, normed: Hidden, by: RopeTables) -> Float[Array, "B H 1 N C"]:
        """Return each head's rotated queries; C is the width of its keys, or of its values if these are wider."""
        q = jnp.moveaxis(self.attention.project_queries(normed), 2, 1)
        turn = by.scale_for_queries().keep_first_channels(q.shape[-1])
        return self._scale_queries(self._pad_head_dim(apply_rope(q, turn))).astype(normed.dtype)

    def expand_entries(
        self, k: Float[Array, "B 1 S D"], v: Float[Array, "B 1 S D"]
    ) -> tuple[Float[Array, "B H S C"], Float[Array, "B H S C"]]:
        """Return each head's keys and values, padded to one width by zeros; the entries are their own values."""
        keys, values = self.attention.expand_keys_values(k)
        return self._pad_head_dim(keys), self._pad_head_dim(values)

    def apply_prompt_output_and_mlp(
        self, x: Hidden, attended: Float[Array, "B H 1 N C"], *, apart: bool = False
    ) -> Hidden:
        """Return hidden states after the output projection, the MLP and both sums, from each head's mean values."""
        value = self.attention.widths.value
        return super().apply_output_and_mlp(x, attended[..., :value], apart=apart)

    def apply_output_and_mlp(
        self, x: Hidden, attended: Float[Array, "B 1 H N D"], *, apart: bool = False
    ) -> Hidden:
        """Return hidden states after the output projection, the MLP and both sums, from each head's mean entries."""
        return super().apply_output_and_mlp(x, self.attention.expand_outputs(attended), apart=apart)

    def _pad_head_dim(self, x: Float[Array, "*n c"]) -> Float[Array, "*n C"]:
        """Pad queries, keys or values with zeros to the head dim of attention within a prompt."""
        return jnp.pad(
            x, (*((0, 0),) * (x.ndim - 1), (0, self.config.prompt_head_dim - x.shape[-1]))
        )
