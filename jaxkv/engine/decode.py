"""A step of the whole model: a few new tokens at once on top of a cache, a question or the one token of a drawing."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.cache import Cache, KVCache, Tables
from jaxkv.cache.layout import Layout
from jaxkv.cache.pools import Pool
from jaxkv.engine.bookkeeping import Scratch, faded, likely_keys, of_whole_groups, segments_of, within_limits
from jaxkv.engine.layer_step import Dealt, LayerRows, Tail, layer_step
from jaxkv.engine.ordering import behind
from jaxkv.engine.sparse import candidates_of, rest_of
from jaxkv.engine.spec import Spec
from jaxkv.engine.stream import Stream, begin
from jaxkv.engine.stream import logits as logits_of
from jaxkv.engine.tokens import NewTokens, step_angles
from jaxkv.models.decoder import Flat, Leaves
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, place


class Step(NamedTuple):
    """Logits and cache after a step, and what stands beside the cache.

    Attributes:
        logits: `f32[B, V]` of each sequence's last real token.
        cache: with the new rows, unless they went to the tails.
        tails: rows beside the pools, one for each layer, if there were any.
        scratch: what the next step needs of this one, if the program keeps any.
    """

    logits: Float[Array, "B V"]
    cache: Cache
    tails: tuple[Tail, ...]
    scratch: Scratch | None


def step(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    cache: Cache,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: Spec,
    tails: tuple[Tail, ...] = (),
    written: Int[Array, " B"] | None = None,
    scratch: Scratch | None = None,
) -> Step:
    """Runs N new tokens per sequence through the model.

    Args:
        ends: parameters before and after the blocks.
        blocks: one tuple of parameters per block.
        cache: with room for N rows behind every segment unless there are tails.
        tokens: ids, padded on the right.
        count: how many of the N are real; 0 leaves a sequence's cache as it is.
        spec: what is static.
        tails: rows beside the pools, one for each layer, which a single token's row joins; none if it joins the pools.
        written: rows of the tails that each sequence has.
        scratch: what the step before left beside the cache, if the program keeps any.

    Returns:
        Logits, cache, tails and scratch after the step.
    """
    outer = spec.graphs.ends(ends)
    x = outer.embed(tokens)
    ahead = jnp.arange(tokens.shape[1], dtype=jnp.int32) if written is None else written[:, None]
    tables = cache.tables
    new = NewTokens(
        positions=tables.seen[:, None] + ahead,
        count=count,
        written=written,
        candidates=candidates_of(spec, tables, tokens.shape[1]),
    )
    pools, outs, products, rings = list(faded(cache.pools, count, spec)), [], [], []
    others, norms = likely_keys(cache, scratch), [] if scratch is None else list(scratch.norms)
    if others is not None:
        x = behind(x, others.sum(axis=(0, 2, 3))[:, None, None])
    chosen, after, stream = None, [], begin(x, spec)
    turned = step_angles(cache, new.positions, spec, tails[0].k.shape[2] if tails else 0)
    share = dealt_of(cache, spec, new)
    for layer, leaves in enumerate(blocks):
        at = spec.layout.pool_of(layer)
        ring = None if tables.state is None else spec.ring_of(layer)
        rows = LayerRows(
            pool=pools[at],
            segments=segments_of(tables, layer),
            by=turned[layer],
            tail=tails[layer] if tails else None,
            ring=None if ring is None or tables.state is None else tables.state.rings[ring],
            likely=None if others is None else others[layer],
            norms=norms[at] if norms else None,
            chosen=chosen if spec.sparse(layer, tokens.shape[1]) else None,
            dealt=share(layer, pools[at]),
        )
        block, chooses = spec.graphs_of(layer).block(leaves), spec.chooses(layer, tokens.shape[1])
        stream, rows, out, product, choice = layer_step(block, spec, stream, rows, new, chooses=chooses)
        chosen = choice if chooses else chosen
        pools[at] = rows.pool
        if rows.norms is not None:
            norms[at] = rows.norms
        outs.append(out)
        rings += [] if rows.ring is None else [rows.ring]
        after += [] if rows.tail is None else [rows.tail]
        products += [] if product is None else [product]
    if tokens.shape[1] > 1:
        x = jnp.take_along_axis(stream.x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        stream = Stream(x=x)
    logits = logits_of(outer, stream, tokens.shape[0], spec)
    state = None if tables.state is None else dataclasses.replace(tables.state, rings=tuple(rings))
    cache = cache.updated(pools=tuple(of_whole_groups(pools, spec)), state=state)
    if tails:
        return Step(logits, cache, tuple(after), None)
    cache = cache.updated(length=tables.length + count[:, None], seen=tables.seen + count)
    if scratch is not None:
        scratch = dataclasses.replace(scratch, norms=tuple(norms))
    if spec.evicts and tokens.shape[1] == 1:
        cache, scratch = within_limits(cache, outs, products, scratch, spec)
    return Step(logits, cache, (), scratch)


def dealt_of(cache: Cache, spec: Spec, new: NewTokens) -> Callable[[int, Pool], Dealt | None]:
    """Makes the table of the rows that each program of a fused decode kernel reads; each layer takes its part.

    Args:
        cache: before the step.
        spec: what is static.
        new: what is known of the tokens.

    Returns:
        Each layer's share of a table that is made once.
    """
    if spec.rolling or not spec.streams(new.positions.shape[1]):
        return lambda *_: None
    tables, picked, rest = cache.tables, None, None
    start, length = tables.start, tables.length
    layers, _, heads = start.shape
    sparse = np.asarray([spec.sparse(layer, 1) for layer in range(layers)])
    if new.candidates is not None and sparse.any():
        # What is chosen is read as if it lay before what is read anyway, from a row 0 on.
        picked, rest, some = jnp.minimum(*new.candidates), rest_of(spec, tables), sparse[:, None, None]
        length = jnp.where(some, picked[:, None] + length - rest, length)
        start = jnp.where(some, 0, start)
    k = cache.pools[0].k
    chunks = spec.backend.deal(start, length, dim=k.shape[2], itemsize=k.dtype.itemsize)

    def share(layer: int, pool: Pool) -> Dealt:
        widest = pool.rows // heads if spec.layout is Layout.EQUAL else spec.widest
        chosen = {"picked": picked, "rest": rest} if sparse[layer] else {}
        return Dealt(chunks=chunks, start=tables.start, layer=layer, widest=widest, **chosen)

    return share


@program(static=("spec",), donate=("pools",), on="spec")
def _extend(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    pools: tuple[Pool, ...],
    tables: Tables,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: Spec,
) -> tuple[Float[Array, "B V"], Cache]:
    logits, cache, *_ = step(ends, blocks, Cache(pools=pools, tables=tables), tokens, count, spec=spec)
    return logits, cache


def extend(
    flat: Flat, cache: Cache, tokens: Int[Array, "B N"], count: Int[Array, " B"], *, spec: Spec
) -> tuple[Float[Array, "B V"], Cache]:
    """`step`, compiled; the pools given are consumed.

    Args:
        flat: the decoder's parameters.
        cache: as for `step`; its pools are donated.
        tokens: as for `step`.
        count: as for `step`.
        spec: what is static.

    Returns:
        Logits and cache, as `step`.
    """
    return _extend(flat.ends, flat.blocks, cache.pools, cache.tables, tokens, count, spec=spec)


def read_on_top(
    run: Callable[[Cache, Array, Array], tuple[Array, Cache]],
    cache: KVCache,
    tokens: Int[np.ndarray, "B n"],
    lengths: Int[np.ndarray, " B"],
    *,
    size: int,
) -> tuple[Float[Array, "B V"], KVCache]:
    """Runs prompts on top of a cache, a block of every prompt at a time.

    Args:
        run: `extend` or a step of the same form: of a cache's arrays, tokens and how many of them are real.
        cache: with room for the prompts; given up.
        tokens: ids, padded on the right to a multiple of `size`.
        lengths: tokens of each prompt.
        size: tokens of a block.

    Returns:
        Float32 logits of each prompt's last token, and the cache with the new rows.
    """
    logits, axes, arrays = cache.logits, cache.axes, cache.arrays
    for first in range(0, tokens.shape[1], size):
        count = np.clip(lengths - first, 0, size).astype(np.int32)
        part = place(tokens[:, first : first + size], "B N", axes)
        placed = place(count, "B", axes)
        after, arrays = run(arrays, part, placed)
        logits = after if logits is None else newest(after, logits, placed, axes=axes)
    assert logits is not None
    return logits, dataclasses.replace(cache, arrays=arrays)


@program(static=("axes",))
def newest(
    after: Float[Array, "B V"], before: Float[Array, "B V"], count: Int[Array, " B"], *, axes: Axes | None
) -> Float[Array, "B V"]:
    """Logits after a block where a sequence had tokens in it (`count` > 0), those from before it elsewhere."""
    return jnp.where((count > 0)[:, None], after, before)
