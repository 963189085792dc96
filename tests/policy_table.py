"""Every policy and its notable options, one row each: a new policy is a new row, every property is tested for it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import oracles as o

from jaxkv import (
    D2O,
    H2O,
    TOVA,
    AdaKV,
    CaM,
    CriticalKV,
    FullKV,
    KNorm,
    LocalWindow,
    Merge,
    Policy,
    PyramidInfer,
    PyramidKV,
    Random,
    RoCo,
    SnapKV,
    StreamingLLM,
    VarianceLayers,
)
from jaxkv.policies import (
    AdaptiveHeads,
    AvgPool,
    EntropyLayers,
    ExponentialLayers,
    GeometricLayers,
    GiniLayers,
    GroupReduce,
    KVPressLayers,
    LinearLayers,
    NoPool,
    OfficialLayers,
    PoolOrder,
    ProtectedHeads,
)

WINDOW = 8
SPANS = ((2, 5), (-14, -11))
# (q, k, budget) of all layers, without batch or padding, to (kept[L][K], gap).
Oracle = Callable[[list[np.ndarray], list[np.ndarray], int | float], tuple[list[list[list[int]]], float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One policy of the table.

    Attributes:
        name: for test ids.
        make: from a budget to the policy; keywords go to where budgets are given (the base, for AdaKV).
        oracle: independent arithmetic of the same selection.
        sinks: first positions that must stay.
        window: last positions that must stay.
        protect: spans that must stay.
        uniform: every head of a layer keeps as many rows.
        level: every layer keeps as many rows.
        exact: rows over all layers sum to L times the budget.
        rolling: keys are stored before RoPE.
        keeps_all: there is no budget.
        evicts: a row goes for every new one beyond the budget.
        merges: kept rows are not the prompt's own.
        like: a row that leaves pools of the same kind; tests of what happens after prefill need only that one.
    """

    name: str
    make: Callable[..., Policy]
    oracle: Oracle
    sinks: int = 0
    window: int = 0
    protect: tuple[tuple[int, int], ...] = ()
    uniform: bool = True
    level: bool = True
    exact: bool = True
    rolling: bool = False
    keeps_all: bool = False
    evicts: bool = False
    merges: bool = False
    like: str = ""

    def policy(self, budget: int | float) -> Policy:
        """The policy at this budget; ratios that come out too small are raised to what must stay."""
        return self.make(budget, min_budget="clamp" if isinstance(budget, float) else "raise")


def _each(select) -> Oracle:
    """Layers that do not know of each other: `select(layer, q, k, budget)` for each, and the smallest gap."""

    def oracle(qs, ks, budget):
        picked = [select(layer, q, k, budget) for layer, (q, k) in enumerate(zip(qs, ks, strict=True))]
        return [kept for kept, _ in picked], min(gap for _, gap in picked)

    return oracle


def _ada_knorm(layer, q, k, budget):
    n = k.shape[1]
    return o.ada_select(o.knorm_scores(k), o.resolve_budget(budget, n), [], n)


def _random(layer, q, k, budget):
    # The draws are the library's promise: by key, layer, position and head; which of them win is worked out here.
    heads, n, _ = k.shape
    key = jax.random.fold_in(jax.random.key(0), layer)
    draws = np.stack([jax.random.uniform(jax.random.fold_in(key, j), (heads,)) for j in range(n)], axis=1)
    rows = o.resolve_budget(budget, n)
    picked = [o.top_select(row, rows, [], n) for row in draws.astype(np.float64)]
    return [kept for kept, _ in picked], min(gap for _, gap in picked)


def _recent(rows, sinks, share):
    return max(1, int((rows - sinks) * share))


def _heavy(sinks=0, share=0.5, mean=False, ada=False):
    """Cumulative attention, uniform layers: sinks, recent rows, and the best of the others."""

    def select(layer, q, k, budget):
        n = k.shape[1]
        rows = o.resolve_budget(budget, n)
        scores = o.cumulative_scores(q, k)
        if mean:
            scores = scores / (n - np.arange(n))
        forced = o.forced_positions(n, sinks, _recent(rows, sinks, share), ())
        if ada:
            return o.ada_select(scores, rows, forced, n)
        picked = [o.top_select(row, rows, forced, n) for row in scores]
        return [kept for kept, _ in picked], min(gap for _, gap in picked)

    return _each(select)


