"""The engine's own programs, traced for arrays that are shapes alone, on devices that need not be there."""

import dataclasses
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv._values import is_traced
from jaxkv.attention import Implementation
from jaxkv.cache import KVCache, Pool
from jaxkv.engine import loop
from jaxkv.engine.compress import finished
from jaxkv.engine.growth import first_room
from jaxkv.engine.lengths import by_length
from jaxkv.engine.plan import PrefillPlan, plan_prefill
from jaxkv.engine.prefill import logits_of, read
from jaxkv.engine.spec import spec_for
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder, Flat
from jaxkv.policies.policy import Method
from jaxkv.sampling import Greedy
from jaxkv.sharding.mesh import Axes
from jaxkv.sharding.parameters import spec_of
from jaxkv.sharding.record import Call, record

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


class Prefilled(NamedTuple):
    """A prefill on shapes: the calls of its programs, in order, and the cache that it leaves."""

    calls: list[Call]
    cache: KVCache


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

    @cached_property
    def prefill(self) -> Prefilled:
        """The engine's prefill of these prompts, run on shapes."""
        flat, needed, of = self.flat, self.planned, jax.ShapeDtypeStruct
        told = by_length(self.policy.parts(), np.full(self.batch, self.tokens), flat.config.layers)

        def walk(tokens: Any, lengths: Any, told: Any, key: Any) -> Any:
            given = (flat, tokens, lengths, told, self.policy, needed)
            prompts, cache = finished(read(*given, key=key, implementation=self.implementation))
            logits = logits_of(flat.ends, prompts.x, graphs=flat.graphs)
            # What prompts are made of is held until they are done.
            return cache, logits, [leaf for leaf in jax.tree.leaves(vars(prompts)) if is_traced(leaf)]

        calls, (cache, *_) = record(
            walk,
            of((self.batch, needed.slots), jnp.int32),
            of((self.batch,), jnp.int32),
            jax.tree.map(lambda numbers: numbers.astype(np.int32), told),
            of((), jax.random.key(0).dtype),
            resident=(flat.ends, flat.blocks),
            sharding=self.sharding,
        )
        return Prefilled(calls, cache)

    def placed(self, tree: Any) -> Any:
        """Arrays and shapes as shapes; off a mesh with where they lie."""
        return jax.tree.map(lambda leaf: self._shape(leaf), tree)

    def _shape(self, leaf: Any) -> Any:
        of = jax.ShapeDtypeStruct
        shape = leaf if isinstance(leaf, of) else of(np.shape(leaf), leaf.dtype)
        return shape if self.sharding is None else shape.update(sharding=self.sharding)


def traced_loop(work: Work) -> tuple[Any, tuple[Pool, ...]]:
    """The loop over new tokens, and what it writes in place.

    Args:
        work: what it is traced for.

    Returns:
        The loop, traced; the pools, as shapes.
    """
    flat, cache = work.flat, work.prefill.cache
    spec = spec_for(flat, cache, work.implementation)
    if flat.axes is None:
        # Tails are for this machine's processor, which is asked where no mesh says what the program is for.
        spec = dataclasses.replace(spec, tail=False)
    logits: Any = jax.ShapeDtypeStruct((work.batch, flat.config.vocab), jnp.float32)
    done, eos = jax.ShapeDtypeStruct((work.batch,), bool), jax.ShapeDtypeStruct((1,), jnp.int32)
    draw = jax.eval_shape(loop.draw_of, logits, done, jax.eval_shape(lambda: jax.random.key(0)), eos)
    running = loop.begin(cache.arrays, spec=spec, size=BLOCK)
    given = loop.loop_arguments(flat, running, draw, work.new, Greedy())
    return loop._loop.trace(*work.placed(given), spec=spec, size=BLOCK), cache.pools
