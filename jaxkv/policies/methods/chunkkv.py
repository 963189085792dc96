"""ChunkKV: keep whole chunks of neighbouring entries, the same in all kv heads, by any policy's scores."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxkv._checks import validate_bool, validate_field, validate_int, validate_optional_field
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.policies.head_budgets import ScoredEntries, SelectionOrder, SharedHeads
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import register
from jaxkv.policies.topk import count_true, encode_sort_keys, mask_sort_keys, mask_top_k
from jaxkv.policies.wrapper import PolicyWrapper

# Added to sums and inside logarithms, as in kvpress.
_TINY = 1e-8


@frozen_dataclass
class ChunkHeadBudgets(SharedHeads):
    """Head budgets that keep the same chunks of consecutive entries in all kv heads, those of highest mean score.

    Chunks with always-kept entries are completed first, lowest position first. The others follow by their mean score
    over heads and entries. The best entries of the first chunk that does not fit fill the budget.

    With `peaks`, chunks of high but uneven scores, without always-kept entries, are reduced to so many entries. Their
    mean score is at least the chunks' median, and the entropy of their scores is below the median. The best of all
    other entries fill the rest of the budget.

    Attributes:
        chunk: entries per chunk; a prompt's last chunk may have fewer.
        peaks: entries kept of a chunk of high but uneven scores; None keeps all.
    """

    chunk: int = 20
    peaks: int | None = None

    def __post_init__(self) -> None:
        validate_field(self, "chunk", validate_int, "give 1 entry or more")
        validate_optional_field(self, "peaks", validate_int, "give 1 entry or more")

    def choose_entries(self, rows: ScoredEntries) -> Bool[Array, "B K S"]:
        """Return the mask `[B, K, S]` of `base` entries, same in all heads: chunks with always-kept ones, then best."""
        scores = rows.scores
        base = rows.base
        batch, _, padded_len = scores.shape

        def split_into_chunks(of: Array) -> Array:
            """Reshape `[B, S]` to chunks of consecutive entries `[B, C, chunk]`, with zeros added at the end."""
            return jnp.pad(of, ((0, 0), (0, -padded_len % self.chunk))).reshape(
                batch, -1, self.chunk
            )

        # Heads that share positions have the same candidates: with always-kept entries, all entries of the text.
        free = rows.candidates[:, 0]
        length = count_true(free) + rows.always_kept
        kept = (jnp.arange(padded_len, dtype=jnp.int32) < length[:, None]) & ~free
        mean = jnp.where(free, scores.mean(axis=1), 0.0)
        inside = count_true(split_into_chunks(free))
        of_chunk = encode_sort_keys(
            split_into_chunks(mean).sum(axis=-1) / jnp.maximum(inside, 1).astype(jnp.float32)
        )
        sizes = (
            inside
            if self.peaks is None
            else self._compute_kept_chunk_sizes(
                split_into_chunks(mean),
                split_into_chunks(free),
                of_chunk,
                split_into_chunks(kept),
                self.peaks,
            )
        )
        order = jnp.argsort(
            jnp.where(split_into_chunks(kept).any(axis=-1), jnp.uint32(0), ~of_chunk),
            axis=-1,
            stable=True,
        )
        sizes = jnp.take_along_axis(sizes, order, axis=-1)
        taken = jnp.clip(
            base[:, None] - (jnp.cumsum(sizes, axis=-1, dtype=jnp.int32) - sizes), 0, sizes
        )
        taken = jnp.take_along_axis(taken, jnp.argsort(order, axis=-1), axis=-1)
        keys = mask_sort_keys(encode_sort_keys(mean), free)
        chosen = mask_top_k(split_into_chunks(keys), taken).reshape(batch, -1)[:, :padded_len]
        if self.peaks is not None:
            rest = mask_sort_keys(keys, ~chosen)
            chosen = chosen | mask_top_k(rest, base - taken.sum(axis=-1, dtype=jnp.int32))
        return jnp.broadcast_to(chosen[:, None], scores.shape)

    @staticmethod
    def _compute_kept_chunk_sizes(
        rows: Float[Array, "B C n"],
        free: Bool[Array, "B C n"],
        of_chunk: Array,
        kept: Bool[Array, "B C n"],
        peaks: int,
    ) -> Int[Array, "B C"]:
        """Return entry counts `[B, C]` to keep of each chunk: at most `peaks` if scores are high but uneven, else all.

        `of_chunk` are sort keys of the chunks' mean scores.
        """
        inside = count_true(free)
        least = jnp.where(free, rows, jnp.inf).min(axis=-1, keepdims=True)
        raised = jnp.where(free, rows - jnp.minimum(least, 0.0), 0.0)
        share = raised / (raised.sum(axis=-1, keepdims=True) + _TINY)
        most = jnp.log(jnp.maximum(inside, 2).astype(jnp.float32))
        entropy = jnp.clip(-(share * jnp.log(share + _TINY)).sum(axis=-1) / most, 0.0, 1.0)
        entropy = jnp.where(inside > 1, entropy, 0.0)
        high = of_chunk >= _lower_median(of_chunk, inside > 0)
        uneven = encode_sort_keys(entropy) < _lower_median(encode_sort_keys(entropy), inside > 0)
        return jnp.where(high & uneven & ~kept.any(axis=-1), jnp.minimum(inside, peaks), inside)


def _lower_median(keys: UInt[Array, "B C"], counts: Bool[Array, "B C"]) -> UInt[Array, "B 1"]:
    """Return each sequence's lower median `[B, 1]` of sort keys in mask `counts`; the largest uint32 if empty."""
    ascending = jnp.sort(jnp.where(counts, keys, jnp.uint32(2**32 - 1)), axis=-1)
    middle = (jnp.maximum(counts.sum(axis=-1, keepdims=True, dtype=jnp.int32), 1) - 1) // 2
    return jnp.take_along_axis(ascending, middle, axis=-1)


