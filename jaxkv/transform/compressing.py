"""`compress`: compress keys and values of models outside jaxkv. Pure functions that run under any `jit`.

```
state = jaxkv.compress(k, v, queries=q, length=length, policy=AdaKV(budget=256), headroom=64)  # behind the prompt
state, out = state.step(q_new, k_new, v_new)                                                   # each token
```
Shapes depend on S, the policy and the headroom only. Data decides where segments begin and end, so one compilation
serves all lengths. Layers are compressed by the engine, as in prefill; this file checks arguments and looks up sizes.
"""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxkv._checks import settled, validate_index, validate_int, validate_optional_field
from jaxkv._errors import require
from jaxkv.arguments import validate_random_key
from jaxkv.attention import Implementation, LogitShaping, get_attention_backend
from jaxkv.cache import SegmentTables
from jaxkv.cache.packing import UnpackedEntries
from jaxkv.engine.compress import compress_layer_by_layer as compress_all
from jaxkv.engine.layer_sources import PromptEntrySource
from jaxkv.engine.lengths import EntryCounts, compute_entry_counts, query_buffer_size
from jaxkv.engine.pages import add_page_bounds
from jaxkv.engine.prefill import create_policy_state
from jaxkv.engine.progress import run_generator
from jaxkv.engine.query_buffers import fill_query_buffer
from jaxkv.engine.selection import Candidates
from jaxkv.models.config import SlidingWindows
from jaxkv.models.values import check_positive
from jaxkv.policies.checks import ByteBudget
from jaxkv.policies.layer_budgets import UniformLayers
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import resolve_policy
from jaxkv.policies.scorer import ExtraInputs, Scorer, ScorerInputs
from jaxkv.transform.array_checks import (
    format_axis_order_hint,
    format_dtype_and_shape,
    group_query_heads,
    group_sink_logits,
    has_concrete_values,
    validate_keys_values,
    validate_token_counts,
    zero_out_padding,
)
from jaxkv.transform.state import CompressedKV


@settled
def compress(
    k: ArrayLike,
    v: ArrayLike,
    *,
    policy: Policy | type[Policy] | str,
    queries: ArrayLike | None = None,
    length: ArrayLike | None = None,
    headroom: int = 0,
    layer: int = 0,
    layers: int | None = None,
    sliding_window: int | None = None,
    sink_logits: ArrayLike | None = None,
    softcap: float | None = None,
    key: PRNGKeyArray | int | None = None,
) -> CompressedKV:
    """Compress one layer's keys and values by a policy; return the kept entries as `CompressedKV`.

    Pure: it runs under `jit` (with a traced `length`), `vmap` and `grad`. Gradients flow to the kept keys and values,
    but not through the selection; policies that merge have no reverse-mode gradient. Under `shard_map` the axis of
    sequences may be sharded. The axis of kv heads may be sharded if heads are independent. They are not with AdaKV,
    with policies that keep the same positions in all heads, or with random numbers per head. Policies that merge, or
    sum all queries' attention, need `check_vma=False`.

    Args:
        k: `[B, K, S, D]` keys after RoPE: each prompt's tokens, then padding. Pass `[B, S, K, D]`, the order of flax
            and cuDNN, as `k.swapaxes(1, 2)`.
        v: `[B, K, S, D]` values.
        policy: compression policy, its name, or its class for default settings. It may read the prompt's keys, values
            and queries; a policy that needs more is rejected. With traced lengths, a budget below the always kept
            entries is raised to their number.
        queries: `[B, H, w, D]` queries after RoPE, where H is a multiple of K and head h reads kv head h // (H / K).
            Pass the queries of each sequence's last w tokens for policies with an observation window, or those of all S
            tokens. Policies without attention scores ignore them.
        length: `i32[B]` tokens of each sequence; S by default.
        headroom: places for new entries per segment: for tokens to be added; 1 for any number if each evicts an entry.
        layer: index of this layer, for policies whose budget, scores or samples depend on the layer.
        layers: L, the model's number of layers, for policies whose budget or scores depend on it.
        sliding_window: w if a token of this layer attends to the last w tokens, its own included; None for all tokens.
            Every policy keeps these entries. `layer`, `layers` and tables then count only the layers without a sliding
            window.
        sink_logits: `[H]` learned logits, one per query head, that the softmax includes without a value. Scores and
            `attend` include them.
        softcap: cap of the layer's logits: softcap * tanh(logits / softcap). Scores and `attend` apply it.
        key: random key or seed, for policies that use random numbers; 0 by default.

    Returns:
        One layer's entries; `step` adds tokens.

    Raises:
        ValueError: for an argument that is missing or does not fit; the message names it.
    """
    policy = _validate_policy(policy)
    parts = policy.composed
    name = type(policy).__name__
    remedy = f"{name} scores all layers together: use jaxkv.compress_layers"
    require(not (parts.layers.depends_on_scores or parts.nested), "policy", policy, remedy)
    remedy = (
        f"{name} keeps different entries in each layer: give layer= and layers=, or use "
        "jaxkv.compress_layers"
    )
    uniform = isinstance(parts.layers, UniformLayers) and parts.read.reads_all_entries
    same = uniform and parts.scorer.model_layer_count is None
    require(layers is not None or same, "layers", layers, remedy)
    if layers is not None:
        layers = validate_int("layers", layers, "give the model's number of layers")
        layer = validate_index("layer", layer, layers)
    layer = validate_int("layer", layer, "give the layer's index", least=0)
    given = _LayerInputs(k, v, queries, sliding_window, sink_logits, softcap)
    return _compress_layer_inputs(
        [given], parts, length, headroom, key, first=layer, layers=layers or layer + 1
    )


