"""Published models: their configs, and what transformers counts, by the catalogue's names or `published.json`'s."""

import json

import running

from jaxkv.models.decoder import Decoder, named_parameters
from jaxkv.planning.catalog import catalog

PUBLISHED = json.loads((running.GOLDEN / "published.json").read_text("utf-8"))
for _name, _model in PUBLISHED.items():
    if "config" not in _model:
        _model["config"] = catalog()[_name].raw


def count_elements(config) -> int:
    """Numbers in all arrays of a decoder, which is not allocated."""
    decoder = Decoder(config, dtype="bfloat16")
    return sum(each.get_value().size for _, each in named_parameters(decoder))
