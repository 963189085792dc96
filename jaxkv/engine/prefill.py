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

from jaxkv._checks import is_traced, namespace
from jaxkv._errors import require
from jaxkv.attention import Implementation
from jaxkv.cache import Cache, KVCache, State, Tables
from jaxkv.cache.host_store import HostStore, committed, put_away
from jaxkv.cache.packing import Unpacked
from jaxkv.engine import chunked
from jaxkv.engine.cascade import cascaded
from jaxkv.engine.compress import Compressed, compress
from jaxkv.engine.embedding import embed, logits_of
from jaxkv.engine.hadamard import centre_of, transformed_rows, transforms
from jaxkv.engine.layer_sources import PromptSource
from jaxkv.engine.lengths import most_by_layer_weights, query_buffer_size, remembered
from jaxkv.engine.pages import with_bounds
from jaxkv.engine.plan import PrefillPlan, layers_ahead
from jaxkv.engine.prefill_layer import LayerOut, layer
from jaxkv.engine.progress import Walk, without_progress
from jaxkv.engine.query_buffers import fill_query_buffer
from jaxkv.engine.replay import Padded, replayed
from jaxkv.engine.selection import Candidates, limits_of
from jaxkv.engine.spec import gate_weights, reading_state
from jaxkv.engine.tokens import angles_by_rope
from jaxkv.models.decoder import Flat
from jaxkv.models.rope import Angles
from jaxkv.models.values import Rope
from jaxkv.policies.policy import Policy
from jaxkv.policies.scorer import Needs, Observed
from jaxkv.sharding.mesh import inside, place, put, settle_down, where
from jaxkv.sharding.sharded_program import sharded_jit

# Fraction of a prefill's progress for the first of two passes.
_FIRST_PASS = 0.4


_LAYER_STATICS = ("graphs", "needs", "last", "implementation")
_layer = sharded_jit(static=_LAYER_STATICS, donate=("x",), on="graphs")(layer)
# The top block returns a single token's hidden state, so a donated buffer could not be reused.
_top_layer = sharded_jit(static=_LAYER_STATICS, on="graphs")(layer)


def run_layer(
    flat: Flat,
    index: int,
    x: Array,
    length: Array,
    tables: dict[Rope, Angles],
    needs: Needs,
    implementation: Implementation,
) -> LayerOut:
    """Run one block over prompts; return its `LayerOut`. Donate `x`, except in the top block."""
    last, graphs = index == len(flat.blocks) - 1, flat.graphs_of(index)
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


def read_layers(
    flat: Flat, tokens: Int[Array, "B S"], length: Int[Array, " B"], *, needs: Needs
) -> Iterator[LayerOut]:
    """Generator: run right-padded prompts through the model without compression; yield each layer's `LayerOut`.

    A layer's hidden states are donated to the next layer. `needs` applies to layers without a sliding window.
    """
    special = [each for each in flat.config.kinds if each.softcap]
    require(not special, "model", special, "analysis of capped logits not supported: load another")
    x = embed(flat.ends, tokens, graphs=flat.graphs)
    tables = angles_by_rope(flat, tokens.shape[1])
    for index, window in enumerate(flat.config.sliding_windows):
        out = run_layer(
            flat, index, x, length, tables, needs if window is None else Needs(), Implementation.XLA
        )
        x = out.x
        yield out
        # Keep a single layer alive: the caller must drop its reference, too.
        del out


