"""Static configs within `ModelConfig` (RoPE variants, layer specs, mixtures of experts), and weight formats."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxkv._checks import validate_bool, validate_float, validate_int, validate_optional_field
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require

# Activations of MLPs.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "xielu")
# Formats of linear weights other than the model's dtype.
WEIGHTS = ("int8", "int4")
_WEIGHTS = f"not supported: use {', '.join(map(repr, WEIGHTS))}, or None for the model's dtype"


def check_positive(name: str, value: Any, remedy: str = "give a positive, finite number") -> float:
    """Validate a number above 0 and below 1e38; return it as a float, raise ValueError for anything else."""
    return validate_float(name, value, remedy, high=math.nextafter(1e38, 0), open_low=True)


def check_positive_numbers(name: str, value: Any) -> tuple[float, ...]:
    """Validate a non-empty list of positive numbers; return a tuple of floats, raise ValueError for anything else."""
    listed = isinstance(value, (list, tuple)) and len(value) > 0
    require(
        listed, name, value, "give a list with a positive number for each pair of rotated channels"
    )
    return tuple(check_positive(name, each, "give positive, finite numbers only") for each in value)


# Check of a field by its declared type.
READERS: dict[Any, Callable[..., Any]] = {
    "int": validate_int,
    "float": check_positive,
    "float | None": check_positive,
    "bool": validate_bool,
    "tuple[float, ...]": check_positive_numbers,
}


def check_number_fields(value: Any) -> None:
    """Check a dataclass's bools, positive numbers, parts, tuples of these; store Python values; else ValueError."""
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if field.type in READERS and not (given is None and field.default is None):
            object.__setattr__(value, field.name, READERS[field.type](field.name, given))


@frozen_dataclass
class Rope:
    """Static config of a rotary position embedding (RoPE): base and share of channels; base class of scaled variants.

    Attributes:
        theta: base of the geometric progression of wavelengths.
        share: share of a head's channels that are rotated, from the first on (GLM-4).
    """

    theta: float = 10_000.0
    share: float = 1.0

    def __post_init__(self) -> None:
        check_number_fields(self)
        require(
            self.share <= 1,
            "share",
            self.share,
            "give 1.0, or less to rotate a part of the channels",
        )
        factor = getattr(self, "factor", 1.0)
        require(factor >= 1, "factor", factor, "give a scaling factor of at least 1")


@frozen_dataclass
class NoRope(Rope):
    """Static config of a layer without positions: queries and keys are not rotated (NoPE, arXiv:2305.19466)."""


@frozen_dataclass
class ProportionalRope(Rope):
    """Static config of RoPE that rotates the pairs of highest frequency by the frequencies of a whole head (Gemma 4).

    Attributes:
        rotated: share of the pairs (i, i + D/2) that are rotated, from the first on; the order of channels is kept.
        factor: divisor of all frequencies.
    """

    rotated: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "give 1.0, or less to rotate a part of the pairs"
        require(self.rotated <= 1, "rotated", self.rotated, remedy)


@frozen_dataclass
class LinearRope(Rope):
    """Static config of RoPE with position interpolation: positions divided by `factor` (arXiv:2306.15595)."""

    factor: float


@frozen_dataclass
class DynamicRope(Rope):
    """Static config of dynamic NTK RoPE, supported only within the original length, where it equals unscaled RoPE.

    Beyond that length the base would change with every token, which cached keys cannot follow.

    Attributes:
        factor: growth of the base for longer texts; without effect here.
    """

    factor: float


@frozen_dataclass
class Llama3Rope(Rope):
    """Static config of Llama 3.1's RoPE: low frequencies divided by `factor`, high ones kept, others between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = f"give a value above low_freq_factor={self.low_freq_factor}"
        require(
            self.high_freq_factor > self.low_freq_factor,
            "high_freq_factor",
            self.high_freq_factor,
            remedy,
        )


@frozen_dataclass
class YarnRope(Rope):
    """Static config of YaRN: RoPE interpolated by wavelength, with an attention factor (arXiv:2309.00071)."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.beta_fast >= self.beta_slow,
            "beta_fast",
            self.beta_fast,
            f"give a value of at least {self.beta_slow=}",
        )


