"""What a prefill calls, traced in the engine's order for shapes, with what lies on a device meanwhile.

`engine.prefill` walks the layers from the host. Its memory is highest around the last of them, when most of the cache
is there: so the layer below the top one is walked, and the top one.
"""

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._values import Typed
from jaxkv.cache import packing
from jaxkv.cache.packing import Unpacked
from jaxkv.cache.pools import Pool
from jaxkv.engine import choosing, compress
from jaxkv.engine import prompts as prompting
from jaxkv.engine.choosing import Candidates, of_prompt
from jaxkv.engine.plan import ring_rows
from jaxkv.engine.prefill import logits_of
from jaxkv.planning.programs import Work
from jaxkv.policies.scorer import Observed, norms_of
from jaxkv.sharding.mesh import settle_down, where


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A program that a prefill calls.

    Attributes:
        name: what it does.
        traced: the program, to be lowered.
        beside: bytes on one device that lie there while it runs and that it is not given.
        seconds: that tracing took.
    """

    name: str
    traced: Any
    beside: int
    seconds: float


def weigh(tree: Any) -> int:
    """Bytes that one device has of arrays, or of shapes."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _bytes(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    shape = tuple(leaf.shape) if sharding is None else sharding.shard_shape(tuple(leaf.shape))
    item = 8 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
    return math.prod(shape) * item


class _Device:
    """What lies on one device, by name, and `more` bytes; and the programs called on it so far."""

    def __init__(self, work: Work):
        self.work, self.axes = work, work.flat.axes
        self.there: dict[str, Any] = {}
        self.more = 0
        self.calls: list[Call] = []

    def keep(self, name: str, tree: Any) -> Any:
        """Says that something lies there."""
        self.there[name] = tree
        return tree

    def drop(self, *names: str) -> None:
        """Says that something is gone."""
        for name in names:
            self.there.pop(name, None)

    def array(self, letters: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """A shape where its letters say."""
        place = self.work.sharding if self.axes is None else where(letters, shape, self.axes)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def settled(self, tree: Any) -> Any:
        """A dataclass of shapes where its letters say."""
        return self.work.placed(tree) if self.axes is None else settle_down(tree, self.axes)

    def call(self, name: str, program: Any, *args: Any, **static: Any) -> Any:
        """Traces a program; gives the shapes of what comes out."""
        given = args if self.axes is not None else self.work.placed(args)
        began = time.perf_counter()
        traced = program.trace(*given, **static)
        seconds = time.perf_counter() - began
        ours = {id(leaf) for leaf in jax.tree.leaves(args)}
        others = {id(leaf): leaf for leaf in jax.tree.leaves(self.there) if id(leaf) not in ours}
        beside = self.more + weigh(list(others.values()))
        self.calls.append(Call(name=name, traced=traced, beside=beside, seconds=seconds))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), traced.out_info)


