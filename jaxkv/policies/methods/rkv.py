"""R-KV: keep entries that the last queries attend to and whose keys are not redundant, also while decoding."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv import attention
from jaxkv._checks import validate_field, validate_float
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.attended import MaxPool, Pooling, WindowScorer
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import GroupReduce, ScorerInputs, Scores
from jaxkv.sharding.collectives import max_over_devices

# Cosines in memory at a time: 16 MiB in float32.
COSINES = 1 << 22


@frozen_dataclass
class AttentionRedundancyScorer(WindowScorer):
    """R-KV's scorer: `mix_lambda` * attention from the last queries - (1 - `mix_lambda`) * redundancy of the key.

    Attention is a softmax over the entries before the window, of the largest logit of the group's query heads. Its mean
    over the window's queries is pooled over neighbours. Redundancy is a softmax over all entries, of the mean cosine of
    an entry's key with the other entries' keys. Of the entries similar to a key, with a cosine above `threshold`, the
    last one leaves this cosine out.

    Cosines are computed in blocks of entries of one kv head. At most 2^22 cosines (16 MiB) are in memory at a time, or
    one row for longer texts; so is a copy of the head's keys. A prompt's cosines cost as many products as causal
    attention of one more query head per kv head.

    Attributes:
        window: number of the text's last queries, the observation window.
        pooling: pooling of attention over neighbours; the window's own columns are left out.
        mix_lambda: weight of attention; redundancy has weight 1 - mix_lambda.
        threshold: cosine above which two keys are similar.

    References:
        Cai et al., R-KV: Redundancy-aware KV Cache Compression for Reasoning Models, arXiv:2505.24133, section 3.
    """

    group = GroupReduce.MAX
    # Plans count the cosines.
    compares_keys = True

    window: int = 8
    mix_lambda: float = 0.1
    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_field(
            self, "mix_lambda", validate_float, "give a weight between 0 and 1", high=1.0
        )
        validate_field(self, "threshold", validate_float, "give a cosine between 0 and 1", high=1.0)

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: weighted pooled attention - weighted key redundancy before the window; 0 in it."""
        batch, heads = seen.k.shape[:2]
        column = seen.entry_positions
        before = seen.mask_entries_between(last=self.window)
        # The softmax needs the largest logits of all query heads, also if devices share them.
        logits = max_over_devices(
            attention.compute_group_max_logits(seen.queries, seen.k), "G", seen.group_axes
        )
        paid = _masked_softmax(logits, before[:, :, None]).mean(axis=2)

        def head(inputs: tuple[Array, Array]) -> Float[Array, " S"]:
            k, length = inputs
            return _masked_softmax(
                _compute_mean_key_cosines(k, length, self.threshold), column < length
            )

        lengths = jnp.broadcast_to(seen.length[:, None], (batch, heads)).reshape(-1)
        redundancy = lax.map(head, (seen.k.reshape(-1, *seen.k.shape[2:]), lengths)).reshape(
            paid.shape
        )
        weight = jnp.float32(self.mix_lambda)
        return jnp.where(
            before, weight * self.pooling(paid, before) - (1 - weight) * redundancy, 0.0
        )

    def finalise_scores(self, observed: Scores, length: Int[Array, " B"]) -> Scores:
        """Return the raw scores `[B, K, S]` unchanged, since `score_entries` pools attention already."""
        return observed


def _masked_softmax(x: Float[Array, "*n S"], inside: Bool[Array, "*#n S"]) -> Float[Array, "*n S"]:
    """Return the softmax over the last axis among the elements in mask `inside`; 0 elsewhere."""
    return jnp.where(
        inside, jax.nn.softmax(jnp.where(inside, x, jnp.finfo(jnp.float32).min), axis=-1), 0.0
    )


def _compute_mean_key_cosines(
    k: Float[Array, "S D"], length: Int[Array, ""], threshold: float
) -> Float[Array, " S"]:
    """Return each key's mean cosine `[S]` with its head's other keys, except those whose last similar key it is."""
    padded_len = k.shape[0]
    column = jnp.arange(k.shape[0], dtype=jnp.int32)
    k = jnp.where((column < length)[:, None], k, 0)
    scale = 1.0 / jnp.maximum(jnp.sqrt((k.astype(jnp.float32) ** 2).sum(axis=-1)), 1e-12)
    size = min(padded_len, max(1, COSINES // padded_len))

    def add(index: Int[Array, ""], sums: Float[Array, " S"]) -> Float[Array, " S"]:
        row = index * size + jnp.arange(size, dtype=jnp.int32)
        at = jnp.minimum(row, padded_len - 1)
        # Products of 16-bit keys are exact in float32; normalised keys would be rounded, or slow, on GPUs.
        products = jnp.einsum(
            "rd,sd->rs",
            k[at],
            k,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        off = (column != row[:, None]) & (row < length)[:, None]
        cosines = jnp.where(off, products * scale[at, None] * scale, 0.0)
        last = jnp.where(cosines > threshold, column, -1).max(axis=-1, keepdims=True)
        return sums + jnp.where(column == last, 0.0, cosines).sum(axis=0)

    sums = lax.fori_loop(0, (length + size - 1) // size, add, jnp.zeros((padded_len,), jnp.float32))
    return sums / jnp.maximum(length, 1).astype(jnp.float32)


@register
@frozen_dataclass
class RKV(BudgetMethod):
    """Keep entries of high attention and low key redundancy, and recompress after every `every` new tokens.

    Attention is that of the last queries. A prompt above the budget is compressed as well; the paper compresses only
    while decoding. The released code differs in two points: `mix_lambda` is 0.07, and entries similar to no other leave
    out the first entry's cosine.

    Attributes:
        window: number of last tokens: their queries score the other entries, and they are always kept.
        sinks: number of first tokens, always kept.
        pooling: pooling of attention over neighbours.
        mix_lambda: weight of attention; redundancy has weight 1 - mix_lambda.
        threshold: cosine above which two keys are similar.
        every: recompress after this many new tokens, the paper's buffer: the cache never holds more than the budget and
            this many entries. None compresses the prompt only.

    References:
        Cai et al., R-KV: Redundancy-aware KV Cache Compression for Reasoning Models, arXiv:2505.24133.
    """

    window: int = 8
    sinks: int = 0
    pooling: Pooling = MaxPool(7)
    mix_lambda: float = 0.1
    threshold: float = 0.5
    every: int | None = 128

    paper = "R-KV, arXiv:2505.24133"

    scored_by = AttentionRedundancyScorer
