"""Plans of a prefill, from prompts' lengths and budgets alone: rows of pools, and bytes."""

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
from jaxkv.models.config import ModelConfig, Windows
from jaxkv.policies.fitting import policy_for
from jaxkv.policies.heads import capacity_of, most_rows
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.survivors import bounded, rounding_rows
from jaxkv.sharding.mesh import NAMES

# Most prompt lengths of a bucket for which the policy's rows are computed.
_SAMPLES = 512
# With this many layers dispatched the device never waits for the host; more would only hold memory.
_MOST_AHEAD = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """Plan of one prefill: padded prompt length, pool sizes, free rows, row budgets, bytes (on a mesh, of one device).

    Attributes:
        slots: S, the prompts' bucket.
        capacity: rows per kv head of each layer's pool, before room; for a shared pool its total over layers and heads.
        room: rows left behind every segment of each layer.
        pools: P of each pool, room included; on a mesh, of the part that one device holds.
        buffer: rows of the buffer of candidates of layers that share one budget; None without one.
        dtype: in which the device holds entries.
        numbers: the policy's numbers for these lengths.
        rows: `[L, B]` rows per kv head the policy promises, or None where that depends on the prompts' content.
        cache_bytes: bytes of the cache on the device, room and segment tables included.
        full_bytes: bytes of these prompts' entries (keys and values), uncompressed and unpadded.
        peak_bytes: cache and activations of prefill together, weights excluded.
        host_bytes: bytes of offloaded rows in host memory.
        loaded_bytes: the most of these that are on the device at once while tokens are drawn.
    """

    slots: int
    capacity: tuple[int, ...]
    room: tuple[int, ...]
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
        """Rows per kv head of each prompt, averaged over layers."""
        return np.asarray(self.numbers.budget)

    def __repr__(self) -> str:
        """One-line text: number of prompts, padded length, rows per kv head, megabytes full and at peak; no arrays."""
        size = f"{self.full_bytes / 1e6:.2f} MB full, cache {self.cache_bytes / 1e6:.2f} MB"
        size += f", host {self.host_bytes / 1e6:.2f} MB, peak {self.peak_bytes / 1e6:.2f} MB"
        rows = f"{self.budget.min()} to {self.budget.max()} rows per kv head"
        return f"PrefillPlan({len(self.budget)} prompts in {self.slots} slots; {rows}; {size})"

    def with_copies(self, count: int) -> "PrefillPlan":
        """Copy of the plan with its last prompt repeated `count` more times; its byte fields are not recomputed."""
        index = np.append(np.arange(len(self.budget)), np.full(count, -1))
        numbers, rows = jax.tree.map(lambda each: each[..., index], (self.numbers, self.rows))
        return dataclasses.replace(self, numbers=numbers, rows=rows)


