"""Runs texts under full attention, layer by layer, to measure attention."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax import lax
from jaxtyping import Array

from jaxkv import _checks
from jaxkv._errors import require
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.prefill import iterate_layer_outputs
from jaxkv.engine.prefill_layer import LayerOut
from jaxkv.loading import LanguageModel
from jaxkv.policies.reads import list_full_attention_layers
from jaxkv.policies.scorer import Needs
from jaxkv.sharding.mesh import count_padding_sequences, place_host_array
from jaxkv.text.prompts import EncodedPrompts, Prompt, encode_prompts


def encode_texts(
    params: LanguageModel, texts: Sequence[Prompt], following: int = 0
) -> list[EncodedPrompts]:
    """List each text's `EncodedPrompts`, a copy per data group; ValueError if too long or up to `following` tokens."""
    listed = _checks.validate_non_empty_tuple("texts", texts, "use a list of one or more texts")
    most = params.config.max_positions
    out = []
    for text in listed:
        each = encode_prompts(text, params.text, params.config, raw=True, close=False)
        count = len(each.ids[0])
        require(each.single, "texts", f"{len(each.ids)} in one", "use a list of single texts")
        remedy = f"use a text of {following + 1} to {most} tokens"
        require(following < count <= most, "texts", f"{count} tokens", remedy)
        out.append(each.repeat_last_prompt(count_padding_sequences(1, params.axes)))
    return out


def find_full_attention_layers(params: LanguageModel, *, sinks: bool = False) -> tuple[int, ...]:
    """Return indices of layers without sliding window; ValueError if none, or for sink logits unless `sinks`."""
    layers = list_full_attention_layers(params.config.sliding_windows)
    remedy = "use another model"
    require(bool(layers), "params", params.name, f"every layer has a sliding window: {remedy}")
    require(
        sinks or not params.config.sink_logits,
        "params",
        params.name,
        f"its attention has sink logits: {remedy}",
    )
    return layers


def iterate_full_attention_layers(
    params: LanguageModel, text: EncodedPrompts, *, sinks: bool = False, **needs: Any
) -> Iterator[tuple[int, LayerOut]]:
    """Prefill a text layer by layer; yield (index, `LayerOut` made for `needs`) of layers without sliding window.

    Sink logits are rejected unless `sinks`.
    """
    whole = find_full_attention_layers(params, sinks=sinks)
    tokens = text.pad_ids(round_up_to_bucket(len(text.ids[0])))
    given = (
        place_host_array(tokens, "B S", params.axes),
        place_host_array(text.prompt_lengths, "B", params.axes),
    )
    for index, out in enumerate(
        iterate_layer_outputs(params.flat_decoder, *given, needs=Needs(**needs))
    ):
        if index in whole:
            yield index, out
        del out


def require_finite(params: LanguageModel, values: np.ndarray) -> np.ndarray:
    """Return the array, floats as float32 and integers unchanged; ValueError if a value is not finite."""
    remedy = "the model's attention is not finite: check its weights"
    require(bool(np.isfinite(values).all()), "params", params.name, remedy)
    return values if values.dtype.kind in "iu" else values.astype(np.float32)


def map_kv_heads(
    function: Callable[..., Any], per_head: Sequence[Array], per_sequence: Sequence[Array]
) -> Any:
    """Apply `function` to one kv head of one sequence at a time, to save memory; return stacked results `[B, K, ...]`.

    `function` gets the arrays `[B, K, ...]`, then the arrays `[B, ...]`, each without its batch and head axes.
    """

    def sequence(given: tuple[list[Array], list[Array]]) -> Any:
        heads, shared = given
        return lax.map(lambda arrays: function(*arrays, *shared), heads)

    return lax.map(sequence, ([*per_head], [*per_sequence]))