def _d2o(kind):
    """Layers by variance of column sums, sinks and a quarter of the rest for recent rows."""

    def oracle(qs, ks, budget):
        n = ks[0].shape[1]
        stats = [o.layer_statistic(q, k, kind) for q, k in zip(qs, ks, strict=True)]
        rows, margin = o.variance_rows(stats, n, budget, kind, len(o.forced_positions(n, 4, 1, ())))
        kept, gap = [], margin / n
        for q, k, r in zip(qs, ks, rows, strict=True):
            forced = o.forced_positions(n, 4, _recent(r, 4, 0.25), ())
            picked = [o.top_select(row, r, forced, n) for row in o.cumulative_scores(q, k)]
            kept.append([positions for positions, _ in picked])
            gap = min(gap, *(own for _, own in picked))
        return kept, gap

    return oracle


def _ada_variance(qs, ks, budget):
    n = ks[0].shape[1]
    stats = [o.layer_statistic(q, k, "headnorm") for q, k in zip(qs, ks, strict=True)]
    forced = o.forced_positions(n, 0, WINDOW, ())
    rows, margin = o.variance_rows(stats, n, budget, "headnorm", len(forced))
    picked = [
        o.ada_select(o.window_scores(q, k, WINDOW, 7, "max", "mean", "mean_first"), r, forced, n)
        for q, k, r in zip(qs, ks, rows, strict=True)
    ]
    return [kept for kept, _ in picked], min(margin / n, *(gap for _, gap in picked))


def _tova(layer, q, k, budget):
    n = k.shape[1]
    rows = o.resolve_budget(budget, n)
    scores = o.last_scores(q, k)
    picked = [o.top_select(row, rows, [n - 1], n) for row in scores]
    return [kept for kept, _ in picked], min(gap for _, gap in picked)


def critical_norms(k):
    """What stands for the values' norms where there is no model: any positive numbers will do."""
    return 1 + np.abs(k).sum(axis=-1)


def _critical(ada=False):
    def select(layer, q, k, budget):
        n = k.shape[1]
        rows, forced = o.resolve_budget(budget, n), o.forced_positions(n, 0, WINDOW, ())
        scores = o.window_scores(q, k, WINDOW, 7, "max", "mean", "mean_first")
        budgets, gap = [rows] * len(k), np.inf
        if ada:
            kept, gap = o.ada_select(scores, rows, forced, n)
            budgets = [len(head) for head in kept]
        kept, own = o.critical_select(scores, critical_norms(k), budgets, forced, n)
        return kept, min(gap, own)

    return _each(select)


def _window(oracle=o.snapkv, **options: Any) -> Oracle:
    """An oracle of the SnapKV family with these options."""

    def select(qs, ks, budget):
        return oracle(qs, ks, budget, window=WINDOW, **options)

    return select


def _snap(**options):
    return lambda budget, **kw: SnapKV(budget=budget, window=WINDOW, **options, **kw)


def _pyramid(allocation, **options):
    return lambda budget, **kw: PyramidKV(budget=budget, window=WINDOW, allocation=allocation, **options, **kw)


def _ada(base, **options):
    return lambda budget, **kw: AdaKV(base=base(budget, **kw), **options)


def _pyramid_row(name, allocation, *, beta=20, **flags):
    return Row(
        name=f"pyramidkv-{name}",
        make=_pyramid(allocation),
        oracle=_window(oracle=o.pyramidkv, shape=name, beta=beta),
        window=WINDOW,
        level=False,
        **flags,
    )