@settled
def plan_prefill(
    config: ModelConfig,
    policy: Method | type[Method] | str,
    lengths: Sequence[int] | np.ndarray,
    *,
    dtype=jnp.float32,
    room: int | tuple[int, ...] = 0,
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
        room: rows to leave behind every segment; one number, or one for each layer.
        implementation: what computes attention: backends that take all prompts at once take more memory.
        mesh: from `sharding.model_mesh` or `abstract_mesh`, one of whose devices bytes are counted for.
        times: how often every prompt is there; bytes are those of all, rows and budgets of one each.

    Returns:
        The plan.

    Raises:
        ValueError: if the budget cannot be honoured for one of the prompts, naming it.
    """
    lengths, room = [plain(each) for each in lengths], plain(room)
    tokens = bool(lengths) and all(is_whole(each, 1) for each in lengths)
    require(tokens, "prompt", lengths, "every prompt needs at least one token")
    parts, length = policy_for(policy, config, dtype=dtype).composed, np.asarray(lengths, np.int64)
    slots = bucket(int(length.max()))
    layers, heads, item = config.layers, config.kv_heads, jnp.dtype(dtype).itemsize
    numbers = by_length(parts, length, config.windows)
    rows, away = None, parts.reading(config.windows, slots).offloaded
    # What layers compete for depends on the prompts' content.
    if not parts.layers.from_scores and parts.threshold is None:
        rows = np.array(numbers.rows)
        rows[list(away)] = 0
    capacity = _capacity(
        parts, tuple(sorted({bucket(n) for n in length.tolist()})), config.windows, heads
    )
    # Pools of offloaded layers hold what comes after the prompt; no array is ever empty.
    capacity = tuple(1 if layer in away else rows for layer, rows in enumerate(capacity))
    rooms = (room,) * layers if isinstance(room, int) else tuple(room)
    groups, stretches, copies = (1, 1, 1) if mesh is None else (mesh.shape[name] for name in NAMES)
    pools = _pools(parts, capacity, slots, rooms, heads, stretches)
    buffer = buffer_rows(parts, capacity, slots, config.windows, heads, stretches)
    work = PrefillBytes(
        config=config.on_one_of(stretches, stretches * copies),
        parts=parts,
        batch=-(-len(lengths) * times // groups),
        slots=slots,
        item=item,
        pool_rows=pools,
        buffer=buffer,
        kv_heads=heads,
        implementation=implementation,
    )
    uncompressed = sum(int(np.minimum(length, window or length).sum()) for window in config.windows)
    full_bytes = times * uncompressed * heads * 2 * config.head_dim * item
    return PrefillPlan(
        slots=slots,
        capacity=capacity,
        room=rooms,
        pools=pools,
        buffer=buffer,
        dtype=jnp.dtype(dtype),
        numbers=numbers,
        rows=rows,
        cache_bytes=work.cache,
        full_bytes=-(-full_bytes // (groups * stretches)),
        peak_bytes=work.peak,
        host_bytes=work.host,
        loaded_bytes=work.loaded,
    )


def pools_for(
    parts: Parts, config: ModelConfig, slots: int, room: tuple[int, ...], stretches: int
) -> tuple[int, ...]:
    """Tuple of pool sizes P in rows for any prompt of bucket `slots` plus `room[l]` free rows per segment of layer l.

    On a mesh whose devices hold `stretches` parts of the kv heads, P of one part.
    """
    capacity = _capacity(parts, (slots,), config.windows, config.kv_heads)
    return _pools(parts, capacity, slots, room, config.kv_heads, stretches)


def buffer_rows(
    parts: Parts,
    capacity: tuple[int, ...],
    slots: int,
    windows: Windows,
    heads: int,
    stretches: int,
) -> int | None:
    """Rows of the buffer of candidates in a prefill whose layers share one budget; None if no buffer is used.

    `capacity`, `slots` and `stretches` are as for a plan's pools. A buffer serves one budget over all layers, or shares
    of it by layers' weights, where it weighs less than the rows of all layers but one. Mergers and second passes over
    the prompt need all of these, and `windows`, those of the model's layers, leave few to hold.
    """
    needs_all = parts.merge is not None or parts.needs.replay is not None or any(windows)
    layers = len(windows)
    if needs_all or not (parts.narrows or parts.layers.joint and bounded(parts.heads, stretches)):
        return None
    mine = layers * (heads // stretches)
    (most,) = _pools(parts, capacity, slots, (0,) * layers, heads, stretches)
    # Bounds of layers' rows sum to twice the budget, and one row more in each.
    rows = 2 * most + mine if parts.narrows else most + mine * rounding_rows(parts.heads)
    return rows if rows < (mine - heads // stretches) * slots else None


def _pools(
    parts: Parts,
    capacity: tuple[int, ...],
    slots: int,
    room: tuple[int, ...],
    heads: int,
    stretches: int,
) -> tuple[int, ...]:
    """Tuple of sizes P in rows, room included, of each layer's pool or one shared; on a mesh, of one device's part."""
    mine, layers, share = heads // stretches, len(room), capacity_of(parts.heads)
    if parts.layout.one_pool:
        capacity, slots = (capacity[0] // heads,), layers * slots
    rooms = (sum(room),) if parts.layout.one_pool else room
    # Heads of one device may win more than their even share, up to the policy's capacity and to whole prompts.
    most = [min(most_rows(share, mine * rows), heads * rows, mine * slots) for rows in capacity]
    return tuple(rows + mine * room for rows, room in zip(most, rooms, strict=True))


@lru_cache(maxsize=256)
def _capacity(
    parts: Parts, sizes: tuple[int, ...], windows: Windows, heads: int
) -> tuple[int, ...]:
    """Cached tuple: most rows per kv head that prompts of buckets `sizes` keep, by layer; a shared pool's one total.

    A pool shared by all layers has the total over layers and heads.
    Shapes must not depend on exact lengths.
    """
    layers, whole = len(windows), windows.count(None)
    near = sum(min(max(sizes), window or 0) for window in windows)
    if not parts.drops:
        return tuple(min(max(sizes), window or max(sizes)) for window in windows)
    most, shared = np.zeros(layers, np.int64), 0
    for top in sizes:
        low, _ = buckets(top)[-1]
        step = max(1, -(-(top - low) // _SAMPLES))
        lengths = np.unique(np.append(np.arange(low, top, step), top))
        numbers = by_length(parts, lengths, windows, strict=False)
        if parts.layers.from_scores:
            budget = np.asarray(numbers.budget)
            # A clamped ratio can be highest at a shorter prompt: spans counted from the end may overlap less there.
            between = step if step > 1 and budget.max() > budget[-1] else 0
            forced = np.minimum(numbers.forced + between, top)
            bound = parts.among(windows).layers.bound
            reach = bound(np.minimum(budget + between, top), lengths, forced, layers=whole)
            shared = max(shared, min(int(reach.max()), whole * top))
            continue
        rows = np.asarray(numbers.rows)
        # Between samples a layer's rows grow by at most the step (one row a token), and rounding may add one.
        varies = (rows != rows[:, :1]).any(axis=1) & (step > 1)
        most = np.maximum(most, np.minimum(rows.max(axis=1) + np.where(varies, step, 0), top))
    if parts.layers.from_scores:
        return (heads * (shared + near),)
    return tuple(int(rows) for rows in most)


@lru_cache(maxsize=256)
def widest(parts: Parts, slots: int, windows: Windows) -> int | None:
    """Most rows of a segment in a shared pool in decoding, for prompts up to `slots`; None if unbounded; memoised.

    The new token's row is counted. None where some layers grow without end, as those with `windows` do, or where
    compressing again may give a segment more rows than the prompt had.
    """
    if not parts.evicts or parts.unlimited(windows).any():
        return None
    most = slots
    if parts.heads.uniform:
        lengths = np.arange(1, slots + 1)
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
    """Raises MemoryError if `device` (default: JAX's), or the host for offloaded rows, cannot hold the plan's bytes."""
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
