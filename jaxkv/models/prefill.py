"""Prefill, layer by layer: a layer's keys and values are compressed before the next layer begins.

Outside walk the layers, one jitted call each; inside walk blocks of queries, as many as the sequence has and no more,
so padding costs memory but no time. Alive at once: hidden states, one layer's K and V, what is kept of the others.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxkv.attention import Implementation
from jaxkv.attention.xla import Form
from jaxkv.cache import KVCache, Pool, Turn, lay_out
from jaxkv.config import ModelConfig
from jaxkv.models.compress import choose, observe, pack, pack_shared
from jaxkv.models.decoder import Flat, Graphs, Leaves
from jaxkv.models.layer import LayerOut, layer
from jaxkv.plan import Plan
from jaxkv.policies.base import Observed, Policy


@partial(jax.jit, static_argnames=("graphs",))
def _embed(ends: Leaves, tokens: Int[Array, "B S"], *, graphs: Graphs) -> Float[Array, "B S E"]:
    return graphs.ends(ends).embed(tokens)


_LAYER_STATICS = ("graphs", "queries", "keep_unrotated", "last", "implementation")
_layer = jax.jit(layer, static_argnames=_LAYER_STATICS, donate_argnames=("x",))
# The top block gives back one token's hidden state: there is nothing to write in place.
_top_layer = jax.jit(layer, static_argnames=_LAYER_STATICS)


def _run_layer(
    flat: Flat, index: int, x: Array, length: Array, policy: Policy, implementation: Implementation
) -> LayerOut:
    last = index == len(flat.blocks) - 1
    return (_top_layer if last else _layer)(
        flat.blocks[index],
        x,
        length,
        graphs=flat.graphs,
        queries=0 if policy.scorer is None else policy.scorer.queries,
        keep_unrotated=policy.rolling,
        last=last,
        implementation=implementation,
    )


@partial(jax.jit, static_argnames=("graphs",))
def _logits(ends: Leaves, x: Float[Array, "B E"], *, graphs: Graphs) -> Float[Array, "B V"]:
    return graphs.ends(ends).logits(x)


_compiled: set[tuple] = set()


def compile_ahead(
    flat: Flat,
    config: ModelConfig,
    batch: int,
    policy: Policy,
    needed: Plan,
    *,
    room: int,
    implementation: Implementation = Implementation.XLA,
) -> None:
    """Compiles what `prefill` will call, by running it over sequences of no tokens; once per process and shape.

    Args:
        flat: the decoder's parameters.
        config: its shape.
        batch: B.
        policy: the compression.
        needed: the plan.
        room: rows to leave behind every segment.
        implementation: what computes attention.
    """
    pool_rows = needed.pool_rows(config.kv_heads, config.layers, room)
    parts = (policy.scorer, policy.layers, policy.heads, policy.rolling)
    signature = (flat.graphs, flat.ends[0].dtype, batch, needed.slots, pool_rows, parts, implementation)
    if signature in _compiled:
        return
    length = jnp.zeros((batch,), jnp.int32)
    forced = jnp.zeros((batch, needed.slots), bool)
    x = _embed(flat.ends, jnp.zeros((batch, needed.slots), jnp.int32), graphs=flat.graphs)
    for index in sorted({0, config.layers - 1}):
        out = _run_layer(flat, index, x, length, policy, implementation)
        x = out.x
    mask = jnp.zeros(out.k.shape[:3], bool)
    if policy.scorer is not None:
        seen = _observed(out, length, 0, jax.random.key(0), implementation)
        scores, _ = observe(seen, forced, scorer=policy.scorer, layers=policy.layers)
        mask = choose(scores, forced, length, length, heads=policy.heads)
    if needed.form is not Form.SHARED:
        for rows in set(pool_rows):
            pack(out.k, out.v, mask, rows=rows, form=needed.form, implementation=implementation)
    jax.block_until_ready(_logits(flat.ends, x, graphs=flat.graphs))
    _compiled.add(signature)


def forget_compiled() -> None:
    """Makes `compile_ahead` compile again; call it after `jax.clear_caches`."""
    _compiled.clear()


def _observed(out: LayerOut, length: Array, index: int, key: PRNGKeyArray, implementation: Implementation) -> Observed:
    return Observed(
        q=out.q,
        q_positions=out.q_positions,
        k=out.k,
        v=out.v,
        length=length,
        layer=jnp.int32(index),
        key=key,
        implementation=implementation,
    )


def prefill(
    flat: Flat,
    config: ModelConfig,
    tokens: Int[np.ndarray, "B S"],
    lengths: Int[np.ndarray, " B"],
    policy: Policy,
    needed: Plan,
    *,
    key: PRNGKeyArray,
    room: int = 0,
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
        room: rows to leave behind every segment.
        model: the weights' fingerprint.
        implementation: what computes attention.
        tick: called after each layer.

    Returns:
        The cache, and float32 logits of each prompt's last token.
    """
    scorer, layers = policy.scorer, config.layers
    graphs, batch = flat.graphs, len(lengths)
    forced = jnp.asarray(policy.forced(lengths, needed.slots))
    length = jnp.asarray(lengths, jnp.int32)
    pool_rows = needed.pool_rows(config.kv_heads, layers, room)
    shared = needed.form is Form.SHARED
    inside = jnp.broadcast_to(
        (jnp.arange(needed.slots, dtype=jnp.int32) < length[:, None])[:, None],
        (batch, config.kv_heads, needed.slots),
    )
    x = _embed(flat.ends, jnp.asarray(tokens, jnp.int32), graphs=graphs)
    pools, starts, counts, held = [], [], [], []
    for index in range(layers):
        out = _run_layer(flat, index, x, length, policy, implementation)
        x = out.x
        stored = out.k if out.unrotated is None else out.unrotated
        if scorer is None:
            mask = inside
        else:
            seen = _observed(out, length, index, key, implementation)
            scores, weight = observe(seen, forced, scorer=scorer, layers=policy.layers)
            if shared:
                held.append((stored, out.v, scores, weight))
                tick()
                continue
            assert needed.rows is not None
            rows = jnp.asarray(needed.rows[index], jnp.int32)
            mask = choose(scores, forced, length, rows, heads=policy.heads)
        pool, start, count = pack(
            stored, out.v, mask, rows=pool_rows[index], form=needed.form, implementation=implementation
        )
        pools.append(pool)
        starts.append(start)
        counts.append(count)
        # Dispatch runs ahead of the device: without a wait several layers' K and V would be alive at once.
        jax.block_until_ready(pool)
        tick()
    if shared:
        pool, start, length_kept, limit = _finish_shared(held, policy, config, needed, pool_rows[0], forced, length)
        pools, starts, counts = [pool], [start], [length_kept]
        tables = (start, length_kept, limit)
    else:
        kept = jnp.stack(counts)
        tables = (jnp.stack(starts), kept, kept)
    cache = KVCache(
        pools=tuple(pools),
        start=tables[0],
        length=tables[1],
        limit=jnp.copy(tables[2]),
        seen=length,
        form=needed.form,
        policy=policy,
        config=config,
        model=model,
        turn=Turn.START,
    )
    return cache, _logits(flat.ends, x, graphs=graphs)


