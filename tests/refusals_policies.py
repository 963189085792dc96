"""Refusals of policies: what constructors of the methods, and of policies that users write, say of what they are given.

Scorers, ranks and mergers that users write are in refusals_parts.py.
"""

import dataclasses

import numpy as np
import tiny
from omnikv_cases import CONFIG, FILTERS
from refusing import calls, door
from test_policy_values import Mine
from test_user_policies import policy_of

import jaxkv
from jaxkv import (
    D2O,
    TOVA,
    AdaKV,
    BrutalOffload,
    CaM,
    FullKV,
    Keep,
    LocalWindow,
    Merge,
    Method,
    OmniKV,
    Policy,
    SnapKV,
)
from jaxkv.engine.plan import plan_prefill
from jaxkv.policies import (
    AdaptiveHeads,
    ByAge,
    EntropyLayers,
    FutureAttention,
    GlobalLayers,
    KeyDifference,
    KeyNorm,
    LinearLayers,
    LoadedReads,
    MaxPool,
    Parts,
    ProtectedHeads,
    SharedHeads,
    UniformHeads,
    ValueMerge,
    VarianceLayers,
    Wrapper,
)

GQA = tiny.MODELS["gqa3"]
READS = jaxkv.OmniKV(budget=8, filter_layers=(1,)).parts().read


class Mixed:
    """No policy itself; says a part of policies derived from it."""

    scorer = KeyNorm()


class Narrow:
    """Likewise, a field."""

    window = 4


made = dataclasses.dataclass(frozen=True, kw_only=True)
Unnoted = type("Unnoted", (SnapKV,), {"budget": 64})
Unmade = type("Unmade", (SnapKV,), {"__annotations__": {"budget": int}, "budget": 64})
Wants = dataclasses.make_dataclass("Wants", ["rows"], bases=(Method,), frozen=True, kw_only=True)

# What prefill, generate and plan_prefill are given as a policy, and wrappers as their base.
NO_POLICY = (
    ("snapvk", "policy='snapvk': no such policy; known policies: full, .*did you mean snapkv"),
    ("", "policy='': no such policy; known policies"),
    (3, TypeError, "policy=int: give a policy such as SnapKV"),
    ({"budget": 3}, TypeError, "policy=dict: give a policy such as SnapKV"),
    (dict, TypeError, "policy=type: give a policy such as SnapKV"),
    (Wants, TypeError, "rows must be said"),
)


def derived(name: str, base: type, **said):
    """A policy's class that says this."""
    return type(name, (base,), said)


