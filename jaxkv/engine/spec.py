"""`DecodeSpec`: static config of the programs that run on a cache, and the functions that create it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.attention import (
    PREFILL_ONLY,
    Implementation,
    PrefillDecodeImplementations,
    choose_attention_implementations,
    fit_head_dim,
    get_attention_backend,
    get_cuda_capability,
    parse_attention_implementation,
)
from jaxkv.cache import KVCache, PolicyState
from jaxkv.engine.layers.terms import DecodeAttentionConfig
from jaxkv.engine.plan import bound_segment_length
from jaxkv.loading import LanguageModel
from jaxkv.models.config import ModelConfig
from jaxkv.models.split_decoder import DecoderGraphs, Leaves, SplitDecoder
from jaxkv.policies.gates import Gate
from jaxkv.policies.layer_budgets import UniformLayers
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.reads import WHOLE
from jaxkv.policies.unseen import GateRank
from jaxkv.sharding.mesh import ShardingMesh, place_tree_on_mesh
from jaxkv.sharding.record import get_active_recorder

# Least number of layers of a model that runs in groups of layers on a CPU, and most new tokens of such an answer. The
# loop of a 30-layer model compiles in 5 seconds of CPU time, a group of 3 in 0.7; the loop saves 4 of 35 ms a token.
_GROUPED_LAYERS = 9
_SHORT_ANSWER = 128
# Number of gates whose weights are cached on a model's devices.
_GATES = 2


def create_selection_state(
    prompt: Int[np.ndarray, " B"] | Int[Array, " B"],
    reads: Int[np.ndarray, " B"] | Int[Array, " B"],
    choosable: Int[Array, "L B K"],
    query_buffers: tuple[Float[Array, "B K G R D"], ...] = (),
) -> PolicyState:
    """Return the first `PolicyState` of a policy that keeps all entries and attends to `reads` selected ones (OmniKV).

    `query_buffers` are those of filter layers.
    """
    return PolicyState(
        prompt=jnp.asarray(prompt, jnp.int32),
        budget=jnp.asarray(reads, jnp.int32),
        recent=jnp.zeros(choosable.shape[:2], jnp.int32),
        choosable=jnp.copy(choosable),
        query_buffers=query_buffers,
    )


def get_gate_weights(flat: SplitDecoder, gate: Gate, layer: int, *, abstract: bool = False) -> Any:
    """Return a layer's gate weights on the model's devices, cached for two gates; abstract if asked or while recording.

    Return abstract arrays if `abstract`, and while programs are recorded.
    """
    # Look up first: a gate from a saved cache has no weights, even if an equal gate's are cached.
    weights = gate.host_weights[layer]
    axes = flat.axes
    if abstract or get_active_recorder() is not None:
        weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), weights)
        return weights if axes is None else place_tree_on_mesh(weights, type(weights), axes)
    kept = flat.gates[gate] = flat.gates.pop(gate, {})
    while len(flat.gates) > _GATES:
        del flat.gates[next(iter(flat.gates))]
    if layer not in kept:
        arrays = jax.tree.map(jnp.asarray, weights)
        kept[layer] = arrays if axes is None else place_tree_on_mesh(arrays, type(arrays), axes)
    return kept[layer]


@frozen_dataclass
class DecodeSpec(DecodeAttentionConfig):
    """Static, hashable config of decode programs: decoder graphs, model config, cache layout, policy parts, backend.

    Attributes:
        graphs: static part of the decoder.
        config: shape of the model.
        rolling: True if positions are places within the cache, and pools hold keys before RoPE.
        fused: True if steps of one token run the backend's `compute_decode_attention` and `add_norm`.
        grouped: True if steps run programs of a few layers (`grouped_decode`) instead of one of all layers.
        dtype: dtype of the model.
    """

    graphs: DecoderGraphs
    config: ModelConfig
    rolling: bool
    fused: bool = False
    grouped: bool = False
    dtype: Any = jnp.float32

    @property
    def axes(self) -> ShardingMesh | None:
        """`ShardingMesh` that decode programs run on; None without a mesh."""
        return self.graphs.axes

    def get_layer_graphs(self, layer: int) -> DecoderGraphs:
        """Return the static `DecoderGraphs` of the decoder for one layer; equal for layers of equal `LayerSpec`."""
        return self.graphs.replace_layer_spec(self.config.get_layer_spec(layer))

    @property
    def entry_gate(self) -> Gate | None:
        """Trained gate that scores new entries by hidden states; None if the policy has none, or only appends."""
        rank = self.ongoing.rank
        return rank.gate if isinstance(rank, GateRank) else None

    def collect_block_leaves(self, flat: SplitDecoder) -> tuple[Leaves, ...]:
        """Return each block's arrays as a tuple: the block's parameters, then the layer's gate weights, if any."""
        if self.entry_gate is None:
            return flat.blocks
        abstract = isinstance(flat.ends[0], jax.ShapeDtypeStruct)
        gate = self.entry_gate
        weights = [
            get_gate_weights(flat, gate, layer, abstract=abstract)
            for layer in range(len(flat.blocks))
        ]
        return tuple(
            (*own, *jax.tree.leaves(more)) for own, more in zip(flat.blocks, weights, strict=True)
        )

    def split_gate_leaves(self, leaves: Leaves) -> tuple[Leaves, Any]:
        """Split a block's leaves into the block's parameters and its gate's weights (None without a gate)."""
        if self.entry_gate is None:
            return leaves, None
        tree = self.entry_gate.weights_treedef
        return leaves[: -tree.num_leaves], jax.tree.unflatten(tree, leaves[-tree.num_leaves :])

    def uses_fused_step(self, tokens: int) -> bool:
        """Return True if a step is fused: one token, Llama-like blocks, a store that kernels support, no offloading."""
        fused = self.config.has_llama_blocks and self.fused
        return fused and tokens == 1 and not self.reading.offloaded

    def is_selecting_layer(self, layer: int, tokens: int) -> bool:
        """Return True for filter layers that select positions: in steps of one token, or if `reading.several`."""
        return layer in self.reading.filters and (tokens == 1 or self.reading.several)

    def is_sparse_layer(self, layer: int, tokens: int) -> bool:
        """Return True for a sparse layer in steps where these use selections: of one token or if `reading.several`."""
        reading = self.reading
        return reading.sources[layer] != WHOLE and (tokens == 1 or reading.several)

    def find_query_buffer_index(self, layer: int) -> int | None:
        """Return the index of a layer's query buffer in the cache's tuple of buffers; None without a buffer."""
        if self.ongoing.queries:
            sliding_windows = self.config.sliding_windows
            return None if sliding_windows[layer] else sliding_windows[:layer].count(None)
        if self.reading.filter_query_count and layer in self.reading.filters:
            return self.reading.filters.index(layer)
        return None


