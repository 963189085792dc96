"""Prefill, layer by layer: a layer's keys and values are compressed before the next layer begins.

Outside walk the layers, one jitted call each; inside walk blocks of queries, as many as the sequence has and no more,
so padding costs memory but no time. Alive at once: hidden states, one layer's K and V, what is kept of the others.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxkv._errors import require
from jaxkv._values import typed
from jaxkv.attention import Implementation
from jaxkv.attention.xla import Form
from jaxkv.bank import Bank, committed, put_away
from jaxkv.cache import KVCache, State
from jaxkv.config import ModelConfig
from jaxkv.models.compress import choose, empty_pool, merged, observe, pack, pack_shared, unordered
from jaxkv.models.decoder import Flat, Graphs, Leaves
from jaxkv.models.layer import LayerOut, layer
from jaxkv.models.moving import reading_state
from jaxkv.plan import Plan, ring_rows
from jaxkv.policies.parts import Ongoing, Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.protocol import Needs, Observed, Scorer
from jaxkv.policies.reading import Reading
from jaxkv.pools import lay_out
from jaxkv.rope import Angles, angles


@partial(jax.jit, static_argnames=("graphs",))
def _embed(ends: Leaves, tokens: Int[Array, "B S"], *, graphs: Graphs) -> Float[Array, "B S E"]:
    return graphs.ends(ends).embed(tokens)


@partial(jax.jit, static_argnames=("slots", "config"))
def _table(*, slots: int, config: ModelConfig) -> Angles:
    return angles(jnp.arange(slots, dtype=jnp.int32)[None], config.rope, config.head_dim)


_LAYER_STATICS = ("graphs", "needs", "last", "implementation")
_layer = jax.jit(layer, static_argnames=_LAYER_STATICS, donate_argnames=("x",))
# The top block gives back one token's hidden state: there is nothing to write in place.
_top_layer = jax.jit(layer, static_argnames=_LAYER_STATICS)


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


@partial(jax.jit, static_argnames=("graphs",))
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
    table = _table(slots=tokens.shape[1], config=flat.config)
    for index, leaves in enumerate(flat.blocks):
        last = index == len(flat.blocks) - 1
        run = _top_layer if last else _layer
        options = {"needs": Needs(queries=queries), "last": last, "implementation": Implementation.XLA}
        out = run(leaves, x, length, table, graphs=flat.graphs, **options)
        x = out.x
        yield out.q, out.k, out.q_positions


def compile_ahead(
    flat: Flat,
    config: ModelConfig,
    batch: int,
    policy: Method,
    needed: Plan,
    *,
    implementation: Implementation = Implementation.XLA,
) -> None:
    """Compiles what `prefill` will call, by running it over sequences of no tokens; once per model and shape.

    Args:
        flat: the decoder's parameters.
        config: its shape.
        batch: B.
        policy: the compression.
        needed: the plan.
        implementation: what computes attention.
    """
    pool_rows, parts = needed.pool_rows(config.kv_heads), policy.parts()
    scored = parts.ongoing is not None and parts.ongoing.scored
    key = typed((parts.scorer, parts.layers, parts.heads, parts.needs, parts.merge, scored))
    signature = (flat.graphs, flat.ends[0].dtype, batch, needed.slots, pool_rows, key, implementation)
    if signature in flat.compiled:
        return
    length = jnp.zeros((batch,), jnp.int32)
    forced = jnp.zeros((batch, needed.slots), bool)
    x = _embed(flat.ends, jnp.zeros((batch, needed.slots), jnp.int32), graphs=flat.graphs)
    table = _table(slots=needed.slots, config=config)
    for index in sorted({0, config.layers - 1}):
        out = _run_layer(flat, index, x, length, table, parts.needs, implementation)
        x = out.x
    mask, mass = jnp.zeros(out.k.shape[:3], bool), None
    k, v = out.k, out.v
    if parts.scorer is not None:
        seen = _observed(out, parts.scorer.queries, length, 0, jax.random.key(0), implementation)
        scores, mass, _ = observe(seen, forced, scorer=parts.scorer, layers=parts.layers)
        unordered(scores, length)
        allowed = forced if parts.nested else None
        mask = choose(scores, forced, length, length, length, out.norms, allowed, heads=parts.heads)
        if parts.merge is not None:
            k, v, _ = merged(k, v, mask, length, mass, jax.random.key(0), merge=parts.merge)
    if needed.form is not Form.SHARED:
        for rows in set(pool_rows):
            pack(k, v, mask, mass if scored else None, rows=rows, form=needed.form, implementation=implementation)
    jax.block_until_ready(_logits(flat.ends, x, graphs=flat.graphs))
    flat.compiled.add(signature)


def _observed(
    out: LayerOut, queries: int, length: Array, index: int, key: PRNGKeyArray, implementation: Implementation
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
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scored:
    """A layer whose rows are known, and not yet chosen."""

    k: Array
    v: Array
    scores: Array
    mass: Array
    norms: Array | None


class _Chooser:
    """Chooses and merges the rows of one layer after the other."""

    def __init__(self, parts: Parts, length: Array, forced: Array, key: PRNGKeyArray):
        self.parts, self.length, self.forced, self.key = parts, length, forced, key
        self.taus: list[Array] = []
        self._below: Array | None = None

    def mask(self, layer: _Scored, index: int, rows: np.ndarray, recent: np.ndarray) -> Array:
        """Which rows of a layer stay."""
        parts = self.parts
        mask = choose(
            layer.scores,
            self.forced,
            self.length,
            jnp.asarray(rows, jnp.int32),
            jnp.asarray(recent, jnp.int32),
            layer.norms,
            self._below if parts.nested and index else None,
            heads=parts.heads,
        )
        if parts.nested:
            self._below = mask[:, 0]
        return mask

    def rows(self, layer: _Scored, index: int, mask: Array) -> tuple[Array, Array]:
        """A layer's keys and values, dropped rows merged in."""
        merge = self.parts.merge
        if merge is None:
            return layer.k, layer.v
        key = jax.random.fold_in(self.key, index)
        k, v, tau = merged(layer.k, layer.v, mask, self.length, layer.mass, key, merge=merge)
        if tau is not None:
            self.taus.append(tau)
        return k, v