def compute_yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's factor on cosine and sine; DeepSeek's `mscale` weighs its part above 1."""
    return 1 + 0.1 * weight * math.log(max(1.0, factor))


@frozen_dataclass
class Ministral3Rope(YarnRope):
    """Static config of Ministral 3's YaRN, with a factor on queries that grows with their position.

    Attributes:
        llama_4_scaling_beta: b of the factor 1 + b * log(1 + floor(position / original_max_position)).
    """

    llama_4_scaling_beta: float


@frozen_dataclass
class LongRope(Rope):
    """Static config of LongRoPE: frequencies divided by a list, one for short texts or one for long ones.

    transformers selects the list in each forward pass by the longest text of the batch, and prefills again when an
    answer exceeds the original length. A compressed cache cannot be prefilled again, and its keys keep their rotation.
    Here `long` selects one list for all texts.

    Attributes:
        short_factor: divisors for texts of up to `original_max_position` tokens, one per pair of rotated channels.
        long_factor: divisors for longer texts.
        original_max_position: length of the texts in the model's original training.
        factor: ratio of the model's longest text to that length, from which the attention factor follows.
        attention_factor: factor on cosine and sine, with either list; None for sqrt(1 + ln(factor) / ln(original)).
        long: True divides frequencies by `long_factor`, False by `short_factor`.

    References:
        LongRoPE, arXiv:2402.13753.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position: int
    factor: float
    attention_factor: float | None = None
    long: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        original = self.original_max_position
        require(
            original > 1, "original_max_position", original, "give the tokens of a text, 2 or more"
        )
        remedy = f"wrong length: give as many numbers as short_factor has, {len(self.short_factor)}"
        same = len(self.long_factor) == len(self.short_factor)
        require(same, "long_factor", f"{len(self.long_factor)} numbers", remedy)


def count_rotated_channels(rope: Rope, head_dim: int) -> int:
    """Return how many of a head's D channels RoPE rotates: the share of D, rounded down."""
    # A share that is a quotient of channels may be rounded down.
    return int(head_dim * rope.share + 1e-9)


