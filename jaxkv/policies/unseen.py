"""Scorers for prompts compressed before the question is known: they do not follow the prompt's last queries."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv._checks import validate_bool, validate_field, validate_float, validate_int
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.attention.columns import average_over_queries
from jaxkv.attention.xla import compute_logit_divisor, exact_einsum
from jaxkv.models.config import ModelConfig
from jaxkv.policies.attended import AvgPool
from jaxkv.policies.folding import normalise_vectors
from jaxkv.policies.gates import Gate
from jaxkv.policies.of_model import require_value
from jaxkv.policies.rank import ByAge, ByNewScores, Rank
from jaxkv.policies.scorer import (
    FutureQuerySettings,
    GroupReduce,
    Needs,
    QueryMoments,
    Scorer,
    ScorerInputs,
    Scores,
)
from jaxkv.sharding.collectives import average_over_devices, max_over_devices, slice_own_shard

# Entries multiplied by a covariance at a time.
_BLOCK = 512


@frozen_dataclass
class KeyDifference(Scorer):
    """KeyDiff's scorer: minus the cosine between an entry's key and the mean of the head's normalised keys.

    References:
        Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
        Resource-Constrained Environments, arXiv:2504.15364.
    """

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: minus the cosine of each key and the mean of the head's normalised keys."""
        k = jnp.where(seen.mask_entries_between()[..., None], seen.k.astype(jnp.float32), 0.0)
        mine = normalise_vectors(k, 1e-12)
        mean = mine.sum(axis=2) / jnp.maximum(seen.length, 1).astype(jnp.float32)[:, None, None]
        return -(mine * normalise_vectors(mean, 1e-12)[:, :, None]).sum(axis=-1)


@frozen_dataclass
class FutureAttention(Scorer):
    """ExpectedAttention's scorer: attention expected from queries after the text, by default times the value's norm.

    Queries are assumed to be normally distributed. Their mean and covariance are those of the text's queries before
    RoPE, rotated by the mean rotation of the following positions.

    Attributes:
        sinks: number of first tokens left out of the statistics.
        positions: number of positions after the text over which the rotation is averaged.
        covariance: use the covariance of the queries as well as their mean.
        value_norms: multiply by the L2 norm of the value.
        epsilon: added to the expected attention before this product.
        remembered: number of last queries whose mean and covariance are used when a cache is recompressed.

    References:
        Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
        Distribution, arXiv:2510.00636.
    """

    follows_last_queries = False

    sinks: int = 4
    positions: int = 512
    covariance: bool = True
    value_norms: bool = True
    epsilon: float = 0.0
    remembered: int = 0

    def __post_init__(self) -> None:
        # `FutureQuerySettings` and `Keep` check the other fields.
        validate_field(self, "remembered", validate_int, "give 0 or more last queries", least=0)
        validate_field(self, "value_norms", validate_bool)
        validate_field(self, "epsilon", validate_float, "give 0 or a small number", high=1e30)

    @property
    def needs(self) -> Needs:
        """`Needs` of the scorer: `QueryMoments`, and the last `remembered` queries for recompression."""
        moments = FutureQuerySettings(
            skip=self.sinks, positions=self.positions, covariance=self.covariance
        )
        return Needs(queries=self.remembered, moments=moments)

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: (expected attention, mean of query heads, + `epsilon`) * value norm by default."""
        counts = seen.mask_entries_between(first=self.sinks)[:, :, None]
        logits = jnp.where(counts, _compute_expected_logits(seen.k, seen.moments), -jnp.inf)
        most = jnp.maximum(logits.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
        weight = jnp.where(counts, jnp.exp(logits - most), 0.0)
        share = weight / jnp.maximum(
            weight.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny
        )
        score = share.mean(axis=2) + jnp.float32(self.epsilon)
        if not self.value_norms:
            return score
        return score * jnp.sqrt((seen.v.astype(jnp.float32) ** 2).sum(axis=-1))


def _compute_expected_logits(
    k: Float[Array, "B K S D"], moments: QueryMoments
) -> Float[Array, "B K G S"]:
    """Return log E[exp(q.k / sqrt(D))] `[B, K, G, S]` for normal queries q; without covariance, mean query's logits."""
    batch, heads, padded_len, dim = k.shape
    group = moments.mean.shape[2]
    size = min(_BLOCK, padded_len)
    padded = jnp.pad(k, ((0, 0), (0, 0), (0, -padded_len % size), (0, 0)))

    def block(first: Int[Array, ""]) -> Float[Array, "B K G N"]:
        keys = lax.dynamic_slice_in_dim(padded, first, size, axis=2).astype(jnp.float32)
        logits = exact_einsum("bkgd,bknd->bkgn", moments.mean, keys) / compute_logit_divisor(dim)
        if moments.covariance is None:
            return logits
        turned = exact_einsum("bkgij,bknj->bkgni", moments.covariance, keys)
        return logits + (turned * keys[:, :, None]).sum(axis=-1) / (2 * dim)

    blocks = lax.map(block, jnp.arange(0, padded.shape[2], size, dtype=jnp.int32))
    return jnp.moveaxis(blocks, 0, 3).reshape(batch, heads, group, -1)[..., :padded_len]


