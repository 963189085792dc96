"""Rows that heads under one budget may still keep, whatever rows of further layers join them."""

from jaxtyping import Array, Bool, Int

from jaxkv.policies.heads import (
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
    """True if `survivors` can tell early which rows these head budgets drop for certain, on `devices` devices."""
    heads = without_threshold(heads)
    own = own_budgets(heads)
    if own is None or heads.order is not Order.COMMON:
        return False
    # Where devices have limited room, a device keeps its best rows only if one order decides behind the safe ones.
    one_order = heads is own and (isinstance(own, ProtectedHeads) or own.alpha == 0)
    return one_order or own.capacity >= devices


def rounding_rows(heads: HeadBudgets) -> int:
    """Number of rows per head, 0 or 1, by which `survivors` may exceed the final rows: 1 if shares are rounded up."""
    own = own_budgets(heads)
    return int(isinstance(own, AdaptiveHeads) and own.alpha > 0)


def survivors(heads: HeadBudgets, rows: ScoredRows, room: Int[Array, " B"]) -> Bool[Array, "B K S"]:
    """Mask `[B, K, S]` of candidate rows that may still be kept once later layers' heads compete; at most `room[b]`.

    `room` is at least the rows that these heads keep together in the end, `rounding_rows` more of each head included.
    """
    # A head keeps the best of its own rows, as many as a number that grows with the rows it wins in the common order of
    # all heads, stage by stage; every further candidate can only push rows down in that order, so this number, taken as
    # if no row came any more, is an upper bound, and a row beyond it is kept neither now nor later. Forced rows are no
    # candidates and stay anyway; the numbers sum to `room` at most, as shares of it beside guaranteed rows that fit in.
    heads = without_threshold(heads)
    own, batch, candidates = own_budgets(heads), len(rows.scores), rows.candidates
    assert own is not None
    keys = rows.keys
    if isinstance(own, AdaptiveHeads):
        room = room - keys.shape[1] * rounding_rows(heads)
        won = top(keys.reshape(batch, -1), room).reshape(keys.shape) & candidates
        each = own.most_targets(count(won), rows.base)
    else:
        floor = own.floor(rows.base, rows.forced)
        safe = top(keys, floor[:, None]) & candidates
        rest = only(keys, ~safe).reshape(batch, -1)
        won = safe | top(rest, room - keys.shape[1] * floor).reshape(keys.shape) & candidates
        each = count(won)
    if isinstance(heads, TwoStageHeads):
        return heads.staged(rows, each) & candidates
    return top(keys, each) & candidates