@settled
def compress_layers(
    k: Sequence[ArrayLike],
    v: Sequence[ArrayLike],
    *,
    policy: Policy | type[Policy] | str,
    queries: Sequence[ArrayLike] | None = None,
    length: ArrayLike | None = None,
    headroom: int = 0,
    sliding_windows: Sequence[int | None] | None = None,
    sink_logits: Sequence[ArrayLike | None] | None = None,
    softcap: float | None = None,
    key: PRNGKeyArray | int | None = None,
) -> CompressedKV:
    """Compress keys and values of all layers together by a policy; return their kept entries as one `CompressedKV`.

    Layers whose budgets depend on all layers' scores share one pool.

    Args:
        k: each layer's keys, as for `compress`.
        v: each layer's values.
        policy: as for `compress`.
        queries: each layer's queries, as for `compress`.
        length: as for `compress`.
        headroom: as for `compress`.
        sliding_windows: each layer's sliding window, as for `compress`. The budget is spread over layers without one.
        sink_logits: each layer's sink logits, as for `compress`.
        softcap: cap of all layers' logits, as for `compress`.
        key: as for `compress`.

    Returns:
        All layers' entries; `step`, `append` and `attend` accept the layer's index.

    Raises:
        ValueError: for an argument that is missing or does not fit; the message names it.
    """
    layers = len(k)
    of_layers = {
        "v": v,
        "queries": queries,
        "sliding_windows": sliding_windows,
        "sink_logits": sink_logits,
    }
    every: Any = [k]
    for name, each in of_layers.items():
        every.append([None] * layers if each is None else each)
        remedy = f"wrong number of layers: give {layers}, as for k"
        require(0 < layers == len(every[-1]), name, f"{len(every[-1])} layers", remedy)
    given = [
        _LayerInputs(k, v, q, width, sinks, softcap)
        for k, v, q, width, sinks in zip(*every, strict=True)
    ]
    parts = _validate_policy(policy).composed
    widths = tuple(each.sliding_window for each in given)
    if any(widths):
        parts.require_fits_sliding_windows(widths)
    return _compress_layer_inputs(given, parts, length, headroom, key, first=0, layers=layers)


@dataclasses.dataclass(frozen=True)
class _LayerInputs:
    """Inputs of one layer from the caller: keys, values, optional queries, sliding window, sink logits, softcap."""

    k: Any
    v: Any
    queries: Any
    sliding_window: int | None
    sink_logits: Any
    softcap: float | None

    def __post_init__(self) -> None:
        validate_optional_field(
            self, "sliding_window", validate_int, "give 1 or more tokens, or None"
        )
        validate_optional_field(self, "softcap", check_positive)


