"""`compress`: compresses keys and values of models outside jaxkv. Pure functions, usable under any `jit`.

```
state = jaxkv.compress(k, v, queries=q, length=length, policy=AdaKV(budget=256), headroom=64)  # behind the prompt
state, out = state.step(q_new, k_new, v_new)                                                   # each token
```
Shapes follow from S, the policy and the headroom: data moves where segments begin and end, so one compilation serves
all lengths. The engine compresses each layer, here as in prefill; this file checks arguments and looks up sizes.
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

from jaxkv._checks import index, optional, settled, whole
from jaxkv._errors import require
from jaxkv.arguments import as_key
from jaxkv.attention import Implementation, Shaping, backend_of
from jaxkv.cache import Tables
from jaxkv.cache.packing import Unpacked
from jaxkv.engine.compress import compress as compress_all
from jaxkv.engine.layer_sources import PromptSource
from jaxkv.engine.lengths import ByLength, by_length, query_buffer_size
from jaxkv.engine.pages import with_bounds
from jaxkv.engine.prefill import first_state
from jaxkv.engine.progress import run_to_end
from jaxkv.engine.query_buffers import fill_query_buffer
from jaxkv.engine.selection import Candidates
from jaxkv.models.config import SlidingWindows
from jaxkv.models.values import positive
from jaxkv.policies.checks import Bytes
from jaxkv.policies.layer_budgets import UniformLayers
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import as_policy
from jaxkv.policies.scorer import Extras, Observed, Scorer
from jaxkv.transform.array_checks import (
    as_counts,
    as_grouped,
    as_keys_values,
    as_sinks,
    known,
    order_hint,
    shown,
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
    """Compresses one layer's keys and values by a policy; returns the kept entries as `CompressedKV`.

    Pure: it runs under `jit` (with a traced `length`), `vmap` and `grad`; gradients reach the kept keys and values, and
    stop at the choice (policies that merge have none in reverse). Under `shard_map` the axis of sequences may be split,
    and that of kv heads where heads do not look at one another: not with AdaKV, nor with policies that keep the same
    positions in all heads, or uses random numbers for each; policies that count all queries' attention, or merge, want
    `check_vma=False`.

    Args:
        k: `[B, K, S, D]` keys after RoPE, the prompts' tokens first, padding behind them; `[B, S, K, D]`, the order of
            flax and cuDNN, as `k.swapaxes(1, 2)`.
        v: `[B, K, S, D]` values.
        policy: the compression, or its name or class. It may look at keys, values and queries of the prompt; a policy
            that needs more is rejected. A budget below what must stay is raised to it where lengths are traced.
        queries: `[B, H, w, D]` queries after RoPE, H a multiple of K and head h reading kv head h // (H / K). Either
            those of each sequence's last w tokens, for policies that observe a window of them, or those of all S
            tokens. Policies that do not look at attention leave them unread.
        length: `i32[B]` tokens of each sequence, S by default.
        headroom: tokens that will be added at most.
        layer: index of this layer, for policies whose budget, scores or samples differ by layer.
        layers: L of the model, for policies whose budget or scores do.
        sliding_window: number of last tokens, its own included, that a token of this layer attends to; None for all. The last
            `window` entries are kept then, whatever the policy; `layer`, `layers` and tables count the other layers alone.
        sink_logits: `[H]` learned logits that take part in the softmax of each query head, without a value; scores and
            `attend` count them.
        softcap: cap of the layer's logits, which are softcap * tanh(logits / softcap), as well.
        key: random key or seed, for policies that use random numbers; 0 by default.

    Returns:
        One layer's entries, to which `step` adds tokens.

    Raises:
        ValueError: naming the argument that is missing or does not fit.
    """
    policy = _as_taken(policy)
    parts = policy.composed
    name = type(policy).__name__
    remedy = f"{name} looks at all layers: give them to jaxkv.compress_layers"
    require(not (parts.layers.from_scores or parts.nested), "policy", policy, remedy)
    remedy = f"{name} keeps other entries in other layers: give layer= and layers=, or all layers to jaxkv.compress_layers"
    uniform = isinstance(parts.layers, UniformLayers) and parts.read.everything
    same = uniform and parts.scorer.model_layers is None
    require(layers is not None or same, "layers", layers, remedy)
    if layers is not None:
        layers = whole("layers", layers, "give how many layers the model has")
        layer = index("layer", layer, layers)
    layer = whole("layer", layer, "give the layer's index", least=0)
    given = _Layer(k, v, queries, sliding_window, sink_logits, softcap)
    return _compressed(
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
    """Compresses all layers' keys and values by a policy, as `CompressedKV`; for budgets that depend on several layers.

    If budgets depend on all layers' scores, all layers share one pool.

    Args:
        k: each layer's keys, as for `compress`.
        v: each layer's values.
        policy: as for `compress`.
        queries: each layer's queries.
        length: as for `compress`.
        headroom: as for `compress`.
        sliding_windows: each layer's sliding window, as for `compress`; the budget is spread over the layers without one.
        sink_logits: each layer's, as for `compress`.
        softcap: of all layers, as for `compress`.
        key: as for `compress`.

    Returns:
        All layers' entries; `step`, `append` and `attend` take the layer's index.

    Raises:
        ValueError: naming the argument that is missing or does not fit.
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
        remedy = f"give as many as there are of k: {layers}"
        require(0 < layers == len(every[-1]), name, f"{len(every[-1])} layers", remedy)
    given = [
        _Layer(k, v, q, width, sinks, softcap) for k, v, q, width, sinks in zip(*every, strict=True)
    ]
    parts, widths = _as_taken(policy).composed, tuple(each.sliding_window for each in given)
    if any(widths):
        parts.require_fits_windows(widths)
    return _compressed(given, parts, length, headroom, key, first=0, layers=layers)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A user's arrays of one layer: keys, values, maybe queries; the layer's sliding window, sink logits and cap of logits."""

    k: Any
    v: Any
    queries: Any
    sliding_window: int | None
    sink_logits: Any
    softcap: float | None

    def __post_init__(self) -> None:
        optional(self, "sliding_window", whole, "give 1 or more tokens, or None")
        optional(self, "softcap", positive)


@lru_cache(maxsize=256)
def _tables(
    parts: Parts, sliding_windows: SlidingWindows, padded_len: int, headroom: int
) -> tuple[tuple[int, ...], ByLength]:
    """Entries per kv head of each layer at most, of a shared pool in all; numbers for every length from 0 to `padded_len`."""
    lengths, layers = np.arange(1, padded_len + 1), sliding_windows.count(None)
    # What a window holds stays, whatever the policy.
    told = by_length(parts if layers else Parts(), lengths, sliding_windows, strict=False)
    if told.rows is None:
        bound = parts.among(sliding_windows).layers.bound
        reach = bound(np.asarray(told.budget), lengths, np.asarray(told.always_kept), layers=layers)
        near = sum(min(padded_len, width or 0) for width in sliding_windows)
        most = min(int(reach.max()), layers * padded_len) + near
        capacity = (most + len(sliding_windows) * headroom,)
    else:
        needed = told.rows + headroom
        if parts.ongoing.compresses and layers:
            # A token joins before another entry goes, or as many as come before the next compression.
            beyond = np.maximum(told.rows, told.most) + (parts.every or 1)
            endless = parts.unlimited(sliding_windows)[:, None]
            needed = np.where(endless, needed, np.minimum(needed, beyond))
        capacity = tuple(needed.max(axis=1).tolist())
        capacity = (sum(capacity),) if parts.layout.one_pool else capacity

    def from_none(counts: Any) -> Int[np.ndarray, "..."]:
        """Table indexed by length, with a 0 for length 0 added at the front; int32."""
        return np.concatenate([np.zeros_like(counts[..., :1]), counts], axis=-1).astype(np.int32)

    table = jax.tree.map(from_none, told)
    # A sequence without a token grows as one of a token does.
    first = {"most": table.most, "reads": table.reads}
    grown = {
        name: jax.tree.map(lambda of: np.append(of[1:2], of[1:]), of) for name, of in first.items()
    }
    return capacity, dataclasses.replace(table, **grown)


class _Given(PromptSource):
    """`LayerSource` for the engine's `compress` that holds a user's keys, values and queries of some layers."""

    def __init__(
        self,
        given: list[_Layer],
        parts: Parts,
        length: Any,
        *,
        headroom: int,
        key: PRNGKeyArray,
        first: int,
        layers: int,
    ):
        """Validates the keys, values and queries of the layers from `first` on, and looks up their row counts."""
        self.given, self.key, self.first = given, key, first
        self.query_buffers = list[Array]()
        self.like = as_keys_values(given[0].k, given[0].v)[0]
        batch, heads, padded_len, _ = self.like.shape
        lengths: Any = as_counts("length", length, batch, padded_len, order_hint(self.like))
        widths = tuple(each.sliding_window for each in given)
        # One layer alone stands for all layers of its kind.
        sliding_windows = widths if len(given) == layers else widths * layers
        self.capacity, tables = _tables(parts, sliding_windows, padded_len, headroom)
        if known(lengths):
            # Budgets can only be validated if lengths are known, not while tracing.
            lengths = np.asarray(lengths, np.int64)
            parts.among(sliding_windows).budgets(lengths, np.asarray(tables.always_kept)[lengths])
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

    def candidates(self, index: int) -> Candidates:
        """`Candidates` of one layer: its prompt entries with scores, without gradient; stores the entries in `held`."""
        parts, given, like = self.parts, self.given[index - self.first], self.like
        k, v = as_keys_values(given.k, given.v)
        require(
            k.shape == like.shape and k.dtype == like.dtype,
            "k",
            shown(k),
            f"the first layer's is {shown(like)}",
        )
        rows = Unpacked(k, v, self.unscored.inside)
        if not parts.drops or given.sliding_window is not None:
            return self.unchosen(index, rows)
        seen = lax.stop_gradient(self._observed(index, parts.scorer, k, v))
        if parts.ongoing.queries:
            buffer_size = query_buffer_size(parts.ongoing.queries)
            query_buffer = fill_query_buffer(
                seen.queries, self.length, rows=buffer_size, transforms=False, axes=None
            )
            self.query_buffers.append(query_buffer)
        if parts.merge is not None:
            rows = rows._replace(k=_finite(k, self.length), v=_finite(v, self.length))
        return self.scored(index, rows, seen)

    def _observed(self, index: int, scorer: Scorer, k: Array, v: Array) -> Observed:
        """`Observed` inputs of the scorer for one layer: keys, values, queries and attention sums it needs."""
        queries, length, (batch, heads, padded_len, _) = scorer.needs.queries, self.length, k.shape
        positions = (length - queries)[:, None] + jnp.arange(queries, dtype=jnp.int32)
        given, sinks, extras = self.given[index - self.first], None, Extras()
        if queries or self.parts.needs.sums:
            q = _queries(given.queries, k, self.parts)
            sinks = as_sinks(given.sink_logits, heads, q.shape[2])
            if self.parts.needs.sums:
                all_q, all_k, all_v = lax.stop_gradient(
                    [_finite(each, length) for each in (q, k, v)]
                )
                backend = backend_of(Implementation.XLA)
                shaping = Shaping(softcap=given.softcap, sink_logits=sinks)
                _, lse = backend.prefill(all_q, all_k, all_v, length, shaping=shaping)
                assert lse is not None
                extras["sums"] = backend.column_sums(all_q, all_k, lse, length, shaping=shaping)
            if q.shape[3] == padded_len:
                at = jnp.maximum(positions, 0)[:, None, None, :, None]
                q = jnp.take_along_axis(q, at, axis=3)
            q = q[..., q.shape[3] - queries :, :]
            if queries:
                extras["queries"] = jnp.where(positions[:, None, None, :, None] >= 0, q, 0)
        return Observed(
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

    def shaping(self, given: _Layer) -> Shaping:
        """`Shaping` of a layer's attention logits: cap and sink logits `[K, G]`."""
        sinks = as_sinks(given.sink_logits, self.like.shape[1])
        return Shaping(softcap=given.softcap, sink_logits=sinks)

    def pool_rows(self, group: Sequence[int], kept: Array) -> int:
        """Size P in entries of a group's pool: the most that any length keeps and gains."""
        return self.like.shape[1] * self.capacity[group[0]]


