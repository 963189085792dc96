"""Reads one parameter from checkpoint tensors: whole or a device's part, in a float dtype or rounded to int8 codes."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float, Int8

from jaxkv.checkpoints import StoredTensor
from jaxkv.models.sources import Source
from jaxkv.sharding.parameters import spec_of

# The checkpoint's tensors of one parameter.
Tensors = list[tuple[Source, StoredTensor]]


def read(parts: Tensors, like: Any, path: str, mesh: Mesh | None) -> jax.Array:
    """One parameter as a JAX array, read from its tensors; sharded over `mesh` if one is given."""
    if mesh is None:
        return jnp.array(_part(parts, like.shape, like.dtype, (slice(None),) * len(like.shape)))
    return _spread(parts, like.shape, like.dtype, NamedSharding(mesh, spec_of(path, mesh)))


def read_codes(parts: Tensors, like: Any, path: str, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    """A linear weight read as int8 codes, and a float32 scale per output; both sharded over `mesh` if one is given.

    Whole rows have one scale: a device that holds a part of each row's elements reads all of them.
    """
    rounded: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}

    def of(index: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray]:
        key = tuple(each.indices(size) for each, size in zip(index, like.shape[:-1], strict=True))
        if key not in rounded:
            rounded[key] = codes_of(_part(parts, like.shape, np.dtype(np.float32), (*index, slice(None))))
        return rounded[key]

    if mesh is None:
        whole = of((slice(None),) * (len(like.shape) - 1))
        return jnp.array(whole[0]), jnp.array(whole[1])

    def codes_at(index: Any) -> np.ndarray:
        return of(index[:-1])[0][..., index[-1]]

    def scales_at(index: Any) -> np.ndarray:
        return of(index)[1]

    of_codes, of_scales = (NamedSharding(mesh, spec_of(each, mesh)) for each in (path, f"{path}_scale"))
    return (
        jax.make_array_from_callback(like.shape, of_codes, codes_at),
        jax.make_array_from_callback(like.shape[:-1], of_scales, scales_at),
    )


def codes_of(weight: Float[np.ndarray, "*out E"]) -> tuple[Int8[np.ndarray, "*out E"], Float[np.ndarray, "*out"]]:
    """A weight rounded to int8 codes from -127 to 127, and their float32 scales per output; 0 for outputs of zeros."""
    scale = np.abs(weight).max(axis=-1) / np.float32(127)
    with np.errstate(invalid="ignore"):  # NaN and infinity are refused later, by their scales
        codes = np.rint(weight / np.where(scale == 0, np.float32(1), scale)[..., None])
        return codes.astype(np.int8), scale


def _part(parts: Tensors, shape: tuple[int, ...], dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
    """Part `index` of a parameter as a numpy array, read from its tensors."""
    ranges = [range(*each.indices(size)) for each, size in zip(index, shape, strict=True)]
    buffer = np.empty([len(each) for each in ranges], dtype)
    for source, tensor in parts:
        depth = len(source.at)
        if not all(at in span for at, span in zip(source.at, ranges, strict=False)):
            continue
        mine = buffer[tuple(at - span.start for at, span in zip(source.at, ranges, strict=False))]
        spans = source.spans(ranges[depth:])
        mine = mine.reshape([sum(last - first for first, last in axis) for axis in spans])
        for places in itertools.product(*map(_packed, spans)):
            there = tuple(slice(first, last) for first, last, _ in places)
            whole = all((each.start, each.stop) == (0, size) for each, size in zip(there, tensor.shape, strict=True))
            mine[tuple(to for *_, to in places)] = tensor.read(() if whole else there)
    return buffer


def _packed(spans: list[tuple[int, int]]) -> list[tuple[int, int, slice]]:
    """(first, end, slice) for each (first, end) span: the slice it fills when the spans are concatenated."""
    ends = itertools.accumulate(last - first for first, last in spans)
    return [(first, last, slice(end - last + first, end)) for (first, last), end in zip(spans, ends, strict=True)]


def _spread(parts: Tensors, shape: tuple[int, ...], dtype: np.dtype, where: NamedSharding) -> jax.Array:
    """One parameter as a sharded JAX array; devices that hold the same part share one read."""
    read: dict[tuple, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        key = tuple(each.indices(size) for each, size in zip(index, shape, strict=True))
        if key not in read:
            read[key] = _part(parts, shape, dtype, index)
        return read[key]

    return jax.make_array_from_callback(shape, where, part, dtype=dtype)
