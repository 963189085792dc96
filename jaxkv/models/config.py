"""What a decoder is made of: `ModelConfig`, its RoPE variants, and their reading from Hugging Face keys."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv._errors import require
from jaxkv._values import FARTHEST

# Keys of a Hugging Face config that change nothing about inference with these decoders.
_IGNORED = frozenset(
    """_attn_implementation _name_or_path add_cross_attention architectures attention_dropout attn_implementation
    auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    initializer_range is_decoder is_encoder_decoder is_llama_config label2id length_penalty max_length
    max_window_layers min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    rope_interleaved sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unsloth_fixed unsloth_version use_bfloat16 use_cache use_mrope""".split()
)

_FAMILIES = {"llama": {}, "mistral": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
_ACTIVATIONS = ("silu", "swish")


def _whole(name: str, value: Any, *, least: int = 1) -> int:
    """Takes an integer of any library's kind as Python's own; a boolean is none, nor is 4.0."""
    sound = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    remedy = f"give {'a positive integer' if least else 'an integer'} from {least} to {FARTHEST}"
    require(sound and least <= int(value) <= FARTHEST, name, value, remedy)
    return int(value)


def _real(name: str, value: Any, remedy: str = "give a positive, finite number") -> float:
    """Takes a positive, finite number as a Python float."""
    sound = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # A Python integer may be too large for a float.
    require(sound and 0 < value < 1e38, name, value, remedy)
    return float(value)


def _flag(name: str, value: Any) -> bool:
    require(isinstance(value, bool), name, value, "give true or false")
    return bool(value)


# By the type that a field is declared with.
_READERS: dict[Any, Callable[..., Any]] = {"int": _whole, "float": _real, "float | None": _real, "bool": _flag}
_REMEDIES = {
    "theta": "give a positive base, 10000.0 for Llama 1 and 2",
    "factor": "give a scaling factor of at least 1",
}


def _check_numbers(value: Any) -> None:
    """Keeps a dataclass' numbers, numpy's say, as Python's own of the same value: configs are compared and hashed."""
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if field.type in _READERS and not (given is None and field.default is None):
            remedy = {"remedy": _REMEDIES[field.name]} if field.name in _REMEDIES else {}
            object.__setattr__(value, field.name, _READERS[field.type](field.name, given, **remedy))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding, the unscaled kind.

    Attributes:
        theta: base of the geometric progression of wavelengths.
    """

    theta: float = 10_000.0

    def __post_init__(self) -> None:
        _check_numbers(self)
        factor = getattr(self, "factor", 1.0)
        require(factor >= 1, "factor", factor, _REMEDIES["factor"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """Position interpolation: positions divided by `factor` (arXiv:2306.15595)."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope(Rope):
    """Llama 3.1's scaling: long wavelengths stretched by `factor`, short ones kept, a ramp between them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = f"give a value above low_freq_factor={self.low_freq_factor}"
        require(self.high_freq_factor > self.low_freq_factor, "high_freq_factor", self.high_freq_factor, remedy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnRope(Rope):
    """YaRN: interpolation by parts and an attention temperature (arXiv:2309.00071)."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.beta_fast > self.beta_slow, "beta_fast", self.beta_fast, f"give a value above {self.beta_slow=}")


