"""Prefill, layer by layer: a layer's keys and values are compressed before the next layer begins.

Outside walk the layers, one jitted call each; inside walk blocks of queries, as many as the sequence has and no more,
so padding costs memory but no time. Alive at once: hidden states, one layer's K and V, what is kept of the others.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv import memory
from jaxkv._errors import require
from jaxkv._values import typed
from jaxkv.attention import Implementation
from jaxkv.axes import Axes, host, place, program, put, settle_down, where
from jaxkv.cache import KVCache, State
from jaxkv.cache.bank import Bank, committed, put_away
from jaxkv.cache.packing import Unpacked, pack
from jaxkv.engine.choosing import Candidates, choose, of_prompt
from jaxkv.engine.compress import Compressed, Source, compress, counted, merged, observe, unordered
from jaxkv.engine.plan import PrefillPlan, ring_rows
from jaxkv.engine.prefill_layer import LayerOut, layer
from jaxkv.engine.program import reading_state
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Flat, Graphs, Leaves
from jaxkv.models.rope import Angles, angles
from jaxkv.policies.parts import Ongoing, Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.protocol import Needs, Observed
from jaxkv.policies.reading import Reading


@program(static=("graphs",), on="graphs")
def _embed(ends: Leaves, tokens: Int[Array, "B S"], *, graphs: Graphs) -> Float[Array, "B S E"]:
    return graphs.ends(ends).embed(tokens)


@partial(jax.jit, static_argnames=("slots", "config"))
def _angles(*, slots: int, config: ModelConfig) -> Angles:
    return angles(jnp.arange(slots, dtype=jnp.int32)[None], config.rope, config.head_dim)


def _table(flat: Flat, slots: int) -> Angles:
    """Angles of the first positions, where the model lies."""
    return settle_down(_angles(slots=slots, config=flat.config), flat.axes)


# The device never waits for the host with that many; more would only hold memory.
_MOST_AHEAD = 4
_LAYER_STATICS = ("graphs", "needs", "last", "implementation")
_layer = program(static=_LAYER_STATICS, donate=("x",), on="graphs")(layer)
# The top block gives back one token's hidden state: there is nothing to write in place.
_top_layer = program(static=_LAYER_STATICS, on="graphs")(layer)


def _run_layer(
    flat: Flat, index: int, x: Array, length: Array, table: Angles, needs: Needs, implementation: Implementation
) -> LayerOut:
    last = index == len(flat.blocks) - 1
    return (_top_layer if last else _layer)(
        flat.blocks[index],
        x,
        length,
        table,
        graphs=flat.graphs,
        needs=needs,
        last=last,
        implementation=implementation,
    )


@program(static=("graphs",), on="graphs")
def _logits(ends: Leaves, x: Float[Array, "B E"], *, graphs: Graphs) -> Float[Array, "B V"]:
    return graphs.ends(ends).logits(x)


def read_layers(
    flat: Flat, tokens: Int[Array, "B S"], length: Int[Array, " B"], *, queries: int
) -> Iterator[tuple[Float[Array, "B K G w D"], Float[Array, "B K S D"], Int[Array, "B w"]]]:
    """Runs prompts through the model and shows what attention is made of, layer by layer.

    Args:
        flat: the decoder's parameters.
        tokens: prompts, padded on the right.
        length: tokens of each.
        queries: w, the last ones to show.

    Yields:
        A layer's rotated queries and keys, and the queries' positions.
    """
    x = _embed(flat.ends, tokens, graphs=flat.graphs)
    table = _table(flat, tokens.shape[1])
    for index in range(len(flat.blocks)):
        out = _run_layer(flat, index, x, length, table, Needs(queries=queries), Implementation.XLA)
        x = out.x
        yield out.q, out.k, out.q_positions


def compile_ahead(
    flat: Flat,
    batch: int,
    policy: Method,
    needed: PrefillPlan,
    *,
    implementation: Implementation = Implementation.XLA,
) -> None:
    """Compiles what `prefill` will call, by running it over sequences of no tokens; once per model and shape.

    Args:
        flat: the decoder's parameters.
        batch: B.
        policy: the compression.
        needed: the plan.
        implementation: what computes attention.
    """
    pool_rows, parts = _pool_rows(flat, needed), policy.parts()
    scored = parts.ongoing is not None and parts.ongoing.scored
    key = typed((parts.scorer, parts.layers, parts.heads, parts.needs, parts.merge, scored))
    signature = (flat.graphs, flat.ends[0].dtype, batch, needed.slots, pool_rows, key, implementation)
    if signature in flat.compiled:
        return
    length = jnp.zeros((batch,), jnp.int32)
    forced = jnp.zeros((batch, needed.slots), bool)
    x = _embed(flat.ends, jnp.zeros((batch, needed.slots), jnp.int32), graphs=flat.graphs)
    table = _table(flat, needed.slots)
    for index in sorted({0, flat.config.layers - 1}):
        out = _run_layer(flat, index, x, length, table, parts.needs, implementation)
        x = out.x
    mask, layer = jnp.zeros(out.k.shape[:3], bool), of_prompt(None, forced, length)
    rows = Unpacked(out.k, out.v, layer.inside)
    if parts.scorer is not None:
        seen = _observed(flat, out, parts.scorer.queries, length, 0, jax.random.key(0), implementation)
        scores, mass, claim = observe(seen, forced, scorer=parts.scorer, layers=parts.layers, axes=flat.axes)
        unordered(scores, length, axes=flat.axes)
        layer = dataclasses.replace(layer, scores=scores, norms=out.norms, claim=claim)
        # Where layers build on one another the lowest one has nothing below it.
        for allowed in (None, forced) if parts.nested else (None,):
            mask = choose(layer, length, length, allowed, heads=parts.heads, axes=flat.axes).mask
        rows = rows._replace(mass=mass, score=mass if scored else None)
        if parts.merge is not None:
            rows = merged(rows, mask, jax.random.key(0), merge=parts.merge, axes=flat.axes)
    counted([mask] * (flat.config.layers if needed.layout.one_pool else 1))
    if not needed.layout.one_pool:
        for count in set(pool_rows):
            pack(rows, mask, rows=count, layout=needed.layout, implementation=implementation, axes=flat.axes)
    jax.block_until_ready(_logits(flat.ends, x, graphs=flat.graphs))
    flat.compiled.add(signature)


def _pool_rows(flat: Flat, needed: PrefillPlan) -> tuple[int, ...]:
    stretches = 1 if flat.axes is None else flat.axes.size("K")
    return needed.pool_rows(flat.config.kv_heads, stretches)


def _observed(
    flat: Flat,
    out: LayerOut,
    queries: int,
    length: Array,
    index: int,
    key: PRNGKeyArray,
    implementation: Implementation,
) -> Observed:
    # Others than the scorer may have asked for queries, too.
    first = out.q.shape[3] - queries
    return Observed(
        q=out.q[..., first:, :],
        q_positions=out.q_positions[:, first:],
        k=out.k,
        v=out.v,
        length=length,
        layer=jnp.int32(index),
        key=key,
        sums=out.sums,
        implementation=implementation,
        axes=flat.axes,
    )


class _Prompts(Source):
    """Prompts on their way through the model: the source of what `compress` chooses from, a layer at a time."""

    def __init__(
        self,
        flat: Flat,
        tokens: Int[np.ndarray, "B S"],
        lengths: Int[np.ndarray, " B"],
        parts: Parts,
        needed: PrefillPlan,
        key: PRNGKeyArray,
        implementation: Implementation,
        tick: Callable[[], None],
    ):
        """Embeds the prompts."""
        layers, heads = flat.config.layers, flat.config.kv_heads
        self.flat, self.parts, self.needed, self.lengths = flat, parts, needed, np.asarray(lengths, np.int64)
        self.implementation, self.tick = implementation, tick
        self.key = key if flat.axes is None else put(key, where("", (), flat.axes))
        self.indices, self.axes = range(layers), flat.axes
        self.length = place(lengths, "B", flat.axes, jnp.int32)
        self.forced = place(parts.keep.mask(lengths, needed.slots), "B S", flat.axes)
        # Of every layer what is known before it is looked at; and of layers that keep everything.
        self.prompts = of_prompt(None, self.forced, self.length)
        everything = jnp.broadcast_to(self.prompts.inside, (len(lengths), heads, needed.slots))
        self.whole = dataclasses.replace(self.prompts, inside=everything)
        self.reading = parts.reading(layers, needed.slots)
        self.remembered = _remembering(parts.ongoing, self.reading, layers)
        self.ahead = _ahead(needed, self.length)
        self.x = _embed(flat.ends, place(tokens, "B S", flat.axes, jnp.int32), graphs=flat.graphs)
        self.table = _table(flat, needed.slots)
        self.kept_rows, self.recents = needed.rows, np.zeros((layers, len(lengths)), np.int64)
        if needed.rows is not None:
            self.recents = parts.recents(needed.rows, lengths, needed.forced)
        self.totals = _pool_rows(flat, needed)
        self.held: dict[int, Unpacked] = {}
        self.banked, self.rings, self.torn = list[Array](), list[Array](), list[Array]()

    def candidates(self, index: int) -> Candidates:
        """Runs a layer. Its rows are held until they are packed, or put away into host memory."""
        parts, scorer, length = self.parts, self.parts.scorer, self.length
        if index:
            self.tick()
        out = _run_layer(self.flat, index, self.x, length, self.table, parts.needs, self.implementation)
        self.x = out.x
        k = out.k if out.unrotated is None else out.unrotated
        rows = Unpacked(k, out.v, self.prompts.inside)
        if self.remembered[index]:
            last = out.q[..., out.q.shape[3] - self.remembered[index] :, :]
            self.rings.append(_ring(last, length, rows=ring_rows(self.remembered[index]), axes=self.axes))
        if self.reading is not None and index in self.reading.offloaded:
            # Before the next but one begins: two layers' rows are on their way at most.
            jax.block_until_ready(self.banked[-1:])
            self.banked.append(put_away(k, out.v, self.axes))
            self.held[index] = rows
            return dataclasses.replace(self.whole, inside=jnp.zeros_like(self.whole.inside))
        if scorer is None:
            self.held[index] = rows
            return self.whole
        seen = _observed(self.flat, out, scorer.queries, length, index, self.key, self.implementation)
        scores, mass, claim = observe(seen, self.forced, scorer=scorer, layers=parts.layers, axes=self.axes)
        self.torn.append(unordered(scores, length, axes=self.axes))
        scored = parts.ongoing is not None and parts.ongoing.scored
        self.held[index] = rows._replace(mass=mass, score=mass if scored else None)
        return dataclasses.replace(self.prompts, scores=scores, norms=out.norms, claim=claim)

    def wanted(self, group: Sequence[int], claims: list[Array | None]) -> tuple[Array, Array]:
        """The plan's rows, or what layers claim of them."""
        if self.parts.layers.from_scores:
            self.require_ordered()
            weights = np.stack([host(claim) for claim in claims])
            self.kept_rows = self.parts.layers.rows(
                self.needed.budget,
                self.lengths,
                self.needed.forced,
                layers=len(group),
                window=self.parts.keep.window,
                weights=weights,
            )
            self.recents = self.parts.recents(self.kept_rows, self.lengths, self.needed.forced, weights)
        of = slice(group[0], group[-1] + 1)
        rows = self.kept_rows
        assert rows is not None
        on_devices = lambda table: place(table[of], "n B", self.axes, jnp.int32)  # noqa: E731
        return on_devices(rows), on_devices(self.recents)

    def pool_rows(self, group: Sequence[int], kept: Array) -> int:
        """As many as the plan says, whatever is kept."""
        return self.totals[group[0]]

    def rows(self, index: int) -> Unpacked:
        """What was held of a layer."""
        return self.held.pop(index)

    def require_ordered(self) -> None:
        """Refuses scores that are not numbers, once for all layers: nothing waits for them before."""
        for each in self.torn:
            each.copy_to_host_async()
        layers = np.flatnonzero([bool(host(each)) for each in self.torn]).tolist()
        remedy = f"{self.parts.scorer} gave rows of layers {layers} what is not a number: mend it, or the model, if "
        require(not layers, "scores", "NaN", remedy + "that is not finite")


