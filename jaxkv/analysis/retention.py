"""Measures of what policies keep: entries by layer and head, attention recalled, loss of attention's outputs.

`budgets` counts entries; `recall` is PyramidKV's figure 8; `eviction_loss` is Ada-KV's figure 2 and theorem 3.1.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv import _checks
from jaxkv._checks import settled
from jaxkv._errors import require
from jaxkv.analysis.full_attention import (
    encode_texts,
    find_full_attention_layers,
    iterate_full_attention_layers,
    map_kv_heads,
    require_finite,
)
from jaxkv.attention import compute_attention_probabilities
from jaxkv.attention.xla import exact_einsum
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.session import Session
from jaxkv.loading import LanguageModel
from jaxkv.models.split_decoder import DecoderGraphs, Leaves
from jaxkv.policies import AdaKV, SnapKV
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import resolve_policy
from jaxkv.policies.wrapper import replace_policy_budget
from jaxkv.sharding.collectives import max_over_devices, sum_over_devices
from jaxkv.sharding.mesh import ShardingMesh, copy_to_host, place_host_array
from jaxkv.sharding.sharded_program import sharded_jit
from jaxkv.text.prompts import EncodedPrompts, Prompt

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
    """Count entries that each policy keeps: int array `[P, N, T, L, K]` by policy, budget, text, layer and kv head.

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
    following = _checks.validate_int("following", following, least=0)
    (rows,) = measure_kept_masks(
        params,
        texts,
        policies=policies,
        budgets=budgets,
        following=following,
        key=key,
        measure=lambda text, kept: [kept.sum(axis=-1)],
    )
    return rows


def measure_kept_masks(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    policies: Policies,
    budgets: Sequence[Budget],
    following: int,
    key: int | Array | None,
    measure: Callable[[EncodedPrompts, Bool[np.ndarray, "C L K n"]], Sequence[np.ndarray]],
) -> list[np.ndarray]:
    """Call `measure(text, kept masks)` per text; return its arrays by policy, budget, text: `[P, N, T, ...]`.

    `measure` gets the text, and masks of the prompt's entries in the caches of all C = P x N policies after prefill.
    The prompt is the text without its `following` last tokens. Sliding-window layers are left out. Raises ValueError
    for policies that choose the entries to read for each token, and for numbers that are not finite.
    """
    given = [resolve_policy(each) for each in policies]
    for policy in given:
        remedy = "it evicts no entries: use `jaxkv eval visible`, or leave it out"
        require(policy.build_policy_parts().read.reads_all_entries, "policies", policy, remedy)
    cells = [replace_policy_budget(policy, budget) for policy in given for budget in budgets]
    sessions = [Session(params, policy, key=key) for policy in cells]
    whole = list(find_full_attention_layers(params))
    found = []
    for text in encode_texts(params, texts, following):
        count = len(text.ids[0]) - following
        prompt = dataclasses.replace(text, ids=[ids[:count] for ids in text.ids])
        masks = [session.prefill(prompt).mask_kept_tokens(0, count)[whole] for session in sessions]
        found.append(measure(text, np.stack(masks)))
    stacked = [np.stack(each, axis=1) for each in zip(*found, strict=True)]
    return [
        require_finite(params, each.reshape(-1, len(budgets), *each.shape[1:])) for each in stacked
    ]


def place_kept_masks(
    params: LanguageModel, rows: Bool[np.ndarray, "C K n"], text: EncodedPrompts
) -> Bool[Array, "B K S C"]:
    """Copy one layer's masks `[C, K, n]` to all B sequences on the model's mesh: bool `[B, K, S, C]`, padded to S."""
    count, heads, prompt = rows.shape
    out = np.zeros((len(text.ids), heads, round_up_to_bucket(len(text.ids[0])), count), bool)
    out[:, :, :prompt] = np.moveaxis(rows, 0, -1)
    return place_host_array(out, "B K S n", params.axes)


class AttentionRecall(NamedTuple):
    """Result of `recall`: share of attention kept and attention visible, by layer and query head; kept counts.

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
) -> AttentionRecall:
    """Return `AttentionRecall`: share of later tokens' attention to a prompt on entries that each policy keeps.

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
    following = _checks.validate_int("following", following)

    def measure_recall(
        text: EncodedPrompts, kept: Bool[np.ndarray, "C L K n"]
    ) -> Sequence[np.ndarray]:
        """Return recall, visible attention `[C, L, H]` and kept counts `[C]` of one text, for C policies."""
        # The last mask is of the whole prompt.
        masks = np.concatenate([kept, np.ones_like(kept[:1])])
        layers = []
        for at, (_, out) in enumerate(
            iterate_full_attention_layers(params, text, queries=following)
        ):
            sets = place_kept_masks(params, masks[:, at], text)
            mine = copy_to_host(
                sum_masked_attention(out.q, out.k, out.q_positions, sets, axes=params.axes)
            )[0]
            layers.append(mine.reshape(-1, *mine.shape[2:]))
        sums = np.moveaxis(np.stack(layers).astype(np.float64), -1, 0)
        recalled = sums[:-1].sum(axis=-1) / np.maximum(sums[-1].sum(axis=-1), 1e-30)
        return recalled, (sums[:-1] + 1 - sums[-1]).mean(axis=-1), kept.sum(axis=(1, 2, 3))

    return AttentionRecall(
        *measure_kept_masks(
            params,
            texts,
            policies=policies,
            budgets=budgets,
            following=following,
            key=key,
            measure=measure_recall,
        )
    )


