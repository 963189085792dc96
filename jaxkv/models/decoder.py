"""The decoder as a Flax NNX module: parameters and the arithmetic of one block; no cache, no loop over layers."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from jaxkv.attention.shaping import LogitShaping
from jaxkv.attention.xla import apply_softcap
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
    multiply_by_weight,
)
from jaxkv.models.mixture import MixtureMLP, NormedMixtureMLP
from jaxkv.models.rope import RopeTables, apply_rope, zero_rotated_channels
from jaxkv.models.states import DeltaState
from jaxkv.models.stored import StoredWeight
from jaxkv.models.values import DeltaNetSpec, FoldedLayerSpec, LayerSpec
from jaxkv.sharding.collectives import get_shard_offset, sum_over_devices
from jaxkv.sharding.mesh import ShardingMesh

# Hidden states of several tokens per sequence.
Hidden = Float[Array, "B N E"]
# Parameters of a block, or of the ends, as a flat tuple, which is 8x cheaper to pass to jitted functions than a module.
Leaves = tuple[Shaped[Array, "..."], ...]
# Minimum and maximum tokens per block whose embeddings devices sum in one step: up to 34 MB for Llama 3 8B.
_SUMMED_AT_ONCE = 128, 4096


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
        self.attention_norm: Any = _make_norm(config, dtype) if before else None
        self.attention: Any = _make_attention(config, self.spec, dtype, weights)
        self.attention_out_norm: Any = _make_norm(config, dtype) if after else None
        inside = config.experts is not None and config.experts.own_norms
        self.mlp_norm: Any = (
            _make_norm(config, dtype) if before and not (config.shared_norm or inside) else None
        )
        self.mlp = _make_mlp(config, self.spec, dtype, weights)
        self.mlp_out_norm: Any = _make_norm(config, dtype) if after else None
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
        return _rotate(unrotated, by.scale_for_queries(), normed.dtype, self.attention.q_norm)

    def rotate_keys(
        self, k: Float[Array, "B *heads N D"], by: RopeTables, dtype: jnp.dtype
    ) -> Float[Array, "B *heads N D"]:
        """Return keys rotated by the RoPE tables `by`, in `dtype`."""
        return _rotate(k, by, dtype, self.attention.k_norm)

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
    ) -> tuple[Float[Array, "B H S C"], Float[Array, "B H S C"]]:
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


class FoldedBlock(DecoderBlock):
    """Block with several kv heads in an entry: a query is 0 in the channels of the others, so its logits are its own.

    Within a prompt, every head has its own keys and values.
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
        q = _rotate(wide, by.scale_for_queries(), wide.dtype, self.attention.q_norm)
        # Attention divides by the root of an entry's channels.
        own = jax.nn.one_hot(self._own_heads, self.spec.folded) * math.sqrt(self.spec.folded)
        spread = q[..., None, :] * own[:, None, :, None]
        return spread.reshape(*q.shape[:-1], self.spec.get_entry_dim(0)).astype(normed.dtype)

    def rotate_keys(
        self, k: Float[Array, "B K N D"], by: RopeTables, dtype: jnp.dtype
    ) -> Float[Array, "B K N D"]:
        """Return the heads' keys, rotated, in `dtype`."""
        return _join_heads(super().rotate_keys(self._split_heads(k), by, dtype))

    def compute_prompt_queries(self, normed: Hidden, by: RopeTables) -> Float[Array, "B H G N C"]:
        """Return rotated queries by kv head."""
        q = super().compute_rotated_queries(normed, by)
        heads, group, _ = self.prompt_shape
        return q.reshape(len(q), heads, group, *q.shape[3:])

    def expand_entries(
        self, k: Float[Array, "B K S D"], v: Float[Array, "B K S D"]
    ) -> tuple[Float[Array, "B H S C"], Float[Array, "B H S C"]]:
        """Return the keys and values of the kv heads of this device's queries."""
        heads, group, dim = self.prompt_shape
        own = self._own_heads[::group]
        shape = len(k), heads, k.shape[2], dim
        k, v = (self._split_heads(each)[:, :, own].reshape(shape) for each in (k, v))
        return k, v

    def apply_prompt_output_and_mlp(
        self, x: Hidden, attended: Float[Array, "B H G N C"], *, apart: bool = False
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


def _rotate(
    x: Float[Array, "B *heads N D"], by: RopeTables, dtype: jnp.dtype, norm: RMSNorm | None
) -> Float[Array, "B *heads N D"]:
    """Rotate queries or keys by RoPE, times the weights of a norm that it did not apply before; return `dtype`."""
    if norm is None or not norm.scales_later:
        return apply_rope(x, by, dtype)
    return (apply_rope(x, by, jnp.dtype(jnp.float32)) * norm.get_scale()).astype(dtype)


# Typed Any: callers that use a specific norm's fields check `config.has_llama_blocks` first.
def _make_norm(config: ModelConfig, dtype: jnp.dtype) -> Any:
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


def _choose_block(config: ModelConfig, spec: LayerSpec) -> type[DecoderBlock]:
    """Return the class of a layer's block."""
    if config.latent is not None:
        return LatentBlock
    return FoldedBlock if isinstance(spec, FoldedLayerSpec) else DecoderBlock


class Decoder(nnx.Module):
    """Decoder-only transformer as a module of parameters: embedding, blocks, norm, output matrix; shapes until loaded.

    With `weights="int8"` linear maps are int8 codes and a scale per output; with "int4" they are 4-bit codes with a
    scale and a minimum per 32 codes. The embedding (which may also be the output matrix), norms, biases and a mixture's
    router are in `dtype`.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: Any = jnp.float32, weights: str | None = None
    ):
        self.config = config
        self.weights = weights
        dtype = jnp.dtype(dtype)
        narrow = dtype if weights is None else jnp.dtype(weights)
        self.embedding = make_empty_parameter(config.vocab, config.embed, dtype=dtype)
        self.blocks = nnx.List(
            [
                _choose_block(config, spec)(config, spec, dtype=dtype, weights=narrow)
                for spec in map(config.get_layer_spec, range(config.layers))
            ]
        )
        self.norm = _make_norm(config, dtype)
        # Flax decides by the first value whether an attribute is a parameter.
        if config.tied:
            self.head: nnx.Param | None = None
        else:
            add_linear_weight(self, "head", config.vocab, config.embed, dtype=narrow)
        self.head_bias = (
            make_empty_parameter(config.vocab, dtype=dtype) if config.head_bias else None
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of embedding, norms and activations, and of linear weights unless these are int8 or int4 codes."""
        return self.embedding[...].dtype

    @property
    def nbytes(self) -> int:
        """Total size in bytes of all parameters of a decoder."""
        return sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(self, nnx.Param))
        )