def prefill(
    flat: Flat,
    tokens: Int[np.ndarray, "B S"],
    lengths: Int[np.ndarray, " B"],
    policy: Method,
    needed: PrefillPlan,
    *,
    key: PRNGKeyArray,
    model: str = "",
    implementation: Implementation = Implementation.XLA,
    tick: Callable[[], None] = lambda: None,
) -> tuple[KVCache, Float[Array, "B V"]]:
    """Runs prompts through the model and compresses their keys and values.

    Args:
        flat: the decoder's parameters.
        tokens: prompts padded on the right to the plan's slots.
        lengths: tokens of each prompt.
        policy: the compression.
        needed: the plan for these lengths.
        key: for policies that draw.
        model: the weights' fingerprint.
        implementation: what computes attention.
        tick: called after each layer, or where memory lets the host run ahead some layers before the device is done.

    Returns:
        The cache, and float32 logits of each prompt's last token.
    """
    parts = policy.parts()
    prompts = _Prompts(flat, tokens, lengths, parts, needed, key, implementation, tick)
    room = np.asarray(needed.room, np.int32)
    made = compress(prompts, parts, key=key, room=room, implementation=implementation)
    tick()
    prompts.require_ordered()
    limit, state = jnp.copy(made.length), None
    if parts.ongoing is not None:
        limit, state = _going_on(prompts, made)
    elif prompts.reading is not None:
        state = reading_state(parts, lengths, made.length, tuple(prompts.rings))
    cache = KVCache(
        axes=flat.axes,
        pools=made.pools,
        start=made.start,
        length=made.length,
        limit=limit,
        seen=jnp.copy(prompts.length),
        state=state,
        layout=needed.layout,
        policy=policy,
        config=flat.config,
        model=model,
        moved=made.moved,
    )
    cache = settle_down(cache, flat.axes)
    if prompts.banked:
        assert prompts.reading is not None
        bank = Bank(rows=tuple(prompts.banked), layers=prompts.reading.offloaded)
        cache = dataclasses.replace(committed(cache), bank=bank)
    return cache, _logits(flat.ends, prompts.x, graphs=flat.graphs)


