"""`density`: how evenly each layer's attention is spread over keys (D2O, figures 1 and 4)."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import _checks
from jaxkv._drawing import PAGE, layer_names, paper, style, whole_numbers
from jaxkv._errors import require
from jaxkv.analysis.figures import BELOW_ONE, Figure, mean_of
from jaxkv.analysis.measuring import Arrays, Layer, Measure, Text, by_head, measured
from jaxkv.attention import probabilities
from jaxkv.loading import LanguageModel
from jaxkv.policies.scorer import Needs
from jaxkv.sharding.collectives import mean_of_devices
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host
from jaxkv.text.prompts import Prompt

_BINS = 64
_MOST_BINS = 1024
# Number of queries whose weights are in memory at once.
_BLOCK = 128
_MAPS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Density(Figure):
    """Result of `density`: `variance` of attention over keys, share of large (`dense`) weights, mean weights (`maps`).

    Attributes:
        variance: `f32[L, H]` of each query head, the variance over keys of the attention that each key receives from
            all queries; averaged over texts. D2O's F is its mean over heads.
        dense: `f32[L, H]` share of all weights that are at least `least` of the largest weight of their query.
        maps: `f32[L, n, n]` mean weight that the queries of one bin of the text (array rows) pay to a key of another
            bin (columns), over heads and texts; 0 where no query sees a key.
        least: share of a query's largest weight below which a weight is small.
        lengths: number of tokens of each text.
    """

    variance: Float[np.ndarray, "L H"]
    dense: Float[np.ndarray, "L H"]
    maps: Float[np.ndarray, "L n n"]
    least: float
    lengths: tuple[int, ...]

    def picture(self, path: str | Path, layers: Sequence[int] | None = None) -> None:
        """Writes a picture file: maps of mean weights of up to 5 layers; variance and share of large weights by layer.

        Args:
            path: the file; its suffix names the format, such as .png or .svg.
            layers: indices, among the measured ones, of the layers whose maps are drawn; by default the lowest two,
                the middle one and the highest two.

        Raises:
            ImportError: without matplotlib, naming the extra that brings it.
        """
        every = len(self.maps)
        chosen = (
            sorted({0, min(1, every - 1), every // 2, max(0, every - 2), every - 1})
            if layers is None
            else layers
        )
        chosen = [
            _checks.index("layers", layer, every)
            for layer in _checks.several("layers", chosen, "give some layers")
        ]
        require(len(chosen) <= _MAPS, "layers", layers, f"give {_MAPS} at most")
        shape = [[f"map {at}" for at in range(len(chosen))], ["lines"] * len(chosen)]
        with paper(path, width=PAGE, height=3.9) as figure:
            panels = figure.subplot_mosaic(shape, height_ratios=(1, 1.25))
            self._draw_maps(figure, [panels[each] for each in shape[0]], chosen)
            self._draw_lines(panels["lines"])

    def _draw_maps(self, figure: Any, panels: list[Any], layers: list[int]) -> None:
        """Draws the map of mean weights of each layer into its panel, all on one logarithmic colour scale."""
        from matplotlib.colors import LogNorm

        drawn = np.where(np.tril(np.ones(self.maps.shape[1:], bool)), self.maps, np.nan)[layers]
        low = max(float(np.nanpercentile(drawn, 2)), 1e-7)
        norm, image = LogNorm(low, max(float(np.nanmax(drawn)), 2 * low)), None
        for panel, layer, each in zip(panels, layers, drawn, strict=True):
            image = panel.imshow(
                np.maximum(each, low), norm=norm, cmap="viridis", extent=(0, 100, 100, 0)
            )
            panel.set(
                title=f"layer {self.indices(len(self.maps))[layer]}",
                xticks=(0, 50, 100),
                yticks=(0, 50, 100),
            )
            panel.tick_params(labelleft=panel is panels[0])
        panels[0].set_ylabel("query, % of the text")
        panels[len(panels) // 2].set_xlabel("key, % of the text")
        figure.colorbar(image, ax=panels, label="mean weight", pad=0.01)

    def _draw_lines(self, panel: Any) -> None:
        """Draws variance and share of large weights against the layer into one panel, on two y axes."""
        index = np.arange(len(self.variance))
        other = panel.twinx()
        for head in self.variance.T:
            panel.plot(index, head, ".", color=style(0)["color"], alpha=0.25, markersize=3)
        for axes, values, at, label in (
            (panel, self.variance.mean(axis=1), 0, "variance of the attention that keys receive"),
            (other, 100 * self.dense.mean(axis=1), 1, "dense weights"),
        ):
            axes.plot(index, values, label=label, **style(at))
        panel.set(xlabel="layer", ylabel="variance (dots: heads)", yscale="log")
        other.set(
            ylabel=f"weights of at least {self.least:.0%}\nof their query's largest, %",
            ylim=(0, None),
        )
        handles = [each for axes in (panel, other) for each in axes.get_legend_handles_labels()[0]]
        panel.legend(
            handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False
        )
        whole_numbers(panel.xaxis)
        layer_names(panel.xaxis, self.indices(len(index)))

    def records(self) -> list[dict[str, Any]]:
        """List of dicts, one per layer: variance over keys (heads' mean, min, max), and % of weights that are large."""
        heads = zip(
            self.variance.mean(axis=1),
            self.variance.min(axis=1),
            self.variance.max(axis=1),
            strict=True,
        )
        return [
            {
                "layer": self.indices(len(self.dense))[layer],
                "variance": float(mean),
                "least head": float(least),
                "most head": float(most),
                "dense %": 100 * float(self.dense[layer].mean()),
            }
            for layer, (mean, least, most) in enumerate(heads)
        ]


def density(
    params: LanguageModel, texts: Sequence[Prompt], *, least: float = 0.01, bins: int = _BINS
) -> Density:
    """Measures how evenly each layer's attention is spread (variance, % large weights, maps); returns `Density`.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids; each is run through the model once, under full attention.
        least: share of a query's largest weight below which a weight is small.
        bins: number of bins that maps cut a text into, n.

    Returns:
        The figure.

    Raises:
        ValueError: for texts that are empty, of one token or too long for the model, and for settings out of range.

    References:
        D2O, arXiv:2406.13035, equation 4, figures 1 and 4. Small weights are counted as H2O's figure 2 counts them:
        below a hundredth of the largest of their query.
    """
    return measured(params, texts, [DensityMeasure(least=least, bins=bins)])[0]


class DensityMeasure(Measure):
    """`Measure` class behind `density`: variance of attention over keys, share of large weights, binned weights."""

    def __init__(self, *, least: float = 0.01, bins: int = _BINS):
        remedy = "give a share of a query's largest weight, above 0 and below 1"
        self.least = _checks.real("least", least, remedy, high=BELOW_ONE, open_low=True)
        self.bins = _checks.whole("bins", bins, f"give 1 to {_MOST_BINS} bins", most=_MOST_BINS)

    def needs(self, text: Text) -> Needs:
        """`Needs` (prefill outputs to request): all queries, attention each key receives; ValueError for one token."""
        require(
            text.count > 1,
            "texts",
            f"{text.count} tokens",
            "a variance needs two tokens: give longer texts",
        )
        return Needs(queries=text.slots, sums=True)

    def of_layer(self, text: Text, layer: Layer) -> Arrays:
        """Tuple of a layer's arrays: variances, shares of large weights (both `[H]`), weights by bins `[n, n]`."""
        q, positions = layer.last(text.slots)
        assert layer.out.sums is not None
        count, mass = _dense(
            q,
            layer.out.k,
            positions,
            text.repeated(text.count),
            jnp.float32(self.least),
            bins=self.bins,
            axes=text.axes,
        )
        received = host(layer.out.sums)[0, ..., : text.count].astype(np.float64)
        pairs = text.count * (text.count + 1) / 2
        variance = received.var(axis=-1, ddof=1).reshape(-1)
        return variance, host(count)[0].reshape(-1) / pairs, host(mass)[0]

    def of_text(self, text: Text, layers: list[Arrays]) -> Arrays:
        """Tuple of a text's arrays: variances, shares of large weights (both `[L, H]`), mean weights `[L, n, n]`."""
        variance, dense, mass = (np.stack(each) for each in zip(*layers, strict=True))
        return variance, dense, mass / np.maximum(_pairs(text.count, self.bins), 1)

    def figure(self, texts: list[Text], found: list[Arrays]) -> Density:
        """`Density` from the arrays of all texts: their mean over texts."""
        variance, dense, maps = (mean_of(list(each)) for each in zip(*found, strict=True))
        lengths = tuple(text.count for text in texts)
        return Density(variance=variance, dense=dense, maps=maps, least=self.least, lengths=lengths)


def _pairs(count: int, bins: int) -> np.ndarray:
    """Number of causal (query, key) pairs in a text of `count` tokens, `[bins, bins]` by query bin and key bin."""
    of = np.arange(count) * bins // count
    first, size = np.searchsorted(of, np.arange(bins)), np.bincount(of, minlength=bins)
    seen = np.clip(np.arange(count)[:, None] + 1 - first, 0, size)
    out = np.zeros((bins, bins))
    np.add.at(out, of, seen)
    return out


@program(static=("bins", "axes"))
def _dense(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    length: Int[Array, " B"],
    least: Float[Array, ""],
    *,
    bins: int,
    axes: Axes | None,
) -> tuple[Float[Array, "B K G"], Float[Array, "B n n"]]:
    """Tuple: counts of weights >= `least` x their query's largest `[B, K, G]`; sums of weights by bins `[B, n, n]`."""
    queries = q.shape[3]
    # Buckets are powers of two, or multiples of 256.
    block = min(_BLOCK, queries)

    def head(mine: Array, keys: Array, position: Array, count: Array) -> tuple[Array, Array]:
        key = jnp.arange(keys.shape[0], dtype=jnp.int32)
        by_key = jnp.where((key < count)[:, None], _in_bins(key, count, bins), 0.0)

        def step(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dense, mass = carry
            part = lax.dynamic_slice_in_dim(mine, index * block, block, axis=1)
            at = lax.dynamic_slice_in_dim(position, index * block, block)
            paid, real = probabilities(part, keys, at), (at >= 0)[:, None]
            large = (paid >= least * paid.max(axis=-1, keepdims=True)) & (key <= at[:, None]) & real
            to = jnp.where(real, paid.mean(axis=0) @ by_key, 0.0)
            by_query = _in_bins(jnp.maximum(at, 0), count, bins)
            return dense + large.sum(axis=(1, 2), dtype=jnp.float32), mass + by_query.T @ to

        # The first blocks are padding where a text is shorter than its slots.
        begin = (queries - count) // block
        empty = (jnp.zeros(mine.shape[0], jnp.float32), jnp.zeros((bins, bins), jnp.float32))
        return lax.fori_loop(begin, queries // block, step, empty)

    dense, mass = by_head(head, (q, k), (positions, length))
    return dense, mean_of_devices(mass.mean(axis=1), "H", axes)


def _in_bins(at: Int[Array, " n"], count: Int[Array, ""], bins: int) -> Float[Array, "n bins"]:
    """One-hot float matrix `[n, bins]` of each position's bin, for a text of `count` tokens cut into `bins` bins."""
    return ((at * bins // count)[:, None] == jnp.arange(bins, dtype=jnp.int32)).astype(jnp.float32)
