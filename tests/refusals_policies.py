"""Rejections of policies: what constructors of the methods say of their options, and every door of a policy's name.

Policies and parts that users write are in refusals_parts.py.
"""

import dataclasses
from functools import partial

import tiny
from omnikv_cases import CONFIG, FILTERS
from refusing import calls, door, options

import jaxkv
from jaxkv import (
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
    ExpectedAttention,
    FullKV,
    GlobalBudget,
    KVGrad,
    KVzap,
    KVzip,
    LagKV,
    OmniKV,
    Policy,
    PyramidInfer,
    PyramidKV,
    QFilters,
    Quest,
    Refit,
    RocketKV,
    SimLayerKV,
    SnapKV,
    StreamingLLM,
    TriAttention,
)
from jaxkv.policies import (
    AdaptiveHeads,
    AvgPool,
    ExponentialLayers,
    FutureAttention,
    GlobalLayers,
    KeyDifference,
    LinearLayers,
    MaxPool,
    Merge,
    ProtectedHeads,
    VarianceLayers,
)

GQA = tiny.MODELS["gqa3"]
Wants = dataclasses.make_dataclass("Wants", ["rows"], bases=(Policy,), frozen=True, kw_only=True)
ROLLING = StreamingLLM(budget=40, rolling_positions=True)
OFFICIAL = partial(D2O, official=True)
# What no call takes as a policy, and no wrapper as its base.
NO_POLICY = (("snapvk", "='snapvk'"), (3, TypeError, "=int"), (Wants, TypeError, "rows"))


