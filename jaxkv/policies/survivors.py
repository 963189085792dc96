"""Entries that heads under one budget may keep in the end, before the entries of later layers are known."""

from jaxtyping import Array, Bool, Int

from jaxkv.policies.head_budgets import (
    AdaptiveHeads,
    HeadBudgets,
    Order,
    ProtectedHeads,
    ScoredRows,
    TwoStageHeads,
    own_budgets,
    without_threshold,
)
from jaxkv.policies.topk import count, only, top


def bounded(heads: HeadBudgets, devices: int) -> bool:
    """Return True if `survivors` works for these head budgets on `devices` devices."""
    heads = without_threshold(heads)
    own = own_budgets(heads)
    if own is None or heads.order is not Order.COMMON:
        return False
    # With limited devices, a device keeps its best entries only if one order decides after the guaranteed entries.
    one_order = heads is own and (isinstance(own, ProtectedHeads) or own.alpha == 0)
    return one_order or own.capacity >= devices


def rounding_rows(heads: HeadBudgets) -> int:
    """Return the entries per head, 0 or 1, by which `survivors` may exceed the final ones, as shares are rounded up."""
    own = own_budgets(heads)
    return int(isinstance(own, AdaptiveHeads) and own.alpha > 0)


def survivors(
    heads: HeadBudgets, rows: ScoredRows, headroom: Int[Array, " B"]
) -> Bool[Array, "B K S"]:
    """Return the mask `[B, K, S]` of candidates that may be kept in the end, at most `headroom[b]`.

    `headroom` is at least the number of entries that these heads keep together in the end, plus `rounding_rows` per
    head.
    """
    # A head keeps its own best entries. Their number grows with the entries that it wins in the common order of all
    # heads, stage by stage. Later layers' candidates only push entries down in that order. The number computed without
    # later layers is therefore an upper bound, and entries beyond it are never kept. Always-kept entries are no
    # candidates. The numbers sum to at most `headroom`: they are shares of it, guaranteed entries included.
    heads = without_threshold(heads)
    own, batch, candidates = own_budgets(heads), len(rows.scores), rows.candidates
    assert own is not None
    keys = rows.keys
    if isinstance(own, AdaptiveHeads):
        headroom = headroom - keys.shape[1] * rounding_rows(heads)
        won = top(keys.reshape(batch, -1), headroom).reshape(keys.shape) & candidates
        each = own.most_targets(count(won), rows.base)
    else:
        floor = own.floor(rows.base, rows.always_kept)
        safe = top(keys, floor[:, None]) & candidates
        rest = only(keys, ~safe).reshape(batch, -1)
        won = safe | top(rest, headroom - keys.shape[1] * floor).reshape(keys.shape) & candidates
        each = count(won)
    if isinstance(heads, TwoStageHeads):
        return heads.staged(rows, each) & candidates
    return top(keys, each) & candidates
