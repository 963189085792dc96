"""Refusals of policies: what constructors of the methods say of their options, and every door of a policy's name.

Policies and parts that users write are in refusals_parts.py.
"""

import dataclasses

import tiny
from omnikv_cases import CONFIG, FILTERS
from refusing import calls, door

import jaxkv
from jaxkv import (
    D2O,
    H2O,
    RKV,
    TOVA,
    AdaKV,
    CaM,
    CriticalKV,
    DefensiveKV,
    ExpectedAttention,
    FullKV,
    GlobalBudget,
    Merge,
    Method,
    OmniKV,
    Policy,
    PyramidInfer,
    PyramidKV,
    Quest,
    SimLayerKV,
    SnapKV,
    StreamingLLM,
)
from jaxkv.engine.plan import plan_prefill
from jaxkv.policies import (
    AdaptiveHeads,
    AvgPool,
    ExponentialLayers,
    FutureAttention,
    GlobalLayers,
    KeyDifference,
    LinearLayers,
    MaxPool,
    ProtectedHeads,
    VarianceLayers,
)

GQA = tiny.MODELS["gqa3"]
Wants = dataclasses.make_dataclass("Wants", ["rows"], bases=(Method,), frozen=True, kw_only=True)

# What prefill, generate and plan_prefill are given as a policy, and wrappers as their base.
NO_POLICY = (
    ("snapvk", "policy='snapvk'"),
    (3, TypeError, "policy=int"),
    (Wants, TypeError, "rows must be said"),
)


