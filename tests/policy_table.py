"""Every policy and its notable options, one row each: a new policy is a new row, every property is tested for it."""

import oracles as o
import table_oracles as t
from policy_row import Row
from table_oracles import WINDOW

from jaxkv import (
    CAKE,
    CAPKV,
    D2O,
    H2O,
    RKV,
    TOVA,
    AdaKV,
    CaM,
    ChunkKV,
    Compactor,
    CriticalKV,
    CurDKV,
    CustomPolicy,
    DefensiveKV,
    DropKV,
    ExpectedAttention,
    FullKV,
    GlobalBudget,
    KeyDiff,
    KNorm,
    KVzip,
    LagKV,
    LayerDefensiveKV,
    LocalWindow,
    OmniKV,
    PyramidInfer,
    PyramidKV,
    QFilters,
    Quest,
    RandomKV,
    Refit,
    RocketKV,
    RoCo,
    SimLayerKV,
    SnapKV,
    StreamingLLM,
    TriAttention,
)
from jaxkv.policies import (
    AdaptiveHeads,
    AvgPool,
    EntropyLayers,
    ExponentialLayers,
    GeometricLayers,
    GiniLayers,
    GroupReduce,
    Keep,
    KeyDifference,
    KVPressLayers,
    LinearLayers,
    Merge,
    NoPool,
    OfficialLayers,
    PoolOrder,
    ProtectedHeads,
    ThresholdHeads,
    VarianceLayers,
)

SPANS = ((2, 5), (-14, -11))
# Models without a tokenizer: ids in place of texts, chunks that prompts of a table's size do not divide.
REPEATED = {"chunk": 24, "tail": 3, "first": (1, 2, 3), "following": (4, 5), "closing": (6,)}


def _snap(**options):
    return lambda budget, **kw: SnapKV(budget=budget, window=WINDOW, **options, **kw)


def _pyramid(layers, **options):
    return lambda budget, **kw: PyramidKV(
        budget=budget, window=WINDOW, layers=layers, **options, **kw
    )


def _ada(base, **options):
    return lambda budget, **kw: AdaKV(base=base(budget, **kw), **options)


def _pyramid_row(name, layers, *, beta=20, **flags):
    return Row(
        name=f"pyramidkv-{name}",
        make=_pyramid(layers),
        oracle=t.window(oracle=o.pyramidkv, shape=name, beta=beta),
        window=WINDOW,
        level=False,
        **flags,
    )


