"""Plans of a prefill: pool sizes and bytes, computed from the prompts' lengths and budgets alone."""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int

from jaxkv._checks import is_int_at_least, is_traced, settled, to_python_scalar
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.attention import Implementation
from jaxkv.engine.lengths import EntryCounts, compute_entry_counts, list_buckets, round_up_to_bucket
from jaxkv.engine.prefill_bytes import PrefillBytes
from jaxkv.machine import memory
from jaxkv.models.config import ModelConfig, SlidingWindows
from jaxkv.policies.head_budgets import get_device_capacity, multiply_rounding_down
from jaxkv.policies.model_policy import resolve_policy_for_model
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.survivors import count_rounding_entries, supports_survivor_mask
from jaxkv.sharding.mesh import NAMES

# Maximum number of prompt lengths per bucket for which the policy's entries are computed.
_SAMPLES = 512
# With this many layers dispatched the device never waits for the host; more would only use memory.
_MOST_AHEAD = 4


@frozen_dataclass
class PrefillPlan:
    """Plan of one prefill: padded length, pool sizes, headroom, budgets, bytes (on a mesh, of one device).

    Attributes:
        padded_len: bucket S of the prompts.
        capacity: entries per kv head of each layer's pool, without headroom; for a shared pool, its total over layers
            and heads.
        headroom: free places behind every segment, per layer.
        pools: size P of each pool, headroom included; on a mesh, of one device's part.
        buffer: size in entries of the candidate buffer of layers that share one budget; None without one.
        dtype: dtype of the entries on the device.
        numbers: the policy's numbers for these lengths.
        rows: entries per kv head `[L, B]` that the policy keeps; None if these depend on the prompts' content.
        cache_bytes: bytes of the cache on the device, headroom and segment tables included.
        full_bytes: bytes of the prompts' entries (keys and values), uncompressed and unpadded.
        peak_bytes: bytes of cache and activations during prefill, weights excluded.
        host_bytes: bytes of offloaded entries in host memory.
        loaded_bytes: maximum bytes of offloaded entries on the device during decoding.
    """

    padded_len: int
    capacity: tuple[int, ...]
    headroom: tuple[int, ...]
    pools: tuple[int, ...]
    buffer: int | None
    dtype: jnp.dtype
    numbers: EntryCounts
    rows: Int[np.ndarray, "L B"] | None
    cache_bytes: int
    full_bytes: int
    peak_bytes: int
    host_bytes: int = 0
    loaded_bytes: int = 0

    @property
    def has_fixed_shapes(self) -> bool:
        """True if the shapes of the cache follow from the plan: no size set by scores, no offloaded entries."""
        return self.rows is not None and not self.host_bytes

    @property
    def budget(self) -> Int[np.ndarray, " B"]:
        """Entries to keep per kv head, averaged over layers: one number for each prompt, `[B]`."""
        return np.asarray(self.numbers.budget)

    def __repr__(self) -> str:
        """Return a one-line summary: number of prompts, padded length, entries per kv head, megabytes; no arrays."""
        size = f"{self.full_bytes / 1e6:.2f} MB full, cache {self.cache_bytes / 1e6:.2f} MB"
        size += f", host {self.host_bytes / 1e6:.2f} MB, peak {self.peak_bytes / 1e6:.2f} MB"
        rows = f"{self.budget.min()} to {self.budget.max()} entries per kv head"
        return f"PrefillPlan({len(self.budget)} prompts of padded length {self.padded_len}; {rows}; {size})"

    def repeat_last_prompt(self, count: int) -> "PrefillPlan":
        """Return the plan with `count` more copies of its last prompt in its entry counts (`numbers`, `rows`) only."""
        index = np.append(np.arange(len(self.budget)), np.full(count, -1))
        numbers, rows = jax.tree.map(lambda each: each[..., index], (self.numbers, self.rows))
        return dataclasses.replace(self, numbers=numbers, rows=rows)


