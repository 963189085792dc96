"""Prefill, layer by layer: a layer's keys and values are compressed before the next layer begins.

Outside walk the layers, one jitted call each; inside walk blocks of queries, as many as the sequence has and no more,
so padding costs memory but no time. Alive at once: hidden states, one layer's K and V, what is kept of the others.
"""

import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv._values import namespace, typed
from jaxkv.attention import Implementation
from jaxkv.cache import Cache, KVCache, State, Tables
from jaxkv.cache.bank import Bank, committed
from jaxkv.engine import chunked
from jaxkv.engine.compress import Compressed, Walk, compress
from jaxkv.engine.lengths import ByLength, Table, by_length
from jaxkv.engine.plan import PrefillPlan
from jaxkv.engine.prefill_layer import LayerOut
from jaxkv.engine.prompts import Prompts, embed, pool_rows_of, run_layer, tables_of
from jaxkv.engine.spec import reading_state
from jaxkv.models.decoder import Flat, Graphs, Leaves
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.scorer import Needs
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import settle_down


@program(static=("graphs",), on="graphs")
def logits_of(ends: Leaves, x: Float[Array, "B E"], *, graphs: Graphs) -> Float[Array, "B V"]:
    """Float32 logits of the next token."""
    return graphs.ends(ends).logits(x)


def read_layers(flat: Flat, tokens: Int[Array, "B S"], length: Int[Array, " B"], *, needs: Needs) -> Iterator[LayerOut]:
    """Runs prompts through the model and shows what attention is made of, layer by layer.

    Args:
        flat: the decoder's parameters.
        tokens: prompts, padded on the right.
        length: tokens of each.
        needs: what to show beside keys and values.

    Yields:
        A layer; its hidden states are given up to the next one.
    """
    x = embed(flat.ends, tokens, graphs=flat.graphs)
    tables = tables_of(flat, tokens.shape[1])
    for index in range(len(flat.blocks)):
        out = run_layer(flat, index, x, length, tables, needs, Implementation.XLA)
        x = out.x
        yield out
        # One layer at a time, where whoever looks lets go of it as well.
        del out


def in_chunks(policy: Method) -> bool:
    """True if prompts are read chunk by chunk, each through the whole model."""
    read = policy.parts().read
    return read is not None and read.by_chunks


def signature_of(
    flat: Flat, batch: int, policy: Method, needed: PrefillPlan, *, implementation: Implementation
) -> tuple[Hashable, ...]:
    """What programs of a prefill are compiled for: equal where the same programs serve.

    Args:
        flat: the decoder's parameters.
        batch: B.
        policy: the compression.
        needed: the plan; the number of its prompts does not matter.
        implementation: what computes attention.

    Returns:
        A key of dictionaries.
    """
    parts = policy.parts()
    scored = parts.ongoing is not None and parts.ongoing.scored
    key = typed((parts.scorer, parts.layers, parts.heads, parts.needs, parts.merge, parts.store, scored))
    return flat.graphs, flat.ends[0].dtype, batch, needed.slots, pool_rows_of(flat, needed), key, implementation


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
) -> Walk[tuple[KVCache, Float[Array, "B V"]]]:
    """Runs prompts through the model and compresses their keys and values.

    Under a policy that reads prompts in chunks the whole model runs over each chunk, else each layer over the whole.

    Args:
        flat: the decoder's parameters.
        tokens: prompts padded on the right to the plan's slots.
        lengths: tokens of each prompt.
        policy: the compression.
        needed: the plan for these lengths.
        key: for policies that draw.
        model: the weights' fingerprint.
        implementation: what computes attention.

    Yields:
        After each layer or chunk the number of layers that it comes to; where memory lets the host run ahead the device
        may not be done with it.

    Returns:
        The cache, and float32 logits of each prompt's last token.
    """
    if in_chunks(policy):
        of: dict[str, Any] = {"model": model, "implementation": implementation}
        return (yield from chunked.prefill(flat, tokens, lengths, policy, needed, **of))
    told = by_length(policy.parts(), lengths, flat.config.layers)
    lengths = np.asarray(lengths, np.int64)
    given: dict[str, Any] = {"key": key, "model": model, "implementation": implementation}
    prompts, cache = yield from read(flat, tokens, lengths, told, policy, needed, **given)
    prompts.require_ordered()
    if prompts.banked:
        assert prompts.reading is not None
        bank = Bank(rows=tuple(prompts.banked), layers=prompts.reading.offloaded)
        cache = dataclasses.replace(committed(cache), bank=bank)
    logits = logits_of(flat.ends, prompts.x, graphs=flat.graphs)
    flat.compiled.add(signature_of(flat, len(lengths), policy, needed, implementation=implementation))
    return cache, logits


