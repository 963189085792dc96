"""`retained`: share of a kv head's attention that its top keys hold (Ada-KV, figures 1a and 11)."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv import _checks
from jaxkv._checks import settled
from jaxkv.analysis.reading import encoded, finite, layers_of
from jaxkv.arguments import as_model
from jaxkv.attention import window_mass
from jaxkv.loading import LanguageModel
from jaxkv.sharding.collectives import mean_of_devices
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host
from jaxkv.text.prompts import Prompt

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@settled
def retained(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    shares: Sequence[float] = SHARES,
    queries: int = 32,
) -> Float[np.ndarray, "L K n"]:
    """Measures the share of each kv head's attention that its most attended keys hold.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids.
        shares: n numbers of top keys, as shares of a text's keys.
        queries: number of last tokens of each text whose attention is measured; keys are ranked over all of them.

    Returns:
        The share of attention on the top keys, averaged over texts. L counts the layers without a window.

    Raises:
        ValueError: for texts that are empty or too long for the model, and for settings out of range.

    References:
        Ada-KV, arXiv:2407.11550, figures 1a and 11. A kv head keeps a row for all its query heads, so that its curve is
        of their mean, as section 3.5 chooses rows.
    """
    params, remedy = as_model(params), "give shares of a text's keys, above 0 and at most 1"
    listed = _checks.several("shares", shares, remedy)
    given = [_checks.real("shares", each, remedy, high=1.0, open_low=True) for each in listed]
    queries = _checks.whole("queries", queries)
    found = []
    for text in encoded(params, texts):
        count, layers = len(text.ids[0]), []
        keys = [max(1, int(share * count + 1e-9)) for share in given]
        for _, out in layers_of(params, text, queries=min(queries, count)):
            mine = host(_mean_weights(out.q, out.k, out.q_positions, axes=params.axes))
            sorted_ = -np.sort(-mine[0, :, :count].astype(np.float64), axis=-1)
            running = np.cumsum(sorted_, axis=-1)
            layers.append(running[:, np.asarray(keys) - 1] / running[:, -1:])
        found.append(layers)
    return finite(params, np.mean(found, axis=0))


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
