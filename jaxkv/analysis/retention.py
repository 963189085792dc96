"""Measures of what policies keep: entries by layer and head, attention recalled, loss of attention's outputs.

`budgets` counts entries; `recall` is PyramidKV's figure 8; `eviction_loss` is Ada-KV's figure 2 and theorem 3.1.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv import _checks
from jaxkv._checks import settled
from jaxkv._errors import require
from jaxkv.analysis.full_attention import by_head, encoded, finite, layers_of, whole_layers_of
from jaxkv.attention import probabilities
from jaxkv.attention.xla import exact_einsum
from jaxkv.engine.lengths import bucket
from jaxkv.engine.session import Session
from jaxkv.loading import LanguageModel
from jaxkv.models.decoder import Graphs, Leaves
from jaxkv.models.layers import float_weight
from jaxkv.policies import AdaKV, SnapKV
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import as_policy
from jaxkv.policies.wrapper import with_budget
from jaxkv.sharding.collectives import most_of_devices, total
from jaxkv.sharding.mesh import Axes, host, place
from jaxkv.sharding.sharded_program import sharded_jit
from jaxkv.text.prompts import Encoded, Prompt

Budget = int | float
Policies = Sequence[Policy | type[Policy] | str]


@settled
def budgets(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    policies: Policies,
    budgets: Sequence[Budget],
    following: int = 0,
    key: int | Array | None = 0,
) -> Int[np.ndarray, "P N T L K"]:
    """Count the entries that policies keep of texts.

    Args:
        params: from `jaxkv.load`.
        texts: T long texts, or their ids.
        policies: P names, classes or values; their own budgets are replaced.
        budgets: N numbers of entries per kv head and layer on average, or shares of a text.
        following: number of last tokens of each text that policies do not see.
        key: random key or seed, for policies that use random numbers.

    Returns:
        Kept entries by policy, budget, text, layer and kv head. L counts the layers without a sliding window.

    Raises:
        ValueError: for texts that are empty or too long for the model, and budgets that cannot be kept.
    """
    following = _checks.whole("following", following, least=0)
    (rows,) = measured(
        params,
        texts,
        policies=policies,
        budgets=budgets,
        following=following,
        key=key,
        measure=lambda text, kept: [kept.sum(axis=-1)],
    )
    return rows


def measured(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    policies: Policies,
    budgets: Sequence[Budget],
    following: int,
    key: int | Array | None,
    measure: Callable[[Encoded, Bool[np.ndarray, "C L K n"]], Sequence[np.ndarray]],
) -> list[np.ndarray]:
    """Return arrays `[P, N, T, ...]` by policy, budget and text, from the arrays `[C, ...]` of `measure` for a text.

    `measure` gets the text, and masks of the prompt's entries in the caches of all C = P x N policies after prefill.
    The prompt is the text without its `following` last tokens. Sliding-window layers are left out. Raises ValueError
    for policies that choose the entries to read for each token, and for numbers that are not finite.
    """
    given = [as_policy(each) for each in policies]
    for policy in given:
        remedy = "it evicts no entries: use `jaxkv eval visible`, or leave it out"
        require(policy.parts().read.everything, "policies", policy, remedy)
    cells = [with_budget(policy, budget) for policy in given for budget in budgets]
    sessions = [Session(params, policy, key=key) for policy in cells]
    whole, found = list(whole_layers_of(params)), []
    for text in encoded(params, texts, following):
        count = len(text.ids[0]) - following
        prompt = dataclasses.replace(text, ids=[ids[:count] for ids in text.ids])
        masks = [session.prefill(prompt).holds(0, count)[whole] for session in sessions]
        found.append(measure(text, np.stack(masks)))
    stacked = [np.stack(each, axis=1) for each in zip(*found, strict=True)]
    return [finite(params, each.reshape(-1, len(budgets), *each.shape[1:])) for each in stacked]


def placed(
    params: LanguageModel, rows: Bool[np.ndarray, "C K n"], text: Encoded
) -> Bool[Array, "B K S C"]:
    """Place one layer's masks of kept entries, padded to the text's padded length, on the model's mesh."""
    count, heads, prompt = rows.shape
    out = np.zeros((len(text.ids), heads, bucket(len(text.ids[0])), count), bool)
    out[:, :, :prompt] = np.moveaxis(rows, 0, -1)
    return place(out, "B K S n", params.axes)