TABLE = (
    Row(
        name="full",
        make=lambda budget, **kw: FullKV(),
        oracle=t.each(lambda layer, q, k, budget: o.full(*k.shape[:2])),
        keeps_all=True,
    ),
    Row(
        name="streaming",
        make=lambda budget, **kw: StreamingLLM(budget=budget, **kw),
        oracle=t.each(lambda layer, q, k, budget: o.streaming_llm(*k.shape[:2], budget)),
        sinks=4,
        window=1,
    ),
    Row(
        name="streaming-rolling",
        make=lambda budget, **kw: StreamingLLM(
            budget=budget, sinks=2, rolling_positions=True, **kw
        ),
        oracle=t.each(lambda layer, q, k, budget: o.streaming_llm(*k.shape[:2], budget, sinks=2)),
        sinks=2,
        window=1,
        rolling=True,
    ),
    Row(
        name="local",
        make=lambda budget, **kw: LocalWindow(budget=budget, **kw),
        oracle=t.each(lambda layer, q, k, budget: o.local_window(*k.shape[:2], budget)),
        window=1,
    ),
    Row(
        name="knorm",
        make=lambda budget, **kw: KNorm(budget=budget, **kw),
        oracle=t.each(lambda layer, q, k, budget: o.knorm(k, budget)),
    ),
    Row(
        name="knorm-protect",
        make=lambda budget, **kw: KNorm(budget=budget, protect=SPANS, **kw),
        oracle=t.each(lambda layer, q, k, budget: o.knorm(k, budget, protect=SPANS)),
        protect=SPANS,
    ),
    Row(
        name="random",
        make=lambda budget, **kw: RandomKV(budget=budget, **kw),
        oracle=t.each(t.random),
    ),
    Row(name="snapkv", make=_snap(), oracle=t.window(), window=WINDOW),
    Row(
        name="snapkv-avg",
        make=_snap(pooling=AvgPool(5)),
        oracle=t.window(pool="avg", kernel=5),
        window=WINDOW,
    ),
    Row(
        name="snapkv-nopool",
        make=_snap(pooling=NoPool()),
        oracle=t.window(pool=None),
        window=WINDOW,
    ),
    Row(
        name="snapkv-max",
        make=_snap(group=GroupReduce.MAX),
        oracle=t.window(group="max"),
        window=WINDOW,
    ),
    Row(
        name="snapkv-first",
        make=_snap(order=PoolOrder.FIRST),
        oracle=t.window(order="pool_first"),
        window=WINDOW,
    ),
    Row(
        name="snapkv-sinks",
        make=_snap(sinks=3, protect=SPANS),
        oracle=t.window(sinks=3, protect=SPANS),
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
    _pyramid_row(
        "kvpress", KVPressLayers(beta=1.5), beta=1.5, exact=False, like="pyramidkv-linear"
    ),
    Row(
        name="adakv",
        make=_ada(_snap()),
        oracle=t.window(oracle=o.adakv),
        window=WINDOW,
        uniform=False,
    ),
    Row(
        name="adakv-alpha0",
        make=_ada(_snap(pooling=NoPool()), heads=AdaptiveHeads(alpha=0.0)),
        oracle=t.window(oracle=o.adakv, alpha=0.0, pool=None),
        window=WINDOW,
        uniform=False,
    ),
    Row(
        name="adakv-pyramid",
        make=_ada(_pyramid(LinearLayers())),
        oracle=t.window(oracle=o.adakv, shape="linear"),
        window=WINDOW,
        uniform=False,
        level=False,
    ),
    Row(
        name="adakv-entropy",
        make=_ada(_pyramid(EntropyLayers(), sinks=2)),
        oracle=t.window(oracle=o.adakv, shape="entropy", sinks=2),
        sinks=2,
        window=WINDOW,
        uniform=False,
        level=False,
    ),
    Row(
        name="adakv-knorm",
        make=_ada(lambda budget, **kw: KNorm(budget=budget, **kw)),
        oracle=t.each(t.ada_knorm),
        uniform=False,
    ),
    Row(
        name="adakv-protected",
        make=_ada(_snap(pooling=AvgPool(5)), heads=ProtectedHeads()),
        oracle=t.window(oracle=o.adakv, ada="protect", pool="avg", kernel=5),
        window=WINDOW,
        uniform=False,
    ),
)
TABLE += (
    Row(
        name="streaming-slide",
        make=lambda budget, **kw: StreamingLLM(budget=budget, slide=True, **kw),
        oracle=t.each(lambda layer, q, k, budget: o.streaming_llm(*k.shape[:2], budget)),
        sinks=4,
        window=1,
        evicts=True,
    ),
    Row(
        name="h2o",
        make=lambda budget, **kw: H2O(budget=budget, **kw),
        oracle=t.heavy(),
        window=1,
        evicts=True,
    ),
    Row(
        name="h2o-prefill",
        make=lambda budget, **kw: H2O(budget=budget, mode="prefill", sinks=2, recent=0.25, **kw),
        oracle=t.heavy(sinks=2, share=0.25),
        sinks=2,
        window=1,
        like="snapkv",
    ),
    Row(
        name="roco",
        make=lambda budget, **kw: RoCo(budget=budget, **kw),
        oracle=t.heavy(mean=True),
        window=1,
        evicts=True,
    ),
    Row(
        name="tova",
        make=lambda budget, **kw: TOVA(budget=budget, **kw),
        oracle=t.each(t.tova),
        window=1,
        evicts=True,
    ),
    Row(
        name="adakv-h2o",
        make=_ada(lambda budget, **kw: H2O(budget=budget, **kw)),
        oracle=t.heavy(ada=True),
        window=1,
        uniform=False,
        evicts=True,
    ),
    Row(
        name="d2o",
        make=lambda budget, **kw: D2O(budget=budget, **kw),
        oracle=t.d2o("headnorm"),
        sinks=4,
        window=1,
        level=False,
        evicts=True,
        merges=True,
    ),
    Row(
        name="d2o-raw",
        make=lambda budget, **kw: D2O(
            budget=budget, merge=None, layers=VarianceLayers(statistic="raw"), **kw
        ),
        oracle=t.d2o("raw"),
        sinks=4,
        window=1,
        level=False,
        evicts=True,
        like="d2o",
    ),
    Row(
        name="snapkv-merge",
        make=_snap(merge=Merge(metric="both", weights="average")),
        oracle=t.window(),
        window=WINDOW,
        merges=True,
        like="snapkv",
    ),
    Row(
        name="adakv-variance",
        make=_ada(_snap(layers=VarianceLayers(), merge=Merge())),
        oracle=t.ada_variance,
        window=WINDOW,
        uniform=False,
        level=False,
        merges=True,
    ),
    Row(
        name="cam",
        make=lambda budget, **kw: CaM(budget=budget, window=WINDOW, **kw),
        oracle=t.window(pool=None),
        window=WINDOW,
        merges=True,
        like="snapkv",
    ),
    Row(
        name="cake",
        make=lambda budget, **kw: CAKE(budget=budget, window=WINDOW, **kw),
        oracle=t.window(oracle=o.cake),
        window=WINDOW,
        level=False,
        like="pyramidkv-entropy",
    ),
    Row(
        name="simlayerkv",
        make=lambda budget, **kw: SimLayerKV(budget=budget, window=3, sinks=2, recent=WINDOW, **kw),
        oracle=lambda qs, ks, budget: o.simlayerkv(
            qs, ks, budget, window=3, sinks=2, recent=WINDOW
        ),
        sinks=2,
        window=WINDOW,
        level=False,
        like="cake",
    ),
    Row(
        name="criticalkv",
        make=lambda budget, **kw: CriticalKV(base=SnapKV(budget=budget, window=WINDOW, **kw)),
        oracle=t.critical(),
        window=WINDOW,
        like="snapkv",
    ),
    Row(
        name="criticalkv-tova",
        make=lambda budget, **kw: CriticalKV(base=TOVA(budget=budget, mode="prefill", **kw)),
        oracle=t.each(t.critical_tova),
        window=1,
        like="snapkv",
    ),
    Row(
        name="criticalkv-pyramidinfer",
        make=lambda budget, **kw: CriticalKV(base=PyramidInfer(budget=budget, window=WINDOW, **kw)),
        oracle=t.critical_pyramid_infer,
        window=WINDOW,
        level=False,
        like="pyramidkv-linear",
    ),
    Row(
        name="criticalkv-rolling",
        make=lambda budget, **kw: CriticalKV(
            base=StreamingLLM(budget=budget, sinks=2, rolling_positions=True, **kw)
        ),
        oracle=t.each(t.critical_streaming),
        sinks=2,
        window=1,
        rolling=True,
    ),
    Row(
        name="adakv-critical",
        make=_ada(lambda budget, **kw: CriticalKV(base=SnapKV(budget=budget, window=WINDOW, **kw))),
        oracle=t.critical(ada=True),
        window=WINDOW,
        uniform=False,
        like="adakv",
    ),
    Row(
        name="keydiff",
        make=lambda budget, **kw: KeyDiff(budget=budget, **kw),
        oracle=t.each(t.keydiff),
        like="knorm",
    ),
    Row(
        name="threshold",
        make=lambda budget, **kw: CustomPolicy(
            budget=budget,
            scorer=KeyDifference(),
            keep=Keep(sinks=2, window=WINDOW),
            heads=ThresholdHeads(threshold=-0.1),
            **kw,
        ),
        oracle=t.each(t.threshold_keydiff),
        sinks=2,
        window=WINDOW,
        uniform=False,
        level=False,
        exact=False,
        like="adakv",
    ),
    Row(
        name="lagkv",
        make=lambda budget, **kw: LagKV(budget=budget, lag=4, **kw),
        oracle=t.lagkv(lag=4),
        sinks=4,
        like="knorm",
    ),
    Row(
        name="curdkv",
        make=lambda budget, **kw: CurDKV(budget=budget, **kw),
        oracle=t.curdkv(),
        sinks=4,
        like="knorm",
    ),
    Row(
        name="capkv",
        make=lambda budget, **kw: CAPKV(budget=budget, **kw),
        oracle=t.capkv(),
        sinks=4,
        like="knorm",
    ),
    Row(
        name="qfilters",
        make=lambda budget, **kw: QFilters(budget=budget, **kw),
        oracle=t.qfilters,
        like="knorm",
    ),
    Row(
        name="expected",
        make=lambda budget, **kw: ExpectedAttention(budget=budget, **kw),
        oracle=t.expected(),
        sinks=4,
        like="knorm",
    ),
    Row(
        name="expected-mean",
        make=lambda budget, **kw: ExpectedAttention(
            budget=budget, covariance=False, value_norms=False, **kw
        ),
        oracle=t.expected(covariance=False, value_norms=False),
        sinks=4,
        like="knorm",
    ),
    Row(
        name="adakv-expected",
        make=_ada(lambda budget, **kw: ExpectedAttention(budget=budget, epsilon=0.01, **kw)),
        oracle=t.expected(ada=True, epsilon=0.01),
        sinks=4,
        uniform=False,
        like="adakv",
    ),
    Row(
        name="defensivekv",
        make=lambda budget, **kw: DefensiveKV(budget=budget, window=WINDOW, **kw),
        oracle=t.defensive(),
        window=WINDOW,
        uniform=False,
        like="adakv",
    ),
    Row(
        name="layerdefensivekv",
        make=lambda budget, **kw: LayerDefensiveKV(budget=budget, window=WINDOW, **kw),
        oracle=t.defensive(over_layers=True),
        window=WINDOW,
        uniform=False,
        level=False,
    ),
    Row(
        name="layerdefensivekv-mass",
        make=lambda budget, **kw: LayerDefensiveKV(
            budget=budget, window=WINDOW, stage="mass", **kw
        ),
        oracle=t.defensive(over_layers=True, stage="mass"),
        window=WINDOW,
        uniform=False,
        level=False,
        like="layerdefensivekv",
    ),
    Row(
        name="dropkv",
        make=lambda budget, **kw: DropKV(budget=budget, window=WINDOW, **kw),
        oracle=t.each(t.dropkv),
        window=WINDOW,
        like="snapkv",
    ),
    Row(
        name="rkv",
        make=lambda budget, **kw: RKV(budget=budget, window=WINDOW, **kw),
        oracle=t.each(t.rkv),
        window=WINDOW,
        like="snapkv",
    ),
    Row(
        name="triattention",
        make=lambda budget, **kw: TriAttention(budget=budget, remembered=WINDOW, **kw),
        oracle=t.triattention,
        sinks=4,
        like="knorm",
    ),
    Row(
        name="chunkkv",
        make=lambda budget, **kw: ChunkKV(
            base=SnapKV(budget=budget, window=WINDOW, sinks=2, **kw), chunk=5
        ),
        oracle=t.each(t.chunkkv),
        sinks=2,
        window=WINDOW,
        like="snapkv",
    ),
    Row(
        name="chunkkv-entropy",
        make=lambda budget, **kw: ChunkKV(
            base=SnapKV(budget=budget, window=WINDOW, pooling=NoPool(), **kw),
            chunk=5,
            gated=True,
            peaks=2,
        ),
        oracle=t.each(t.chunkkv_entropy),
        window=WINDOW,
        like="snapkv",
    ),
    Row(
        name="compactor",
        make=lambda budget, **kw: Compactor(
            budget=budget, sinks=2, window=4, block=16, sketch=6, **kw
        ),
        oracle=t.each(t.compactor),
        sinks=2,
        window=4,
        like="knorm",
    ),
    Row(
        name="globalbudget-keydiff",
        make=lambda budget, **kw: GlobalBudget(base=KeyDiff(budget=budget, **kw), alpha=0.3),
        oracle=t.global_keydiff,
        uniform=False,
        level=False,
        like="layerdefensivekv",
    ),
    Row(
        name="globalbudget-h2o",
        make=lambda budget, **kw: GlobalBudget(base=H2O(budget=budget, **kw)),
        oracle=t.global_heavy,
        window=1,
        uniform=False,
        level=False,
        evicts=True,
    ),
    Row(
        name="refit",
        make=lambda budget, **kw: Refit(base=_ada(_snap())(budget, **kw), references=20),
        oracle=t.window(oracle=o.adakv),
        window=WINDOW,
        uniform=False,
        merges=True,
        like="adakv",
    ),
    Row(
        name="kvzip",
        make=lambda budget, **kw: KVzip(budget=budget, sinks=2, **REPEATED, **kw),
        oracle=t.kvzip,
        sinks=2,
        uniform=False,
        level=False,
        like="layerdefensivekv",
    ),
    Row(
        name="quest",
        make=lambda budget, **kw: Quest(budget=budget, page=4, dense_layers=1),
        oracle=t.each(lambda layer, q, k, budget: o.full(*k.shape[:2])),
        keeps_all=True,
    ),
    Row(
        name="rocketkv",
        make=lambda budget, **kw: RocketKV(
            budget=12, channels=5, base=SnapKV(budget=budget, window=WINDOW, **kw)
        ),
        oracle=t.window(),
        window=WINDOW,
    ),
    Row(
        name="omnikv",
        make=lambda budget, **kw: OmniKV(filter_layers=(0,), adjacent=0, budget=budget),
        oracle=t.each(lambda layer, q, k, budget: o.full(*k.shape[:2])),
        keeps_all=True,
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