class EmbeddingAndHead(nnx.Module):
    """Parts of the decoder outside its blocks: token embedding, final norm and output matrix."""

    def __init__(self, decoder: Decoder):
        self.embedding = decoder.embedding
        self.norm = decoder.norm
        self.head = decoder.head
        for each in ("head_scale", "head_scales", "head_leasts", "head_bias"):
            setattr(self, each, getattr(decoder, each, None))
        self.axes: ShardingMesh | None = None
        self.config = decoder.config

    def embed_tokens(self, tokens: Int[Array, "B N"], *, in_blocks: bool = False) -> Hidden:
        """Return scaled embeddings `[B, N, E]` of token ids; ids outside the vocabulary are clipped, on a mesh zeros.

        On a mesh with `in_blocks`, devices sum the embeddings of one block of tokens at a time. libtpu of JAX 0.12
        needs two more copies of what is summed, 2.1 GB for 4 prompts of 32,768 tokens of Llama 3 8B.
        """
        table = self.embedding[...]
        least, most = _SUMMED_AT_ONCE
        size = math.gcd(tokens.size, most)
        if in_blocks and self.axes is not None and least <= size < tokens.size:
            found = lax.map(
                lambda some: self._gather_embedding_rows(table, some), tokens.reshape(-1, 1, size)
            )
            found = found.reshape(*tokens.shape, -1)
        else:
            found = self._gather_embedding_rows(table, tokens)
        # Rounded to the model's dtype first, as Gemma's is.
        scale = self.config.embedding_scale
        return found if scale == 1 else found * jnp.asarray(scale, found.dtype)

    def _gather_embedding_rows(
        self, table: Float[Array, "V E"], tokens: Int[Array, "B N"]
    ) -> Hidden:
        """Gather embedding rows `[B, N, E]` of token ids; on a mesh, summed over devices that shard the vocabulary."""
        if self.axes is None:
            return jnp.take(table, tokens, axis=0, mode="clip")
        row = tokens - get_shard_offset("V", table.shape[0], self.axes)
        mine = (row >= 0) & (row < table.shape[0])
        found = jnp.take(table, row, axis=0, mode="clip")
        return sum_over_devices(jnp.where(mine[..., None], found, jnp.zeros_like(found)), self.axes)

    def compute_logits(self, x: Float[Array, "B E"]) -> Float[Array, "B V"]:
        """Apply the final norm; return scaled, soft-capped float32 logits `[B, V]`, on a mesh a shard of V."""
        return self.project_to_logits(self.norm(x))

    def project_to_logits(self, normed: Float[Array, "B E"]) -> Float[Array, "B V"]:
        """Return float32 logits `[B, V]` of normed hidden states, scaled and soft-capped; on a mesh, a shard of V."""
        logits = (
            multiply_by_weight(normed, StoredWeight(self.embedding[...]))
            if self.head is None
            else apply_linear(self, "head", normed)
        )
        logits = logits.astype(jnp.float32)
        scale = self.config.logit_scale
        return apply_softcap(logits if scale == 1 else logits * scale, self.config.logit_softcap)


