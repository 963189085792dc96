"""`Keys`: values of a Hugging Face config by Llama's names of keys, with transformers' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxkv._checks import flag, whole
from jaxkv._errors import require
from jaxkv.models.hub_defaults import DEFAULTS

# A family's own names of keys, by Llama's names.
_CALLED = {
    "cohere": {"rms_norm_eps": "layer_norm_eps"},
    "cohere2": {"rms_norm_eps": "layer_norm_eps"},
    "falcon": {
        "attention_bias": "bias",
        "hidden_act": "activation",
        "intermediate_size": "ffn_hidden_size",
        "mlp_bias": "bias",
        "num_key_value_heads": "num_kv_heads",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    "gemma2": {"hidden_act": "hidden_activation"},
    "gemma3_text": {"hidden_act": "hidden_activation"},
    # `intermediate_size` is the width of dense blocks, of which there are none.
    "qwen3_moe": {"intermediate_size": "moe_intermediate_size"},
}


class Keys:
    """Reader of a config's values by Llama's key names that records the keys read (`taken`)."""

    def __init__(self, raw: Mapping[str, Any], family: str):
        self.raw, self.family, self.taken = raw, family, {"model_type"}

    def called(self, key: str) -> str:
        """The family's own name, as text, for a config key given by Llama's name."""
        return _CALLED.get(self.family, {}).get(key, key)

    def has(self, key: str) -> bool:
        """True if transformers' config class of the family has a default for the key."""
        return self.called(key) in DEFAULTS[self.family]

    def given(self, key: str) -> bool:
        """True if the config contains the key (Llama's name, translated to the family's), even with the value null."""
        return self.called(key) in self.raw

    def take(self, key: str) -> Any:
        """Value of a key, marked as read; if the config leaves it out, the default of transformers' config class."""
        name = self.called(key)
        self.taken.add(name)
        return self.raw.get(name, DEFAULTS[self.family].get(name))

    def whole(self, key: str, *, null: int | None = None, least: int = 1) -> int:
        """Integer value of a key, marked as read; a null becomes the argument `null`; ValueError if not an integer."""
        value = self.take(key)
        value = null if value is None else value
        require(value is not None, self.called(key), value, "the model's config must give it")
        return whole(self.called(key), value, least=least)

    def flag(self, key: str) -> bool:
        """Bool value of a key, marked as read; null counts as false, as in transformers; ValueError if not a bool."""
        value = self.take(key)
        return flag(self.called(key), False if value is None else value)
