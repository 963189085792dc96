"""How evenly layers attend: variances of what keys receive, dense weights, and maps (D2O, figures 1 and 4)."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv._drawing import PAGE, paper, style, whole_numbers
from jaxkv._errors import require
from jaxkv.analysis.figures import Figure, stacked
from jaxkv.analysis.given import place_of, several, share, whole
from jaxkv.analysis.watching import Layer, Text, Watcher, watch
from jaxkv.attention import probabilities
from jaxkv.loading import LanguageModel
from jaxkv.policies.scorer import Needs
from jaxkv.sharding.collectives import mean_of_devices
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host
from jaxkv.text.prompts import Prompt

_BINS = 64
# Queries whose weights exist at once.
_BLOCK = 128
_MAPS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Density(Figure):
    """How evenly each layer's attention is spread.

    Attributes:
        variance: `f32[L, H]` of each query head: the variance over keys of what each key receives from all queries;
            averaged over texts. D2O's F is its mean over heads.
        dense: `f32[L, H]` the share of all weights that are at least `least` of the largest that their query pays.
        maps: `f32[L, n, n]` the mean weight that queries of a stretch of the text (rows) pay to a key of a stretch
            (columns), over heads and texts; 0 where no query sees a key.
        least: below that share of a query's largest weight, a weight is small.
        lengths: tokens of each text.
    """

    variance: Float[np.ndarray, "L H"]
    dense: Float[np.ndarray, "L H"]
    maps: Float[np.ndarray, "L n n"]
    least: float
    lengths: tuple[int, ...]

    def picture(self, path: str | Path, layers: Sequence[int] | None = None) -> None:
        """Draws maps of some layers, and variance and density by layer.

        Args:
            path: where to; the suffix says how, such as .png or .svg.
            layers: those whose maps are drawn; by default the lowest two, the middle one and the highest two.

        Raises:
            ImportError: without matplotlib, naming the extra that brings it.
        """
        every = len(self.maps)
        chosen = sorted({0, min(1, every - 1), every // 2, max(0, every - 2), every - 1}) if layers is None else layers
        chosen = [place_of("layers", layer, every) for layer in several("layers", chosen, "give some layers")]
        require(len(chosen) <= _MAPS, "layers", layers, f"give {_MAPS} at most")
        shape = [[f"map {at}" for at in range(len(chosen))], ["lines"] * len(chosen)]
        with paper(path, width=PAGE, height=3.9) as figure:
            panels = figure.subplot_mosaic(shape, height_ratios=(1, 1.25))
            self._draw_maps(figure, [panels[each] for each in shape[0]], chosen)
            self._draw_lines(panels["lines"])

    def _draw_maps(self, figure: Any, panels: list[Any], layers: list[int]) -> None:
        from matplotlib.colors import LogNorm

        drawn = np.where(np.tril(np.ones(self.maps.shape[1:], bool)), self.maps, np.nan)[layers]
        low = max(float(np.nanpercentile(drawn, 2)), 1e-7)
        norm, image = LogNorm(low, max(float(np.nanmax(drawn)), 2 * low)), None
        for panel, layer, each in zip(panels, layers, drawn, strict=True):
            image = panel.imshow(np.maximum(each, low), norm=norm, cmap="viridis", extent=(0, 100, 100, 0))
            panel.set(title=f"layer {layer}", xticks=(0, 50, 100), yticks=(0, 50, 100))
            panel.tick_params(labelleft=panel is panels[0])
        panels[0].set_ylabel("query, % of the text")
        panels[len(panels) // 2].set_xlabel("key, % of the text")
        figure.colorbar(image, ax=panels, label="mean weight", pad=0.01)

    def _draw_lines(self, panel: Any) -> None:
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
        other.set(ylabel=f"weights of at least {self.least:.0%}\nof their query's largest, %", ylim=(0, None))
        handles = [each for axes in (panel, other) for each in axes.get_legend_handles_labels()[0]]
        panel.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
        whole_numbers(panel.xaxis)

    def records(self) -> list[dict[str, Any]]:
        """By layer."""
        heads = zip(self.variance.mean(axis=1), self.variance.min(axis=1), self.variance.max(axis=1), strict=True)
        return [
            {
                "layer": layer,
                "variance": float(mean),
                "least head": float(least),
                "most head": float(most),
                "dense %": 100 * float(self.dense[layer].mean()),
            }
            for layer, (mean, least, most) in enumerate(heads)
        ]


def density(params: LanguageModel, texts: Sequence[Prompt], *, least: float = 0.01, bins: int = _BINS) -> Density:
    """Measures how evenly layers attend.

    Args:
        params: from `jaxkv.load`.
        texts: long ones, or ids; each is run through the model once, under full attention.
        least: below that share of its query's largest weight, a weight is small.
        bins: stretches that maps cut a text into, n.

    Returns:
        The figure.

    Raises:
        ValueError: for texts that are empty, of one token or too long for the model, and for settings out of range.

    References:
        D2O, arXiv:2406.13035, equation 4, figures 1 and 4. Small weights are counted as H2O's figure 2 counts them:
        below a hundredth of the largest of their query.
    """
    return watch(params, texts, [DensityWatcher(least=least, bins=bins)])[0]


class DensityWatcher(Watcher):
    """Looks at all queries of all layers."""

    def __init__(self, *, least: float = 0.01, bins: int = _BINS):
        """Checks the settings."""
        self.least = share("least", least, "give a share of a query's largest weight, between 0 and 1")
        self.bins = whole("bins", bins, "give 1 to 1024 stretches")
        require(self.bins <= 1024, "bins", bins, "give 1 to 1024 stretches")
        self.layers = list[tuple[np.ndarray, ...]]()
        self.texts, self.lengths = list[tuple[np.ndarray, ...]](), list[int]()

    def needs(self, text: Text) -> Needs:
        """All queries, and sums over them."""
        require(text.count > 1, "texts", f"{text.count} tokens", "a variance needs two: give longer texts")
        return Needs(queries=text.slots, sums=True)

    def look(self, text: Text, layer: Layer) -> None:
        """One layer's variances, dense weights and map."""
        q, positions = layer.last(text.slots)
        assert layer.out.sums is not None
        given = (text.numbers(text.count), jnp.float32(self.least))
        count, mass = _dense(q, layer.out.k, positions, *given, bins=self.bins, axes=text.axes)
        received = host(layer.out.sums)[0, ..., : text.count].astype(np.float64)
        pairs = text.count * (text.count + 1) / 2
        variance = received.var(axis=-1, ddof=1).reshape(-1)
        self.layers.append((variance, host(count)[0].reshape(-1) / pairs, host(mass)[0]))

    def done(self, text: Text) -> None:
        """A text's layers together; a map's mass becomes the mean weight of a pair."""
        variance, dense, mass = (np.stack(each) for each in zip(*self.layers, strict=True))
        self.texts.append((variance, dense, mass / np.maximum(_pairs(text.count, self.bins), 1)))
        self.lengths.append(text.count)
        self.layers = []

    def found(self) -> Density:
        """The mean over texts."""
        variance, dense, maps = (stacked(list(each)) for each in zip(*self.texts, strict=True))
        return Density(variance=variance, dense=dense, maps=maps, least=self.least, lengths=tuple(self.lengths))


