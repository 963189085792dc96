"""`HeadFilters`, a direction for each kv head of a model: read from a safetensors file, compared by content."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from jaxkv.checkpoints import StoredTensor
from jaxkv.policies.of_model import FileArrays, NamedTensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadFilters(FileArrays):
    """Q-Filters of one model, a vector of D numbers per layer and kv head: arrays, sizes, and a digest for equality.

    Attributes:
        dim: D.
    """

    of_field: ClassVar[str] = "q_filters"
    wanted: ClassVar[str] = (
        "the filters of your model, a safetensors file of one tensor q_filters, [L, K, D], or its folder"
    )

    dim: int

    @classmethod
    def of_tensors(cls, stored: Mapping[str, StoredTensor]) -> "HeadFilters":
        """Makes `HeadFilters` of the tensor `q_filters` `[L, K, D]`; ValueError if missing, misshapen or not finite."""
        array = NamedTensors("", dict(stored)).take("q_filters", None, None, None)
        layers, heads, dim = array.shape
        return cls.of_arrays(array, repr(array.shape), layers=layers, heads=heads, dim=dim)

    @property
    def numbers(self) -> Float[np.ndarray, "L K D"]:
        """All filters `[L, K, D]`, float32; ValueError for those of a saved cache, which has their digest alone."""
        return self.arrays
