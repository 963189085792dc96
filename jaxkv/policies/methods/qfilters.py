"""QFilters: keep the keys that point away from a direction found for each head beforehand."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkv._errors import require
from jaxkv._values import Value
from jaxkv.models.config import ModelConfig
from jaxkv.policies.head_filters import HeadFilters
from jaxkv.policies.of_model import given
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import Observed, Scorer
from jaxkv.sharding.collectives import own


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilteredKeys(Scorer, Value):
    """QFilters' scorer: minus the product of a row's key and its head's filter.

    Attributes:
        filters: the model's filters; None is refused where prompts are read.
    """

    filters: HeadFilters | None = None

    @property
    def model_layers(self) -> int | None:
        """Number of layers of the model that the filters belong to; None without filters."""
        return None if self.filters is None else self.filters.layers

    def observe(self, seen: Observed) -> Float[Array, "B K S"]:
        """Scores `[B, K, S]`: minus the product of each row's key and its head's filter."""
        (_, heads, _, dim), axes, filters = seen.k.shape, seen.axes, given(self.filters, HeadFilters)
        filters.require_sizes(heads=heads if axes is None else heads * axes.size("K"), dim=dim)
        mine = own(jnp.asarray(filters.numbers)[seen.layer], "K", 0, axes)
        keys = seen.k.astype(jnp.float32)
        return -jnp.einsum("bksd,kd->bks", keys, mine, precision=lax.Precision.HIGHEST)

    def require_fits(self, config: ModelConfig) -> None:
        """Raises ValueError without filters, or with those of a model of other sizes."""
        given(self.filters, HeadFilters).require_fits(config)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class QFilters(Method):
    """Keeps the rows whose keys have the smallest products with their head's filter, a main direction of its queries.

    Filters belong to one model and come from a file: the first right singular vectors of queries of many texts, signed
    so that attention falls with the product, as published for several models.

    Attributes:
        q_filters: a safetensors file with one tensor `q_filters`, `[L, K, D]`, or the folder of its model.safetensors,
            or what `HeadFilters.read` returned.

    References:
        Godey et al., Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression, arXiv:2503.02812.
    """

    budget: int | float | None = 1024
    q_filters: str | HeadFilters | None = None

    paper: ClassVar[str] = "Q-Filters, arXiv:2503.02812"

    def _check(self) -> None:
        require(self.every is None, "every", self.every, "filters are compared with keys of prompts: leave it out")
        if self.q_filters is not None:
            object.__setattr__(self, "q_filters", HeadFilters.read("q_filters", self.q_filters))

    @property
    def _scorer(self) -> FilteredKeys:
        """The scorer (`FilteredKeys`) with this policy's filters."""
        return FilteredKeys(filters=self.q_filters if isinstance(self.q_filters, HeadFilters) else None)

    def parts(self) -> Parts:
        """Returns `Parts` that score rows by minus the product of key and filter."""
        return self.compose(scorer=self._scorer)