def _pairs(count: int, bins: int) -> np.ndarray:
    """How many queries and keys of each two stretches see each other."""
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
    """How many weights are not small; and the mass that stretches of queries pay to stretches of keys, over heads."""
    batch, heads, _, queries, _ = q.shape
    # Buckets are powers of two, or multiples of 256.
    block = min(_BLOCK, queries)
    stretches = jnp.arange(bins, dtype=jnp.int32)

    def head(inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        mine, keys, position, count = inputs
        key = jnp.arange(keys.shape[0], dtype=jnp.int32)
        in_stretch = lambda at: ((at * bins // count)[:, None] == stretches).astype(jnp.float32)  # noqa: E731
        by_key = jnp.where((key < count)[:, None], in_stretch(key), 0.0)

        def step(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dense, mass = carry
            part = lax.dynamic_slice_in_dim(mine, index * block, block, axis=1)
            at = lax.dynamic_slice_in_dim(position, index * block, block)
            paid, real = probabilities(part, keys, at), (at >= 0)[:, None]
            large = (paid >= least * paid.max(axis=-1, keepdims=True)) & (key <= at[:, None]) & real
            to = jnp.where(real, paid.mean(axis=0) @ by_key, 0.0)
            return dense + large.sum(axis=(1, 2), dtype=jnp.float32), mass + in_stretch(jnp.maximum(at, 0)).T @ to

        # The first ones do not exist where a text is shorter than its slots.
        begin = (queries - count) // block
        empty = (jnp.zeros(mine.shape[0], jnp.float32), jnp.zeros((bins, bins), jnp.float32))
        return lax.fori_loop(begin, queries // block, step, empty)

    flat = lambda a: a.reshape(batch * heads, *a.shape[2:])  # noqa: E731
    spread = lambda a: jnp.broadcast_to(a[:, None], (batch, heads, *a.shape[1:]))  # noqa: E731
    given = (flat(q), flat(k), flat(spread(positions)), flat(spread(length)))
    dense, mass = lax.map(head, given)
    mass = mean_of_devices(mass.reshape(batch, heads, bins, bins).mean(axis=1), "H", axes)
    return dense.reshape(batch, heads, -1), mass
