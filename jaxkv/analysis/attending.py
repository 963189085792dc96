"""Statistics of a model's attention: how evenly it is spread, how few keys hold it, which layers share it.

`density` is D2O's figures 1 and 4, `retained` Ada-KV's figures 1a and 11, `similarity` OmniKV's figures 1a and 8.
`find_filter_layers` finds the layers that choose best for others.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

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
from jaxkv.attention import compute_attention_probabilities, reduce_window_attention
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.loading import LanguageModel
from jaxkv.policies.reads import WHOLE, find_unfiltered_layers, map_layers_to_filters
from jaxkv.sharding.collectives import average_over_devices, max_over_devices
from jaxkv.sharding.mesh import ShardingMesh, copy_to_host, place_host_array
from jaxkv.sharding.sharded_program import sharded_jit
from jaxkv.text.prompts import Prompt

# Number of queries whose weights are in memory at a time.
_BLOCK = 128


class AttentionSpread(NamedTuple):
    """Result of `density`: variance of attention over keys, large-weight share by layer, head; maps by layer.

    Attributes:
        variance: variance over keys of the attention that each key receives from all queries, by query head. D2O's F is
            its mean over heads.
        dense: share of all weights that are at least `least` of the largest weight of their query.
        maps: mean weight of the queries in one bin of the text (rows of the array) on a key in another bin (columns),
            over heads; 0 if no query sees a key.
    """

    variance: Float[np.ndarray, "L H"]
    dense: Float[np.ndarray, "L H"]
    maps: Float[np.ndarray, "L n n"]


@settled
def density(
    params: LanguageModel, texts: Sequence[Prompt], *, least: float = 0.01, bins: int = 64
) -> AttentionSpread:
    """Measure how evenly each layer spreads its attention over keys; return an `AttentionSpread` of NumPy arrays.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids.
        least: share of a query's largest weight below which a weight is small.
        bins: number of bins per text in maps, n.

    Returns:
        Variances, shares of large weights and maps. L counts the layers without a sliding window.

    Raises:
        ValueError: for texts that are empty, of one token or too long for the model, and for settings out of range.

    References:
        D2O, arXiv:2406.13035, equation 4, figures 1 and 4. Small weights are defined as in H2O's figure 2: below a
        hundredth of the largest of their query.
    """
    remedy = "use a share of a query's largest weight, above 0"
    least = _checks.validate_float("least", least, remedy, high=1.0, open_low=True)
    bins = _checks.validate_int("bins", bins, most=1024)
    variance = []
    dense = []
    maps = []
    for text in encode_texts(params, texts, following=1):
        count = len(text.ids[0])
        length = place_host_array(text.prompt_lengths, "B", params.axes)
        pairs = count * (count + 1) / 2
        layers = []
        for _, out in iterate_full_attention_layers(
            params, text, queries=round_up_to_bucket(count), sums=True
        ):
            given = (out.q, out.k, out.q_positions, length, jnp.float32(least))
            large, mass = map(
                copy_to_host, _count_and_bin_weights(*given, bins=bins, axes=params.axes)
            )
            received = copy_to_host(out.extras["sums"])[0, ..., :count].astype(np.float64)
            layers.append(
                (received.var(axis=-1, ddof=1).ravel(), large[0].ravel() / pairs, mass[0])
            )
        spread, shares, masses = map(np.stack, zip(*layers, strict=True))
        variance.append(spread)
        dense.append(shares)
        maps.append(masses[:, 0] / np.maximum(masses[:, 1], 1))
    means = (np.mean(each, axis=0) for each in (variance, dense, maps))
    return AttentionSpread(*(require_finite(params, each) for each in means))


@sharded_jit(static=("bins", "axes"))
def _count_and_bin_weights(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    length: Int[Array, " B"],
    least: Float[Array, ""],
    *,
    bins: int,
    axes: ShardingMesh | None,
) -> tuple[Float[Array, "B K G"], Float[Array, "B two n n"]]:
    """Count weights >= `least` x query maximum `[B, K, G]`; sum head-mean weights and pairs by bin `[B, 2, n, n]`."""
    # Buckets are powers of two, or multiples of 256.
    block = min(_BLOCK, q.shape[3])

    def head(mine: Array, keys: Array, position: Array, count: Array) -> tuple[Array, Array]:
        key = jnp.arange(keys.shape[0], dtype=jnp.int32)
        by_key = jnp.where((key < count)[:, None], _encode_bins_one_hot(key, count, bins), 0.0)

        def of_block(given: tuple[Array, Array]) -> tuple[Array, Array]:
            part, at = given
            paid = compute_attention_probabilities(part, keys, at)
            real = (at >= 0)[:, None]
            seen = (key <= at[:, None]) & real
            large = (paid >= least * paid.max(axis=-1, keepdims=True)) & seen
            weights = jnp.stack([paid.mean(axis=0), seen.astype(jnp.float32)])
            to = jnp.where(real, weights @ by_key, 0.0)
            by_query = _encode_bins_one_hot(jnp.maximum(at, 0), count, bins)
            return large.sum(axis=(1, 2), dtype=jnp.float32), by_query.T @ to

        parts = jnp.moveaxis(mine.reshape(mine.shape[0], -1, block, mine.shape[-1]), 1, 0)
        dense, mass = lax.map(of_block, (parts, position.reshape(-1, block)))
        return dense.sum(axis=0), mass.sum(axis=0)

    dense, mass = map_kv_heads(head, (q, k), (positions, length))
    return dense, average_over_devices(mass.mean(axis=1), "H", axes)


def _encode_bins_one_hot(
    at: Int[Array, " n"], count: Int[Array, ""], bins: int
) -> Float[Array, "n bins"]:
    """Return the one-hot float32 matrix `[n, bins]` of positions' bins, which divide `count` tokens evenly."""
    return ((at * bins // count)[:, None] == jnp.arange(bins, dtype=jnp.int32)).astype(jnp.float32)


SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@settled
def retained(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    shares: Sequence[float] = SHARES,
    queries: int = 32,
) -> Float[np.ndarray, "L K n"]:
    """Return `[L, K, n]`: share of last queries' attention on a kv head's top keys, for n `shares` of all keys.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids.
        shares: n numbers of top keys, as shares of a text's keys.
        queries: number of last tokens of each text whose attention is measured; keys are ranked over all of them.

    Returns:
        The share of attention on the top keys, averaged over texts. L counts the layers without a sliding window.

    Raises:
        ValueError: for texts that are empty or too long for the model, and for settings out of range.

    References:
        Ada-KV, arXiv:2407.11550, figures 1a and 11. A kv head keeps an entry for all its query heads, so the curve is
        that of their mean, as section 3.5 chooses entries.
    """
    remedy = "use shares of a text's keys, above 0 and at most 1"
    given = [
        _checks.validate_float("shares", each, remedy, high=1.0, open_low=True) for each in shares
    ]
    found = []
    for text in encode_texts(params, texts):
        count = len(text.ids[0])
        layers = []
        keys = [max(1, int(share * count + 1e-9)) for share in given]
        for _, out in iterate_full_attention_layers(params, text, queries=min(queries, count)):
            mine = copy_to_host(
                _average_key_weights(out.q, out.k, out.q_positions, axes=params.axes)
            )
            sorted_ = -np.sort(-mine[0, :, :count].astype(np.float64), axis=-1)
            running = np.cumsum(sorted_, axis=-1)
            layers.append(running[:, np.asarray(keys) - 1] / running[:, -1:])
        found.append(layers)
    return require_finite(params, np.mean(found, axis=0))


@sharded_jit(static=("axes",))
def _average_key_weights(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    *,
    axes: ShardingMesh | None,
) -> Float[Array, "B K S"]:
    """Return the attention weight of each key, `[B, K, S]`: the mean over a kv head's queries and query heads."""
    mine = reduce_window_attention(
        q, k, positions, lambda shares, at: jnp.mean(shares, axis=(0, 1))
    )
    return average_over_devices(mine, "G", axes)


class FilterLayers(NamedTuple):
    """Result of `find_filter_layers`: OmniKV filter layers, share of attention on their choices, `similarity` map.

    Attributes:
        filters: indices of the layers, ascending.
        carried: share of attention on the chosen tokens, averaged over the layers that read a choice.
        mass: the `similarity` map of the search.
    """

    filters: tuple[int, ...]
    carried: float
    mass: Float[np.ndarray, "L L"]


@settled
def similarity(
    params: LanguageModel, texts: Sequence[Prompt], *, share: float = 0.067, queries: int = 64
) -> Float[np.ndarray, "L L"]:
    """Return a map `[L, L]`, mean over texts: at [l, m], share of m's attention on layer l's top tokens, 0 if m < l.

    Args:
        params: from `jaxkv.load`.
        texts: long texts, or their ids.
        share: number of most attended tokens, as a share of those that a query sees.
        queries: number of last tokens of each text whose attention is measured.

    Returns:
        At [l, m], for m >= l: the share of m's attention on l's most attended tokens, averaged over queries and texts;
        0 below the diagonal. L counts the layers without a sliding window.

    Raises:
        ValueError: for texts that are empty or too long for the model.

    References:
        OmniKV, section 3 (inter-layer attention similarity) and figure 8; a token's weight in a layer is its largest
        attention weight over the query heads, and these sum to one.
    """
    remedy = "use a share of the tokens, above 0"
    share = _checks.validate_float("share", share, remedy, high=1.0, open_low=True)
    found = []
    for text in encode_texts(params, texts):
        count = len(text.ids[0])
        layers = [
            copy_to_host(_compute_token_weights(out.q, out.k, out.q_positions, axes=params.axes))[0]
            for _, out in iterate_full_attention_layers(params, text, queries=min(queries, count))
        ]
        found.append(_measure_layer_overlap(np.stack(layers), np.arange(count)[-queries:], share))
    return require_finite(params, np.mean(found, axis=0))


@sharded_jit(static=("axes",))
def _compute_token_weights(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    *,
    axes: ShardingMesh | None,
) -> Float[Array, "B w S"]:
    """Return attention weights `[B, w, S]` of queries on tokens: the largest over all heads, scaled to sum to one."""
    largest_of_window = partial(
        reduce_window_attention, reduce=lambda shares, at: shares.max(axis=(0, 1))
    )
    per_query = jax.vmap(largest_of_window, in_axes=(3, None, 1), out_axes=1)
    largest = per_query(q[:, :, :, :, None], k, positions[:, :, None]).max(axis=2)
    for letter in "KG":
        largest = max_over_devices(largest, letter, axes)
    return largest / largest.sum(axis=-1, keepdims=True)


def _measure_layer_overlap(
    weights: Float[np.ndarray, "L w S"], positions: Int[np.ndarray, " w"], share: float
) -> np.ndarray:
    """Return a text's map `[L, L]`, query mean: at [l, m], share of m's attention on l's top tokens, 0 if m < l."""
    layers = len(weights)
    out = np.zeros((layers, layers))
    for row, at in enumerate(positions):
        seen = weights[:, row, : at + 1]
        count = max(1, int(share * (at + 1)))
        top = np.argsort(-seen, axis=1, kind="stable")[:, :count]
        for layer in range(layers):
            out[layer, layer:] += seen[layer:, top[layer]].sum(axis=1)
    return out / len(positions)


@settled
def find_filter_layers(
    params: LanguageModel,
    texts: Sequence[Prompt],
    *,
    m: int = 3,
    adjacent: int = 1,
    most_whole: int | None = None,
    share: float = 0.067,
    queries: int = 64,
) -> FilterLayers:
    """Return `FilterLayers`: the `m` OmniKV filter layers whose top tokens hold most attention of layers that use them.

    Args:
        params: from `jaxkv.load`.
        texts: as for `similarity`.
        m: number of filter layers.
        adjacent: number of layers above each filter layer that also read the whole cache.
        most_whole: largest number of layers that read the whole cache; by default a quarter of all, as in the paper.
            Layers with a sliding window are not counted.
        share: as for `similarity`.
        queries: as for `similarity`.

    Returns:
        The best of all sets of filter layers, as indices of the model's layers.

    Raises:
        ValueError: as for `similarity`, and if no set leaves enough layers to read a choice.
    """
    indices = find_full_attention_layers(params)
    layers = len(indices)
    m = _checks.validate_int("m", m)
    most = -(-layers // 4) if most_whole is None else most_whole
    sets = {
        filters: map_layers_to_filters(filters, adjacent, layers)
        for filters in itertools.combinations(range(layers - 1), m)
        if filters[0] <= most
        and len(find_unfiltered_layers(filters, adjacent, layers)) <= min(most, layers - 1)
    }
    remedy = f"at most {most} of {layers} layers may read the whole cache: use fewer filters"
    require(bool(sets), "m", m, remedy)
    mass = similarity(params, texts, share=share, queries=queries)

    def carried(filters: tuple[int, ...]) -> float:
        reads = enumerate(sets[filters])
        return float(np.mean([mass[source, at] for at, source in reads if source != WHOLE]))

    best = max(sets, key=carried)
    return FilterLayers(tuple(indices[layer] for layer in best), carried(best), mass)
