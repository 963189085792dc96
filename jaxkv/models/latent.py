"""Multi-head latent attention (MLA): parameters, and projections between latents and the heads' keys and values."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxkv.models.config import ModelConfig
from jaxkv.models.layers import (
    RMSNorm,
    add_linear_weight,
    apply_linear,
    get_float_weight,
    make_empty_parameter,
)
from jaxkv.models.rope import join_rotated_channels, split_rotated_channels
from jaxkv.models.values import LatentConfig

# Epsilon of the norms of latents, which transformers' classes do not take from the config.
_EPSILON = 1e-6


class LatentAttention(nnx.Module):
    """Parameters of multi-head latent attention, and its projections; attention itself has one kv head of latents.

    Parameters: q `[1, H, C, E]` of C = u + r channels, or of a query's latent in place of E; latent `[R + r, E]`;
    key_up `[1, H, u, R]` and value_up `[1, H, v, R]` from latents to a head's unrotated keys and values, never
    quantised because both their axes are summed; out `[E, H * v]`.

    References:
        DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C.
    """

    q_norm = k_norm = q_gain = k_gain = sink_logits = out_gate = None

    def __init__(
        self, config: ModelConfig, latent: LatentConfig, *, dtype: jnp.dtype, weights: jnp.dtype
    ):
        self.widths = latent
        width = config.embed if latent.query_rank is None else latent.query_rank
        if latent.query_rank is not None:
            add_linear_weight(self, "q_down", width, config.embed, dtype=weights)
        self.q_down_norm: Any = (
            None if latent.query_rank is None else RMSNorm(width, eps=_EPSILON, dtype=dtype)
        )
        add_linear_weight(self, "q", 1, config.heads, latent.query_dim, width, dtype=weights)
        add_linear_weight(self, "latent", latent.entry_dim, config.embed, dtype=weights)
        self.latent_norm = RMSNorm(latent.rank, eps=_EPSILON, dtype=dtype)
        self.key_up = make_empty_parameter(
            1, config.heads, latent.unrotated, latent.rank, dtype=dtype
        )
        self.value_up = make_empty_parameter(
            1, config.heads, latent.value, latent.rank, dtype=dtype
        )
        add_linear_weight(self, "out", config.embed, config.heads * latent.value, dtype=weights)

    def project_queries(self, normed: Float[Array, "B N E"]) -> Float[Array, "B 1 H N C"]:
        """Return the heads' unrotated queries of normed hidden states, float32."""
        if self.q_down_norm is not None:
            normed = self.q_down_norm(apply_linear(self, "q_down", normed, wide=True))
        return jnp.moveaxis(apply_linear(self, "q", normed, wide=True), 1, 3)

    def absorb_queries(self, q: Float[Array, "B 1 H N C"]) -> Float[Array, "B 1 H N D"]:
        """Multiply heads' queries by their projections of keys: queries of latents, of equal logits; float32."""
        rotated, others = split_rotated_channels(q, self.widths.rotated)
        weight = self.key_up[...]
        of_latents = jnp.einsum(
            "bkgnu,kgur->bkgnr",
            others.astype(weight.dtype),
            weight,
            preferred_element_type=jnp.float32,
        )
        return join_rotated_channels(rotated, of_latents)

    def project_latents(self, normed: Float[Array, "B N E"]) -> Float[Array, "B 1 N D"]:
        """Return the unrotated entries of normed hidden states, float32: normed latents, and a key's other channels."""
        both = apply_linear(self, "latent", normed, wide=True)
        latents, rotated = jnp.split(both, [self.widths.rank], axis=-1)
        return join_rotated_channels(rotated, self.latent_norm(latents).astype(jnp.float32))[
            :, None
        ]

    def expand_keys_values(
        self, entries: Float[Array, "B 1 S D"]
    ) -> tuple[Float[Array, "B H S C"], Float[Array, "B H S v"]]:
        """Return the heads' keys and values of rotated entries, in their dtype."""
        rotated, latents = split_rotated_channels(entries[:, 0], self.widths.rotated)
        keys, values = (
            jnp.einsum(
                "bsr,gur->bgsu",
                latents.astype(each.dtype),
                each,
                preferred_element_type=jnp.float32,
            )
            for each in (self.key_up[0], self.value_up[0])
        )
        spread = jnp.broadcast_to(rotated[:, None], (*keys.shape[:3], self.widths.rotated))
        keys = join_rotated_channels(spread.astype(keys.dtype), keys)
        return keys.astype(entries.dtype), values.astype(entries.dtype)

    def expand_outputs(self, attended: Float[Array, "B 1 H N D"]) -> Float[Array, "B 1 H N v"]:
        """Return the heads' attention outputs, in the dtype of the mean entries `attended` that attention returned."""
        _, latents = split_rotated_channels(attended, self.widths.rotated)
        weight = self.value_up[...]
        out = jnp.einsum(
            "bkgnr,kgvr->bkgnv",
            latents.astype(weight.dtype),
            weight,
            preferred_element_type=jnp.float32,
        )
        return out.astype(attended.dtype)

    def get_value_projection(self) -> Float[Array, "E 1 H D"]:
        """Return float32 projections by query head: what an entry, as a value, becomes at the layer's output."""
        up = self.value_up[...].astype(jnp.float32)
        out = get_float_weight(self, "out").reshape(-1, *up.shape[:3])
        of_latents = jnp.einsum("ekgv,kgvr->ekgr", out, up)
        return join_rotated_channels(
            jnp.zeros((*of_latents.shape[:3], self.widths.rotated), jnp.float32), of_latents
        )
