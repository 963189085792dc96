"""Runs texts under full attention, layer by layer, to measure attention."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax import lax
from jaxtyping import Array

from jaxkv import _checks
from jaxkv._errors import require
from jaxkv.engine.lengths import bucket
from jaxkv.engine.prefill import read_layers
from jaxkv.engine.prefill_layer import LayerOut
from jaxkv.loading import LanguageModel
from jaxkv.policies.reads import without_window
from jaxkv.policies.scorer import Needs
from jaxkv.sharding.mesh import missing, place
from jaxkv.text.prompts import Encoded, Prompt, encode


def encoded(params: LanguageModel, texts: Sequence[Prompt], following: int = 0) -> list[Encoded]:
    """Encode texts, each once per data group of a mesh; ValueError unless all have more than `following` tokens."""
    listed = _checks.several("texts", texts, "use a list of one or more texts")
    most, out = params.config.max_positions, []
    for text in listed:
        each = encode(text, params.text, params.config, raw=True, close=False)
        count = len(each.ids[0])
        require(each.single, "texts", f"{len(each.ids)} in one", "use a list of single texts")
        remedy = f"use a text of {following + 1} to {most} tokens"
        require(following < count <= most, "texts", f"{count} tokens", remedy)
        out.append(each.with_copies(missing(1, params.axes)))
    return out


def whole_layers_of(params: LanguageModel) -> tuple[int, ...]:
    """Return the layers without sliding window; ValueError for models whose attention cannot be measured."""
    layers, remedy = without_window(params.config.sliding_windows), "use another model"
    require(bool(layers), "params", params.name, f"every layer has a sliding window: {remedy}")
    sinks = params.config.sink_logits
    require(not sinks, "params", params.name, f"its attention has sink logits: {remedy}")
    return layers


def layers_of(params: LanguageModel, text: Encoded, **needs: Any) -> Iterator[tuple[int, LayerOut]]:
    """Run a text; yield index and output, with these `Needs`, of each layer without sliding window."""
    whole, tokens = whole_layers_of(params), text.padded(bucket(len(text.ids[0])))
    given = place(tokens, "B S", params.axes), place(text.lengths, "B", params.axes)
    for index, out in enumerate(read_layers(params.flat, *given, needs=Needs(**needs))):
        if index in whole:
            yield index, out
        del out


def finite(params: LanguageModel, values: np.ndarray) -> np.ndarray:
    """Return values, floats as float32; ValueError unless all are finite."""
    remedy = "the model's attention is not finite: check its weights"
    require(bool(np.isfinite(values).all()), "params", params.name, remedy)
    return values if values.dtype.kind in "iu" else values.astype(np.float32)


def by_head(
    function: Callable[..., Any], per_head: Sequence[Array], per_sequence: Sequence[Array]
) -> Any:
    """Call `function` for one kv head of one sequence at a time, to save memory; return the results `[B, K, ...]`.

    `function` gets the arrays `[B, K, ...]`, then the arrays `[B, ...]`, each without its batch and head axes.
    """

    def sequence(given: tuple[list[Array], list[Array]]) -> Any:
        heads, shared = given
        return lax.map(lambda arrays: function(*arrays, *shared), heads)

    return lax.map(sequence, ([*per_head], [*per_sequence]))
