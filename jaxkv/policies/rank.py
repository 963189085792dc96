"""Ranks, by which entries are evicted while decoding, and their base `Rank`."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv._checks import (
    has_overridden_methods,
    require_instance,
    require_shape_and_dtype,
    validate_bool,
    validate_field,
    validate_float,
)
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require


class Rank:
    """Base of ranks: how entries' scores change while decoding; the entry of lowest rank is evicted next.

    Subclass it in a frozen dataclass and override what differs. A prompt's entries start with the scorer's
    `score_entries`. At each new token a score becomes `decay * score` plus the attention that the entry receives.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Set `runs_in_kernels` to False for a rank class that overrides a method without declaring it."""
        super().__init_subclass__(**options)
        if has_overridden_methods(cls, "runs_in_kernels"):
            cls.runs_in_kernels = False  # type: ignore[assignment,method-assign]

    @property
    def runs_in_kernels(self) -> bool:
        """True if GPU and TPU kernels can run `rank_entries`, elementwise jax.numpy of two arguments; default False."""
        return False

    @property
    def stores_scores(self) -> bool:
        """True, the default, if the cache stores a score for each entry; if False, `rank_entries` receives zeros."""
        return True

    @property
    def decay(self) -> float | None:
        """Factor in [0, 1] on scores at each new token, before attention is added; None (default) if none is added.

        With None, entries keep their first scores.
        """
        return None

    def score_new_entries(
        self, k: Float[Array, "B K N D"], v: Float[Array, "B K N D"]
    ) -> Float[Array, "B K N"]:
        """Return initial float32 scores `[B, K, N]` of new entries, before attention is added; zeros by default.

        Args:
            k: the new entries' keys.
            v: their values.

        Returns:
            The scores.
        """
        return jnp.zeros(k.shape[:3], jnp.float32)

    def rank_entries(
        self, score: Float[Array, "..."], age: Int[Array, "..."]
    ) -> Float[Array, "..."]:
        """Return float32 ranks of entries from scores and ages, the lowest evicted first; the scores by default.

        Args:
            score: each entry's current score.
            age: tokens since the entry's own, that one included.

        Returns:
            The ranks, of the scores' shape.
        """
        return score


@frozen_dataclass
class ByAttention(Rank):
    """Rank by received attention, summed with a decay, divided by age if `mean`: the entry with the least is evicted.

    Attributes:
        decay: factor on older attention at each new token: 1 sums all attention (H2O), 0 uses the newest alone (TOVA).
        mean: divide by the number of queries that could see the entry (RoCo), so that early entries have no advantage.
    """

    runs_in_kernels = True

    decay: float = 1.0
    mean: bool = False

    def __post_init__(self) -> None:
        validate_field(
            self,
            "decay",
            validate_float,
            "give a factor between 0 and 1: 1 forgets nothing",
            high=1.0,
        )
        validate_field(self, "mean", validate_bool)

    def rank_entries(
        self, score: Float[Array, "..."], age: Int[Array, "..."]
    ) -> Float[Array, "..."]:
        """Return ranks of entries: attention scores, divided by ages in tokens if `mean`."""
        return score / jnp.maximum(age, 1).astype(jnp.float32) if self.mean else score


@frozen_dataclass
class ByAge(Rank):
    """Rank by age: the oldest entry is evicted."""

    runs_in_kernels = True
    stores_scores = False

    def rank_entries(
        self, score: Float[Array, "..."], age: Int[Array, "..."]
    ) -> Float[Array, "..."]:
        """Return float32 ranks of entries: minus their ages, so that the oldest entry is evicted."""
        return -age.astype(jnp.float32)


@frozen_dataclass
class ByNewScores(Rank):
    """Rank by scores that the scorer computes again at each compression, averaged with older ones if `smoothing`.

    Attributes:
        smoothing: weight of an entry's older score in its new one, an exponential mean; 0 stores no scores.
    """

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        remedy = "give a weight below 1: 0 uses new scores alone"
        validate_field(self, "smoothing", validate_float, remedy, high=1.0)
        require(self.smoothing < 1, "smoothing", self.smoothing, remedy)

    @property
    def stores_scores(self) -> bool:
        """True if scores are averaged with older ones."""
        return self.smoothing > 0

    def score_new_entries(
        self, k: Float[Array, "B K N D"], v: Float[Array, "B K N D"]
    ) -> Float[Array, "B K N"]:
        """Return NaN `[B, K, N]`, which stands for no score: entries are scored by the next compression."""
        return jnp.full(k.shape[:3], jnp.nan, jnp.float32)

    def average_scores(
        self, older: Float[Array, "..."], new: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """Return the weighted mean of older and new scores; new scores where older ones are not finite."""
        mean = self.smoothing * older + (1 - self.smoothing) * new
        return jnp.where(jnp.isfinite(older), mean, new)


def compute_entry_ranks(
    rank: Rank, score: Float[Array, "..."], age: Int[Array, "..."]
) -> Float[Array, "..."]:
    """Return float32 ranks of entries by `rank`, with NaN as -inf; scores and ages are broadcast.

    TypeError if the rank returns another shape or dtype.
    """
    shape = jnp.broadcast_shapes(score.shape, age.shape)
    given = rank.rank_entries(jnp.broadcast_to(score, shape), jnp.broadcast_to(age, shape))
    ranks = require_shape_and_dtype(rank, "rank_entries", given, shape, "entry")
    return jnp.where(jnp.isnan(ranks), -jnp.inf, ranks)


def check_eviction_rank(label: str, rank: Any) -> None:
    """Raise TypeError unless `rank` is an instance of Rank, and ValueError for a decay outside [0, 1]."""
    require_instance(label, rank, Rank, "give a rank such as ByAttention(), of a subclass of Rank")
    if rank.decay is not None:
        remedy = "give a factor between 0 and 1, or None if attention does not change scores"
        validate_float(f"{label}.decay", rank.decay, remedy, high=1.0)
