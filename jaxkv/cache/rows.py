"""`Rows`: compressed cache for models outside jaxkv; `append` and `attend`: its use for each new token."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxkv._checks import brief, settled, shortened, whole
from jaxkv._errors import require
from jaxkv.attention.shaping import Shaping
from jaxkv.attention.steps import NewRows
from jaxkv.attention.xla import Reach, Walk, over_pool
from jaxkv.cache.layout import Layout
from jaxkv.cache.pools import Pool, dense_pool
from jaxkv.engine.segments import in_window
from jaxkv.models.config import Windows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["k", "v", "pos", "start", "length", "seen", "left_out", "sink_logits"],
    meta_fields=["layout", "windows", "softcap"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Compressed KV cache of one or several layers as a pytree: kept and appended keys, values, positions, segments.

    Attributes:
        k: `[B, P, D]` keys of each layer's pool; a single pool where layers share one (`layout.one_pool`).
        v: `[B, P, D]` values likewise.
        pos: `i32[B, P]` original positions; -1 where no row is.
        start: `i32[L, B, K]` first row of each segment.
        length: `i32[L, B, K]` rows in each segment.
        seen: `i32[L, B]` tokens each sequence has had, and so the next position; layers differ while a step is under
            way.
        left_out: `i32[L, B]` tokens that `append` had no room for while numbers were traced: 0 in a cache that lacks
            nothing. Look at it after a `jit`.
        sink_logits: `f[H]` learned logits of each layer's query heads, which take part in the softmax; None without.
        layout: how segments lie in their pool.
        windows: number of last tokens that each layer's tokens attend to; None for all.
        softcap: cap of the layers' logits; None for none.
    """

    k: tuple[Array, ...]
    v: tuple[Array, ...]
    pos: tuple[Array, ...]
    start: Array
    length: Array
    seen: Array
    left_out: Array
    sink_logits: tuple[Array | None, ...]
    layout: Layout
    windows: Windows
    softcap: float | None

    def __repr__(self) -> str:
        pools = ", ".join(
            dict.fromkeys(shown(each) if hasattr(each, "dtype") else repr(each) for each in self.k)
        )
        numbers = f"seen={_numbers(self.seen)}, left_out={_numbers(self.left_out)}"
        return f"Rows({getattr(self.start, 'shape', '?')[0]} layers, k and v {pools}, {numbers}, {self.layout.value})"

    def pool(self, layer: int) -> Pool:
        """The `Pool` (keys, values and positions) that holds a layer's segments.

        Args:
            layer: index among the layers held.

        Returns:
            Its keys, values and positions.
        """
        at = self.layout.pool_of(layer)
        return dense_pool(self.k[at], self.v[at], self.pos[at])

    def free(self, layer: int = 0) -> Int[Array, " B"]:
        """Number of tokens that can still be appended to a layer, `[B]`: the smallest number over its kv heads.

        Args:
            layer: index among the layers held.

        Returns:
            Rows, the smallest over the heads.
        """
        pools = [keys.shape[1] for keys in self.k]
        return self.layout.free(self.start, self.length, pools)[layer].min(axis=1)

    def positions(self, layer: int = 0) -> list[list[Int[np.ndarray, " n"]]]:
        """Original positions of a layer's rows on the host: by sequence and kv head, in the order of the rows.

        Args:
            layer: index among the layers held.

        Returns:
            A list for each sequence, with an i32 array of length `length[layer, b, h]` for each kv head.
        """
        layer = _held_layer(self, layer)
        pos, starts, lengths = (
            np.asarray(each)
            for each in (self.pool(layer).pos, self.start[layer], self.length[layer])
        )
        return [
            [held[start : start + length] for start, length in zip(*each, strict=True)]
            for held, *each in zip(pos, starts, lengths, strict=True)
        ]