def _finish_shared(held, policy, config, needed, pool_rows, forced, length):
    """Budgets from every layer's scores, then one layer after the other into the shared pool, each freed in turn."""
    weights = np.stack([np.asarray(weight) for *_, weight in held])
    lengths = np.asarray(length, np.int64)
    rows = policy.layers.rows(
        needed.budget, lengths, needed.forced, layers=config.layers, window=policy.kept_last, weights=weights
    )
    masks = [
        choose(scores, forced, length, jnp.asarray(rows[index], jnp.int32), heads=policy.heads)
        for index, (_, _, scores, _) in enumerate(held)
    ]
    kept = jnp.stack([mask.sum(axis=-1, dtype=jnp.int32) for mask in masks])
    layers, batch, heads = kept.shape
    table = jnp.moveaxis(kept, 0, 1).reshape(batch, layers * heads)
    start = lay_out(table, pool_rows, form=Form.SHARED)
    start = jnp.moveaxis(start.reshape(batch, layers, heads), 0, 1)
    dim, dtype = config.head_dim, held[0][0].dtype
    pool = Pool(
        k=jnp.zeros((batch, pool_rows, dim), dtype),
        v=jnp.zeros((batch, pool_rows, dim), dtype),
        pos=jnp.full((batch, pool_rows), -1, jnp.int32),
    )
    for index in range(layers):
        k, v, _, _ = held[index]
        pool = jax.block_until_ready(pack_shared(pool, k, v, masks[index], start[index]))
        held[index] = None
    return pool, start, kept, kept
