"""`similarity`: attention that layers share (OmniKV); `filter_layers`: the best layers to choose tokens for others."""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv import _checks
from jaxkv._checks import settled
from jaxkv._errors import require
from jaxkv.analysis.reading import encoded, finite, layers_of, whole_layers_of
from jaxkv.arguments import as_model
from jaxkv.attention import window_mass
from jaxkv.loading import LanguageModel
from jaxkv.policies.reading import WHOLE, sources, whole_layers
from jaxkv.sharding.collectives import most_of_devices
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host
from jaxkv.text.prompts import Prompt


class FilterLayers(NamedTuple):
    """Result of `filter_layers`: the best OmniKV filter layers.

    Attributes:
        filters: indices of the layers, ascending.
        carried: share of attention that falls on the chosen tokens, averaged over the layers that read a choice.
        mass: the `similarity` they were found in.
    """

    filters: tuple[int, ...]
    carried: float
    mass: Float[np.ndarray, "L L"]


@settled
def similarity(
    params: LanguageModel, texts: Sequence[Prompt], *, share: float = 0.067, queries: int = 64
) -> Float[np.ndarray, "L L"]:
    """Measures how much of each layer's attention falls on the top tokens of lower layers.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids.
        share: number of most attended tokens to look at, as a share of those that a query sees.
        queries: number of last tokens of each text whose attention is measured.

    Returns:
        At [l, m], for m >= l: the share of m's attention on l's most attended tokens, averaged over queries and texts;
        0 below the diagonal. L counts the layers without a window.

    Raises:
        ValueError: for texts that are empty or too long for the model.

    References:
        OmniKV, section 3 (inter-layer attention similarity) and figure 8; a token's weight in a layer is its largest
        probability over the query heads, and these sum to one.
    """
    params, remedy = as_model(params), "give a share of the tokens, above 0 and below 1"
    below = math.nextafter(1.0, 0.0)
    share = _checks.real("share", share, remedy, high=below, open_low=True)
    queries = _checks.whole("queries", queries)
    found = []
    for text in encoded(params, texts):
        count = len(text.ids[0])
        layers = [
            host(_weights(out.q, out.k, out.q_positions, axes=params.axes))[0]
            for _, out in layers_of(params, text, queries=min(queries, count))
        ]
        found.append(_shared(np.stack(layers), np.arange(count)[-queries:], share))
    return finite(params, np.mean(found, axis=0))


@program(static=("axes",))
def _weights(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    *,
    axes: Axes | None,
) -> Float[Array, "B w S"]:
    """Attention weights `[B, w, S]` of queries on tokens: largest probability over all heads, scaled to sum to one."""
    largest_of_window = partial(window_mass, reduce=lambda shares, at: shares.max(axis=(0, 1)))
    per_query = jax.vmap(largest_of_window, in_axes=(3, None, 1), out_axes=1)
    largest = per_query(q[:, :, :, :, None], k, positions[:, :, None]).max(axis=2)
    for letter in "KG":
        largest = most_of_devices(largest, letter, axes)
    return largest / largest.sum(axis=-1, keepdims=True)


def _shared(
    weights: Float[np.ndarray, "L w S"], positions: Int[np.ndarray, " w"], share: float
) -> np.ndarray:
    """Similarity map `[L, L]` of one text: at [l, m] for m >= l, share of m's attention weights on l's top tokens."""
    layers = len(weights)
    out = np.zeros((layers, layers))
    for row, at in enumerate(positions):
        seen = weights[:, row, : at + 1]
        count = max(1, int(share * (at + 1)))
        top = np.argsort(-seen, axis=1, kind="stable")[:, :count]
        for layer in range(layers):
            out[layer, layer:] += seen[layer:, top[layer]].sum(axis=1)
    return out / len(positions)


@settled
def filter_layers(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    m: int = 3,
    adjacent: int = 1,
    most_whole: int | None = None,
    share: float = 0.067,
    queries: int = 64,
) -> FilterLayers:
    """Finds the `m` OmniKV filter layers whose chosen tokens carry most attention of later layers.

    Args:
        params: from `jaxkv.load`.
        texts: as for `similarity`.
        m: number of filter layers.
        adjacent: number of layers above each filter layer that read everything, too.
        most_whole: largest number of layers that read everything; by default a quarter of all, as in the paper.
            Layers with a window count nowhere.
        share: as for `similarity`.
        queries: as for `similarity`.

    Returns:
        The best of all sets of filter layers, as indices of the model's layers.

    Raises:
        ValueError: as `similarity` does, and if no set leaves enough layers to read a choice.
    """
    params = as_model(params)
    indices = whole_layers_of(params)
    layers, m = len(indices), _checks.whole("m", m)
    adjacent = _checks.whole("adjacent", adjacent, least=0)
    most = -(-layers // 4) if most_whole is None else _checks.whole("most_whole", most_whole)
    sets = {
        filters: sources(filters, adjacent, layers)
        for filters in itertools.combinations(range(layers - 1), m)
        if filters[0] <= most
        and len(whole_layers(filters, adjacent, layers)) <= min(most, layers - 1)
    }
    remedy = f"at most {most} of {layers} layers may read everything: give fewer filters"
    require(bool(sets), "m", m, remedy)
    mass = similarity(params, texts, share=share, queries=queries)

    def carried(filters: tuple[int, ...]) -> float:
        reads = enumerate(sets[filters])
        return float(np.mean([mass[source, at] for at, source in reads if source != WHOLE]))

    best = max(sets, key=carried)
    return FilterLayers(tuple(indices[layer] for layer in best), carried(best), mass)
