"""`ModelConfig`: sizes and family switches of a decoder, made from a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from jaxkv._checks import require_instance, validate_int, validate_optional_field
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.checkpoints.hub_config import Config
from jaxkv.checkpoints.text_part import extract_text_config
from jaxkv.models.hub import read_config_fields
from jaxkv.models.values import (
    ACTIVATIONS,
    DeltaNetSpec,
    ExpertsConfig,
    FoldedLayerSpec,
    LatentConfig,
    LayerSpec,
    LongRope,
    Rope,
    check_number_fields,
    compute_channel_order,
    count_rotated_channels,
)
from jaxkv.sharding.mesh import ShardingMesh

# Sliding window of each layer in tokens, None for full attention.
SlidingWindows = tuple[int | None, ...]


@frozen_dataclass
class ModelConfig:
    """Static config of a decoder-only transformer: sizes, and switches for what differs between model families.

    Attributes:
        vocab: tokens in the vocabulary, V.
        layers: number of layers with entries, L; `kinds` says which layers with a state run directly before each.
        embed: width of the residual stream, E.
        hidden: width of the MLP, or of one expert, F; a spec of `kinds` may give its layers another.
        heads: query heads, H = K * G.
        kv_heads: kv heads, K.
        head_dim: D, an even number; folded layers of `kinds` have another.
        norm_eps: epsilon of every norm.
        rope: the rotary embedding of all layers, unless `kinds` is given.
        kinds: specs of layers that differ, repeated in turn: layer i has `kinds[i % len(kinds)]`; else empty.
        max_positions: longest supported sequence in tokens, including new ones.
        tied: the output matrix is the embedding.
        qkv_bias: query, key and value projections have biases (Qwen2).
        out_bias: the attention's output projection has a bias.
        mlp_bias: the MLP's projections have biases.
        attention_gate: attention's output is multiplied by the sigmoid of a projection of its input (Qwen3.5).
        head_bias: the output matrix has a bias (PhiMoE).
        sink_logits: each query head has a sink logit in its softmax, without a value (gpt-oss).
        qk_norm: queries and keys are RMS-normalised per head before rotation (Qwen3).
        qk_norm_rotated: the weights of these norms multiply rotated queries and keys (Hunyuan).
        value_norm: values are RMS-normalised per head, without weights (Gemma 4).
        qk_norm_wide: queries and keys are RMS-normalised over all heads together (OLMo 2).
        qk_layer_norm: queries and keys are layer-normalised per head, with weights per head and no biases (Command R+).
        interleaved: checkpoints store channels that rotate together as neighbours (GLM-4, Cohere); loading reorders
            them.
        norms: position of a block's norms: "before" attention and MLP, "after" them (OLMo 2), or "both" (GLM-4).
        layer_norm: norms subtract the mean (Falcon, Cohere); otherwise they are RMS norms.
        norm_bias: layer norms add a bias (Falcon).
        norm_offset: RMS norms multiply by 1 plus their weights (Gemma).
        parallel: the MLP reads the block's input, without the attention output (Falcon, Cohere).
        shared_norm: attention and a parallel MLP share one norm.
        gated: the MLP is down(activation(gate) * up); otherwise down(activation(up)) (Falcon).
        activation: activation of the MLP: "silu", "gelu", "gelu_tanh" (GELU by tanh), "relu2" (squared ReLU), "xielu"
            (with learned numbers, Apertus).
        embedding_scale: factor of embeddings.
        residual_scale: factor of the outputs of attention and MLP (Granite).
        block_multiplier: a learned number multiplies the output of each block (Gemma 4).
        logit_scale: factor of logits.
        logit_softcap: c, which maps scaled logits to c * tanh(logit / c); None for none (Gemma 2).
        experts: the mixture of experts that replaces the MLP of every block without a `dense_hidden`, or None.
        latent: multi-head latent attention (DeepSeek-V2): one kv head, whose key of `latent.entry_dim` channels is also
            the value; None for keys and values per head.
        bos: id of the beginning-of-sequence token, or None.
        eos: ids of the tokens that end a generation.
    """

    vocab: int
    layers: int
    embed: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope: Rope = Rope()
    kinds: tuple[LayerSpec, ...] = ()
    max_positions: int = 2048
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    attention_gate: bool = False
    head_bias: bool = False
    sink_logits: bool = False
    qk_norm: bool = False
    qk_norm_rotated: bool = False
    value_norm: bool = False
    qk_norm_wide: bool = False
    qk_layer_norm: bool = False
    interleaved: bool = False
    norms: str = "before"
    layer_norm: bool = False
    norm_bias: bool = True
    norm_offset: bool = False
    parallel: bool = False
    shared_norm: bool = False
    gated: bool = True
    activation: str = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    block_multiplier: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_number_fields(self)
        validate_optional_field(self, "bos", validate_int, least=0)
        ids = require_instance("eos", self.eos, Iterable, "give token ids, such as (2,)")
        object.__setattr__(self, "eos", tuple(validate_int("eos", each, least=0) for each in ids))
        for name, holds, remedy in self._yield_field_rules():
            require(holds, name, getattr(self, name), remedy)
        self._check_rotated_channels()

    def _check_rotated_channels(self) -> None:
        """Raise ValueError unless all layers rotate the same even number of channels, and LongRoPE's lists fit it."""
        ropes = {self.get_layer_spec(layer).rope for layer in range(max(1, len(self.kinds)))}
        shares = {rope.share for rope in ropes}
        remedy = "layers differ in the order of channels: give all the same"
        require(len(shares) == 1, "share", sorted(shares), remedy)
        count = min(count_rotated_channels(rope, self.head_dim) for rope in ropes)
        remedy = (
            f"{count} of head_dim={self.head_dim} channels are rotated: give an even "
            "number of 2 or more"
        )
        require(count >= 2 and count % 2 == 0, "share", min(shares), remedy)
        dims = {(spec.rope, spec.get_head_dim(self.head_dim)) for spec in self.kinds}
        apart = len(dims) <= len(ropes)
        remedy = "one rotary embedding in layers of two head dims is not supported: give them two"
        require(apart, "kinds", sorted(dim for _, dim in dims), remedy)
        for rope in ropes:
            given = len(rope.short_factor) if isinstance(rope, LongRope) else count // 2
            remedy = (
                f"wrong length: give one number for each pair of the {count} rotated "
                f"channels: {count // 2}"
            )
            require(given == count // 2, "short_factor and long_factor", f"{given} numbers", remedy)

    def _yield_field_rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield (field name, True if it holds, remedy) for each rule on values of `ModelConfig` fields."""
        alone = not self.kinds or self.rope == Rope()
        yield "rope", alone, "each of kinds has its own: omit rope"
        whole_groups = self.heads % self.kv_heads == 0
        yield "heads", whole_groups, f"give a multiple of kv_heads={self.kv_heads}"
        yield "head_dim", self.head_dim % 2 == 0, "odd: rotary embeddings need an even one"
        known = self.norms in ("before", "after", "both")
        yield "norms", known, "give 'before', 'after' or 'both'"
        before = self.norms == "before" or not self.parallel
        yield "norms", before, "parallel blocks need 'before'"
        rms = not (self.norm_offset and self.layer_norm)
        yield "norm_offset", rms, "only RMS norms support it: give layer_norm=False"
        one = self.qk_norm + self.qk_norm_wide + self.qk_layer_norm < 2
        yield "qk_norm", one, "exclusive: keep one of qk_norm, qk_norm_wide, qk_layer_norm"
        normed = self.qk_norm or not self.qk_norm_rotated
        yield "qk_norm_rotated", normed, "there are no norms: give qk_norm=True"
        apart = not (self.head_bias and self.tied)
        yield "head_bias", apart, "the embedding has no bias: give tied=False"
        named = self.activation in ACTIVATIONS
        yield "activation", named, f"not supported: give one of {', '.join(ACTIVATIONS)}"
        shared = self.parallel or not self.shared_norm
        remedy = "only a parallel MLP can share attention's norm: give parallel=True"
        yield "shared_norm", shared, remedy
        serial = not (self.parallel and self.block_multiplier)
        yield "block_multiplier", serial, "not supported in parallel blocks: omit it"
        folded, group = self.heads_per_entry, self.group_size
        # Of one device the queries may be a part of those of a head.
        whole = group % folded == 0 or folded % group == 0
        fits = folded == 1 or (whole and not self.has_qk_gains and self.latent is None)
        remedy = (
            f"{folded} heads share an entry: give heads as a multiple of {folded * self.kv_heads}, "
            "without latent, qk_norm_wide and qk_layer_norm"
        )
        yield "kinds", fits, remedy
        own = any(isinstance(each, FoldedLayerSpec) for each in self.kinds)
        remedy = "not supported in layers with their own head dim: omit it"
        yield "interleaved", not (own and self.interleaved), remedy
        if self.experts is not None:
            known = self.activation == "silu" or (
                self.activation != "xielu" and self.experts.limit is None
            )
            plain = self.gated and known and not self.mlp_bias
            remedy = (
                "experts are gated, have their own biases, no xielu, and a limit with silu alone: "
                "omit gated, activation and mlp_bias"
            )
            yield "experts", plain, remedy
            between = self.norms == "both" and not self.layer_norm and self.experts.shared
            remedy = "own_norms needs norms='both', layer_norm=False and a shared MLP"
            yield "experts", bool(between) or not self.experts.own_norms, remedy
            alone = not (self.experts.bias and self.parallel)
            remedy = "biases of experts are not supported in parallel blocks: give bias=False"
            yield "experts", alone, remedy
        if self.latent is not None:
            fits = self.kv_heads == 1 and self.head_dim == self.latent.entry_dim
            remedy = f"its entries need kv_heads=1 and head_dim={self.latent.entry_dim}"
            yield "latent", fits, remedy
            added = self.qkv_bias or self.out_bias or self.sink_logits or self.attention_gate
            normed = self.qk_norm or self.has_qk_gains or self.value_norm
            remedy = (
                "biases, sink logits, a gate and norms of queries, keys or values are not "
                "supported with it: omit these"
            )
            yield "latent", not (added or normed), remedy
            serial = self.norms == "before" and not self.parallel
            yield "latent", serial, "it needs serial blocks with norms='before'"

    @property
    def has_llama_blocks(self) -> bool:
        """True if blocks suit fused steps: serial, RMS norm first, dense SwiGLU; no residual scale, gains, latents."""
        mlp = (
            self.gated
            and self.activation == "silu"
            and self.experts is None
            and self.latent is None
        )
        plain = mlp and self.residual_scale == 1 and not self.block_multiplier
        plain = plain and not any(
            each.values_from_keys or isinstance(each, FoldedLayerSpec) for each in self.kinds
        )
        norms = self.norms == "before" and not (self.layer_norm or self.norm_offset)
        scaled = self.has_qk_gains or self.qk_norm_rotated or self.value_norm
        special = self.parallel or scaled or self.attention_gate or self.state_bytes
        return plain and norms and not special

    @property
    def has_qk_gains(self) -> bool:
        """True if query and key norms have a weight per channel of each head, not one set shared by all heads."""
        return self.qk_norm_wide or self.qk_layer_norm

    def get_layer_spec(self, layer: int) -> LayerSpec:
        """Return the `LayerSpec` of a layer: its rotary embedding, attention scale, sliding window and softcap.

        Args:
            layer: index of the layer.

        Returns:
            The spec; layers with equal specs share compiled programs.
        """
        return self.kinds[layer % len(self.kinds)] if self.kinds else _get_plain_spec(self.rope)

    @property
    def entry_dims(self) -> tuple[int, ...]:
        """D of each layer, as a tuple of L: `head_dim`, but for folded layers."""
        specs = map(self.get_layer_spec, range(self.layers))
        return tuple(spec.get_entry_dim(self.head_dim) for spec in specs)

    @property
    def heads_per_entry(self) -> int:
        """Maximum number of heads in an entry: 1 without folded layers."""
        return max(
            (each.folded for each in self.kinds if isinstance(each, FoldedLayerSpec)), default=1
        )

    @property
    def sliding_windows(self) -> SlidingWindows:
        """Sliding window of each layer in tokens, as a tuple of L; None for full attention."""
        return tuple(self.get_layer_spec(layer).sliding_window for layer in range(self.layers))

    @property
    def blocks(self) -> int:
        """Number of blocks of the decoder: layers with entries, and layers with a state."""
        return self.layers + len(self.state_layers)

    @property
    def state_layers(self) -> tuple[DeltaNetSpec, ...]:
        """Specs of all layers with a state, in order."""
        return tuple(
            each for layer in range(self.layers) for each in self.get_layer_spec(layer).below
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in all layers that have one; 0 if none has."""
        return sum(each.state_bytes for each in self.state_layers)

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Widths F of all MLPs, sorted: of dense layers, of an expert, of shared experts."""
        widths = {self.get_layer_spec(layer).dense_hidden for layer in range(self.layers)}
        if None in widths:
            widths |= {self.hidden, None if self.experts is None else self.experts.shared}
        return tuple(sorted(each for each in widths if each is not None))

    @property
    def group_size(self) -> int:
        """Number of query heads that share a kv head, G."""
        return self.heads // self.kv_heads

    @property
    def entry_elements(self) -> tuple[int, ...]:
        """Numbers in an entry of one kv head by layer: a key's and a value's, or those of a latent, which is both."""
        return tuple((2 if self.latent is None else 1) * dim for dim in self.entry_dims)

    @property
    def prompt_head_dim(self) -> int:
        """Head dim of attention within a prompt: D, or for latents that of projected keys or values if wider."""
        return (
            self.head_dim if self.latent is None else max(self.latent.query_dim, self.latent.value)
        )

    @property
    def expanded_elements(self) -> int:
        """Numbers in a token's keys and values of all heads, projected from its latent within a prompt; else 0."""
        return 0 if self.latent is None else 2 * self.heads * self.prompt_head_dim

    @property
    def channel_permutation(self) -> tuple[int, ...] | None:
        """Checkpoint index of each loaded query and key channel, D integers; None if the order is the same."""
        order = compute_channel_order(
            self.get_layer_spec(0).rope, self.head_dim, interleaved=self.interleaved
        )
        return None if order == tuple(range(self.head_dim)) else order

    def get_device_config(self, axes: ShardingMesh | None) -> ModelConfig:
        """Return the config of one device's shard of the model on a mesh; this config without a mesh."""
        if axes is None:
            return self
        return self.shard_config(axes.count_axis_shards("K"), axes.count_axis_shards("H"))

    def shard_config(self, kv: int, model: int) -> ModelConfig:
        """Return one device's config: kv heads divided by `kv`; other heads, MLP widths and vocabulary by `model`."""

        def shard(of: Any, name: str) -> Any:
            width = getattr(of, name, None)
            return of if width is None else dataclasses.replace(of, **{name: width // model})

        kinds = tuple(
            dataclasses.replace(
                shard(kind, "dense_hidden"),
                below=tuple(each.shard_heads(model) for each in kind.below),
            )
            for kind in self.kinds
        )
        return dataclasses.replace(
            self,
            kinds=kinds,
            kv_heads=self.kv_heads // kv,
            heads=self.heads // model,
            hidden=self.hidden // model,
            vocab=self.vocab // model,
            experts=shard(self.experts, "shared"),
        )

    def limit_positions(self, max_positions: int) -> ModelConfig:
        """Return a `ModelConfig` with lower `max_positions` and LongRoPE's list for it; ValueError if above.

        Args:
            max_positions: tokens of the longest sequence, including new ones; at most this config's.

        Returns:
            A copy. Other rotary embeddings, and LongRoPE's attention factor, are unchanged.

        Raises:
            ValueError: if it is not an integer from 1 to this config's `max_positions`.
        """
        most = validate_int("max_positions", max_positions, most=self.max_positions)
        kinds = tuple(
            dataclasses.replace(each, rope=_limit_rope_positions(each.rope, most))
            for each in self.kinds
        )
        return dataclasses.replace(
            self, rope=_limit_rope_positions(self.rope, most), kinds=kinds, max_positions=most
        )

    @classmethod
    def from_hf(cls, config: Config) -> ModelConfig:
        """Build a `ModelConfig` from a parsed `config.json`, of an image model's text part; ValueError if unsupported.

        A missing key has the default of the family's config class in transformers.

        Args:
            config: the parsed JSON; for a model with image inputs, its text model is built.

        Returns:
            The configuration.

        Raises:
            ValueError: for a model type, activation, RoPE type or key that is not supported; the message names it.
        """
        return cls(**read_config_fields(extract_text_config(config)))


@functools.cache
def _get_plain_spec(rope: Rope) -> LayerSpec:
    """Return the `LayerSpec` of all layers of a model whose config lists no `kinds`."""
    return LayerSpec(rope=rope)


def _limit_rope_positions(rope: Rope, positions: int) -> Rope:
    """Return a LongRoPE that selects its list for at most `positions` tokens; other rotary embeddings unchanged."""
    if not isinstance(rope, LongRope):
        return rope
    return dataclasses.replace(rope, long=positions > rope.original_max_position)
