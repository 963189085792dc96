"""Entries that heads under one budget may still keep, whatever entries of further layers join them."""

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
    """True if `survivors` can tell early which entries these head budgets drop for certain, on `devices` devices."""
    heads = without_threshold(heads)
    own = own_budgets(heads)
    if own is None or heads.order is not Order.COMMON:
        return False
    # Where devices have limited room, a device keeps its best entries only if one order decides behind the safe ones.
    one_order = heads is own and (isinstance(own, ProtectedHeads) or own.alpha == 0)
    return one_order or own.capacity >= devices


def rounding_rows(heads: HeadBudgets) -> int:
    """Number of entries per head, 0 or 1, by which `survivors` may exceed the final entries: 1 if shares are rounded up."""
    own = own_budgets(heads)
    return int(isinstance(own, AdaptiveHeads) and own.alpha > 0)


def survivors(
    heads: HeadBudgets, rows: ScoredRows, headroom: Int[Array, " B"]
) -> Bool[Array, "B K S"]:
    """Mask `[B, K, S]` of candidate entries that may still be kept once later layers' heads compete; at most `headroom[b]`.

    `headroom` is at least the entries that these heads keep together in the end, `rounding_rows` more of each head included.
    """
    # A head keeps the best of its own entries, as many as a number that grows with the entries it wins in the common order of
    # all heads, stage by stage; every further candidate can only push entries down in that order, so this number, taken as
    # if no entry came any more, is an upper bound, and an entry beyond it is kept neither now nor later. Forced entries are no
    # candidates and stay anyway; the numbers sum to `headroom` at most, as shares of it beside guaranteed entries that fit in.
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
