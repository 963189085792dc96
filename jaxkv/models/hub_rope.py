"""Rotary embeddings as a Hugging Face config gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv._checks import real
from jaxkv._errors import require
from jaxkv.models.hub_reader import Keys
from jaxkv.models.values import (
    READERS,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    Rope,
    YarnRope,
    positive,
)

_ROPES = {
    "default": Rope,
    "dynamic": DynamicRope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "longrope": LongRope,
    "yarn": YarnRope,
}
_KNOWN = "jaxkv builds default, dynamic, linear, llama3, longrope and yarn"
# Scaling by default of transformers' class of a family.
_USUAL = {
    "gpt_oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
}

# Families of which some heads are rotated in part.
_IN_PART = ("glm4", "phi3")

# Types of layers: with windows, and without.
_KINDS = ("sliding_attention", "full_attention")


def read_rope(keys: Keys, max_positions: int) -> Rope:
    """`Rope` config from `rope_parameters`, `rope_scaling` and `rope_theta`; ValueError if the former two disagree."""
    # Both keys are read first, so that neither is reported as unknown.
    theta, partial = keys.take("rope_theta"), keys.take("partial_rotary_factor")
    outer = {"rope_theta": theta} | ({} if partial is None else {"partial_rotary_factor": partial})
    given: list[Mapping[str, Any]] = []
    absent = all(keys.raw.get(key) is None for key in ("rope_scaling", "rope_parameters"))
    usual = _USUAL.get(keys.family, {}) if absent else {}
    for key in ("rope_scaling", "rope_parameters"):
        value = keys.take(key)
        require(
            value is None or isinstance(value, Mapping),
            key,
            value,
            "give an object with rope_type and its numbers",
        )
        given += [value] if value else []
    parts, phi = keys.family in _IN_PART, keys.family == "phi3"
    every = [{**outer, **each} for each in given or [usual]]
    if phi:
        original = {
            "original_max_position_embeddings": keys.take("original_max_position_embeddings")
        }
        every = [_of_phi3(each, original) for each in every]
    ropes = [one_rope(each, max_positions, parts=parts) for each in every]
    remedy = (
        "rope_parameters means another rotation, and transformers "
        "would follow rope_scaling alone: remove one of them"
    )
    require(len(set(ropes)) == 1, "rope_scaling", dict(*given[:1]), remedy)
    # transformers takes a Phi-3's "yarn" for longrope, too.
    known = not phi or type(ropes[0]) in (Rope, LongRope)
    require(known, "rope_scaling", dict(*given[:1]), "a Phi-3 has default RoPE or longrope")
    return ropes[0]


def _of_phi3(keys: dict[str, Any], original: dict[str, Any]) -> dict[str, Any]:
    """A Phi-3's RoPE keys with its config's original length, and with longrope for what older files call su."""
    kind = keys.get("rope_type", keys.get("type"))
    return keys | {"rope_type": "longrope", **original} if kind in ("longrope", "su") else keys


def one_rope(keys: dict[str, Any], max_positions: int, *, parts: bool) -> Rope:
    """`Rope` config from one dictionary with `rope_theta`, whose keys it removes; ValueError for unknown ones."""
    theta, partial = (
        positive("rope_theta", keys.pop("rope_theta")),
        keys.pop("partial_rotary_factor", 1.0),
    )
    remedy = "only heads of GLM-4 and Phi-3 are rotated in part"
    require(partial == 1.0 or parts, "partial_rotary_factor", partial, remedy)
    share = real(
        "partial_rotary_factor",
        partial,
        "give a share of the channels above 0",
        high=1.0,
        open_low=True,
    )
    kind = keys.pop("rope_type", keys.pop("type", "default"))
    keys.pop("type", None)
    known = isinstance(kind, str) and kind in _ROPES
    require(known, "rope_type", kind, _KNOWN)
    if kind == "yarn":
        for key in ("mscale", "mscale_all_dim"):
            require(
                not keys.get(key),
                f"rope_scaling.{key}",
                keys.get(key),
                "DeepSeek's YaRN variant is not built",
            )
            keys.pop(key, None)
    values: dict[str, Any] = {"theta": theta, "share": share}
    for field in dataclasses.fields(_ROPES[kind]):
        if field.name in (*values, "long"):
            continue
        original = field.name == "original_max_position"
        key = "original_max_position_embeddings" if original else field.name
        default = max_positions if original else field.default
        if kind == "longrope" and field.name == "factor":
            default = max(1.0, max_positions / values["original_max_position"])
        given = keys.pop(key, default)
        needed = given is dataclasses.MISSING
        require(not needed, f"rope_scaling.{key}", None, f"rope type {kind!r} needs it")
        # Null means the default for optional numbers of YaRN and longrope, and is refused for all others.
        null = (
            given is None and field.type.startswith("float") and default is not dataclasses.MISSING
        )
        values[field.name] = default if null else READERS[field.type](f"rope_scaling.{key}", given)
    require(
        not keys,
        "rope_scaling",
        sorted(keys),
        f"these keys are not supported for rope type {kind!r}",
    )
    if kind == "longrope":
        values["long"] = max_positions > values["original_max_position"]
    return _ROPES[kind](**values)


def read_two_ropes(keys: Keys, max_positions: int) -> tuple[Rope, Rope]:
    """`Rope` of layers with windows, and of those without, from a Gemma 3's or OLMo 3's config, of newer or older form.

    In the older form scaling is that of layers without windows.
    """
    given, scaling, theta = (
        keys.take("rope_parameters"),
        keys.take("rope_scaling"),
        keys.take("rope_theta"),
    )
    for key, value in (("rope_parameters", given), ("rope_scaling", scaling)):
        require(value is None or isinstance(value, Mapping), key, value, "give an object")
    kinds, more = dict(given or {}), dict(scaling or {})
    if keys.family == "olmo3" and not set(kinds) & set(_KINDS):
        theta, kinds, more = kinds.pop("rope_theta", theta), {}, kinds | more
    unknown = sorted(set(kinds) - set(_KINDS))
    require(not unknown, "rope_parameters", unknown, f"give {' and '.join(_KINDS)} alone")
    thetas = (theta if keys.family == "olmo3" else keys.take("rope_local_base_freq")), theta
    found = []
    for kind, usual, scaled in zip(_KINDS, thetas, ({}, more), strict=True):
        own = kinds.get(kind) or {}
        require(
            isinstance(own, Mapping),
            f"rope_parameters.{kind}",
            own,
            "give an object with rope_type",
        )
        found.append(one_rope({"rope_theta": usual, **own, **scaled}, max_positions, parts=False))
    return found[0], found[1]