TABLE = (
    Row(
        name="full",
        make=lambda budget, **kw: FullKV(),
        oracle=_each(lambda layer, q, k, budget: o.full(*k.shape[:2])),
        keeps_all=True,
    ),
    Row(
        name="streaming",
        make=lambda budget, **kw: StreamingLLM(budget=budget, **kw),
        oracle=_each(lambda layer, q, k, budget: o.streaming_llm(*k.shape[:2], budget)),
        sinks=4,
        window=1,
    ),
    Row(
        name="streaming-rolling",
        make=lambda budget, **kw: StreamingLLM(budget=budget, sinks=2, rolling_positions=True, **kw),
        oracle=_each(lambda layer, q, k, budget: o.streaming_llm(*k.shape[:2], budget, sinks=2)),
        sinks=2,
        window=1,
        rolling=True,
    ),
    Row(
        name="local",
        make=lambda budget, **kw: LocalWindow(budget=budget, **kw),
        oracle=_each(lambda layer, q, k, budget: o.local_window(*k.shape[:2], budget)),
        window=1,
    ),
    Row(
        name="knorm",
        make=lambda budget, **kw: KNorm(budget=budget, **kw),
        oracle=_each(lambda layer, q, k, budget: o.knorm(k, budget)),
    ),
    Row(
        name="knorm-protect",
        make=lambda budget, **kw: KNorm(budget=budget, protect=SPANS, **kw),
        oracle=_each(lambda layer, q, k, budget: o.knorm(k, budget, protect=SPANS)),
        protect=SPANS,
    ),
    Row(name="random", make=lambda budget, **kw: Random(budget=budget, **kw), oracle=_each(_random)),
    Row(name="snapkv", make=_snap(), oracle=_window(), window=WINDOW),
    Row(name="snapkv-avg", make=_snap(pooling=AvgPool(5)), oracle=_window(pool="avg", kernel=5), window=WINDOW),
    Row(name="snapkv-nopool", make=_snap(pooling=NoPool()), oracle=_window(pool=None), window=WINDOW),
    Row(name="snapkv-max", make=_snap(group=GroupReduce.MAX), oracle=_window(group="max"), window=WINDOW),
    Row(name="snapkv-first", make=_snap(order=PoolOrder.FIRST), oracle=_window(order="pool_first"), window=WINDOW),
    Row(
        name="snapkv-sinks",
        make=_snap(sinks=3, protect=SPANS),
        oracle=_window(sinks=3, protect=SPANS),
        sinks=3,
        window=WINDOW,
        protect=SPANS,
    ),
    _pyramid_row("linear", LinearLayers()),
    _pyramid_row("geometric", GeometricLayers(), like="pyramidkv-linear"),
    _pyramid_row("exponential", ExponentialLayers(), like="pyramidkv-linear"),
    _pyramid_row("entropy", EntropyLayers()),
    _pyramid_row("gini", GiniLayers(), like="pyramidkv-entropy"),
    _pyramid_row("official", OfficialLayers(), exact=False, like="pyramidkv-linear"),
    # A small beta: with 20 the top layer would fall below the window, where kvpress goes uniform.
    _pyramid_row("kvpress", KVPressLayers(beta=1.5), beta=1.5, exact=False, like="pyramidkv-linear"),
    Row(name="adakv", make=_ada(_snap()), oracle=_window(oracle=o.adakv), window=WINDOW, uniform=False),
    Row(
        name="adakv-alpha0",
        make=_ada(_snap(pooling=NoPool()), safeguard=AdaptiveHeads(alpha=0.0)),
        oracle=_window(oracle=o.adakv, alpha=0.0, pool=None),
        window=WINDOW,
        uniform=False,
    ),
    Row(
        name="adakv-pyramid",
        make=_ada(_pyramid(LinearLayers())),
        oracle=_window(oracle=o.adakv, shape="linear"),
        window=WINDOW,
        uniform=False,
        level=False,
    ),
    Row(
        name="adakv-entropy",
        make=_ada(_pyramid(EntropyLayers(), sinks=2)),
        oracle=_window(oracle=o.adakv, shape="entropy", sinks=2),
        sinks=2,
        window=WINDOW,
        uniform=False,
        level=False,
    ),
    Row(
        name="adakv-knorm",
        make=_ada(lambda budget, **kw: KNorm(budget=budget, **kw)),
        oracle=_each(_ada_knorm),
        uniform=False,
    ),
    Row(
        name="adakv-protected",
        make=_ada(_snap(pooling=AvgPool(5)), safeguard=ProtectedHeads()),
        oracle=_window(oracle=o.adakv, ada="protect", pool="avg", kernel=5),
        window=WINDOW,
        uniform=False,
    ),
)
TABLE += (
    Row(
        name="streaming-slide",
        make=lambda budget, **kw: StreamingLLM(budget=budget, slide=True, **kw),
        oracle=_each(lambda layer, q, k, budget: o.streaming_llm(*k.shape[:2], budget)),
        sinks=4,
        window=1,
        evicts=True,
    ),
    Row(name="h2o", make=lambda budget, **kw: H2O(budget=budget, **kw), oracle=_heavy(), window=1, evicts=True),
    Row(
        name="h2o-prefill",
        make=lambda budget, **kw: H2O(budget=budget, mode="prefill", sinks=2, recent=0.25, **kw),
        oracle=_heavy(sinks=2, share=0.25),
        sinks=2,
        window=1,
        like="snapkv",
    ),
    Row(
        name="roco",
        make=lambda budget, **kw: RoCo(budget=budget, **kw),
        oracle=_heavy(mean=True),
        window=1,
        evicts=True,
    ),
    Row(name="tova", make=lambda budget, **kw: TOVA(budget=budget, **kw), oracle=_each(_tova), window=1, evicts=True),
    Row(
        name="adakv-h2o",
        make=_ada(lambda budget, **kw: H2O(budget=budget, **kw)),
        oracle=_heavy(ada=True),
        window=1,
        uniform=False,
        evicts=True,
    ),
    Row(
        name="d2o",
        make=lambda budget, **kw: D2O(budget=budget, **kw),
        oracle=_d2o("headnorm"),
        sinks=4,
        window=1,
        level=False,
        evicts=True,
        merges=True,
    ),
    Row(
        name="d2o-raw",
        make=lambda budget, **kw: D2O(budget=budget, merge=None, allocation=VarianceLayers(statistic="raw"), **kw),
        oracle=_d2o("raw"),
        sinks=4,
        window=1,
        level=False,
        evicts=True,
        like="d2o",
    ),
    Row(
        name="snapkv-merge",
        make=_snap(merge=Merge(metric="both", weights="average")),
        oracle=_window(),
        window=WINDOW,
        merges=True,
        like="snapkv",
    ),
    Row(
        name="adakv-variance",
        make=_ada(_snap(allocation=VarianceLayers(), merge=Merge())),
        oracle=_ada_variance,
        window=WINDOW,
        uniform=False,
        level=False,
        merges=True,
    ),
    Row(
        name="cam",
        make=lambda budget, **kw: CaM(budget=budget, window=WINDOW, **kw),
        oracle=_window(pool=None),
        window=WINDOW,
        merges=True,
        like="snapkv",
    ),
    Row(
        name="criticalkv",
        make=lambda budget, **kw: CriticalKV(base=SnapKV(budget=budget, window=WINDOW, **kw)),
        oracle=_critical(),
        window=WINDOW,
        like="snapkv",
    ),
    Row(
        name="adakv-critical",
        make=_ada(lambda budget, **kw: CriticalKV(base=SnapKV(budget=budget, window=WINDOW, **kw))),
        oracle=_critical(ada=True),
        window=WINDOW,
        uniform=False,
        like="adakv",
    ),
    Row(
        name="pyramidinfer",
        make=lambda budget, **kw: PyramidInfer(budget=budget, window=WINDOW, **kw),
        oracle=lambda qs, ks, budget: o.pyramid_infer(qs, ks, budget, WINDOW),
        window=WINDOW,
        level=False,
        like="pyramidkv-linear",
    ),
)

# Rows whose decoding is tested.
DECODED = tuple(row for row in TABLE if not row.like)
BY_NAME = {row.name: row for row in TABLE}
