"""QFilters: keep the keys that point away from a direction found for each head beforehand."""

import dataclasses
import os
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxkv._errors import refusal, require
from jaxkv._values import Value
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import Observed, Scorer
from jaxkv.sharding.collectives import own

_REMEDY = "give a safetensors file of one tensor q_filters, [L, K, D], or its folder"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilteredKeys(Scorer, Value):
    """QFilters' scorer: minus the product of a row's key and its head's filter.

    Attributes:
        filters: float32 numbers of all filters, layer by layer, as bytes in the machine's order.
        shape: L, K, D.
    """

    filters: bytes = dataclasses.field(default=b"", repr=False)
    shape: tuple[int, int, int] = (0, 0, 0)

    def observe(self, seen: Observed) -> Float[Array, "B K S"]:
        """Scores `[B, K, S]`: minus the product of each row's key and its head's filter."""
        (_, heads, _, dim), axes = seen.k.shape, seen.axes
        whole = heads if axes is None else heads * axes.size("K")
        _, known, size = self.shape
        given, wanted = f"{known} kv heads of {size} channels", f"the model has {whole} of {dim}"
        require((known, size) == (whole, dim), "q_filters", given, wanted)
        filters = jnp.asarray(np.frombuffer(self.filters, np.float32).reshape(self.shape))[seen.layer]
        mine = own(filters, "K", 0, axes)
        keys = seen.k.astype(jnp.float32)
        return -jnp.einsum("bksd,kd->bks", keys, mine, precision=lax.Precision.HIGHEST)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class QFilters(Method):
    """Keeps the rows whose keys have the smallest products with their head's filter, a main direction of its queries.

    Filters belong to one model and come from a file: the first right singular vectors of queries of many texts, signed
    so that attention falls with the product, as published for several models.

    Attributes:
        q_filters: a safetensors file with one tensor `q_filters`, `[L, K, D]`, or the folder of its model.safetensors.

    References:
        Godey et al., Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression, arXiv:2503.02812.
    """

    budget: int | float | None = 1024
    q_filters: str | None = None

    paper: ClassVar[str] = "Q-Filters, arXiv:2503.02812"

    def _check(self) -> None:
        require(self.every is None, "every", self.every, "filters are compared with keys of prompts: leave it out")
        if self.q_filters is not None:
            if not isinstance(self.q_filters, (str, os.PathLike)):
                raise TypeError(f"q_filters={self.q_filters!r}: {_REMEDY}")
            object.__setattr__(self, "q_filters", os.fspath(self.q_filters))

    def for_model(self, layers: int, found: tuple[int, ...] | None) -> Method:
        """Returns this policy; raises ValueError if it has no filters, or those of a model of other layers."""
        require(self.q_filters is not None, "q_filters", None, _REMEDY)
        known = self.parts().scorer.shape[0]  # type: ignore[union-attr]
        require(known == layers, "q_filters", f"{known} layers", f"the model has {layers}")
        return self

    def parts(self) -> Parts:
        """Returns `Parts` that score rows by minus the product of key and filter."""
        return self.compose(scorer=FilteredKeys() if self.q_filters is None else _read(self.q_filters))


def _read(given: str) -> FilteredKeys:
    """Scorer by the filters of a safetensors file; ValueError names the file and what is wrong with it."""
    # Only here: the reader takes time to import.
    from jaxkv.checkpoints.safetensors_files import SINGLE, read_header

    path = Path(given).expanduser()
    path = path / SINGLE if path.is_dir() else path
    try:
        tensors = read_header(path)
    except (OSError, ValueError) as error:
        raise refusal("q_filters", given, f"{error}: {_REMEDY}") from None
    tensor = tensors.get("q_filters")
    fits = tensor is not None and len(tensor.shape) == 3
    require(fits, "q_filters", given, _REMEDY)
    array = tensor.read(()).astype(np.float32)  # type: ignore[union-attr]
    require(array.size > 0 and bool(np.isfinite(array).all()), "q_filters", given, f"not all finite: {_REMEDY}")
    return FilteredKeys(filters=np.ascontiguousarray(array).tobytes(), shape=array.shape)