def walk_module_parts(
    module: nnx.Module,
) -> Iterator[tuple[dict[str, Any], str, nnx.Module | nnx.Param]]:
    """Yield (owner's attributes, name, part) of each nested module and parameter, a module before its parts."""
    held = vars(module)
    for name, part in held.items():
        if isinstance(part, (nnx.Param, nnx.Module)):
            yield held, name, part
        if isinstance(part, nnx.Module):
            yield from walk_module_parts(part)


def named_parameters(module: nnx.Module, prefix: str = "") -> Iterator[tuple[str, nnx.Param]]:
    """Yield (path, `nnx.Param`) of every parameter of a module; a path is such as `blocks.0.attention.q`."""
    for name, part in vars(module).items():
        if isinstance(part, nnx.Param):
            yield f"{prefix}{name}", part
        elif isinstance(part, nnx.Module):
            yield from named_parameters(part, f"{prefix}{name}.")


class SplitDecoder:
    """Decoder split for jitted code: parameter arrays as flat tuples, and static graphs to rebuild its modules.

    Attributes:
        ends: parameters of embedding, final norm and output matrix.
        blocks: one tuple of parameters per block; those of layers with equal specs have the same structure.
        graphs: graph definitions of the ends and of the blocks, passed as static arguments.
        config: the decoder's config.
        axes: axes of the parameters' mesh, or None.
        on_mesh: the language model with these parameters on a mesh, by the mesh's axes.
        gates: gate weights of policies on the parameters' devices, by gate and layer, in order of last use.
        compiled_loops: keys of the token loops that `start_loop_compilation` has compiled.
    """

    def __init__(self, decoder: Decoder):
        self.config = decoder.config
        self.on_mesh: dict[ShardingMesh, Any] = {}
        self.gates: dict[Any, dict[int, Any]] = {}
        self.compiled_loops: set[Any] = set()
        self._decoder = decoder
        self._parts = tuple(walk_module_parts(decoder))
        self._source = tuple(
            (part, part.get_raw_value()) for *_, part in self._parts if isinstance(part, nnx.Param)
        )
        ends_graph, ends = nnx.split(EmbeddingAndHead(decoder))
        self.ends: Leaves = tuple(jax.tree.leaves(ends))
        parts = [nnx.split(block) for block in decoder.blocks]
        self.blocks: tuple[Leaves, ...] = tuple(tuple(jax.tree.leaves(state)) for _, state in parts)
        self.axes = ShardingMesh.get_array_mesh(self.ends[0])
        of_blocks = {
            block.spec: ModuleGraph(graph, jax.tree.structure(state))
            for block, (graph, state) in zip(decoder.blocks, parts, strict=True)
        }
        self.graphs = DecoderGraphs(
            of_ends=ModuleGraph(ends_graph, jax.tree.structure(ends)),
            of_blocks=tuple(of_blocks.items()),
            axes=self.axes,
            spec=self.config.get_layer_spec(0),
        )

    @property
    def mesh(self) -> Mesh | None:
        """Mesh on which the decoder's parameters are sharded; None on one device."""
        return None if self.axes is None else self.axes.mesh

    def get_layer_graphs(self, layer: int) -> "DecoderGraphs":
        """Return the `DecoderGraphs` with a layer's spec, static for compiled functions; equal for equal specs."""
        return self.graphs.replace_layer_spec(self.config.get_layer_spec(layer))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle and copy a `SplitDecoder` as None, so that a copied model splits its own arrays."""
        return type(None), ()

    def replace_arrays(self, ends: Leaves, blocks: tuple[Leaves, ...]) -> "SplitDecoder":
        """Return a copy of the `SplitDecoder` with other arrays `ends` and `blocks`, such as traced ones."""
        other = object.__new__(SplitDecoder)
        vars(other).update(vars(self), ends=ends, blocks=blocks)
        return other

    def is_split_of(self, decoder: Decoder) -> bool:
        """True if `decoder` still has the modules and arrays of this split; False after any was replaced."""
        # A server calls this at every step: it only does lookups, and does not walk through the modules.
        same = decoder is self._decoder and all(
            held.get(name) is part for held, name, part in self._parts
        )
        return same and all(parameter.get_raw_value() is array for parameter, array in self._source)


@dataclasses.dataclass(frozen=True, repr=False)
class ModuleGraph:
    """Static, hashable part of a split `nnx` module: its graph definition and its parameters' tree structure."""

    definition: Any
    structure: Any

    def __hash__(self) -> int:
        """Return the hash, computed once: programs are looked up by it at every call."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Hash of the fields."""
        return hash((self.definition, self.structure))

    def rebuild_module(self, leaves: Leaves) -> Any:
        """Rebuild the `nnx` module from this graph, with the arrays `leaves` as its parameters."""
        return nnx.merge(self.definition, jax.tree.unflatten(self.structure, leaves))


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DecoderGraphs:
    """Static graphs of a decoder's ends and blocks, with mesh axes and one layer's `LayerSpec`.

    Attributes:
        of_ends: graph of the ends.
        of_blocks: pairs of each distinct `LayerSpec` and the graph of its blocks.
        axes: mesh axes of the parameters; None on one device.
        spec: `LayerSpec` of the layer whose block is rebuilt.
    """

    of_ends: ModuleGraph
    of_blocks: tuple[tuple[LayerSpec, ModuleGraph], ...]
    axes: ShardingMesh | None
    spec: LayerSpec

    def replace_layer_spec(self, spec: LayerSpec) -> "DecoderGraphs":
        """Return a copy of the `DecoderGraphs` for a layer with another `LayerSpec`."""
        return dataclasses.replace(self, spec=spec)

    def rebuild_embedding_and_head(self, leaves: Leaves) -> EmbeddingAndHead:
        """Rebuild the module of embedding, final norm and output matrix, with the arrays `leaves` as its parameters."""
        bound = self.of_ends.rebuild_module(leaves)
        bound.axes = self.axes
        return bound

    def rebuild_block(self, leaves: Leaves) -> DecoderBlock:
        """Rebuild a `DecoderBlock` with the arrays `leaves` as its parameters; on a mesh, with one device's config."""
        bound = dict(self.of_blocks)[self.spec].rebuild_module(leaves)
        if self.axes is not None:
            shards = (self.axes.count_axis_shards(letter) for letter in "KH")
            local = bound.config.shard_config(*shards)
            for block in (bound, *bound.below):
                block.axes, block.config = self.axes, local
        return bound
