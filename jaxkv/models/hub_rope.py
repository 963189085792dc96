"""Rotary embeddings from a Hugging Face config."""

import dataclasses
from typing import Any

from jaxkv._checks import validate_float, validate_int
from jaxkv._errors import require
from jaxkv.checkpoints.hub_config import FAMILIES, Config
from jaxkv.models.values import (
    READERS,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    Ministral3Rope,
    ProportionalRope,
    Rope,
    YarnRope,
    check_positive,
    compute_yarn_magnitude,
)

_ROPES = {
    "default": Rope,
    "dynamic": DynamicRope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "longrope": LongRope,
    "yarn": YarnRope,
}
# Families that rotate a part of the channels.
_PARTIAL = [name for name, each in FAMILIES.items() if "partial_rotary_factor" in each.known_keys]


def read_rope(given: Config, config: Config, longest: int) -> Rope:
    """Return the `Rope`, or scaled variant, described by the config keys of one layer type's rotary embedding.

    Args:
        given: keys of its rotary embedding.
        config: all keys of the `config.json`.
        longest: positions of the model.

    Returns:
        The rotary embedding.

    Raises:
        ValueError: for types and keys that are not supported; the message names them.
    """
    keys = dict(given)
    family = config["model_type"]
    theta = check_positive("rope_theta", keys.pop("rope_theta"))
    dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    known = _ROPES
    if family.startswith("gemma4"):
        known = {"default": Rope, "proportional": ProportionalRope}
        rotated = keys.pop("partial_rotary_factor", 1.0)
        # transformers' default rotary embedding rotates all channels.
        keys |= {} if keys.get("rope_type", "default") == "default" else {"rotated": rotated}
    # MiniMax's files say how many channels are rotated.
    part = validate_int("rotary_dim", config.get("rotary_dim", dim))
    share = keys.pop("partial_rotary_factor", part / dim)
    remedy = f"give a share of the channels above 0; only {', '.join(_PARTIAL)} rotate a part"
    # Mistral 4 gives the share of a head's channels.
    rotated, others = (config.get(f"qk_{each}_head_dim", 0) for each in ("rope", "nope"))
    whole = share in (1.0, rotated / max(1, rotated + others))
    require(whole or family in _PARTIAL, "partial_rotary_factor", share, remedy)
    kind = keys.pop("type", "default")
    kind = keys.pop("rope_type", kind)
    if family == "phi3":
        # Older files call longrope su. For a Phi-3, transformers reads "yarn" as longrope, too.
        known = {"default": Rope, "longrope": LongRope, "su": LongRope}
        if kind in ("longrope", "su"):
            name = "original_max_position_embeddings"
            keys[name] = config[name]
    if "linear_num_key_heads" in config:
        # Positions of text are the same in all three sections.
        for key in ("mrope_section", "mrope_interleaved"):
            keys.pop(key, None)
    if family == "phimoe" and kind == "longrope":
        # One magnitude for all texts, as those of the published model are.
        keys["attention_factor"], other = (
            keys.pop(f"{each}_mscale", None) for each in ("long", "short")
        )
        remedy = "long_mscale and short_mscale must be equal, as in the published model"
        require(other == keys["attention_factor"], "rope_scaling.short_mscale", other, remedy)
    if family.startswith("hunyuan") and kind == "dynamic" and keys.get("alpha"):
        # A larger base for texts of any length: all other numbers change nothing.
        alpha = check_positive("rope_scaling.alpha", keys["alpha"])
        kind, keys, theta = "default", {}, theta * alpha ** (dim / (dim - 2))
    if rotated:
        # An entry's other channels are a latent.
        share = rotated / (rotated + config["kv_lora_rank"])
    if family in ("ministral3", "mistral4"):
        known = {"yarn": Ministral3Rope}
        keys.pop("max_position_embeddings", None)
        if keys.get("llama_4_scaling_beta") == 0:
            # Devstral 2's queries are not scaled.
            known = {"yarn": YarnRope}
            del keys["llama_4_scaling_beta"]
    require(
        isinstance(kind, str) and kind in known,
        "rope_type",
        kind,
        f"not supported for {family}: use {', '.join(known)}",
    )
    magnitudes = [keys.pop(key, None) for key in ("mscale", "mscale_all_dim") if kind == "yarn"]
    values: dict[str, Any] = {
        "theta": theta,
        "share": validate_float("partial_rotary_factor", share, remedy, high=1.0, open_low=True),
    }
    for field in dataclasses.fields(known[kind]):
        if field.name in (*values, "long"):
            continue
        original = field.name == "original_max_position"
        key = "original_max_position_embeddings" if original else field.name
        default = longest if original else field.default
        if known[kind] is LongRope and field.name == "factor":
            default = max(1.0, longest / values["original_max_position"])
        value = keys.pop(key, default)
        needed = value is dataclasses.MISSING
        require(not needed, f"rope_scaling.{key}", None, f"missing for rope type {kind!r}: add it")
        # Null is the default of optional numbers of YaRN and longrope, and is rejected for all others.
        null = (
            value is None and field.type.startswith("float") and default is not dataclasses.MISSING
        )
        values[field.name] = default if null else READERS[field.type](f"rope_scaling.{key}", value)
    remedy = f"these keys are not supported for rope type {kind!r}: remove them"
    require(not keys, "rope_scaling", sorted(keys), remedy)
    if all(magnitudes) and magnitudes:
        # DeepSeek's variant of YaRN; transformers reads these numbers only if both are given.
        checked = (check_positive("rope_scaling.mscale", each) for each in magnitudes)
        above, below = (compute_yarn_magnitude(values["factor"], each) for each in checked)
        values["attention_factor"] = values["attention_factor"] or above / below
    if known[kind] is LongRope:
        values["long"] = longest > values["original_max_position"]
    return known[kind](**values)