def create_cache_spec(
    flat: SplitDecoder,
    cache: KVCache,
    implementation: Implementation = Implementation.XLA,
    *,
    new: int | None = None,
) -> DecodeSpec:
    """Return the `DecodeSpec` of the programs that decode on a given cache, from the cache's static fields.

    `new` is the maximum number of tokens of the answer, 0 for a question; with it, steps may run in groups of layers.
    """
    parts = cache.policy.composed
    grouped = (
        new is not None
        and cache.host_store is None
        and runs_in_layer_groups(flat, parts, implementation, new)
    )
    return create_decode_spec(
        flat,
        parts,
        padded_len=cache.padded_len,
        extended=cache.extended,
        implementation=implementation,
        grouped=grouped,
    )


def create_decode_spec(
    flat: SplitDecoder,
    parts: Parts,
    *,
    padded_len: int,
    extended: bool = False,
    implementation: Implementation = Implementation.XLA,
    grouped: bool = False,
) -> DecodeSpec:
    """Return the `DecodeSpec`, static config of decode programs, for a model, a policy's parts, bucket `padded_len`.

    With `extended`, segments may hold more entries than the policy keeps of prompts (`KVCache.extended`). With
    `grouped`, steps run in groups of layers.
    """
    ongoing = parts.decoding_compression
    most = None
    reading = parts.build_read_config(flat.config.sliding_windows, padded_len)
    implementation = fit_head_dim(implementation, max(flat.config.entry_dims))
    if ongoing.compresses and parts.cache_layout.uses_shared_pool and not extended:
        most = bound_segment_length(parts, padded_len, flat.config.sliding_windows)
    return DecodeSpec(
        graphs=flat.graphs,
        config=flat.config,
        layout=parts.cache_layout,
        rolling=parts.rolling,
        ongoing=ongoing,
        reading=reading,
        widest=most,
        implementation=implementation,
        fused=parts.store.supports_kernels(
            get_attention_backend(implementation).can.steps, flat.config.head_dim
        ),
        grouped=grouped,
        dtype=flat.ends[0].dtype,
    )


def runs_in_layer_groups(
    flat: SplitDecoder, parts: Parts, implementation: Implementation, new: int
) -> bool:
    """Return True if answers of `new` tokens run programs of layer groups: short ones of deep models on a CPU.

    Not on a mesh, and only if layers have equal budgets, or share a pool in which they only append: groups of unequal
    layers would share no program, and each group would evict or decay in the whole pool.
    """
    leaf = flat.ends[0]
    decoding = parts.decoding_compression
    if new > _SHORT_ANSWER or flat.config.layers < _GROUPED_LAYERS:
        return False
    if implementation is not Implementation.XLA or flat.axes is not None:
        return False
    if parts.cache_layout.uses_shared_pool:
        alike = not (decoding.evicts or decoding.updates_scores)
    else:
        alike = not parts.compresses_prompts or isinstance(parts.layers, UniformLayers)
    placed = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return alike and placed and next(iter(leaf.devices())).platform == "cpu"


def select_implementations(
    params: LanguageModel, policy: Policy, asked: Implementation
) -> PrefillDecodeImplementations:
    """Return the `PrefillDecodeImplementations` of attention for a model's devices; chunked prefill uses decode's.

    Args:
        params: the model.
        policy: the compression policy.
        asked: requested implementation.

    Returns:
        The implementations.

    Raises:
        ValueError: for a policy with chunked prefill and an implementation that does not support it.
    """
    read = policy.composed.read
    axes = params.axes
    device = jax.devices()[0] if axes is None else axes.mesh.devices.flat[0]
    chosen = choose_attention_implementations(
        asked,
        platform=jax.default_backend() if axes is None else axes.platform,
        dtype=params.dtype,
        head_dim=params.config.prompt_head_dim,
        entry_dim=max(params.config.entry_dims),
        capability=get_cuda_capability(device),
    )
    if not read.prefill_chunk_tokens:
        return chosen
    remedy = "not supported in chunked prefill, where chunks attend to the cache: leave it out"
    require(
        parse_attention_implementation(asked) not in PREFILL_ONLY, "implementation", asked, remedy
    )
    return dataclasses.replace(chosen, prefill=chosen.decode)