METHODS = [
    *calls(
        "a policy",
        (lambda: SnapKV(protect=((1.5, 3.7),)), r"protect=\(\(1\.5, 3\.7\),\): give spans of whole positions"),
        (lambda: SnapKV(protect=(1, 5)), r"protect=\(1, 5\): give spans"),
        (lambda: SnapKV(protect=((True, 3),)), "protect=.*whole positions"),
        (lambda: SnapKV(protect="all"), "protect='all': give spans"),
        (lambda: SnapKV(budget=True), "budget=True: give rows"),
        (lambda: SnapKV(budget=np.True_), "budget=True: give rows"),
        (lambda: SnapKV(budget="64"), "budget='64': give rows"),
        (lambda: SnapKV(budget=np.asarray([64])), r"budget=array\(\[64\]\): give rows"),
        (lambda: SnapKV(window=True), "window=True: observe"),
        (lambda: SnapKV(window=2**40, budget=2**41), "window=.*: give at most 2147483647"),
        (lambda: SnapKV(group="most"), "group='most': use one of mean, max"),
        (lambda: SnapKV(pooling=5), r"pooling=5: give MaxPool\(7\)"),
        (lambda: SnapKV(pooling=MaxPool), r"pooling=.*: give MaxPool\(7\)"),
        (lambda: SnapKV(allocation=LinearLayers), r"allocation=.*: give budgets over layers, LinearLayers\(\)"),
        (lambda: SnapKV(every=True), "every=True: give a number of tokens"),
        (lambda: SnapKV(every=2.0), r"every=2\.0: give a number of tokens"),
        (lambda: SnapKV(merge=Merge), r"merge=.*give Merge\(\.\.\.\)"),
        (lambda: AdaKV(alpha="much"), "alpha='much': give a share"),
        (lambda: AdaKV(alpha=float("nan")), "alpha=nan: give a share"),
        (lambda: AdaKV(alpha=True), "alpha=True: give a share"),
        (lambda: AdaKV(safeguard=AdaptiveHeads), "safeguard=.*AdaptiveHeads"),
        (lambda: TOVA(per_head="no"), "per_head='no': give True or False"),
        (lambda: D2O(official=1), "official=1: give True or False"),
        (lambda: VarianceLayers(dense_layers=(1.5,)), r"dense_layers=\(1\.5,\): give layers"),
        (lambda: Mine(numbers=np.arange(3)), TypeError, "unhashable type.*frozen dataclass of numbers and tuples"),
        (lambda: jaxkv.GlobalBudget(base=jaxkv.PyramidKV(budget=20)), "base=.*its layers have budgets"),
        (lambda: jaxkv.GlobalBudget(base=jaxkv.TOVA(budget=20)), "base=.*heads keep the same positions"),
        (lambda: jaxkv.GlobalBudget(base=jaxkv.StreamingLLM(rolling_positions=True)), "base=.*rolling"),
        (lambda: jaxkv.GlobalBudget(base=jaxkv.AdaKV(budget=9, base="knorm"), alpha=0.5), "alpha=0.5: .*there only"),
        (lambda: jaxkv.GlobalBudget(budget=20, alpha=-1), "alpha=-1"),
        (lambda: jaxkv.GlobalBudget(budget=20, capacity=float("nan")), "capacity=nan"),
        (lambda: jaxkv.DefensiveKV(kernel=4), "kernel=4: .*odd"),
        (lambda: jaxkv.DefensiveKV(window=0), "window=0"),
        (lambda: jaxkv.DefensiveKV(budget=20), "budget=20: below sinks"),
        (lambda: jaxkv.ExpectedAttention(future=0), "future=0"),
        (lambda: jaxkv.ExpectedAttention(epsilon=-0.1), "epsilon=-0.1"),
        (lambda: jaxkv.ExpectedAttention(covariance=1), "covariance=1"),
        (lambda: jaxkv.ExpectedAttention(remembered=True), "remembered=True"),
        (lambda: jaxkv.ExpectedAttention(sinks=4, budget=3), "budget=3: below sinks"),
        (lambda: Policy(budget=9, scorer=FutureAttention(sinks=0, positions=8), every=4), "every=4: .*remembers none"),
        (lambda: Policy(budget=9, scorer=KeyDifference(), layers=GlobalLayers()), "layers=.*share one budget"),
    ),
    *calls(
        "two ways of saying one thing",
        (lambda: AdaKV(base=LocalWindow(budget=1.0), budget=1), r"budget=1: the base says 1\.0"),
        (lambda: AdaKV(base=SnapKV(budget=48), budget=64), "budget=64: the base says 48"),
        (lambda: AdaKV(alpha=0.5, safeguard=ProtectedHeads()), r"alpha=0\.5: the safeguard is .*give it there only"),
        (lambda: CaM(merge=ValueMerge(window=7)), "merge=.*CaM has its own"),
        (lambda: D2O(official=True, merge=None), "merge=None: official=True sets it"),
    ),
    *door(
        "OmniKV",
        lambda options: OmniKV(**{"filter_layers": FILTERS, **options}),
        ({"filter_layers": ()}, "filter_layers"),
        ({"filter_layers": (4, 2)}, "filter_layers"),
        ({"filter_layers": (-1,)}, "filter_layers"),
        ({"budget": 0}, "budget"),
        ({"budget": 1.5}, "budget"),
        ({"budget": 15, "selector": "uniform"}, "budget=15: below the window, whose 16"),
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
        ({"base": jaxkv.H2O(budget=40)}, "base"),
        ({"base": FullKV()}, "base"),
        ({"base": OmniKV(base=SnapKV(budget=40))}, "base"),
        ({"prefill_ratio": float("inf")}, "prefill_ratio"),
        *(
            ({"filter_layers": layers}, r"filter_layers=.*: give one or more layers, ascending")
            for layers in (bytearray(b"ab"), memoryview(b"ab"), {0: 4}, "01", 3)
        ),
    ),
    *door(
        "prefill of a policy that the model cannot honour",
        lambda policy: jaxkv.prefill(tiny.tiny(CONFIG), [1, 2, 3], policy=policy),
        (OmniKV(), "filter_layers=None"),
        (OmniKV(filter_layers=(2, 8)), "layers are 0 to 6"),
        (OmniKV(filter_layers=(6,)), "no layer is left"),
        (OmniKV(filter_layers=FILTERS, mem=0.5), "mem=0.5"),
        (BrutalOffload(resident_layers=7), "resident_layers=7"),
    ),
    *door("prefill", lambda policy: jaxkv.prefill(tiny.tiny(GQA), [[1, 2]], policy=policy), *NO_POLICY),
    *door("generate", lambda policy: jaxkv.generate(tiny.tiny(GQA), [[1, 2]], policy=policy), *NO_POLICY),
    *door("plan_prefill", lambda policy: plan_prefill(GQA, policy, [2]), *NO_POLICY),
    *door(
        "a base",
        lambda base: AdaKV(base=base),
        *((bad, *kind, told.replace("policy=", "base=")) for bad, *kind, told in NO_POLICY),
    ),
]

