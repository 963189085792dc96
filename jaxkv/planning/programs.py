"""The engine's own programs, traced for arrays that are shapes alone, on devices that need not be there."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.attention import Implementation
from jaxkv.cache import Cache, KVCache, Pool, State, Tables
from jaxkv.engine import loop
from jaxkv.engine.growth import first_room
from jaxkv.engine.plan import PrefillPlan, plan_prefill, ring_rows
from jaxkv.engine.program import program_for, reading_state
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder, Flat
from jaxkv.policies.policy import Method
from jaxkv.sampling import Greedy
from jaxkv.sharding.mesh import Axes
from jaxkv.sharding.parameters import spec_of

# Tokens that one call of the compiled loop draws at most, as `Session` has it.
BLOCK = 256


def abstract_model(config: ModelConfig, dtype: Any = jnp.bfloat16, axes: Axes | None = None) -> Flat:
    """A decoder taken apart, its parameters shapes alone.

    Args:
        config: the model's shape.
        dtype: of its parameters.
        axes: of the mesh that they would lie on, if they would.

    Returns:
        What programs take.
    """
    decoder = Decoder(config, dtype=dtype)
    if axes is None:
        return Flat(decoder)
    graph, leaves = nnx.split(decoder)

    def there(path: Any, leaf: Any) -> Any:
        name = next(str(each.key) for each in reversed(path) if hasattr(each, "key"))
        return leaf.update(sharding=jax.sharding.NamedSharding(axes.mesh, spec_of(name)))

    return Flat(nnx.merge(graph, jax.tree_util.tree_map_with_path(there, leaves)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What programs are traced for.

    Attributes:
        flat: the model, from `abstract_model`.
        policy: the compression.
        batch: B.
        tokens: of each prompt.
        new: tokens to draw.
        sharding: where everything lies if the model lies on no mesh; None for the default device.
        implementation: what computes attention.
    """

    flat: Flat
    policy: Method
    batch: int
    tokens: int
    new: int = BLOCK
    sharding: Any = None
    implementation: Implementation = Implementation.PALLAS

    @property
    def dtype(self) -> jnp.dtype:
        """Of parameters, activations and cache."""
        return jnp.dtype(self.flat.ends[0].dtype)

    @property
    def stretches(self) -> int:
        """Parts that a mesh cuts kv heads into."""
        return 1 if self.flat.axes is None else self.flat.axes.size("K")

    @property
    def planned(self) -> PrefillPlan:
        """The engine's plan of this prefill, with the room that a session leaves for the new tokens."""
        lengths = np.full(self.batch, self.tokens)
        room = first_room(self.policy.parts(), self.flat.config.layers, lengths, self.new)
        options: dict[str, Any] = {"dtype": self.dtype, "implementation": self.implementation}
        return plan_prefill(self.flat.config, self.policy, lengths.tolist(), room=room, **options)

    def placed(self, tree: Any) -> Any:
        """Arrays and shapes as shapes; off a mesh with where they lie."""
        return jax.tree.map(lambda leaf: self._shape(leaf), tree)

    def _shape(self, leaf: Any) -> Any:
        of = jax.ShapeDtypeStruct
        shape = leaf if isinstance(leaf, of) else of(np.shape(leaf), leaf.dtype)
        return shape if self.sharding is None else shape.update(sharding=self.sharding)


def cache_after(work: Work) -> KVCache:
    """What a prefill would leave: pools as the plan sizes them, shapes alone, and tables of numbers."""
    flat, policy, batch = work.flat, work.policy, work.batch
    config, of, parts = flat.config, jax.ShapeDtypeStruct, policy.parts()
    layers, heads, ongoing, needed = config.layers, config.kv_heads, parts.ongoing, work.planned

    def pool(mine: int) -> Pool:
        row: Any = of((batch, mine * work.stretches, config.head_dim), work.dtype)
        scored = ongoing is not None and ongoing.scored
        pos: Any = of(row.shape[:2], jnp.int32)
        score: Any = of(row.shape[:2], jnp.float32) if scored else None
        return Pool(store=jax.eval_shape(parts.store.of, row, row), pos=pos, score=score)

    def rings(rows: int, count: int) -> Any:
        ring = of((batch, heads, config.group, ring_rows(rows), config.head_dim), jnp.float32)
        return (ring,) * count if rows else ()

    table: Any = np.ones((layers, batch, heads), np.int32)
    seen: Any = np.full(batch, work.tokens, np.int32)
    state, reading = None, parts.reading(layers, needed.slots)
    if ongoing is not None:
        count = 0 if ongoing.merge is None else ongoing.merge.thresholds
        tau: Any = np.ones((*table.shape, count), np.float32) if count else None
        recent: Any = np.ones((layers, batch), np.int32)
        state = State(prompt=seen, budget=seen, recent=recent, tau=tau, rings=rings(ongoing.queries, layers))
    elif reading is not None and parts.read is not None:
        reads, kept = parts.read.tokens(seen, layers), rings(reading.ring, len(reading.filters))
        state = reading_state(seen, reads, jnp.asarray(table), kept)
    pools = tuple(pool(mine) for mine in needed.pool_rows(heads, work.stretches))
    tables = Tables(start=table, length=table, limit=table, seen=seen, state=state)
    arrays = Cache(pools=pools, tables=tables)
    return KVCache(
        arrays=arrays, layout=needed.layout, policy=policy, config=config, slots=needed.slots, axes=flat.axes
    )


def traced_loop(work: Work) -> tuple[Any, tuple[Pool, ...]]:
    """The loop over new tokens, and what it writes in place.

    Args:
        work: what it is traced for.

    Returns:
        The loop, traced; the pools, as shapes.
    """
    flat, cache = work.flat, cache_after(work)
    program = program_for(flat, cache, work.implementation)
    if flat.axes is None:
        # Tails are for this machine's processor, which is asked where no mesh says what the program is for.
        program = dataclasses.replace(program, tail=False)
    logits: Any = jax.ShapeDtypeStruct((work.batch, flat.config.vocab), jnp.float32)
    done, eos = jax.ShapeDtypeStruct((work.batch,), bool), jax.ShapeDtypeStruct((1,), jnp.int32)
    draw = jax.eval_shape(loop.draw_of, logits, done, jax.eval_shape(lambda: jax.random.key(0)), eos)
    running = loop.begin(cache.arrays, program=program, size=BLOCK)
    given = loop.loop_arguments(flat, running, draw, work.new, Greedy())
    return loop._loop.trace(*work.placed(given), program=program, size=BLOCK), cache.pools
