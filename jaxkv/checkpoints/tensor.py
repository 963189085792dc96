"""`StoredTensor`: a tensor of a checkpoint in any file format."""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from jaxkv._dataclasses import frozen_dataclass

# A part of an array, one slice per axis; omitted axes are complete.
Index = tuple[slice, ...]


@frozen_dataclass
class StoredTensor:
    """Tensor of a checkpoint on disk: shape, dtype, and a function that reads it or a part of it as a NumPy array.

    Attributes:
        shape: its axes, the slowest first.
        dtype: dtype of the arrays that are read.
        read: function that reads the part given by one slice per axis; `read(())` reads the tensor.
        stepped: True if each 32 values of a row are steps of one size, at most 16, as in GGUF's blocks of 4 bits.
        computed: True if values are dequantised when read: several parts cost no more than all at once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray] = dataclasses.field(repr=False)
    stepped: bool = False
    computed: bool = False


def complete_index(index: Index, shape: tuple[int, ...]) -> list[slice]:
    """Return one slice with explicit start and stop per axis, for an index that may omit axes and ends."""
    given = (*index, *(slice(None),) * (len(shape) - len(index)))
    return [slice(*each.indices(size)[:2]) for each, size in zip(given, shape, strict=True)]


def parse_dtype_name(name: Any) -> np.dtype | None:
    """Return the NumPy dtype of a name such as "float32" or "bfloat16"; None if the name is unknown."""
    try:
        return np.dtype(getattr(ml_dtypes, name, name)) if isinstance(name, str) else None
    except TypeError:
        return None
