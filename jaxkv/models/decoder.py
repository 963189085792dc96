"""The decoder as a Flax NNX module: parameters and the arithmetic of one block; no cache, no loop over layers."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from jaxkv.attention.shaping import Shaping
from jaxkv.attention.xla import capped
from jaxkv.models.config import ModelConfig
from jaxkv.models.layers import (
    DenseMLP,
    LayerNorm,
    RMSNorm,
    add_linear,
    empty,
    linear,
    linear_parts,
    project,
    value_of,
)
from jaxkv.models.mixture import MixtureMLP
from jaxkv.models.rope import Angles, rotate
from jaxkv.models.stored import Stored
from jaxkv.models.values import LayerSpec
from jaxkv.sharding.collectives import first, total
from jaxkv.sharding.mesh import Axes

# Hidden states of several tokens per sequence.
Hidden = Float[Array, "B N E"]
# Parameters of a block, or of the ends, as a flat tuple, which is 8x cheaper to pass to jitted functions than a module.
Leaves = tuple[Shaped[Array, "..."], ...]
# Minimum and maximum tokens per block whose embeddings devices sum in one step: up to 34 MB for Llama 3 8B.
_SUMMED_AT_ONCE = 128, 4096


class Attention(nnx.Module):
    """Module of grouped-query attention's parameters (q, kv, out, biases, norms, sink logits); has no forward pass.

    Parameters: q `[K, G, D, E]`, kv `[2, K, D, E]`, out `[E, H*D]`, sink_logits `[K, G]`; query head h belongs to kv
    head h // G.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, weights: jnp.dtype):
        heads, group, dim = config.kv_heads, config.group, config.head_dim
        add_linear(self, "q", heads, group, dim, config.embed, dtype=weights)
        add_linear(self, "kv", 2, heads, dim, config.embed, dtype=weights)
        add_linear(self, "out", config.embed, config.heads * dim, dtype=weights)
        self.q_bias = empty(heads, group, dim, dtype=dtype) if config.qkv_bias else None
        self.kv_bias = empty(2, heads, dim, dtype=dtype) if config.qkv_bias else None
        self.out_bias = empty(config.embed, dtype=dtype) if config.out_bias else None
        self.sink_logits = empty(heads, group, dtype=dtype) if config.sink_logits else None
        kind: dict[str, Any] = {
            "eps": config.norm_eps,
            "dtype": dtype,
            "offset": float(config.norm_offset),
        }
        self.q_norm = RMSNorm(dim, **kind) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, **kind) if config.qk_norm else None
        self.q_gain = empty(heads, group, dim, dtype=dtype) if config.qk_gains else None
        self.k_gain = empty(heads, dim, dtype=dtype) if config.qk_gains else None


