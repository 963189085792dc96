"""`Spec`: static config of the programs that run on a cache, and the functions that create it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv._errors import require
from jaxkv.attention import (
    PREFILL_ONLY,
    Implementation,
    Implementations,
    backend_of,
    capability_of,
    choose,
    named,
)
from jaxkv.cache import KVCache, State
from jaxkv.engine.layers.terms import Terms
from jaxkv.engine.plan import widest
from jaxkv.loading import LanguageModel
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Flat, Graphs, Leaves
from jaxkv.policies.gates import Gate
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.reads import WHOLE
from jaxkv.policies.unseen import GateRank
from jaxkv.sharding.mesh import Axes, tree_placed
from jaxkv.sharding.record import recorder

# Number of gates whose weights are cached on a model's devices.
_GATES = 2


def reading_state(
    prompt: Int[np.ndarray, " B"] | Int[Array, " B"],
    reads: Int[np.ndarray, " B"] | Int[Array, " B"],
    choosable: Int[Array, "L B K"],
    query_buffers: tuple[Float[Array, "B K G R D"], ...] = (),
) -> State:
    """Return the initial `State` of a policy that keeps all entries and attends to `reads` selected ones (OmniKV).

    `query_buffers` are those of filter layers.
    """
    return State(
        prompt=jnp.asarray(prompt, jnp.int32),
        budget=jnp.asarray(reads, jnp.int32),
        recent=jnp.zeros(choosable.shape[:2], jnp.int32),
        choosable=jnp.copy(choosable),
        query_buffers=query_buffers,
    )


def gate_weights(flat: Flat, gate: Gate, layer: int, *, abstract: bool = False) -> Any:
    """Return one layer's gate weights on the model's devices, cached for the two most recently used gates.

    Return abstract arrays if `abstract`, and while programs are recorded.
    """
    # Look up first: a gate from a saved cache has no weights, even if an equal gate's are cached.
    weights, axes = gate.weights[layer], flat.axes
    if abstract or recorder() is not None:
        weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), weights)
        return weights if axes is None else tree_placed(weights, type(weights), axes)
    kept = flat.gates[gate] = flat.gates.pop(gate, {})
    while len(flat.gates) > _GATES:
        del flat.gates[next(iter(flat.gates))]
    if layer not in kept:
        arrays = jax.tree.map(jnp.asarray, weights)
        kept[layer] = arrays if axes is None else tree_placed(arrays, type(arrays), axes)
    return kept[layer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec(Terms):
    """Static, hashable config of decode programs: model graphs, cache layout, policy parts, backend.

    Attributes:
        graphs: static part of the decoder.
        config: shape of the model.
        rolling: True if positions are places within the cache, and pools hold keys before RoPE.
        fused: True if steps of one token run the backend's `decode_token` and `add_norm`.
        dtype: dtype of the model.
    """

    graphs: Graphs
    config: ModelConfig
    rolling: bool
    fused: bool = False
    dtype: Any = jnp.float32

    @property
    def axes(self) -> Axes | None:
        """Axes of the mesh that the programs run on; None without a mesh."""
        return self.graphs.axes

    def graphs_of(self, layer: int) -> Graphs:
        """Return the static part of the decoder for one layer; equal for layers of equal spec."""
        return self.graphs.of(self.config.spec_of(layer))

    @property
    def gate(self) -> Gate | None:
        """Trained gate that scores new entries by their hidden states; None if the policy has none or only appends."""
        rank = self.ongoing.rank
        return rank.gate if isinstance(rank, GateRank) else None

    def blocks_of(self, flat: Flat) -> tuple[Leaves, ...]:
        """Return the leaves of each block of a model: its parameters, then the layer's gate weights, if any."""
        if self.gate is None:
            return flat.blocks
        abstract, gate = isinstance(flat.ends[0], jax.ShapeDtypeStruct), self.gate
        weights = [
            gate_weights(flat, gate, layer, abstract=abstract) for layer in range(len(flat.blocks))
        ]
        return tuple(
            (*own, *jax.tree.leaves(more)) for own, more in zip(flat.blocks, weights, strict=True)
        )

    def parted(self, leaves: Leaves) -> tuple[Leaves, Any]:
        """Split a block's leaves from `blocks_of` into its parameters and its gate's weights (None without a gate)."""
        if self.gate is None:
            return leaves, None
        tree = self.gate.tree
        return leaves[: -tree.num_leaves], jax.tree.unflatten(tree, leaves[-tree.num_leaves :])

    def streams(self, tokens: int) -> bool:
        """Return True if a step of this many tokens (only 1) runs the backend's `decode_token` and `add_norm`."""
        fused = self.config.alternates and self.fused
        return fused and tokens == 1 and not self.reading.offloaded

    def chooses(self, layer: int, tokens: int) -> bool:
        """Return True for filter layers that select positions: in steps of one token, or if `reading.several`."""
        return layer in self.reading.filters and (tokens == 1 or self.reading.several)

    def sparse(self, layer: int, tokens: int) -> bool:
        """Return True if the layer attends to selected entries only: in steps of one token, or if `reading.several`."""
        reading = self.reading
        return reading.sources[layer] != WHOLE and (tokens == 1 or reading.several)

    def query_buffer_index(self, layer: int) -> int | None:
        """Return the index of the layer's query buffer in the cache's tuple; None without a buffer."""
        if self.ongoing.queries:
            sliding_windows = self.config.sliding_windows
            return None if sliding_windows[layer] else sliding_windows[:layer].count(None)
        if self.reading.query_buffer and layer in self.reading.filters:
            return self.reading.filters.index(layer)
        return None