def _going_on(prompts: _Prompts, made: Compressed) -> tuple[Int[Array, "L B K"], State]:
    """Target sizes, and what policies remember that go on after the prompt."""
    parts, lengths, needed, rows = prompts.parts, prompts.lengths, prompts.needed, prompts.kept_rows
    assert rows is not None
    may_hold = parts.may_hold(lengths, needed.budget)
    short = may_hold > lengths
    targets = np.where(short, may_hold, rows)
    recent = np.where(short, parts.recents(targets, lengths, needed.forced), prompts.recents)
    state = State(
        prompt=prompts.length,
        budget=jnp.asarray(may_hold, jnp.int32),
        recent=jnp.asarray(recent, jnp.int32),
        tau=made.tau,
        rings=tuple(prompts.rings),
    )
    return _limits(parts, targets, short, made.length), state


def _ahead(needed: PrefillPlan, placed: Array) -> int:
    """Layers that may be under way at once beyond the plan's: for those the device's allocator has room to spare."""
    spare = memory.allocator_bytes(placed.addressable_shards[0].device)
    if spare is None:
        return 0
    return max(0, min(_MOST_AHEAD, (spare - needed.peak_bytes) // (needed.peak_bytes - needed.cache_bytes)))


def _remembering(ongoing: Ongoing | None, reading: Reading | None, layers: int) -> list[int]:
    """How many of each layer's last queries the cache remembers."""
    if ongoing is not None:
        return [ongoing.queries] * layers
    asked = () if reading is None else reading.filters
    return [reading.ring if reading is not None and layer in asked else 0 for layer in range(layers)]


def _limits(
    parts: Parts, targets: Int[np.ndarray, "L B"], short: Bool[np.ndarray, " B"], kept: Int[Array, "L B K"]
) -> Int[Array, "L B K"]:
    """Target sizes: what was kept, or for prompts shorter than the budget the budget; layers that go on growing."""
    most = np.iinfo(np.int32).max // 2
    per_layer = np.where(parts.layers.unlimited(len(targets))[:, None], most, targets)
    spread = jnp.asarray(np.broadcast_to(per_layer[..., None], kept.shape), jnp.int32)
    if parts.heads.uniform:
        return spread
    grown = jnp.asarray(short[None, :, None] | (per_layer == most)[..., None])
    return jnp.where(grown, spread, kept)


@program(static=("rows", "axes"))
def _ring(
    q: Float[Array, "B K G w D"], length: Int[Array, " B"], *, rows: int, axes: Axes | None
) -> Float[Array, "B K G R D"]:
    """The prompt's last queries, each in the slot of its position."""
    batch, heads, group, window, dim = q.shape
    position = (length - window)[:, None] + jnp.arange(window, dtype=jnp.int32)
    slot = jnp.where(position >= 0, position % rows, rows)
    ring = jnp.zeros((batch, rows, heads, group, dim), jnp.float32)
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    by_token = jnp.moveaxis(q, 3, 1).astype(jnp.float32)
    return jnp.moveaxis(ring.at[index, slot].set(by_token, mode="drop", unique_indices=True), 1, 3)
