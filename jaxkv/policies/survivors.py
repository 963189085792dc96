"""Entries that heads under one budget may keep in the end, before the entries of later layers are known."""

from jaxtyping import Array, Bool, Int

from jaxkv.policies.head_budgets import (
    AdaptiveHeads,
    HeadBudgets,
    ProtectedHeads,
    ScoredEntries,
    SelectionOrder,
    TwoStageHeads,
    get_competing_budgets,
    remove_score_threshold,
)
from jaxkv.policies.topk import count_true, mask_sort_keys, mask_top_k


def supports_survivor_mask(heads: HeadBudgets, devices: int) -> bool:
    """Return True if `mask_surviving_candidates` never discards a final entry of these head budgets on n `devices`."""
    heads = remove_score_threshold(heads)
    own = get_competing_budgets(heads)
    if own is None or heads.selection_order is not SelectionOrder.COMMON:
        return False
    # With limited devices, a device keeps its best entries only if one order decides after the guaranteed entries.
    one_order = heads is own and (isinstance(own, ProtectedHeads) or own.alpha == 0)
    return one_order or own.capacity >= devices


def count_rounding_entries(heads: HeadBudgets) -> int:
    """Return the entries per head, 0 or 1, by which possible survivors may exceed the final ones through rounding."""
    own = get_competing_budgets(heads)
    return int(isinstance(own, AdaptiveHeads) and own.alpha > 0)


def mask_surviving_candidates(
    heads: HeadBudgets, rows: ScoredEntries, headroom: Int[Array, " B"]
) -> Bool[Array, "B K S"]:
    """Return the mask `[B, K, S]` of candidates that may still be kept in the end, at most `headroom[b]` of a prompt.

    `headroom` is at least the number of entries that these heads keep together in the end, plus
    `count_rounding_entries` per head.
    """
    # A head keeps its own best entries. Their number grows with the entries that it wins in the common order of all
    # heads, stage by stage. Later layers' candidates only push entries down in that order. The number computed without
    # later layers is therefore an upper bound, and entries beyond it are never kept. Always-kept entries are no
    # candidates. The numbers sum to at most `headroom`: they are shares of it, guaranteed entries included.
    heads = remove_score_threshold(heads)
    own = get_competing_budgets(heads)
    batch = len(rows.scores)
    candidates = rows.candidates
    assert own is not None
    keys = rows.sort_keys
    if isinstance(own, AdaptiveHeads):
        headroom = headroom - keys.shape[1] * count_rounding_entries(heads)
        won = mask_top_k(keys.reshape(batch, -1), headroom).reshape(keys.shape) & candidates
        each = own.bound_head_entries(count_true(won), rows.base)
    else:
        floor = own.count_guaranteed_entries(rows.base, rows.always_kept)
        safe = mask_top_k(keys, floor[:, None]) & candidates
        rest = mask_sort_keys(keys, ~safe).reshape(batch, -1)
        won = (
            safe
            | mask_top_k(rest, headroom - keys.shape[1] * floor).reshape(keys.shape) & candidates
        )
        each = count_true(won)
    if isinstance(heads, TwoStageHeads):
        return heads.choose_in_two_stages(rows, each) & candidates
    return mask_top_k(keys, each) & candidates
