"""Prefill, layer by layer: a layer's keys and values are compressed before the next layer runs.

The outer loop runs over layers, one jitted call each; the inner loop over blocks of queries, only as many as a sequence
fills. Padding therefore costs memory but no time. Memory holds hidden states, one layer's keys and values, and the kept
entries of other layers.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv._checks import is_traced, select_array_module
from jaxkv._errors import require
from jaxkv.attention import Implementation, fit_head_dim
from jaxkv.cache import CacheArrays, KVCache, PolicyState, SegmentTables
from jaxkv.cache.host_store import HostStore, commit_to_device, offload_layer_entries
from jaxkv.cache.packing import UnpackedEntries
from jaxkv.cache.pools import EntryPool
from jaxkv.cache.residual_entries import ResidualEntries
from jaxkv.engine import chunked
from jaxkv.engine.cascade import compress_under_shared_budget
from jaxkv.engine.compress import CompressionResult, compress_layer_by_layer
from jaxkv.engine.embedding import compute_logits, embed_tokens
from jaxkv.engine.hadamard import apply_hadamard_to_entries, compute_mean_key, uses_hadamard
from jaxkv.engine.layer_sources import PromptEntrySource
from jaxkv.engine.lengths import bound_layer_budgets, count_buffered_queries, query_buffer_size
from jaxkv.engine.moments import compute_query_pairs
from jaxkv.engine.pages import add_page_bounds
from jaxkv.engine.plan import PrefillPlan, count_layers_ahead
from jaxkv.engine.prefill_layer import LayerOut, layer
from jaxkv.engine.progress import Walk, silence_progress
from jaxkv.engine.prompt_scores import UNSCORED, PromptScorer
from jaxkv.engine.query_buffers import fill_query_buffer
from jaxkv.engine.replay import PaddedPrompts, compute_peak_attention
from jaxkv.engine.selection import Candidates, compute_entry_limits
from jaxkv.engine.spec import create_selection_state, get_gate_weights
from jaxkv.engine.tokens import compute_angles_by_rope
from jaxkv.models.config import ModelConfig
from jaxkv.models.rope import RopeTables
from jaxkv.models.split_decoder import SplitDecoder
from jaxkv.models.states import DeltaState
from jaxkv.models.values import Rope
from jaxkv.policies.policy import Policy
from jaxkv.policies.scorer import Needs, ScorerInputs
from jaxkv.sharding.mesh import (
    get_array_sharding,
    is_inside_shard_map,
    move_to_sharding,
    place_dataclass_on_mesh,
    place_host_array,
)
from jaxkv.sharding.sharded_program import sharded_jit

# Fraction of a prefill's progress for the first of two passes.
_FIRST_PASS = 0.4


_LAYER_STATICS = ("graphs", "needs", "last", "implementation")
_layer = sharded_jit(static=_LAYER_STATICS, donate=("x",), on="graphs")(layer)
# The top block returns a single token's hidden state, so a donated buffer could not be reused.
_top_layer = sharded_jit(static=_LAYER_STATICS, on="graphs")(layer)


def run_layer(
    flat: SplitDecoder,
    index: int,
    x: Array,
    length: Array,
    tables: dict[Rope, RopeTables],
    needs: Needs,
    implementation: Implementation,
    whole: bool = False,
) -> LayerOut:
    """Run one block over right-padded prompts; return its `LayerOut`; donate `x`, except in the top block.

    The top block returns all tokens' hidden states, and donates `x`, only if `whole`.
    """
    last = index == len(flat.blocks) - 1 and not whole
    graphs = flat.get_layer_graphs(index)
    return (_top_layer if last else _layer)(
        flat.blocks[index],
        x,
        length,
        tables[graphs.spec.rope],
        graphs=graphs,
        needs=needs,
        last=last,
        implementation=implementation,
    )


def iterate_layer_outputs(
    flat: SplitDecoder, tokens: Int[Array, "B S"], length: Int[Array, " B"], *, needs: Needs
) -> Iterator[LayerOut]:
    """Generator: run padded prompts without compression; yield each layer's `LayerOut`; ValueError for logit softcaps.

    A layer's hidden states are donated to the next layer. `needs` applies to layers without a sliding window.
    """
    special = [each for each in flat.config.kinds if each.softcap]
    require(not special, "model", special, "analysis of capped logits not supported: load another")
    x = embed_tokens(flat.ends, tokens, graphs=flat.graphs)
    tables = compute_angles_by_rope(flat, tokens.shape[1])
    for index, window in enumerate(flat.config.sliding_windows):
        out = run_layer(
            flat, index, x, length, tables, needs if window is None else Needs(), Implementation.XLA
        )
        x = out.x
        yield out
        # Keep a single layer alive: the caller must drop its reference, too.
        del out


def prefill(
    flat: SplitDecoder,
    padded: PaddedPrompts,
    policy: Policy,
    needed: PrefillPlan,
    *,
    key: PRNGKeyArray,
    scorer: PromptScorer = UNSCORED,
    implementation: Implementation = Implementation.XLA,
) -> Walk[tuple[KVCache, Float[Array, "B V"]]]:
    """Generator: prefill and compress right-padded prompts by the plan `needed`; return cache and last logits `[B, V]`.

    Yields progress in layers: 1 after each layer, 0 after each packed layer, fractions of a layer in chunked prefill.
    The device may not have finished at a yield.
    """
    tokens, lengths, _ = padded
    if policy.composed.read.prefill_chunk_tokens:
        remedy = "not supported by chunked prefill: leave it out, or prefill in one chunk"
        require(not scorer.is_active, "prompt_logprobs", scorer.top, remedy)
        # Each chunk runs through the whole model.
        return (
            yield from chunked.prefill_in_chunks(
                flat, tokens, lengths, policy, needed, implementation=implementation
            )
        )
    lengths = np.asarray(lengths, np.int64)
    prompts = PrefillLayerSource(flat, tokens, lengths, policy, needed, key, implementation)
    prompts.whole = scorer.is_active
    if prompts.parts.needs.replay is None:
        cache = yield from prefill_layers(prompts)
    else:
        yield from prompts.run_both_passes(padded)
        # The first pass has reported the progress of these layers.
        cache = yield from silence_progress(prefill_layers(prompts))
    prompts.require_no_nan_scores()
    if prompts.to_host_store:
        host_store = HostStore(rows=tuple(prompts.to_host_store), layers=prompts.reading.offloaded)
        cache = dataclasses.replace(commit_to_device(cache), host_store=host_store)
    if scorer.is_active:
        prompts.x = yield from scorer.score_prompts(flat, tokens, lengths, prompts.x)
    logits = compute_logits(flat.ends, prompts.x, graphs=flat.graphs)
    return cache, logits


def prefill_layers(prompts: "PrefillLayerSource") -> Walk[KVCache]:
    """Generator: run and compress all layers; yield how many layers ran since the last yield; return the `KVCache`.

    Prompt lengths may be traced. Unlike `prefill`, this leaves the check for NaN scores to the caller.
    """
    flat = prompts.flat
    needed = prompts.needed
    parts = prompts.parts
    headroom = np.asarray(needed.headroom, np.int32)
    if needed.buffer is not None:
        out = yield from compress_under_shared_budget(
            prompts, parts, rows=needed.buffer, headroom=headroom
        )
    else:
        out = yield from compress_layer_by_layer(
            prompts,
            parts,
            key=prompts.merge_key,
            headroom=headroom,
            implementation=prompts.entry_implementation,
        )
    limit, state = create_policy_state(prompts, out, tuple(prompts.query_buffers))
    seen = jnp.copy(prompts.length)
    centre = jnp.stack(prompts.centres) if prompts.centres else None
    tables = SegmentTables(
        start=out.start, length=out.length, limit=limit, seen=seen, state=state, centre=centre
    )
    cache = KVCache(
        arrays=CacheArrays(
            pools=_add_residuals(
                add_page_bounds(out.pools, out.length, prompts.reading, flat.axes),
                out.length,
                parts.store.residual_length,
                flat.config,
            ),
            tables=tables,
            states=tuple(prompts.states),
        ),
        tally=out.tally,
        layout=parts.cache_layout,
        policy=prompts.policy,
        config=flat.config,
        dtype=flat.ends[0].dtype.name,
        padded_len=needed.padded_len,
        axes=flat.axes,
    )
    return place_dataclass_on_mesh(cache, flat.axes)


def _add_residuals(
    pools: tuple[EntryPool, ...], length: Int[Array, "L B K"], size: int, config: ModelConfig
) -> tuple[EntryPool, ...]:
    """Return pools with an empty residual of `size` entries in layers without a sliding window; unchanged for 0."""
    if not size:
        return pools
    layers = zip(pools, length, config.entry_dims, config.sliding_windows, strict=True)
    return tuple(
        dataclasses.replace(
            pool,
            residual=None if window else ResidualEntries.make_empty(held, size, dim, pool.dtype),
        )
        for pool, held, dim, window in layers
    )


class PrefillLayerSource(PromptEntrySource):
    """Layer source of prefill: runs the model layer by layer, and gives the compressor each layer's entries and scores.

    Attributes:
        x: hidden states after the last layer that ran; after the top layer, of the last token only unless `whole`.
        query_buffers: query buffers of the layers that have one.
        whole: True if the top layer computes the hidden states of all tokens.
        to_host_store: entries of offloaded layers in host memory.
        centres: means of keys by layer, if the cache holds transformed entries.
        entry_implementation: implementation of what reads entries as the cache holds them.
        states: states of the layers that ran and have one.
    """

    whole = False

    def __init__(
        self,
        flat: SplitDecoder,
        tokens: Int[np.ndarray, "B S"] | Int[Array, "B S"],
        lengths: Int[np.ndarray, " B"] | Int[Array, " B"],
        policy: Policy,
        needed: PrefillPlan,
        key: PRNGKeyArray,
        implementation: Implementation,
    ):
        """Place right-padded prompts on the device, embed them, prepare masks and angles; run no layer.

        Reads the plan's padded length, pools, headroom and numbers, which are traced if the lengths are.
        """
        config = flat.config
        axes = flat.axes
        parts = policy.composed
        super().__init__(
            parts,
            lengths,
            needed.numbers,
            heads=config.kv_heads
            // (axes.count_axis_shards("K") if axes is not None and is_inside_shard_map() else 1),
            padded_len=needed.padded_len,
            indices=range(config.layers),
            sliding_windows=config.sliding_windows,
            axes=axes,
        )
        self.flat = flat
        self.needed = needed
        self.policy = policy
        self.merge_key = key
        self.implementation = implementation
        self.entry_implementation = fit_head_dim(implementation, max(config.entry_dims))
        self.key = key if axes is None else move_to_sharding(key, get_array_sharding("", (), axes))
        self.dtype = needed.dtype
        self.reading = parts.build_read_config(self.sliding_windows, needed.padded_len)
        self.remembered = count_buffered_queries(
            parts.decoding_compression, self.reading, self.sliding_windows
        )
        self.ahead = count_layers_ahead(needed, self.length)
        placed = place_host_array(tokens, "B S", flat.axes, jnp.int32)
        self.x = embed_tokens(flat.ends, placed, graphs=flat.graphs, implementation=implementation)
        self.angles = compute_angles_by_rope(flat, needed.padded_len)
        self.ran = dict[int, LayerOut]()
        self.to_host_store = list[Array]()
        self.query_buffers = list[Array]()
        self.transforms = uses_hadamard(parts)
        self.centres = list[Array]()
        self.states = list[DeltaState]()

    def run_both_passes(self, padded: PaddedPrompts) -> Walk[None]:
        """Generator: run all layers, then the second pass; store each entry's peak attention; yield progress."""
        replay = self.parts.needs.replay
        assert replay is not None
        for index in self.indices:
            self.ran[index] = self._run_next_layer(index)
            yield _FIRST_PASS
        worth = (1 - _FIRST_PASS) * len(self.indices)
        peaks = yield from compute_peak_attention(
            self.flat,
            self.ran,
            padded,
            replay,
            implementation=self.entry_implementation,
            worth=worth,
        )
        for index in self.indices:
            self.ran[index].extras["replay"] = peaks[index]

    def _run_next_layer(self, index: int) -> LayerOut:
        """Run layer `index` on the hidden states `x`, replace `x` by its output, and return its `LayerOut`."""
        needs = self.parts.needs if self.sliding_windows[index] is None else Needs()
        out = run_layer(
            self.flat,
            index,
            self.x,
            self.length,
            self.angles,
            needs,
            self.implementation,
            self.whole,
        )
        self.x = out.x
        self.states += out.states
        return out

    def get_layer_candidates(self, index: int) -> Candidates:
        """Run a layer unless it ran; return `Candidates`; hold entries (offloaded: on host), any queries, mean key."""
        parts = self.parts
        length = self.length
        out = self.ran.pop(index) if index in self.ran else self._run_next_layer(index)
        k = out.extras.get("unrotated", out.k) if parts.rolling else out.k
        rows = UnpackedEntries(k, out.v, self.unscored.inside)
        if self.transforms:
            self.centres.append(compute_mean_key(k, length, axes=self.axes))
        if count := self.remembered[index]:
            last = out.q[..., out.q.shape[3] - count :, :]
            rows_of = query_buffer_size(count)
            self.query_buffers.append(
                fill_query_buffer(
                    last, length, rows=rows_of, transforms=self.transforms, axes=self.axes
                )
            )
        if index in self.reading.offloaded:
            # Wait for the previous transfer, so that transfers hold entries of at most two layers.
            jax.block_until_ready(self.to_host_store[-1:])
            k, v = (each.astype(self.dtype) for each in (k, out.v))
            self.to_host_store.append(offload_layer_entries(k, v, self.axes))
            self.held[index] = rows
            return dataclasses.replace(self.all_kept, inside=jnp.zeros_like(self.all_kept.inside))
        if not parts.compresses_prompts or self.sliding_windows[index]:
            return self.make_unscored_candidates(index, rows)
        seen = self.build_scorer_input(out, index)
        norms = out.extras["norms"] if parts.heads.needs_value_norms else None
        return self.make_scored_candidates(index, rows, seen, norms)

    def build_scorer_input(self, out: LayerOut, index: int) -> ScorerInputs:
        """Return one layer's `ScorerInputs`: keys, values, last queries, and the statistics that the scorer needs."""
        # Other parts of the policy may have requested queries and norms, too.
        flat = self.flat
        needs = self.parts.scorer.needs
        names = ("sums", "references", *needs.requested_inputs)
        first = out.q.shape[3] - needs.queries
        extras: Any = {name: each for name, each in out.extras.items() if name in names}
        if needs.queries:
            extras["queries"] = out.q[..., first:, :]
        if needs.gate is not None:
            extras["gate"] = get_gate_weights(flat, needs.gate, index)
        if needs.pairs:
            extras["pairs"] = compute_query_pairs(
                extras.get("queries"),
                self.length,
                jnp.int32(index),
                needs=needs.pairs,
                rope=flat.config.get_layer_spec(index).rope,
                heads=flat.config.kv_heads,
                axes=flat.axes,
            )
        return ScorerInputs(
            q_positions=out.q_positions[:, first:],
            k=out.k,
            v=out.v,
            length=self.length,
            layer=jnp.int32(index),
            key=self.key,
            extras=extras,
            sink_logits=out.sink_logits,
            softcap=flat.config.get_layer_spec(index).softcap,
            implementation=self.entry_implementation,
            axes=flat.axes,
            group_axes=flat.axes,
        )

    def bound_entries_to_keep(self, layer_weights: list[Array | None]) -> tuple[Array, Array]:
        """Return upper bounds `[L, B]` of entries per kv head and of recent entries; 0 for layers that have not run."""
        numbers = self.numbers
        layers = len(self.indices)
        weights = self.stack_layer_budget_weights(layer_weights)
        counts = bound_layer_budgets(
            self.parts, numbers.budget, self.lengths, numbers.always_kept, weights, layers
        )
        xp = select_array_module(weights)
        beyond = ((0, layers - len(layer_weights)), (0, 0))
        rows, recents = (
            place_host_array(xp.pad(table, beyond), "n B", self.axes, jnp.int32) for table in counts
        )
        return rows, recents

    def compute_pool_size(self, group: Sequence[int], kept: Array) -> int:
        """Return the size P in entries of the pool of a group of layers, from the plan; `kept` is not used."""
        return self.needed.pools[group[0]]

    def compute_packing_size(self, index: int, size: int) -> int:
        """Return the largest pool size of layers with an equal sliding window, to share a program; `size` if traced."""
        if is_traced(self.length):
            return size
        sizes = zip(self.sliding_windows, self.needed.pools, strict=True)
        return max(rows for window, rows in sizes if window == self.sliding_windows[index])

    def take_layer_entries(self, index: int) -> UnpackedEntries:
        """Remove and return a layer's `UnpackedEntries`, Hadamard-transformed if the cache holds such entries."""
        rows = super().take_layer_entries(index)
        if not self.transforms:
            return rows
        k, v = apply_hadamard_to_entries(rows.k, rows.v, self.centres[index], axes=self.axes)
        return rows._replace(k=k, v=v)

    def has_no_nan_scores(self) -> Bool[Array, ""]:
        """Return a traced bool, True if no score of any layer is NaN, for programs that cannot raise errors."""
        return ~jnp.stack([*self.nans, jnp.zeros((), bool)]).any()


