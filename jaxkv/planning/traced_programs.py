"""The engine's programs of prefill and decoding, traced on abstract arrays for devices, present or not."""

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention import Implementation
from jaxkv.cache import EntryPool
from jaxkv.engine.headroom import compute_prefill_headroom
from jaxkv.engine.lengths import BLOCK
from jaxkv.engine.plan import PrefillPlan, plan_prefill
from jaxkv.engine.sampling import GREEDY
from jaxkv.engine.traced import TracedPrefill, trace_prefill, trace_token_loop
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.split_decoder import SplitDecoder
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import ShardingMesh
from jaxkv.sharding.parameters import get_parameter_spec
from jaxkv.sharding.record import RecordedCall, count_device_bytes

# Purposes of prefill programs, by function name.
_NAMES = {
    "observe": "score",
    "_choose": "choose",
    "_run_merger": "merge",
    "pack_into_shared_pool": "pack",
    "update_candidate_buffer": "thin",
    "select_entries_per_head": "choose",
    "pack_buffer_entries": "pack",
    "compute_page_bounds": "bounds",
    "compute_logits": "logits",
}
# Programs on a few integers: their memory is negligible, so they are not compiled.
SMALL = ("compute_all_segment_starts", "count_kept_by_layer", "fill_query_buffer")


def build_abstract_model(
    config: ModelConfig,
    dtype: Any = jnp.bfloat16,
    axes: ShardingMesh | None = None,
    *,
    weights: str | None = None,
) -> SplitDecoder:
    """Return a `SplitDecoder` with abstract parameters (shapes and dtypes), sharded over a mesh if `axes` is given."""
    decoder = Decoder(config, dtype=dtype, weights=weights)
    if axes is None:
        return SplitDecoder(decoder)
    graph, leaves = nnx.split(decoder)

    def shard_parameter(path: Any, leaf: Any) -> Any:
        """Return a parameter's abstract array with its sharding on the mesh, by the last name in its path."""
        name = next(str(each.key) for each in reversed(path) if hasattr(each, "key"))
        return leaf.update(sharding=jax.sharding.NamedSharding(axes.mesh, get_parameter_spec(name)))

    return SplitDecoder(nnx.merge(graph, jax.tree_util.tree_map_with_path(shard_parameter, leaves)))


@frozen_dataclass
class TraceInputs:
    """Abstract model, policy, batch and prompt length, from which properties plan and trace the engine's prefill."""

    flat: SplitDecoder
    policy: Policy
    batch: int
    tokens: int
    new: int = BLOCK
    sharding: Any = None
    implementation: Implementation = Implementation.PALLAS

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of embedding, activations and cache, also of linear weights unless these are quantised."""
        return jnp.dtype(self.flat.ends[0].dtype)

    @property
    def prefill_plan(self) -> PrefillPlan:
        """The engine's `PrefillPlan` of the abstract prompts: entries, bytes, with headroom for new tokens."""
        lengths = np.full(self.batch, self.tokens)
        headroom = compute_prefill_headroom(
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
    def traced_prefill(self) -> TracedPrefill:
        """`TracedPrefill` of the abstract prompts: traced on shapes and dtypes, not run; computed once."""
        return trace_prefill(
            self.flat,
            self.policy,
            self.prefill_plan,
            implementation=self.implementation,
            sharding=self.sharding,
        )


def trace_planned_loop(work: TraceInputs) -> tuple[Any, tuple[EntryPool, ...]]:
    """Trace the decode loop on abstract arrays; return the traced program, and the pools that the program updates."""
    cache = work.traced_prefill.cache
    traced = trace_token_loop(
        work.flat,
        cache,
        implementation=work.implementation,
        sampling=GREEDY,
        ends=1,
        size=BLOCK,
        sharding=work.sharding,
    )
    return traced, cache.pools


def select_largest_calls(work: TraceInputs) -> Iterator[RecordedCall]:
    """Yield the `RecordedCall` with the most live bytes for each purpose of a prefill's programs, except tiny ones.

    Layers of different specs are different purposes: a sliding-window layer runs another program, with other
    temporaries.
    """
    heaviest = dict[Any, RecordedCall]()
    for call in work.traced_prefill.calls:
        if call.name not in SMALL:
            graphs = call.options.get("graphs")
            kind = (
                "top layer" if call.options.get("last") else _NAMES.get(call.name, call.name),
                jax.tree.structure(call.arguments),
                None if graphs is None else graphs.spec,
            )
            heaviest[kind] = max(heaviest.get(kind, call), call, key=_count_live_bytes)
    for (name, *_), call in heaviest.items():
        yield dataclasses.replace(call, name=name)


def _count_live_bytes(call: RecordedCall) -> int:
    """Return the bytes on one device during a recorded call: arguments, results and all other live arrays."""
    return call.beside + count_device_bytes(call.arguments) + count_device_bytes(call.results)
