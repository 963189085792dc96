"""Reader of a Hugging Face `config.json`, family by family, into the fields of `ModelConfig`."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxkv._checks import validate_bool, validate_int
from jaxkv._errors import require
from jaxkv.checkpoints.hub_config import (
    FAMILIES,
    LAYER_TYPES,
    Config,
    complete_config,
    merge_layer_values,
    read_rope_keys,
)
from jaxkv.models.hub_rope import read_rope
from jaxkv.models.values import (
    DeltaNetSpec,
    ExpertsConfig,
    FoldedLayerSpec,
    LatentConfig,
    LayerSpec,
    NoRope,
    Rope,
    check_positive,
    compute_yarn_magnitude,
)

# Fields of `ExpertsConfig` by the config keys that give them, and their checks; `shared_count` times the width of an
# expert is the width of shared experts.
_EXPERTS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "num_experts": ("count", validate_int),
    "num_experts_per_tok": ("chosen", validate_int),
    "n_group": ("groups", validate_int),
    "topk_group": ("chosen_groups", validate_int),
    "norm_topk_prob": ("normalised", validate_bool),
    "routed_scaling_factor": ("scale", check_positive),
    "router_jitter_noise": ("jitter", check_positive),
    "swiglu_limit": ("limit", check_positive),
    "n_shared_experts": ("shared_count", partial(validate_int, least=0)),
    "shared_expert_intermediate_size": ("shared", partial(validate_int, least=0)),
}


def read_config_fields(raw: Config) -> dict[str, Any]:
    """Return `ModelConfig` fields by name from a parsed `config.json`; ValueError for unsupported keys or values."""
    config = complete_config(raw)
    kind = config["model_type"]
    family = FAMILIES[kind]
    names = family.names
    keys = family.required_keys

    def read_config_key(check: Callable[[str, Any], Any], key: str) -> Any:
        """Return the value of a config key, given by Llama's name of it, as returned by `check`."""
        name = names.get(key, key)
        return check(name, config.get(name))

    def is_switch_enabled(key: str) -> bool:
        """True if the family has the switch for biases or norms, by Llama's name, and the config enables it."""
        return names.get(key, key) in keys and read_config_key(validate_bool, key)

    embed, heads, layers = (
        read_config_key(validate_int, key)
        for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    experts = _read_experts(config, layers)
    # Command R's files have another key for the context.
    longest = max(
        validate_int(key, config[key])
        for key in ("max_position_embeddings", "model_max_length")
        if key in config
    )
    fields = {
        "vocab": read_config_key(validate_int, "vocab_size"),
        "layers": layers,
        "embed": embed,
        "hidden": read_config_key(
            validate_int, "intermediate_size" if experts is None else _find_expert_width_key(kind)
        ),
        "heads": heads,
        "kv_heads": read_config_key(validate_int, "num_key_value_heads"),
        "head_dim": validate_int("head_dim", config.get("head_dim", embed // heads)),
        "norm_eps": read_config_key(check_positive, "rms_norm_eps"),
        "max_positions": longest,
        "tied": read_config_key(validate_bool, "tie_word_embeddings"),
        "qkv_bias": is_switch_enabled("attention_bias"),
        "out_bias": is_switch_enabled(
            "attention_out_bias" if "attention_out_bias" in keys else "attention_bias"
        ),
        "mlp_bias": is_switch_enabled("mlp_bias"),
        "head_bias": is_switch_enabled("lm_head_bias"),
        "qk_norm": is_switch_enabled("qk_norm"),
        "qk_layer_norm": is_switch_enabled("qk_layer_norm"),
        "parallel": is_switch_enabled("use_parallel_residual"),
        "shared_norm": is_switch_enabled("use_parallel_residual"),
        "bos": next(iter(read_config_key(_read_token_ids, "bos_token_id")), None),
        "eos": read_config_key(_read_token_ids, "eos_token_id"),
        "experts": experts,
    }
    fields |= {**family.switches, **_read_scales(config)}
    if kind == "falcon":
        fields |= _read_falcon_fields(config, heads, fields["kv_heads"])
    if "kv_lora_rank" in config:
        fields |= _read_latent_fields(config, heads)
    return fields | _read_layer_fields(config, layers, longest)


def _read_token_ids(key: str, value: Any) -> tuple[int, ...]:
    """Return the token ids of a key that has one id, a list or null, as a tuple without -1; ValueError for others."""
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return tuple(validate_int(key, each, least=0) for each in values if each != -1)


def _find_expert_width_key(kind: str) -> str:
    """Return the config key of an expert's width in a family with experts."""
    own = "moe_intermediate_size"
    return own if own in FAMILIES[kind].known_keys else "intermediate_size"


def _select_read_keys(config: Config) -> Config:
    """Return a config without the keys that its family ignores, or allows with one value alone."""
    family = FAMILIES[config["model_type"]]
    return {key: value for key, value in config.items() if key in family.known_keys}


def _read_experts(config: Config, layers: int) -> ExpertsConfig | None:
    """Return the `ExpertsConfig` of a parsed `config.json`; None for a dense model."""
    family = FAMILIES[config["model_type"]]
    names = family.names
    given = _select_read_keys(config)
    found = dict(family.experts)
    for key, (field, check) in _EXPERTS.items():
        name = names.get(key, key)
        if name in given:
            found[field] = check(name, merge_layer_values(given[name], layers))
    # A Gemma 4 says whether it has any.
    mixed = validate_bool("enable_moe_block", given.get("enable_moe_block", "count" in found))
    if not mixed:
        return None
    for key in ("num_experts", "num_experts_per_tok"):
        known = _EXPERTS[key][0] in found
        require(known, names.get(key, key), None, "enable_moe_block=true needs their number")
    if config.get("topk_method") == "greedy":
        # DeepSeek V2-Lite names groups, and chooses among all experts.
        found |= {"groups": 1, "chosen_groups": 1}
    shared = found.pop("shared_count", None)
    if shared is not None:
        width = _find_expert_width_key(config["model_type"])
        found["shared"] = shared * validate_int(width, config[width])
    return ExpertsConfig(**found | {"shared": found.get("shared") or None})


def _read_dense_widths(config: Config, layers: int) -> list[int | None]:
    """Return the width of the dense MLP of each layer without experts, None for others; ValueError for wrong lists."""
    given = _select_read_keys(config)

    def read(key: str, default: int, least: int = 0) -> int:
        """Return a key's layer index or number of layers."""
        return validate_int(key, given.get(key, default), least=least)

    first = max(read("first_k_dense_replace", 0), read("moe_layer_start_index", 0))
    end = read("moe_layer_end_index", -1, -1)
    last = layers - 1 if end == -1 else end
    every = read("decoder_sparse_step", 1, 1) * read("moe_layer_interval", 1, 1)
    dense = [not first <= at <= last or (at + 1) % every > 0 for at in range(layers)]
    only = given.get("mlp_only_layers", ())
    listed = isinstance(only, (list, tuple)) and all(each in range(layers) for each in only)
    require(listed, "mlp_only_layers", only, f"give indices of the {layers} layers")
    types = given.get("mlp_layer_types")
    if types is not None:
        known = isinstance(types, list) and len(types) == layers
        known = known and all(each in ("dense", "sparse") for each in types)
        remedy = f"give 'dense' or 'sparse' for each of {layers} layers"
        require(known, "mlp_layer_types", types, remedy)
        dense = [each == "dense" for each in types]
    dense = [each or at in only for at, each in enumerate(dense)]
    if not any(dense):
        return [None] * layers
    width = validate_int("intermediate_size", config["intermediate_size"])
    return [width if each else None for each in dense]


def _read_scales(config: Config) -> dict[str, Any]:
    """Return `ModelConfig` fields: a config's scales of embeddings, branches, logits; always the softcap."""
    found: dict[str, Any] = {}
    if config["model_type"].startswith("gemma"):
        found["embedding_scale"] = math.sqrt(config["hidden_size"])
    for key, name in (
        ("embedding_multiplier", "embedding_scale"),
        ("logit_scale", "logit_scale"),
        ("logits_scaling", "logit_scale"),
        ("residual_multiplier", "residual_scale"),
    ):
        if key in config:
            value = check_positive(key, config[key])
            found[name] = 1 / value if key == "logits_scaling" else value
    found["logit_softcap"] = _read_softcap(config, "final_logit_softcapping")
    return found


def _read_softcap(config: Config, key: str) -> float | None:
    """Return the softcap under a config key; None if it is absent or null."""
    return None if config.get(key) is None else check_positive(key, config[key])


def _read_falcon_fields(config: Config, heads: int, kv_heads: int) -> dict[str, Any]:
    """Return a Falcon's `kv_heads`, `parallel`, `shared_norm` for `ModelConfig`; ValueError for unsupported values."""
    groups, one, parallel = (
        validate_bool(key, config[key])
        for key in ("new_decoder_architecture", "multi_query", "parallel_attn")
    )
    remedy = "blocks of new_decoder_architecture=true are parallel: give true"
    require(parallel or not groups, "parallel_attn", parallel, remedy)
    norms = config.get("num_ln_in_parallel_attn", 2 if groups else 1)
    remedy = "not supported: give 1, or 2 with new_decoder_architecture=true, or omit it"
    require(norms == 1 or (norms == 2 and groups), "num_ln_in_parallel_attn", norms, remedy)
    remedy = f"only new_decoder_architecture=true supports grouped kv heads: give {heads}"
    require(groups or one or kv_heads == heads, "num_kv_heads", kv_heads, remedy)
    return {
        "kv_heads": 1 if one and not groups else kv_heads,
        "parallel": parallel,
        "shared_norm": parallel and norms == 1,
    }


def _read_latent_fields(config: Config, heads: int) -> dict[str, Any]:
    """Return a multi-head latent attention's `ModelConfig` fields; ValueError for fewer kv heads than heads."""
    keys = {
        "rank": "kv_lora_rank",
        "rotated": "qk_rope_head_dim",
        "unrotated": "qk_nope_head_dim",
        "value": "v_head_dim",
        "query_rank": "q_lora_rank",
    }
    widths = {
        name: validate_int(key, config[key])
        for name, key in keys.items()
        if name != "query_rank" or config[key] is not None
    }
    latent = LatentConfig(**widths)
    given = config["num_key_value_heads"]
    require(
        given == heads,
        "num_key_value_heads",
        given,
        f"latent attention needs as many kv heads as heads: give {heads}",
    )
    return {
        "latent": latent,
        "kv_heads": 1,
        "head_dim": latent.entry_dim,
        "interleaved": validate_bool("rope_interleave", config.get("rope_interleave", True)),
    }


def _read_global_heads(config: Config, sliding: Sequence[bool]) -> dict[str, int]:
    """Return `kv_heads` and `head_dim` of a Gemma 4's layers without sliding windows; ValueError for E2B and E4B."""
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        remedy = (
            "models with per-layer embeddings or layers that share entries (E2B, E4B) are not "
            "supported: use the 12B, 31B or 26B-A4B, or gemma3"
        )
        require(not config[key], key, config[key], remedy)
    remedy = f"transformers makes the last layer {LAYER_TYPES[1]!r}: give it so"
    require(not sliding[-1], "layer_types", config["layer_types"], remedy)
    whole = [at for at, each in enumerate(sliding) if not each]
    own = {"head_dim": config.get("global_head_dim", 512)}
    if config["attention_k_eq_v"] and config.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = config["num_global_key_value_heads"]
    # Published files have one key for all of these layers, those of transformers keys of each.
    given = config.get("per_layer_config", dict.fromkeys(map(str, whole), own))
    names = ("head_dim", "num_key_value_heads")
    remedy = f"give the same {' and '.join(names)} for layers {whole}, and none for others"
    told = isinstance(given, Mapping) and all(
        str(at).isdecimal() and isinstance(each, Mapping) for at, each in given.items()
    )
    require(told and sorted(map(int, given)) == whole, "per_layer_config", given, remedy)
    own, *others = given.values()
    alike = all(each == own for each in others) and own.keys() <= {*names}
    require(alike, "per_layer_config", given, remedy)
    dim, heads = (validate_int(name, own.get(name, config[name])) for name in names)
    local, query = config["num_key_value_heads"], config["num_attention_heads"]
    require(query % local == 0, "num_key_value_heads", local, f"give a divisor of {query}")
    remedy = f"give a divisor of num_key_value_heads={local}"
    require(local % heads == 0, "num_global_key_value_heads", heads, remedy)
    return {"kv_heads": heads, "head_dim": dim}


def _build_gemma4_spec(spec: LayerSpec, config: Config, kv_heads: int) -> LayerSpec:
    """Return the spec of a Gemma 4's layer: its scale is 1, and a sliding window has heads of its own."""
    spec = dataclasses.replace(spec, scale=1.0)
    if spec.sliding_window is None:
        shared = validate_bool("attention_k_eq_v", config["attention_k_eq_v"])
        return dataclasses.replace(spec, values_from_keys=shared)
    return FoldedLayerSpec(
        **vars(spec),
        head_dim=validate_int("head_dim", config["head_dim"]),
        folded=config["num_key_value_heads"] // kv_heads,
    )


def _compute_latent_scale(config: Config) -> float:
    """Return the attention scale of heads' keys: 1 / sqrt of their width, times YaRN's squared magnitude."""
    _, rope = read_rope_keys(config)
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    if not rope.get("mscale_all_dim"):
        return float(scale)
    magnitude = check_positive("rope_scaling.mscale_all_dim", rope["mscale_all_dim"])
    factor = check_positive("rope_scaling.factor", rope.get("factor"))
    return float(scale * compute_yarn_magnitude(factor, magnitude) ** 2)


def _read_layer_fields(config: Config, layers: int, longest: int) -> dict[str, Any]:
    """Return `ModelConfig` fields: `rope` for equal layers that differ in nothing else; otherwise `kinds`, a period."""
    kind = config["model_type"]
    local, whole_prompt = (read_rope(each, config, longest) for each in read_rope_keys(config))
    if "linear_num_key_heads" in config:
        below = _read_state_layers(config, layers)
        specs = [LayerSpec(rope=whole_prompt, below=each) for each in below]
        return {"layers": len(specs), "kinds": _find_shortest_period(specs)}
    widths, sliding = _read_sliding_windows(config, layers, longest)
    ropes = [local if each else whole_prompt for each in sliding]
    rotated = [True] * layers
    exaone = kind in ("exaone4", "exaone_moe") and config.get("sliding_window") is not None
    if kind == "cohere2" or exaone:
        rotated = sliding
    elif kind == "smollm3":
        rotated = _find_rotated_layers(config["no_rope_layers"], layers)
    ropes = [rope if each else NoRope() for rope, each in zip(ropes, rotated, strict=True)]
    scale = None
    softcap = _read_softcap(config, "attn_logit_softcapping")
    if "attention_multiplier" in config:
        scale = check_positive("attention_multiplier", config["attention_multiplier"])
    if "query_pre_attn_scalar" in config:
        scale = check_positive("query_pre_attn_scalar", config["query_pre_attn_scalar"]) ** -0.5
    if "kv_lora_rank" in config:
        scale = _compute_latent_scale(config)
    dense = _read_dense_widths(config, layers)
    specs = [
        LayerSpec(rope=rope, sliding_window=width, scale=scale, softcap=softcap, dense_hidden=own)
        for rope, width, own in zip(ropes, widths, dense, strict=True)
    ]
    if kind.startswith("gemma4"):
        heads = _read_global_heads(config, sliding)
        specs = [_build_gemma4_spec(each, config, heads["kv_heads"]) for each in specs]
        return {"kinds": _find_shortest_period(specs), **heads}
    if set(specs) == {LayerSpec(rope=whole_prompt)}:
        return {"rope": whole_prompt}
    return {"rope": Rope(), "kinds": _find_shortest_period(specs)}


def _read_state_layers(config: Config, layers: int) -> list[tuple[DeltaNetSpec, ...]]:
    """Return, for each layer with entries, the specs of the gated delta nets below it; ValueError for other types."""
    state, full = "linear_attention", LAYER_TYPES[1]
    types = config["layer_types"]
    remedy = f"give {state} or {full} for each of {layers} layers, {full} for the last one"
    listed = isinstance(types, (list, tuple)) and len(types) == layers
    sound = listed and all(each in (state, full) for each in types) and types[-1] == full
    require(sound, "layer_types", types, remedy)
    width = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    remedy = "not supported in models with layers that have a state: give null"
    require(width is None, "sliding_window", width, remedy)
    sizes = {
        name: validate_int(key, config[key])
        for name, key in (
            ("key_heads", "linear_num_key_heads"),
            ("value_heads", "linear_num_value_heads"),
            ("key_dim", "linear_key_head_dim"),
            ("value_dim", "linear_value_head_dim"),
        )
    }
    taps = validate_int("linear_conv_kernel_dim", config["linear_conv_kernel_dim"], least=2)
    spec = DeltaNetSpec(**sizes, window=taps - 1)
    ends = [-1, *(at for at, each in enumerate(types) if each == full)]
    return [(spec,) * (end - begin - 1) for begin, end in itertools.pairwise(ends)]


def _find_rotated_layers(given: Any, layers: int) -> list[bool]:
    """Return a mask of a SmolLM3's layers, True with a rotary embedding, from `no_rope_layers` (1: with)."""
    sound = isinstance(given, (list, tuple)) and all(each in (0, 1) for each in given)
    remedy = f"give a 1 for each of {layers} layers with rotary embeddings, a 0 for each without"
    require(sound and len(given) >= layers, "no_rope_layers", given, remedy)
    return [each == 1 for each in given[:layers]]


def _read_sliding_windows(
    config: Config, layers: int, longest: int
) -> tuple[list[int | None], list[bool]]:
    """Return each layer's window in tokens (None: full, or as long as all positions), and a mask of the sliding type.

    A sliding window of at least the model's positions counts as none. ValueError for unknown types.
    """
    kind = config["model_type"]
    keys = FAMILIES[config["model_type"]].required_keys
    windowed = kind.startswith("qwen") or "sliding_window" in keys
    typed = "layer_types" in keys or kind in ("qwen2", "qwen2_moe", "qwen3")
    types = config.get("layer_types")
    width = config.get("sliding_window")
    sound = types is None or (
        isinstance(types, (list, tuple))
        and len(types) == layers
        and all(each in LAYER_TYPES[1:] or (typed and each in LAYER_TYPES) for each in types)
    )
    remedy = (
        f"give {' or '.join(LAYER_TYPES)} for each of {layers} layers, if a {kind} has "
        "sliding windows"
    )
    require(sound, "layer_types", types, remedy)
    used = validate_bool("use_sliding_window", config.get("use_sliding_window", True))
    # Classes that always have sliding windows ignore the switch.
    width = width if used or (windowed and "use_sliding_window" not in keys) else None
    width = None if width is None else validate_int("sliding_window", width)
    # transformers' caches evict entries outside a sliding window even if the family's class does not support one.
    remedy = (
        f"no {kind} has sliding windows in transformers: give null, or use_sliding_window=false"
    )
    require(windowed or width is None or width >= longest, "sliding_window", width, remedy)
    sliding = [windowed and width is not None] * layers
    if typed and types is not None:
        sliding = [each == LAYER_TYPES[0] for each in types]
    remedy = f"layers of type {LAYER_TYPES[0]} need a width: give sliding_window"
    require(width is not None or not any(sliding), "sliding_window", width, remedy)
    # Heads of Gemma 4 depend on the type of a layer.
    endless = width is None or (width >= longest and not kind.startswith("gemma4"))
    narrow = None if endless else width
    return [narrow if each else None for each in sliding], sliding


def _find_shortest_period(specs: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the shortest prefix of layer specs that, repeated and cut off at their number, gives all of them."""
    count = len(specs)
    period = next(
        n for n in range(1, count + 1) if all(specs[at] == specs[at % n] for at in range(count))
    )
    return tuple(specs[:period])
