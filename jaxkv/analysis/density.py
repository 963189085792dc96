"""`density`: how evenly each layer's attention is spread over keys (D2O, figures 1 and 4)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import _checks
from jaxkv._checks import settled
from jaxkv.analysis.reading import by_head, encoded, finite, layers_of
from jaxkv.arguments import as_model
from jaxkv.attention import probabilities
from jaxkv.engine.lengths import bucket
from jaxkv.loading import LanguageModel
from jaxkv.sharding.collectives import mean_of_devices
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host, place
from jaxkv.text.prompts import Prompt

# Number of queries whose weights are in memory at once.
_BLOCK = 128


class Density(NamedTuple):
    """Result of `density`, averaged over texts.

    Attributes:
        variance: of each query head, the variance over keys of the attention that each key receives from all queries.
            D2O's F is its mean over heads.
        dense: share of all weights that are at least `least` of the largest weight of their query.
        maps: mean weight that the queries of one bin of the text (array rows) pay to a key of another bin (columns),
            over heads; 0 where no query sees a key.
    """

    variance: Float[np.ndarray, "L H"]
    dense: Float[np.ndarray, "L H"]
    maps: Float[np.ndarray, "L n n"]


@settled
def density(
    params: LanguageModel, texts: Sequence[Prompt], *, least: float = 0.01, bins: int = 64
) -> Density:
    """Measures how evenly each layer's attention is spread.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids.
        least: share of a query's largest weight below which a weight is small.
        bins: number of bins that maps cut a text into, n.

    Returns:
        Variances, shares of large weights and maps. L counts the layers without a window.

    Raises:
        ValueError: for texts that are empty, of one token or too long for the model, and for settings out of range.

    References:
        D2O, arXiv:2406.13035, equation 4, figures 1 and 4. Small weights are counted as H2O's figure 2 counts them:
        below a hundredth of the largest of their query.
    """
    params, remedy = (
        as_model(params),
        "give a share of a query's largest weight, above 0 and below 1",
    )
    least = _checks.real("least", least, remedy, high=math.nextafter(1.0, 0.0), open_low=True)
    bins = _checks.whole("bins", bins, most=1024)
    variance, dense, maps = [], [], []
    for text in encoded(params, texts, following=1):
        count, length = len(text.ids[0]), place(text.lengths, "B", params.axes)
        pairs = count * (count + 1) / 2
        layers = []
        for _, out in layers_of(params, text, queries=bucket(count), sums=True):
            given = (out.q, out.k, out.q_positions, length, jnp.float32(least))
            large, mass = map(host, _dense(*given, bins=bins, axes=params.axes))
            received = host(out.extras["sums"])[0, ..., :count].astype(np.float64)
            layers.append(
                (received.var(axis=-1, ddof=1).ravel(), large[0].ravel() / pairs, mass[0])
            )
        spread, shares, masses = map(np.stack, zip(*layers, strict=True))
        variance.append(spread)
        dense.append(shares)
        maps.append(masses / np.maximum(_pairs(count, bins), 1))
    means = (np.mean(each, axis=0) for each in (variance, dense, maps))
    return Density(*(finite(params, each) for each in means))


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