def compute_channel_order(rope: Rope, head_dim: int, *, interleaved: bool) -> tuple[int, ...]:
    """Return the checkpoint index of each query and key channel in this model's order, with pairs (i, i + D/2).

    Args:
        rope: the rotary embedding.
        head_dim: D.
        interleaved: True if the checkpoint's pairs are neighbours (GLM-4, Cohere), not halves of the rotated channels.

    Returns:
        D indices; 0 to D - 1 if the orders are equal.
    """
    dim = count_rotated_channels(rope, head_dim)
    rotated = list(range(dim))
    rest = list(range(dim, head_dim))
    first, second = (
        (rotated[::2], rotated[1::2]) if interleaved else (rotated[: dim // 2], rotated[dim // 2 :])
    )
    half = len(rest) // 2
    return (*first, *rest[:half], *second, *rest[half:])


@frozen_dataclass
class DeltaNetSpec:
    """Static config of a gated delta net, a layer with a state instead of entries (Qwen3-Next, Qwen3.5).

    Attributes:
        key_heads: heads of queries and keys, H.
        value_heads: heads of values, H * R, each with a matrix as its state.
        key_dim: channels of a query or key, Dk.
        value_dim: channels of a value, Dv.
        window: earlier tokens that the convolution reads, w.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    window: int = 3
    below: ClassVar[tuple[DeltaNetSpec, ...]] = ()
    dense_hidden: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_number_fields(self)
        remedy = f"give a multiple of key_heads={self.key_heads}"
        fits = self.value_heads % self.key_heads == 0
        require(fits, "value_heads", self.value_heads, remedy)

    @property
    def group_size(self) -> int:
        """Number of value heads that share a key head, R."""
        return self.value_heads // self.key_heads

    @property
    def convolved_channels(self) -> int:
        """Number of channels of a key head that the convolution mixes: a query, a key and R values."""
        return 2 * self.key_dim + self.group_size * self.value_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state, in float32."""
        matrices = self.group_size * self.key_dim * self.value_dim
        return 4 * self.key_heads * (self.window * self.convolved_channels + matrices)

    def shard_heads(self, model: int) -> DeltaNetSpec:
        """Return one device's config, with heads divided by `model`."""
        heads = {name: getattr(self, name) // model for name in ("key_heads", "value_heads")}
        return dataclasses.replace(self, **heads)


@frozen_dataclass
class LayerSpec:
    """Static config of one layer: rotary embedding, scale, sliding window, softcap of attention; width of a dense MLP.

    Layers with equal specs share compiled programs.

    Attributes:
        rope: rotary embedding of queries and keys.
        scale: factor of products of queries and keys; None for 1 / sqrt(D).
        sliding_window: number of last tokens that a token attends to, including itself; None for all.
        softcap: c, which maps attention logits to c * tanh(logit / c) before the softmax (Gemma 2); None for none.
        dense_hidden: width of the dense MLP of a layer without experts in a model with experts; None for the model's
            own MLP.
        below: layers with a state that run before this one; they have no entries, and no number among the layers.
        values_from_keys: values are projected by the weight of keys (Gemma 4).
    """

    rope: Rope = Rope()
    scale: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    dense_hidden: int | None = None
    below: tuple[DeltaNetSpec, ...] = ()
    values_from_keys: bool = False

    def __post_init__(self) -> None:
        check_number_fields(self)
        for name in ("sliding_window", "dense_hidden"):
            validate_optional_field(self, name, validate_int, "give 1 or more, or None")

    def get_head_dim(self, usual: int) -> int:
        """Return the channels of one of the layer's heads: `usual`, those of a model's heads."""
        return usual

    def get_entry_dim(self, usual: int) -> int:
        """Return D of the layer: the channels of a key in one of its entries."""
        return usual


@frozen_dataclass
class FoldedLayerSpec(LayerSpec):
    """Static config of a sliding-window layer with another head dim, and with several heads in an entry (Gemma 4).

    Tables of segments have one number of kv heads for all layers. All heads of a sliding window keep the same tokens,
    so that several may fill one entry, side by side.

    Attributes:
        head_dim: channels of a head.
        folded: J, the number of heads in an entry.
    """

    head_dim: int
    folded: int

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "heads share entries in sliding windows alone: give a width"
        require(self.sliding_window is not None, "sliding_window", None, remedy)
        remedy = "odd: rotary embeddings need an even one"
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, remedy)

    def get_head_dim(self, usual: int) -> int:
        """Return the channels of one of the layer's heads; `usual` is not read."""
        return self.head_dim

    def get_entry_dim(self, usual: int) -> int:
        """Return D of the layer; `usual` is not read."""
        return self.entry_dim

    @property
    def entry_dim(self) -> int:
        """Channels of all heads in one of the layer's entries, D."""
        return self.folded * self.head_dim


@frozen_dataclass
class ExpertsConfig:
    """Static config of a mixture of experts: number of experts, routing, shared expert, activation.

    Attributes:
        count: X, experts in every mixture.
        chosen: experts per token, those of the highest score.
        sigmoid: a score is the sigmoid of a router logit; otherwise the softmax over all experts.
        corrected: a learned number is added to each score to choose experts, not to weigh them (DeepSeek V3).
        groups: groups of consecutive experts.
        chosen_groups: groups in which a token's experts are chosen.
        leaders: number of experts whose best scores sum to that of a group.
        jitter: epsilon of SparseMixer, which chooses two experts in turn, each weighed by a softmax over the logits
            close to its own (PhiMoE, arXiv:2409.12136); None for one choice of all.
        normalised: True divides the chosen experts' scores by their sum.
        scale: factor of the chosen experts' weights.
        shared: width of the shared experts, one MLP that every token runs through; None for none.
        shared_gate: that MLP's output is multiplied by the sigmoid of a linear map (Qwen2-MoE).
        own_norms: experts and the shared MLP each have norms before and after them, the router a norm, and each expert
            a factor of its weight (Gemma 4).
        bias: the router and the experts' projections have biases (gpt-oss).
        wide_router: the router is float32 in a model of any dtype (ERNIE 4.5, Hunyuan).
        limit: None for activation(gate) * up. A number for gpt-oss' (up + 1) * gate * sigmoid(1.702 * gate), with gates
            clipped to at most `limit`, and ups to [-limit, limit].
    """

    count: int
    chosen: int
    sigmoid: bool = False
    corrected: bool = False
    groups: int = 1
    chosen_groups: int = 1
    leaders: int = 2
    jitter: float | None = None
    normalised: bool = True
    scale: float = 1.0
    shared: int | None = None
    shared_gate: bool = False
    own_norms: bool = False
    bias: bool = False
    wide_router: bool = False
    limit: float | None = None

    def __post_init__(self) -> None:
        check_number_fields(self)
        validate_optional_field(self, "shared", validate_int)
        whole = self.count % self.groups == 0
        require(whole, "groups", self.groups, f"give a divisor of the {self.count} experts")
        remedy = f"there are {self.groups} groups: give at most {self.groups}"
        require(self.chosen_groups <= self.groups, "chosen_groups", self.chosen_groups, remedy)
        size = self.count // self.groups
        most = self.chosen_groups * size
        remedy = f"a token has {most} experts to choose from: give at most {most}"
        require(self.chosen <= most, "chosen", self.chosen, remedy)
        remedy = f"a group has {size} experts: give at most {size}"
        require(self.groups == 1 or self.leaders <= size, "leaders", self.leaders, remedy)
        remedy = "SparseMixer chooses two experts: give chosen=2"
        require(self.jitter is None or self.chosen == 2, "jitter", self.jitter, remedy)
        others = self.sigmoid or self.corrected or self.groups > 1 or self.scale != 1
        alone = self.normalised and not others
        remedy = (
            "SparseMixer has its own weights: omit sigmoid, corrected, groups, normalised, scale"
        )
        require(self.jitter is None or alone, "jitter", self.jitter, remedy)
        shared = self.shared is not None or not self.shared_gate
        require(shared, "shared_gate", self.shared_gate, "there are no shared experts: give shared")
        bare = not (self.bias or self.shared_gate)
        remedy = "not supported with bias or shared_gate: omit these"
        require(bare or not self.own_norms, "own_norms", self.own_norms, remedy)


@frozen_dataclass
class LatentConfig:
    """Static config of multi-head latent attention: a cache entry is one latent and one rotated key, for all heads.

    Attributes:
        rank: channels of a latent, from which every head's unrotated key and value are projected.
        rotated: rotated key channels, which all heads share; behind the latent they complete an entry.
        unrotated: unrotated key channels of a head.
        value: value channels of a head.
        query_rank: channels of the latent that queries are projected from; None projects them from hidden states.

    References:
        DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    rank: int
    rotated: int
    unrotated: int
    value: int
    query_rank: int | None = None

    def __post_init__(self) -> None:
        check_number_fields(self)
        validate_optional_field(self, "query_rank", validate_int)
        for name in ("rank", "rotated", "unrotated"):
            count = getattr(self, name)
            require(
                count % 2 == 0,
                name,
                count,
                "odd: channels are rotated in pairs: give an even number",
            )
        remedy = f"give at least unrotated={self.unrotated} channels"
        require(self.rank >= self.unrotated, "rank", self.rank, remedy)

    @property
    def entry_dim(self) -> int:
        """Channels of an entry, D: its latent and its rotated key."""
        return self.rank + self.rotated

    @property
    def query_dim(self) -> int:
        """Channels of a head's query and key as projected: unrotated and rotated ones."""
        return self.unrotated + self.rotated


def _check_part(kind: type, name: str, value: Any) -> Any:
    """Return a field's value of a class; raise ValueError for anything else."""
    require(isinstance(value, kind), name, value, f"give a {kind.__name__}")
    return value


def _check_parts(kind: type, name: str, value: Any) -> tuple[Any, ...]:
    """Return a tuple of a field's values of a class; raise ValueError for anything else."""
    listed = isinstance(value, (list, tuple)) and all(isinstance(each, kind) for each in value)
    require(listed, name, value, f"give a tuple of {kind.__name__}")
    return tuple(value)


READERS |= {
    "Rope": functools.partial(_check_part, Rope),
    "ExpertsConfig | None": functools.partial(_check_part, ExpertsConfig),
    "LatentConfig | None": functools.partial(_check_part, LatentConfig),
    "tuple[DeltaNetSpec, ...]": functools.partial(_check_parts, DeltaNetSpec),
    "tuple[LayerSpec, ...]": functools.partial(_check_parts, LayerSpec),
}


def check_weight_format(given: Any) -> str | None:
    """Validate a format of linear weights, "int8", "int4" or None; return its name, ValueError for others."""
    name = given
    if not (given is None or isinstance(given, str)):
        with contextlib.suppress(TypeError):
            name = jnp.dtype(given).name
    require(name is None or (isinstance(name, str) and name in WEIGHTS), "weights", given, _WEIGHTS)
    return name
