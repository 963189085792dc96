"""Refusals of policies that users write: their classes, and scorers, ranks and mergers that give something else."""

import dataclasses
from decimal import Decimal
from fractions import Fraction

import tiny
from refusing import calls, door
from test_user_policies import policy_of

import jaxkv
from jaxkv import (
    H2O,
    ChunkKV,
    DuoAttention,
    Keep,
    KVzap,
    Merge,
    Method,
    OmniKV,
    Policy,
    SnapKV,
    VarianceLayers,
)
from jaxkv.policies import (
    AdaptiveHeads,
    BlockAttention,
    ByAge,
    CumulativeAttention,
    EntropyLayers,
    Joined,
    KeyNorm,
    LoadedReads,
    Merged,
    Merger,
    Parts,
    Rank,
    Scorer,
    SharedHeads,
    ThresholdHeads,
    TwoStageHeads,
    UniformHeads,
    Wrapper,
)

GQA = tiny.MODELS["gqa3"]
HIGH, KINDS = ThresholdHeads(threshold=0.5), DuoAttention(pattern=((0.5, 0.5),) * 3).parts().heads
READS = OmniKV(budget=8, filter_layers=(1,)).parts().read


def derived(name: str, base: type, **said):
    """A policy's class that says this."""
    return type(name, (base,), said)


@dataclasses.dataclass(frozen=True)
class Given(Scorer):
    """A scorer whose mass is made of the keys' norms by a function."""

    change: object

    def observe(self, seen):
        return self.change(KeyNorm().observe(seen))


@dataclasses.dataclass
class Loose(Scorer):
    """A scorer without a hash."""

    observe = KeyNorm.observe


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

    def begin(self, k, v):
        return super().begin(k, v) if self.start is None else self.start(k)

    def rank(self, score, age):
        return score if self.order is None else self.order(score)


@dataclasses.dataclass(frozen=True)
class Strange(Merger):
    """A merger likewise."""

    all: object = None
    one: object = None
    compares = ("k",)

    def merge(self, k, v, kept, inside, mass, tau, key):
        return Merged(k, v, tau) if self.all is None else self.all(k, v)

    def merge_one(self, index, cosine, dropped, nearest, goes, tau):
        return Joined(goes, None, None, tau) if self.one is None else self.one(goes, dropped)


class Telling(Strange):
    """One with a threshold."""

    thresholds = 1


def twice(self, index, cosine, dropped, nearest, goes, tau):
    return Joined(goes, None, nearest.v + 1, tau)


def evicting(rank, merge=None):
    policy = Policy(budget=20, scorer=CumulativeAttention(), evict=rank, merge=merge)
    return jaxkv.generate(
        tiny.tiny(GQA),
        tiny.prompts(1, (40, 25)),
        policy=policy,
        max_new_tokens=6,
        stop_at_eos=False,
    )


def with_queries(queries):
    return Policy(budget=64, scorer=type("Odd", (KeyNorm,), {"queries": queries})())


def with_decay(decay):
    return Policy(budget=64, scorer=KeyNorm(), evict=type("Odd", (ByAge,), {"decay": decay})())


PARTS = [
    *door(
        "a scorer's observe",
        lambda change: prefilled(Given(change)),
        (
            lambda mass: mass[:, :1],
            TypeError,
            r"Given\.observe=float32\[2, 1, 64\]: give one float32 .*\[B, K, S\] = \[2, 2, 64\]",
        ),
    ),
    *calls(
        "a scorer",
        (
            lambda: policy_of(Loose()),
            TypeError,
            "scorer=.*Loose.*: ",
        ),
        (
            lambda: policy_of(derived("Silent", Scorer)()),
            TypeError,
            "scorer=.*Silent.*: it says nothing of rows: write its method `observe`",
        ),
        (
            lambda: Policy(budget=24, scorer=derived("Sum", KeyNorm, group="sum")()),
            r"scorer\.group='sum': ",
        ),
    ),
    *door(
        "a scorer's queries",
        with_queries,
        *(
            (queries, r"scorer\.queries=.*: ")
            for queries in (None, "1", [], {}, Decimal("NaN"), -1, True)
        ),
    ),
    *door(
        "a rank's decay",
        with_decay,
        *(
            (decay, fault, r"rank\.decay=.*: give a share between 0 and 1")
            for decay, fault in (
                (Decimal("0.5"), TypeError),
                (Fraction(1, 2), TypeError),
                (1.5, ValueError),
                ("1", TypeError),
            )
        ),
    ),
    *door(
        "a rank, and a merger",
        lambda both: evicting(*both),
        (
            (Odd(start=lambda k: k[..., 0, 0]), None),
            TypeError,
            r"Odd\.begin=float32\[2, 2\]: give one float32 for each new row",
        ),
        (
            (Odd(order=lambda score: score[0]), None),
            TypeError,
            r"Odd\.rank=float32\[2, 21\]: give one float32 for each row = ",
        ),
        (
            (Odd(), Strange(all=lambda k, v: k)),
            TypeError,
            r"Strange\.merge=",
        ),
        (
            (Odd(), Strange(all=lambda k, v: Merged(k[:, :1], v, None))),
            TypeError,
            r"Strange\.merge\.k=float32\[2, 1, 64, 8\]",
        ),
        (
            (Odd(), Strange(one=lambda goes, row: goes)),
            TypeError,
            r"Strange\.merge_one=",
        ),
        (
            (Odd(), Strange(one=lambda goes, row: Joined(row.k, None, None, None))),
            TypeError,
            r"Strange\.merge_one\.joins=float32",
        ),
        (
            (Odd(), Strange(one=lambda goes, row: Joined(goes, row.k[0], None, None))),
            TypeError,
            r"Strange\.merge_one\.k=float32\[2, 8",
        ),
        (
            (Odd(), Telling(all=lambda k, v: Merged(k, v, None))),
            TypeError,
            r"Telling\.merge\.tau=NoneType: give one float32",
        ),
        (
            (Odd(), Telling(one=lambda goes, row: Joined(goes, None, None, None))),
            TypeError,
            r"Telling\.merge_one\.tau=NoneType: give one float32 for each threshold",
        ),
        (
            (Odd(), type("Mute", (Merger,), {"compares": ("k",), "merge": Strange.merge})()),
            TypeError,
            "merge=Mute",
        ),
        (
            (Odd(), type("Twice", (Strange,), {"compares": ("k", "v"), "merge_one": twice})()),
            "merge=.*Twice",
        ),
        (
            (Odd(), type("Both", (Strange,), {"compares": ("q",)})()),
            r"merge\.compares=\('q',\): give",
        ),
    ),
]