class _Walk:
    """A prefill of shapes."""

    def __init__(self, work: Work):
        """Embeds the prompts."""
        self.work, self.flat, self.parts, self.needed = work, work.flat, work.policy.parts(), work.planned
        self.device, self.layers = _Device(work), work.flat.config.layers
        device, batch, slots, flat = self.device, work.batch, self.needed.slots, work.flat
        heads = flat.config.kv_heads
        self.pools = [self._pool(rows) for rows in self.needed.pool_rows(heads, work.stretches)]
        self.reading = self.parts.reading(self.layers, slots)
        device.keep("weights", (flat.ends, flat.blocks))
        self.length = device.keep("length", device.array("B", (batch,), jnp.int32))
        self.forced = device.keep("forced", device.array("B S", (batch, slots), jnp.bool_))
        prompts = jax.eval_shape(lambda forced, length: of_prompt(None, forced, length), self.forced, self.length)
        self.prompts: Candidates = device.keep("prompts", device.settled(prompts))
        self.inside = device.keep("whole", device.array("B _ S", (batch, heads, slots), jnp.bool_))
        table = jax.eval_shape(lambda: prompting._angles(slots=slots, rope=flat.config.rope, dim=flat.config.head_dim))
        self.table = device.keep("table", device.settled(table))
        device.keep("rings", self._rings())
        tokens = device.array("B S", (batch, slots), jnp.int32)
        x = device.call("embed", prompting.embed, flat.ends, tokens, graphs=flat.graphs)
        self.x = device.keep("x", device.array("B S E", x.shape, x.dtype))

    def _pool(self, mine: int) -> Pool:
        work, ongoing = self.work, self.parts.ongoing
        rows = (work.batch, mine * work.stretches)
        row = self.device.array("B P D", (*rows, work.flat.config.head_dim), work.dtype)
        cells = lambda dtype: self.device.array("B P", rows, dtype)  # noqa: E731
        score = cells(jnp.float32) if ongoing is not None and ongoing.scored else None
        store = self.device.settled(jax.eval_shape(self.parts.store.of, row, row))
        return Pool(store=store, pos=cells(jnp.int32), score=score)

    def _rings(self) -> list[Any]:
        config, queries = self.flat.config, prompting._remembering(self.parts.ongoing, self.reading, self.layers)
        shape = lambda n: (self.work.batch, config.kv_heads, config.group, ring_rows(n), config.head_dim)  # noqa: E731
        return [self.device.array("B K G R D", shape(n), jnp.float32) for n in queries if n]

    def layer(self, index: int) -> None:
        """Runs a layer, scores its rows, chooses among them and packs what is left."""
        device, flat, parts, one_pool = self.device, self.flat, self.parts, self.needed.layout.one_pool
        # Of a pool for all layers there is nothing until they have all been looked at; their rows wait for it.
        device.keep("pools", [] if one_pool else self.pools[:index])
        last = index == self.layers - 1
        run = prompting._top_layer if last else prompting._layer
        options = {"graphs": flat.graphs, "needs": parts.needs, "last": last}
        given = (flat.blocks[index], self.x, self.length, self.table)
        name = "top layer" if last else "layer"
        out = device.call(name, run, *given, **options, implementation=self.work.implementation)
        out = device.keep("out", device.settled(out))
        self.x = device.keep("x", out.x)
        rows = Unpacked(out.k if out.unrotated is None else out.unrotated, out.v, self.prompts.inside)
        candidates = dataclasses.replace(self.prompts, inside=self.inside)
        if parts.scorer is not None:
            rows, candidates = self._scored(out, rows, index)
        device.drop("out")
        device.keep("rows", rows)
        device.keep("candidates", candidates)
        held = (rows.k, rows.v, rows.mass)
        if one_pool:
            device.more = index * weigh((*held, candidates.scores, candidates.norms, candidates.claim))
        if one_pool and not last:
            return
        if parts.layers.joint:
            device.more = index * weigh(held)
        mask = self._chosen(candidates)
        device.drop("candidates")
        if one_pool:
            device.more = index * weigh((*held, mask))
        self._packed(rows, mask, index)

    def _scored(self, out: Any, rows: Unpacked, index: int) -> tuple[Unpacked, Candidates]:
        device, parts, scorer = self.device, self.parts, self.parts.scorer
        assert scorer is not None
        window = (*out.q.shape[:3], scorer.queries, out.q.shape[4])
        seen = Observed(
            q=out.q if window == out.q.shape else device.array("B K G w D", window, out.q.dtype),
            q_positions=device.array("B w", (self.work.batch, scorer.queries), jnp.int32),
            k=out.k,
            v=out.v,
            length=self.length,
            layer=device.array("", (), jnp.int32),
            key=device.array("", (), jax.random.key(0).dtype),
            sums=out.sums,
            norms=out.norms if norms_of(scorer) else None,
            moments=next(iter(out.moments), None),
            implementation=self.work.implementation,
            axes=self.flat.axes,
            group_axes=self.flat.axes,
        )
        static = {"scorer": Typed(scorer), "layers": Typed(parts.layers), "axes": self.flat.axes}
        scores, mass, claim = device.call("score", compress._observe, seen, self.forced, **static)
        scores, mass = (device.array("B K S", each.shape, each.dtype) for each in (scores, mass))
        claim = None if claim is None else device.array("B", claim.shape, claim.dtype)
        scored = parts.ongoing is not None and parts.ongoing.scored
        rows = rows._replace(mass=mass, score=mass if scored else None)
        norms = out.norms if parts.heads.needs_norms else None
        return rows, dataclasses.replace(self.prompts, scores=scores, norms=norms, claim=claim)

    def _chosen(self, candidates: Candidates) -> Any:
        if candidates.scores is None:
            return candidates.inside
        device, static = self.device, {"heads": Typed(self.parts.heads), "axes": self.flat.axes}
        count = device.array("B", (self.work.batch,), jnp.int32)
        if self.parts.layers.joint:
            others = (self._like(candidates) for _ in range(self.layers - 1))
            masks = device.call(
                "choose", choosing._choose_over_layers, (*others, candidates), count, count, None, **static
            ).masks
            return device.keep("mask", device.array("B K S", masks[0].shape, jnp.bool_))
        # Where layers build on one another they are given the choice of the one below.
        below = device.keep("below", device.array("B S", self.forced.shape, jnp.bool_)) if self.parts.nested else None
        chosen = device.call("choose", choosing._choose, candidates, count, count, below, None, **static)
        return device.keep("mask", device.array("B K S", chosen.mask.shape, jnp.bool_))

    def _like(self, candidates: Candidates) -> Candidates:
        """Another layer's candidates of the same shapes."""
        again = lambda leaf: None if leaf is None else self.device.array("B K S", leaf.shape, leaf.dtype)  # noqa: E731
        return dataclasses.replace(candidates, scores=again(candidates.scores), norms=again(candidates.norms))

    def _packed(self, rows: Unpacked, mask: Any, index: int) -> None:
        device, parts, axes, layout = self.device, self.parts, self.flat.axes, self.needed.layout
        if parts.merge is not None:
            key, more = device.array("", (), jax.random.key(0).dtype), device.more
            if layout.one_pool:
                # The lowest layer's with all others' rows behind it, the next one's with the pool instead of one's.
                each = more // max(index, 1)
                device.more = max(more, more - each + weigh(self.pools))
            given = (rows.k, rows.v, mask, rows.inside, rows.mass, None, key, None)
            device.call("merge", compress._merged, *given, merge=Typed(parts.merge), axes=axes)
            # In place of the layer's rows there are then as many others, and what the merger goes on with.
            device.more, count = more, parts.merge.thresholds
            rows = rows._replace(tau=device.array("B K n", (*mask.shape[:2], count), jnp.float32) if count else None)
        if layout.one_pool:
            start = device.array("B K", mask.shape[:2], jnp.int32)
            device.call("pack", packing.pack_shared, self.pools[0], rows, mask, start, axes=axes)
        else:
            size = self.needed.pool_rows(self.flat.config.kv_heads, self.work.stretches)[index]
            static = {"rows": size, "layout": layout, "implementation": self.work.implementation, "axes": axes}
            device.call("pack", packing.pack, rows, mask, **static)
        device.more = 0
        # The mask is let go when the layer above has been looked at.
        device.drop("rows", "below")

    def logits(self) -> None:
        """The logits of each prompt's last token."""
        self.device.drop("mask")
        self.device.keep("pools", self.pools)
        self.device.call("logits", logits_of, self.flat.ends, self.x, graphs=self.flat.graphs)


def prefill_calls(work: Work) -> Iterator[Call]:
    """The programs of a prefill, traced.

    Args:
        work: what they are traced for.

    Yields:
        One call after the other.
    """
    walk = _Walk(work)
    first = max(0, walk.layers - 2)
    for index in range(first, walk.layers):
        walk.layer(index)
    walk.logits()
    yield from walk.device.calls
