"""KVzap's linear gate for a model: ridge regression of KVzip+'s scores on hidden states that enter attention."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv import _checks
from jaxkv._errors import require
from jaxkv.analysis.reading import encoded, finite
from jaxkv.arguments import as_model
from jaxkv.attention import Implementation
from jaxkv.engine.compress import finished
from jaxkv.engine.lengths import bucket
from jaxkv.engine.prefill import read_layers
from jaxkv.engine.replay import Padded, replayed, texts_of
from jaxkv.loading import LanguageModel
from jaxkv.policies.scorer import Needs, Replay
from jaxkv.policies.trained import KVzapGate, KVzapWeights
from jaxkv.sharding.mesh import host, place
from jaxkv.text.prompts import Prompt


class FittedGate(NamedTuple):
    """Result of `fit_gate`: KVzap's `gate`, number of `tokens`, and share of the scores' variance `explained` by layer.

    Attributes:
        gate: the gate, for `KVzap(gate=...)`; `gate.to_bytes()` is the content of its file.
        tokens: number of tokens of all texts.
        explained: share of the variance of each layer's scores that the gate explains in these texts, mean over heads.
    """

    gate: KVzapGate
    tokens: int
    explained: tuple[float, ...]


def fit_gate(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    penalty: int | float = 1.0,
    chunk: int = Replay.chunk,
) -> FittedGate:
    """Fits KVzap's linear gate to a model by ridge regression, from the texts' KVzip+ scores; returns a `FittedGate`.

    Each text is read twice by the whole model, and one layer's weights minimise the squared error of the scores'
    logarithms, plus the penalty times the squared weights; biases are not penalised. Sums of products are float64, on
    the host: L x E x E numbers.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids, one at a time; of 750 to 1,250 tokens in the paper.
        penalty: of the squared weights, above 0.
        chunk: tokens of a text that are read again at a time.

    Returns:
        The gate and its fit.

    Raises:
        ValueError: for no texts, texts that are empty or too long, scores that are not finite, and a penalty of 0.
    """
    params, asked = as_model(params), Replay(chunk=chunk, sinks=0, weighted=True)
    penalty = _checks.real(
        "penalty", penalty, "give a number above 0", low=0.0, high=1e30, open_low=True
    )
    config = params.config
    remedy = "some layers have windows: gates are fitted to models whose layers all attend to the whole text"
    require(not any(config.windows), "model", params.name, remedy)
    sums = [_Sums(config.embed, config.kv_heads) for _ in range(config.layers)]
    for prompt in encoded(params, texts):
        for layer, (hidden, scores) in enumerate(_observed(params, prompt, asked)):
            sums[layer].add(hidden, scores)
            finite(params, sums[layer].xy)
    gate = KVzapGate.of_weights(tuple(each.weights(penalty) for each in sums))
    shares = zip(sums, gate.weights, strict=True)
    return FittedGate(
        gate=gate, tokens=sums[0].count, explained=tuple(each.explained(of) for each, of in shares)
    )


def _observed(
    params: LanguageModel, prompt: Any, asked: Replay
) -> list[tuple[Float[np.ndarray, "n E"], Float[np.ndarray, "n K"]]]:
    """Reads one text twice; list by layer of (normed hidden states `[n, E]`, logarithms of KVzip+ scores `[n, K]`).

    A row that receives no attention counts as the least of its head's that receive some.
    """
    flat, axes = params.flat, params.axes
    slots, count = bucket(int(prompt.lengths.max())), int(prompt.lengths[0])
    tokens, length = place(prompt.padded(slots), "B S", axes), place(prompt.lengths, "B", axes)
    ran = dict(enumerate(read_layers(flat, tokens, length, needs=Needs(hidden=True))))
    padded = Padded(
        prompt.padded(slots), prompt.lengths, texts_of(asked, params.text, params.config)
    )
    peaks = finished(
        replayed(flat, ran, padded, asked, implementation=Implementation.XLA, worth=1.0)
    )
    found = []
    for layer, peak in enumerate(peaks):
        hidden = ran[layer].extras["hidden"]
        found.append((host(hidden)[0, :count].astype(np.float64), _logarithms(peak, count)))
    return found


def _logarithms(peak: Float[Array, "B K S"], count: int) -> Float[np.ndarray, "n K"]:
    """Logarithms `[n, K]` of the first sequence's scores; a zero counts as its head's smallest positive score."""
    scores = host(peak.astype(jnp.float32))[0, :, :count].astype(np.float64).T
    least = np.where(scores > 0, scores, np.inf).min(axis=0)
    return np.log(np.maximum(scores, least))


class _Sums:
    """Accumulator of one layer's least-squares sums X^T X, X^T Y in float64: X hidden states beside a 1, Y scores."""

    def __init__(self, embed: int, heads: int):
        """Sets all sums to zero, for hidden states of size `embed` and scores of `heads` kv heads."""
        self.count, self.squares = 0, np.zeros(heads)
        self.xx, self.xy = np.zeros((embed + 1, embed + 1)), np.zeros((embed + 1, heads))

    def add(self, hidden: Float[np.ndarray, "n E"], scores: Float[np.ndarray, "n K"]) -> None:
        """Adds one text's products of hidden states and scores, and its number of tokens, to the sums in place."""
        x = np.concatenate([hidden, np.ones((len(hidden), 1))], axis=1)
        self.count += len(x)
        self.xx += x.T @ x
        self.xy += x.T @ scores
        self.squares += (scores**2).sum(axis=0)

    def weights(self, penalty: float) -> KVzapWeights:
        """Ridge solution as float32 `KVzapWeights`: weights penalised by `penalty`, biases not."""
        ridge = np.full(len(self.xx), penalty)
        ridge[-1] = 0.0
        solved = np.linalg.solve(self.xx + np.diag(ridge), self.xy).astype(np.float32)
        return KVzapWeights(weight=solved[:-1].T, bias=solved[-1])

    def explained(self, weights: KVzapWeights) -> float:
        """Share of the scores' variance that the weights explain, mean over heads; 1 where scores do not vary."""
        of = np.concatenate([weights.weight, weights.bias[:, None]], axis=1).astype(np.float64).T
        error = self.squares - 2 * (of * self.xy).sum(axis=0) + (of * (self.xx @ of)).sum(axis=0)
        spread = self.squares - self.xy[-1] ** 2 / self.count
        return float(
            np.where(spread > 0, 1 - error / np.where(spread > 0, spread, 1.0), 1.0).mean()
        )