@register
@frozen_dataclass
class ChunkKV(PolicyWrapper):
    """Keep chunks of consecutive entries with the base policy's highest mean scores, the same in a layer's kv heads.

    All kv heads of a layer keep the same chunks, those of the highest mean score. The number of entries is exactly the
    budget: the best entries of the first chunk that does not fit are kept. Chunks with entries of the window, sinks or
    protected spans are completed before others. With `gated=True`, chunks whose high scores come from few entries keep
    only these, which makes room for further chunks.

    Attributes:
        base: the policy whose scores, always-kept entries and layer budgets are used.
        chunk: entries per chunk; None: 20, or 10 if `gated`.
        gated: keep only the best entries of chunks whose mean score is at least the median and whose scores' entropy is
            below the median; otherwise keep whole chunks.
        peaks: entries kept of such a chunk; None: 4.

    References:
        Liu et al., ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference,
        arXiv:2502.00299; the gate is EntropyGatedChunkKV of kvpress 0.5.5.
    """

    chunk: int | None = None
    gated: bool = False
    peaks: int | None = None

    paper = "ChunkKV, arXiv:2502.00299"

    usual = "snapkv"
    once = True

    def _check_fields(self) -> None:
        validate_field(self, "gated", validate_bool)
        require(self.peaks is None or self.gated, "peaks", self.peaks, "it needs gated=True")
        super()._check_fields()

    @property
    def chunk_head_budgets(self) -> ChunkHeadBudgets:
        """`ChunkHeadBudgets` of `chunk` (by default 20, or 10 if `gated`) and `peaks` (by default 4; `gated` only)."""
        chunk = (10 if self.gated else 20) if self.chunk is None else self.chunk
        return ChunkHeadBudgets(
            chunk=chunk, peaks=(4 if self.peaks is None else self.peaks) if self.gated else None
        )

    def check_base_policy(self, base: Policy, parts: Parts) -> None:
        """Raise ValueError if base heads read value norms or have own budgets, or layers keep subsets of lower ones."""
        plain = (
            parts.heads.selection_order in (SelectionOrder.OWN, SelectionOrder.MEAN)
            and not parts.heads.needs_value_norms
        )
        require(plain, "base", base, "its heads have budgets of their own: give SnapKV()")
        remedy = "its layers choose among the entries of the layer below: give SnapKV()"
        require(not parts.nested, "base", base, remedy)

    def replace_base_parts(self, base: Parts) -> Parts:
        """Return the base's `Parts` with head budgets `ChunkHeadBudgets`: a layer's kv heads keep the same chunks."""
        return base.replace(heads=self.chunk_head_budgets)