def _compressed(
    layers_given: list[_Layer],
    parts: Parts,
    length: Any,
    headroom: Any,
    key: Any,
    *,
    first: int,
    layers: int,
) -> CompressedKV:
    """The layers from `first` on, compressed by the engine."""
    remedy = "give how many tokens will be added, 0 or more"
    headroom = whole("headroom", headroom, remedy, least=0)
    key = as_key(0 if key is None else key)
    remedy = "its budget spans layers, and goes on while tokens are added: use jaxkv.generate"
    spans = parts.layout.one_pool and parts.ongoing.compresses
    require(not spans, "policy", parts.described(), remedy)
    made_for = parts.scorer.model_layers
    remedy = f"the policy was made for a model of {made_for} layers"
    require(made_for in (None, layers), "layers", layers, remedy)
    given = _Given(
        layers_given, parts, length, headroom=headroom, key=key, first=first, layers=layers
    )
    made = run_to_end(compress_all(given, parts, key=key))
    if known(*given.nans):
        given.require_ordered()
    limit, state = first_state(given, made)
    reading = parts.reading(given.sliding_windows, given.like.shape[2])
    mine = dataclasses.replace(reading, sources=reading.sources[first : first + len(made.start)])
    tables = Tables(
        start=made.start, length=made.length, limit=limit, seen=given.length, state=state
    )
    query_buffers, held = iter(given.query_buffers), list[Tables]()
    for layer, each in enumerate(layers_given):
        own = tables.of_layers(jnp.asarray([layer]))
        if given.query_buffers and own.state is not None and each.sliding_window is None:
            own = dataclasses.replace(
                own, state=dataclasses.replace(own.state, query_buffers=(next(query_buffers),))
            )
        held.append(own)
    return CompressedKV(
        pools=with_bounds(made.pools, made.length, mine, None),
        tables=tuple(held),
        left_out=jnp.zeros((len(held), len(given.length)), jnp.int32),
        shapings=tuple(given.shaping(each) for each in layers_given),
        key=key if parts.every else None,
        parts=parts,
        sliding_windows=given.sliding_windows,
        first=first,
        padded_len=given.like.shape[2],
    )


