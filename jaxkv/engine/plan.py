"""What a policy will need before it runs: rows and bytes, from lengths and budgets alone."""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Int

from jaxkv import memory
from jaxkv._errors import require
from jaxkv._settings import settled
from jaxkv._values import is_whole, plain
from jaxkv.attention import Implementation, backend_of
from jaxkv.cache.layout import Layout
from jaxkv.engine.lengths import by_length
from jaxkv.engine.stages import Prefilling, moment_bytes
from jaxkv.models.config import ModelConfig
from jaxkv.policies.heads import capacity_of, most_rows
from jaxkv.policies.parts import Ongoing, Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.reading import Reading
from jaxkv.policies.registry import as_policy
from jaxkv.sharding.mesh import NAMES

# Prompts are padded to these lengths, so that shapes repeat: powers of two, then four steps to the octave.
_SMALLEST_BUCKET = 16
_OCTAVE_FROM = 1024
QUERY_BLOCK = 256
# Tokens, of all prompts together, that a GPU's prefill takes through the projections and the MLP at once.
TOKENS_AT_ONCE = 2048
# Tokens between two looks at the text, when somebody is looking: a stop string, a stream, a progress bar.
LOOK = 8
_SAMPLES = 512


def bucket(length: int) -> int:
    """The number of slots a prompt of this length is padded to.

    Args:
        length: tokens, at least 1.

    Returns:
        The bucket: a power of two up to 256, multiples of 256 to 1024, then four steps to the octave.
    """
    if length <= QUERY_BLOCK:
        return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())
    step = QUERY_BLOCK
    if length > _OCTAVE_FROM:
        step = 1 << ((length - 1).bit_length() - 3)
    return -(-length // step) * step


def buckets(longest: int) -> list[tuple[int, int]]:
    """Shortest prompt and slots of every bucket that prompts of up to `longest` tokens are padded to, in order."""
    found, slots = list[tuple[int, int]](), bucket(longest)
    while slots:
        below = _below(slots)
        found.append((below + 1, slots))
        slots = below
    return found[::-1]


def _below(slots: int) -> int:
    """The next smaller bucket; 0 below the smallest."""
    if slots <= _SMALLEST_BUCKET:
        return 0
    low, high = 0, slots - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bucket(middle) < slots else (low, middle - 1)
    return low


def pools_for(
    parts: Parts, config: ModelConfig, slots: int, room: tuple[int, ...], stretches: int = 1
) -> tuple[int, ...]:
    """P of each pool that holds any prompt of a bucket, and room behind it; on a mesh, of each stretch of heads.

    Args:
        parts: of the policy.
        config: the model's shape.
        slots: S, the prompts' bucket.
        room: rows to leave behind every segment of each layer.
        stretches: parts of each pool that a mesh's devices have.

    Returns:
        Rows of each pool.
    """
    capacity = _capacity(parts, (slots,), config.layers, config.kv_heads)
    return _pools(parts.layout, capacity_of(parts.heads), capacity, slots, room, config.kv_heads, stretches)


def _pools(
    layout: Layout,
    share: float,
    capacity: tuple[int, ...],
    slots: int,
    room: tuple[int, ...],
    heads: int,
    stretches: int,
) -> tuple[int, ...]:
    """P of each pool, of one stretch of its heads: what they may hold of its capacity, and room behind each."""
    mine, layers = heads // stretches, len(room)
    if layout.one_pool:
        capacity, slots = (capacity[0] // heads,), layers * slots
    rooms = (sum(room),) if layout.one_pool else room
    # What heads compete for goes to those of one device as far as the policy allows, and as there are prompts.
    most = [min(most_rows(share, mine * rows), heads * rows, mine * slots) for rows in capacity]
    return tuple(rows + mine * room for rows, room in zip(most, rooms, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """Rows and bytes of one prefill; on a mesh bytes are those of one device.

    Attributes:
        slots: S, the prompts' bucket.
        capacity: rows per kv head of each layer's pool, before room; for a shared pool its total over layers and heads.
        room: rows left behind every segment of each layer.
        layout: how segments lie in the pools.
        share: on a mesh, rows that the heads of one device may hold of a pool, over their even share.
        rows: `[L, B]` rows per kv head the policy promises, or None where that depends on the prompts' content.
        budget: `[B]` rows per kv head, averaged over layers.
        forced: `[B]` rows that stay whatever their score.
        cache_bytes: what the cache will weigh, without room.
        full_bytes: what these prompts weigh uncompressed and unpadded.
        slack_bytes: part of cache_bytes that no promised row fills: short prompts in long buckets.
        peak_bytes: cache and activations of prefill together, weights excluded.
        host_bytes: what waits in host memory.
        loaded_bytes: the most of it that is on the device at once while tokens are drawn.
        pools: P of each pool where it does not follow from these prompts, as in a slot; on a mesh, of each stretch.
    """

    slots: int
    capacity: tuple[int, ...]
    room: tuple[int, ...]
    layout: Layout
    share: float
    rows: Int[np.ndarray, "L B"] | None
    budget: Int[np.ndarray, " B"]
    forced: Int[np.ndarray, " B"]
    cache_bytes: int
    full_bytes: int
    slack_bytes: int
    peak_bytes: int
    host_bytes: int = 0
    loaded_bytes: int = 0
    pools: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        """One line; the arrays are left to whoever asks for them."""
        least, most = int(self.budget.min()), int(self.budget.max())
        rows = str(least) if least == most else f"{least} to {most}"
        size = f"{self.cache_bytes / 1e6:.2f} of {self.full_bytes / 1e6:.2f} MB kept"
        size += f", {self.host_bytes / 1e6:.2f} MB in host memory" if self.host_bytes else ""
        size += f", peak {self.peak_bytes / 1e6:.2f} MB"
        return f"PrefillPlan({len(self.budget)} prompts in {self.slots} slots; {rows} rows per kv head; {size})"

    def with_copies(self, count: int) -> "PrefillPlan":
        """The plan with so many more prompts like the last one; bytes stay those of the others."""
        more = lambda a: np.concatenate([a, np.repeat(a[..., -1:], count, axis=-1)], axis=-1)  # noqa: E731
        rows = None if self.rows is None else more(self.rows)
        return dataclasses.replace(self, rows=rows, budget=more(self.budget), forced=more(self.forced))

    def in_pools(self, rows: tuple[int, ...]) -> "PrefillPlan":
        """The plan of the same prompts in pools of `rows` rows: what they do not take is room."""
        return dataclasses.replace(self, pools=rows)

    def pool_rows(self, heads: int, stretches: int = 1) -> tuple[int, ...]:
        """P of each pool, or of each of the stretches that devices have of it, heads alike."""
        if self.pools is not None:
            return self.pools
        return _pools(self.layout, self.share, self.capacity, self.slots, self.room, heads, stretches)


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
    """Computes what prefilling prompts of these lengths takes.

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
        The plan; shapes in it depend on the lengths' buckets only.

    Raises:
        ValueError: if the budget cannot be honoured for one of the prompts, naming it.
    """
    lengths, room = [plain(each) for each in lengths], plain(room)
    tokens = bool(lengths) and all(is_whole(each, 1) for each in lengths)
    require(tokens, "prompt", lengths, "every prompt needs at least one token")
    parts = as_policy(policy).for_model(config.layers, None).parts()
    length = np.asarray(lengths, np.int64)
    slots = bucket(int(length.max()))
    layers, heads = config.layers, config.kv_heads
    told = by_length(parts, length, layers)
    # What layers compete for depends on the prompts' content.
    rows = None if parts.layers.from_scores or told.rows is None else np.array(told.rows)
    reading = parts.reading(layers, slots)
    away = () if reading is None else reading.offloaded
    if rows is not None:
        rows[list(away)] = 0
    buckets = tuple(sorted({bucket(n) for n in length.tolist()}))
    capacity = _capacity(parts, buckets, layers, heads)
    # Pools of offloaded layers hold what comes after the prompt; no array is ever empty.
    capacity = tuple(1 if layer in away else rows for layer, rows in enumerate(capacity))
    rooms = (room,) * layers if isinstance(room, int) else tuple(room)
    planned = PrefillPlan(
        slots=slots,
        capacity=capacity,
        room=rooms,
        layout=parts.layout,
        share=capacity_of(parts.heads),
        rows=rows,
        budget=np.asarray(told.budget),
        forced=np.asarray(told.forced),
        cache_bytes=0,
        full_bytes=times * int(length.sum()) * layers * heads * 2 * config.head_dim * jnp.dtype(dtype).itemsize,
        slack_bytes=0,
        peak_bytes=0,
    )
    item = jnp.dtype(dtype).itemsize
    return _weighed(planned, config, parts, reading, len(lengths), times, item, implementation, mesh)


def _weighed(
    planned: PrefillPlan,
    config: ModelConfig,
    parts: Parts,
    reading: Reading | None,
    prompts: int,
    times: int,
    item: int,
    implementation: Implementation,
    mesh: Mesh | AbstractMesh | None,
) -> PrefillPlan:
    """A plan with its bytes: of all prompts and heads, or of what one device of a mesh has of them."""
    groups, stretches, copies = (1, 1, 1) if mesh is None else (mesh.shape[name] for name in NAMES)
    batch, mine = -(-prompts * times // groups), config.on_one_of(stretches, stretches * copies)
    slots, away = planned.slots, () if reading is None else reading.offloaded
    row_bytes = row_bytes_of(config, parts, item)
    pools = [rows * batch * row_bytes for rows in planned.pool_rows(config.kv_heads, stretches)]
    tables = batch * _table_bytes(mine, parts.ongoing, reading)
    cache_bytes = sum(pools) + tables
    layer_kv = 2 * batch * mine.kv_heads * slots * config.head_dim * item
    if not backend_of(implementation).at_once:
        held = config.layers if parts.layers.from_scores else 1
        prefilling = (held + bool(away) + 1) * layer_kv + _activation_bytes(mine, parts, batch, slots, item)
    else:
        work = Prefilling(
            config=mine,
            parts=parts,
            batch=batch,
            slots=slots,
            item=item,
            pools=pools,
            rings=batch * 4 * mine.head_dim * mine.heads * _rings(mine, parts.ongoing, reading),
            kv_heads=config.kv_heads,
            most=TOKENS_AT_ONCE,
            implementation=implementation,
        )
        prefilling = work.peak + tables - cache_bytes + bool(away) * layer_kv
    # Prompts in chunks are whole on the device until their last chunk.
    whole = len(away) * layer_kv * (parts.read is not None and parts.read.by_chunks)
    token_bytes = batch * 2 * mine.kv_heads * config.head_dim * item
    loaded = 0 if reading is None else reading.loaded * token_bytes
    # Attention wants one layer's of them in another order.
    turned = 0 if reading is None or not loaded else token_bytes * (reading.width if reading.filters else slots)
    filled = config.layers * planned.budget if planned.rows is None else planned.rows.sum(axis=0)
    spare = batch * mine.kv_heads * sum(planned.room)
    promised = -(-int(config.kv_heads * filled.sum()) * times // (groups * stretches))
    return dataclasses.replace(
        planned,
        cache_bytes=cache_bytes,
        full_bytes=-(-planned.full_bytes // (groups * stretches)),
        slack_bytes=max(0, sum(pools) - (promised + spare) * row_bytes),
        peak_bytes=cache_bytes + max(loaded + turned, prefilling) + whole,
        host_bytes=len(away) * layer_kv,
        loaded_bytes=loaded,
    )


def row_bytes_of(config: ModelConfig, parts: Parts, item: int) -> int:
    """Bytes of a row of a pool: key and value, position, and the score where the policy goes on observing."""
    ongoing = parts.ongoing
    return parts.store.row_bytes(config.head_dim, item) + 4 + (4 if ongoing is not None and ongoing.scored else 0)


def _activation_bytes(config: ModelConfig, parts: Parts, batch: int, slots: int, item: int) -> int:
    """What a CPU's prefill computes with beside the rows of the layers that it holds."""
    # Hidden states and queries of all prompts (it holds one prompt's queries), and the table of angles.
    each = (config.embed + config.heads * config.head_dim) * item + config.kv_heads * 12
    activations = batch * slots * each + 4 * slots * config.head_dim
    activations += 4 * batch * slots * config.heads * parts.needs.sums + moment_bytes(config, parts.needs, batch)
    # Scores of all layers, and as many keys and masks, where their heads compete.
    activations += 20 * batch * slots * config.kv_heads * config.layers * parts.layers.joint
    # Merging compares float32 copies of one layer's rows.
    return activations + 8 * batch * config.kv_heads * slots * config.head_dim * (parts.merge is not None)


@lru_cache(maxsize=256)
def _capacity(parts: Parts, buckets: tuple[int, ...], layers: int, heads: int) -> tuple[int, ...]:
    """The most rows any prompt of these buckets can keep, layer by layer: shapes must not depend on exact lengths."""
    if parts.scorer is None:
        return (max(buckets),) * layers
    most, shared = np.zeros(layers, np.int64), 0
    for top in buckets:
        low = _below(top) + 1
        step = max(1, -(-(top - low) // _SAMPLES))
        lengths = np.unique(np.append(np.arange(low, top, step), top))
        told = by_length(parts, lengths, layers, strict=False)
        if parts.layers.from_scores or told.rows is None:
            budget = np.asarray(told.budget)
            # A clamped ratio can be highest at a shorter prompt: spans counted from the end may overlap less there.
            between = step if step > 1 and budget.max() > budget[-1] else 0
            reach = parts.layers.bound(np.minimum(budget + between, top), lengths, layers=layers)
            shared = max(shared, min(int(reach.max()), layers * top))
            continue
        rows = np.asarray(told.rows)
        # Between samples a layer's rows grow by at most the step (one row a token), and rounding may add one.
        varies = (rows != rows[:, :1]).any(axis=1) & (step > 1)
        most = np.maximum(most, np.minimum(rows.max(axis=1) + np.where(varies, step, 0), top))
    if parts.layers.from_scores:
        return (heads * shared,)
    return tuple(int(rows) for rows in most)


@lru_cache(maxsize=256)
def widest(parts: Parts, slots: int, layers: int) -> int | None:
    """The most rows that a segment of a shared pool ever holds while tokens are drawn, whatever the prompts' content.

    Args:
        parts: of the policy.
        slots: the prompts' bucket.
        layers: L.

    Returns:
        Rows, the new token's included; None where some layers grow without end, or a choice made again along the text
        may give a segment more rows than the prompt had.
    """
    if not parts.evicts or parts.layers.unlimited(layers).any():
        return None
    most = slots
    if parts.heads.uniform:
        lengths = np.arange(1, slots + 1)
        budget = parts.budgets(lengths, parts.keep.counts(lengths), strict=False)
        most = int(parts.layers.widest(budget, lengths).max())
    if isinstance(parts.budget, int):
        most = max(most, parts.budget)
    return most + 1


def ring_rows(queries: int) -> int:
    """Queries that a ring holds: the window, and as many as a stop string can take back."""
    return queries + LOOK


def _rings(config: ModelConfig, ongoing: Ongoing | None, reading: Reading | None) -> int:
    """Queries of each head that a sequence's cache remembers, of all layers together."""
    if ongoing is not None:
        return config.layers * ring_rows(ongoing.queries) if ongoing.queries else 0
    return len(reading.filters) * ring_rows(reading.ring) if reading is not None and reading.ring else 0


def _table_bytes(config: ModelConfig, ongoing: Ongoing | None, reading: Reading | None) -> int:
    """Bytes of one sequence's tables of segments, and of what the policy remembers of it."""
    layers, segments = config.layers, config.layers * config.kv_heads
    numbers = 1 + 3 * segments
    if ongoing is not None:
        numbers += 2 + layers + segments * (0 if ongoing.merge is None else ongoing.merge.thresholds)
    elif reading is not None:
        numbers += 2 + layers + segments
    return 4 * (numbers + config.heads * _rings(config, ongoing, reading) * config.head_dim)


def check_memory(needed: PrefillPlan, device: jax.Device | None = None) -> None:
    """Refuses a plan that the device cannot hold, before anything is allocated.

    Args:
        needed: the plan.
        device: where it will run; the default device if None.

    Raises:
        MemoryError: naming the plan's bytes, those available and what to change.
    """
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