@lru_cache(maxsize=256)
def _tabulate_entry_counts(
    parts: Parts, sliding_windows: SlidingWindows, padded_len: int, headroom: int
) -> tuple[tuple[int, ...], EntryCounts]:
    """Return pools' capacities in entries per kv head, headroom included, and `EntryCounts` of lengths 0 to S."""
    lengths = np.arange(1, padded_len + 1)
    layers = sliding_windows.count(None)
    # Entries within a sliding window are kept by every policy.
    kept = compute_entry_counts(
        parts if layers else Parts(), lengths, sliding_windows, strict=False
    )
    if kept.rows is None:
        bound = parts.restrict_to_full_attention(sliding_windows).layers.bound_total_entries
        reach = bound(np.asarray(kept.budget), lengths, np.asarray(kept.always_kept), layers=layers)
        near = sum(min(padded_len, width or 0) for width in sliding_windows)
        most = min(int(reach.max()), layers * padded_len) + near
        capacity = (most + len(sliding_windows) * headroom,)
    else:
        needed = kept.rows + headroom
        if parts.decoding_compression.compresses and layers:
            # A token is appended before another entry is evicted, or `every` tokens before the next recompression.
            beyond = np.maximum(kept.rows, kept.most) + (parts.recompression_interval or 1)
            endless = parts.mask_layers_without_eviction(sliding_windows)[:, None]
            needed = np.where(endless, needed, np.minimum(needed, beyond))
        capacity = tuple(needed.max(axis=1).tolist())
        capacity = (sum(capacity),) if parts.cache_layout.uses_shared_pool else capacity

    def prepend_zero_column(counts: Any) -> Int[np.ndarray, "..."]:
        """Return counts `[..., S]` of lengths 1 to S as int32 `[..., S + 1]`, with a 0 for length 0 in front."""
        return np.concatenate([np.zeros_like(counts[..., :1]), counts], axis=-1).astype(np.int32)

    table = jax.tree.map(prepend_zero_column, kept)
    # A sequence without tokens grows as one of a single token does.
    first = {"most": table.most, "reads": table.reads}
    grown = {
        name: jax.tree.map(lambda of: np.append(of[1:2], of[1:]), of) for name, of in first.items()
    }
    return capacity, dataclasses.replace(table, **grown)


