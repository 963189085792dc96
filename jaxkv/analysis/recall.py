"""`recall`: share of full attention that falls on the rows that policies keep (PyramidKV, figure 8)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv import _checks
from jaxkv._checks import settled
from jaxkv.analysis.keeping import Budget, Policies, at_budgets, by_policy, kept_rows, placed
from jaxkv.analysis.reading import by_head, encoded, finite, layers_of
from jaxkv.arguments import as_model
from jaxkv.attention import probabilities
from jaxkv.attention.xla import exact_einsum
from jaxkv.loading import LanguageModel
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host
from jaxkv.text.prompts import Prompt


class Recall(NamedTuple):
    """Result of `recall`, by policy, budget and text.

    Attributes:
        recall: for each layer and query head, mass on the prompt's rows that are kept, of the mass on all of the
            prompt's rows, both summed over the queries.
        visible: mass on everything that a query sees under the policy, tokens behind the prompt included; the mean
            over the queries.
        rows: rows kept, over layers and kv heads.
    """

    recall: Float[np.ndarray, "P N T L H"]
    visible: Float[np.ndarray, "P N T L H"]
    rows: Int[np.ndarray, "P N T"]


@settled
def recall(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    policies: Policies,
    budgets: Sequence[Budget],
    following: int = 32,
    key: int | Array | None = 0,
) -> Recall:
    """Measures the share of full attention that falls on the rows that policies keep.

    Policies see each text but for its last tokens, whose attention is then measured. Eviction during decoding is not
    applied: the rows chosen at the prompt's end stay. Merged rows count by the positions they are kept at, not by what
    was merged into them.

    Args:
        params: from `jaxkv.load`.
        texts: T long texts, or their ids.
        policies: P names, classes or values; their own budgets are replaced.
        budgets: N numbers of rows per kv head and layer on average, or shares of a prompt.
        following: number of tokens of each text behind its prompt.
        key: random key or seed, for policies that draw.

    Returns:
        Recall, visible attention and rows. L counts the layers without a window.

    Raises:
        ValueError: for texts that are empty or too long for the model, budgets that cannot be honoured, and policies
            that choose for each token which rows they read.

    References:
        PyramidKV, arXiv:2406.02069, appendix N and figure 8.
    """
    params = as_model(params)
    following = _checks.whole("following", following)
    cells = at_budgets(policies, budgets)
    recalled, visible, rows = [], [], []
    for text, kept in kept_rows(params, encoded(params, texts, following), cells, following, key):
        # The last mask is of the whole prompt.
        masks = np.concatenate([kept, np.ones_like(kept[:1])])
        layers = []
        for at, (_, out) in enumerate(layers_of(params, text, queries=following)):
            sets = placed(params, masks[:, at], text)
            mine = host(paid(out.q, out.k, out.q_positions, sets, axes=params.axes))[0]
            layers.append(mine.reshape(-1, *mine.shape[2:]))
        sums = np.moveaxis(np.stack(layers).astype(np.float64), -1, 0)
        recalled.append(sums[:-1].sum(axis=-1) / np.maximum(sums[-1].sum(axis=-1), 1e-30))
        visible.append((sums[:-1] + 1 - sums[-1]).mean(axis=-1))
        rows.append(kept.sum(axis=(1, 2, 3)))
    count = len(cells[0])
    return Recall(
        finite(params, by_policy(recalled, count)),
        finite(params, by_policy(visible, count)),
        by_policy(rows, count),
    )


@program(static=("axes",))
def paid(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    rows: Bool[Array, "B K S n"],
    *,
    axes: Axes | None,
) -> Float[Array, "B K G w n"]:
    """Attention probability of each query summed over the rows of each of n masks, `[B, K, G, w, n]`."""

    def head(mine: Array, keys: Array, sets: Array, position: Array) -> Array:
        shares = probabilities(mine, keys, position)
        # By default a GPU rounds products to ten bits, and policies differ in the fourth digit.
        return exact_einsum("gws,sn->gwn", shares, sets.astype(jnp.float32))

    return by_head(head, (q, k, rows), (positions,))