_ROPES = {"default": Rope, "linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer and its family's switches.

    Attributes:
        vocab: tokens in the vocabulary, V.
        layers: L.
        embed: width of the residual stream, E.
        hidden: width of the gated MLP, F.
        heads: query heads, H = K * G.
        kv_heads: kv heads, K.
        head_dim: D; even.
        norm_eps: epsilon of every RMS norm.
        rope: the rotary embedding.
        max_positions: longest sequence the model was made for, new tokens included.
        tied: the output matrix is the embedding.
        qkv_bias: query, key and value projections carry a bias (Qwen2).
        out_bias: the attention's output projection carries one.
        mlp_bias: the MLP's projections carry one.
        qk_norm: queries and keys are RMS-normalised per head before rotation (Qwen3).
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
    max_positions: int = 2048
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_numbers(self)
        ids = (*self.eos, *(() if self.bos is None else (self.bos,)))
        for each in ids:
            _whole("bos or eos", each, least=0)
        object.__setattr__(self, "eos", tuple(map(int, self.eos)))
        require(isinstance(self.rope, Rope), "rope", self.rope, "give a Rope, such as Rope(theta=10000.0)")
        require(self.heads % self.kv_heads == 0, "heads", self.heads, f"give a multiple of kv_heads={self.kv_heads}")
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "rotary embeddings need an even head_dim")

    @property
    def group(self) -> int:
        """G: query heads per kv head."""
        return self.heads // self.kv_heads

    def on_one_of(self, kv: int, model: int) -> ModelConfig:
        """What one device has of the model, of `kv` that share kv heads, and `model` that share all else."""
        return dataclasses.replace(
            self,
            kv_heads=self.kv_heads // kv,
            heads=self.heads // model,
            hidden=self.hidden // model,
            vocab=self.vocab // model,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads the keys of a Hugging Face `config.json`; every key is used, known to be harmless, or refused.

        Args:
            config: the parsed JSON.

        Returns:
            The configuration.

        Raises:
            ValueError: for a model type, activation, RoPE type or key that jaxkv does not build, by name.
        """
        return _read_hf(dict(config))


def _read_hf(raw: dict[str, Any]) -> ModelConfig:
    family = raw.get("model_type")
    known = isinstance(family, str) and family in _FAMILIES
    require(known, "model_type", family, f"jaxkv builds {', '.join(sorted(_FAMILIES))}")
    taken = {"model_type"}

    def take(key: str, default: Any = None, *, needed: bool = False) -> Any:
        taken.add(key)
        value = raw.get(key)
        require(not (needed and value is None), key, value, "the model's config must give it")
        return default if value is None else value

    def whole(key: str, default: int | None = None) -> int:
        return _whole(key, take(key, default, needed=default is None))

    activation = take("hidden_act", "silu")
    require(activation in _ACTIVATIONS, "hidden_act", activation, "jaxkv builds silu (SwiGLU) only")
    window = take("sliding_window")
    # Qwen's configs carry a window that `use_sliding_window` switches off.
    window_used = take("use_sliding_window", family == "mistral") and window is not None
    require(not window_used, "sliding_window", window, "sliding windows are not built; use a full-attention model")
    kinds = take("layer_types", [])
    full = isinstance(kinds, (list, tuple)) and all(each == "full_attention" for each in kinds)
    require(full, "layer_types", kinds, "only full_attention layers are built")
    quantization = take("quantization_config")
    require(quantization is None, "quantization_config", quantization, "load the unquantised weights, or a GGUF")

    embed, heads = whole("hidden_size"), whole("num_attention_heads")
    switches = _FAMILIES[str(family)]
    attention_bias = _flag("attention_bias", take("attention_bias", False))
    max_positions = whole("max_position_embeddings", 2048)
    result = ModelConfig(
        vocab=whole("vocab_size"),
        layers=whole("num_hidden_layers"),
        embed=embed,
        hidden=whole("intermediate_size"),
        heads=heads,
        kv_heads=whole("num_key_value_heads", heads),
        head_dim=whole("head_dim", embed // heads),
        norm_eps=_real("rms_norm_eps", take("rms_norm_eps", 1e-6)),
        rope=_read_rope(take, max_positions),
        max_positions=max_positions,
        tied=_flag("tie_word_embeddings", take("tie_word_embeddings", False)),
        qkv_bias=switches.get("qkv_bias", False) or (family != "qwen2" and attention_bias),
        out_bias=family != "qwen2" and attention_bias,
        mlp_bias=_flag("mlp_bias", take("mlp_bias", False)),
        qk_norm=switches.get("qk_norm", False),
        bos=next(iter(_ids("bos_token_id", take("bos_token_id"))), None),
        eos=_ids("eos_token_id", take("eos_token_id")),
    )
    unknown = sorted(set(raw) - taken - _IGNORED)
    require(not unknown, "config", unknown, "these keys are not supported; remove them only if they change nothing")
    return result


def _ids(key: str, value: Any) -> tuple[int, ...]:
    """One id or several; -1 stands for none."""
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return tuple(_whole(key, each, least=0) for each in values if each != -1)


def _read_rope(take: Any, max_positions: int) -> Rope:
    # transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling; both may be there.
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = take(key, {})
        require(isinstance(given, Mapping), key, given, "give an object with rope_type and its numbers")
        merged |= given
    # Both are asked for, so that neither counts as unknown.
    outer = take("rope_theta", 10_000.0), take("partial_rotary_factor", 1.0)
    inner = merged.pop("rope_theta", None), merged.pop("partial_rotary_factor", None)
    theta, partial = (ours if theirs is None else theirs for ours, theirs in zip(outer, inner, strict=True))
    theta = _real("rope_theta", theta)
    require(partial == 1.0, "partial_rotary_factor", partial, "only fully rotated heads are built")
    kind = merged.pop("rope_type", merged.pop("type", "default"))
    merged.pop("type", None)
    known = isinstance(kind, str) and kind in _ROPES
    require(known, "rope_type", kind, "jaxkv builds default, linear, llama3 and yarn")
    if kind == "yarn":
        for key in ("mscale", "mscale_all_dim"):
            require(not merged.get(key), f"rope_scaling.{key}", merged.get(key), "DeepSeek's YaRN variant is not built")
            merged.pop(key, None)
    values: dict[str, Any] = {"theta": theta}
    for field in dataclasses.fields(_ROPES[kind]):
        if field.name == "theta":
            continue
        original = field.name == "original_max_position"
        key = "original_max_position_embeddings" if original else field.name
        default = max_positions if original and kind == "yarn" else field.default
        given = merged.pop(key, None)
        needed = given is None and default is dataclasses.MISSING
        require(not needed, f"rope_scaling.{key}", given, f"rope type {kind!r} needs it")
        values[field.name] = default if given is None else _READERS[field.type](f"rope_scaling.{key}", given)
    require(not merged, "rope_scaling", sorted(merged), f"these keys are not supported for rope type {kind!r}")
    return _ROPES[kind](**values)