class _ArrayLayerSource(PromptEntrySource):
    """`LayerEntrySource` of the caller's keys, values and queries of some layers, for the engine's `compress`."""

    def __init__(
        self,
        given: list[_LayerInputs],
        parts: Parts,
        length: Any,
        *,
        headroom: int,
        key: PRNGKeyArray,
        first: int,
        layers: int,
    ):
        """Validate lengths and the first layer's keys and values; look up entry counts for these lengths."""
        self.given = given
        self.key = key
        self.first = first
        self.query_buffers = list[Array]()
        self.like = validate_keys_values(given[0].k, given[0].v)[0]
        batch, heads, padded_len, _ = self.like.shape
        lengths: Any = validate_token_counts(
            "length", length, batch, padded_len, format_axis_order_hint(self.like)
        )
        widths = tuple(each.sliding_window for each in given)
        # One layer represents all layers of its kind.
        sliding_windows = widths if len(given) == layers else widths * layers
        self.capacity, tables = _tabulate_entry_counts(parts, sliding_windows, padded_len, headroom)
        if has_concrete_values(lengths):
            # Budgets are validated only if lengths are known, not while tracing.
            lengths = np.asarray(lengths, np.int64)
            parts.restrict_to_full_attention(sliding_windows).compute_prompt_budgets(
                lengths, np.asarray(tables.always_kept)[lengths]
            )
        else:
            tables = jax.tree.map(jnp.asarray, tables)
        super().__init__(
            parts,
            lengths,
            jax.tree.map(lambda table: table[..., lengths], tables),
            heads=heads,
            padded_len=padded_len,
            indices=range(first, first + len(given)),
            sliding_windows=sliding_windows,
        )

    def get_layer_candidates(self, index: int) -> Candidates:
        """Return a layer's validated `Candidates`, unscored if scores are unused; hold its entries and last queries."""
        parts = self.parts
        given = self.given[index - self.first]
        like = self.like
        k, v = validate_keys_values(given.k, given.v)
        require(
            k.shape == like.shape and k.dtype == like.dtype,
            "k",
            format_dtype_and_shape(k),
            f"layers differ: give keys as the first layer's, {format_dtype_and_shape(like)}",
        )
        rows = UnpackedEntries(k, v, self.unscored.inside)
        if not parts.compresses_prompts or given.sliding_window is not None:
            return self.make_unscored_candidates(index, rows)
        seen = lax.stop_gradient(self._collect_scorer_inputs(index, parts.scorer, k, v))
        if parts.decoding_compression.queries:
            buffer_size = query_buffer_size(parts.decoding_compression.queries)
            query_buffer = fill_query_buffer(
                seen.queries, self.length, rows=buffer_size, transforms=False, axes=None
            )
            self.query_buffers.append(query_buffer)
        if parts.merge is not None:
            rows = rows._replace(
                k=zero_out_padding(k, self.length), v=zero_out_padding(v, self.length)
            )
        return self.make_scored_candidates(index, rows, seen)

    def _collect_scorer_inputs(
        self, index: int, scorer: Scorer, k: Array, v: Array
    ) -> ScorerInputs:
        """Return one layer's `ScorerInputs`: keys, values, and, if needed, last queries and attention sums."""
        queries = scorer.needs.queries
        length = self.length
        batch, heads, padded_len, _ = k.shape
        positions = (length - queries)[:, None] + jnp.arange(queries, dtype=jnp.int32)
        given = self.given[index - self.first]
        sinks = None
        extras = ExtraInputs()
        if queries or self.parts.needs.sums:
            q = _validate_layer_queries(given.queries, k, self.parts)
            sinks = group_sink_logits(given.sink_logits, heads, q.shape[2])
            if self.parts.needs.sums:
                all_q, all_k, all_v = lax.stop_gradient(
                    [zero_out_padding(each, length) for each in (q, k, v)]
                )
                backend = get_attention_backend(Implementation.XLA)
                shaping = LogitShaping(softcap=given.softcap, sink_logits=sinks)
                _, lse = backend.compute_prefill_attention(
                    all_q, all_k, all_v, length, shaping=shaping
                )
                assert lse is not None
                extras["sums"] = backend.sum_attention_per_key(
                    all_q, all_k, lse, length, shaping=shaping
                )
            if q.shape[3] == padded_len:
                at = jnp.maximum(positions, 0)[:, None, None, :, None]
                q = jnp.take_along_axis(q, at, axis=3)
            q = q[..., q.shape[3] - queries :, :]
            if queries:
                extras["queries"] = jnp.where(positions[:, None, None, :, None] >= 0, q, 0)
        return ScorerInputs(
            q_positions=positions,
            k=k,
            v=v,
            length=length,
            layer=jnp.int32(index),
            key=self.key,
            extras=extras,
            sink_logits=None if sinks is None else jnp.broadcast_to(sinks, (batch, *sinks.shape)),
            softcap=given.softcap,
        )

    def get_logit_shaping(self, given: _LayerInputs) -> LogitShaping:
        """Return the `LogitShaping` of a layer's attention logits: softcap, and sink logits as `[K, G]`."""
        sinks = group_sink_logits(given.sink_logits, self.like.shape[1])
        return LogitShaping(softcap=given.softcap, sink_logits=sinks)

    def compute_pool_size(self, group: Sequence[int], kept: Array) -> int:
        """Return P, the pool's size in entries for a group of layers: kv heads * capacity, enough for any length."""
        return self.like.shape[1] * self.capacity[group[0]]