@frozen_dataclass
class WorstAttention(Scorer):
    """DefensiveKV's scorer: largest attention of any window query to an entry, times its share of heads' value norms.

    Attention is pooled over neighbours and reduced by the maximum over the window's queries and the group's query
    heads; numbers below the head's mean are raised to it. The result is multiplied by the L1 norm of the value at the
    layer's output, divided by the sum of these norms over kv heads.

    Attributes:
        window: number of the text's last queries to observe; their own entries are not scored.
        kernel: number of neighbours over which each query's attention is averaged; the query's total is unchanged.
        stage: a first stage of entries kept at any score, at most a head's even share. "mass": the entries of
            most mean attention that, with the window's own, hold 90 % of the attention. "published": as in the released
            code, which stops one entry earlier and normalises other attention to 1. It takes the columns before the
            window for the window's own, and averages them over the layer's heads. "none": no first stage.

    References:
        DefensiveKV, arXiv:2510.13334; its first stage is that of CriticalKV, arXiv:2502.03805.
    """

    follows_last_queries = False
    group = GroupReduce.MAX

    window: int = 32
    kernel: int = 5
    stage: str = "none"

    def __post_init__(self) -> None:
        validate_field(self, "window", validate_int, "observe at least 1 query")
        AvgPool(self.kernel)
        known = isinstance(self.stage, str) and self.stage in ("none", "mass", "published")
        require(known, "stage", self.stage, "no such stage: give 'none', 'mass' or 'published'")

    @property
    def has_first_stage(self) -> bool:
        """True if the scorer has a first stage, whose entries are kept before all others: if `stage` is not "none"."""
        return self.stage != "none"

    @property
    def needs(self) -> Needs:
        """`Needs` of the scorer: the queries of the last `window` tokens, and L1 norms of projected values."""
        return Needs(queries=self.window, norms=True)

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: largest pooled window attention, at least its mean, times value norm shares."""
        pool = AvgPool(self.kernel)
        index = seen.entry_positions

        def worst(p: Float[Array, "G w S"], position: Int[Array, " w"]) -> Float[Array, " S"]:
            before = index < position[-1] + 1 - self.window
            p = jnp.where(before & (position >= 0)[:, None], p, 0.0)
            pooled = jnp.where(before, pool(p, before), 0.0)
            total = pooled.sum(axis=-1, keepdims=True)
            ratio = p.sum(axis=-1, keepdims=True) / jnp.where(total > 0, total, 1.0)
            return (pooled * ratio).max(axis=(0, 1))

        most = seen.reduce_window_attention(worst)
        # Reduced over devices first: the mean over entries needs the maximum over the whole group.
        most = max_over_devices(most, "G", seen.group_axes)
        before = (seen.length - self.window)[:, None, None]
        mean = jnp.where(seen.mask_entries_between(last=self.window), most, 0.0).sum(
            axis=-1, keepdims=True
        )
        raised = jnp.maximum(most, mean / jnp.maximum(before, 1).astype(jnp.float32))
        share = seen.norms / jnp.where(seen.norm_totals > 0, seen.norm_totals, 1.0)
        return raised * share

    def rank_first_stage(self, seen: ScorerInputs) -> Int[Array, "B K S"]:
        """Return int32 ranks `[B, K, S]` of the first stage's entries, 0 for most attention; S for other entries."""
        padded_len = seen.k.shape[2]
        before = (seen.length - self.window)[:, None, None]
        column = seen.entry_positions
        mean = seen.reduce_window_attention(lambda p, at: average_over_queries(p, at).mean(axis=0))
        paid = average_over_devices(mean, "G", seen.group_axes)
        paid = jnp.where(column < before, paid, 0.0)
        total = paid.sum(axis=-1, keepdims=True)
        order = jnp.argsort(jnp.where(column < before, -paid, jnp.inf), axis=-1, stable=True)
        if self.stage == "mass":
            wanted = total - 0.1
            reached = 1
        else:
            near = jnp.where(column >= before - self.window, paid, 0.0).sum(axis=-1).mean(axis=1)
            wanted = 0.9 - average_over_devices(near, "K", seen.axes)[:, None, None]
            reached = 0
            paid = paid / jnp.where(total > 0, total, 1.0)
        sums = jnp.cumsum(jnp.take_along_axis(paid, order, axis=-1), axis=-1)
        short = (sums < wanted).sum(axis=-1, keepdims=True, dtype=jnp.int32)
        count = jnp.where(wanted > 0, jnp.minimum(short + reached, jnp.maximum(before, 0)), 0)
        rank = jnp.argsort(order, axis=-1).astype(jnp.int32)
        return jnp.where(rank < count, rank, padded_len)