@settled
def plan_prefill(
    config: ModelConfig,
    policy: Policy | type[Policy] | str,
    lengths: Sequence[int] | np.ndarray,
    *,
    dtype=jnp.float32,
    headroom: int | tuple[int, ...] = 0,
    implementation: Implementation = Implementation.XLA,
    mesh: Mesh | AbstractMesh | None = None,
    times: int = 1,
) -> PrefillPlan:
    """Return the `PrefillPlan` of a model, a policy and prompt lengths: pool sizes, entries to keep, and bytes.

    Pool sizes depend on the prompts' buckets only.

    Args:
        config: the model's shape.
        policy: compression policy, or its name or class.
        lengths: number of tokens of each prompt.
        dtype: dtype of the cache.
        headroom: free places behind every segment, or one number per layer.
        implementation: attention implementation; those that run all prompts in one call need more memory.
        mesh: from `sharding.make_model_mesh` or `make_abstract_mesh`; bytes are those of one of its devices.
        times: number of copies of every prompt; bytes include all copies, entries and budgets are per copy.

    Returns:
        The plan.

    Raises:
        ValueError: if the policy does not support its budget for one of the prompts, which the message names.
    """
    lengths = [to_python_scalar(each) for each in lengths]
    headroom = to_python_scalar(headroom)
    tokens = bool(lengths) and all(is_int_at_least(each, 1) for each in lengths)
    require(tokens, "prompt", lengths, "not positive lengths: give at least one token per prompt")
    parts = resolve_policy_for_model(policy, config, dtype=dtype).composed
    length = np.asarray(lengths, np.int64)
    padded_len = round_up_to_bucket(int(length.max()))
    layers = config.layers
    heads = config.kv_heads
    item = jnp.dtype(dtype).itemsize
    numbers = compute_entry_counts(parts, length, config.sliding_windows)
    rows = None
    away = parts.build_read_config(config.sliding_windows, padded_len).offloaded
    # Entries that layers compete for depend on the prompts' content.
    if not parts.layers.depends_on_scores and parts.score_threshold is None:
        rows = np.array(numbers.rows)
        rows[list(away)] = 0
    capacity = _find_most_kept_entries(
        parts,
        tuple(sorted({round_up_to_bucket(n) for n in length.tolist()})),
        config.sliding_windows,
        heads,
    )
    # Pools of offloaded layers hold the entries after the prompt; arrays are never empty.
    capacity = tuple(1 if layer in away else rows for layer, rows in enumerate(capacity))
    headrooms = (headroom,) * layers if isinstance(headroom, int) else tuple(headroom)
    groups, kv_shards, copies = (1, 1, 1) if mesh is None else (mesh.shape[name] for name in NAMES)
    pools = _size_pools_on_device(parts, capacity, padded_len, headrooms, heads, kv_shards)
    buffer = compute_candidate_buffer_size(
        parts, capacity, padded_len, config.sliding_windows, heads, kv_shards
    )
    work = PrefillBytes(
        config=config.shard_config(kv_shards, kv_shards * copies),
        parts=parts,
        batch=-(-len(lengths) * times // groups),
        padded_len=padded_len,
        item=item,
        pool_rows=pools,
        buffer=buffer,
        kv_heads=heads,
        implementation=implementation,
    )
    uncompressed = sum(
        each * int(np.minimum(length, window or length).sum())
        for each, window in zip(config.entry_elements, config.sliding_windows, strict=True)
    )
    full_bytes = times * uncompressed * heads * item
    return PrefillPlan(
        padded_len=padded_len,
        capacity=capacity,
        headroom=headrooms,
        pools=pools,
        buffer=buffer,
        dtype=jnp.dtype(dtype),
        numbers=numbers,
        rows=rows,
        cache_bytes=work.cache_bytes,
        full_bytes=-(-full_bytes // (groups * kv_shards)),
        peak_bytes=work.peak_bytes,
        host_bytes=work.host_bytes,
        loaded_bytes=work.loaded_bytes,
    )


def compute_pool_sizes(
    parts: Parts, config: ModelConfig, padded_len: int, headroom: tuple[int, ...], kv_shards: int
) -> tuple[int, ...]:
    """Return each pool's size P in entries for any prompt of bucket `padded_len`, plus `headroom` places per segment.

    If a mesh splits the kv heads into `kv_shards` parts, P is the size of one part.
    """
    capacity = _find_most_kept_entries(
        parts, (padded_len,), config.sliding_windows, config.kv_heads
    )
    return _size_pools_on_device(parts, capacity, padded_len, headroom, config.kv_heads, kv_shards)


def compute_candidate_buffer_size(
    parts: Parts,
    capacity: tuple[int, ...],
    padded_len: int,
    sliding_windows: SlidingWindows,
    heads: int,
    kv_shards: int,
) -> int | None:
    """Return the size, in entries per sequence, of a device's candidate buffer for a shared budget; or None.

    `capacity`, `padded_len` and `kv_shards` are those of the plan's pools. The budget covers all layers, either jointly
    or in parts by layer weights. The buffer is used if it is smaller than the entries of all layers but one. Mergers
    and second passes need all entries, and models with sliding windows hold few.
    """
    needs_all = parts.merge is not None or parts.needs.replay is not None or any(sliding_windows)
    layers = len(sliding_windows)
    if needs_all or not (
        parts.bounds_layers_early
        or parts.layers.uses_joint_budget
        and supports_survivor_mask(parts.heads, kv_shards)
    ):
        return None
    local = layers * (heads // kv_shards)
    (most,) = _size_pools_on_device(parts, capacity, padded_len, (0,) * layers, heads, kv_shards)
    # Bounds of all layers' entries sum to at most twice the budget, plus one entry per layer.
    rows = (
        2 * most + local
        if parts.bounds_layers_early
        else most + local * count_rounding_entries(parts.heads)
    )
    return rows if rows < (local - heads // kv_shards) * padded_len else None


def _size_pools_on_device(
    parts: Parts,
    capacity: tuple[int, ...],
    padded_len: int,
    headroom: tuple[int, ...],
    heads: int,
    kv_shards: int,
) -> tuple[int, ...]:
    """Return each pool's size P in entries on one device, headroom included: one per layer, or one shared pool's."""
    local = heads // kv_shards
    layers = len(headroom)
    share = get_device_capacity(parts.heads)
    if parts.cache_layout.uses_shared_pool:
        capacity = (capacity[0] // heads,)
        padded_len = layers * padded_len
    headrooms = (sum(headroom),) if parts.cache_layout.uses_shared_pool else headroom
    # Heads of one device may win more than their even share, up to the policy's capacity and whole prompts.
    most = [
        min(multiply_rounding_down(share, local * rows), heads * rows, local * padded_len)
        for rows in capacity
    ]
    return tuple(rows + local * headroom for rows, headroom in zip(most, headrooms, strict=True))


@lru_cache(maxsize=256)
def _find_most_kept_entries(
    parts: Parts, sizes: tuple[int, ...], sliding_windows: SlidingWindows, heads: int
) -> tuple[int, ...]:
    """Return the most entries that prompts of buckets `sizes` keep: per kv head for each layer, or a shared pool's sum.

    A pool shared by all layers has one total over layers and heads. Shapes must not depend on exact lengths.
    """
    layers = len(sliding_windows)
    whole = sliding_windows.count(None)
    near = sum(min(max(sizes), window or 0) for window in sliding_windows)
    if not parts.compresses_prompts:
        return tuple(min(max(sizes), window or max(sizes)) for window in sliding_windows)
    most = np.zeros(layers, np.int64)
    shared = 0
    for top in sizes:
        low, _ = list_buckets(top)[-1]
        step = max(1, -(-(top - low) // _SAMPLES))
        lengths = np.unique(np.append(np.arange(low, top, step), top))
        numbers = compute_entry_counts(parts, lengths, sliding_windows, strict=False)
        if parts.layers.depends_on_scores:
            budget = np.asarray(numbers.budget)
            # A clamped ratio can peak at a shorter prompt, where spans counted from the end overlap less.
            between = step if step > 1 and budget.max() > budget[-1] else 0
            always_kept = np.minimum(numbers.always_kept + between, top)
            bound = parts.restrict_to_full_attention(sliding_windows).layers.bound_total_entries
            reach = bound(np.minimum(budget + between, top), lengths, always_kept, layers=whole)
            shared = max(shared, min(int(reach.max()), whole * top))
            continue
        rows = np.asarray(numbers.rows)
        # Between samples a layer gains at most one entry per token, and rounding may add one.
        varies = (rows != rows[:, :1]).any(axis=1) & (step > 1)
        most = np.maximum(most, np.minimum(rows.max(axis=1) + np.where(varies, step, 0), top))
    if parts.layers.depends_on_scores:
        return (heads * (shared + near),)
    return tuple(int(rows) for rows in most)


@lru_cache(maxsize=256)
def bound_segment_length(
    parts: Parts, padded_len: int, sliding_windows: SlidingWindows
) -> int | None:
    """Return the most entries of a shared pool's segment in decoding, the new token's included; None if unbounded.

    None if unbounded: if layers grow without limit (as with `sliding_windows`), or if recompression may give a segment
    more entries than the prompt has.
    """
    if not parts.evicts_while_decoding or parts.mask_layers_without_eviction(sliding_windows).any():
        return None
    most = padded_len
    if parts.heads.is_uniform:
        lengths = np.arange(1, padded_len + 1)
        budget = parts.compute_prompt_budgets(
            lengths, parts.keep.count_always_kept(lengths), strict=False
        )
        most = int(parts.layers.bound_layer_entries(budget, lengths).max())
    return max(most, parts.growth_limit or 0) + 1


def count_layers_ahead(needed: PrefillPlan, placed: Array) -> int:
    """Return how many layers (0 to 4) to dispatch ahead of the device, by its spare memory; 0 if that is unknown."""
    if is_traced(placed):
        return 0
    spare = memory.get_allocator_bytes(placed.addressable_shards[0].device)
    if spare is None:
        return 0
    return max(
        0, min(_MOST_AHEAD, (spare - needed.peak_bytes) // (needed.peak_bytes - needed.cache_bytes))
    )


def check_memory(needed: PrefillPlan, device: jax.Device | None = None) -> None:
    """Raise MemoryError if the plan's bytes exceed the free memory of `device` (by default JAX's) or of the host."""
    device = memory.default_device() if device is None else device
    in_one = device.platform == "cpu"
    here = needed.peak_bytes + (needed.host_bytes if in_one else 0)
    memory.require_free_bytes(
        here, "the plan", device, detail=f" ({needed.cache_bytes:,} of them cache)"
    )
    free = memory.get_machine_bytes()
    if not in_one and free is not None and needed.host_bytes > free:
        raise MemoryError(
            f"host_bytes={needed.host_bytes:,}: the plan needs more host memory than the {free:,} bytes free. "
            "Offload fewer layers, or lower the batch size or prompt length."
        )
