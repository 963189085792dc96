"""Steps over a cache whose upper layers wait in host memory: programs on the device, and transfers between them.

A step is staged in Python around explicit transfers. For each filter: it is asked, then its own attention and that of
the layers behind it are under way while the host packs the chosen rows and sends them, then the layers that read those
rows run and the next filter is asked.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv.cache import Bank, Cache, Tables
from jaxkv.cache.bank import Traffic, fetch_rows, fetch_whole
from jaxkv.cache.pools import Pool
from jaxkv.engine.bookkeeping import segments_of
from jaxkv.engine.filters import Chosen
from jaxkv.engine.layer_step import LayerRows, layer_step, remembered
from jaxkv.engine.loop import Draw, Running, drawn
from jaxkv.engine.sparse import candidates_of, chosen_at
from jaxkv.engine.spec import Spec
from jaxkv.engine.stream import Stream
from jaxkv.engine.tokens import NewTokens, StepAngles
from jaxkv.models.decoder import Flat, Graphs, Leaves
from jaxkv.models.rope import angles
from jaxkv.models.values import LayerSpec
from jaxkv.policies.reading import Reading
from jaxkv.sampling import Sampling, argument
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host, place, settle_down


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """Layers that one program runs.

    Attributes:
        layers: which ones.
        loaded: whether their rows come from host memory.
        ask: the filter that chooses for what follows, or None.
    """

    layers: tuple[int, ...]
    loaded: bool
    ask: int | None


@lru_cache(maxsize=64)
def stretches(reading: Reading, layers: int, *, whole: bool) -> tuple[Stretch, ...]:
    """How a step is cut.

    Args:
        reading: which layers read what.
        layers: L.
        whole: every layer reads everything: offloaded ones are loaded one by one.

    Returns:
        Stretches, from the bottom.
    """
    runs: list[list[int]] = []
    for layer in range(layers):
        away = layer in reading.offloaded
        alone = whole and (away or layer - 1 in reading.offloaded)
        same = bool(runs) and (runs[-1][-1] in reading.offloaded) == away
        # A filter begins a run of its own: it is asked before its attention begins.
        if runs and same and not alone and (whole or layer not in reading.filters):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    if not whole and reading.filters[0] == 0:
        runs.insert(0, [])
    after = [run[0] if run and run[0] in reading.filters else None for run in runs[1:]] + [None]
    return tuple(
        Stretch(layers=tuple(run), loaded=bool(run) and run[0] in reading.offloaded, ask=None if whole else ask)
        for run, ask in zip(runs, after, strict=True)
    )


@program(static=("graphs",), on="graphs")
def _embed(ends: Leaves, tokens: Int[Array, "B N"], *, graphs: Graphs) -> Float[Array, "B N E"]:
    return graphs.ends(ends).embed(tokens)


@program(static=("graphs",), on="graphs")
def _logits(ends: Leaves, x: Float[Array, "B N E"], count: Int[Array, " B"], *, graphs: Graphs) -> Float[Array, "B V"]:
    last = jnp.maximum(count - 1, 0)[:, None, None]
    return graphs.ends(ends).logits(jnp.take_along_axis(x, last, axis=1)[:, 0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ahead:
    """The filter that a stretch asks in the end.

    Attributes:
        leaves: its parameters.
        pool: its pool.
        ring: the queries that it remembers, if any.
        layer: `i32[1]` which layer it is.
    """

    leaves: Leaves
    pool: Pool
    ring: Float[Array, "B K G R D"] | None
    layer: Int[Array, " 1"]


@lru_cache(maxsize=1024)
def _numbers(layers: tuple[int, ...], there: jax.Device | Axes) -> Int[Array, " n"]:
    """Layers as an array that lies on the device, or on all of a mesh, already."""
    numbers = np.asarray(layers, np.int32)
    return place(numbers, "n", there) if isinstance(there, Axes) else jax.device_put(numbers, there)


@program(static=("spec", "kinds"), donate=("pools",), on="spec")
def run_stretch(
    blocks: tuple[Leaves, ...],
    pools: tuple[Pool, ...],
    rings: tuple[Float[Array, "B K G R D"] | None, ...],
    tables: Tables,
    x: Float[Array, "B N E"],
    loaded: Float[Array, "B n T 2 K D"] | None,
    chosen: Chosen | None,
    count: Int[Array, " B"],
    layers: Int[Array, " n"],
    ahead: Ahead | None,
    *,
    spec: Spec,
    kinds: tuple[LayerSpec, ...],
) -> tuple[Float[Array, "B N E"], tuple[Pool, ...], tuple[Float[Array, "B K G R D"] | None, ...], Chosen | None]:
    """Runs a stretch of layers, and asks the filter that comes next. Stretches that are alike share a program.

    Args:
        blocks: the layers' parameters.
        pools: their pools; donated.
        rings: the queries that they remember, if any.
        tables: of all layers before the step.
        x: hidden states.
        loaded: chosen rows of these layers, if they are offloaded.
        chosen: which those are.
        count: how many of the N tokens are real.
        layers: which layers these are.
        ahead: the filter, if one is asked.
        spec: what is static.
        kinds: what these layers are, and behind them the filter.

    Returns:
        Hidden states, pools, rings, and the filter's choice or None.
    """
    tokens = x.shape[1]
    new = NewTokens(
        positions=tables.seen[:, None] + jnp.arange(tokens, dtype=jnp.int32),
        count=count,
        candidates=candidates_of(spec, tables, tokens),
    )
    after, remembering, mine = [], [], tables.of_layers(layers)
    turned = partial(angles, new.positions, head_dim=spec.config.head_dim)
    by = {kind.rope: StepAngles(turned(rope=kind.rope)) for kind in dict.fromkeys(kinds)}
    for index, (leaves, pool, ring) in enumerate(zip(blocks, pools, rings, strict=True)):
        rows = LayerRows(
            pool=pool,
            segments=segments_of(mine, index),
            by=by[kinds[index].rope],
            ring=ring,
            chosen=None if loaded is None else chosen,
            loaded=None if loaded is None else loaded[:, index],
        )
        stream, rows, *_ = layer_step(spec.graphs.of(kinds[index]).block(leaves), spec, Stream(x=x), rows, new)
        x = stream.x
        after.append(rows.pool)
        remembering.append(rows.ring)
    choice = None
    if ahead is not None:
        filtering = spec.graphs.of(kinds[-1]).block(ahead.leaves)
        q = filtering.queries(filtering.normed(x), by[kinds[-1].rope].new)
        queries = None if ahead.ring is None else remembered(ahead.ring, q, new.positions, count)
        segments = segments_of(tables.of_layers(ahead.layer), 0)
        choice = chosen_at(spec, ahead.pool, segments, q, queries, new)
    return x, tuple(after), tuple(remembering), choice


def step(
    flat: Flat,
    cache: Cache,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: Spec,
    bank: Bank,
    traffic: Traffic,
) -> tuple[Float[Array, "B V"], Cache]:
    """Runs N new tokens per sequence through the model; several at once read everything.

    Args:
        flat: the decoder's parameters.
        cache: with room for N rows behind every segment; its pools are donated.
        tokens: ids, padded on the right.
        count: how many of the N are real; 0 leaves a sequence's cache as it is.
        spec: what is static.
        bank: the rows that wait in host memory.
        traffic: counts transfers.

    Returns:
        Float32 logits of each sequence's last real token, and the cache with the new rows.
    """
    reading, graphs, tables, state = spec.reading, spec.graphs, cache.tables, cache.tables.state
    assert reading is not None and state is not None
    whole = tokens.shape[1] > 1 or not reading.filters
    cut = stretches(reading, spec.config.layers, whole=whole)
    pools = list(cache.pools)
    rings: list[Array | None] = [None] * len(pools)
    for layer, ring in zip(reading.filters, state.rings, strict=False):
        rings[layer] = ring
    there = spec.axes or next(iter(tables.seen.devices()))
    x = _embed(flat.ends, tokens, graphs=graphs)
    nothing = place(np.zeros((len(tables.seen), 1), np.int32), "B T", spec.axes)
    everything = Chosen(positions=nothing, count=state.prompt)
    fetch = partial(fetch_whole, bank, like=tables.seen, traffic=traffic)
    layers = _fetched_ahead(fetch, [part.layers[0] for part in cut if part.loaded], reading.ahead)
    chosen: Chosen | None = None
    for part in cut:
        loaded, ahead = None, None
        if part.loaded and whole:
            # Whole layers are large: no more of them are on the device than the plan says.
            jax.block_until_ready(x)
            loaded, chosen = next(layers), everything
        elif part.loaded:
            assert chosen is not None
            # Only the choice is waited for: the filter's own stretch is under way.
            loaded = fetch_rows(bank, part.layers, chosen.positions, traffic)
        if part.ask is not None:
            ahead = Ahead(
                leaves=flat.blocks[part.ask],
                pool=pools[part.ask],
                ring=rings[part.ask],
                layer=_numbers((part.ask,), there),
            )
        x, moved, remembering, choice = run_stretch(
            tuple(flat.blocks[layer] for layer in part.layers),
            tuple(pools[layer] for layer in part.layers),
            tuple(rings[layer] for layer in part.layers),
            tables,
            x,
            loaded,
            chosen if part.loaded else None,
            count,
            _numbers(part.layers, there),
            ahead,
            spec=spec,
            kinds=tuple(map(spec.config.spec_of, (*part.layers, *(() if part.ask is None else (part.ask,))))),
        )
        for layer, pool, ring in zip(part.layers, moved, remembering, strict=True):
            pools[layer], rings[layer] = pool, ring
        chosen = choice if part.ask is not None else chosen
    state = dataclasses.replace(state, rings=tuple(ring for ring in rings if ring is not None))
    logits = _logits(flat.ends, x, count, graphs=graphs)
    seen, length = _advanced(tables.seen, tables.length, count, axes=spec.axes)
    return logits, cache.updated(pools=tuple(pools), state=state, seen=seen, length=length)


def _fetched_ahead(fetch: Callable[[int], Array], layers: list[int], ahead: int) -> Iterator[Array]:
    """Whole layers in turn; while one is in use, so many of the next ones are on their way."""
    coming: list[Array] = []
    while layers or coming:
        while layers and len(coming) <= ahead:
            coming.append(fetch(layers.pop(0)))
        yield coming.pop(0)


@program(static=("axes",))
def _advanced(
    seen: Int[Array, " B"], length: Int[Array, "L B K"], count: Int[Array, " B"], *, axes: Axes | None
) -> tuple[Int[Array, " B"], Int[Array, "L B K"]]:
    return seen + count, length + count[:, None]


def decode(
    flat: Flat,
    running: Running,
    draw: Draw,
    steps: int,
    *,
    spec: Spec,
    sampling: Sampling,
    size: int,
    bank: Bank,
    traffic: Traffic,
) -> tuple[Running, Draw, Int[np.ndarray, "B size"], int]:
    """`loop.decode`, its loop in Python.

    Args:
        flat: as there.
        running: as there.
        draw: as there.
        steps: as there; with 0 everything is compiled and nothing changes.
        spec: as there.
        sampling: as there.
        size: as there.
        bank: the rows that wait in host memory.
        traffic: counts transfers.

    Returns:
        As there.
    """
    cache, batch, axes = running.cache, draw.done.shape[0], spec.axes
    draw = settle_down(draw, axes) if axes else jax.device_put(draw, next(iter(cache.tables.seen.devices())))
    out = np.full((batch, size), -1, np.int32)
    if steps == 0:
        _, _, nothing = _draw(draw, cache.tables.seen, argument(sampling), axes=axes)
        nothing = nothing * 0
        logits, cache = step(flat, cache, nothing[:, None], nothing, spec=spec, bank=bank, traffic=Traffic())
        jax.block_until_ready(logits)
        return dataclasses.replace(running, cache=cache), draw, out, 0
    ran, ended = 0, host(draw.done)
    while ran < steps and not ended.all():
        token, done, count = _draw(draw, cache.tables.seen, argument(sampling), axes=axes)
        fed = jnp.maximum(token, 0)[:, None]
        logits, cache = step(flat, cache, fed, count, spec=spec, bank=bank, traffic=traffic)
        draw = draw.after(logits, done)
        # Only now, with the step under way.
        out[:, ran], ended = host(token), host(done)
        ran += 1
    return dataclasses.replace(running, cache=cache), draw, out, ran


@program(static=("axes",))
def _draw(
    draw: Draw, seen: Int[Array, " B"], sampling: Any, *, axes: Axes | None
) -> tuple[Int[Array, " B"], Bool[Array, " B"], Int[Array, " B"]]:
    """One token per sequence, -1 after its end; which sequences have ended, and how many tokens go on."""
    token, done = drawn(draw, seen, sampling, axes)
    return jnp.where(draw.done, -1, token), done, (~done).astype(jnp.int32)