def spec_for(
    flat: Flat, cache: KVCache, implementation: Implementation = Implementation.XLA
) -> Spec:
    """Return the `Spec` of decode programs on a cache, from the cache's static fields."""
    return specialise(
        flat,
        cache.policy.composed,
        padded_len=cache.padded_len,
        extended=cache.extended,
        implementation=implementation,
    )


def specialise(
    flat: Flat,
    parts: Parts,
    *,
    padded_len: int,
    extended: bool = False,
    implementation: Implementation = Implementation.XLA,
) -> Spec:
    """Return the `Spec` of decode programs for a policy and prompts of bucket `padded_len`.

    With `extended`, segments may hold more entries than the policy keeps of prompts (`KVCache.extended`).
    """
    ongoing, most = parts.ongoing, None
    reading = parts.reading(flat.config.sliding_windows, padded_len)
    if ongoing.compresses and parts.layout.one_pool and not extended:
        most = widest(parts, padded_len, flat.config.sliding_windows)
    return Spec(
        graphs=flat.graphs,
        config=flat.config,
        layout=parts.layout,
        rolling=parts.rolling,
        ongoing=ongoing,
        reading=reading,
        widest=most,
        implementation=implementation,
        fused=parts.store.read_by(backend_of(implementation).can.steps, flat.config.head_dim),
        dtype=flat.ends[0].dtype,
    )


def implementations_for(
    params: LanguageModel, policy: Policy, asked: Implementation
) -> Implementations:
    """Select the attention implementations of prefill and decode for a model's devices; chunks use decode's.

    Args:
        params: the model.
        policy: the compression policy.
        asked: requested implementation.

    Returns:
        The implementations.

    Raises:
        ValueError: for a policy with chunked prefill and an implementation that does not support it.
    """
    read, axes = policy.composed.read, params.axes
    device = jax.devices()[0] if axes is None else axes.mesh.devices.flat[0]
    chosen = choose(
        asked,
        platform=jax.default_backend() if axes is None else axes.platform,
        dtype=params.dtype,
        head_dim=params.config.head_dim,
        capability=capability_of(device),
    )
    if not read.chunk:
        return chosen
    remedy = "not supported in chunked prefill, where chunks attend to the cache: leave it out"
    require(named(asked) not in PREFILL_ONLY, "implementation", asked, remedy)
    return dataclasses.replace(chosen, prefill=chosen.decode)
