"""LagKV: keep the entries that stand out against the following partition of the text."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv._checks import validate_bool, validate_field, validate_int
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import Scorer, ScorerInputs, Scores

# Channels that hardly vary in the next partition scale entries beyond squares that float32 can hold.
_MOST = 1e15


@frozen_dataclass
class LagRelativeScorer(Scorer):
    """LagKV's scorer: rank in the partition by key and value std over channels, scaled by the next partition's range.

    Entries after the sinks form partitions of `lag` entries. Each channel of a partition is scaled by its minimum and
    maximum in the next partition; a channel that does not vary there counts as 0. The standard deviation over channels
    goes through a softmax over the partition, for keys and for values; the mean of both ranks the partition's entries.
    The last full partition and the entries after it, which have no next one, score higher than all others, later
    entries first.

    Attributes:
        sinks: number of first tokens, outside all partitions.
        lag: entries per partition.
        cross_scoring: score by the mean itself instead of by ranks, so that partitions and heads compete.

    References:
        Liang et al., LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important,
        arXiv:2504.04704.
    """

    sinks: int = 4
    lag: int = 128
    cross_scoring: bool = False

    def __post_init__(self) -> None:
        # `Keep` checks `sinks`.
        validate_field(self, "lag", validate_int, "give partitions of at least 1 entry")
        validate_field(self, "cross_scoring", validate_bool)

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: rank / `lag` or, with `cross_scoring`, softmax; 1 to 2 for sinks and last ones."""
        padded_len = seen.k.shape[2]
        lag = self.lag
        index = seen.entry_positions
        length = seen.length[:, None, None]
        recent = 1.0 + index.astype(jnp.float32) / jnp.maximum(length, 1).astype(jnp.float32)
        recent = jnp.broadcast_to(recent, seen.k.shape[:3])
        scored = (padded_len - self.sinks) // lag - 1
        if scored < 1:
            return recent
        score = (
            self._compute_partition_softmax(seen.k, scored)
            + self._compute_partition_softmax(seen.v, scored)
        ) / 2
        if not self.cross_scoring:
            # Stable sorts: of equal entries the first one ranks higher.
            place = jnp.argsort(jnp.argsort(-score, axis=-1), axis=-1)
            score = (lag - 1 - place).astype(jnp.float32) / lag
        score = score.reshape(*score.shape[:2], scored * lag)
        first = self.sinks
        rest = padded_len - self.sinks - scored * lag
        score = jnp.pad(score, ((0, 0), (0, 0), (first, rest)))
        end = first + ((length - first) // lag - 1) * lag
        return jnp.where((index >= first) & (index < end), score, recent)

    def _compute_partition_softmax(
        self, rows: Float[Array, "B K S D"], scored: int
    ) -> Float[Array, "B K P lag"]:
        """Return each partition's softmax `[B, K, P, lag]`: key or value channel std, scaled by the next."""
        first = self.sinks
        lag = self.lag
        parts = rows[:, :, first : first + (scored + 1) * lag].astype(jnp.float32)
        parts = parts.reshape(*rows.shape[:2], scored + 1, lag, rows.shape[-1])
        low, high = (each(parts[:, :, 1:], axis=3, keepdims=True) for each in (jnp.min, jnp.max))
        # A channel that does not vary in the next partition has no scale, and counts as 0.
        scaled = jnp.where(
            high > low, (parts[:, :, :-1] - low) / jnp.where(high > low, high - low, 1.0), 0.0
        )
        return jax.nn.softmax(jnp.clip(scaled, -_MOST, _MOST).std(axis=-1, ddof=1), axis=-1)


@register
@frozen_dataclass
class LagKV(BudgetMethod):
    """Keep sinks, the last entries, and those that vary most over channels, scaled by the next partition's range.

    Sinks and the last entries are kept, too. Scores use keys and values only: the question need not be known, and no
    attention is computed. A text shorter than `sinks + 2 * lag` has no partition to choose from: its last entries are
    kept, as with a budget below the last ones.

    Attributes:
        sinks: number of first tokens, always kept.
        lag: tokens per partition; the last `lag` to `2 * lag - 1` tokens are kept if the budget allows.
        cross_scoring: score by the softmaxes instead of by ranks within partitions: for `AdaKV(base=...)`.

    References:
        Liang et al., LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important,
        arXiv:2504.04704.
    """

    sinks: int = 4
    lag: int = 128
    cross_scoring: bool = False

    paper = "LagKV, arXiv:2504.04704"

    scored_by = LagRelativeScorer
