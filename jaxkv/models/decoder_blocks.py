"""Transformer block of the decoder without its attention: parameters and arithmetic before and after it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.attention.shaping import LogitShaping
from jaxkv.models.config import ModelConfig
from jaxkv.models.delta_nets import GatedDeltaNet
from jaxkv.models.latent import LatentAttention
from jaxkv.models.layers import (
    DenseMLP,
    LayerNorm,
    RMSNorm,
    add_linear_weight,
    apply_linear,
    apply_linear_split_k,
    divide_by_rms,
    get_float_weight,
    get_parameter_array,
    make_empty_parameter,
)
from jaxkv.models.mixture import MixtureMLP, NormedMixtureMLP
from jaxkv.models.rope import RopeTables, apply_rope
from jaxkv.models.states import DeltaState
from jaxkv.models.values import DeltaNetSpec, LayerSpec
from jaxkv.sharding.collectives import sum_over_devices
from jaxkv.sharding.mesh import ShardingMesh

# Hidden states of several tokens per sequence.
Hidden = Float[Array, "B N E"]


class AttentionParameters(nnx.Module):
    """Parameters of grouped-query attention: Q, KV and output weights, biases, norms, sink logits; no forward pass.

    Parameters: q and out_gate `[K, G, D, E]`, kv `[2, K, D, E]`, out `[E, H*D]`, sink_logits `[K, G]`; query head h
    belongs to kv head h // G. kv is `[1, K, D, E]` for values from keys; of folded layers its D is an entry's, others a
    head's.
    """

    q: nnx.Param

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, *, dtype: jnp.dtype, weights: jnp.dtype
    ):
        heads = config.kv_heads
        group = config.group_size
        dim = spec.get_head_dim(config.head_dim)
        kv = (1 if spec.values_from_keys else 2, heads, spec.get_entry_dim(config.head_dim))
        add_linear_weight(self, "q", heads, group, dim, config.embed, dtype=weights)
        add_linear_weight(self, "kv", *kv, config.embed, dtype=weights)
        add_linear_weight(self, "out", config.embed, config.heads * dim, dtype=weights)
        # Flax decides by the first value whether an attribute is a parameter.
        if config.attention_gate:
            add_linear_weight(self, "out_gate", heads, group, dim, config.embed, dtype=weights)
        else:
            self.out_gate: nnx.Param | None = None
        self.q_bias = (
            make_empty_parameter(heads, group, dim, dtype=dtype) if config.qkv_bias else None
        )
        self.kv_bias = make_empty_parameter(*kv, dtype=dtype) if config.qkv_bias else None
        self.out_bias = make_empty_parameter(config.embed, dtype=dtype) if config.out_bias else None
        self.sink_logits = (
            make_empty_parameter(heads, group, dtype=dtype) if config.sink_logits else None
        )
        kind: dict[str, Any] = {
            "eps": config.norm_eps,
            "dtype": dtype,
            "offset": float(config.norm_offset),
            "scales_later": config.qk_norm_rotated,
        }
        self.q_norm = RMSNorm(dim, **kind) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, **kind) if config.qk_norm else None
        self.q_gain = (
            make_empty_parameter(heads, group, dim, dtype=dtype) if config.has_qk_gains else None
        )
        self.k_gain = make_empty_parameter(heads, dim, dtype=dtype) if config.has_qk_gains else None

    def get_value_projection(self) -> Float[Array, "E K G D"]:
        """Return the float32 output projection by query head: what a value becomes at the layer's output."""
        return get_float_weight(self, "out").reshape(-1, *self.q[...].shape[:3])


