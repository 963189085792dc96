"""A tensor of a checkpoint, whichever file it lies in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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