OWN = [
    *door(
        "parts of a user's policy",
        lambda parts: policy_of(**parts),
        ({"scorer": None}, "budget=20"),
        ({"scorrer": KeyNorm()}, TypeError, "unexpected keyword argument 'scorrer'"),
        (
            {"scorer": KeyNorm},
            TypeError,
            "scorer=.*KeyNorm.*: give an instance",
        ),
        (
            {"scorer": "attention"},
            TypeError,
            "scorer='attention'",
        ),
        ({"keep": 4}, TypeError, "keep=4"),
        ({"heads": UniformHeads}, TypeError, "heads=.*"),
        ({"layers": None}, TypeError, "layers=None"),
        ({"rolling": "no"}, "rolling='no'"),
        ({"nested": 1}, "nested=1"),
        ({"merge": Merge}, TypeError, "merge=.*"),
        ({"evict": ByAge}, TypeError, "rank=.*ByAge"),
        ({"evict": "oldest"}, TypeError, "rank='oldest'"),
        ({"evict": ByAge(), "rolling": True}, "after=.*rolling positions move in steps"),
        ({"evict": ByAge(), "merge": jaxkv.policies.ValueMerge()}, "merge=.*it folds prompts only"),
        ({"read": 3}, TypeError, "read=3"),
        (
            {"read": LoadedReads(resident_layers=1, ahead=0)},
            "read=.*are whole prompts",
        ),
        ({"read": READS, "evict": ByAge()}, "read=.*of a prompt that stays"),
        ({"read": READS, "rolling": True}, "read=.*leave rolling positions out"),
        (
            {"rolling": True, "heads": AdaptiveHeads()},
            "rolling=True",
        ),
        (
            {"evict": ByAge(), "heads": SharedHeads(), "layers": EntropyLayers()},
            "after=.*segments that lie alike",
        ),
        ({"nested": True}, "nested=True"),
    ),
    *door(
        "BlockAttention",
        lambda asked: BlockAttention(**asked),
        ({"size": 0}, "size=0"),
        ({"first": -1}, "first=-1"),
        ({"last": None}, "last=None"),
        ({"zeros": 1}, "zeros=1"),
    ),
    *calls(
        "a threshold",
        (
            lambda: KVzap(threshold="low"),
            "threshold='low'",
        ),
        (lambda: ThresholdHeads(threshold=None), "threshold=None"),
        (
            lambda: ThresholdHeads(threshold=1, budgets=SharedHeads),
            TypeError,
            r"budgets=.*SharedHeads.*: give head budgets",
        ),
        (
            lambda: ThresholdHeads(threshold=1, budgets=HIGH),
            "budgets=.*one threshold is enough",
        ),
        (
            lambda: ThresholdHeads(threshold=1, budgets=SharedHeads()),
            r"budgets=.*heads that keep the same rows",
        ),
        (
            lambda: ThresholdHeads(threshold=1, budgets=KINDS),
            r"budgets=.*heads with numbers of rows of their own",
        ),
        (
            lambda: Parts(heads=HIGH),
            r"threshold=0\.5",
        ),
        (
            lambda: Parts(budget=9, scorer=KeyNorm(), heads=TwoStageHeads(budgets=HIGH)),
            r"heads=.*put the threshold around TwoStageHeads",
        ),
        (
            lambda: dataclasses.replace(H2O(budget=9).parts(), heads=HIGH),
            r"threshold=0\.5",
        ),
        (
            lambda: dataclasses.replace(
                SnapKV(budget=64, allocation=VarianceLayers()).parts(), heads=HIGH
            ),
            r"threshold=0\.5",
        ),
        (
            lambda: ChunkKV(base=KVzap(threshold=-4)),
            r"base=.*its heads choose in a way of their own",
        ),
    ),
    *calls(
        "Parts", (lambda: Parts(layers=EntropyLayers()), "layers=.*look at scores need a scorer")
    ),
    *door(
        "Keep",
        lambda keep: Keep(**keep),
        ({"sinks": 1.5}, r"sinks=1\.5"),
        ({"window": -1}, "window=-1"),
        (
            {"recent": 2},
            "recent=2",
        ),
        ({"protect": (3,)}, r"protect=\(3,\)"),
    ),
    *door(
        "a user's class",
        lambda cls: cls(),
        (lambda: Policy(budget=20), "budget=20: without a scorer everything is kept"),
        (
            lambda: derived("Nothing", Method)(budget=20),
            TypeError,
            "Nothing: write its method `parts`",
        ),
        (
            lambda: derived("Less", Method, parts=lambda self: 3)(budget=20),
            TypeError,
            "parts=3: return Parts",
        ),
        (
            lambda: derived("Around", Wrapper)(base=SnapKV(budget=40)),
            TypeError,
            "Around: write its method `wrap`",
        ),
    ),
]

ROWS = [*OWN, *PARTS]
