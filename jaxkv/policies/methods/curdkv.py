"""CurDKV: keep the entries that a CUR decomposition selects, by the norms of keys and values."""

import enum

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxkv._checks import validate_enum, validate_field, validate_int
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import Scorer, ScorerInputs, Scores

# Largest squared norm, so that sums are finite.
_MOST = 1e30


class LeverageKind(enum.Enum):
    """Enum of CurDKV's score: leverage of the key (KEY), of the value (VALUE), their AVERAGE or their PRODUCT."""

    KEY = "key"
    VALUE = "value"
    AVERAGE = "kv_avg"
    PRODUCT = "kv_product"


@frozen_dataclass
class LocalLeverageScorer(Scorer):
    """CurDKV's scorer: leverage of keys, values or both, approximated by squared norms over their sum in a block.

    Attributes:
        leverage: `LeverageKind`, or its value: leverage of keys, values, or both.
        local_window: entries per block, counted from the first entry; a block as long as the text compares all entries.

    References:
        Sengupta et al., Value-Guided KV Compression for LLMs via Approximated CUR Decomposition, arXiv:2509.15038.
    """

    leverage: LeverageKind | str = LeverageKind.PRODUCT
    local_window: int = 16

    def __post_init__(self) -> None:
        validate_field(self, "leverage", validate_enum, LeverageKind)
        validate_field(self, "local_window", validate_int, "give blocks of at least 1 entry")

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: leverage of keys, values or both (`leverage`), with sum 1 in each kv head."""
        k, v = (
            self._compute_block_norm_shares(rows, seen.mask_entries_between())
            for rows in (seen.k, seen.v)
        )
        score = {
            LeverageKind.KEY: k,
            LeverageKind.VALUE: v,
            LeverageKind.AVERAGE: (k + v) / 2,
            LeverageKind.PRODUCT: k * v,
        }[LeverageKind(self.leverage)]
        total = score.sum(axis=-1, keepdims=True)
        return score / jnp.where(total > 0, total, 1.0)

    def _compute_block_norm_shares(
        self, rows: Float[Array, "B K S D"], inside: Bool[Array, "B 1 S"]
    ) -> Float[Array, "B K S"]:
        """Return squared norms `[B, K, S]` of keys or values over their sum in each block of `local_window` entries."""
        padded_len = rows.shape[2]
        size = min(self.local_window, padded_len)
        square = jnp.minimum((rows.astype(jnp.float32) ** 2).sum(axis=-1), _MOST)
        square = jnp.pad(jnp.where(inside, square, 0.0), ((0, 0), (0, 0), (0, -padded_len % size)))
        blocks = square.reshape(*square.shape[:2], -1, size)
        total = blocks.sum(axis=-1, keepdims=True)
        return (blocks / jnp.where(total > 0, total, 1.0)).reshape(square.shape)[..., :padded_len]


@register
@frozen_dataclass
class CurDKV(BudgetMethod):
    """Keep entries by squared norms of keys and values relative to their block: approximate CUR leverage.

    Sinks are kept, too. Norms approximate the leverage scores of a CUR decomposition, without the random projection of
    the paper's cheaper estimate. Scores use keys and values only: the question need not be known, and no attention is
    computed.

    Attributes:
        sinks: number of first tokens, always kept.
        leverage: `LeverageKind`, or its value: "key", "value", "kv_avg" or "kv_product".
        local_window: tokens among which norms are compared.

    References:
        Sengupta et al., Value-Guided KV Compression for LLMs via Approximated CUR Decomposition, arXiv:2509.15038.
    """

    sinks: int = 4
    leverage: LeverageKind | str = LeverageKind.PRODUCT
    local_window: int = 16

    paper = "CurDKV, arXiv:2509.15038"

    scored_by = LocalLeverageScorer