def create_policy_state(
    source: PromptEntrySource,
    out: CompressionResult,
    query_buffers: tuple[Float[Array, "B K G R D"], ...] = (),
) -> tuple[Int[Array, "L B K"], PolicyState | None]:
    """Return the entry limits `[L, B, K]` of segments after a prompt, and the policy's first `PolicyState`, or None.

    If the policy compresses prompts only, a limit is the number of entries kept.
    """
    parts = source.parts
    if parts.decoding_compression.compresses:
        return _create_compressing_state(source, out, query_buffers)
    if parts.read.reads_all_entries:
        return jnp.copy(out.length), None
    reads = source.numbers.reads
    assert reads is not None
    return jnp.copy(out.length), create_selection_state(
        source.length, reads, out.length, query_buffers
    )


def _create_compressing_state(
    source: PromptEntrySource,
    out: CompressionResult,
    query_buffers: tuple[Float[Array, "B K G R D"], ...],
) -> tuple[Int[Array, "L B K"], PolicyState]:
    """Return entry limits `[L, B, K]` and the first state of policies that evict or recompress after the prompt.

    A limit is the number of kept entries, or the budget if the prompt is shorter and the policy has no threshold.
    Layers without a limit get a number that no cache reaches. Head budgets may fix their own limits.
    """
    parts = source.parts
    lengths = source.lengths
    numbers = source.numbers
    of = slice(source.indices[0], source.indices[-1] + 1)
    xp = select_array_module(lengths)
    endless = np.iinfo(np.int32).max // 2
    kept = out.length
    short = numbers.most > lengths
    targets = xp.where(short, numbers.most, source.kept_entries[of])
    # A short prompt's segments grow to their targets, so later sinks count, too.
    grown = parts.keep.count_always_kept(targets, xp.broadcast_to(lengths, targets.shape))
    recent = xp.where(
        short, parts.count_recent_entries(targets, lengths, grown), source.recents[of]
    )
    state = PolicyState(
        prompt=source.length,
        budget=jnp.asarray(numbers.most, jnp.int32),
        recent=jnp.asarray(recent, jnp.int32),
        tau=out.tau,
        query_buffers=query_buffers,
    )
    per_layer = xp.where(
        parts.mask_layers_without_eviction(source.sliding_windows)[of, None], endless, targets
    )
    limit = jnp.asarray(xp.broadcast_to(per_layer[..., None], kept.shape), jnp.int32)
    if parts.heads.is_uniform:
        return limit, state
    short = short & (parts.score_threshold is None)
    grown = jnp.asarray(short[None, :, None] | (per_layer == endless)[..., None])
    usual = jnp.where(grown, limit, kept)
    return compute_entry_limits(
        parts.heads, kept, usual, source.axes, source.sliding_windows, of
    ), state