class DecoderBlock(nnx.Module):
    """Transformer block without its attention: QKV projections before it, output projection and MLP after it.

    A layer's block has the blocks of the state layers `below` it. Their `attention` is a gated delta net.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec | DeltaNetSpec,
        *,
        dtype: jnp.dtype,
        weights: jnp.dtype,
    ):
        self.config = config
        self.axes: ShardingMesh | None = None
        self.spec: Any = spec
        sizes: dict[str, Any] = {"dtype": dtype, "weights": weights}
        self.below = nnx.List([DecoderBlock(config, each, **sizes) for each in spec.below])
        before = config.norms != "after"
        after = config.norms != "before"
        self.attention_norm: Any = make_norm(config, dtype) if before else None
        self.attention: Any = _make_attention(config, self.spec, dtype, weights)
        self.attention_out_norm: Any = make_norm(config, dtype) if after else None
        inside = config.experts is not None and config.experts.own_norms
        self.mlp_norm: Any = (
            make_norm(config, dtype) if before and not (config.shared_norm or inside) else None
        )
        self.mlp = _make_mlp(config, self.spec, dtype, weights)
        self.mlp_out_norm: Any = make_norm(config, dtype) if after else None
        self.multiplier = make_empty_parameter(1, dtype=dtype) if config.block_multiplier else None

    @property
    def prompt_shape(self) -> tuple[int, int, int]:
        """Kv heads, queries of each, and head dim of attention within a prompt."""
        return self.config.kv_heads, self.config.group_size, self.config.head_dim

    def make_empty_states(self, batch: int) -> tuple[DeltaState, ...]:
        """Return the states of the layers below before the first token, on a mesh of this device's heads."""
        return tuple(
            DeltaState.make_empty(each.spec, batch, each.attention.log_speed.shape[0])
            for each in self.below
        )

    def advance_states(
        self, x: Hidden, states: tuple[DeltaState, ...], count: Int[Array, " B"]
    ) -> tuple[Hidden, tuple[DeltaState, ...]]:
        """Run the state layers below over hidden states; return these, and states after `count` tokens, at least 0."""
        advanced = []
        for block, state in zip(self.below, states, strict=True):
            normed = block.normalise_for_attention(x)
            mixed, state = block.attention.mix_tokens(normed, state, count)
            x = block.apply_output_and_mlp(x, mixed)
            advanced.append(state)
        return x, tuple(advanced)

    def normalise_for_attention(self, x: Hidden) -> Hidden:
        """Apply the norm before attention to hidden states `[B, N, E]`; unchanged for blocks without that norm."""
        return x if self.attention_norm is None else self.attention_norm(x)

    @property
    def sink_logits(self) -> Float[Array, "K G"] | None:
        """Learned sink logits `[K, G]` in each query head's softmax, which have no value; None for most families."""
        return get_parameter_array(self.attention.sink_logits)

    @property
    def logits_shaping(self) -> LogitShaping:
        """`LogitShaping` of the block's attention logits: softcap and sink logits."""
        return LogitShaping(softcap=self.spec.softcap, sink_logits=self.sink_logits)

    def compute_rotated_queries(self, normed: Hidden, by: RopeTables) -> Float[Array, "B K G N D"]:
        """Return queries `[B, K, G, N, D]` of normed hidden states, in their dtype, rotated by the RoPE tables `by`."""
        unrotated = self.compute_unrotated_queries(normed)
        return rotate_heads(unrotated, by.scale_for_queries(), normed.dtype, self.attention.q_norm)

    def rotate_keys(
        self, k: Float[Array, "B *heads N D"], by: RopeTables, dtype: jnp.dtype
    ) -> Float[Array, "B *heads N D"]:
        """Return keys rotated by the RoPE tables `by`, in `dtype`."""
        return rotate_heads(k, by, dtype, self.attention.k_norm)

    def compute_unrotated_queries(self, normed: Hidden) -> Float[Array, "B K G N D"]:
        """Return queries `[B, K, G, N, D]` before RoPE, with query norm and scale, if any; float32 without norm."""
        norm = self.attention.q_norm
        gain = self.attention.q_gain
        # Queries without a norm are float32 until RoPE, which computes in float32, so that they are rounded only once.
        q = apply_linear(self.attention, "q", normed, wide=norm is None and gain is None)
        if gain is not None:
            q = self._normalise_with_gain(q, gain[...], "H")
        return self._scale_queries(jnp.moveaxis(q if norm is None else norm(q), 1, 3))

    def _scale_queries(self, q: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        """Scale queries so that q.k / sqrt(D) has the layer's own attention scale; unchanged for 1 / sqrt(D)."""
        if self.spec.scale is None:
            return q
        return (q.astype(jnp.float32) * (self.spec.scale * math.sqrt(q.shape[-1]))).astype(q.dtype)

    def _normalise_with_gain(
        self, x: Float[Array, "B N *h"], gain: Float[Array, " *h"], letter: str
    ) -> Float[Array, "B N *h"]:
        """Normalise queries or keys per head (LayerNorm) or over all (RMS), times a weight per head and channel."""
        if not self.config.qk_layer_norm:
            return self._normalise_over_heads(x, gain, letter)
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        return (
            centred * lax.rsqrt(variance + self.config.norm_eps) * gain.astype(jnp.float32)
        ).astype(x.dtype)

    def _normalise_over_heads(
        self, x: Float[Array, "B N *h"], gain: Float[Array, " *h"], letter: str
    ) -> Array:
        """RMS-normalise each token's queries or keys over all heads, of all devices along `letter`, times `gain`."""
        wide = x.astype(jnp.float32)
        axes = tuple(range(2, x.ndim))
        count = gain.size * (1 if self.axes is None else self.axes.count_axis_shards(letter))
        square = (
            sum_over_devices((wide * wide).sum(axis=axes, keepdims=True), self.axes, letter) / count
        )
        return (wide * lax.rsqrt(square + self.config.norm_eps) * gain.astype(jnp.float32)).astype(
            x.dtype
        )

    def compute_keys_values(
        self, normed: Hidden
    ) -> tuple[Float[Array, "B K N D"], Float[Array, "B K N D"]]:
        """Return unrotated keys and values, each `[B, K, N, D]`; keys are float32 unless the model normalises them."""
        norm = self.attention.k_norm
        gain = self.attention.k_gain
        kv = apply_linear(self.attention, "kv", normed, wide=norm is None and gain is None)
        k = kv[:, :, 0]
        v = jnp.moveaxis(kv[:, :, -1], 1, 2)
        k = jnp.moveaxis(k if gain is None else self._normalise_with_gain(k, gain[...], "K"), 1, 2)
        return self._normalise_keys(k), self._normalise_values(v).astype(normed.dtype)

    def _normalise_keys(self, k: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        """Return keys as a norm over each head's channels leaves them; unchanged without one."""
        return k if self.attention.k_norm is None else self.attention.k_norm(k)

    def _normalise_values(self, v: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        """Return values divided by their root mean square, float32, if the model does that; else unchanged."""
        return divide_by_rms(v, self.config.norm_eps) if self.config.value_norm else v

    def compute_qkv_partial_sums(
        self, normed: Float[Array, "M 1 E"]
    ) -> tuple[Float[Array, "n M K G D"], Float[Array, "n M two K D"]]:
        """Return scaled Q `[n, M, K, G, D]`, KV `[n, M, 2, K, D]` before RoPE as n summands (1 if normed or biased)."""
        attention = self.attention
        # The barrier keeps XLA from merging both products into one and copying its halves.
        q = apply_linear_split_k(attention, "q", normed[:, 0])
        kv = apply_linear_split_k(attention, "kv", lax.optimization_barrier(normed)[:, 0])
        if attention.q_norm is None or attention.k_norm is None:
            return self._scale_queries(q), kv
        narrow = kv.sum(axis=0).astype(normed.dtype)
        kv = jnp.stack([attention.k_norm(narrow[:, 0]), narrow[:, 1]], axis=1)
        return self._scale_queries(attention.q_norm(q.sum(axis=0).astype(normed.dtype)))[None], kv[
            None
        ]

    def compute_prompt_queries(self, normed: Hidden, by: RopeTables) -> Float[Array, "B K G N D"]:
        """Return rotated queries for attention within a prompt; K, G and D may differ from those of the cache."""
        return self.compute_rotated_queries(normed, by)

    def expand_entries(
        self, k: Float[Array, "B K S D"], v: Float[Array, "B K S D"]
    ) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]:
        """Return keys and values for attention within a prompt from rotated keys and values of the cache."""
        return k, v

    def apply_prompt_output_and_mlp(
        self, x: Hidden, attended: Float[Array, "B K G N D"], *, apart: bool = False
    ) -> Hidden:
        """Return hidden states like `apply_output_and_mlp`, from the output of attention within a prompt."""
        return self.apply_output_and_mlp(x, attended, apart=apart)

    def apply_output_and_mlp(
        self, x: Hidden, attended: Float[Array, "B K G N D"], *, apart: bool = False
    ) -> Hidden:
        """Return hidden states `[B, N, E]` after the output projection of attention, the MLP and both residual sums.

        With `apart`, the operands of a dense MLP's products are computed before the products, not fused into them.
        """
        attended = jnp.moveaxis(attended, 3, 1)
        if self.attention.out_gate is not None:
            normed = self.normalise_for_attention(x)
            gate = jax.nn.sigmoid(apply_linear(self.attention, "out_gate", normed, wide=True))
            attended = (attended.astype(jnp.float32) * gate).astype(x.dtype)
        merged = attended.reshape(*x.shape[:2], -1)
        how = {"apart": True} if apart and isinstance(self.mlp, DenseMLP) else {}
        if self.config.parallel:
            return self._apply_parallel_mlp(x, merged, how)
        added = apply_linear(self.attention, "out", merged, wide=True, over=self.axes)
        wide = x.astype(jnp.float32) + self._scale_residual_branch(added, self.attention_out_norm)
        # Without a norm the MLP reads hidden states in the dtype in which they enter a block: the model's.
        read = wide.astype(x.dtype) if self.mlp_norm is None else self.mlp_norm(wide)
        out = wide + self._scale_residual_branch(
            self.mlp(read, self.axes, **how), self.mlp_out_norm
        )
        if self.multiplier is not None:
            out = out * self.multiplier[...].astype(jnp.float32)
        return out.astype(x.dtype)

    def _scale_residual_branch(self, added: Hidden, norm: Any) -> Hidden:
        """Return the output of attention or MLP, normed if blocks norm outputs, times the residual scale."""
        added = added if norm is None else norm(added).astype(jnp.float32)
        return added if self.config.residual_scale == 1 else added * self.config.residual_scale

    def _apply_parallel_mlp(
        self, x: Hidden, merged: Float[Array, "B N H"], how: dict[str, bool]
    ) -> Hidden:
        """Return a parallel block's output: input + residual scale * (attention projection + MLP of normed input)."""
        normed = (self.attention_norm if self.mlp_norm is None else self.mlp_norm)(x)
        both = apply_linear(
            self.attention, "out", merged, bias=False, wide=True
        ) + self.mlp.compute_shard_output(normed, **how)
        added = sum_over_devices(both, self.axes)
        for bias in (self.attention.out_bias, getattr(self.mlp, "down_bias", None)):
            added = added if bias is None else added + bias[...].astype(jnp.float32)
        return (x.astype(jnp.float32) + self._scale_residual_branch(added, None)).astype(x.dtype)


def rotate_heads(
    x: Float[Array, "B *heads N D"], by: RopeTables, dtype: jnp.dtype, norm: RMSNorm | None
) -> Float[Array, "B *heads N D"]:
    """Rotate queries or keys by RoPE, times the weights of a norm that it did not apply before; return `dtype`."""
    if norm is None or not norm.scales_later:
        return apply_rope(x, by, dtype)
    return (apply_rope(x, by, jnp.dtype(jnp.float32)) * norm.get_scale()).astype(dtype)


# Typed Any: callers that use a specific norm's fields check `config.has_llama_blocks` first.
def make_norm(config: ModelConfig, dtype: jnp.dtype) -> Any:
    """Make an uninitialised norm over E, a `LayerNorm` or `RMSNorm` by the config."""
    if config.layer_norm:
        return LayerNorm(config.embed, eps=config.norm_eps, dtype=dtype, bias=config.norm_bias)
    return RMSNorm(config.embed, eps=config.norm_eps, dtype=dtype, offset=float(config.norm_offset))


def _make_attention(config: ModelConfig, spec: Any, dtype: jnp.dtype, weights: jnp.dtype) -> Any:
    """Make a block's uninitialised `AttentionParameters`, `LatentAttention`, or `GatedDeltaNet` by config and spec."""
    if isinstance(spec, DeltaNetSpec):
        width, eps = config.embed, config.norm_eps
        return GatedDeltaNet(width, spec, eps=eps, dtype=dtype, weights=weights)
    if config.latent is None:
        return AttentionParameters(config, spec, dtype=dtype, weights=weights)
    return LatentAttention(config, config.latent, dtype=dtype, weights=weights)


def _make_mlp(config: ModelConfig, spec: Any, dtype: jnp.dtype, weights: jnp.dtype) -> Any:
    """Make an uninitialised MLP of a layer, a `DenseMLP` or a `MixtureMLP` by config and spec."""
    if config.experts is None or spec.dense_hidden is not None:
        hidden = spec.dense_hidden or config.hidden
        return DenseMLP(config, hidden, dtype=dtype, weights=weights)
    mixture = NormedMixtureMLP if config.experts.own_norms else MixtureMLP
    return mixture(config, dtype=dtype, weights=weights)
