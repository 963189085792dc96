"""A tensor of a checkpoint, whichever file it lies in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

# Which part of each axis; axes that are left out are taken whole.
Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor on disk: only its shape and dtype are in memory.

    Attributes:
        shape: its axes, the slowest first.
        dtype: of the arrays that are read.
        read: makes the array of a part of it; `read(())` that of the whole.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray] = dataclasses.field(repr=False)


def dtype_of(name: Any) -> np.dtype | None:
    """Finds a dtype, those that numpy itself lacks among them.

    Args:
        name: "float32" or "bfloat16", say, from a file perhaps.

    Returns:
        The dtype; None where there is none of this name.
    """
    try:
        return np.dtype(getattr(ml_dtypes, name, name)) if isinstance(name, str) else None
    except TypeError:
        return None