def _finite(rows: Float[Array, "... S D"], length: Int[Array, " B"]) -> Float[Array, "... S D"]:
    """Keys, values or queries with padding set to zero, since a NaN there would spread in sums."""
    inside = jnp.arange(rows.shape[-2], dtype=jnp.int32) < length[:, None]
    return jnp.where(inside.reshape(len(length), *(1,) * (rows.ndim - 3), -1, 1), rows, 0)


def _as_taken(given: Policy | type[Policy] | str) -> Policy:
    """Validates a policy for `compress` and returns it; ValueError if it needs more than prompt K, V and Q."""
    policy = as_policy(given)
    name, parts = type(policy).__name__, policy.composed
    for refused, remedy in (
        (
            isinstance(parts.budget, Bytes),
            "bytes are those of a whole model's cache: give entries, or a share",
        ),
        (
            not parts.read.by_layer,
            f"{name} chooses in one layer what others read, or offloads it: use jaxkv.generate",
        ),
        (
            parts.store.transformed,
            f"{parts.store.__name__} holds transformed entries, and here they are as they come: give int8",
        ),
        (
            parts.rolling,
            "it stores keys before RoPE, and here they come after it: leave rolling positions out",
        ),
        (
            set(parts.needs.extras) - {"queries", "sums"},
            f"{name} looks at more than keys, values and queries: use KeyDiff, or jaxkv.generate",
        ),
    ):
        require(not refused, "policy", policy, remedy)
    return policy


def _queries(given: Any, k: Array, parts: Parts) -> Float[Array, "B K G w D"]:
    """Validates a layer's queries and returns them as `[B, K, G, w, D]`; ValueError if the policy needs more tokens."""
    padded_len, name, window = k.shape[2], type(parts.scorer).__name__, parts.needs.queries
    asks = (
        "all S queries"
        if parts.needs.sums
        else f"the last {window} queries of each sequence, or all S"
    )
    require(
        given is not None, "queries", None, f"{name} looks at attention: give {asks}, [B, H, w, D]"
    )
    grouped = as_grouped("queries", given, k.shape[0], k.shape[1], k)
    count = grouped.shape[3]
    enough = count == padded_len or (not parts.needs.sums and window <= count < padded_len)
    require(
        enough,
        "queries",
        f"{count} of {padded_len} tokens",
        f"{name} looks at attention: give {asks}{order_hint(k)}",
    )
    return grouped