ROWS = [
    *calls(
        "a policy",
        (lambda: SnapKV(256), TypeError, "positional"),
        (lambda: AdaKV(SnapKV), TypeError, "positional"),
        (lambda: SnapKV(compression_ratio=0.9), TypeError, r"compression_ratio: .*budget=0\.1"),
        (lambda: SnapKV(budget=0), "budget=0"),
        (lambda: SnapKV(budget=1.5), r"budget=1\.5"),
        (lambda: SnapKV(budget=None), "budget=None"),
        (
            lambda: SnapKV(budget=20),
            "budget=20",
        ),
        (lambda: AdaKV(budget=64, base=SnapKV(budget=16, window=4)), "budget=64"),
        (lambda: SnapKV(window=0), "window=0"),
        (lambda: SnapKV(min_budget="grow"), "min_budget='grow'"),
        (lambda: MaxPool(4), "kernel=4"),
        (lambda: AvgPool(0), "kernel=0"),
        (lambda: AdaptiveHeads(alpha=1.2), r"alpha=1\.2"),
        (lambda: LinearLayers(beta=0.5), r"beta=0\.5"),
        (lambda: ExponentialLayers(rate=0.0), r"rate=0\.0"),
        (lambda: AdaKV(base=FullKV()), r"base=FullKV\("),
        (lambda: AdaKV(base=AdaKV(budget=64)), r"base=AdaKV\("),
        (
            lambda: AdaKV(base=StreamingLLM(rolling_positions=True)),
            "base=.*rolling",
        ),
        (lambda: FullKV(budget=16), "budget=16"),
        (lambda: AdaptiveHeads(capacity=0.9), r"capacity=0\.9"),
        (lambda: SnapKV(every=0), "every=0"),
        (lambda: FullKV(every=5), "every=5"),
        (lambda: H2O(every=5), "every=5"),
        (lambda: PyramidInfer(every=5), "every=5"),
        (lambda: H2O(mode="both"), "mode='both'"),
        (lambda: D2O(recent=1.5), "recent=1.5"),
        (lambda: StreamingLLM(slide=True, rolling_positions=True), "slide=True"),
        (lambda: StreamingLLM(merge=Merge(), rolling_positions=True), "merge=.*RoPE"),
        (lambda: FullKV(merge=Merge()), "merge=.*drops nothing"),
        (
            lambda: AdaKV(base=SnapKV(merge=Merge(decision="shared_position"))),
            "merge=.*decision='token'",
        ),
        (lambda: CaM(merge=Merge()), "merge=.*its own"),
        (lambda: Merge(metric="norm"), "metric='norm'"),
        (lambda: Merge(beta=1.5), "beta=1.5"),
        (lambda: Merge(threshold=float("nan")), "threshold=nan"),
        (lambda: VarianceLayers(statistic="std"), "statistic='std'"),
        (lambda: D2O(official=True, recent=0.3), "recent=0.3"),
        (lambda: CriticalKV(base=H2O()), "base=.*mode='prefill'"),
        (lambda: PyramidInfer(allocation=VarianceLayers()), "allocation=.*LinearLayers"),
        (lambda: AdaKV(base=TOVA()), "base=.*budgets of their own"),
        (
            lambda: SnapKV(protect=((1.5, 3.7),)),
            r"protect=\(\(1\.5, 3\.7\),\)",
        ),
        (lambda: SnapKV(group="most"), "group='most'"),
        (lambda: SnapKV(pooling=5), TypeError, "pooling=5"),
        (
            lambda: SnapKV(allocation=LinearLayers),
            TypeError,
            "allocation=.*",
        ),
        (lambda: AdaKV(safeguard=AdaptiveHeads), TypeError, "safeguard=.*AdaptiveHeads"),
        (lambda: TOVA(per_head="no"), "per_head='no'"),
        (lambda: D2O(official=1), "official=1"),
        (lambda: VarianceLayers(dense_layers=(1.5,)), r"dense_layers=\(1\.5,\)"),
        (lambda: GlobalBudget(base=PyramidKV(budget=20)), "base=.*its layers have budgets"),
        (lambda: GlobalBudget(base=TOVA(budget=20)), "base=.*heads keep the same positions"),
        (lambda: GlobalBudget(base=StreamingLLM(rolling_positions=True)), "base=.*rolling"),
        (
            lambda: GlobalBudget(base=AdaKV(budget=9, base="knorm"), alpha=0.5),
            "alpha=0.5",
        ),
        (lambda: DefensiveKV(window=0), "window=0"),
        (lambda: DefensiveKV(stage="first"), "stage='first'"),
        (lambda: DefensiveKV(stage="mass", every=4), "every=4"),
        (lambda: RKV(mix_lambda=1.5), "mix_lambda=1.5"),
        (lambda: RKV(threshold=-0.5), "threshold=-0.5"),
        (lambda: ExpectedAttention(future=0), "future=0"),
        (lambda: ExpectedAttention(epsilon=-0.1), "epsilon=-0.1"),
        (lambda: ExpectedAttention(covariance=1), "covariance=1"),
        (lambda: ExpectedAttention(remembered=True), "remembered=True"),
        (
            lambda: Policy(budget=9, scorer=FutureAttention(sinks=0, positions=8), every=4),
            "every=4",
        ),
        (
            lambda: Policy(budget=9, scorer=KeyDifference(), layers=GlobalLayers()),
            "layers=.*share one budget",
        ),
    ),
    *calls(
        "two ways of saying one thing",
        (
            lambda: AdaKV(alpha=0.5, safeguard=ProtectedHeads()),
            r"alpha=0\.5",
        ),
        (lambda: D2O(official=True, merge=None), "merge=None"),
        (
            lambda: AdaKV(capacity=2, safeguard=ProtectedHeads()),
            r"capacity=2\.0",
        ),
    ),
    *door(
        "OmniKV",
        lambda options: OmniKV(**{"filter_layers": FILTERS, **options}),
        ({"filter_layers": ()}, "filter_layers"),
        ({"filter_layers": (4, 2)}, "filter_layers"),
        ({"filter_layers": (-1,)}, "filter_layers"),
        ({"budget": 15, "selector": "uniform"}, "budget=15"),
        ({"budget": 10, "mem": 0.3}, "mem"),
        ({"mem": 0.0}, "mem"),
        ({"selector": "first"}, "selector"),
        ({"window": 0}, "window"),
        ({"adjacent": -1}, "adjacent"),
        ({"prefill_ratio": 0}, "prefill_ratio"),
        ({"prefill_chunk": 300}, "prefill_chunk"),
        ({"every": 5}, "every"),
        ({"protect": ((0, 3),)}, "protect"),
        ({"offload": True, "include_generated": True}, "include_generated"),
        ({"offload": True, "base": SnapKV(budget=40)}, "offload"),
        ({"prefill_ratio": 2, "base": SnapKV(budget=40)}, "prefill_ratio"),
        ({"base": H2O(budget=40)}, "base"),
        ({"base": FullKV()}, "base"),
        ({"base": OmniKV(base=SnapKV(budget=40))}, "base"),
        *(
            ({"filter_layers": layers}, "filter_layers=.*")
            for layers in (bytearray(b"ab"), memoryview(b"ab"), {0: 4}, "01", 3)
        ),
    ),
    *door(
        "SimLayerKV",
        lambda options: SimLayerKV(**options),
        ({"budget": 48}, "budget=48"),
    ),
    *door(
        "Quest",
        lambda options: Quest(**options),
        ({"budget": 47}, "budget=47"),
        ({"page": 0}, "page=0"),
        ({"dense_layers": -1}, "dense_layers=-1"),
        ({"merge": Merge()}, "merge"),
        ({"base": FullKV()}, "base=FullKV"),
        ({"base": H2O(budget=40)}, "base=H2O"),
        (
            {"base": AdaKV(base=SnapKV(budget=40))},
            "base=AdaKV",
        ),
        ({"base": OmniKV(base=SnapKV(budget=40))}, "base=OmniKV"),
        ({"base": StreamingLLM(budget=40, rolling_positions=True)}, "rolling positions"),
    ),
    *door(
        "prefill of a policy that the model cannot honour",
        lambda policy: jaxkv.prefill(tiny.tiny(CONFIG), [1, 2, 3], policy=policy),
        (OmniKV(filter_layers=(6,)), "no layer is left"),
        (OmniKV(filter_layers=FILTERS, mem=0.5), "mem=0.5"),
        (Quest(dense_layers=7), "dense_layers=7"),
    ),
    *door(
        "prefill", lambda policy: jaxkv.prefill(tiny.tiny(GQA), [[1, 2]], policy=policy), *NO_POLICY
    ),
    *door(
        "generate",
        lambda policy: jaxkv.generate(tiny.tiny(GQA), [[1, 2]], policy=policy),
        *NO_POLICY,
    ),
    *door("plan_prefill", lambda policy: plan_prefill(GQA, policy, [2]), *NO_POLICY),
    *door(
        "a base",
        lambda base: AdaKV(base=base),
        *((bad, *kind, told.replace("policy=", "base=")) for bad, *kind, told in NO_POLICY),
    ),
]
