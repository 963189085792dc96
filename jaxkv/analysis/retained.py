"""`retained`: share of a kv head's attention that its top keys hold (Ada-KV, figures 1a and 11)."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv import _checks
from jaxkv._drawing import COLUMN, layer_names, paper
from jaxkv.analysis.figures import Figure, mean_of
from jaxkv.analysis.measuring import Arrays, Layer, QueryMeasure, Text, measured
from jaxkv.attention import window_mass
from jaxkv.loading import LanguageModel
from jaxkv.sharding.collectives import mean_of_devices
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host
from jaxkv.text.prompts import Prompt

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retained(Figure):
    """Result of `retained`: share of each kv head's attention (`mass`) that its top keys hold, by share of keys.

    Attributes:
        mass: `f32[L, K, n]` share of the attention of a head's queries that falls on its top keys, for each of the n
            `shares`; averaged over texts.
        shares: number of top keys, as shares of a text's keys, ascending.
        queries: number of last tokens of each text whose attention is measured.
        lengths: number of tokens of each text.
    """

    mass: Float[np.ndarray, "L K n"]
    shares: tuple[float, ...]
    queries: int
    lengths: tuple[int, ...]

    def picture(self, path: str | Path) -> None:
        """Writes a picture file: attention held against share of keys, per kv head (coloured by layer) and median.

        Args:
            path: the file; its suffix names the format, such as .png or .svg.

        Raises:
            ImportError: without matplotlib, naming the extra that brings it.
        """
        layers = len(self.mass)
        with paper(path, width=COLUMN, height=2.6) as figure:
            from matplotlib import colormaps
            from matplotlib.cm import ScalarMappable
            from matplotlib.colors import Normalize

            panel, colours = figure.add_subplot(), colormaps["cividis"]
            norm, across = Normalize(0, max(layers - 1, 1)), 100 * np.asarray(self.shares)
            for layer, heads in enumerate(100 * self.mass):
                panel.plot(across, heads.T, color=colours(norm(layer)), linewidth=0.6, alpha=0.8)
            median = np.median(100 * self.mass, axis=(0, 1))
            panel.plot(
                across,
                median,
                color="black",
                linewidth=1.6,
                linestyle="--",
                label="median of the heads",
            )
            panel.set(
                xscale="log",
                xlabel="keys of each head, % of the text",
                ylabel="attention retained, %",
            )
            # If the only share is the whole text there is a single point, but an axis needs two ends.
            panel.set(ylim=(0, 102), xlim=(min(across[0], 50), 100))
            panel.set(xticks=(1, 10, 100), xticklabels=("1", "10", "100"))
            panel.legend(loc="lower right", frameon=False)
            bar = figure.colorbar(ScalarMappable(norm, colours), ax=panel, label="layer")
            layer_names(bar.ax.yaxis, self.indices(layers))

    def records(self) -> list[dict[str, Any]]:
        """List of dicts, one per share of keys: mean, min, median and max of the heads' attention held, in %."""
        heads = self.mass.reshape(-1, len(self.shares))
        return [
            {
                "keys %": 100 * share,
                "retained %": 100 * float(mine.mean()),
                "least head": 100 * float(mine.min()),
                "median": 100 * float(np.median(mine)),
                "most head": 100 * float(mine.max()),
            }
            for share, mine in zip(self.shares, heads.T, strict=True)
        ]


def retained(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    shares: Sequence[float] = SHARES,
    queries: int = 32,
) -> Retained:
    """Measures the share of each kv head's attention that its most attended keys hold, as a `Retained`.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids; each is run through the model once, under full attention.
        shares: number of top keys to look at, as shares of a text's keys.
        queries: number of last tokens of each text whose attention is measured; keys are ranked over all of them.

    Returns:
        The figure.

    Raises:
        ValueError: for texts that are empty or too long for the model, and for settings out of range.

    References:
        Ada-KV, arXiv:2407.11550, figures 1a and 11. A kv head keeps a row for all its query heads, so that its curve is
        of their mean, as section 3.5 chooses rows.
    """
    return measured(params, texts, [RetainedMeasure(shares=shares, queries=queries)])[0]


class RetainedMeasure(QueryMeasure):
    """`Measure` class behind `retained`: sums the attention of each layer's last queries on their top keys."""

    def __init__(self, *, shares: Sequence[float] = SHARES, queries: int = 32):
        remedy = "give shares of a text's keys, above 0 and at most 1"
        given = _checks.several("shares", shares, remedy)
        self.shares = tuple(
            sorted(_checks.real("shares", each, remedy, high=1.0, open_low=True) for each in given)
        )
        self.queries = _checks.whole("queries", queries, "give at least 1 query")

    def of_layer(self, text: Text, layer: Layer) -> Arrays:
        """Tuple of one array `[K, n]`: share of a layer's attention on top keys, by kv head and share of keys."""
        q, positions = self.last(text, layer)
        mine = host(_mean_weights(q, layer.out.k, positions, axes=text.axes))[0, :, : text.count]
        running = np.cumsum(-np.sort(-mine.astype(np.float64), axis=-1), axis=-1)
        keys = [max(1, int(share * text.count + 1e-9)) for share in self.shares]
        return (running[:, np.asarray(keys) - 1] / running[:, -1:],)

    def of_text(self, text: Text, layers: list[Arrays]) -> Arrays:
        """Tuple of one array `[L, K, n]`: share of attention that the top keys hold in one text."""
        return (np.stack([each for (each,) in layers]),)

    def figure(self, texts: list[Text], found: list[Arrays]) -> Retained:
        """`Retained` from the arrays of all texts: their mean over texts."""
        return Retained(
            mass=mean_of([each for (each,) in found]),
            shares=self.shares,
            queries=self.queries,
            lengths=tuple(text.count for text in texts),
        )


@program(static=("axes",))
def _mean_weights(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    *,
    axes: Axes | None,
) -> Float[Array, "B K S"]:
    """Attention probability of each key, `[B, K, S]`: the mean over a kv head's queries and query heads."""
    mine = window_mass(q, k, positions, lambda shares, at: jnp.mean(shares, axis=(0, 1)))
    return mean_of_devices(mine, "G", axes)