class Block(nnx.Module):
    """Transformer block in two halves, before and after attention; callers compute attention between them."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, weights: jnp.dtype):
        self.config = config
        self.axes: Axes | None = None
        self.spec = LayerSpec()
        before, after = config.norms != "after", config.norms != "before"
        self.attention_norm: Any = _norm(config, dtype) if before else None
        self.attention = Attention(config, dtype=dtype, weights=weights)
        self.attention_out_norm: Any = _norm(config, dtype) if after else None
        self.mlp_norm: Any = _norm(config, dtype) if before and not config.shared_norm else None
        self.mlp = _mlp(config, dtype, weights)
        self.mlp_out_norm: Any = _norm(config, dtype) if after else None

    def normed(self, x: Hidden) -> Hidden:
        """Return hidden states after the norm before attention, if the block has one."""
        return x if self.attention_norm is None else self.attention_norm(x)

    @property
    def sink_logits(self) -> Float[Array, "K G"] | None:
        """Sink logits in the softmax of each query head, without a value; None for most families."""
        return value_of(self.attention.sink_logits)

    @property
    def shaping(self) -> Shaping:
        """`Shaping` of the block's attention logits: softcap and sink logits."""
        return Shaping(softcap=self.spec.softcap, sink_logits=self.sink_logits)

    def queries(self, normed: Hidden, by: Angles) -> Float[Array, "B K G N D"]:
        """Return queries `[B, K, G, N, D]` after RoPE at the angles of their positions, in the dtype of `normed`."""
        return rotate(self.unrotated_queries(normed), by, normed.dtype)

    def unrotated_queries(self, normed: Hidden) -> Float[Array, "B K G N D"]:
        """Return queries `[B, K, G, N, D]` before RoPE; float32, or the norm's dtype for models with a query norm."""
        norm, gain = self.attention.q_norm, self.attention.q_gain
        # Queries without a norm are float32 until RoPE, which computes in float32, so that they are rounded only once.
        q = linear(self.attention, "q", normed, wide=norm is None and gain is None)
        if gain is not None:
            q = self._gained(q, gain[...], "H")
        return self._scaled(jnp.moveaxis(q if norm is None else norm(q), 1, 3))

    def _scaled(self, q: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
        """Scale queries so that q.k / sqrt(D) has the layer's own attention scale; unchanged for the default."""
        if self.spec.scale is None:
            return q
        return (q.astype(jnp.float32) * (self.spec.scale * math.sqrt(q.shape[-1]))).astype(q.dtype)

    def _gained(
        self, x: Float[Array, "B N *h"], gain: Float[Array, " *h"], letter: str
    ) -> Float[Array, "B N *h"]:
        """Normalise queries or keys with a weight per channel of each head: a layer norm per head, or over heads."""
        if not self.config.qk_layer_norm:
            return self._normed_over_heads(x, gain, letter)
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        return (
            centred * lax.rsqrt(variance + self.config.norm_eps) * gain.astype(jnp.float32)
        ).astype(x.dtype)

    def _normed_over_heads(
        self, x: Float[Array, "B N *h"], gain: Float[Array, " *h"], letter: str
    ) -> Array:
        """RMS norm over all heads' channels of each token; on a mesh, over all devices along `letter`."""
        wide, axes = x.astype(jnp.float32), tuple(range(2, x.ndim))
        count = gain.size * (1 if self.axes is None else self.axes.size(letter))
        square = total((wide * wide).sum(axis=axes, keepdims=True), self.axes, letter) / count
        return (wide * lax.rsqrt(square + self.config.norm_eps) * gain.astype(jnp.float32)).astype(
            x.dtype
        )

    def keys_values(
        self, normed: Hidden
    ) -> tuple[Float[Array, "B K N D"], Float[Array, "B K N D"]]:
        """Return keys before RoPE and values, each `[B, K, N, D]`; keys are float32, or in a key norm's dtype."""
        norm, gain = self.attention.k_norm, self.attention.k_gain
        kv = linear(self.attention, "kv", normed, wide=norm is None and gain is None)
        k, v = kv[:, :, 0], jnp.moveaxis(kv[:, :, 1], 1, 2)
        k = jnp.moveaxis(k if gain is None else self._gained(k, gain[...], "K"), 1, 2)
        return k if norm is None else norm(k), v.astype(normed.dtype)

    def parts(
        self, normed: Float[Array, "M 1 E"]
    ) -> tuple[Float[Array, "n M K G D"], Float[Array, "n M two K D"]]:
        """Return unrotated Q, and K and V, of one token per sequence, as n float32 partial sums (split-K) or one."""
        attention = self.attention
        # The barrier keeps XLA from merging both products into one and copying its halves.
        q = linear_parts(attention, "q", normed[:, 0])
        kv = linear_parts(attention, "kv", lax.optimization_barrier(normed)[:, 0])
        if attention.q_norm is None or attention.k_norm is None:
            return self._scaled(q), kv
        narrow = kv.sum(axis=0).astype(normed.dtype)
        kv = jnp.stack([attention.k_norm(narrow[:, 0]), narrow[:, 1]], axis=1)
        return self._scaled(attention.q_norm(q.sum(axis=0).astype(normed.dtype)))[None], kv[None]

    def finish(
        self, x: Hidden, attended: Float[Array, "B K G N D"], *, apart: bool = False
    ) -> Hidden:
        """Return hidden states `[B, N, E]` after attention's output projection, the MLP and the residual sums.

        With `apart`, the operands of a dense MLP's products are computed before the products, not fused into them.
        """
        merged = jnp.moveaxis(attended, 3, 1).reshape(*x.shape[:2], -1)
        how = {"apart": True} if apart and self.config.experts is None else {}
        if self.config.parallel:
            return self._finish_parallel(x, merged, how)
        added = linear(self.attention, "out", merged, wide=True, over=self.axes)
        wide = x.astype(jnp.float32) + self._joining(added, self.attention_out_norm)
        # Without a norm the MLP reads hidden states in the dtype in which they enter a block: the model's.
        read = wide.astype(x.dtype) if self.mlp_norm is None else self.mlp_norm(wide)
        return (wide + self._joining(self.mlp(read, self.axes, **how), self.mlp_out_norm)).astype(
            x.dtype
        )

    def _joining(self, added: Hidden, norm: Any) -> Hidden:
        """Scale attention's or the MLP's output for the residual stream, after its norm if there is one."""
        added = added if norm is None else norm(added).astype(jnp.float32)
        return added if self.config.residual_scale == 1 else added * self.config.residual_scale

    def _finish_parallel(
        self, x: Hidden, merged: Float[Array, "B N H"], how: dict[str, bool]
    ) -> Hidden:
        """Return hidden states after attention output and MLP are added to the residual stream in a parallel block."""
        normed = (self.attention_norm if self.mlp_norm is None else self.mlp_norm)(x)
        both = linear(self.attention, "out", merged, bias=False, wide=True) + self.mlp.part(
            normed, **how
        )
        added = total(both, self.axes)
        for bias in (self.attention.out_bias, getattr(self.mlp, "down_bias", None)):
            added = added if bias is None else added + bias[...].astype(jnp.float32)
        return (x.astype(jnp.float32) + self._joining(added, None)).astype(x.dtype)


# Typed Any: callers that use a specific norm's fields check `config.alternates` first.
def _norm(config: ModelConfig, dtype: jnp.dtype) -> Any:
    """Make an uninitialised norm over E of the model's family: a LayerNorm or an RMSNorm."""
    if config.layer_norm:
        return LayerNorm(config.embed, eps=config.norm_eps, dtype=dtype, bias=config.norm_bias)
    return RMSNorm(config.embed, eps=config.norm_eps, dtype=dtype, offset=float(config.norm_offset))


def _mlp(config: ModelConfig, dtype: jnp.dtype, weights: jnp.dtype) -> Any:
    if config.experts is not None:
        return MixtureMLP(config.embed, config.hidden, config.experts, dtype=dtype, weights=weights)
    return DenseMLP(config, dtype=dtype, weights=weights)


class Decoder(nnx.Module):
    """Decoder-only transformer: embedding, blocks, norm and output matrix; parameters are shapes until loaded.

    With `weights="int8"` linear maps are int8 codes and a scale per output; with "int4" they are 4-bit codes with a
    scale and a minimum per 32 codes. The embedding (which may also be the output matrix), norms, biases and a mixture's
    router are in `dtype`.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: Any = jnp.float32, weights: str | None = None
    ):
        self.config, self.weights = config, weights
        dtype = jnp.dtype(dtype)
        narrow = dtype if weights is None else jnp.dtype(weights)
        self.embedding = empty(config.vocab, config.embed, dtype=dtype)
        self.blocks = nnx.List(
            [Block(config, dtype=dtype, weights=narrow) for _ in range(config.layers)]
        )
        self.norm = _norm(config, dtype)
        # Flax decides by the first value whether an attribute is a parameter.
        if config.tied:
            self.head: nnx.Param | None = None
        else:
            add_linear(self, "head", config.vocab, config.embed, dtype=narrow)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights, activations and cache."""
        return self.embedding[...].dtype

    @property
    def nbytes(self) -> int:
        """Total size of all parameters in bytes."""
        return sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(self, nnx.Param))
        )