def prefill(
    flat: Flat,
    config: ModelConfig,
    tokens: Int[np.ndarray, "B S"],
    lengths: Int[np.ndarray, " B"],
    policy: Method,
    needed: Plan,
    *,
    key: PRNGKeyArray,
    model: str = "",
    implementation: Implementation = Implementation.XLA,
    tick: Callable[[], None] = lambda: None,
) -> tuple[KVCache, Float[Array, "B V"]]:
    """Runs prompts through the model and compresses their keys and values.

    Args:
        flat: the decoder's parameters.
        config: its shape.
        tokens: prompts padded on the right to the plan's slots.
        lengths: tokens of each prompt.
        policy: the compression.
        needed: the plan for these lengths.
        key: for policies that draw.
        model: the weights' fingerprint.
        implementation: what computes attention.
        tick: called after each layer.

    Returns:
        The cache, and float32 logits of each prompt's last token.
    """
    parts, layers = policy.parts(), config.layers
    scorer, ongoing = parts.scorer, parts.ongoing
    graphs, batch = flat.graphs, len(lengths)
    forced = jnp.asarray(parts.keep.mask(lengths, needed.slots))
    length = jnp.asarray(lengths, jnp.int32)
    pool_rows = needed.pool_rows(config.kv_heads)
    shared = needed.form is Form.SHARED
    scored = ongoing is not None and ongoing.scored
    choosing = _Chooser(parts, length, forced, key)
    recents = np.zeros((layers, batch), np.int64)
    if needed.rows is not None:
        recents = parts.recents(needed.rows, lengths, needed.forced)
    inside = jnp.broadcast_to(
        (jnp.arange(needed.slots, dtype=jnp.int32) < length[:, None])[:, None],
        (batch, config.kv_heads, needed.slots),
    )
    x = _embed(flat.ends, jnp.asarray(tokens, jnp.int32), graphs=graphs)
    pools, starts, counts, held, weights, rings, torn = [], [], [], [], [], [], []
    reading, banked = parts.reading(layers, needed.slots), list[Array]()
    remembering = _remembering(ongoing, reading, layers)
    table = _table(slots=needed.slots, config=config)
    for index in range(layers):
        out = _run_layer(flat, index, x, length, table, parts.needs, implementation)
        x = out.x
        k = out.k if out.unrotated is None else out.unrotated
        v, mask, mass = out.v, inside, None
        if remembering[index]:
            last = out.q[..., out.q.shape[3] - remembering[index] :, :]
            rings.append(_ring(last, length, rows=ring_rows(remembering[index])))
        if scorer is not None:
            seen = _observed(out, scorer.queries, length, index, key, implementation)
            scores, mass, weight = observe(seen, forced, scorer=scorer, layers=parts.layers)
            torn.append(unordered(scores, length))
            layer = _Scored(k=k, v=v, scores=scores, mass=mass, norms=out.norms)
            if shared:
                held.append(layer)
                weights.append(weight)
                tick()
                continue
            assert needed.rows is not None
            mask = choosing.mask(layer, index, needed.rows[index], recents[index])
            k, v = choosing.rows(layer, index, mask)
        if reading is not None and index in reading.offloaded:
            # Before the next but one begins: two layers' rows are on their way at most.
            jax.block_until_ready(banked[-1:])
            banked.append(put_away(k, v))
            mask = jnp.zeros_like(mask)
        pool, start, count = pack(
            k,
            v,
            mask,
            mass if scored else None,
            rows=pool_rows[index],
            form=needed.form,
            implementation=implementation,
        )
        pools.append(pool)
        starts.append(start)
        counts.append(count)
        # Dispatch runs ahead of the device: without a wait several layers' K and V would be alive at once.
        jax.block_until_ready(pool)
        tick()
    _require_ordered(scorer, torn)
    rows = needed.rows
    if shared:
        claims = np.stack([np.asarray(weight) for weight in weights])
        rows = parts.layers.rows(
            needed.budget,
            np.asarray(lengths, np.int64),
            needed.forced,
            layers=layers,
            window=parts.keep.window,
            weights=claims,
        )
        recents = parts.recents(rows, lengths, needed.forced, claims)
        pool, start, kept = _into_shared(held, choosing, config, needed, pool_rows[0], rows, recents, scored)
        pools = [pool]
    else:
        start, kept = jnp.stack(starts), jnp.stack(counts)
    limit, state = jnp.copy(kept), None
    if ongoing is not None:
        assert rows is not None
        may_hold = parts.may_hold(lengths, needed.budget)
        limit = _limits(parts, rows, may_hold, lengths, kept)
        targets = np.where(may_hold > lengths, may_hold, rows)
        state = State(
            prompt=length,
            budget=jnp.asarray(may_hold, jnp.int32),
            recent=jnp.asarray(
                np.where(may_hold > lengths, parts.recents(targets, lengths, needed.forced), recents), jnp.int32
            ),
            tau=jnp.stack(choosing.taus) if choosing.taus else None,
            rings=tuple(rings),
        )
    elif reading is not None:
        state = reading_state(parts, lengths, kept, tuple(rings))
    cache = KVCache(
        pools=tuple(pools),
        start=start,
        length=kept,
        limit=limit,
        seen=jnp.copy(length),
        state=state,
        form=needed.form,
        policy=policy,
        config=config,
        model=model,
    )
    if reading is not None and reading.offloaded:
        bank = Bank(rows=tuple(banked), layers=reading.offloaded)
        cache = dataclasses.replace(committed(cache), bank=bank)
    return cache, _logits(flat.ends, x, graphs=graphs)


