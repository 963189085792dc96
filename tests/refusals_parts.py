"""Rejections of policies that users write: their classes, and scorers, ranks and mergers that give something else."""

import dataclasses
from functools import partial

import tiny
from refusing import calls, door, options
from test_user_policies import policy_of

import jaxkv
from jaxkv import H2O, CustomPolicy, DuoAttention, KVzap, Policy, SnapKV
from jaxkv.policies import (
    AdaptiveHeads,
    BlockAttention,
    ByAge,
    CumulativeAttention,
    EntropyLayers,
    Joined,
    Keep,
    KeyNorm,
    Merged,
    Merger,
    Needs,
    OffloadedReads,
    Parts,
    PolicyWrapper,
    Rank,
    Scorer,
    Select,
    SharedHeads,
    ThresholdHeads,
    TwoStageHeads,
    UniformHeads,
    ValueMerge,
    VarianceLayers,
)

GQA = tiny.MODELS["gqa3"]
HIGH, KINDS = (
    ThresholdHeads(threshold=0.5),
    DuoAttention(pattern=((0.5, 0.5),) * 3).build_policy_parts().heads,
)


def derived(name: str, base: type, **said):
    """A policy's class that says this."""
    return type(name, (base,), said)


@dataclasses.dataclass(frozen=True)
class Given(Scorer):
    """A scorer whose mass is made of the keys' norms by a function."""

    change: object

    def score_entries(self, seen):
        return self.change(KeyNorm().score_entries(seen))


@dataclasses.dataclass
class Loose(Scorer):
    """A scorer without a hash."""

    score_entries = KeyNorm.score_entries


def prefilled(scorer, **wraps):
    policy = policy_of(scorer)
    return jaxkv.prefill(
        tiny.tiny(GQA), tiny.prompts(1, (40, 25)), policy=wraps.get("wrap", lambda p: p)(policy)
    )


@dataclasses.dataclass(frozen=True)
class Odd(Rank):
    """A rank that gives whatever it is told to."""

    start: object = None
    order: object = None
    decay: float | None = 1.0

    def score_new_entries(self, k, v):
        return super().score_new_entries(k, v) if self.start is None else self.start(k)

    def rank_entries(self, score, age):
        return score if self.order is None else self.order(score)


@dataclasses.dataclass(frozen=True)
class Strange(Merger):
    """A merger as well."""

    all: object = None
    one: object = None
    compared_tensors = ("k",)

    def merge_evicted_entries(self, k, v, kept, inside, mass, tau, key):
        return Merged(k, v, tau) if self.all is None else self.all(k, v)

    def merge_entry_while_decoding(self, index, cosine, dropped, nearest, goes, tau):
        return Joined(goes, None, None, tau) if self.one is None else self.one(goes, dropped)


class Telling(Strange):
    """One with a threshold."""

    threshold_count = 1


def twice(self, index, cosine, dropped, nearest, goes, tau):
    return Joined(goes, None, nearest.v + 1, tau)


def evicting(rank, merge=None):
    policy = CustomPolicy(budget=20, scorer=CumulativeAttention(), evict=rank, merge=merge)
    return jaxkv.generate(
        tiny.tiny(GQA),
        tiny.prompts(1, (40, 25)),
        policy=policy,
        max_new_tokens=6,
        stop_at_eos=False,
    )


