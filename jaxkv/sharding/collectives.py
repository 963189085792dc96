"""What one device's part is to the whole, inside a program: sums, maxima and gathers; nothing without a mesh."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxkv.sharding.mesh import LETTERS, NAMES, Axes


def total(x: Array, axes: Axes | None, letter: str = "H") -> Array:
    """The sum over the devices that share an axis of this letter: by default those of a sequence, heads and MLP."""
    return x if axes is None or axes.size(letter) == 1 else lax.psum(x, LETTERS[letter])


def mean_of_devices(x: Array, letter: str, axes: Axes | None) -> Array:
    """The mean over the devices that share an axis of this letter."""
    return x if axes is None or axes.size(letter) == 1 else lax.pmean(x, LETTERS[letter])


def most_of_devices(x: Array, letter: str, axes: Axes | None) -> Array:
    """The largest that any of these devices has."""
    return x if axes is None or axes.size(letter) == 1 else lax.pmax(x, LETTERS[letter])


def gathered(x: Array, letter: str, axis: int, axes: Axes | None) -> Array:
    """The whole of an axis of this letter, of which each device has its part."""
    return x if axes is None or axes.size(letter) == 1 else lax.all_gather(x, LETTERS[letter], axis=axis, tiled=True)


def own(x: Array, letter: str, axis: int, axes: Axes | None) -> Array:
    """The device's part of such an axis again."""
    if axes is None:
        return x
    size = x.shape[axis] // axes.size(letter)
    return lax.dynamic_slice_in_dim(x, first(letter, size, axes), size, axis)


def first(letter: str, size: int, axes: Axes | None) -> Any:
    """Where a device's part of such an axis begins, of so many elements."""
    return 0 if axes is None else lax.axis_index(LETTERS[letter]).astype(jnp.int32) * size


def anywhere(flag: Array, axes: Axes | None) -> Array:
    """Whether it is so on any device."""
    return flag if axes is None else lax.pmax(flag.astype(jnp.int32), NAMES) > 0


def any_of_devices(flag: Array, letter: str, axes: Axes | None) -> Array:
    """Whether it is so on any device that shares an axis of this letter."""
    return flag if axes is None else most_of_devices(flag.astype(jnp.int32), letter, axes) > 0


def count_of_all(flags: Bool[Array, " B"], axes: Axes | None) -> Int[Array, ""]:
    """Number of sequences whose flag is set, over all devices: one number on all of them, whatever they disagree on."""
    return flags.sum(dtype=jnp.int32) if axes is None else lax.psum(flags.sum(dtype=jnp.int32), NAMES) // axes.size("H")