def read(
    flat: Flat,
    tokens: Int[np.ndarray, "B S"] | Int[Array, "B S"],
    lengths: Int[np.ndarray, " B"] | Int[Array, " B"],
    told: ByLength,
    policy: Method,
    needed: PrefillPlan,
    *,
    key: PRNGKeyArray,
    model: str = "",
    implementation: Implementation = Implementation.XLA,
) -> Walk[tuple[Prompts, KVCache]]:
    """`prefill` without a look at the prompts' numbers: they may be traced, as one program of all layers.

    Args:
        flat: as for `prefill`.
        tokens: as for `prefill`.
        lengths: as for `prefill`.
        told: what follows from the lengths.
        policy: as for `prefill`.
        needed: slots, pools and room; the lengths that it was made for do not matter.
        key: as for `prefill`.
        model: as for `prefill`.
        implementation: as for `prefill`.

    Yields:
        As `prefill`.

    Returns:
        The prompts, whose hidden states and checks are still to be looked at; and the cache.
    """
    parts = policy.parts()
    prompts = Prompts(flat, tokens, lengths, parts, needed, told, key, implementation)
    room = np.asarray(needed.room, np.int32)
    made = yield from compress(prompts, parts, key=key, room=room, implementation=implementation)
    limit, state = jnp.copy(made.length), None
    if parts.ongoing is not None:
        limit, state = _going_on(prompts, made)
    elif prompts.reading is not None:
        assert told.reads is not None
        state = reading_state(prompts.length, told.reads, made.length, tuple(prompts.rings))
    seen = jnp.copy(prompts.length)
    tables = Tables(start=made.start, length=made.length, limit=limit, seen=seen, state=state)
    cache = KVCache(
        arrays=Cache(pools=made.pools, tables=tables),
        moved=made.moved,
        layout=needed.layout,
        policy=policy,
        config=flat.config,
        slots=needed.slots,
        model=model,
        axes=flat.axes,
    )
    return prompts, settle_down(cache, flat.axes)


def _going_on(prompts: Prompts, made: Compressed) -> tuple[Int[Array, "L B K"], State]:
    """Target sizes, and what policies remember that go on after the prompt."""
    parts, lengths, told, rows = prompts.parts, prompts.lengths, prompts.told, prompts.kept_rows
    xp = namespace(lengths)
    assert rows is not None and prompts.recents is not None
    short = told.most > lengths
    targets = xp.where(short, told.most, rows)
    recent = xp.where(short, parts.recents(targets, lengths, told.forced), prompts.recents)
    state = State(
        prompt=prompts.length,
        budget=jnp.asarray(told.most, jnp.int32),
        recent=jnp.asarray(recent, jnp.int32),
        tau=made.tau,
        rings=tuple(prompts.rings),
    )
    return _limits(parts, targets, short, made.length), state


def _limits(
    parts: Parts, targets: Table, short: Bool[np.ndarray, " B"] | Bool[Array, " B"], kept: Int[Array, "L B K"]
) -> Int[Array, "L B K"]:
    """Target sizes: what was kept, or for prompts shorter than the budget the budget; layers that go on growing."""
    most = np.iinfo(np.int32).max // 2
    xp = namespace(targets)
    per_layer = xp.where(parts.layers.unlimited(len(targets))[:, None], most, targets)
    spread = jnp.asarray(xp.broadcast_to(per_layer[..., None], kept.shape), jnp.int32)
    if parts.heads.uniform:
        return spread
    grown = jnp.asarray(short[None, :, None] | (per_layer == most)[..., None])
    return jnp.where(grown, spread, kept)
