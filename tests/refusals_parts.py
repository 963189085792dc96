"""Refusals of parts that users write: scorers, ranks and mergers whose results have another shape, dtype or kind."""

import dataclasses
from decimal import Decimal
from fractions import Fraction

import jax.numpy as jnp
import tiny
from refusing import calls, door
from test_user_policies import policy_of

import jaxkv
from jaxkv import Policy
from jaxkv.policies import ByAge, CumulativeAttention, Joined, KeyNorm, Merged, Merger, Rank, Scorer

GQA = tiny.MODELS["gqa3"]


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
    return jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(1, (40, 25)), policy=wraps.get("wrap", lambda p: p)(policy))


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
    return jaxkv.generate(tiny.tiny(GQA), tiny.prompts(1, (40, 25)), policy=policy, max_new_tokens=6, stop_at_eos=False)


def with_queries(queries):
    return Policy(budget=64, scorer=type("Odd", (KeyNorm,), {"queries": queries})())


def with_decay(decay):
    return Policy(budget=64, scorer=KeyNorm(), evict=type("Odd", (ByAge,), {"decay": decay})())


ROWS = [
    *door(
        "a scorer's observe",
        lambda change: prefilled(Given(change)),
        (
            lambda mass: mass[:, :1],
            TypeError,
            r"Given\.observe=float32\[2, 1, 64\]: give one float32 .*\[B, K, S\] = \[2, 2, 64\]",
        ),
        (lambda mass: mass[..., 0], TypeError, r"Given\.observe=float32\[2, 2\]: "),
        (lambda mass: mass.astype(jnp.bfloat16), TypeError, r"Given\.observe=bfloat16\[2, 2, 64\]: give one float32"),
        (lambda mass: mass > 0, TypeError, r"Given\.observe=bool\[2, 2, 64\]: "),
        (lambda mass: None, TypeError, r"Given\.observe=NoneType: give one float32"),
    ),
    *calls(
        "a scorer",
        (lambda: policy_of(Loose()), TypeError, r"scorer=Loose: programs are kept by it .*frozen dataclass"),
    ),
    *door(
        "a scorer's queries",
        with_queries,
        *(
            (queries, TypeError, r"scorer\.queries=.*: give a number of last queries, 0 or more")
            for queries in (None, "1", [], {}, Decimal("NaN"), -1, True)
        ),
    ),
    *door(
        "a rank's decay",
        with_decay,
        *(
            (decay, r"evict\.decay=.*: give a share between 0 and 1|rank\.decay")
            for decay in (Decimal("0.5"), Fraction(1, 2), 1.5, "1")
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
            (Odd(start=lambda k: jnp.zeros(k.shape[:3], int)), None),
            TypeError,
            r"Odd\.begin=int32\[2, 2, 1\]: give one float32",
        ),
        (
            (Odd(order=lambda score: score[0]), None),
            TypeError,
            r"Odd\.rank=float32\[2, 21\]: give one float32 for each row = ",
        ),
        ((Odd(order=lambda score: score > 0), None), TypeError, r"Odd\.rank=bool\["),
        ((Odd(decay=1.5), None), r"rank\.decay=1\.5: give a share"),
        ((Odd(), Strange(all=lambda k, v: k)), TypeError, r"Strange\.merge=.*: return Merged\(k, v, tau\)"),
        (
            (Odd(), Strange(all=lambda k, v: Merged(k[:, :1], v, None))),
            TypeError,
            r"Strange\.merge\.k=float32\[2, 1, 64, 8\]",
        ),
        (
            (Odd(), Strange(one=lambda goes, row: goes)),
            TypeError,
            r"Strange\.merge_one=.*: return Joined\(joins, k, v, tau\)",
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
            "merge=Mute: write its method",
        ),
        (
            (Odd(), type("Twice", (Strange,), {"compares": ("k", "v"), "merge_one": twice})()),
            "merge=.*Twice.*: two of its",
        ),
        ((Odd(), type("Both", (Strange,), {"compares": ("q",)})()), r"merge\.compares=\('q',\): give"),
    ),
]
