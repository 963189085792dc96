"""KVzap's linear gate for a model: ridge regression of KVzip+'s scores on the hidden states before attention."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxkv import _checks
from jaxkv._errors import require
from jaxkv.analysis.full_attention import (
    encode_texts,
    iterate_full_attention_layers,
    require_finite,
)
from jaxkv.attention import Implementation
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.progress import run_generator
from jaxkv.engine.replay import PaddedPrompts, compute_peak_attention, encode_second_pass_texts
from jaxkv.loading import LanguageModel
from jaxkv.policies.scorer import PromptReplay, ReplayWeighting
from jaxkv.policies.trained import KVzapGate, KVzapWeights
from jaxkv.sharding.mesh import copy_to_host
from jaxkv.text.prompts import Prompt


class FittedGate(NamedTuple):
    """Result of `fit_kvzap_gate`: the gate, number of tokens, and explained share of the scores' variance by layer.

    Attributes:
        gate: the gate, for `KVzap(gate=...)`; `gate.encode_safetensors()` is the content of its file.
        tokens: number of tokens of all texts.
        explained: share of the variance of each layer's scores that the gate explains in these texts, mean over heads.
    """

    gate: KVzapGate
    tokens: int
    explained: tuple[float, ...]


def fit_kvzap_gate(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    penalty: int | float = 1.0,
    chunk: int = PromptReplay.chunk,
) -> FittedGate:
    """Fit KVzap's linear gate to a model by ridge regression on the KVzip+ scores of texts; return a `FittedGate`.

    The model reads each text twice. The weights of a layer minimise the squared error of the logarithms of its scores,
    plus the penalty times the squared weights; biases are not penalised. Sums of products are float64 on the host,
    L x E x E numbers.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids; in the paper they have 750 to 1,250 tokens.
        penalty: penalty of the squared weights, above 0.
        chunk: number of tokens per chunk of the second pass.

    Returns:
        The gate and its fit.

    Raises:
        ValueError: for no texts, empty or too long texts, scores that are not finite, and a penalty of 0.
    """
    asked = PromptReplay(chunk=chunk, sinks=0, weighting=ReplayWeighting.VALUES)
    config = params.config
    penalty = _checks.validate_float(
        "penalty", penalty, "use a number above 0", low=0.0, high=1e30, open_low=True
    )
    remedy = (
        "some layers have sliding windows: use a model whose layers all attend to the whole text"
    )
    require(not any(config.sliding_windows), "model", params.name, remedy)
    size = config.embed + 1 + config.kv_heads
    products = np.zeros((config.layers, size, size))
    for prompt in encode_texts(params, texts):
        for layer, (hidden, scores) in enumerate(_collect_regression_data(params, prompt, asked)):
            rows = np.concatenate([hidden, np.ones((len(hidden), 1)), scores], axis=1)
            products[layer] += rows.T @ rows
    require_finite(params, products)
    fits = [_fit_layer_gate(each, config.embed + 1, penalty) for each in products]
    return FittedGate(
        gate=KVzapGate.create_from_weights(tuple(weights for weights, _ in fits)),
        tokens=int(products[0, config.embed, config.embed]),
        explained=tuple(share for _, share in fits),
    )


def _collect_regression_data(
    params: LanguageModel, prompt: Any, asked: PromptReplay
) -> list[tuple[Float[np.ndarray, "n E"], Float[np.ndarray, "n K"]]]:
    """Prefill and replay one text; list (normed hidden states `[n, E]`, logarithms of KVzip+ scores `[n, K]`) by layer.

    An entry without attention counts as the smallest one with attention in its head.
    """
    ran = dict(iterate_full_attention_layers(params, prompt, hidden=True))
    count = len(prompt.ids[0])
    asks = encode_second_pass_texts(asked, params.text, params.config)
    padded = PaddedPrompts(prompt.pad_ids(round_up_to_bucket(count)), prompt.prompt_lengths, asks)
    xla = Implementation.XLA
    peaks = run_generator(
        compute_peak_attention(
            params.flat_decoder, ran, padded, asked, implementation=xla, worth=1.0
        )
    )
    found = []
    for layer, peak in enumerate(peaks):
        scores = copy_to_host(peak.astype(jnp.float32))[0, :, :count].astype(np.float64).T
        least = np.where(scores > 0, scores, np.inf).min(axis=0)
        states = copy_to_host(ran[layer].extras["hidden"])[0, :count].astype(np.float64)
        found.append((states, np.log(np.maximum(scores, least))))
    return found


def _fit_layer_gate(
    products: Float[np.ndarray, "n n"], size: int, penalty: float
) -> tuple[KVzapWeights, float]:
    """Solve one layer's ridge regression from sums of products; return `KVzapWeights` and the explained variance share.

    `products` are sums over tokens of all products of hidden states, a 1 (`size` numbers with it) and scores. The share
    is the mean over heads, 1 for constant scores.
    """
    xx = products[:size, :size]
    xy = products[:size, size:]
    yy = np.diag(products)[size:]
    ridge = np.full(size, penalty)
    ridge[-1] = 0.0
    solved = np.linalg.solve(xx + np.diag(ridge), xy).astype(np.float32)
    of = solved.astype(np.float64)
    error = yy - 2 * (of * xy).sum(axis=0) + (of * (xx @ of)).sum(axis=0)
    spread = yy - xy[-1] ** 2 / xx[-1, -1]
    share = np.where(spread > 0, 1 - error / np.where(spread > 0, spread, 1.0), 1.0).mean()
    return KVzapWeights(weight=solved[:-1].T, bias=solved[-1]), float(share)
