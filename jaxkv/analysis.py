"""Which layers attend to the same tokens, and which of them choose best what the others read."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv._drawing import drawing
from jaxkv._errors import require
from jaxkv._settings import settled
from jaxkv.attention import window_mass
from jaxkv.axes import Axes, host, missing, most_of_devices, place, program
from jaxkv.engine.plan import bucket
from jaxkv.engine.prefill import read_layers
from jaxkv.loading import LanguageModel
from jaxkv.policies.reading import WHOLE, sources, whole_layers
from jaxkv.text.prompts import Prompt, encode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Similarity:
    """How much of one layer's attention falls on the tokens that another one's falls on most.

    Attributes:
        mass: `f32[L, L]` at [l, m], for m >= l: the share of m's attention on l's most attended tokens, averaged over
            queries and texts; 0 below the diagonal.
        share: most attended tokens, as a share of those that could be attended to.
        queries: last tokens of each text whose attention is looked at.
        lengths: tokens of each text.
    """

    mass: Float[np.ndarray, "L L"]
    share: float
    queries: int
    lengths: tuple[int, ...]

    def picture(self, path: str | Path, filters: Sequence[int] = ()) -> None:
        """Draws the map.

        Args:
            path: where to; the suffix says how, such as .png.
            filters: layers to mark.

        Raises:
            ImportError: without matplotlib, naming the extra that brings it.
        """
        pyplot = drawing()
        figure, axes = pyplot.subplots(figsize=(6.4, 5.2), layout="constrained")
        layers = len(self.mass)
        upper = np.where(np.arange(layers)[:, None] <= np.arange(layers), self.mass, np.nan)
        image = axes.imshow(upper, vmin=0, vmax=1, cmap="viridis", origin="upper")
        figure.colorbar(image, label=f"share of attention on the top {self.share:.1%} of tokens")
        axes.set(xlabel="layer that reads", ylabel="layer that chooses")
        for layer in filters:
            axes.axhline(layer, color="red", linewidth=0.8)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterLayers:
    """The best filter layers of a model.

    Attributes:
        filters: the layers, ascending.
        carried: the share of the attention of layers that read a choice which falls on tokens chosen, averaged.
        similarity: the map they were found in.
    """

    filters: tuple[int, ...]
    carried: float
    similarity: Similarity

    def to_json(self) -> str:
        """All of it, the map included."""
        similarity = dataclasses.asdict(self.similarity) | {"mass": np.round(self.similarity.mass, 4).tolist()}
        return json.dumps({"filters": self.filters, "carried": round(self.carried, 4), "similarity": similarity})


@settled
def similarity(
    params: LanguageModel, texts: Sequence[Prompt], *, share: float = 0.067, queries: int = 64
) -> Similarity:
    """Measures how much attention layers share.

    Args:
        params: from `jaxkv.load`.
        texts: long ones, or ids; each is run through the model once, under full attention.
        share: most attended tokens to look at, as a share of those a query sees.
        queries: last tokens of each text whose attention is looked at.

    Returns:
        The map.

    Raises:
        ValueError: for texts that are empty or too long for the model.

    References:
        OmniKV, section 3 (inter-layer attention similarity) and figure 8; a token's weight in a layer is its largest
        probability over the query heads, and these sum to one.
    """
    several = not isinstance(texts, str) and bool(texts)
    require(several, "texts", texts, "give a list of one or more texts")
    require(0 < share < 1, "share", share, "give a share of the tokens, between 0 and 1")
    require(queries >= 1, "queries", queries, "give at least 1 query")
    flat, axes, most = params.flat, params.axes, params.config.max_positions
    total, lengths = np.zeros((params.config.layers,) * 2), []
    for text in texts:
        encoded = encode(text, params.text, params.config, raw=True, close=False)
        require(encoded.single, "texts", f"{len(encoded.ids)} in one", "give a list of single texts")
        count = int(encoded.lengths[0])
        require(count <= most, "texts", f"{count} tokens", f"the model was made for {most}: shorten the text")
        # Each of a mesh's groups reads the text.
        every = encoded.with_copies(missing(1, axes))
        tokens, length = place(every.padded(bucket(count)), "B S", axes), place(every.lengths, "B", axes)
        shown = read_layers(flat, tokens, length, queries=min(queries, count))
        weights = [host(_weights(*layer, axes=axes))[0] for layer in shown]
        total += _shared(weights, np.arange(count - len(weights[0]), count), share)
        lengths.append(count)
    return Similarity(
        mass=(total / len(lengths)).astype(np.float32), share=share, queries=queries, lengths=tuple(lengths)
    )


@program(static=("axes",))
def _weights(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    *,
    axes: Axes | None,
) -> Float[Array, "B w S"]:
    """What each query attends to: the largest probability over its heads, as shares."""
    per_query = jax.vmap(
        partial(window_mass, reduce=lambda shares, at: shares.max(axis=(0, 1))), in_axes=(3, None, 1), out_axes=1
    )
    largest = per_query(q[:, :, :, :, None], k, positions[:, :, None]).max(axis=2)
    for letter in "KG":
        largest = most_of_devices(largest, letter, axes)
    return largest / largest.sum(axis=-1, keepdims=True)


def _shared(weights: list[np.ndarray], positions: np.ndarray, share: float) -> np.ndarray:
    """The map of one text: `weights` by layer `[w, S]`."""
    layers = len(weights)
    out = np.zeros((layers, layers))
    stacked = np.stack(weights)
    for row, at in enumerate(positions):
        seen = stacked[:, row, : at + 1]
        count = max(1, int(share * (at + 1)))
        top = np.argsort(-seen, axis=1, kind="stable")[:, :count]
        for layer in range(layers):
            out[layer, layer:] += seen[layer:, top[layer]].sum(axis=1)
    return out / len(positions)


def best_filters(found: Similarity, *, m: int = 3, adjacent: int = 1, most_whole: int | None = None) -> FilterLayers:
    """The filter layers whose choices carry most of the attention of the layers that read them.

    Args:
        found: the map.
        m: how many filters.
        adjacent: layers behind each that read everything.
        most_whole: layers that may read everything, by default a quarter of all, as in the paper.

    Returns:
        The best of all sets.

    Raises:
        ValueError: if no set leaves enough layers to read a choice.
    """
    require(m >= 1, "m", m, "give at least 1 filter layer")
    require(adjacent >= 0, "adjacent", adjacent, "give 0 or more layers")
    layers = len(found.mass)
    most = -(-layers // 4) if most_whole is None else most_whole
    best: tuple[float, tuple[int, ...]] | None = None
    for filters in itertools.combinations(range(layers - 1), m):
        if filters[0] > most or len(whole_layers(filters, adjacent, layers)) > most:
            continue
        reads = sources(filters, adjacent, layers)
        carried = [found.mass[source, layer] for layer, source in enumerate(reads) if source != WHOLE]
        score = float(np.mean(carried)) if carried else -1.0
        if best is None or score > best[0]:
            best = (score, filters)
    remedy = f"{layers} layers, of which at most {most} read everything, leave no such set: give fewer filters"
    require(best is not None and best[0] >= 0, "m", m, remedy)
    assert best is not None
    return FilterLayers(filters=best[1], carried=best[0], similarity=found)


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
    """Finds a model's filter layers: `similarity`, then `best_filters`.

    Args:
        params: from `jaxkv.load`.
        texts: as for `similarity`.
        m: as for `best_filters`.
        adjacent: as for `best_filters`.
        most_whole: as for `best_filters`.
        share: as for `similarity`.
        queries: as for `similarity`.

    Returns:
        The layers, and the map they were found in.

    Raises:
        ValueError: as those two.
    """
    require(m >= 1, "m", m, "give at least 1 filter layer")
    found = similarity(params, texts, share=share, queries=queries)
    return best_filters(found, m=m, adjacent=adjacent, most_whole=most_whole)
