"""`ModelConfig`: sizes and family switches of a decoder, made from a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxkv._checks import whole
from jaxkv._errors import require
from jaxkv.checkpoints.hub_config import Config
from jaxkv.checkpoints.text_part import text_config
from jaxkv.models.hub import read
from jaxkv.models.values import (
    Experts,
    LayerSpec,
    LongRope,
    Rope,
    channel_order,
    check_numbers,
)

# Width of each layer's window in tokens, None for layers that attend to the whole prompt.
SlidingWindows = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Static config of a decoder-only transformer: its sizes and its family's switches.

    Attributes:
        vocab: tokens in the vocabulary, V.
        layers: L.
        embed: width of the residual stream, E.
        hidden: width of the MLP, of one expert where there are several, F.
        heads: query heads, H = K * G.
        kv_heads: kv heads, K.
        head_dim: D; even.
        norm_eps: epsilon of every norm.
        rope: the rotary embedding of all layers, unless `kinds` is given.
        kinds: specs of layers that differ, repeated in turn: layer i has `kinds[i % len(kinds)]`; else empty.
        max_positions: longest sequence the model was made for, new tokens included.
        tied: the output matrix is the embedding.
        qkv_bias: query, key and value projections carry a bias (Qwen2).
        out_bias: the attention's output projection carries a bias.
        mlp_bias: the MLP's projections carry biases.
        sink_logits: each query head has a learned logit that takes part in its softmax, without a value (gpt-oss).
        qk_norm: queries and keys are RMS-normalised per head before rotation (Qwen3).
        qk_norm_wide: they are RMS-normalised over all heads together (OLMo 2).
        qk_layer_norm: they are layer-normalised per head, with weights of each head and without biases (Command R+).
        interleaved: checkpoints have channels that rotate together as neighbours (GLM-4, Cohere); loading parts them.
        norms: where a block's norms stand: "before" attention and MLP, "after" them (OLMo 2), or "both" (GLM-4).
        layer_norm: norms subtract the mean (Falcon, Cohere); otherwise they are RMS norms.
        norm_bias: layer norms add a bias (Falcon).
        norm_offset: RMS norms multiply by 1 plus their weights (Gemma).
        parallel: the MLP reads the input of the block, without the attention output (Falcon, Cohere).
        shared_norm: attention and a parallel MLP share one norm instead of one each.
        gated: the MLP is down(silu(gate) * up), or with `tanh_gelu`; otherwise down(gelu(up)) (Falcon).
        tanh_gelu: a gated MLP has the GELU by a hyperbolic tangent in place of silu (Gemma).
        embedding_scale: factor on embeddings.
        residual_scale: factor on what attention and MLP add to the residual stream (Granite).
        logit_scale: factor on logits.
        logit_softcap: c, for scaled logits that become c * tanh(logit / c); None for none (Gemma 2).
        experts: the mixture of experts that every block's MLP is, or None (Mixtral, Qwen3-MoE, gpt-oss).
        bos: id of the beginning-of-sequence token, if any.
        eos: ids that end a generation.
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
    sink_logits: bool = False
    qk_norm: bool = False
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
    tanh_gelu: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    experts: Experts | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self)
        ids = (*self.eos, *(() if self.bos is None else (self.bos,)))
        for each in ids:
            whole("bos or eos", each, least=0)
        object.__setattr__(self, "eos", tuple(map(int, self.eos)))
        object.__setattr__(self, "kinds", tuple(self.kinds))
        for name, holds, remedy in self._rules():
            require(holds, name, getattr(self, name), remedy)
        self._check_ropes()

    def _check_ropes(self) -> None:
        """Raise ValueError where layers rotate other channels, or no whole pairs of them."""
        ropes = {self.spec_of(layer).rope for layer in range(max(1, len(self.kinds)))}
        shares = {rope.share for rope in ropes}
        remedy = "layers share one order of channels: give all the same"
        require(len(shares) == 1, "share", sorted(shares), remedy)
        count = int(self.head_dim * min(shares))
        remedy = f"{count} of head_dim={self.head_dim} channels are rotated: an even number of 2 or more is needed"
        require(count >= 2 and count % 2 == 0, "share", min(shares), remedy)
        for rope in ropes:
            given = len(rope.short_factor) if isinstance(rope, LongRope) else count // 2
            remedy = f"give one for each pair of the {count} rotated channels: {count // 2}"
            require(given == count // 2, "short_factor and long_factor", f"{given} numbers", remedy)

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield each rule of fields that go together: a field's name, whether it holds, and the remedy."""
        alone = not self.kinds or self.rope == Rope()
        yield "rope", alone, "each of kinds says its own: leave rope out"
        whole_groups = self.heads % self.kv_heads == 0
        yield "heads", whole_groups, f"give a multiple of kv_heads={self.kv_heads}"
        yield "head_dim", self.head_dim % 2 == 0, "rotary embeddings need an even head_dim"
        known = self.norms in ("before", "after", "both")
        yield "norms", known, "give 'before', 'after' or 'both'"
        before = self.norms == "before" or not self.parallel
        yield "norms", before, "parallel blocks have them before attention and MLP"
        rms = not (self.norm_offset and self.layer_norm)
        yield "norm_offset", rms, "it is one of RMS norms: give layer_norm=False"
        normed = self.qk_norm or self.qk_norm_wide
        one = self.qk_norm + self.qk_norm_wide + self.qk_layer_norm < 2
        yield "qk_norm", one, "give one of qk_norm, qk_norm_wide, qk_layer_norm"
        ordered = not normed or self.channels is None
        remedy = "RMS norms of queries and keys are read in the checkpoint's order: not built"
        yield "interleaved", ordered, remedy
        gated = not self.tanh_gelu or (self.gated and self.experts is None)
        yield "tanh_gelu", gated, "it is one of gated MLPs without experts"
        shared = self.parallel or not self.shared_norm
        remedy = "only a parallel MLP can read attention's norm: give parallel=True"
        yield "shared_norm", shared, remedy
        if self.experts is not None:
            plain = self.gated and not self.mlp_bias
            remedy = "experts are gated, and have biases of their own: leave gated and mlp_bias out"
            yield "experts", plain, remedy
            alone = not (self.experts.bias and self.parallel)
            remedy = "biases of experts are not built in parallel blocks: give bias=False"
            yield "experts", alone, remedy

    @property
    def alternates(self) -> bool:
        """True if blocks alternate RMS norms with attention and SwiGLU MLPs as Llama's do, which fused steps need."""
        plain = (
            self.gated and not self.tanh_gelu and self.experts is None and self.residual_scale == 1
        )
        norms = self.norms == "before" and not (self.layer_norm or self.norm_offset)
        return plain and norms and not (self.parallel or self.qk_gains)

    @property
    def qk_gains(self) -> bool:
        """True if each channel of each head has a weight of its own in the norms of queries and keys."""
        return self.qk_norm_wide or self.qk_layer_norm

    def spec_of(self, layer: int) -> LayerSpec:
        """`LayerSpec` of a layer: its rotary embedding, its attention's scale, window and cap.

        Args:
            layer: index of the layer.

        Returns:
            The spec; layers with equal specs share compiled programs.
        """
        return self.kinds[layer % len(self.kinds)] if self.kinds else LayerSpec(rope=self.rope)

    @property
    def sliding_windows(self) -> SlidingWindows:
        """Width of each layer's window in tokens, None for layers that attend to the whole prompt."""
        return tuple(self.spec_of(layer).sliding_window for layer in range(self.layers))

    @property
    def group(self) -> int:
        """Number of query heads per kv head, G."""
        return self.heads // self.kv_heads

    @property
    def channels(self) -> tuple[int, ...] | None:
        """A checkpoint's channels of queries and keys in the order of loaded weights, D indices; None if it is one."""
        order = channel_order(self.spec_of(0).rope, self.head_dim, interleaved=self.interleaved)
        return None if order == tuple(range(self.head_dim)) else order

    def on_one_of(self, kv: int, model: int) -> ModelConfig:
        """Config of one device's shard: kv heads divided by `kv`; query heads, MLP width and vocabulary by `model`."""
        return dataclasses.replace(
            self,
            kv_heads=self.kv_heads // kv,
            heads=self.heads // model,
            hidden=self.hidden // model,
            vocab=self.vocab // model,
        )

    def within(self, max_positions: int) -> ModelConfig:
        """Config for sequences of at most `max_positions` tokens, whose LongRoPE takes the list for that length.

        Args:
            max_positions: tokens of the longest sequence, new ones included; at most those of this config.

        Returns:
            A copy. Other rotary embeddings, and LongRoPE's attention factor, are those of this config.

        Raises:
            ValueError: for no integer from 1 to this config's `max_positions`.
        """
        most = whole("max_positions", max_positions, most=self.max_positions)
        kinds = tuple(
            dataclasses.replace(each, rope=_within(each.rope, most)) for each in self.kinds
        )
        return dataclasses.replace(
            self, rope=_within(self.rope, most), kinds=kinds, max_positions=most
        )

    @classmethod
    def from_hf(cls, config: Config) -> ModelConfig:
        """Build a `ModelConfig` from a parsed Hugging Face `config.json`; ValueError for unknown keys and values.

        A key that is left out means what transformers' config class of the family makes of it.

        Args:
            config: the parsed JSON; of a model that also takes images, its text model is built.

        Returns:
            The configuration.

        Raises:
            ValueError: for a model type, activation, RoPE type or key that jaxkv does not build, by name.
        """
        return cls(**read(text_config(config)))


def _within(rope: Rope, positions: int) -> Rope:
    """The rotary embedding for sequences of at most `positions` tokens: another one for a LongRoPE's short texts."""
    if not isinstance(rope, LongRope):
        return rope
    return dataclasses.replace(rope, long=positions > rope.original_max_position)
