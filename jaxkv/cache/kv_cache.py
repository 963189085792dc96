"""The KV cache: one pool of rows per layer (or one for all), cut into a segment per sequence and kv head.

```
pool of one layer, one sequence, K = 3           | start[0] ..         | start[1] ..   | start[2] ..
rows      0                                     P
          [ head 0: kept rows | room ][ head 1: kept | room ][ head 2: kept rows | room ]
```
Budgets that depend on data move `start` and `length`, never a shape. Values are immutable: every function returns a
new cache, and none gives up the buffers of the one it was given.
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
from jaxtyping import Array, Float, Int

from jaxkv._errors import require
from jaxkv._values import brief
from jaxkv.cache.arrays import Cache, State, Tables
from jaxkv.cache.bank import Bank, host_of
from jaxkv.cache.disk import write_cache
from jaxkv.cache.layout import Layout
from jaxkv.cache.pools import Pool
from jaxkv.models.config import ModelConfig
from jaxkv.sharding.mesh import Axes, host, lettered, place


class Turn(enum.Enum):
    """Where a cache's conversation stands: nothing seen, in the user's turn, in the answer's, or in plain text."""

    START = "start"
    USER = "user"
    ANSWER = "answer"
    RAW = "raw"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "bank", "logits", "moved"],
    meta_fields=["layout", "policy", "config", "slots", "extended", "model", "turn", "axes", "padding"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Everything a model remembers of B sequences, compressed by one policy: arrays, and what is known of them.

    Attributes:
        arrays: pools of rows on the device, where these lie, and what the policy remembers.
        bank: prompts of layers whose rows wait in host memory; their pools hold what came after.
        logits: `f32[B, V]` of the next token, where a session is to draw it; not counted as the cache's.
        moved: `i32[B]` rows of each sequence that other devices' heads got, where the policy's `capacity` left no room
            for better ones; None where it never could.
        layout: how segments lie in their pool.
        policy: who compressed it.
        config: the model's shape.
        slots: S, the bucket that its prompts were padded to.
        extended: segments may hold more rows than the policy keeps of prompts of `slots` tokens: several tokens at once
            have been added since it chose, or heads competed for the rows of a longer text.
        model: fingerprint of the weights that made it.
        turn: where the conversation stands; where sequences stand at different turns, that of each.
        axes: of the mesh that it lies on, if it does. Each device then has the stretch of every pool that its heads lie
            in, and first rows count from there.
        padding: sequences behind the others that the arrays hold so that a mesh's groups have as many each: copies of
            the last one, which nobody asks. `batch`, `kept` and the like are of the others.
    """

    arrays: Cache
    bank: Bank | None = None
    logits: Float[Array, "B V"] | None = None
    moved: Int[Array, " B"] | None = None
    layout: Layout
    policy: Any
    config: ModelConfig
    slots: int
    extended: bool = False
    model: str = ""
    turn: Turn | tuple[Turn, ...] = Turn.START
    axes: Axes | None = None
    padding: int = 0

    def __repr__(self) -> str:
        """One line: the policy, sequences, rows per kv head, bytes, the turn. For any leaves, tracers among them."""
        layers, batch, heads = _shape(self.length) or (0, 0, 0)
        batch -= self.padding
        parts = [brief(self.policy), f"{batch} sequence{'s' * (batch != 1)}"]
        seen, rows = _known(self.seen), _known(self.length)
        if seen is not None:
            parts.append(f"{_range(seen[: len(seen) - self.padding])} tokens")
        if rows is not None:
            parts.append(f"{_range(rows[:, :batch])} rows in each of {layers} x {heads} heads")
        parts.append(f"{_bytes(self.arrays) / 1e6:.2f} MB")
        if self.bank is not None:
            parts.append(f"{_bytes(self.bank) / 1e6:.2f} MB in host memory")
        turns = self.turn if isinstance(self.turn, tuple) else (self.turn,)
        parts.append("turn: " + ", ".join(dict.fromkeys(str(getattr(each, "value", each)) for each in turns)))
        return f"KVCache({'; '.join(parts)})"

    @property
    def pools(self) -> tuple[Pool, ...]:
        """One pool per layer, or a single one shared by all layers (`layout.one_pool`)."""
        return self.arrays.pools

    @property
    def tables(self) -> Tables:
        """Where the rows of every segment lie, and what the policy remembers."""
        return self.arrays.tables

    @property
    def start(self) -> Int[Array, "L B K"]:
        """First row of each segment, `i32[L, B, K]`; on a mesh within the stretch of its device."""
        return self.tables.start

    @property
    def length(self) -> Int[Array, "L B K"]:
        """Rows in each segment, `i32[L, B, K]`."""
        return self.tables.length

    @property
    def limit(self) -> Int[Array, "L B K"]:
        """The policy's target size of each segment, `i32[L, B, K]`."""
        return self.tables.limit

    @property
    def seen(self) -> Int[Array, " B"]:
        """Tokens that each sequence has had, `i32[B]`, and so its next position."""
        return self.tables.seen

    @property
    def state(self) -> State | None:
        """What the policy remembers; None for policies that only act on the prompt."""
        return self.tables.state

    def updated(self, *, pools: tuple[Pool, ...] | None = None, **tables: Any) -> "KVCache":
        """A copy with other pools, or other tables by name (`start`, `length`, `limit`, `seen`, `state`)."""
        return dataclasses.replace(self, arrays=self.arrays.updated(pools=pools, **tables))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache to disk, bit by bit, for `jaxkv.load_cache` in any process: whole or not at all.

        Of several processes on one mesh, all of which must call it, the first one writes.

        Args:
            path: the folder to make; nothing may be there.

        Raises:
            ValueError: where something lies at `path`, nothing can be written there, the cache's arrays have been given
                up, or its policy holds what no text says.
        """
        self.require_arrays()
        given = dataclasses.replace(self, policy=None)
        # Files know of no mesh: they hold what one device would.
        there = host_of(next(iter(self.seen.sharding.addressable_devices)))
        whole = given if self.axes is None else laid_out(given, None, put=lambda a, _: jax.device_put(a, there))
        write_cache(Path(path).expanduser(), self.policy, whole, None if self.axes is None else self.axes.mesh)

    def require_arrays(self) -> None:
        """Refuses a cache whose arrays are gone.

        Raises:
            ValueError: where a donating function has been given them.
        """
        gone = [leaf for leaf in jax.tree.leaves(self) if isinstance(leaf, jax.Array) and leaf.is_deleted()]
        require(not gone, "cache", "deleted", "its arrays were given up by a donating function: prefill anew")

    @property
    def batch(self) -> int:
        """B; those that fill a mesh's groups left out."""
        return self.seen.shape[0] - self.padding

    @property
    def nbytes(self) -> int:
        """Bytes of every array of the cache on the device, slack, bookkeeping and policy state included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(dataclasses.replace(self, bank=None, logits=None)))

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory."""
        return 0 if self.bank is None else self.bank.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a pool, positions and scores included."""
        return sum(leaf.nbytes // (leaf.shape[0] * leaf.shape[1]) for leaf in jax.tree.leaves(self.pools[0]))

    @property
    def full_nbytes(self) -> int:
        """What the tokens seen would weigh in a full, unpadded cache."""
        each = self.config.layers * self.config.kv_heads * 2 * self.config.head_dim * self.pools[0].k.dtype.itemsize
        return int(host(self.seen)[: self.batch].sum()) * each

    @property
    def slack_nbytes(self) -> int:
        """Bytes of rows that hold nothing."""
        rows = self.seen.shape[0] * sum(pool.rows for pool in self.pools)
        return (rows - int(self.kept.sum())) * self.row_bytes

    @property
    def kept(self) -> np.ndarray:
        """Rows held on the device, `i32[L, B, K]`, as an array on the host."""
        return host(self.length)[:, : self.batch]

    @property
    def stretches(self) -> int:
        """Parts of each pool that devices have, each with its own heads' segments."""
        return 1 if self.axes is None else self.axes.size("K")

    @property
    def first_rows(self) -> np.ndarray:
        """Where each segment begins in its pool, `i32[L, B, K]`, as an array on the host."""
        start, rows = host(self.start), [pool.rows for pool in self.pools]
        return self.layout.in_pools(start, rows, self.stretches)[:, : self.batch]

    def spans(self) -> Iterator[tuple[int, int, int, int, slice]]:
        """Where every segment lies.

        Yields:
            Layer, sequence and kv head, layer by layer; the number of the pool and the segment's rows in it.
        """
        first, length = self.first_rows, self.kept
        for layer, sequence, head in np.ndindex(*first.shape):
            begin = first[layer, sequence, head]
            rows = slice(begin, begin + length[layer, sequence, head])
            yield layer, sequence, head, self.layout.pool_of(layer), rows

    def free(self) -> Int[np.ndarray, " L"]:
        """Rows that every segment of a layer can still take where it lies (the smallest over the layer's segments)."""
        pools = [pool.rows // self.stretches for pool in self.pools]
        # A stretch is to its heads what a pool is to all.
        apart = lambda a: a.reshape(a.shape[0], -1, a.shape[2] // self.stretches)  # noqa: E731
        return np.asarray(self.layout.free(apart(host(self.start)), apart(host(self.length)), pools)).min(axis=(1, 2))


def laid_out(
    cache: KVCache,
    axes: Axes | None,
    *,
    rows: Sequence[int] | None = None,
    put: Callable[[np.ndarray, str], Array] | None = None,
) -> KVCache:
    """A cache on another mesh: the same rows in the same segments, brought to the host one array after the other.

    Args:
        cache: any cache.
        axes: of the mesh; None for a single device.
        rows: of each pool, or of each of its stretches; by default no more than the fullest one takes.
        put: where an array of these letters goes; by default where it lies on that mesh.

    Returns:
        The cache there.
    """
    put = partial(place, axes=axes) if put is None else put
    groups, stretches = (1, 1) if axes is None else (axes.size("B"), axes.size("K"))
    batch, layout = cache.batch, cache.layout
    # What fills the groups is the last sequence once more.
    of = np.minimum(np.arange(-(-batch // groups) * groups), batch - 1)
    first, length = cache.first_rows[:, of], cache.kept[:, of]
    layers, count, heads = length.shape
    start, sources = np.empty_like(first), []
    for index, group in enumerate(layout.groups(range(layers))):
        part = slice(group[0], group[-1] + 1)
        # A stretch of heads is a sequence of its own to its pool.
        apart = length[part].reshape(len(group), -1, heads // stretches)
        each = int(layout.takes(apart).max()) if rows is None else rows[index]
        start[part] = np.asarray(layout.place(jnp.asarray(apart), each)).reshape(length[part].shape)
        source = np.full((count, stretches * each), -1)
        for layer, row, head in np.ndindex(*length[part].shape):
            taken = np.arange(int(length[part][layer, row, head]))
            begin = start[part][layer, row, head] + head * stretches // heads * each
            source[row, begin + taken] = first[part][layer, row, head] + taken
        sources.append(source)
    made = dataclasses.replace(cache, axes=axes, padding=count - batch, bank=None)
    move = lambda path, letters, leaf: put(_moved(path, letters.split(), leaf, of, sources, start), letters)  # noqa: E731
    there = jax.tree.unflatten(jax.tree.structure(made), [move(*leaf) for leaf in lettered(made)])
    if cache.bank is None:
        return there
    # What waits may be of one sequence for all.
    alone = len(cache.bank.rows[0]) < len(cache.seen)
    return dataclasses.replace(there, bank=cache.bank.moved(of[:groups] * 0 if alone else of, axes))


def _moved(
    path: Any, letters: list[str], leaf: Any, of: np.ndarray, sources: list[np.ndarray], start: np.ndarray
) -> np.ndarray:
    """A leaf of the sequences `of`: rows of a pool from where they come, and where segments begin."""
    if path[-1] == GetAttrKey("start"):
        return start
    taken = host(leaf).take(of, axis=letters.index("B"))
    if "P" not in letters:
        return taken
    source = sources[next(part.idx for part in path if isinstance(part, SequenceKey))]
    wide = (...,) + (None,) * (taken.ndim - 2)
    empty = np.asarray(-1 if path[-1] == GetAttrKey("pos") else 0, taken.dtype)
    return np.where((source >= 0)[wide], np.take_along_axis(taken, np.maximum(source, 0)[wide], axis=1), empty)


def _shape(leaf: Any) -> tuple[int, ...] | None:
    shape = getattr(leaf, "shape", None)
    return shape if isinstance(shape, tuple) and len(shape) == 3 else None


def _known(leaf: Any) -> np.ndarray | None:
    """An array's numbers, if it has any that can be looked at: no tracer, nothing deleted, all in this process."""
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, (jax.Array, np.ndarray)) or not leaf.size:
        return None
    # What other processes hold is not asked for: one process may print what the others do not.
    gone = isinstance(leaf, jax.Array) and (leaf.is_deleted() or not leaf.is_fully_addressable)
    return None if gone else np.asarray(leaf)


def _range(numbers: np.ndarray) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return str(low) if low == high else f"{low} to {high}"


def _bytes(tree: Any) -> int:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "size") and hasattr(leaf, "dtype")]
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in leaves)