@sharded_jit(static=("axes",))
def sum_masked_attention(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    rows: Bool[Array, "B K S n"],
    *,
    axes: ShardingMesh | None,
) -> Float[Array, "B K G w n"]:
    """Sum each query's attention weights over the entries of each of n masks, `[B, K, G, w, n]`."""

    def head(mine: Array, keys: Array, sets: Array, position: Array) -> Array:
        shares = compute_attention_probabilities(mine, keys, position)
        # By default a GPU rounds products to ten bits, but policies differ in the fourth digit.
        return exact_einsum("gws,sn->gwn", shares, sets.astype(jnp.float32))

    return map_kv_heads(head, (q, k, rows), (positions,))


# Uniform, safeguarded and adaptive head budgets: the same scores and totals.
ALLOCATIONS = (SnapKV(), AdaKV(), AdaKV(alpha=0.0))


class EvictionLoss(NamedTuple):
    """Result of `eviction_loss` by policy, budget, text: L1 output change and bound by layer and query; kept counts.

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
    """Measure the L1 change of each layer's attention output by eviction, and its bound; return an `EvictionLoss`.

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
        ValueError: for texts that are empty or too long for the model, budgets that cannot be kept, policies that merge
            entries, renumber positions or choose the entries to read for each token, and models with gated attention.

    References:
        Ada-KV, arXiv:2407.11550, equations 2 to 6, theorem 3.1, figure 2. Entries are evicted by kv head, and h counts
        query heads.
    """
    following = _checks.validate_int("following", following)
    remedy = "gates multiply its attention's outputs, which the bound leaves out: use another model"
    require(not params.config.attention_gate, "params", params.name, remedy)
    for policy in map(resolve_policy, policies):
        parts = policy.build_policy_parts()
        remedy = "not supported: use policies that evict entries and keep the positions of others"
        require(parts.merge is None and not parts.rolling, "policies", policy, remedy)

    def measure_losses(
        text: EncodedPrompts, kept: Bool[np.ndarray, "C L K n"]
    ) -> Sequence[np.ndarray]:
        """Return losses, bounds `[C, L, w]` and kept counts `[C]` of one text, for C policies."""
        prompt = place_host_array(text.prompt_lengths - following, "B", params.axes)
        layers = []
        for at, (index, out) in enumerate(
            iterate_full_attention_layers(params, text, queries=following)
        ):
            sets = place_kept_masks(params, kept[:, at], text)
            leaves = params.flat_decoder.blocks[index]
            given = (leaves, out.q, out.k, out.v, out.q_positions, sets, prompt)
            layers.append(
                [
                    copy_to_host(each)[0]
                    for each in _measure_output_change(
                        *given, graphs=params.flat_decoder.get_layer_graphs(index)
                    )
                ]
            )
        return *np.moveaxis(np.asarray(layers), 0, 2), kept.sum(axis=(1, 2, 3))

    return EvictionLoss(
        *measure_kept_masks(
            params,
            texts,
            policies=policies,
            budgets=budgets,
            following=following,
            key=key,
            measure=measure_losses,
        )
    )


@sharded_jit(static=("graphs",), on="graphs")
def _measure_output_change(
    leaves: Leaves,
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    rows: Bool[Array, "B K S n"],
    prompt: Int[Array, " B"],
    *,
    graphs: DecoderGraphs,
) -> tuple[Float[Array, "B n w"], Float[Array, "B n w"]]:
    """Return L1 changes `[B, n, w]` of a layer's attention output under n masks of kept prompt entries, and bounds."""
    block = graphs.rebuild_block(leaves)
    weight = block.attention.get_value_projection()
    since = jnp.arange(k.shape[2], dtype=jnp.int32) >= prompt[:, None]

    def head(
        mine: Array, keys: Array, values: Array, sets: Array, position: Array, behind: Array
    ) -> tuple[Array, Array]:
        paid = compute_attention_probabilities(mine, keys, position)
        values = values.astype(jnp.float32)
        whole = exact_einsum("gws,sd->gwd", paid, values)

        def one(kept: Array) -> tuple[Array, Array]:
            seen = jnp.where(kept | behind, paid, 0.0)
            share = seen.sum(axis=-1)
            left = exact_einsum("gws,sd->gwd", seen, values) / jnp.maximum(share, 1e-30)[..., None]
            return whole - left, share.sum(axis=0)

        return lax.map(one, sets.T)

    apart, share = map_kv_heads(head, (q, k, v, rows), (positions, since))
    loss = jnp.abs(
        sum_over_devices(exact_einsum("bkngwd,ekgd->bnwe", apart, weight), graphs.axes)
    ).sum(axis=-1)
    norms = lax.cummax(max_over_devices(_compute_value_norms(v, weight), "H", graphs.axes), axis=1)
    largest = jnp.take_along_axis(norms, positions, axis=1)[:, None]
    retained = sum_over_devices(share.sum(axis=1), graphs.axes)
    count = sum_over_devices(jnp.full((), math.prod(weight.shape[1:3]), jnp.float32), graphs.axes)
    # With every entry kept, rounding could make the difference negative.
    return loss, 2 * largest * jnp.maximum(count - retained, 0)


def _compute_value_norms(
    v: Float[Array, "B K S D"], weight: Float[Array, "E K G D"]
) -> Float[Array, "B S"]:
    """Return L1 norms `[B, S]` of each position's values after the output projection: the largest over query heads."""
    batch, heads, padded_len, dim = v.shape
    size = min(256, padded_len)

    def norms(part: Array) -> Array:
        seen = exact_einsum("bksd,ekgd->bkgse", part.astype(jnp.float32), weight)
        return jnp.abs(seen).sum(axis=-1).max(axis=(1, 2))

    parts = jnp.moveaxis(v.reshape(batch, heads, padded_len // size, size, dim), 2, 0)
    return jnp.moveaxis(lax.map(norms, parts), 0, 1).reshape(batch, padded_len)