ROWS = [
    *calls(
        "a policy",
        (lambda: SnapKV(256), TypeError, "positional"),
        (lambda: SnapKV(compression_ratio=0.9), TypeError, r"compression_ratio: .*budget=0\.1"),
        (lambda: SnapKV(layers=LinearLayers), TypeError, "layers="),
        (lambda: AdaKV(base=ROLLING), "rolling="),
        (lambda: GlobalBudget(base=ROLLING), "rolling="),
        (lambda: StreamingLLM(slide=True, rolling_positions=True), "after="),
        (lambda: FutureAttention(sinks=0, positions=0).needs, "positions="),
    ),
    *options(
        SnapKV,
        {"budget": 1.5},
        {"budget": 20},
        {"window": 0},
        {"min_budget": "grow"},
        {"every": 0},
        {"protect": ((1.5, 3.7),)},
        {"group": "most"},
    ),
    *options(SnapKV, {"pooling": 5}, kind=TypeError),
    *options(MaxPool, {"kernel": 4}),
    *options(AvgPool, {"kernel": 0}),
    *options(AdaptiveHeads, {"alpha": 1.2}, {"capacity": 0.9}),
    *options(LinearLayers, {"beta": 0.5}),
    *options(ExponentialLayers, {"rate": 0.0}),
    *options(
        AdaKV,
        {"base": FullKV()},
        {"base": AdaKV(budget=64)},
        {"base": TOVA()},
        {"budget": 64, "base": SnapKV(budget=16, window=4)},
        {"alpha": 0.5, "heads": ProtectedHeads()},
    ),
    *options(FullKV, {"budget": 16}, {"every": 5}, {"merge": Merge()}),
    *options(H2O, {"every": 5}, {"mode": "both"}),
    *options(TOVA, {"per_head": "no"}),
    *options(StreamingLLM, {"merge": Merge(), "rolling_positions": True}),
    *options(PyramidInfer, {"every": 5}, {"layers": VarianceLayers()}),
    *options(CaM, {"every": 8}, {"merge": Merge()}),
    *options(Merge, {"metric": "norm"}, {"threshold": float("nan")}),
    *options(VarianceLayers, {"statistic": "std"}, {"dense_layers": (1.5,)}),
    *options(D2O, {"recent": 1.5}, {"official": 1}),
    *options(OFFICIAL, {"recent": 0.3}, {"merge": None}),
    *options(CriticalKV, {"base": H2O()}),
    *options(
        GlobalBudget,
        {"base": PyramidKV(budget=20)},
        {"base": TOVA(budget=20)},
        {"alpha": 0.5, "base": AdaKV(budget=9, base="knorm")},
    ),
    *options(DefensiveKV, {"window": 0}, {"stage": "first"}, {"every": 4, "stage": "mass"}),
    *options(RKV, {"mix_lambda": 1.5}, {"threshold": -0.5}),
    *options(ExpectedAttention, {"future": 0}, {"epsilon": -0.1}),
    *options(TriAttention, {"remembered": 0}, {"statistics": "no file"}),
    *options(LagKV, {"lag": 0}, {"budget": 3}),
    *options(CurDKV, {"local_window": 0}, {"leverage": "both"}),
    *options(CAPKV, {"tau": -1}),
    *options(Compactor, {"every": 8}, {"block": 0}),
    *options(
        Refit, {"references": 0}, {"ridge": 0.1}, {"every": 8}, {"base": CaM()}, {"base": H2O()}
    ),
    *options(KVzip, {"every": 8}, {"following": (1, -2)}, {"weighted": "yes"}),
    *options(KVGrad, {"every": 8}),
    *options(KVzip, {"first": 7}, kind=TypeError),
    *options(QFilters, {"every": 4}, {"q_filters": "no file"}),
    *options(QFilters, {"q_filters": 3}, kind=TypeError),
    *options(
        ChunkKV,
        {"chunk": 0},
        {"peaks": 4},
        {"base": KVzap(threshold=-4.0)},
        {"base": H2O()},
        {"base": PyramidInfer()},
    ),
    *options(
        partial(CustomPolicy, budget=9),
        {"every": 4, "scorer": FutureAttention(sinks=0, positions=8)},
        {"layers": GlobalLayers(), "scorer": KeyDifference()},
    ),
    *options(
        partial(OmniKV, filter_layers=FILTERS),
        {"filter_layers": (4, 2)},
        {"budget": 15, "selector": "uniform"},
        {"mem": 0.3, "budget": 10},
        {"selector": "first"},
        {"window": 0},
        {"prefill_ratio": 0},
        {"prefill_chunk": 300},
        {"every": 5},
        {"protect": ((0, 3),)},
        {"include_generated": True, "offload": True},
        {"include_generated": True, "base": SnapKV(budget=40)},
        {"base": OmniKV(base=SnapKV(budget=40))},
    ),
    *door(
        "reads over a base",
        lambda given: OmniKV(filter_layers=FILTERS, **given),
        ({"base": H2O(budget=40)}, "read="),
        ({"base": ROLLING}, "base="),
        ({"base": SnapKV(budget=40), "offload": True}, "read="),
    ),
    *options(SimLayerKV, {"budget": 48}, {"window": 0}),
    *options(
        Quest,
        {"budget": 47},
        {"page": 0},
        {"dense_layers": -1},
        {"merge": Merge()},
        {"base": FullKV()},
        {"base": AdaKV(base=SnapKV(budget=40))},
    ),
    *options(RocketKV, {"channels": 0}, {"budget": 11}, {"base": FullKV()}),
    *door(
        "prefill of a policy that the model cannot honour",
        lambda policy: jaxkv.prefill(tiny.tiny(CONFIG), [1, 2, 3], policy=policy),
        (OmniKV(filter_layers=(9,)), "filter_layers="),
        (OmniKV(filter_layers=FILTERS, mem=0.5), "mem="),
        (Quest(dense_layers=7), "dense_layers="),
    ),
    *door(
        "prefill", lambda policy: jaxkv.prefill(tiny.tiny(GQA), [[1, 2]], policy=policy), *NO_POLICY
    ),
    *door("a base", lambda base: AdaKV(base=base), *NO_POLICY),
]
