"""QFilters: keep the keys along the main direction of their head's queries, from a file or from the prompt."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv._checks import validate_optional_field
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.checkpoints import StoredTensor
from jaxkv.models.config import ModelConfig
from jaxkv.policies.of_model import FileArrays, NamedTensors
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import FutureQuerySettings, Needs, Scorer, ScorerInputs, Scores
from jaxkv.sharding.collectives import average_over_devices, slice_own_shard


@frozen_dataclass
class QFilterVectors(FileArrays):
    """Q-Filters of one model, a vector of D numbers per layer and kv head: arrays, sizes, and a digest for equality.

    Attributes:
        dim: D.
    """

    of_field = "q_filters"
    wanted = "the filters of your model, a safetensors file of one tensor q_filters, [L, K, D], or its folder"

    dim: int

    @classmethod
    def create_from_tensors(cls, stored: Mapping[str, StoredTensor]) -> "QFilterVectors":
        """Create `QFilterVectors` from stored tensors; ValueError if `q_filters` is missing or malformed."""
        array = NamedTensors("", dict(stored)).pop_tensor("q_filters", None, None, None)
        layers, heads, dim = array.shape
        return cls.create_from_arrays(array, repr(array.shape), layers=layers, heads=heads, dim=dim)


@frozen_dataclass
class QFilterScorer(Scorer):
    """QFilters' scorer: minus the dot product of an entry's key and its head's filter vector.

    Attributes:
        q_filters: the model's filters; None computes them for each prompt: minus the first right singular vector of a
            kv head's queries, rotated to positions after the prompt, signed towards their mean.
    """

    q_filters: QFilterVectors | None = None

    @property
    def model_layer_count(self) -> int | None:
        """Number of layers of the model that the filters belong to; None without filters."""
        return None if self.q_filters is None else self.q_filters.layers

    @property
    def needs(self) -> Needs:
        """`Needs` of the scorer: mean and covariance of the prompt's queries; nothing if `q_filters` are given."""
        return Needs(moments=FutureQuerySettings() if self.q_filters is None else None)

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: minus the dot product of key and filter; ValueError if their sizes differ."""
        _, heads, _, dim = seen.k.shape
        axes = seen.axes
        if self.q_filters is None:
            mine = -_compute_main_query_direction(seen)
        else:
            self.q_filters.require_model_sizes(
                heads=heads if axes is None else heads * axes.count_axis_shards("K"), dim=dim
            )
            mine = slice_own_shard(
                jnp.asarray(self.q_filters.host_arrays)[seen.layer], "K", 0, axes
            )[None]
        keys = seen.k.astype(jnp.float32)
        return -jnp.einsum(
            "bksd,bkd->bks",
            keys,
            jnp.broadcast_to(mine, (len(keys), heads, dim)),
            precision="highest",
        )

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError if given filters have other sizes, or another order of channels, than the model."""
        if self.q_filters is not None:
            self.q_filters.require_fits_model(config)
            remedy = "this model has another order of channels than the file: leave it out"
            require(config.channel_permutation is None, "q_filters", self.q_filters, remedy)


def _compute_main_query_direction(seen: ScorerInputs) -> Float[Array, "B K D"]:
    """Return the first right singular vector `[B, K, D]` of each kv head's queries, signed towards their mean."""
    mean = seen.moments.mean
    covariance = seen.moments.covariance
    assert covariance is not None
    each = covariance + mean[..., None] * mean[..., None, :]
    # The mean over all query heads of a kv head, also if devices share them.
    products, middle = (
        average_over_devices(of.mean(axis=2), "G", seen.group_axes) for of in (each, mean)
    )
    direction = jnp.linalg.eigh(products)[1][..., -1]
    return jnp.where((direction * middle).sum(axis=-1, keepdims=True) < 0, -direction, direction)


@register
@frozen_dataclass
class QFilters(BudgetMethod):
    """Keep entries whose keys have the largest dot product with the head's main query direction, from file or prompt.

    Published filters belong to one model and come from a file: the first right singular vectors of queries of many
    texts, signed so that attention falls with the product. Without a file, each prompt's own queries replace them.

    Attributes:
        q_filters: a safetensors file with one tensor `q_filters`, `[L, K, D]`, or the folder of its model.safetensors,
            or a result of `QFilterVectors.load_from_file`; None for filters of each prompt's own queries.

    References:
        Godey et al., Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression, arXiv:2503.02812.
    """

    q_filters: str | QFilterVectors | None = None

    paper = "Q-Filters, arXiv:2503.02812"

    scored_by = QFilterScorer

    def _check_fields(self) -> None:
        require(
            self.every is None,
            "every",
            self.every,
            "filters are for keys of prompts: leave it out",
        )
        validate_optional_field(self, "q_filters", QFilterVectors.load_from_file)
