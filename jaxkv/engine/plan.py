"""Plans of a prefill, from prompts' lengths and budgets alone: entries of pools, and bytes."""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int

from jaxkv._checks import is_traced, is_whole, plain, settled
from jaxkv._errors import require
from jaxkv.attention import Implementation
from jaxkv.engine.lengths import ByLength, bucket, buckets, by_length
from jaxkv.engine.prefill_bytes import PrefillBytes
from jaxkv.machine import memory
from jaxkv.models.config import ModelConfig, SlidingWindows
from jaxkv.policies.head_budgets import capacity_of, most_rows
from jaxkv.policies.model_policy import policy_for
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.survivors import bounded, rounding_rows
from jaxkv.sharding.mesh import NAMES

# Most prompt lengths of a bucket for which the policy's entries are computed.
_SAMPLES = 512
# With this many layers dispatched the device never waits for the host; more would only hold memory.
_MOST_AHEAD = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """Plan of one prefill: padded prompt length, pool sizes, free places, row budgets, bytes (on a mesh, of one device).

    Attributes:
        padded_len: S, the prompts' bucket.
        capacity: entries per kv head of each layer's pool, before room; for a shared pool its total over layers and heads.
        headroom: entries left behind every segment of each layer.
        pools: P of each pool, room included; on a mesh, of the part that one device holds.
        buffer: entries of the buffer of candidates of layers that share one budget; None without one.
        dtype: in which the device holds entries.
        numbers: the policy's numbers for these lengths.
        rows: `[L, B]` entries per kv head the policy promises, or None where that depends on the prompts' content.
        cache_bytes: bytes of the cache on the device, room and segment tables included.
        full_bytes: bytes of these prompts' entries (keys and values), uncompressed and unpadded.
        peak_bytes: cache and activations of prefill together, weights excluded.
        host_bytes: bytes of offloaded entries in host memory.
        loaded_bytes: the most of these that are on the device at once while tokens are sampled.
    """

    padded_len: int
    capacity: tuple[int, ...]
    headroom: tuple[int, ...]
    pools: tuple[int, ...]
    buffer: int | None
    dtype: jnp.dtype
    numbers: ByLength
    rows: Int[np.ndarray, "L B"] | None
    cache_bytes: int
    full_bytes: int
    peak_bytes: int
    host_bytes: int = 0
    loaded_bytes: int = 0

    @property
    def budget(self) -> Int[np.ndarray, " B"]:
        """Entries per kv head of each prompt, averaged over layers."""
        return np.asarray(self.numbers.budget)

    def __repr__(self) -> str:
        """One-line text: number of prompts, padded length, entries per kv head, megabytes full and at peak; no arrays."""
        size = f"{self.full_bytes / 1e6:.2f} MB full, cache {self.cache_bytes / 1e6:.2f} MB"
        size += f", host {self.host_bytes / 1e6:.2f} MB, peak {self.peak_bytes / 1e6:.2f} MB"
        rows = f"{self.budget.min()} to {self.budget.max()} entries per kv head"
        return f"PrefillPlan({len(self.budget)} prompts in {self.padded_len} slots; {rows}; {size})"

    def with_copies(self, count: int) -> "PrefillPlan":
        """Copy of the plan with its last prompt repeated `count` more times; its byte fields are not recomputed."""
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
    """Computes the `PrefillPlan` (pool sizes, budgets, bytes) for prompt lengths; ValueError for an impossible budget.

    Pool sizes follow from the prompts' buckets alone.

    Args:
        config: the model's shape.
        policy: the compression, or its name or class.
        lengths: tokens of each prompt.
        dtype: of the cache.
        headroom: entries to leave behind every segment; one number, or one for each layer.
        implementation: what computes attention: backends that take all prompts at once take more memory.
        mesh: from `sharding.model_mesh` or `abstract_mesh`, one of whose devices bytes are counted for.
        times: how often every prompt is there; bytes are those of all, entries and budgets of one each.

    Returns:
        The plan.

    Raises:
        ValueError: if the budget cannot be honoured for one of the prompts, naming it.
    """
    lengths, headroom = [plain(each) for each in lengths], plain(headroom)
    tokens = bool(lengths) and all(is_whole(each, 1) for each in lengths)
    require(tokens, "prompt", lengths, "every prompt needs at least one token")
    parts, length = policy_for(policy, config, dtype=dtype).composed, np.asarray(lengths, np.int64)
    padded_len = bucket(int(length.max()))
    layers, heads, item = config.layers, config.kv_heads, jnp.dtype(dtype).itemsize
    numbers = by_length(parts, length, config.sliding_windows)
    rows, away = None, parts.reading(config.sliding_windows, padded_len).offloaded
    # What layers compete for depends on the prompts' content.
    if not parts.layers.from_scores and parts.threshold is None:
        rows = np.array(numbers.rows)
        rows[list(away)] = 0
    capacity = _capacity(
        parts, tuple(sorted({bucket(n) for n in length.tolist()})), config.sliding_windows, heads
    )
    # Pools of offloaded layers hold what comes after the prompt; no array is ever empty.
    capacity = tuple(1 if layer in away else rows for layer, rows in enumerate(capacity))
    headrooms = (headroom,) * layers if isinstance(headroom, int) else tuple(headroom)
    groups, kv_shards, copies = (1, 1, 1) if mesh is None else (mesh.shape[name] for name in NAMES)
    pools = _pools(parts, capacity, padded_len, headrooms, heads, kv_shards)
    buffer = buffer_rows(parts, capacity, padded_len, config.sliding_windows, heads, kv_shards)
    work = PrefillBytes(
        config=config.on_one_of(kv_shards, kv_shards * copies),
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
        int(np.minimum(length, window or length).sum()) for window in config.sliding_windows
    )
    full_bytes = times * uncompressed * heads * 2 * config.head_dim * item
    return PrefillPlan(
        padded_len=padded_len,
        capacity=capacity,
        headroom=headrooms,
        pools=pools,
        buffer=buffer,
        dtype=jnp.dtype(dtype),
        numbers=numbers,
        rows=rows,
        cache_bytes=work.cache,
        full_bytes=-(-full_bytes // (groups * kv_shards)),
        peak_bytes=work.peak,
        host_bytes=work.host,
        loaded_bytes=work.loaded,
    )


def pools_for(
    parts: Parts, config: ModelConfig, padded_len: int, headroom: tuple[int, ...], kv_shards: int
) -> tuple[int, ...]:
    """Tuple of pool sizes P in entries for any prompt of bucket `padded_len` plus `headroom[l]` free places per segment of layer l.

    On a mesh whose devices hold `kv_shards` parts of the kv heads, P of one part.
    """
    capacity = _capacity(parts, (padded_len,), config.sliding_windows, config.kv_heads)
    return _pools(parts, capacity, padded_len, headroom, config.kv_heads, kv_shards)


def buffer_rows(
    parts: Parts,
    capacity: tuple[int, ...],
    padded_len: int,
    sliding_windows: SlidingWindows,
    heads: int,
    kv_shards: int,
) -> int | None:
    """Entries of the buffer of candidates in a prefill whose layers share one budget; None if no buffer is used.

    `capacity`, `padded_len` and `kv_shards` are as for a plan's pools. A buffer serves one budget over all layers, or shares
    of it by layers' weights, where it weighs less than the entries of all layers but one. Mergers and second passes over
    the prompt need all of these, and `sliding_windows`, those of the model's layers, leave few to hold.
    """
    needs_all = parts.merge is not None or parts.needs.replay is not None or any(sliding_windows)
    layers = len(sliding_windows)
    if needs_all or not (parts.narrows or parts.layers.joint and bounded(parts.heads, kv_shards)):
        return None
    mine = layers * (heads // kv_shards)
    (most,) = _pools(parts, capacity, padded_len, (0,) * layers, heads, kv_shards)
    # Bounds of layers' entries sum to twice the budget, and one entry more in each.
    rows = 2 * most + mine if parts.narrows else most + mine * rounding_rows(parts.heads)
    return rows if rows < (mine - heads // kv_shards) * padded_len else None


def _pools(
    parts: Parts,
    capacity: tuple[int, ...],
    padded_len: int,
    headroom: tuple[int, ...],
    heads: int,
    kv_shards: int,
) -> tuple[int, ...]:
    """Tuple of sizes P in entries, room included, of each layer's pool or one shared; on a mesh, of one device's part."""
    mine, layers, share = heads // kv_shards, len(headroom), capacity_of(parts.heads)
    if parts.layout.one_pool:
        capacity, padded_len = (capacity[0] // heads,), layers * padded_len
    headrooms = (sum(headroom),) if parts.layout.one_pool else headroom
    # Heads of one device may win more than their even share, up to the policy's capacity and to whole prompts.
    most = [
        min(most_rows(share, mine * rows), heads * rows, mine * padded_len) for rows in capacity
    ]
    return tuple(rows + mine * headroom for rows, headroom in zip(most, headrooms, strict=True))


@lru_cache(maxsize=256)
def _capacity(
    parts: Parts, sizes: tuple[int, ...], sliding_windows: SlidingWindows, heads: int
) -> tuple[int, ...]:
    """Cached tuple: most entries per kv head that prompts of buckets `sizes` keep, by layer; a shared pool's one total.

    A pool shared by all layers has the total over layers and heads.
    Shapes must not depend on exact lengths.
    """
    layers, whole = len(sliding_windows), sliding_windows.count(None)
    near = sum(min(max(sizes), window or 0) for window in sliding_windows)
    if not parts.drops:
        return tuple(min(max(sizes), window or max(sizes)) for window in sliding_windows)
    most, shared = np.zeros(layers, np.int64), 0
    for top in sizes:
        low, _ = buckets(top)[-1]
        step = max(1, -(-(top - low) // _SAMPLES))
        lengths = np.unique(np.append(np.arange(low, top, step), top))
        numbers = by_length(parts, lengths, sliding_windows, strict=False)
        if parts.layers.from_scores:
            budget = np.asarray(numbers.budget)
            # A clamped ratio can be highest at a shorter prompt: spans counted from the end may overlap less there.
            between = step if step > 1 and budget.max() > budget[-1] else 0
            always_kept = np.minimum(numbers.always_kept + between, top)
            bound = parts.among(sliding_windows).layers.bound
            reach = bound(np.minimum(budget + between, top), lengths, always_kept, layers=whole)
            shared = max(shared, min(int(reach.max()), whole * top))
            continue
        rows = np.asarray(numbers.rows)
        # Between samples a layer's entries grow by at most the step (one entry a token), and rounding may add one.
        varies = (rows != rows[:, :1]).any(axis=1) & (step > 1)
        most = np.maximum(most, np.minimum(rows.max(axis=1) + np.where(varies, step, 0), top))
    if parts.layers.from_scores:
        return (heads * (shared + near),)
    return tuple(int(rows) for rows in most)


@lru_cache(maxsize=256)
def widest(parts: Parts, padded_len: int, sliding_windows: SlidingWindows) -> int | None:
    """Most entries of a segment in a shared pool in decoding, for prompts up to `padded_len`; None if unbounded; memoised.

    The new token's row is counted. None where some layers grow without end, as those with `sliding_windows` do, or where
    recompressing may give a segment more entries than the prompt had.
    """
    if not parts.evicts or parts.unlimited(sliding_windows).any():
        return None
    most = padded_len
    if parts.heads.uniform:
        lengths = np.arange(1, padded_len + 1)
        budget = parts.budgets(lengths, parts.keep.counts(lengths), strict=False)
        most = int(parts.layers.widest(budget, lengths).max())
    return max(most, parts.reach or 0) + 1


def layers_ahead(needed: PrefillPlan, placed: Array) -> int:
    """Number of layers (0 to 4) to dispatch while one runs, from the device's spare memory; 0 if that is unknown."""
    if is_traced(placed):
        return 0
    spare = memory.allocator_bytes(placed.addressable_shards[0].device)
    if spare is None:
        return 0
    return max(
        0, min(_MOST_AHEAD, (spare - needed.peak_bytes) // (needed.peak_bytes - needed.cache_bytes))
    )


def check_memory(needed: PrefillPlan, device: jax.Device | None = None) -> None:
    """Raises MemoryError if `device` (default: JAX's), or the host for offloaded entries, cannot hold the plan's bytes."""
    device = memory.default_device() if device is None else device
    in_one = device.platform == "cpu"
    here = needed.peak_bytes + (needed.host_bytes if in_one else 0)
    memory.check_bytes(here, "the plan", device, detail=f" ({needed.cache_bytes:,} of them cache)")
    free = memory.machine_bytes()
    if not in_one and free is not None and needed.host_bytes > free:
        raise MemoryError(
            f"the plan keeps {needed.host_bytes:,} bytes in host memory, where {free:,} are free: "
            "offload fewer layers, or lower the batch or the prompt's length"
        )