def prefill(
    flat: Flat,
    padded: Padded,
    policy: Policy,
    needed: PrefillPlan,
    *,
    key: PRNGKeyArray,
    implementation: Implementation = Implementation.XLA,
) -> Walk[tuple[KVCache, Float[Array, "B V"]]]:
    """Generator: prefill right-padded prompts with the plan `needed`; return the cache and last logits `[B, V]`.

    Yields progress in layers: 1 after each layer, 0 after each packed layer, fractions of a layer in chunked prefill.
    The device may not have finished at a yield.
    """
    tokens, lengths, _ = padded
    if policy.composed.read.chunk:
        # Each chunk runs through the whole model.
        return (
            yield from chunked.prefill(
                flat, tokens, lengths, policy, needed, implementation=implementation
            )
        )
    lengths = np.asarray(lengths, np.int64)
    prompts = Prompts(flat, tokens, lengths, policy, needed, key, implementation)
    if prompts.parts.needs.replay is None:
        cache = yield from read(prompts)
    else:
        yield from prompts.read_twice(padded)
        # The first pass has reported the progress of these layers.
        cache = yield from without_progress(read(prompts))
    prompts.require_ordered()
    if prompts.to_host_store:
        host_store = HostStore(rows=tuple(prompts.to_host_store), layers=prompts.reading.offloaded)
        cache = dataclasses.replace(committed(cache), host_store=host_store)
    logits = logits_of(flat.ends, prompts.x, graphs=flat.graphs)
    return cache, logits


def read(prompts: "Prompts") -> Walk[KVCache]:
    """Generator: run and compress all layers; yield the layers run since the last yield, return the `KVCache`.

    Prompt lengths may be traced. Unlike `prefill`, this leaves the check for NaN scores to the caller.
    """
    flat, needed, parts = prompts.flat, prompts.needed, prompts.parts
    headroom = np.asarray(needed.headroom, np.int32)
    if needed.buffer is not None:
        out = yield from cascaded(prompts, parts, rows=needed.buffer, headroom=headroom)
    else:
        out = yield from compress(
            prompts,
            parts,
            key=prompts.merge_key,
            headroom=headroom,
            implementation=prompts.implementation,
        )
    limit, state = first_state(prompts, out, tuple(prompts.query_buffers))
    seen = jnp.copy(prompts.length)
    centre = jnp.stack(prompts.centres) if prompts.centres else None
    tables = Tables(
        start=out.start, length=out.length, limit=limit, seen=seen, state=state, centre=centre
    )
    cache = KVCache(
        arrays=Cache(
            pools=with_bounds(out.pools, out.length, prompts.reading, flat.axes), tables=tables
        ),
        tally=out.tally,
        layout=parts.layout,
        policy=prompts.policy,
        config=flat.config,
        dtype=flat.ends[0].dtype.name,
        padded_len=needed.padded_len,
        axes=flat.axes,
    )
    return settle_down(cache, flat.axes)


