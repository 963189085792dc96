"""`similarity`: attention that layers share (OmniKV); `filter_layers`: the best layers to choose tokens for others."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv import _checks
from jaxkv._drawing import COLUMN, layer_names, paper
from jaxkv._errors import require
from jaxkv.analysis.figures import BELOW_ONE, Figure, mean_of
from jaxkv.analysis.measuring import Arrays, Layer, QueryMeasure, Text, measured
from jaxkv.arguments import as_model
from jaxkv.attention import window_mass
from jaxkv.loading import LanguageModel
from jaxkv.policies.reading import WHOLE, sources, whole_layers
from jaxkv.sharding.collectives import most_of_devices
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host
from jaxkv.text.prompts import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Similarity(Figure):
    """Result of `similarity`: share of each layer's attention on the top tokens of each lower layer (`mass`).

    Attributes:
        mass: `f32[L, L]` at [l, m], for m >= l: the share of m's attention on l's most attended tokens, averaged over
            queries and texts; 0 below the diagonal. L counts the layers without a window.
        share: number of most attended tokens, as a share of those that a query sees.
        queries: number of last tokens of each text whose attention is measured.
        lengths: number of tokens of each text.
    """

    mass: Float[np.ndarray, "L L"]
    share: float
    queries: int
    lengths: tuple[int, ...]

    def picture(self, path: str | Path, filters: Sequence[int] = ()) -> None:
        """Writes a picture file: the similarity map as a heat map, with the layers in `filters` marked.

        Args:
            path: the file; its suffix names the format, such as .png or .svg.
            filters: indices of layers to mark.

        Raises:
            ImportError: without matplotlib, naming the extra that brings it.
        """
        layers = len(self.mass)
        indices = self.indices(layers)
        marked = [_checks.index("filters", layer, indices[-1] + 1) for layer in filters]
        upper = np.where(np.arange(layers)[:, None] <= np.arange(layers), self.mass, np.nan)
        with paper(path, width=COLUMN, height=2.9) as figure:
            panel = figure.add_subplot()
            image = panel.imshow(upper, vmin=0, vmax=1, cmap="viridis", origin="upper")
            figure.colorbar(
                image, label=f"share of attention on the top {self.share:.1%} of tokens"
            )
            panel.set(xlabel="layer that reads", ylabel="layer that chooses")
            layer_names(panel.xaxis, indices)
            layer_names(panel.yaxis, indices)
            for layer in marked:
                require(
                    layer in indices,
                    "filters",
                    layer,
                    f"give some of {', '.join(map(str, indices))}",
                )
                panel.axhline(indices.index(layer), color="#D55E00", linewidth=0.8, linestyle="--")

    def records(self) -> list[dict[str, Any]]:
        """List of dicts, one per layer but the last: share of its own and higher layers' attention on its top keys."""
        above = [self.mass[layer, layer + 1 :] for layer in range(len(self.mass))]
        return [
            {
                "layer": self.indices(len(self.mass))[layer],
                "of itself": float(self.mass[layer, layer]),
                "of the next": float(each[0]),
                "of all above": float(each.mean()),
                "least": float(each.min()),
            }
            for layer, each in enumerate(above[:-1])
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterLayers:
    """Result of `best_filters`: best OmniKV filter layers (`filters`), attention share on their tokens (`carried`).

    Attributes:
        filters: indices of the layers, ascending.
        carried: share of attention that falls on the chosen tokens, averaged over the layers that read a choice.
        similarity: the map they were found in.
    """

    filters: tuple[int, ...]
    carried: float
    similarity: Similarity

    def to_json(self) -> str:
        """JSON text of all fields, the similarity map rounded to four digits."""
        similarity = dataclasses.asdict(self.similarity) | {
            "mass": np.round(self.similarity.mass, 4).tolist()
        }
        return json.dumps(
            {"filters": self.filters, "carried": round(self.carried, 4), "similarity": similarity}
        )


def similarity(
    params: LanguageModel, texts: Sequence[Prompt], *, share: float = 0.067, queries: int = 64
) -> Similarity:
    """Measures how much of each layer's attention falls on the top tokens of lower layers, as a `Similarity`.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids; each is run through the model once, under full attention.
        share: number of most attended tokens to look at, as a share of those that a query sees.
        queries: number of last tokens of each text whose attention is measured.

    Returns:
        The map.

    Raises:
        ValueError: for texts that are empty or too long for the model.

    References:
        OmniKV, section 3 (inter-layer attention similarity) and figure 8; a token's weight in a layer is its largest
        probability over the query heads, and these sum to one.
    """
    return measured(params, texts, [SimilarityMeasure(share=share, queries=queries)])[0]


class SimilarityMeasure(QueryMeasure):
    """`Measure` class behind `similarity`: share of layers' attention on lower layers' top tokens, by last queries."""

    def __init__(self, *, share: float = 0.067, queries: int = 64):
        remedy = "give a share of the tokens, above 0 and below 1"
        self.share = _checks.real("share", share, remedy, high=BELOW_ONE, open_low=True)
        self.queries = _checks.whole("queries", queries, "give at least 1 query")

    def of_layer(self, text: Text, layer: Layer) -> Arrays:
        """Tuple of one array `[w, S]`: attention weight of each query on each token in one layer."""
        q, positions = self.last(text, layer)
        return (host(_weights(q, layer.out.k, positions, axes=text.axes))[0],)

    def of_text(self, text: Text, layers: list[Arrays]) -> Arrays:
        """Tuple of one array `[L, L]`, a text's similarity map: layer m's attention on l's top tokens at [l, m]."""
        weights = np.stack([each for (each,) in layers])
        return (_shared(weights, np.arange(text.count - weights.shape[1], text.count), self.share),)

    def figure(self, texts: list[Text], found: list[Arrays]) -> Similarity:
        """`Similarity` from the maps of all texts: their mean over texts."""
        return Similarity(
            mass=mean_of([each for (each,) in found]),
            share=self.share,
            queries=self.queries,
            lengths=tuple(text.count for text in texts),
        )


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


def best_filters(
    found: Similarity, *, m: int = 3, adjacent: int = 1, most_whole: int | None = None
) -> FilterLayers:
    """Finds the `m` OmniKV filter layers whose chosen tokens carry most attention of later layers, as `FilterLayers`.

    Args:
        found: the similarity map.
        m: number of filter layers.
        adjacent: number of layers above each filter layer that read everything, too.
        most_whole: largest number of layers that read everything; by default a quarter of all, as in the paper.
            Layers with a window count nowhere.

    Returns:
        The best of all sets of filter layers, as indices of the model's layers.

    Raises:
        ValueError: if no set leaves enough layers to read a choice.
    """
    m, adjacent, most = _settings(m, adjacent, most_whole, len(found.mass))
    layers = len(found.mass)
    finite = bool(np.isfinite(found.mass).all())
    require(finite, "found", "NaN", "the model's attention is not finite: check its weights")
    best: tuple[float, tuple[int, ...]] | None = None
    for filters in itertools.combinations(range(layers - 1), m):
        if filters[0] > most or len(whole_layers(filters, adjacent, layers)) > most:
            continue
        reads = sources(filters, adjacent, layers)
        carried = [
            found.mass[source, layer] for layer, source in enumerate(reads) if source != WHOLE
        ]
        score = float(np.mean(carried)) if carried else -1.0
        if best is None or score > best[0]:
            best = (score, filters)
    remedy = f"{layers} layers, of which at most {most} read everything, leave no such set: give fewer filters"
    require(best is not None and best[0] >= 0, "m", m, remedy)
    assert best is not None
    indices = found.indices(layers)
    return FilterLayers(
        filters=tuple(indices[layer] for layer in best[1]), carried=best[0], similarity=found
    )


def _settings(m: int, adjacent: int, most_whole: int | None, layers: int) -> tuple[int, int, int]:
    """Tuple of `best_filters`' `m`, `adjacent`, `most_whole` as validated ints; None `most_whole` gets its default."""
    m = _checks.whole("m", m, "give at least 1 filter layer")
    adjacent = _checks.whole("adjacent", adjacent, "give 0 or more layers", least=0)
    most = -(-layers // 4) if most_whole is None else most_whole
    return (
        m,
        adjacent,
        _checks.whole("most_whole", most, "give how many layers may read everything, 1 or more"),
    )


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
    """Finds a model's OmniKV filter layers from texts by `similarity` and `best_filters`; returns a `FilterLayers`.

    Args:
        params: from `jaxkv.load`.
        texts: as for `similarity`.
        m: as for `best_filters`.
        adjacent: as for `best_filters`.
        most_whole: as for `best_filters`.
        share: as for `similarity`.
        queries: as for `similarity`.

    Returns:
        The filter layers, and the map they were found in.

    Raises:
        ValueError: as `similarity` and `best_filters` do.
    """
    # Invalid settings are refused before the texts are run.
    _settings(m, adjacent, most_whole, as_model(params).config.windows.count(None))
    found = similarity(params, texts, share=share, queries=queries)
    return best_filters(found, m=m, adjacent=adjacent, most_whole=most_whole)
