"""`HeadFilters`, a direction for each kv head of a model: read from a safetensors file, compared by content."""

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxkv._errors import refusal, require
from jaxkv._values import Value
from jaxkv.checkpoints.safetensors_files import SINGLE, read_header

_REMEDY = "give a safetensors file of one tensor q_filters, [L, K, D], or its folder"
# Name of the attribute that holds the numbers: no field, as programs are kept by a policy's fields.
_NUMBERS = "_numbers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadFilters(Value):
    """Filters of one model, D numbers for each layer and kv head: their sizes and digest, by which they are compared.

    Their numbers are no field: a saved cache has the digest alone.

    Attributes:
        digest: SHA-256 of the numbers, in hexadecimal.
        layers: L.
        heads: K.
        dim: D.
    """

    digest: str
    layers: int
    heads: int
    dim: int

    @classmethod
    def read(cls, name: str, given: Any) -> "HeadFilters":
        """Reads the tensor `q_filters` of a safetensors file, or of a folder's; `HeadFilters` are returned as they are.

        Args:
            name: the field, for error messages.
            given: the path, or `HeadFilters`.

        Returns:
            The filters.

        Raises:
            TypeError: for anything else.
            ValueError: for a file that cannot be read or holds no such tensor.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, (str, os.PathLike)):
            raise TypeError(f"{name}={given!r}: {_REMEDY}")
        path = Path(given).expanduser()
        try:
            tensor = read_header(path / SINGLE if path.is_dir() else path).get("q_filters")
        except (OSError, ValueError) as error:
            raise refusal(name, os.fspath(given), f"{error}: {_REMEDY}") from None
        fits = tensor is not None and len(tensor.shape) == 3 and jnp.issubdtype(tensor.dtype, np.floating)
        require(fits, name, os.fspath(given), _REMEDY)
        assert tensor is not None
        with np.errstate(over="ignore"):
            array = np.ascontiguousarray(tensor.read(()), np.float32)
        require(array.size > 0 and bool(np.isfinite(array).all()), name, os.fspath(given), f"not all finite: {_REMEDY}")
        layers, heads, dim = array.shape
        digest = hashlib.sha256(repr(array.shape).encode() + array.tobytes()).hexdigest()
        made = cls(digest=digest, layers=layers, heads=heads, dim=dim)
        object.__setattr__(made, _NUMBERS, array)
        return made

    @property
    def numbers(self) -> Float[np.ndarray, "L K D"]:
        """All filters, float32; ValueError for those of a saved cache, which has their digest alone."""
        found = vars(self).get(_NUMBERS)
        remedy = "their numbers are in no saved cache: load it with policy=..., whose filters were read from their file"
        require(found is not None, "q_filters", self, remedy)
        assert found is not None
        return found
