"""Values of a GGUF's metadata by key, with their types validated."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv._errors import require
from jaxkv.checkpoints.gguf_names import TABLES

_KINDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
}


class GgufMetadata:
    """Metadata of a GGUF file by key, whose getters raise ValueError for values of another type than requested.

    Attributes:
        values: metadata by key, as plain Python values.
        arch: llama.cpp's name of the architecture, with which the keys of its numbers begin.
    """

    def __init__(self, values: Mapping[str, Any]):
        """Wrap GGUF metadata by key, and read the architecture's name; ValueError if it is not a string."""
        self.values = values
        self.arch = self.get_value("general.architecture", kind=str)

    def get_value(self, key: str, default: Any = None, *, kind: type) -> Any:
        """Return a GGUF metadata value by key, or `default` if absent; ValueError if not of type `kind`."""
        value = self.values.get(key)
        if value is None:
            return default
        # An integer is accepted as a float; a bool as neither.
        sound = type(value) in ((int, float) if kind is float else (kind,))
        require(sound, key, value, f"not {_KINDS[kind]}: convert the model again")
        return value

    def get_list(self, key: str, kind: type) -> tuple[Any, ...]:
        """Return a GGUF metadata list by key as a tuple, () if absent; ValueError for items not of `kind`."""
        values = self.get_value(key, [], kind=list)
        sound = all(type(value) is kind for value in values)
        require(sound, key, values[:3], f"not a list of {_KINDS[kind]}: convert the model again")
        return tuple(values)

    def get_hyperparameter(self, key: str, default: Any = None, *, kind: type = int) -> Any:
        """Return the number at `{arch}.{key}`, else `default`; ValueError if no number, or if layers differ."""
        key = f"{self.arch}.{key}"
        value = self.values.get(key)
        if isinstance(value, list):
            # Models with different layers, such as OpenELM, have one value per layer.
            require(
                len(set(value)) == 1,
                key,
                value[:8],
                "layers of different shapes are not supported: use another model",
            )
            value = value[0]
        else:
            value = self.get_value(key, default, kind=kind)
        remedy = f"not {_KINDS[kind]}: convert the model again"
        require(type(value) in (int, kind), key, value, remedy)
        return value

    def get_special_ids(self) -> dict[str, int | None]:
        """Return a GGUF's special token ids by kind (bos, eos, eot, pad, unk); llama.cpp's defaults or None."""
        ids = {
            kind: self.get_value(f"tokenizer.ggml.{key}_token_id", kind=int)
            for kind, key in TABLES["ids"].items()
        }
        tokens = self.get_value("tokenizer.ggml.tokens", [], kind=list)
        # llama.cpp's defaults for a sentencepiece vocabulary; its default for "gpt2" is 11, a comma in most files.
        if self.get_value("tokenizer.ggml.model", kind=str) == "llama":
            ids |= {
                kind: id
                for kind, id in TABLES["sentencepiece"].items()
                if ids[kind] is None and id < len(tokens)
            }
        ends = TABLES["turn_ends"].get(self.arch)
        if ids["eot"] is None and ends in tokens:
            ids["eot"] = tokens.index(ends)
        return ids


def round_to_shortest_decimal(value: float) -> float:
    """Return the shortest decimal that rounds to this float32, as a float: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