class Ends(nnx.Module):
    """The decoder's parts outside its blocks: embedding, final norm and output matrix."""

    def __init__(self, decoder: Decoder):
        self.embedding, self.norm, self.head = decoder.embedding, decoder.norm, decoder.head
        for each in ("head_scale", "head_scales", "head_leasts"):
            setattr(self, each, getattr(decoder, each, None))
        self.axes: Axes | None = None
        self.config = decoder.config

    def embed(self, tokens: Int[Array, "B N"], *, in_blocks: bool = False) -> Hidden:
        """Return embeddings `[B, N, E]` of token ids; ids outside the vocabulary are clipped, so callers reject them.

        On a mesh with `in_blocks`, devices sum the embeddings of one block of tokens at a time. libtpu of JAX 0.12
        needs two more copies of what is summed, 2.1 GB for 4 prompts of 32,768 tokens of Llama 3 8B.
        """
        table = self.embedding[...]
        least, most = _SUMMED_AT_ONCE
        size = math.gcd(tokens.size, most)
        if in_blocks and self.axes is not None and least <= size < tokens.size:
            found = lax.map(lambda some: self._rows_of(table, some), tokens.reshape(-1, 1, size))
            found = found.reshape(*tokens.shape, -1)
        else:
            found = self._rows_of(table, tokens)
        # Rounded to the model's dtype first, as Gemma's is.
        scale = self.config.embedding_scale
        return found if scale == 1 else found * jnp.asarray(scale, found.dtype)

    def _rows_of(self, table: Float[Array, "V E"], tokens: Int[Array, "B N"]) -> Hidden:
        """Gather rows `[B, N, E]` of the embedding; on a mesh, from the devices that hold them."""
        if self.axes is None:
            return jnp.take(table, tokens, axis=0, mode="clip")
        row = tokens - first("V", table.shape[0], self.axes)
        mine = (row >= 0) & (row < table.shape[0])
        found = jnp.take(table, row, axis=0, mode="clip")
        return total(jnp.where(mine[..., None], found, jnp.zeros_like(found)), self.axes)

    def logits(self, x: Float[Array, "B E"]) -> Float[Array, "B V"]:
        """Return float32 logits of hidden states `[B, E]` after the final norm; on a mesh, this device's shard of V."""
        return self.logits_of(self.norm(x))

    def logits_of(self, normed: Float[Array, "B E"]) -> Float[Array, "B V"]:
        """Return float32 logits of normed hidden states; on a mesh, this device's shard of V."""
        logits = (
            project(normed, Stored(self.embedding[...]))
            if self.head is None
            else linear(self, "head", normed)
        )
        logits, scale = logits.astype(jnp.float32), self.config.logit_scale
        return capped(logits if scale == 1 else logits * scale, self.config.logit_softcap)


