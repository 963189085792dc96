"""Reader of one parameter from checkpoint tensors: all or a device's shard, in a float dtype or quantised."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float, Float16, Int8, UInt8

from jaxkv.checkpoints import StoredTensor
from jaxkv.models.sources import TensorSource
from jaxkv.models.stored import GROUP, GROUP_BYTES
from jaxkv.sharding.parameters import get_parameter_spec

# Elements dequantised or quantised in one step, to limit those in memory as float32.
_AT_ONCE = 1 << 19
# The checkpoint's tensors of one parameter.
Tensors = list[tuple[TensorSource, StoredTensor]]


def read_parameter(parts: Tensors, like: Any, path: str, mesh: Mesh | None) -> jax.Array:
    """Read one float parameter from its checkpoint tensors as a JAX array of `like`'s dtype; sharded if on a mesh."""
    shape = like.shape
    dtype = like.dtype
    if mesh is None:
        return jnp.array(_read_shard(parts, shape, dtype, (slice(None),) * len(shape)))
    # Devices with the same shard share one read.
    held: dict[tuple, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        key = tuple(each.indices(size) for each, size in zip(index, shape, strict=True))
        if key not in held:
            held[key] = _read_shard(parts, shape, dtype, index)
        return held[key]

    where = NamedSharding(mesh, get_parameter_spec(path, mesh))
    return jax.make_array_from_callback(shape, where, part, dtype=dtype)


def read_quantised_weight(
    parts: Tensors, like: Any, path: str, beside: Sequence[str], mesh: Mesh | None
) -> list[jax.Array]:
    """Read and quantise a linear weight; return a list of codes and scale (8 bits), or codes, scales, minima (4 bits).

    Args:
        parts: the checkpoint's tensors.
        like: shape and dtype of the codes: int8, or uint8 with two 4-bit codes per byte.
        path: the weight's path.
        beside: paths of its scale (8 bits), or of its scales and minima (4 bits).
        mesh: the mesh, or None.

    Returns:
        Codes, then an array for each path of `beside`. In 8 bits complete rows share a scale: a device with a shard of
        each row's elements reads all of them.
    """
    *outputs, last = like.shape
    grouped = like.dtype == np.uint8
    shape = (*outputs, 2 * last if grouped else last)
    stepped = all(tensor.stepped for _, tensor in parts)
    rounded: dict[tuple, tuple[np.ndarray, ...]] = {}

    def quantise_shard(index: tuple[slice, ...], groups: slice) -> tuple[np.ndarray, ...]:
        """Return a shard's codes and scale, in 4 bits codes, scales and minima of `groups`; cached between devices."""
        sizes = (*outputs, shape[-1] // GROUP)
        spans = [each.indices(size) for each, size in zip((*index, groups), sizes, strict=True)]
        key = tuple(spans) if grouped else tuple(spans[:-1])
        if key not in rounded:
            elements = slice(spans[-1][0] * GROUP, spans[-1][1] * GROUP) if grouped else slice(None)
            weight = _read_shard(parts, shape, np.dtype(np.float32), (*index, elements))
            to_int4 = functools.partial(quantise_to_int4, stepped=stepped)
            rounded[key] = _quantise_rows(to_int4 if grouped else quantise_to_int8, weight)
        return rounded[key]

    if mesh is None:
        return [
            jnp.array(each) for each in quantise_shard((slice(None),) * len(outputs), slice(None))
        ]

    def codes_at(index: Any) -> np.ndarray:
        if not grouped:
            return quantise_shard(index[:-1], slice(None))[0][..., index[-1]]
        first, end, _ = index[-1].indices(last)
        return quantise_shard(index[:-1], slice(first // GROUP_BYTES, end // GROUP_BYTES))[0]

    def beside_at(at: int) -> Callable[[Any], np.ndarray]:
        return lambda index: quantise_shard(
            index[: len(outputs)], index[-1] if grouped else slice(None)
        )[at]

    made: list[jax.Array] = [
        jax.make_array_from_callback(
            like.shape, NamedSharding(mesh, get_parameter_spec(path, mesh)), codes_at
        )
    ]
    size = (*outputs, shape[-1] // GROUP) if grouped else tuple(outputs)
    for at, each in enumerate(beside, start=1):
        made.append(
            jax.make_array_from_callback(
                size, NamedSharding(mesh, get_parameter_spec(each, mesh)), beside_at(at)
            )
        )
    return made


def _quantise_rows(
    quantise: Callable[[np.ndarray], tuple[np.ndarray, ...]], weight: Float[np.ndarray, "*out E"]
) -> tuple[np.ndarray, ...]:
    """Quantise a weight some rows at a time, which limits temporary arrays; return what `quantise` returns."""
    rows = weight.reshape(-1, weight.shape[-1])
    step = max(1, _AT_ONCE // rows.shape[1])
    pieces = [quantise(rows[start : start + step]) for start in range(0, len(rows), step)]
    return tuple(
        np.concatenate(each).reshape(*weight.shape[:-1], *each[0].shape[1:])
        for each in zip(*pieces, strict=True)
    )


def quantise_to_int4(
    weight: Float[np.ndarray, "*out E"], *, stepped: bool = False
) -> tuple[
    UInt8[np.ndarray, "*out n"], Float16[np.ndarray, "*out g"], Float16[np.ndarray, "*out g"]
]:
    """Quantise a weight to 4 bits: bytes of two codes `[*out, E/2]`, float16 scales and minima `[*out, E/32]`.

    A code from 0 to 15 is code * scale + minimum, with both as stored: 15 steps from a group's smallest value to its
    largest. Values that are already multiples of a step (`stepped`) keep it, and a group may use fewer steps.
    """
    grouped = weight.reshape(*weight.shape[:-1], -1, GROUP)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # NaN is rejected later
        least = grouped.min(axis=-1)
        span = np.ptp(grouped, axis=-1)
        scales = (span / np.float32(15)).astype(np.float16)
        leasts = least.astype(np.float16)
        codes, off = _round_to_steps(grouped, scales, leasts)
        if stepped:
            gaps = np.diff(np.sort(grouped, axis=-1), axis=-1)
            # Equal values differ by 0 or by rounding.
            step = gaps.min(axis=-1, where=gaps > span[..., None] / 30, initial=np.inf)
            own = (span / np.rint(span / step).clip(1, 15)).astype(np.float16)
            theirs, closer = _round_to_steps(grouped, own, leasts)
            better = closer < off
            codes = np.where(better[..., None], theirs, codes)
            scales = np.where(better, own, scales)
    packed = codes[..., :GROUP_BYTES] | (codes[..., GROUP_BYTES:] << 4)
    return packed.reshape(*weight.shape[:-1], -1), scales, leasts


def _round_to_steps(
    grouped: Float[np.ndarray, "*out g 32"],
    scales: Float16[np.ndarray, "*out g"],
    leasts: Float16[np.ndarray, "*out g"],
) -> tuple[UInt8[np.ndarray, "*out g 32"], Float[np.ndarray, "*out g"]]:
    """Return codes 0 to 15 of weights by their groups' scales and minima; and each group's squared error."""
    step = np.where(scales == 0, np.float16(1), scales).astype(np.float32)[..., None]
    above = grouped - leasts.astype(np.float32)[..., None]
    codes = np.rint(above / step).clip(0, 15)
    return codes.astype(np.uint8), ((codes * step - above) ** 2).sum(axis=-1)


def quantise_to_int8(
    weight: Float[np.ndarray, "*out E"],
) -> tuple[Int8[np.ndarray, "*out E"], Float[np.ndarray, "*out"]]:
    """Quantise a weight to int8 codes -127 to 127 and one float32 scale per output (its largest magnitude / 127)."""
    scale = np.abs(weight).max(axis=-1) / np.float32(127)
    with np.errstate(invalid="ignore"):  # NaN and infinity are rejected later, by their scales.
        codes = np.rint(weight / np.where(scale == 0, np.float32(1), scale)[..., None])
        return codes.astype(np.int8), scale


def _read_shard(
    parts: Tensors, shape: tuple[int, ...], dtype: np.dtype, index: tuple[slice, ...]
) -> np.ndarray:
    """Read shard `index` of a parameter from its checkpoint tensors as NumPy `dtype`, channels in the model's order."""
    ranges = [range(*each.indices(size)) for each, size in zip(index, shape, strict=True)]
    buffer = np.empty([len(each) for each in ranges], dtype)
    for source, tensor in parts:
        depth = len(source.at)
        if not all(at in span for at, span in zip(source.at, ranges, strict=False)):
            continue
        part = buffer[tuple(at - span.start for at, span in zip(source.at, ranges, strict=False))]
        spans = source.locate_shard_in_tensor(ranges[depth:])
        mine = part.reshape([sum(last - first for first, last in axis) for axis in spans])
        if tensor.computed:
            step = max(1, _AT_ONCE * len(mine) // max(1, mine.size))
            spans[0] = [
                (begin, min(begin + step, last))
                for first, last in spans[0]
                for begin in range(first, last, step)
            ]
        for places in itertools.product(*map(_pack_spans, spans)):
            there = tuple(slice(first, last) for first, last, _ in places)
            whole = all(
                (each.start, each.stop) == (0, size)
                for each, size in zip(there, tensor.shape, strict=True)
            )
            mine[tuple(to for *_, to in places)] = tensor.read(() if whole else there)
        if source.order:
            # Channels of a head are never sharded.
            part[...] = np.take(part, source.order, axis=source.along)
    return buffer


def _pack_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int, slice]]:
    """Return (first, end, slice) for each (first, end) span, the slice being its place in all spans concatenated."""
    ends = itertools.accumulate(last - first for first, last in spans)
    return [
        (first, last, slice(end - last + first, end))
        for (first, last), end in zip(spans, ends, strict=True)
    ]