def _compress_layer_inputs(
    layers_given: list[_LayerInputs],
    parts: Parts,
    length: Any,
    headroom: Any,
    key: Any,
    *,
    first: int,
    layers: int,
) -> CompressedKV:
    """Validate arguments and compress the model's layers from `first` on; return one `CompressedKV` of them."""
    remedy = "give the number of tokens to be added, 0 or more"
    headroom = validate_int("headroom", headroom, remedy, least=0)
    key = validate_random_key(0 if key is None else key)
    remedy = (
        "not supported: its budget spans layers and it recompresses while decoding. Use "
        "jaxkv.generate"
    )
    spans = parts.cache_layout.uses_shared_pool and parts.decoding_compression.compresses
    require(not spans, "policy", parts.describe_parts(), remedy)
    made_for = parts.scorer.model_layer_count
    remedy = f"the policy requires a model of {made_for} layers: use a policy for this model"
    require(made_for in (None, layers), "layers", layers, remedy)
    given = _ArrayLayerSource(
        layers_given, parts, length, headroom=headroom, key=key, first=first, layers=layers
    )
    made = run_generator(compress_all(given, parts, key=key))
    if has_concrete_values(*given.nans):
        given.require_no_nan_scores()
    limit, state = create_policy_state(given, made)
    reading = parts.build_read_config(given.sliding_windows, given.like.shape[2])
    mine = dataclasses.replace(reading, sources=reading.sources[first : first + len(made.start)])
    tables = SegmentTables(
        start=made.start, length=made.length, limit=limit, seen=given.length, state=state
    )
    query_buffers = iter(given.query_buffers)
    held = list[SegmentTables]()
    for layer, each in enumerate(layers_given):
        own = tables.select_layer_tables(jnp.asarray([layer]))
        if given.query_buffers and own.state is not None and each.sliding_window is None:
            own = dataclasses.replace(
                own, state=dataclasses.replace(own.state, query_buffers=(next(query_buffers),))
            )
        # Each array of a state is a buffer of its own, so that states can be donated.
        held.append(jax.tree.map(jnp.copy, own))
    return CompressedKV(
        pools=add_page_bounds(made.pools, made.length, mine, None),
        tables=tuple(held),
        left_out=jnp.zeros((len(held), len(given.length)), jnp.int32),
        shapings=tuple(given.get_logit_shaping(each) for each in layers_given),
        key=key if parts.recompression_interval else None,
        parts=parts,
        sliding_windows=given.sliding_windows,
        first=first,
        padded_len=given.like.shape[2],
    )


def _validate_policy(given: Policy | type[Policy] | str) -> Policy:
    """Return the policy as an instance; ValueError if `compress` cannot run its budget, reads, store or inputs."""
    policy = resolve_policy(given)
    name = type(policy).__name__
    parts = policy.composed
    for unsupported, remedy in (
        (
            isinstance(parts.budget, ByteBudget),
            "not supported: bytes are those of the full model's cache. Give entries, or a share",
        ),
        (
            not parts.read.chooses_per_layer,
            f"not supported: {name} selects for other layers, or offloads entries. Use "
            "jaxkv.generate",
        ),
        (
            parts.store.transformed
            or parts.store.values_are_keys
            or parts.store.residual_length > 0,
            f"not supported: {parts.store.__name__} holds transformed entries, a residual, or no values. Use int8",
        ),
        (
            parts.growing_budget is not None,
            "not supported: pools have one size, and the budget grows. Omit grows",
        ),
        (
            parts.rolling,
            "not supported: it stores keys before RoPE, and these are after RoPE. Omit "
            "rolling positions",
        ),
        (
            set(parts.needs.requested_inputs) - {"queries", "sums"},
            f"not supported: {name} reads more than keys, values and queries. Use KeyDiff, "
            "or jaxkv.generate",
        ),
    ):
        require(not unsupported, "policy", policy, remedy)
    return policy


def _validate_layer_queries(given: Any, k: Array, parts: Parts) -> Float[Array, "B K G w D"]:
    """Return a layer's queries as `[B, K, G, w, D]`; ValueError if missing, unfit for keys, or of too few tokens."""
    padded_len = k.shape[2]
    name = type(parts.scorer).__name__
    window = parts.needs.queries
    need = (
        "all S queries"
        if parts.needs.sums
        else f"the last {window} queries of each sequence, or all S"
    )
    require(
        given is not None, "queries", None, f"{name} scores by attention: give {need}, [B, H, w, D]"
    )
    grouped = group_query_heads("queries", given, k.shape[0], k.shape[1], k)
    count = grouped.shape[3]
    enough = count == padded_len or (not parts.needs.sums and window <= count < padded_len)
    require(
        enough,
        "queries",
        f"{count} of {padded_len} tokens",
        f"{name} scores by attention: give {need}{format_axis_order_hint(k)}",
    )
    return grouped