def _require_ordered(scorer: Scorer | None, torn: list[Array]) -> None:
    """Refuses scores that are not numbers, once for all layers: nothing waits for them before."""
    layers = np.flatnonzero(np.asarray(torn, bool)).tolist()
    remedy = f"{scorer} gave rows of layers {layers} what is not a number: mend it, or the model, if that is not finite"
    require(not layers, "scores", "NaN", remedy)


def _remembering(ongoing: Ongoing | None, reading: Reading | None, layers: int) -> list[int]:
    """How many of each layer's last queries the cache remembers."""
    if ongoing is not None:
        return [ongoing.queries] * layers
    asked = () if reading is None else reading.filters
    return [reading.ring if reading is not None and layer in asked else 0 for layer in range(layers)]


def _limits(parts, rows, may_hold, lengths, kept):
    """Target sizes: what was kept, or for prompts shorter than the budget the budget; layers that go on growing."""
    most = np.iinfo(np.int32).max // 2
    per_layer = np.where(may_hold > lengths, may_hold, rows)
    per_layer = np.where(parts.layers.unlimited(len(rows))[:, None], most, per_layer)
    spread = jnp.asarray(np.broadcast_to(per_layer[..., None], kept.shape), jnp.int32)
    if parts.heads.uniform:
        return spread
    grown = jnp.asarray((may_hold > lengths)[None, :, None] | (per_layer == most)[..., None])
    return jnp.where(grown, spread, kept)


@partial(jax.jit, static_argnames=("rows",))
def _ring(q: Float[Array, "B K G w D"], length: Int[Array, " B"], *, rows: int) -> Float[Array, "B K G R D"]:
    """The prompt's last queries, each in the slot of its position."""
    batch, heads, group, window, dim = q.shape
    position = (length - window)[:, None] + jnp.arange(window, dtype=jnp.int32)
    slot = jnp.where(position >= 0, position % rows, rows)
    ring = jnp.zeros((batch, rows, heads, group, dim), jnp.float32)
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    by_token = jnp.moveaxis(q, 3, 1).astype(jnp.float32)
    return jnp.moveaxis(ring.at[index, slot].set(by_token, mode="drop", unique_indices=True), 1, 3)


def _into_shared(held, choosing, config, needed, pool_rows, rows, recents, scored):
    """One layer after the other into the shared pool, each freed in turn."""
    layers, heads, batch = config.layers, config.kv_heads, rows.shape[1]
    masks = [choosing.mask(layer, index, rows[index], recents[index]) for index, layer in enumerate(held)]
    kept = jnp.stack([mask.sum(axis=-1, dtype=jnp.int32) for mask in masks])
    table = jnp.moveaxis(kept, 0, 1).reshape(batch, layers * heads)
    room = jnp.asarray(np.repeat(np.asarray(needed.room, np.int32), heads))
    start = lay_out(table, pool_rows, form=Form.SHARED, room=room)
    start = jnp.moveaxis(start.reshape(batch, layers, heads), 0, 1)
    pool = empty_pool(batch, pool_rows, config.head_dim, held[0].k.dtype, scored=scored)
    for index in range(layers):
        k, v = choosing.rows(held[index], index, masks[index])
        pool = pack_shared(pool, k, v, masks[index], start[index], held[index].mass if scored else None)
        held[index] = None
        jax.block_until_ready(pool)
    return pool, start, kept