OWN = [
    *door(
        "parts of a user's policy",
        lambda parts: policy_of(**parts),
        ({"scorer": None}, "budget=20: without a scorer everything is kept: give one"),
        ({"scorrer": KeyNorm()}, TypeError, "unexpected keyword argument 'scorrer'"),
        ({"kept_first": 4}, TypeError, "unexpected keyword argument 'kept_first'"),
        ({"scorer": KeyNorm}, TypeError, r"scorer=KeyNorm: it is a class: give an instance, KeyNorm\(\)"),
        (
            {"scorer": "attention"},
            TypeError,
            r"scorer='attention': a scorer has queries, sums, rank, observe, scores, too",
        ),
        ({"keep": 4}, TypeError, r"keep=4: give Keep\(sinks=4\)"),
        ({"heads": UniformHeads}, TypeError, "heads=.*: give budgets over heads"),
        ({"layers": None}, TypeError, "layers=None: give budgets over layers"),
        ({"rolling": "no"}, "rolling='no': give True or False"),
        ({"nested": 1}, "nested=1: give True or False"),
        ({"merge": Merge}, "merge=.*: give Merge"),
        ({"evict": ByAge}, TypeError, r"rank=ByAge: it is a class: give an instance, ByAge\(\)"),
        ({"evict": "oldest"}, TypeError, r"rank='oldest': give a rank such as ByAttention\(\)"),
        ({"evict": ByAge(), "rolling": True}, "after=.*rolling positions move in steps"),
        ({"evict": ByAge(), "merge": jaxkv.policies.ValueMerge()}, "merge=.*it folds prompts only"),
        ({"read": 3}, TypeError, "read=3: give what layers read"),
        ({"read": LoadedReads(resident_layers=1, ahead=0)}, "read=.*are whole prompts: leave the scorer out"),
        ({"read": READS, "evict": ByAge()}, "read=.*of a prompt that stays"),
        ({"read": READS, "rolling": True}, "read=.*leave rolling positions out"),
        ({"rolling": True, "heads": AdaptiveHeads()}, "rolling=True: heads and layers need segments of equal size"),
        ({"rolling": True, "layers": EntropyLayers()}, "rolling=True: heads and layers need segments of equal size"),
        ({"evict": ByAge(), "heads": SharedHeads(), "layers": EntropyLayers()}, "after=.*segments that lie alike"),
        ({"nested": True}, r"nested=True: heads need one set of positions: use SharedHeads\(\)"),
    ),
    *calls("Parts", (lambda: Parts(layers=EntropyLayers()), "layers=.*look at scores need a scorer")),
    *door(
        "Keep",
        lambda keep: Keep(**keep),
        ({"sinks": 1.5}, r"sinks=1\.5: give 0 or more"),
        ({"window": -1}, "window=-1: give 0 or more"),
        ({"recent": 2}, "recent=2: give a share between 0 and 1"),
        ({"protect": (3,)}, r"protect=\(3,\): give spans"),
    ),
    *door(
        "a user's class",
        lambda cls: cls(),
        (
            made(Unnoted),
            TypeError,
            r"Unnoted\.budget: it is no field's default: write `budget: \.\.\. = 64` in the class",
        ),
        (
            made(derived("Kept", Policy, keep=Keep(sinks=4))),
            TypeError,
            r"Kept\.keep: it is no field's default: write `keep",
        ),
        (
            Unmade,
            TypeError,
            r"Unmade\.budget: .*@dataclasses\.dataclass\(frozen=True, kw_only=True\) above it",
        ),
        (made(derived("Below", Unmade)), TypeError, r"Unmade\.budget: it is no field's default"),
        (lambda: Policy(budget=20), "budget=20: without a scorer everything is kept"),
        (lambda: derived("Nothing", Method)(budget=20), TypeError, "Nothing: write its method `parts`"),
        (
            lambda: derived("Less", Method, parts=lambda self: 3)(budget=20),
            TypeError,
            r"Less\.parts\(\)=3: return Parts",
        ),
        (
            lambda: derived("Around", Wrapper)(base=SnapKV(budget=40)),
            TypeError,
            "Around: write its method `wrap`",
        ),
        (
            lambda: derived("Part", SnapKV, __annotations__={"heads": object}, heads=UniformHeads()),
            TypeError,
            r"Part\.heads: nobody reads it: write `parts`",
        ),
        *(
            (
                lambda name=name: derived("Mute", SnapKV, **{name: property(lambda self: None)}),
                TypeError,
                rf"Mute\.{name}: nobody reads it: write `parts`",
            )
            for name in ("scorer", "heads", "keep")
        ),
        (
            lambda: type("Mine", (Mixed, SnapKV), {}),
            TypeError,
            r"Mixed\.scorer: nobody reads it: write `parts`",
        ),
        (
            lambda: made(type("Mine", (Narrow, SnapKV), {}))(budget=64),
            TypeError,
            r"Narrow\.window: it is no field's default: write `window: \.\.\. = 4`",
        ),
    ),
]

ROWS = [*METHODS, *OWN]
