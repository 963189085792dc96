"""LagKV: keep the entries that stand out against the stretch of text that follows them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv._checks import field, flag, whole
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import Observed, Scorer, Scores

# Channels that hardly vary in the next partition stretch entries by more than squares in float32 can hold.
_MOST = 1e15


@dataclasses.dataclass(frozen=True, kw_only=True)
class LagInformation(Scorer):
    """LagKV's scorer: an entry's rank in its partition by std over channels, scaled by the next partition's min and max.

    Entries behind the sinks form partitions of `lag` entries. Each channel of a partition is scaled by minimum and maximum of
    the same channel in the next one, a channel that does not vary there counting as 0; the standard deviation over
    channels goes through a softmax over the partition, for keys and values, and the mean of both ranks the partition's
    entries. The last full partition and the entries behind it, which have no next one, score higher than all others, later
    entries first.

    Attributes:
        sinks: number of first rows that belong to no partition.
        lag: entries of a partition.
        cross_scoring: score by the mean itself instead of by ranks, so that partitions and heads compete.

    References:
        Liang et al., LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important,
        arXiv:2504.04704.
    """

    sinks: int = 4
    lag: int = 128
    cross_scoring: bool = False

    def __post_init__(self) -> None:
        # `sinks` are checked where `Keep` is made of them.
        field(self, "lag", whole, "compare partitions of at least 1 row")
        field(self, "cross_scoring", flag)

    def observe(self, seen: Observed) -> Scores:
        """Scores `[B, K, S]`: rank / `lag` or softmax of an entry's spread in its partition; 1 to 2: sinks, last entries."""
        padded_len, lag = seen.k.shape[2], self.lag
        index, length = seen.index, seen.length[:, None, None]
        recent = 1.0 + index.astype(jnp.float32) / jnp.maximum(length, 1).astype(jnp.float32)
        recent = jnp.broadcast_to(recent, seen.k.shape[:3])
        scored = (padded_len - self.sinks) // lag - 1
        if scored < 1:
            return recent
        score = (self._shares(seen.k, scored) + self._shares(seen.v, scored)) / 2
        if not self.cross_scoring:
            # Stable sorts: of entries alike the first one ranks higher.
            place = jnp.argsort(jnp.argsort(-score, axis=-1), axis=-1)
            score = (lag - 1 - place).astype(jnp.float32) / lag
        score = score.reshape(*score.shape[:2], scored * lag)
        first, rest = self.sinks, padded_len - self.sinks - scored * lag
        score = jnp.pad(score, ((0, 0), (0, 0), (first, rest)))
        end = first + ((length - first) // lag - 1) * lag
        return jnp.where((index >= first) & (index < end), score, recent)

    def _shares(self, rows: Float[Array, "B K S D"], scored: int) -> Float[Array, "B K P lag"]:
        """Softmax `[B, K, P, lag]` in each partition of entries' std over channels, scaled by the next one's range."""
        first, lag = self.sinks, self.lag
        parts = rows[:, :, first : first + (scored + 1) * lag].astype(jnp.float32)
        parts = parts.reshape(*rows.shape[:2], scored + 1, lag, rows.shape[-1])
        low, high = (each(parts[:, :, 1:], axis=3, keepdims=True) for each in (jnp.min, jnp.max))
        # A channel that does not vary in the next partition has no scale, and counts as 0.
        scaled = jnp.where(
            high > low, (parts[:, :, :-1] - low) / jnp.where(high > low, high - low, 1.0), 0.0
        )
        return jax.nn.softmax(jnp.clip(scaled, -_MOST, _MOST).std(axis=-1, ddof=1), axis=-1)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LagKV(BudgetMethod):
    """Keeps sinks, the last entries, and of each partition before them the entries that stand out against the next one.

    It looks at keys and values alone: no question has to be known, and no attention is computed. A text shorter than
    `sinks + 2 * lag` has no partition to choose from: its last entries stay, as do those of a budget below the last ones.

    Attributes:
        sinks: first tokens that always stay.
        lag: tokens of a partition; the last `lag` to `2 * lag - 1` tokens stay if the budget has room for them.
        cross_scoring: score by the softmaxes themselves instead of by ranks within partitions: for `AdaKV(base=...)`.

    References:
        Liang et al., LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important,
        arXiv:2504.04704.
    """

    sinks: int = 4
    lag: int = 128
    cross_scoring: bool = False

    paper = "LagKV, arXiv:2504.04704"

    scored_by = LagInformation
