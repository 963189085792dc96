"""`eviction_loss`: L1 change of a layer's attention output by evicted rows, and Ada-KV's bound (theorem 3.1)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv import _checks
from jaxkv._checks import settled
from jaxkv._errors import require
from jaxkv.analysis.keeping import Budget, Policies, at_budgets, by_policy, kept_rows, placed
from jaxkv.analysis.reading import by_head, encoded, finite, layers_of
from jaxkv.arguments import as_model
from jaxkv.attention import probabilities
from jaxkv.attention.xla import exact_einsum
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import Graphs, Leaves
from jaxkv.models.layers import float_weight
from jaxkv.policies import AdaKV, SnapKV
from jaxkv.sharding.collectives import most_of_devices, total
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import host, place
from jaxkv.text.prompts import Prompt

# Uniform, safeguarded and adaptive budgets of heads: the same scores and totals.
ALLOCATIONS = (SnapKV(), AdaKV(), AdaKV(alpha=0.0))


class EvictionLoss(NamedTuple):
    """Result of `eviction_loss`, by policy, budget and text.

    Attributes:
        loss: L1 change of a layer's attention output, for each layer and query.
        bound: theorem 3.1's: 2 h C - 2 C times the attention on rows that are seen, over the h query heads; C is the
            largest L1 norm of a value at the layer's output.
        kept: number of entries kept, over layers and kv heads.
    """

    loss: Float[np.ndarray, "P N T L w"]
    bound: Float[np.ndarray, "P N T L w"]
    kept: Int[np.ndarray, "P N T"]


@settled
def eviction_loss(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    budgets: Sequence[Budget],
    policies: Policies = ALLOCATIONS,
    following: int = 16,
    key: int | Array | None = 0,
) -> EvictionLoss:
    """Measures the L1 change of each layer's attention output that evicted rows cause.

    Each layer gets its input under full attention, so that the loss of lower layers is not counted again. Eviction
    during decoding is not applied: the rows chosen at the prompt's end stay.

    Args:
        params: from `jaxkv.load`.
        texts: T long texts, or their ids.
        budgets: N numbers of rows per kv head and layer on average, or shares of a prompt.
        policies: P names, classes or values; by default uniform, safeguarded and adaptive budgets of heads.
        following: w, number of tokens of each text behind its prompt.
        key: random key or seed, for policies that draw.

    Returns:
        Losses, bounds and rows. L counts the layers without a window.

    Raises:
        ValueError: for texts that are empty or too long for the model, budgets that cannot be honoured, and policies
            that merge rows, renumber positions or choose for each token which rows they read.

    References:
        Ada-KV, arXiv:2407.11550, equations 2 to 6, theorem 3.1, figure 2. Rows are dropped by kv head, and h counts
        query heads.
    """
    params = as_model(params)
    following = _checks.whole("following", following)
    cells = at_budgets(policies, budgets)
    for policy, *_ in cells:
        parts = policy.parts()
        remedy = "give policies that drop rows and keep the positions of others"
        require(parts.merge is None and not parts.rolling, "policies", policy, remedy)
    loss, bound, rows = [], [], []
    for text, kept in kept_rows(params, encoded(params, texts, following), cells, following, key):
        prompt, layers = place(text.lengths - following, "B", params.axes), []
        for at, (index, out) in enumerate(layers_of(params, text, queries=following)):
            sets, leaves = placed(params, kept[:, at], text), params.flat.blocks[index]
            given = (leaves, out.q, out.k, out.v, out.q_positions, sets, prompt)
            layers.append(
                [host(each)[0] for each in _loss(*given, graphs=params.flat.graphs_of(index))]
            )
        lost, most = np.moveaxis(np.asarray(layers), 0, 2)
        loss.append(lost)
        bound.append(most)
        rows.append(kept.sum(axis=(1, 2, 3)))
    count = len(cells[0])
    return EvictionLoss(
        finite(params, by_policy(loss, count)),
        finite(params, by_policy(bound, count)),
        by_policy(rows, count),
    )


@program(static=("graphs",), on="graphs")
def _loss(
    leaves: Leaves,
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    rows: Bool[Array, "B K S n"],
    prompt: Int[Array, " B"],
    *,
    graphs: Graphs,
) -> tuple[Float[Array, "B n w"], Float[Array, "B n w"]]:
    """Two arrays `[B, n, w]`: L1 change of queries' attention output under n masks of kept rows; its upper bound."""
    block, (_, heads, group, _, dim) = graphs.block(leaves), q.shape
    weight = float_weight(block.attention, "out").reshape(-1, heads, group, dim)
    since = jnp.arange(k.shape[2], dtype=jnp.int32) >= prompt[:, None]

    def head(
        mine: Array, keys: Array, values: Array, sets: Array, position: Array, behind: Array
    ) -> tuple[Array, Array]:
        paid, values = probabilities(mine, keys, position), values.astype(jnp.float32)
        whole = exact_einsum("gws,sd->gwd", paid, values)

        def one(kept: Array) -> tuple[Array, Array]:
            seen = jnp.where(kept | behind, paid, 0.0)
            share = seen.sum(axis=-1)
            left = exact_einsum("gws,sd->gwd", seen, values) / jnp.maximum(share, 1e-30)[..., None]
            return whole - left, share.sum(axis=0)

        return lax.map(one, sets.T)

    apart, share = by_head(head, (q, k, v, rows), (positions, since))
    loss = jnp.abs(total(exact_einsum("bkngwd,ekgd->bnwe", apart, weight), graphs.axes)).sum(
        axis=-1
    )
    norms = lax.cummax(most_of_devices(_norms(v, weight), "H", graphs.axes), axis=1)
    largest = jnp.take_along_axis(norms, positions, axis=1)[:, None]
    retained = total(share.sum(axis=1), graphs.axes)
    count = total(jnp.full((), heads * group, jnp.float32), graphs.axes)
    # If every row is kept, rounding could make the difference negative.
    return loss, 2 * largest * jnp.maximum(count - retained, 0)


def _norms(v: Float[Array, "B K S D"], weight: Float[Array, "E K G D"]) -> Float[Array, "B S"]:
    """L1 norm of each position's value after the output projection, `[B, S]`: the largest over query heads."""
    batch, heads, slots, dim = v.shape
    size = min(256, slots)

    def norms(part: Array) -> Array:
        seen = exact_einsum("bksd,ekgd->bkgse", part.astype(jnp.float32), weight)
        return jnp.abs(seen).sum(axis=-1).max(axis=(1, 2))

    parts = jnp.moveaxis(v.reshape(batch, heads, slots // size, size, dim), 2, 0)
    return jnp.moveaxis(lax.map(norms, parts), 0, 1).reshape(batch, slots)