@settled
def append(
    rows: Rows, k: ArrayLike, v: ArrayLike, *, count: ArrayLike | None = None, layer: int = 0
) -> Rows:
    """Appends the keys and values of new tokens to one layer of `Rows`; returns the new `Rows`.

    Args:
        rows: from `compress`, unchanged unless the caller's `jit` is told to donate it.
        k: `[B, K, N, D]` keys after RoPE at their own positions, which `rows.seen` counts.
        v: `[B, K, N, D]` values.
        count: `i32[B]` tokens of the N that each sequence has, the others being padding; all by default.
        layer: index among the layers held.

    Returns:
        The rows with these behind them. Where numbers are traced, tokens for which there is no room are left out and
        counted in `left_out`, and no other row suffers; their positions count as seen.

    Raises:
        ValueError: if arrays do not fit, or, where numbers are known, if there is no room.
    """
    layer = _held_layer(rows, layer)
    k, v = as_keys_values(k, v)
    pool = rows.pool(layer)
    batch, heads, tokens, dim = k.shape
    fits = (batch, heads, dim) == (*rows.start.shape[1:], pool.k.shape[2])
    wanted = [*rows.start.shape[1:], "N", pool.k.shape[2]]
    require(fits, "k", list(k.shape), f"these rows take [B, K, N, D] = {wanted}")
    require(
        k.dtype == pool.k.dtype,
        "k",
        str(k.dtype),
        f"these rows are {pool.k.dtype}: give keys and values of it",
    )
    written, free = as_counts("count", count, batch, tokens), rows.free(layer)
    if known(written, free):
        short = int(np.max(np.asarray(written) - np.asarray(free)))
        remedy = f"{short} more than there is room for: give jaxkv.compress a larger room"
        require(short <= 0, "k", f"{tokens} tokens", remedy)
    taken = jnp.clip(free, 0, written)
    start, length, seen = rows.start[layer], rows.length[layer], rows.seen[layer]
    positions = seen[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    new = NewRows(k=k, v=v, positions=positions, count=taken, end=start + length)
    after = pool.appended(new)
    at = rows.layout.pool_of(layer)
    return dataclasses.replace(
        rows,
        k=(*rows.k[:at], after.k, *rows.k[at + 1 :]),
        v=(*rows.v[:at], after.v, *rows.v[at + 1 :]),
        pos=(*rows.pos[:at], after.pos, *rows.pos[at + 1 :]),
        length=rows.length.at[layer].add(taken[:, None]),
        seen=rows.seen.at[layer].add(written),
        left_out=rows.left_out.at[layer].add(written - taken),
    )


@settled
def attend(q: ArrayLike, rows: Rows, *, count: ArrayLike | None = None, layer: int = 0) -> Array:
    """Attention output `[B, H, N, D]` of the last N appended tokens' queries over a layer's rows, causal among the N.

    Logits are scaled by 1 / sqrt(D); a model that scales by s multiplies its queries by s * sqrt(D). Reverse-mode
    gradients are supported, except if layers share a pool or a kv head has 48 query heads or more: there a loop walks
    the segments, with as many steps as the longest needs.

    Args:
        q: `[B, H, N, D]` queries after RoPE of the last N tokens, whose rows are the last N of each segment: `append`
            has put them there, at once or one by one. Where numbers are traced this is not looked at, and an output
            counts rows of later tokens where it does not hold.
        rows: the rows.
        count: `i32[B]` tokens of the N that each sequence has, as given to `append`; all by default.
        layer: index among the layers held.

    Returns:
        `[B, H, N, D]` in q's dtype; anything finite for padding.

    Raises:
        ValueError: if shapes do not fit, or, where numbers are known, if there are more queries of a sequence than its
            last rows have positions in a line.
    """
    layer = _held_layer(rows, layer)
    pool, start, length = rows.pool(layer), rows.start[layer], rows.length[layer]
    batch, heads = start.shape
    grouped = as_grouped("q", q, batch, heads, pool.k)
    tokens = grouped.shape[3]
    written = as_counts("count", count, batch, tokens)
    # Rows are only ever appended: later tokens lie at the end of each segment, unless there was no room for them.
    last = jnp.take_along_axis(pool.pos, jnp.maximum(start + length - 1, 0), axis=1)
    last = jnp.where(length > 0, last, -1).max(axis=1)
    taken = jnp.clip(last + 1 - (rows.seen[layer] - written), 0, written)
    after = jnp.maximum(taken - 1 - jnp.arange(tokens, dtype=jnp.int32)[:, None], 0)
    if tokens > 1 and known(pool.pos, start, length, taken):
        _require_last(pool.pos, start, length, last, taken)

    window, sinks = rows.windows[layer], as_sinks(rows.sink_logits[layer], heads, grouped.shape[2])
    shaping = Shaping(softcap=rows.softcap, sink_logits=sinks)
    # What a window leaves of segments begins at no stride.
    walk = rows.layout.walk if window is None else Walk.WINDOWS

    def one(q: Float[Array, "B K G D"], after: Int[Array, " B"]) -> Float[Array, "B K G D"]:
        lies = in_window(start, jnp.maximum(length - after[:, None], 0), window)
        reach = Reach(start=lies[0], length=lies[1], walk=walk)
        return shaping.joined(*over_pool(q, pool.k, pool.v, reach, rows.softcap))[0]

    if tokens == 1:
        out = one(grouped[:, :, :, 0], after[0])[:, :, :, None]
    else:
        out = jax.vmap(one, in_axes=(3, 0), out_axes=3)(grouped, after)
    return out.reshape(batch, -1, tokens, out.shape[-1])


def _require_last(pos: Array, start: Array, length: Array, last: Array, taken: Array) -> None:
    """Raises ValueError unless the last `taken` rows of each segment have consecutive positions up to `last`."""
    behind = np.arange(int(taken.max(initial=0)))
    row = np.asarray(start + length - 1)[..., None] - behind
    found = np.take_along_axis(np.asarray(pos)[:, None], np.maximum(row, 0), axis=2)
    right = (behind < np.asarray(length)[..., None]) & (
        found == np.asarray(last)[:, None, None] - behind
    )
    wrong = (~right & (behind < np.asarray(taken)[:, None, None])).any(axis=1)
    if wrong.any():
        at = int(wrong.any(axis=1).argmax())
        held = int(wrong[at].argmax())
        remedy = f"of sequence {at} the last rows of each kv head are the last {held} positions: give that many queries"
        raise ValueError(
            f"q={int(taken[at])} tokens: {remedy}, or count= where sequences have fewer than others"
        )


def as_keys_values(k: Any, v: Any) -> tuple[Array, Array]:
    """Validates a layer's keys and values `[B, K, S, D]` and returns them as JAX arrays; ValueError otherwise."""
    k, v = jnp.asarray(k), jnp.asarray(v)
    for field, rows in (("k", k), ("v", v)):
        require(
            rows.ndim == 4,
            field,
            list(rows.shape),
            "give [B, K, S, D]: batch, kv heads, tokens, head dim",
        )
        require(
            jnp.issubdtype(rows.dtype, jnp.floating),
            field,
            str(rows.dtype),
            "give floating-point rows",
        )
    require(
        v.shape == k.shape and v.dtype == k.dtype,
        "v",
        shown(v),
        f"give values as the keys are: {shown(k)}",
    )
    require(k.dtype.itemsize <= 4, "k", str(k.dtype), "give float32, bfloat16 or float16")
    return k, v


def order_hint(k: Array) -> str:
    """Text for errors about `[B, K, S, D]` with more heads than tokens, which may be `[B, S, K, D]`; else empty."""
    heads, tokens = k.shape[1:3]
    return (
        f"; {heads} heads of {tokens} tokens: give [B, S, K, D] as k.swapaxes(1, 2)"
        if heads > tokens
        else ""
    )


def as_grouped(
    field: str, q: Any, batch: int, heads: int, rows: Array
) -> Float[Array, "B K G N D"]:
    """Validates queries `[B, H, N, D]` and returns them as `[B, K, G, N, D]`; ValueError if they do not fit the keys.

    `field` is the argument's name in errors, `rows` are the keys.
    """
    q = jnp.asarray(q)
    dim, shape = rows.shape[-1], list(q.shape)
    require(
        q.ndim == 4,
        field,
        shape,
        "give [B, H, N, D]; q of [B, K, G, N, D] as q.reshape(B, K * G, N, D)",
    )
    fits = (q.shape[0], q.shape[3]) == (batch, dim) and q.shape[1] % heads == 0 and q.size > 0
    require(
        fits,
        field,
        shape,
        f"give [B, H, N, D] with B = {batch}, D = {dim}, and H a multiple of K = {heads}",
    )
    require(
        q.dtype == rows.dtype, field, str(q.dtype), f"keys are {rows.dtype}: give queries of it"
    )
    return q.reshape(batch, heads, -1, *q.shape[2:])


def as_floats(field: str, given: Any) -> Float[Array, "..."] | None:
    """Validates numbers of a floating dtype and returns them as a JAX array, or None; ValueError for others."""
    if given is None:
        return None
    array = jnp.asarray(given)
    require(
        jnp.issubdtype(array.dtype, jnp.floating),
        field,
        shown(array),
        "give floating-point numbers",
    )
    return array


def as_sinks(given: Any, heads: int, group: int) -> Float[Array, "K G"] | None:
    """Validates sink logits `[H]` of K kv heads' groups and returns them as `[K, G]`, or None; else ValueError."""
    array = as_floats("sink_logits", given)
    if array is None:
        return None
    remedy = f"give one number for each of {heads * group} query heads, f[H]"
    require(array.shape == (heads * group,), "sink_logits", list(array.shape), remedy)
    return array.reshape(heads, group)


def as_counts(field: str, given: Any, batch: int, most: int, hint: str = "") -> Int[Array, " B"]:
    """Validates numbers of tokens per sequence within [0, most] and returns `i32[B]`; `most` for None; else ValueError.

    The error for other numbers ends in `hint`.
    """
    if given is None:
        return jnp.full((batch,), most, jnp.int32)
    # Host arrays are checked before conversion, which would truncate them to 32 bits.
    counts = given if isinstance(given, jax.Array) else np.asarray(given)
    fits = counts.shape == (batch,) and np.issubdtype(counts.dtype, np.integer)
    require(
        fits, field, shown(counts), f"give one whole number for each of {batch} sequences, i32[B]"
    )
    if known(counts):
        numbers = np.asarray(counts)
        inside = bool(((numbers >= 0) & (numbers <= most)).all())
        require(
            inside,
            field,
            numbers.tolist(),
            f"there are {most} tokens: give 0 to {most} for each sequence{hint}",
        )
    return jnp.asarray(counts, jnp.int32)


def _held_layer(rows: Rows, layer: Any) -> int:
    """Validates a layer's index among the layers in `rows`, returns it as an int; TypeError if these are no `Rows`."""
    if not isinstance(rows, Rows):
        raise TypeError(
            f"rows={shortened(brief(rows))}: give the Rows of jaxkv.compress: attend(q, rows), append(rows, k, v)"
        )
    layers = rows.start.shape[0]
    remedy = f"these rows hold layers 0 to {layers - 1}"
    layer = whole("layer", layer, remedy, least=0)
    require(layer < layers, "layer", layer, remedy)
    return layer


def shown(array: Array | np.ndarray) -> str:
    """Text of an array's dtype and shape, for error messages."""
    return f"{array.dtype}{list(array.shape)}"


def _numbers(array: Any) -> str:
    """Text of a small array's numbers on one line; its type's name where these cannot be read or are too many."""
    readable = isinstance(array, (jax.Array, np.ndarray)) and known(array) and array.size <= 16
    if readable and isinstance(array, jax.Array):
        # Of arrays that a call was given to keep, and of those on other hosts, nothing can be read.
        readable = not array.is_deleted() and array.is_fully_addressable
    return str(np.asarray(array).tolist()) if readable else type(array).__name__


def known(*arrays: Array | np.ndarray) -> bool:
    """True if none of the arrays is a tracer, so that their values can be read."""
    return not any(isinstance(array, jax.core.Tracer) for array in arrays)