PARTS = [
    *door(
        "a scorer's scores",
        lambda change: prefilled(Given(change)),
        (
            lambda mass: mass[:, :1],
            TypeError,
            r"Given\.score_entries=float32\[2, 1, 64\]: give one float32 .*\[B, K, S\] = \[2, 2, 64\]",
        ),
    ),
    *calls(
        "a scorer",
        (lambda: policy_of(Loose()), TypeError, "scorer=.*Loose"),
        (
            lambda: policy_of(derived("Silent", Scorer)()),
            TypeError,
            "scorer=.*Silent.*`score_entries`",
        ),
        (lambda: policy_of(derived("Sum", KeyNorm, group="sum")()), r"scorer\.group='sum'"),
        (
            lambda: policy_of(derived("Odd", KeyNorm, needs=Needs(queries="1"))()),
            r"scorer\.needs\.queries=",
        ),
    ),
    *door(
        "a rank's decay",
        lambda decay: policy_of(evict=derived("Odd", ByAge, decay=decay)()),
        (1.5, r"rank\.decay="),
    ),
    *door(
        "a rank, and a merger",
        lambda both: evicting(*both),
        (
            (Odd(start=lambda k: k[..., 0, 0]), None),
            TypeError,
            r"Odd\.score_new_entries=float32\[2, 2\]",
        ),
        (
            (Odd(order=lambda score: score[0]), None),
            TypeError,
            r"Odd\.rank_entries=float32\[2, 21\]",
        ),
        *(
            ((Odd(), merger), TypeError, told)
            for merger, told in (
                (Strange(all=lambda k, v: k), r"Strange\.merge="),
                (
                    Strange(all=lambda k, v: Merged(k[:, :1], v, None)),
                    r"Strange\.merge\.k=float32\[2, 1, 64, 8\]",
                ),
                (Strange(one=lambda goes, row: goes), r"Strange\.merge_entry_while_decoding="),
                (
                    Strange(one=lambda goes, row: Joined(row.k, None, None, None)),
                    r"Strange\.merge_entry_while_decoding\.joins=float32",
                ),
                (
                    Telling(one=lambda goes, row: Joined(goes, None, None, None)),
                    r"Telling\.merge_entry_while_decoding\.tau=NoneType",
                ),
                (
                    derived("Mute", Merger, compares=("k",), merge=Strange.merge_evicted_entries)(),
                    "merge=Mute",
                ),
            )
        ),
        (
            (
                Odd(),
                derived(
                    "Twice", Strange, compared_tensors=("k", "v"), merge_entry_while_decoding=twice
                )(),
            ),
            "merge=",
        ),
    ),
]

OWN = [
    *options(
        policy_of,
        {"keep": 4},
        {"heads": UniformHeads},
        {"read": 3},
        {"scorer": KeyNorm},
        kind=TypeError,
    ),
    *options(
        policy_of,
        {"rolling": "no"},
        {"nested": 1},
        {"nested": True},
        {"merge": ValueMerge(), "evict": ByAge()},
        {"read": OffloadedReads(resident_layers=1, ahead=0)},
        {"rolling": True, "heads": AdaptiveHeads()},
    ),
    *door(
        "parts of a user's policy",
        lambda parts: policy_of(**parts),
        ({"scorer": None}, "budget="),
        ({"evict": ByAge}, TypeError, "rank="),
        ({"evict": ByAge(), "rolling": True}, "after="),
        ({"evict": ByAge(), "heads": SharedHeads(), "layers": EntropyLayers()}, "after="),
    ),
    *options(BlockAttention, {"size": 0}, {"zeros": 1}),
    *options(
        ThresholdHeads,
        {"threshold": None},
        {"budgets": HIGH, "threshold": 1},
        {"budgets": SharedHeads(), "threshold": 1},
    ),
    *options(ThresholdHeads, {"budgets": SharedHeads, "threshold": 1}, kind=TypeError),
    *options(TwoStageHeads, {"budgets": HIGH}),
    *options(KVzap, {"threshold": "low"}),
    *door(
        "a threshold",
        lambda parts: parts.replace(heads=HIGH),
        (Parts(), TypeError, "heads"),
        (H2O(budget=9).build_policy_parts(), "threshold="),
        (SnapKV(budget=64, layers=VarianceLayers()).build_policy_parts(), "threshold="),
    ),
    *options(CustomPolicy, {"layers": EntropyLayers()}),
    *options(
        partial(Select, budget=9, scorer=KeyNorm()),
        {"heads": KINDS},
        {"heads": ThresholdHeads(threshold=1.0, budgets=KINDS)},
    ),
    *options(Keep, {"sinks": 1.5}, {"window": -1}, {"recent": 2}, {"protect": (3,)}),
    *door(
        "a user's class",
        lambda cls: cls(budget=20),
        (derived("Nothing", Policy), TypeError, "Nothing: .*`build_policy_parts`"),
        (
            derived("Less", Policy, build_policy_parts=lambda self: 3),
            TypeError,
            "build_policy_parts=3",
        ),
    ),
    *calls(
        "a user's wrapper",
        (lambda: derived("Around", PolicyWrapper)(base=SnapKV()), TypeError, "Around: .*`wrap`"),
    ),
]

ROWS = [*OWN, *PARTS]
