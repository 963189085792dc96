"""CAPKV: keep the entries whose values span most of what future queries are likely to attend to."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from jaxkv._checks import validate_field, validate_float, validate_int
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.folding import normalise_vectors
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import FutureQuerySettings, Needs, Scorer, ScorerInputs, Scores

# Added to weights, as in kvpress.
_EPSILON = 1e-6
# Least ridge as a share of the matrix' trace: float32 would lose a ridge of 1 next to much larger numbers.
_RIDGE = 1e-6
# Largest number in a value, so that sums of products are finite.
_MOST = 1e14
_product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)  # not TF32 on GPUs


@frozen_dataclass
class ValueLeverageScorer(Scorer):
    """CAPKV's scorer: leverage of an entry's value among all values, weighted by how well its key fits the mean query.

    An entry's weight w is exp(tau * cosine of key and mean query), over the largest of the query head. Its score is
    w v^T A^-1 v with A = I + sum of w v v^T, averaged over the group's query heads. Where values are so large that
    float32 would lose I, the ridge is a millionth of the trace. The mean query is that of the text's queries, rotated
    by the mean rotation of the following 512 positions. The first `sinks` tokens are not scored.
    """

    follows_last_queries = False

    sinks: int = 4
    tau: float = 5.0
    remembered: int = 0

    @property
    def needs(self) -> Needs:
        """`Needs` of the scorer: the mean query expected after the text, and `remembered` last queries."""
        moments = FutureQuerySettings(skip=self.sinks, covariance=False)
        return Needs(queries=self.remembered, moments=moments)

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: value leverage * key's fit to mean query, mean over query heads; 0 for sinks."""
        counts = jnp.broadcast_to(seen.mask_entries_between(first=self.sinks), seen.k.shape[:3])
        v = jnp.where(counts[..., None], jnp.clip(seen.v, -_MOST, _MOST), 0)

        def sums(head: tuple[Array, ...]) -> tuple[Float[Array, "G S"], Float[Array, "G D D"]]:
            mean, k, v, counted = head
            fit = jnp.where(
                counted,
                self.tau * _product(normalise_vectors(mean, 1e-12), normalise_vectors(k, 1e-12).T),
                -jnp.inf,
            )
            weight = jnp.exp(
                fit - jnp.maximum(fit.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
            )
            wide = v.astype(jnp.float32)
            return weight, lax.map(lambda w: _product(wide.T * (w + _EPSILON), wide), weight)

        def score(head: tuple[Array, ...]) -> Float[Array, " S"]:
            v, weight, inverse = head
            leverage = lax.map(
                lambda each: (_product(v.astype(jnp.float32), each.T) ** 2).sum(axis=-1), inverse
            )
            return (weight * leverage).mean(axis=0)

        # One kv head at a time: float32 copies of all entries are in memory for one head only.
        mean, k, v, counts = (
            each.reshape(-1, *each.shape[2:]) for each in (seen.moments.mean, seen.k, v, counts)
        )
        weight, total = lax.map(sums, (mean, k, v, counts))
        identity = jnp.eye(total.shape[-1], dtype=jnp.float32)
        ridge = jnp.maximum(_RIDGE * jnp.trace(total, axis1=-2, axis2=-1), 1.0)[..., None, None]
        lower = jnp.linalg.cholesky(total + ridge * identity)
        inverse = solve_triangular(lower, jnp.broadcast_to(identity, lower.shape), lower=True)
        return lax.map(score, (v, weight, inverse)).reshape(seen.k.shape[:3])


@register
@frozen_dataclass
class CAPKV(BudgetMethod):
    """Keep the entries whose values have the highest leverage, weighted by their keys' fit to the mean query.

    Leverage is weighted by the fit of an entry's key to the mean query. Sinks are kept, too.

    Attributes:
        sinks: number of first tokens, always kept; their queries are left out of the mean.
        tau: sharpness of the weights: 0 weighs all entries alike.
        remembered: number of last queries whose mean is used for recompression (`every`).

    References:
        CAPKV, arXiv:2604.25975; with normalised keys and a rotated mean query, as in kvpress.
    """

    sinks: int = 4
    tau: float = 5.0
    remembered: int = 256

    paper = "CAPKV, arXiv:2604.25975"

    def _check_fields(self) -> None:
        validate_field(self, "tau", validate_float, "give a number from 0 to 1000", high=1000.0)
        validate_field(self, "remembered", validate_int, "give at least 1 query")

    def create_scorer(self) -> ValueLeverageScorer:
        """Return a `ValueLeverageScorer`, which requests `remembered` last queries if the policy recompresses."""
        remembered = 0 if self.every is None else self.remembered
        return self.create_part(ValueLeverageScorer, remembered=remembered)
