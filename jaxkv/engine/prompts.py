"""Prompts on their way through the model, a layer at a time: what `compress` chooses from."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv import memory
from jaxkv._errors import require
from jaxkv._values import is_traced
from jaxkv.attention import Implementation
from jaxkv.cache.bank import put_away
from jaxkv.cache.packing import Unpacked
from jaxkv.engine.choosing import Candidates, of_prompt
from jaxkv.engine.compress import Source, observe, unordered
from jaxkv.engine.lengths import ByLength, Table, rows_by_claims
from jaxkv.engine.plan import PrefillPlan, ring_rows
from jaxkv.engine.prefill_layer import LayerOut, layer
from jaxkv.models.decoder import Flat, Graphs, Leaves
from jaxkv.models.rope import Angles, angles
from jaxkv.models.values import Rope
from jaxkv.policies.parts import Ongoing, Parts
from jaxkv.policies.reading import Reading
from jaxkv.policies.scorer import Needs, Observed, Scorer, future_of, norms_of
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host, inside, place, put, settle_down, where


@program(static=("graphs",), on="graphs")
def embed(ends: Leaves, tokens: Int[Array, "B S"], *, graphs: Graphs) -> Float[Array, "B S E"]:
    """Hidden states before the first block."""
    return graphs.ends(ends).embed(tokens)


@partial(jax.jit, static_argnames=("slots", "rope", "dim"))
def _angles(*, slots: int, rope: Rope, dim: int) -> Angles:
    return angles(jnp.arange(slots, dtype=jnp.int32)[None], rope, dim)


def tables_of(flat: Flat, slots: int) -> dict[Rope, Angles]:
    """Angles of the first positions for each rotary embedding that layers have, where the model lies."""
    ropes = dict.fromkeys(flat.config.spec_of(layer).rope for layer in range(flat.config.layers))
    dim = flat.config.head_dim
    return {rope: settle_down(_angles(slots=slots, rope=rope, dim=dim), flat.axes) for rope in ropes}


# The device never waits for the host with that many; more would only hold memory.
_MOST_AHEAD = 4
_LAYER_STATICS = ("graphs", "needs", "last", "implementation")
_layer = program(static=_LAYER_STATICS, donate=("x",), on="graphs")(layer)
# The top block gives back one token's hidden state: there is nothing to write in place.
_top_layer = program(static=_LAYER_STATICS, on="graphs")(layer)


def run_layer(
    flat: Flat,
    index: int,
    x: Array,
    length: Array,
    tables: dict[Rope, Angles],
    needs: Needs,
    implementation: Implementation,
) -> LayerOut:
    """One block over whole prompts; hidden states are given up."""
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


def pool_rows_of(flat: Flat, needed: PrefillPlan) -> tuple[int, ...]:
    """P of each pool; on a mesh, of each stretch of heads."""
    stretches = 1 if flat.axes is None else flat.axes.size("K")
    return needed.pool_rows(flat.config.kv_heads, stretches)


def observed(
    flat: Flat,
    out: LayerOut,
    scorer: Scorer,
    length: Array,
    index: int,
    key: PRNGKeyArray,
    implementation: Implementation,
) -> Observed:
    """One layer of prompts as a scorer sees it: as many of the last queries as it asks for."""
    # Others than the scorer may have asked for queries, norms and moments, too.
    first, future = out.q.shape[3] - scorer.queries, future_of(scorer)
    return Observed(
        q=out.q[..., first:, :],
        q_positions=out.q_positions[:, first:],
        k=out.k,
        v=out.v,
        length=length,
        layer=jnp.int32(index),
        key=key,
        sums=out.sums,
        norms=out.norms if norms_of(scorer) else None,
        moments=next((each for each in out.moments if each.asked == future), None),
        implementation=implementation,
        axes=flat.axes,
        group_axes=flat.axes,
    )


class Prompts(Source):
    """Prompts on their way through the model: the source of what `compress` chooses from, a layer at a time."""

    def __init__(
        self,
        flat: Flat,
        tokens: Int[np.ndarray, "B S"] | Int[Array, "B S"],
        lengths: Int[np.ndarray, " B"] | Int[Array, " B"],
        parts: Parts,
        needed: PrefillPlan,
        told: ByLength,
        key: PRNGKeyArray,
        implementation: Implementation,
    ):
        """Embeds the prompts."""
        layers = flat.config.layers
        self.flat, self.parts, self.needed, self.lengths, self.told = flat, parts, needed, lengths, told
        self.implementation = implementation
        self.key = key if flat.axes is None else put(key, where("", (), flat.axes))
        self.indices, self.axes = range(layers), flat.axes
        self.length = place(lengths, "B", flat.axes, jnp.int32)
        self.forced = place(parts.keep.mask(lengths, needed.slots), "B S", flat.axes)
        # Of every layer what is known before it is looked at; and of layers that keep everything.
        self.prompts = of_prompt(None, self.forced, self.length)
        heads = flat.config.kv_heads // (flat.axes.size("K") if flat.axes is not None and inside() else 1)
        everything = jnp.broadcast_to(self.prompts.inside, (*self.length.shape, heads, needed.slots))
        self.whole = dataclasses.replace(self.prompts, inside=everything)
        self.reading = parts.reading(layers, needed.slots)
        self.remembered = _remembering(parts.ongoing, self.reading, layers)
        self.ahead = _ahead(needed, self.length)
        self.x = embed(flat.ends, place(tokens, "B S", flat.axes, jnp.int32), graphs=flat.graphs)
        self.angles = tables_of(flat, needed.slots)
        self.kept_rows, self.recents = told.rows, told.recent
        self.totals = pool_rows_of(flat, needed)
        self.held: dict[int, Unpacked] = {}
        self.banked, self.rings, self.torn = list[Array](), list[Array](), list[Array]()

    def candidates(self, index: int) -> Candidates:
        """Runs a layer. Its rows are held until they are packed, or put away into host memory."""
        parts, scorer, length = self.parts, self.parts.scorer, self.length
        out = run_layer(self.flat, index, self.x, length, self.angles, parts.needs, self.implementation)
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
        seen = observed(self.flat, out, scorer, length, index, self.key, self.implementation)
        scores, mass, claim = observe(seen, self.forced, scorer=scorer, layers=parts.layers, axes=self.axes)
        self.torn.append(unordered(scores, length, axes=self.axes))
        scored = parts.ongoing is not None and parts.ongoing.scored
        self.held[index] = rows._replace(mass=mass, score=mass if scored else None)
        norms = out.norms if parts.heads.needs_norms else None
        return dataclasses.replace(self.prompts, scores=scores, norms=norms, claim=claim)

    def wanted(self, group: Sequence[int], claims: list[Array | None]) -> tuple[Array, Array]:
        """The plan's rows, or what layers claim of them."""
        if self.parts.claims:
            if not is_traced(self.length):
                self.require_ordered()
            self.kept_rows, self.recents = self._of_claims(claims)
        of = slice(group[0], group[-1] + 1)
        rows, recents = self.kept_rows, self.recents
        assert rows is not None and recents is not None
        on_devices = lambda table: place(table[of], "n B", self.axes, jnp.int32)  # noqa: E731
        return on_devices(rows), on_devices(recents)

    def _of_claims(self, claims: list[Array | None]) -> tuple[Table, Table]:
        """Rows of each layer, and the most recent of them, from what layers claim: on the host, or traced."""
        known, told = [claim for claim in claims if claim is not None], self.told
        weights: Any = jnp.stack(known) if is_traced(self.length) else np.stack([host(claim) for claim in known])
        return rows_by_claims(self.parts, told.budget, self.lengths, told.forced, weights)

    def pool_rows(self, group: Sequence[int], kept: Array) -> int:
        """As many as the plan says, whatever is kept."""
        return self.totals[group[0]]

    def rows(self, index: int) -> Unpacked:
        """Takes out the keys and values that were held of a layer."""
        return self.held.pop(index)

    def ordered(self) -> Bool[Array, ""]:
        """Whether all scores are numbers, for a program that cannot refuse them."""
        return ~jnp.stack([*self.torn, jnp.zeros((), bool)]).any()

    def require_ordered(self) -> None:
        """Refuses scores that are not numbers, once for all layers: nothing waits for them before."""
        for each in self.torn:
            each.copy_to_host_async()
        layers = np.flatnonzero([bool(host(each)) for each in self.torn]).tolist()
        remedy = f"{self.parts.scorer} gave rows of layers {layers} what is not a number: mend it, or the model, if "
        require(not layers, "scores", "NaN", remedy + "that is not finite")


def _ahead(needed: PrefillPlan, placed: Array) -> int:
    """Layers that may be under way at once beyond the plan's: for those the device's allocator has room to spare."""
    if is_traced(placed):
        return 0
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
