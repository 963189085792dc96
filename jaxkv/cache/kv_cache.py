"""The KV cache of the public API: a pool of entries per layer (or for all), a segment per sequence and kv head.

```
pool of one layer, one sequence, K = 3               | start[0] ..             | start[1] ..       | start[2] ..
rows      0                                                     P
          [ head 0: entries | headroom ][ head 1: entries | headroom ][ head 2: entries | headroom ]
```
Budgets that depend on data change `start` and `length`, never a shape. Caches are immutable: every function returns a
new cache, and none donates the buffers of its argument.
"""

import dataclasses
import enum
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, SequenceKey
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import format_non_default_fields
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cache.arrays import CacheArrays, EntryOverflowCounts, PolicyState, SegmentTables
from jaxkv.cache.disk import write_cache_folder
from jaxkv.cache.host_store import HostStore, make_host_sharding
from jaxkv.cache.layout import SegmentLayout
from jaxkv.cache.page_bounds import resize_page_axis
from jaxkv.cache.pools import EntryPool
from jaxkv.cache.stores import choose_cache_dtype
from jaxkv.models.config import ModelConfig
from jaxkv.sharding.mesh import ShardingMesh, copy_to_host, list_leaves_with_axes, place_host_array


class ConversationState(enum.Enum):
    """Enum of a conversation's states: empty, in the user's turn, in the answer, or plain text without turns."""

    START = "start"
    USER = "user"
    ANSWER = "answer"
    RAW = "raw"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "host_store", "logits", "tally"],
    meta_fields=[
        "layout",
        "policy",
        "config",
        "dtype",
        "padded_len",
        "extended",
        "model",
        "turn",
        "axes",
        "padding",
    ],
)
@frozen_dataclass
class KVCache:
    """Immutable KV cache of B sequences: device arrays, offloaded entries, next logits, layout, policy, model, mesh.

    Attributes:
        arrays: pools, segment tables, policy state and states of layers without entries, on the device.
        host_store: prompt entries of offloaded layers, in host memory; these layers' pools hold only later entries.
        logits: `f32[B, V]` of the next token; None if no token is to be sampled. Not counted in `nbytes`.
        tally: numbers of entries that a mesh moved or a budget cut.
        layout: placement of segments in their pools.
        policy: the policy that compressed the cache.
        config: the model's config.
        dtype: name of the model's dtype. Entries are rounded to it, and saved in it.
        padded_len: S, the bucket of the prompts.
        extended: True if segments may hold more entries than the policy keeps of prompts of `padded_len` tokens.
            Several tokens were appended in one step, or heads competed for the entries of a longer text.
        model: fingerprint of the weights that made the cache.
        turn: state of the conversation; a tuple with one state per sequence if sequences differ.
        axes: the mesh that the cache is sharded over, or None. Each device holds the shard of every pool with its own
            heads' segments; `start` counts from the first row of that shard.
        padding: number of trailing sequences that only fill a mesh's groups, copies of the last real one. `batch`,
            `kept`, `segment_first_rows` and the other counts exclude them.
    """

    arrays: CacheArrays
    host_store: HostStore | None = None
    logits: Float[Array, "B V"] | None = None
    tally: EntryOverflowCounts = EntryOverflowCounts()
    layout: SegmentLayout
    policy: Any
    config: ModelConfig
    dtype: str
    padded_len: int
    extended: bool = False
    model: str = ""
    turn: ConversationState | tuple[ConversationState, ...] = ConversationState.START
    axes: ShardingMesh | None = None
    padding: int = 0

    def __repr__(self) -> str:
        """Return the cache as text: policy, sequences, tokens, entries per head, device and host MB, turn."""
        layers, batch, heads = _get_3d_shape(self.length) or (0, 0, 0)
        batch -= self.padding
        parts = [format_non_default_fields(self.policy), f"{batch} sequence{'s' * (batch != 1)}"]
        seen = _read_local_values(self.seen)
        rows = _read_local_values(self.length)
        if seen is not None:
            parts.append(f"{_format_range(seen[: len(seen) - self.padding])} tokens")
        if rows is not None:
            parts.append(
                f"{_format_range(rows[:, :batch])} entries in each of {layers} x {heads} heads"
            )
        parts.append(f"{_count_tree_bytes(self.arrays) / 1e6:.2f} MB")
        if self.host_store is not None:
            parts.append(f"{_count_tree_bytes(self.host_store) / 1e6:.2f} MB in host memory")
        turns = self.turn if isinstance(self.turn, tuple) else (self.turn,)
        parts.append(
            "turn: " + ", ".join(dict.fromkeys(str(getattr(each, "value", each)) for each in turns))
        )
        return f"KVCache({'; '.join(parts)})"

    @property
    def pools(self) -> tuple[EntryPool, ...]:
        """Tuple of the cache's pools: one per layer, or one for all layers (`layout.uses_shared_pool`)."""
        return self.arrays.pools

    @property
    def tables(self) -> SegmentTables:
        """`SegmentTables` of the cache: segments' first rows, lengths, limits; tokens seen, policy state, centres."""
        return self.arrays.tables

    @property
    def start(self) -> Int[Array, "L B K"]:
        """First row of each segment, `i32[L, B, K]`; on a mesh counted from the first row of the device's shard."""
        return self.tables.start

    @property
    def length(self) -> Int[Array, "L B K"]:
        """Number of entries in each of the cache's segments, `i32[L, B, K]`, without headroom."""
        return self.tables.length

    @property
    def limit(self) -> Int[Array, "L B K"]:
        """Number of entries that the policy aims at in each segment of the cache, `i32[L, B, K]`."""
        return self.tables.limit

    @property
    def seen(self) -> Int[Array, " B"]:
        """Number of tokens seen by each sequence, `i32[B]`, which is its next position."""
        return self.tables.seen

    @property
    def state(self) -> PolicyState | None:
        """Policy state (`PolicyState`); None if nothing is evicted, recompressed or selected after the prompt."""
        return self.tables.state

    def replace_arrays(
        self, *, pools: tuple[EntryPool, ...] | None = None, **tables: Any
    ) -> "KVCache":
        """Return a copy of the cache with `pools`, and others of its arrays by name, such as `start`, replaced."""
        return dataclasses.replace(self, arrays=self.arrays.replace_arrays(pools=pools, **tables))

    def cast_to_dtype(self, dtype: Any) -> "KVCache":
        """Return a copy of the cache with entries, also offloaded ones, in another dtype; quantised codes are kept."""
        dtype = jnp.dtype(dtype)
        host_store = self.host_store
        cache = self.replace_arrays(pools=tuple(pool.cast_to_dtype(dtype) for pool in self.pools))
        host_store = None if host_store is None else host_store.cast_to_dtype(dtype, self.axes)
        return dataclasses.replace(cache, host_store=host_store)

    def cast_for_devices(self) -> "KVCache":
        """Return a copy of the cache, entries in its devices' dtype: float32 on CPU, else the model's."""
        platform = jax.default_backend() if self.axes is None else self.axes.platform
        return self.cast_to_dtype(choose_cache_dtype(self.dtype, platform))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the cache and its policy to a new folder, atomically, in the model's dtype, for `jaxkv.load_cache`.

        With several processes on one mesh all must call it; the first one writes.

        Args:
            path: the folder to create; it must not exist.

        Raises:
            ValueError: if `path` exists or cannot be written, if the cache's arrays were donated, or if its policy has
                a value that cannot be written as text.
        """
        self.require_live_arrays()
        given = dataclasses.replace(self.cast_to_dtype(self.dtype), policy=None)
        # Saved caches do not depend on the mesh: entries are laid out as on one device.
        sharding = make_host_sharding(next(iter(self.seen.sharding.addressable_devices)))
        whole = (
            given
            if self.axes is None
            else repack_through_host(given, None, put=lambda a, _: jax.device_put(a, sharding))
        )
        write_cache_folder(
            Path(os.path.expanduser(path)),
            self.policy,
            whole,
            None if self.axes is None else self.axes.mesh,
        )

    def require_live_arrays(self) -> None:
        """Raise ValueError if any of the cache's arrays was deleted, because an earlier call donated it."""
        deleted = [
            leaf
            for leaf in jax.tree.leaves(self)
            if isinstance(leaf, jax.Array) and leaf.is_deleted()
        ]
        require(
            not deleted,
            "cache",
            "deleted",
            "its arrays were donated to an earlier call: prefill again",
        )

    @property
    def batch(self) -> int:
        """B, the number of sequences in the cache, without padding sequences."""
        return self.seen.shape[0] - self.padding

    @property
    def nbytes(self) -> int:
        """Device bytes of the cache's pools (with headroom), tables, policy state and states; no logits or tally."""
        held = dataclasses.replace(self, host_store=None, logits=None, tally=EntryOverflowCounts())
        return sum(leaf.nbytes for leaf in jax.tree.leaves(held))

    @property
    def host_nbytes(self) -> int:
        """Bytes of offloaded entries in host memory; 0 without a host store."""
        return 0 if self.host_store is None else self.host_store.nbytes

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of one kv head: a key and a value as stored, with a quantised store's scales."""
        return self._compute_entry_bytes(self.config.head_dim)

    def _compute_entry_bytes(self, dim: int) -> int:
        """Return the bytes of one entry of one kv head with `dim` channels, as stored."""
        pool = self.pools[0]
        return pool.store.compute_entry_bytes(dim, pool.dtype.itemsize)

    @property
    def layer_entry_bytes(self) -> Int[np.ndarray, " L"]:
        """Bytes of one entry of one kv head of each layer, numpy `[L]`: `entry_bytes`, but for folded layers."""
        return np.asarray([*map(self._compute_entry_bytes, self.config.entry_dims)])

    def headroom_nbytes(self, headroom: Sequence[int]) -> int:
        """Return bytes per sequence of `headroom[l]` more rows and page bounds per segment, over all layers and heads.

        Args:
            headroom: headroom in entries, one number per layer.

        Returns:
            Bytes, summed over layers and kv heads.
        """
        # A row also has a position and, if any pool holds scores, a score.
        scored = any(pool.score is not None for pool in self.pools)
        each = self.layer_entry_bytes + 4 * (1 + scored)
        found = int(np.dot(headroom, each))
        for layer, rows in enumerate(headroom):
            bounds = self.pools[self.layout.get_pool_index(layer)].bounds
            found += 0 if bounds is None else -(-rows // bounds.page) * bounds.page_bound_bytes
        return found * self.config.kv_heads

    @property
    def full_nbytes(self) -> int:
        """Bytes of unquantised entries if none were evicted: all tokens seen, in sliding-window layers the window's."""
        each = self.config.kv_heads * self.pools[0].dtype.itemsize
        return each * int(np.dot(self.config.entry_elements, self._attended_tokens.sum(axis=1)))

    @property
    def kept_nbytes(self) -> int:
        """Bytes of entries on devices as stored, at most a sliding window's; no headroom, positions, scores, tables."""
        # Entries outside a sliding window are removed when the pool is full.
        held = np.minimum(self.kept, self._attended_tokens[..., None]).sum(axis=(1, 2))
        return int(self.layer_entry_bytes @ held)

    @property
    def _attended_tokens(self) -> Int[np.ndarray, "L B"]:
        """Number of tokens, numpy `[L, B]`, that a layer may attend to: all tokens seen, or a sliding window's."""
        seen = copy_to_host(self.seen)[: self.batch]
        return np.stack([np.minimum(seen, width or seen) for width in self.config.sliding_windows])

    @property
    def kept(self) -> np.ndarray:
        """Number of entries in each segment on the device, numpy `i32[L, B, K]`, without padding sequences."""
        return copy_to_host(self.length)[:, : self.batch]

    @property
    def kv_shards(self) -> int:
        """Number of shards of the kv heads, and so of each pool, over a mesh's devices; 1 without a mesh."""
        return 1 if self.axes is None else self.axes.count_axis_shards("K")

    @property
    def segment_first_rows(self) -> np.ndarray:
        """First row of each segment in the complete pool, numpy `i32[L, B, K]`, without padding sequences."""
        start = copy_to_host(self.start)
        rows = [pool.row_count for pool in self.pools]
        return self.layout.convert_shard_to_pool_rows(start, rows, self.kv_shards)[:, : self.batch]

    def iterate_segments(self) -> Iterator[tuple[int, int, int, int, slice]]:
        """Yield (layer, sequence, kv head, pool index, slice of the pool rows with its entries) for each segment."""
        first = self.segment_first_rows
        length = self.kept
        for layer, sequence, head in np.ndindex(*first.shape):
            begin = first[layer, sequence, head]
            rows = slice(begin, begin + length[layer, sequence, head])
            yield layer, sequence, head, self.layout.get_pool_index(layer), rows

    def counts(self) -> list[Int[np.ndarray, "_"]]:  # noqa: F821
        """Return, per sequence, an array: how many kv heads of `compressed_layers` keep or offload each token seen."""
        return [
            held[self.compressed_layers].sum(axis=(0, 1)) for held in self._iterate_kept_masks()
        ]

    def positions(self, layer: int, head: int) -> list[Int[np.ndarray, "_"]]:  # noqa: F821
        """Return, per sequence, an array of ascending positions of the tokens that one kv head keeps or offloads.

        Args:
            layer: index of the layer.
            head: index of the kv head in its layer.

        Returns:
            An array per sequence.
        """
        return [np.flatnonzero(held[layer, head]) for held in self._iterate_kept_masks()]

    def show(self, params: Any, prompt: Any) -> Any:
        """Return `prompt` as a `KeptTokensDisplay`, tokens shaded by how many heads of compressed layers keep them.

        Args:
            params: the model that made the cache.
            prompt: the prompt, as passed to `jaxkv.prefill`; a cache does not hold it. Later tokens are not shown.

        Returns:
            A `KeptTokensDisplay`: HTML in a notebook, colours in a terminal, plain text elsewhere.

        Raises:
            ValueError: for another model, one without a tokenizer, or a prompt that is not the cache's.
            TypeError: if `params` is not a model.
        """
        if not hasattr(params, "show_kept_tokens"):
            raise TypeError(
                f"params={type(params).__name__}: not a model. Pass one from jaxkv.load, "
                "then the prompt"
            )
        return params.show_kept_tokens(self, prompt)

    @property
    def compressed_layers(self) -> list[int]:
        """Indices of layers without a sliding window, the only ones compressed; of all layers if each has one."""
        sliding_windows = self.config.sliding_windows
        return [at for at, width in enumerate(sliding_windows) if width is None] or [
            *range(len(sliding_windows))
        ]

    def _iterate_kept_masks(self) -> Iterator[Bool[np.ndarray, "L K _"]]:
        """Yield each sequence's mask `bool[L, K, n]`: True where a kv head keeps or offloads that token, of n seen."""
        return (
            self.mask_kept_tokens(at, seen)
            for at, seen in enumerate(copy_to_host(self.seen)[: self.batch].tolist())
        )

    def mask_kept_tokens(self, sequence: int, tokens: int) -> Bool[np.ndarray, "L K n"]:
        """Return mask `bool[L, K, n]` of a sequence's first n tokens: True where a kv head keeps it, or offloads it.

        Args:
            sequence: index of the sequence.
            tokens: n, the number of tokens, counted from the first.

        Returns:
            The mask, `bool[L, K, n]`.
        """
        positions = [copy_to_host(pool.pos)[sequence] for pool in self.pools]
        mask = np.zeros((self.config.layers, self.config.kv_heads, tokens), bool)
        for layer, row, head, pool, rows in self.iterate_segments():
            if row == sequence:
                at = positions[pool][rows]
                mask[layer, head, at[at < tokens]] = True
        if self.host_store is not None and self.state is not None:
            mask[list(self.host_store.layers), :, : copy_to_host(self.state.prompt)[sequence]] = (
                True
            )
        return mask

    def compute_layer_headroom(self) -> Int[np.ndarray, " L"]:
        """Return each layer's headroom in entries, numpy `[L]`: the minimum over sequences and kv heads."""
        return self.compute_sequence_headroom().min(axis=1)

    def compute_sequence_headroom(self) -> Int[np.ndarray, "L B"]:
        """Return the headroom in entries, numpy `[L, B]`: the minimum over kv heads; padding sequences are included."""
        parts = self.kv_shards
        # Each device's shard of a pool is laid out as a pool of its own for its heads.
        start, length = (
            a.reshape(a.shape[0], -1, a.shape[2] // parts)
            for a in map(copy_to_host, (self.start, self.length))
        )
        free = np.asarray(
            self.layout.compute_segment_headroom(
                start, length, [pool.row_count // parts for pool in self.pools]
            )
        ).min(axis=2)
        return free.reshape(len(free), -1, parts).min(axis=2)


def repack_through_host(
    cache: KVCache,
    axes: ShardingMesh | None,
    *,
    rows: Sequence[int] | None = None,
    put: Callable[[np.ndarray, str], Array] | None = None,
) -> KVCache:
    """Copy a cache through host memory to another mesh (None: one device), packed without headroom by default.

    `rows` is P of each pool, or of each device's shard of it; by default the smallest that fits. `put` places an array
    with the given logical axes; by default on the mesh.
    """
    if put is None:
        # `jnp.asarray` would compile a program for each shape.
        put = partial(place_host_array, axes=axes) if axes else lambda a, _: jax.device_put(a)
    groups, kv_shards = (
        (1, 1) if axes is None else (axes.count_axis_shards("B"), axes.count_axis_shards("K"))
    )
    batch = cache.batch
    layout = cache.layout
    # Copies of the last sequence fill the groups.
    of = np.minimum(np.arange(-(-batch // groups) * groups), batch - 1)
    first = cache.segment_first_rows[:, of]
    length = cache.kept[:, of]
    layers, count, heads = length.shape
    start = np.empty_like(first)
    sizes = []
    pages = []
    for index, part in enumerate(layout.slice_layers_by_pool(layers)):
        held = length[part]
        # Each device's shard of a pool is laid out as a pool of its own.
        apart = held.reshape(len(held), -1, heads // kv_shards)
        each = int(layout.count_required_pool_rows(apart).max()) if rows is None else rows[index]
        start[part] = layout.compute_segment_starts(apart, each).reshape(held.shape)
        sizes.append(kv_shards * each)
        bounds = cache.pools[index].bounds
        pages.append(0 if bounds is None else -(-(sizes[-1] // heads) // bounds.page))
    sources = [np.full((count, size), -1) for size in sizes]
    begin = layout.convert_shard_to_pool_rows(start, sizes, kv_shards)
    for at in np.ndindex(*length.shape):
        taken = np.arange(int(length[at]))
        sources[layout.get_pool_index(at[0])][at[1], begin[at] + taken] = first[at] + taken
    made = dataclasses.replace(cache, axes=axes, padding=count - batch, host_store=None)
    leaves = [
        put(
            _rearrange_cache_leaf(path, logical_axes.split(), leaf, of, sources, start, pages),
            logical_axes,
        )
        for path, logical_axes, leaf in list_leaves_with_axes(made)
    ]
    moved = jax.tree.unflatten(jax.tree.structure(made), leaves)
    if cache.host_store is None:
        return moved
    # The host store may hold one sequence, shared by all.
    alone = len(cache.host_store.rows[0]) < len(cache.seen)
    return dataclasses.replace(
        moved, host_store=cache.host_store.copy_sequences(of[:groups] * 0 if alone else of, axes)
    )


def _rearrange_cache_leaf(
    path: Any,
    logical_axes: list[str],
    leaf: Any,
    of: np.ndarray,
    sources: list[np.ndarray],
    start: np.ndarray,
    pages: list[int],
) -> np.ndarray:
    """Return one cache array as numpy, its sequences, pool rows and pages rearranged; for `start` the new one.

    `pages` are the numbers of pages per segment of each pool, for page bounds.
    """
    if path[-1] == GetAttrKey("start"):
        return start
    held = copy_to_host(leaf)
    batch = logical_axes.index("B")
    pool = next((part.idx for part in path if isinstance(part, SequenceKey)), 0)
    if GetAttrKey("bounds") in path:
        return resize_page_axis(held.take(of, axis=batch), pages[pool])
    if "P" not in logical_axes:
        return held.take(of, axis=batch)
    source = sources[pool]
    sequence, row = np.nonzero(source >= 0)
    rows = np.zeros((*source.shape, *held.shape[2:]), held.dtype)
    if path[-1] == GetAttrKey("pos"):
        rows -= 1
    # Only rows with entries are copied.
    rows[sequence, row] = held[of[sequence], source[sequence, row]]
    return rows


def _get_3d_shape(leaf: Any) -> tuple[int, ...] | None:
    """Return the shape of an array with three axes as a tuple; None for anything else."""
    shape = getattr(leaf, "shape", None)
    return shape if isinstance(shape, tuple) and len(shape) == 3 else None


def _read_local_values(leaf: Any) -> np.ndarray | None:
    """Return an array's values as numpy; None for tracers, deleted, empty or partly remote arrays, and non-arrays."""
    if (
        isinstance(leaf, jax.core.Tracer)
        or not isinstance(leaf, (jax.Array, np.ndarray))
        or not leaf.size
    ):
        return None
    # No transfer between processes: one process may print a cache while others do not.
    lost = isinstance(leaf, jax.Array) and (leaf.is_deleted() or not leaf.is_fully_addressable)
    return None if lost else np.asarray(leaf)


def _format_range(numbers: np.ndarray) -> str:
    """Return text such as `3 to 8`, the smallest and largest number of an array; one number if they are equal."""
    low = int(numbers.min())
    high = int(numbers.max())
    return str(low) if low == high else f"{low} to {high}"


def _count_tree_bytes(tree: Any) -> int:
    """Return the bytes of all arrays in a tree, also abstract ones, from their sizes and dtypes."""
    leaves = [
        leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "size") and hasattr(leaf, "dtype")
    ]
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in leaves)