class Prompts(PromptSource):
    """Layer source of prefill: runs the model layer by layer and gives `compress` each layer's entries and scores.

    Attributes:
        x: hidden states after the last layer that ran; after the top layer, of the last token only.
        query_buffers: query buffers of the layers that have one.
        to_host_store: entries of offloaded layers in host memory.
        centres: means of keys by layer, if the cache holds transformed entries.
    """

    def __init__(
        self,
        flat: Flat,
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
        config, axes, parts = flat.config, flat.axes, policy.composed
        super().__init__(
            parts,
            lengths,
            needed.numbers,
            heads=config.kv_heads // (axes.size("K") if axes is not None and inside() else 1),
            padded_len=needed.padded_len,
            indices=range(config.layers),
            sliding_windows=config.sliding_windows,
            axes=axes,
        )
        self.flat, self.needed, self.policy = flat, needed, policy
        self.merge_key, self.implementation = key, implementation
        self.key = key if axes is None else put(key, where("", (), axes))
        self.dtype = needed.dtype
        self.reading = parts.reading(self.sliding_windows, needed.padded_len)
        self.remembered = remembered(parts.ongoing, self.reading, self.sliding_windows)
        self.ahead = layers_ahead(needed, self.length)
        placed = place(tokens, "B S", flat.axes, jnp.int32)
        self.x = embed(flat.ends, placed, graphs=flat.graphs, implementation=implementation)
        self.angles = angles_by_rope(flat, needed.padded_len)
        self.ran = dict[int, LayerOut]()
        self.to_host_store, self.query_buffers = list[Array](), list[Array]()
        self.transforms, self.centres = transforms(parts), list[Array]()

    def read_twice(self, padded: Padded) -> Walk[None]:
        """Generator: run all layers, then the second pass; store peak attention per entry; yield progress."""
        replay = self.parts.needs.replay
        assert replay is not None
        for index in self.indices:
            self.ran[index] = self._run(index)
            yield _FIRST_PASS
        worth = (1 - _FIRST_PASS) * len(self.indices)
        peaks = yield from replayed(
            self.flat, self.ran, padded, replay, implementation=self.implementation, worth=worth
        )
        for index in self.indices:
            self.ran[index].extras["replay"] = peaks[index]

    def _run(self, index: int) -> LayerOut:
        """Run a layer on the current hidden states; replace these by its output; return its `LayerOut`."""
        needs = self.parts.needs if self.sliding_windows[index] is None else Needs()
        out = run_layer(
            self.flat, index, self.x, self.length, self.angles, needs, self.implementation
        )
        self.x = out.x
        return out

    def candidates(self, index: int) -> Candidates:
        """Run a layer unless it has run; return its `Candidates`; hold keys and values to be packed or offloaded."""
        parts, length = self.parts, self.length
        out = self.ran.pop(index) if index in self.ran else self._run(index)
        k = out.extras.get("unrotated", out.k) if parts.rolling else out.k
        rows = Unpacked(k, out.v, self.unscored.inside)
        if self.transforms:
            self.centres.append(centre_of(k, length, axes=self.axes))
        if count := self.remembered[index]:
            last, rows_of = out.q[..., out.q.shape[3] - count :, :], query_buffer_size(count)
            self.query_buffers.append(
                fill_query_buffer(
                    last, length, rows=rows_of, transforms=self.transforms, axes=self.axes
                )
            )
        if index in self.reading.offloaded:
            # Wait for the previous transfer, so that transfers hold entries of at most two layers.
            jax.block_until_ready(self.to_host_store[-1:])
            k, v = (each.astype(self.dtype) for each in (k, out.v))
            self.to_host_store.append(put_away(k, v, self.axes))
            self.held[index] = rows
            return dataclasses.replace(self.all_kept, inside=jnp.zeros_like(self.all_kept.inside))
        if not parts.drops or self.sliding_windows[index]:
            return self.unchosen(index, rows)
        seen = self.observed(out, index)
        norms = out.extras["norms"] if parts.heads.needs_norms else None
        return self.scored(index, rows, seen, norms)

    def observed(self, out: LayerOut, index: int) -> Observed:
        """Return the scorer's input from a layer's output: the fields that its needs name."""
        # Other parts of the policy may have requested queries and norms, too.
        flat, needs = self.flat, self.parts.scorer.needs
        names, first = ("sums", *needs.extras), out.q.shape[3] - needs.queries
        extras: Any = {name: each for name, each in out.extras.items() if name in names}
        if needs.queries:
            extras["queries"] = out.q[..., first:, :]
        if needs.gate is not None:
            extras["gate"] = gate_weights(flat, needs.gate, index)
        return Observed(
            q_positions=out.q_positions[:, first:],
            k=out.k,
            v=out.v,
            length=self.length,
            layer=jnp.int32(index),
            key=self.key,
            extras=extras,
            sink_logits=out.sink_logits,
            softcap=flat.config.spec_of(index).softcap,
            implementation=self.implementation,
            axes=flat.axes,
            group_axes=flat.axes,
        )

    def at_most(self, layer_weights: list[Array | None]) -> tuple[Array, Array]:
        """Return upper bounds `[L, B]` of entries per kv head and of recent entries; 0 for layers that have not run."""
        numbers, layers = self.numbers, len(self.indices)
        weights = self.weights(layer_weights)
        counts = most_by_layer_weights(
            self.parts, numbers.budget, self.lengths, numbers.always_kept, weights, layers
        )
        xp, beyond = namespace(weights), ((0, layers - len(layer_weights)), (0, 0))
        rows, recents = (
            place(xp.pad(table, beyond), "n B", self.axes, jnp.int32) for table in counts
        )
        return rows, recents

    def pool_rows(self, group: Sequence[int], kept: Array) -> int:
        """Return the size P in entries of the pool of a group of layers, from the plan; `kept` is not used."""
        return self.needed.pools[group[0]]

    def packed_rows(self, index: int, size: int) -> int:
        """Return the largest P among layers with this layer's sliding window, so that these share one program."""
        if is_traced(self.length):
            return size
        sizes = zip(self.sliding_windows, self.needed.pools, strict=True)
        return max(rows for window, rows in sizes if window == self.sliding_windows[index])

    def rows(self, index: int) -> Unpacked:
        """Remove one layer's keys and values from the source and return them as `Unpacked`."""
        rows = super().rows(index)
        if not self.transforms:
            return rows
        k, v = transformed_rows(rows.k, rows.v, self.centres[index], axes=self.axes)
        return rows._replace(k=k, v=v)

    def ordered(self) -> Bool[Array, ""]:
        """Return a traced bool, True if no score of any layer is NaN; compiled programs cannot raise errors."""
        return ~jnp.stack([*self.nans, jnp.zeros((), bool)]).any()


def first_state(
    source: PromptSource,
    out: Compressed,
    query_buffers: tuple[Float[Array, "B K G R D"], ...] = (),
) -> tuple[Int[Array, "L B K"], State | None]:
    """Return the entry limits of segments after a prompt, and the policy's `State`; None if the policy has none.

    If the policy compresses prompts only, a limit is the number of entries kept.
    """
    parts = source.parts
    if parts.ongoing.compresses:
        return _going_on(source, out, query_buffers)
    if parts.read.everything:
        return jnp.copy(out.length), None
    reads = source.numbers.reads
    assert reads is not None
    return jnp.copy(out.length), reading_state(source.length, reads, out.length, query_buffers)


def _going_on(
    source: PromptSource, out: Compressed, query_buffers: tuple[Float[Array, "B K G R D"], ...]
) -> tuple[Int[Array, "L B K"], State]:
    """Return entry limits `[L, B, K]` and the first `State` of policies that evict or recompress after the prompt.

    A limit is the number of kept entries, or the budget if the prompt is shorter and the policy has no threshold.
    Layers without a limit get a number that no cache reaches. Head budgets may fix their own limits.
    """
    parts, lengths, numbers = source.parts, source.lengths, source.numbers
    of = slice(source.indices[0], source.indices[-1] + 1)
    xp, endless, kept = namespace(lengths), np.iinfo(np.int32).max // 2, out.length
    short = numbers.most > lengths
    targets = xp.where(short, numbers.most, source.kept_entries[of])
    # A short prompt's segments grow to their targets, so later sinks count, too.
    grown = parts.keep.counts(targets, xp.broadcast_to(lengths, targets.shape))
    recent = xp.where(short, parts.recents(targets, lengths, grown), source.recents[of])
    state = State(
        prompt=source.length,
        budget=jnp.asarray(numbers.most, jnp.int32),
        recent=jnp.asarray(recent, jnp.int32),
        tau=out.tau,
        query_buffers=query_buffers,
    )
    per_layer = xp.where(parts.unlimited(source.sliding_windows)[of, None], endless, targets)
    limit = jnp.asarray(xp.broadcast_to(per_layer[..., None], kept.shape), jnp.int32)
    if parts.heads.uniform:
        return limit, state
    short = short & (parts.threshold is None)
    grown = jnp.asarray(short[None, :, None] | (per_layer == endless)[..., None])
    usual = jnp.where(grown, limit, kept)
    return limits_of(parts.heads, kept, usual, source.axes, source.sliding_windows, of), state
