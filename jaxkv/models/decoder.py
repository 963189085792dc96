"""The decoder as a Flax NNX module: embedding, blocks, norm and output matrix; no cache, no loop over layers."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.attention.xla import apply_softcap
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder_blocks import DecoderBlock, Hidden, make_norm
from jaxkv.models.folded_block import FoldedBlock
from jaxkv.models.latent_block import LatentBlock
from jaxkv.models.layers import (
    add_linear_weight,
    apply_linear,
    make_empty_parameter,
)
from jaxkv.models.values import FoldedLayerSpec, LayerSpec
from jaxkv.sharding.collectives import get_shard_offset, sum_over_devices
from jaxkv.sharding.mesh import ShardingMesh

# Minimum and maximum tokens per block whose embeddings devices sum in one step: up to 34 MB for Llama 3 8B.
_SUMMED_AT_ONCE = 128, 4096


def _choose_block(config: ModelConfig, spec: LayerSpec) -> type[DecoderBlock]:
    """Return the class of a layer's block."""
    if config.latent is not None:
        return LatentBlock
    return FoldedBlock if isinstance(spec, FoldedLayerSpec) else DecoderBlock


class Decoder(nnx.Module):
    """Decoder-only transformer as a module of parameters: embedding, blocks, norm, output matrix; shapes until loaded.

    With `weights="int8"` linear maps are int8 codes and a scale per output; with "int4" they are 4-bit codes with a
    scale and a minimum per 32 codes. The embedding (which may also be the output matrix), norms, biases, a mixture's
    router and shared gate, a latent's key_up and value_up, and a delta net's rd and taps are in `dtype`; a mixture's
    correction, and some families' routers, are float32.
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
        self.norm = make_norm(config, dtype)
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
        name = "embedding" if self.head is None else "head"
        logits = apply_linear(self, name, normed).astype(jnp.float32)
        scale = self.config.logit_scale
        return apply_softcap(logits if scale == 1 else logits * scale, self.config.logit_softcap)


def named_parameters(module: nnx.Module, prefix: str = "") -> Iterator[tuple[str, nnx.Param]]:
    """Yield (path, `nnx.Param`) of every parameter of a module; a path is such as `blocks.0.attention.q`."""
    for name, part in vars(module).items():
        if isinstance(part, nnx.Param):
            yield f"{prefix}{name}", part
        elif isinstance(part, nnx.Module):
            yield from named_parameters(part, f"{prefix}{name}.")