@frozen_dataclass
class PositionScores(Scorer):
    """Scorer by position: later entries score higher, so that the most recent ones are kept."""

    eviction_rank = ByAge()

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: each entry's position, exact in float32 up to 2**24."""
        batch, heads, padded_len = seen.k.shape[:3]
        return jnp.broadcast_to(
            jnp.arange(padded_len, dtype=jnp.float32), (batch, heads, padded_len)
        )


@frozen_dataclass
class KeyNorm(Scorer):
    """Scorer by key norm: smaller L2 norms score higher (arXiv:2406.11430); RoPE does not change norms."""

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: minus the L2 norm of each entry's key."""
        return -jnp.sqrt((seen.k.astype(jnp.float32) ** 2).sum(axis=-1))


@frozen_dataclass
class UniformRandomScores(Scorer):
    """Scorer by uniform random numbers per layer, kv head and position; independent of batch and padding."""

    uses_random_key = True

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]` sampled uniformly from [0, 1) by the call's key, the same for every sequence."""
        batch, heads, padded_len = seen.k.shape[:3]
        key = jax.random.fold_in(seen.key, seen.layer)
        keys = jax.vmap(lambda position: jax.random.fold_in(key, position))(
            jnp.arange(padded_len, dtype=jnp.int32)
        )
        # Sampled for all heads, also on a mesh: a head's samples do not depend on the sharding.
        whole = heads if seen.axes is None else heads * seen.axes.count_axis_shards("K")
        samples = slice_own_shard(
            jax.vmap(lambda k: jax.random.uniform(k, (whole,)))(keys), "K", 1, seen.axes
        )
        return jnp.broadcast_to(samples.T, (batch, heads, padded_len))


@frozen_dataclass
class GateRank(Rank):
    """Rank by the gate's score of each entry when it was added, in prompt or answer; attention does not change it.

    Attributes:
        gate: the model's gate.
    """

    gate: Gate


@frozen_dataclass
class GateScores(Scorer):
    """KVzap's scorer, base of Fast KVzip's: a trained gate scores each entry from its token's hidden state.

    Attributes:
        gate: the model's gate; None is rejected in prefill.
    """

    gate: Gate | None = None

    @property
    def needs(self) -> Needs:
        """`Needs` of the scorer: hidden states, and the gate's weights; nothing without a gate."""
        return Needs(hidden=self.gate is not None, gate=self.gate)

    @property
    def eviction_rank(self) -> Rank:
        """`GateRank` of the gate, so that entries keep their first scores; `ByNewScores()` without a gate."""
        return ByNewScores() if self.gate is None else GateRank(gate=self.gate)

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError without a gate, or for the gate of a model of other sizes."""
        require_value(self.gate, Gate).require_fits_model(config)

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return the gate's scores `[B, K, S]` of hidden states; ValueError without a gate."""
        gate = require_value(self.gate, Gate)
        return gate.score_hidden_states(seen.gate, seen.hidden)
