"""TriAttention: keep entries by a head's mean query and its distance, recompressed while decoding."""

import jax.numpy as jnp

from jaxkv._checks import (
    validate_bool,
    validate_field,
    validate_int,
    validate_optional_field,
)
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.xla import exact_einsum
from jaxkv.models.config import ModelConfig
from jaxkv.models.rope import compute_pair_norms
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.query_statistics import QueryStatistics
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import (
    GroupReduce,
    Needs,
    QueryPairSettings,
    Scorer,
    ScorerInputs,
    Scores,
)


@frozen_dataclass
class TrigonometricScorer(Scorer):
    """TriAttention's scorer: logits of the expected query after the text, plus norms times what queries exceed it.

    With complex numbers for the channel pairs that RoPE rotates, the paper's score of a key k before RoPE at distance d
    is the sum of |m| |k| cos(w d + arg(m conj(k))) + (a - |m|) |k| over frequencies w, with the mean m and the mean
    norm a of the head's queries before RoPE, averaged over d = now - position + 1, 2, 4, ..., 65536. The first part
    equals the product of the rotated key and the mean of the rotated queries, so that no key is turned back. Pairs
    without rotation have w = 0.

    Attributes:
        statistics: the model's statistics; None computes them from each text's last queries.
        remembered: number of these queries.
        sinks: number of first tokens left out of the normalisation.
        normalise: subtract a query head's mean score and divide by the standard deviation, before the maximum.

    References:
        TriAttention, arXiv:2604.04921.
    """

    follows_last_queries = False
    group = GroupReduce.MAX

    statistics: QueryStatistics | None = None
    remembered: int = 256
    sinks: int = 4
    normalise: bool = True

    def __post_init__(self) -> None:
        validate_field(self, "remembered", validate_int, "give at least 1 query")
        validate_field(self, "normalise", validate_bool)

    @property
    def needs(self) -> Needs:
        """`Needs` of the scorer: `QueryPairs`, and the last `remembered` queries if there are no statistics."""
        return Needs(
            queries=self.remembered if self.statistics is None else 0,
            pairs=QueryPairSettings(statistics=self.statistics),
        )

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError if given statistics are of another model."""
        if self.statistics is not None:
            self.statistics.require_fits_model(config)

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: the largest of the query heads' expected, normalised logits."""
        products = "bkgd,bksd->bkgs"
        scores = exact_einsum(products, seen.pairs.mean, seen.k.astype(jnp.float32))
        scores += exact_einsum(products, seen.pairs.excess, compute_pair_norms(seen.k))
        if self.normalise:
            counted = seen.mask_entries_between(first=self.sinks)[:, :, None]
            spread = scores.std(axis=-1, keepdims=True, where=counted)
            scores -= scores.mean(axis=-1, keepdims=True, where=counted)
            # Sinks are kept at any score; a text of no more tokens has no mean.
            scores = jnp.where(counted, scores / jnp.maximum(spread, 1e-6), 0.0)
        return scores.max(axis=2)


@register
@frozen_dataclass
class TriAttention(BudgetMethod):
    """Keep entries that a head's mean query attends to at growing distances, and recompress every `every` new tokens.

    Queries before RoPE concentrate around a head's mean, so that this mean, rotated to later positions, predicts
    attention. A prompt above the budget is compressed as well; in the paper only new tokens compete, and prompts are
    kept in full: `protect=((0, 1000000),)` does so.

    Attributes:
        statistics: the model's statistics of queries: a safetensors file from `jaxkv fit-tri`, a published .pt file, or
            a named model's name for the statistics that come with jaxkv. None uses each text's last queries instead.
        remembered: number of these queries; the cache then holds 4 * remembered * D bytes per query head and layer.
        sinks: number of first tokens, always kept and left out of the normalisation; the paper keeps whole prompts.
        normalise: normalise scores of a query head to mean 0 and standard deviation 1 before the maximum over heads.
        every: recompress after this many new tokens: the cache never holds more than the budget and this many entries.
            None compresses the prompt only.

    References:
        Mao et al., TriAttention: Efficient Long Reasoning with Trigonometric KV Compression, arXiv:2604.04921.
    """

    statistics: str | QueryStatistics | None = None
    remembered: int = 256
    sinks: int = 4
    normalise: bool = True
    every: int | None = 128

    paper = "TriAttention, arXiv:2604.04921"

    scored_by = TrigonometricScorer

    def _check_fields(self) -> None:
        validate_optional_field(self, "statistics", QueryStatistics.load_from_file)