def parts_of(module: nnx.Module) -> Iterator[tuple[dict[str, Any], str, nnx.Module | nnx.Param]]:
    """Yield (owner's attributes, name, part) for each nested module and parameter, modules before their parts."""
    held = vars(module)
    for name, part in held.items():
        if isinstance(part, (nnx.Param, nnx.Module)):
            yield held, name, part
        if isinstance(part, nnx.Module):
            yield from parts_of(part)


def named_parameters(module: nnx.Module, prefix: str = "") -> Iterator[tuple[str, nnx.Param]]:
    """Yield (path, `nnx.Param`) for every parameter of a module; a path is such as `blocks.0.attention.q`."""
    for name, part in vars(module).items():
        if isinstance(part, nnx.Param):
            yield f"{prefix}{name}", part
        elif isinstance(part, nnx.Module):
            yield from named_parameters(part, f"{prefix}{name}.")


class Flat:
    """Decoder split for jitted code: static `graphs`, and flat tuples of parameter arrays of its `ends` and `blocks`.

    Attributes:
        ends: parameters of embedding, final norm and output matrix.
        blocks: one tuple of parameters per block, all of the same structure.
        graphs: graph definitions of the ends and of the first block, passed as static arguments.
        config: the decoder's config.
        axes: axes of the parameters' mesh, or None.
        on_mesh: the language model with these parameters on a mesh, by the mesh's axes.
        gates: gate weights of policies on the parameters' devices, by gate and layer, in order of last use.
    """

    def __init__(self, decoder: Decoder):
        self.config = decoder.config
        self.on_mesh: dict[Axes, Any] = {}
        self.gates: dict[Any, dict[int, Any]] = {}
        self._decoder, self._parts = decoder, tuple(parts_of(decoder))
        self._source = tuple(
            (part, part.get_raw_value()) for *_, part in self._parts if isinstance(part, nnx.Param)
        )
        ends_graph, ends = nnx.split(Ends(decoder))
        self.ends: Leaves = tuple(jax.tree.leaves(ends))
        parts = [nnx.split(block) for block in decoder.blocks]
        self.blocks: tuple[Leaves, ...] = tuple(tuple(jax.tree.leaves(state)) for _, state in parts)
        self.axes = Axes.of(self.ends[0])
        self.graphs = Graphs(
            of_ends=Graph(ends_graph, jax.tree.structure(ends)),
            of_block=Graph(parts[0][0], jax.tree.structure(parts[0][1])),
            axes=self.axes,
            spec=self.config.spec_of(0),
        )

    @property
    def mesh(self) -> Mesh | None:
        """Mesh of the parameters, or None."""
        return None if self.axes is None else self.axes.mesh

    def graphs_of(self, layer: int) -> "Graphs":
        """Return the static `Graphs` for the compiled functions of one layer; equal for layers with equal specs."""
        return self.graphs.of(self.config.spec_of(layer))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle and copy as None, so that a copied model splits its own arrays."""
        return type(None), ()

    def around(self, ends: Leaves, blocks: tuple[Leaves, ...]) -> "Flat":
        """Return a copy with other parameter arrays `ends` and `blocks`, such as traced ones."""
        other = object.__new__(Flat)
        vars(other).update(vars(self), ends=ends, blocks=blocks)
        return other

    def is_of(self, decoder: Decoder) -> bool:
        """True if `decoder` still holds the arrays of this split; False after training replaced some."""
        # A server calls this at every step: it only does lookups, and does not walk through the modules.
        same = decoder is self._decoder and all(
            held.get(name) is part for held, name, part in self._parts
        )
        return same and all(parameter.get_raw_value() is array for parameter, array in self._source)


@dataclasses.dataclass(frozen=True, repr=False)
class Graph:
    """Static, hashable half of a split module: its graph definition and the tree structure of its parameters."""

    definition: Any
    structure: Any

    def bind(self, leaves: Leaves) -> Any:
        """Rebuild the module from this graph, with `leaves` as its parameters; cheap enough to call inside a trace."""
        return nnx.merge(self.definition, jax.tree.unflatten(self.structure, leaves))


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Graphs:
    """Static description of a decoder: a `Graph` of the ends and one of a block, mesh axes, the block's layer spec.

    Attributes:
        of_ends: graph of the ends.
        of_block: graph of a block.
        axes: mesh axes of the parameters; None on one device.
        spec: `LayerSpec` of the block's layer.
    """

    of_ends: Graph
    of_block: Graph
    axes: Axes | None
    spec: LayerSpec

    def of(self, spec: LayerSpec) -> "Graphs":
        """Return a copy of these graphs with another layer spec for the block."""
        return dataclasses.replace(self, spec=spec)

    def ends(self, leaves: Leaves) -> Ends:
        """Rebuild the `Ends` module with `leaves` as its parameters."""
        bound = self.of_ends.bind(leaves)
        bound.axes = self.axes
        return bound

    def block(self, leaves: Leaves) -> Block:
        """Rebuild the `Block` module with `leaves` as its parameters; on a mesh, with one device's config."""
        bound = self.of_block.bind(leaves)
        bound.spec = self.spec
        if self.axes is not None:
            bound.axes, bound.config = (
                self.axes,
                bound.config.on_one_of(self.axes.size("K"), self.axes.size("H")),
            )
        return bound
