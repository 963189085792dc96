"""The engine's programs of prefill and decoding, traced on abstract arrays for devices, present or not."""

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv._checks import is_traced
from jaxkv.attention import Implementation
from jaxkv.cache import KVCache, Pool
from jaxkv.engine import token_loop
from jaxkv.engine.embedding import logits_of
from jaxkv.engine.headroom import first_headroom
from jaxkv.engine.lengths import BLOCK
from jaxkv.engine.plan import PrefillPlan, plan_prefill
from jaxkv.engine.prefill import Prompts, read
from jaxkv.engine.progress import run_to_end
from jaxkv.engine.sampling import GREEDY
from jaxkv.engine.spec import spec_for
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder, Flat
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import Axes
from jaxkv.sharding.parameters import spec_of
from jaxkv.sharding.record import RecordedCall, record, weigh

# Purposes of prefill programs, by function name.
_NAMES = {
    "observe": "score",
    "_choose": "choose",
    "_merged": "merge",
    "pack_shared": "pack",
    "thinned": "thin",
    "chosen_apart": "choose",
    "pack_chosen": "pack",
    "bounds_of": "bounds",
    "logits_of": "logits",
}
# Programs on a few integers: their memory is negligible, so they are not compiled.
SMALL = ("placed", "counted", "fill_query_buffer")


def abstract_model(
    config: ModelConfig,
    dtype: Any = jnp.bfloat16,
    axes: Axes | None = None,
    *,
    weights: str | None = None,
) -> Flat:
    """Build a flattened decoder of abstract parameters (shapes and dtypes), sharded if `axes` is given."""
    decoder = Decoder(config, dtype=dtype, weights=weights)
    if axes is None:
        return Flat(decoder)
    graph, leaves = nnx.split(decoder)

    def placed(path: Any, leaf: Any) -> Any:
        """Return a parameter's abstract array with its sharding on the mesh (mapped over all parameters)."""
        name = next(str(each.key) for each in reversed(path) if hasattr(each, "key"))
        return leaf.update(sharding=jax.sharding.NamedSharding(axes.mesh, spec_of(name)))

    return Flat(nnx.merge(graph, jax.tree_util.tree_map_with_path(placed, leaves)))


class Prefilled(NamedTuple):
    """A prefill traced on abstract arrays: the recorded `calls` of its programs, and the `cache` that it returns."""

    calls: list[RecordedCall]
    cache: KVCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceInputs:
    """Abstract model, policy and batch; plans and traces the engine's prefill for them, without arrays."""

    flat: Flat
    policy: Policy
    batch: int
    tokens: int
    new: int = BLOCK
    sharding: Any = None
    implementation: Implementation = Implementation.PALLAS

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of parameters, activations and cache."""
        return jnp.dtype(self.flat.ends[0].dtype)

    @property
    def planned(self) -> PrefillPlan:
        """The engine's `PrefillPlan` (entries and bytes) for these prompts, with headroom for the new tokens."""
        lengths = np.full(self.batch, self.tokens)
        headroom = first_headroom(
            self.policy.composed, self.flat.config.sliding_windows, lengths, self.new
        )
        return plan_prefill(
            self.flat.config,
            self.policy,
            lengths.tolist(),
            dtype=self.dtype,
            headroom=headroom,
            implementation=self.implementation,
            mesh=self.flat.mesh,
        )

    @cached_property
    def prefill(self) -> Prefilled:
        """Prefill traced on abstract arrays, as `Prefilled`; computed once."""
        flat, planned, of = self.flat, self.planned, jax.ShapeDtypeStruct

        def walk(tokens: Any, lengths: Any, numbers: Any, key: Any) -> Any:
            """Run prefill on abstract arrays; return cache, logits, and the prompt arrays that live to its end."""
            needed = dataclasses.replace(planned, numbers=numbers)
            prompts = Prompts(flat, tokens, lengths, self.policy, needed, key, self.implementation)
            cache = run_to_end(read(prompts))
            logits = logits_of(flat.ends, prompts.x, graphs=flat.graphs)
            # Angles are a dict by rotary embedding, whose keys JAX cannot sort.
            held = [
                list(each.values()) if isinstance(each, dict) else each
                for each in vars(prompts).values()
            ]
            return cache, logits, [leaf for leaf in jax.tree.leaves(held) if is_traced(leaf)]

        calls, (cache, *_) = record(
            walk,
            of((self.batch, planned.padded_len), jnp.int32),
            of((self.batch,), jnp.int32),
            jax.tree.map(lambda each: each.astype(np.int32), planned.numbers),
            of((), jax.random.key(0).dtype),
            resident=(flat.ends, flat.blocks),
            sharding=self.sharding,
        )
        return Prefilled(calls, cache)

    def placed(self, tree: Any) -> Any:
        """Replace each array of a pytree by its `ShapeDtypeStruct`, with `sharding` if it is set."""

        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            """Return the `ShapeDtypeStruct` of one array (mapped over the pytree)."""
            known = isinstance(leaf, jax.ShapeDtypeStruct)
            made = leaf if known else jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)
            return made if self.sharding is None else made.update(sharding=self.sharding)

        return jax.tree.map(shape, tree)


def traced_loop(work: TraceInputs) -> tuple[Any, tuple[Pool, ...]]:
    """Trace the decode loop on abstract arrays; return the traced program and the abstract pools that it updates."""
    flat, cache = work.flat, work.prefill.cache
    spec = spec_for(flat, cache, work.implementation)
    logits: Any = jax.ShapeDtypeStruct((work.batch, flat.config.vocab), jnp.float32)
    done = jax.ShapeDtypeStruct((work.batch,), bool)
    eos = jax.ShapeDtypeStruct((1,), jnp.int32)
    state = jax.eval_shape(
        token_loop.first_sampling_state,
        logits,
        done,
        jax.eval_shape(lambda: jax.random.key(0)),
        eos,
    )
    given = token_loop.loop_arguments(flat, cache.arrays, state, work.new, GREEDY, 0, spec=spec)
    return token_loop._loop.trace(*work.placed(given), spec=spec, size=BLOCK), cache.pools


def prefill_calls(work: TraceInputs) -> Iterator[RecordedCall]:
    """Yield the largest `RecordedCall` of each purpose in a prefill, without tiny programs.

    Layers of different specs are different purposes: a sliding-window layer runs another program, with other
    temporaries.
    """
    heaviest = dict[Any, RecordedCall]()
    for call in work.prefill.calls:
        if call.name not in SMALL:
            graphs = call.options.get("graphs")
            kind = (
                "top layer" if call.options.get("last") else _NAMES.get(call.name, call.name),
                jax.tree.structure(call.arguments),
                None if graphs is None else graphs.spec,
            )
            heaviest[kind] = max(heaviest.get(kind, call), call, key=_live_bytes)
    for (name, *_), call in heaviest.items():
        yield dataclasses.replace(call, name=name)


def _live_bytes(call: RecordedCall) -> int:
    """Bytes on one device during a recorded call: its arguments, its results and all other live arrays."""
    return call.beside + weigh(call.arguments) + weigh(call.results)