class Recall(NamedTuple):
    """Result of `recall`, by policy, budget and text.

    Attributes:
        recall: attention on the kept entries of the prompt divided by attention on all of them, both summed over the
            queries, by layer and query head.
        visible: attention on everything that a query sees under the policy, with the tokens after the prompt; the mean
            over the queries.
        rows: number of kept entries, over layers and kv heads.
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
    """Measure the share of full attention that falls on the entries that policies keep.

    Policies see each text without its last tokens, whose attention is then measured. Eviction during decoding is not
    applied: the entries chosen at the end of the prompt are kept. Merged entries count by their own positions, not by
    those merged into them.

    Args:
        params: from `jaxkv.load`.
        texts: T long texts, or their ids.
        policies: P names, classes or values; their own budgets are replaced.
        budgets: N numbers of entries per kv head and layer on average, or shares of a prompt.
        following: number of tokens of each text after its prompt.
        key: random key or seed, for policies that use random numbers.

    Returns:
        Recall, visible attention and entries. L counts the layers without a sliding window.

    Raises:
        ValueError: for texts that are empty or too long for the model, budgets that cannot be kept, and policies that
            choose the entries to read for each token.

    References:
        PyramidKV, arXiv:2406.02069, appendix N and figure 8.
    """
    following = _checks.whole("following", following)

    def shares(text: Encoded, kept: Bool[np.ndarray, "C L K n"]) -> Sequence[np.ndarray]:
        """Return recall, visible attention and entries of one text, by policy."""
        # The last mask is of the whole prompt.
        masks, layers = np.concatenate([kept, np.ones_like(kept[:1])]), []
        for at, (_, out) in enumerate(layers_of(params, text, queries=following)):
            sets = placed(params, masks[:, at], text)
            mine = host(paid(out.q, out.k, out.q_positions, sets, axes=params.axes))[0]
            layers.append(mine.reshape(-1, *mine.shape[2:]))
        sums = np.moveaxis(np.stack(layers).astype(np.float64), -1, 0)
        recalled = sums[:-1].sum(axis=-1) / np.maximum(sums[-1].sum(axis=-1), 1e-30)
        return recalled, (sums[:-1] + 1 - sums[-1]).mean(axis=-1), kept.sum(axis=(1, 2, 3))

    return Recall(
        *measured(
            params,
            texts,
            policies=policies,
            budgets=budgets,
            following=following,
            key=key,
            measure=shares,
        )
    )


@sharded_jit(static=("axes",))
def paid(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    rows: Bool[Array, "B K S n"],
    *,
    axes: Axes | None,
) -> Float[Array, "B K G w n"]:
    """Sum each query's attention weights over the entries of each of n masks, `[B, K, G, w, n]`."""

    def head(mine: Array, keys: Array, sets: Array, position: Array) -> Array:
        shares = probabilities(mine, keys, position)
        # By default a GPU rounds products to ten bits, but policies differ in the fourth digit.
        return exact_einsum("gws,sn->gwn", shares, sets.astype(jnp.float32))

    return by_head(head, (q, k, rows), (positions,))


# Uniform, safeguarded and adaptive head budgets: the same scores and totals.
ALLOCATIONS = (SnapKV(), AdaKV(), AdaKV(alpha=0.0))


class EvictionLoss(NamedTuple):
    """Result of `eviction_loss`, by policy, budget and text.

    Attributes:
        loss: L1 change of a layer's attention output, by layer and query.
        bound: bound of theorem 3.1: 2 h C - 2 C times the attention on visible entries, over the h query heads; C is
            the largest L1 norm of a value at the layer's output.
        kept: number of kept entries, over layers and kv heads.
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
    """Measure the L1 change of each layer's attention output that evicted entries cause.

    Each layer gets its input under full attention, so that the loss of lower layers is not counted again. Eviction
    during decoding is not applied: the entries chosen at the end of the prompt are kept.

    Args:
        params: from `jaxkv.load`.
        texts: T long texts, or their ids.
        budgets: N numbers of entries per kv head and layer on average, or shares of a prompt.
        policies: P names, classes or values; by default uniform, safeguarded and adaptive head budgets.
        following: w, number of tokens of each text after its prompt.
        key: random key or seed, for policies that use random numbers.

    Returns:
        Losses, bounds and entries. L counts the layers without a sliding window.

    Raises:
        ValueError: for texts that are empty or too long for the model, budgets that cannot be kept, and policies that
            merge entries, renumber positions or choose the entries to read for each token.

    References:
        Ada-KV, arXiv:2407.11550, equations 2 to 6, theorem 3.1, figure 2. Entries are evicted by kv head, and h counts
        query heads.
    """
    following = _checks.whole("following", following)
    for policy in map(as_policy, policies):
        parts, remedy = (
            policy.parts(),
            "not supported: use policies that evict entries and keep the positions of others",
        )
        require(parts.merge is None and not parts.rolling, "policies", policy, remedy)

    def losses(text: Encoded, kept: Bool[np.ndarray, "C L K n"]) -> Sequence[np.ndarray]:
        """Return losses, bounds and entries of one text, by policy."""
        prompt, layers = place(text.lengths - following, "B", params.axes), []
        for at, (index, out) in enumerate(layers_of(params, text, queries=following)):
            sets, leaves = placed(params, kept[:, at], text), params.flat.blocks[index]
            given = (leaves, out.q, out.k, out.v, out.q_positions, sets, prompt)
            layers.append(
                [host(each)[0] for each in _loss(*given, graphs=params.flat.graphs_of(index))]
            )
        return *np.moveaxis(np.asarray(layers), 0, 2), kept.sum(axis=(1, 2, 3))

    return EvictionLoss(
        *measured(
            params,
            texts,
            policies=policies,
            budgets=budgets,
            following=following,
            key=key,
            measure=losses,
        )
    )


@sharded_jit(static=("graphs",), on="graphs")
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
    """Return the L1 change `[B, n, w]` of queries' attention output under n masks of kept entries, and its bound."""
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
    # With every entry kept, rounding could make the difference negative.
    return loss, 2 * largest * jnp.maximum(count - retained, 0)


def _norms(v: Float[Array, "B K S D"], weight: Float[Array, "E K G D"]) -> Float[Array, "B S"]:
    """Return the L1 norm of each position's value after the output projection, `[B, S]`: the largest over heads."""
    batch, heads, padded_len, dim = v.shape
    size = min(256, padded_len)

    def norms(part: Array) -> Array:
        seen = exact_einsum("bksd,ekgd->bkgse", part.astype(jnp.float32), weight)
        return jnp.abs(seen).sum(axis=-1).max(axis=(1, 2))

    parts = jnp.moveaxis(v.reshape(batch, heads, padded_len // size, size, dim), 2, 0)
    return jnp.moveaxis(lax.map(norms, parts), 0, 1).reshape(batch, padded_len)
