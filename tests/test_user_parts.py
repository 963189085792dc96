"""Scorers, ranks and mergers that users write: results of another shape, dtype or kind are refused by name."""

import dataclasses
from decimal import Decimal
from fractions import Fraction

import jax.numpy as jnp
import pytest
import tiny
from test_user_policies import policy_of

import jaxkv
from jaxkv import AdaKV, CriticalKV, Policy
from jaxkv.policies import (
    ByAge,
    CumulativeAttention,
    Joined,
    KeyNorm,
    Merged,
    Merger,
    Rank,
    Scorer,
)
from jaxkv.policies.topk import top

GQA = tiny.MODELS["gqa3"]
pytestmark = pytest.mark.usefixtures("as_users_call")


# --- scorers ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Given(Scorer):
    """A scorer whose mass is made of the keys' norms by a function."""

    change: object

    def observe(self, seen):
        return self.change(KeyNorm().observe(seen))


def prefilled(scorer, **wraps):
    policy = policy_of(scorer)
    return jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(1, (40, 25)), policy=wraps.get("wrap", lambda p: p)(policy))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda mass: mass[:, :1],
            r"Given\.observe=float32\[2, 1, 64\]: give one float32 .*\[B, K, S\] = \[2, 2, 64\]",
        ),
        (lambda mass: mass[..., 0], r"Given\.observe=float32\[2, 2\]: "),
        (lambda mass: mass.astype(jnp.bfloat16), r"Given\.observe=bfloat16\[2, 2, 64\]: give one float32"),
        (lambda mass: mass > 0, r"Given\.observe=bool\[2, 2, 64\]: "),
        (lambda mass: None, r"Given\.observe=NoneType: give one float32"),
    ],
)
def test_scores_of_the_wrong_shape_or_type_are_refused(change, message):
    with pytest.raises(TypeError, match=message):
        prefilled(Given(change))


def torn(mass):
    """Not a number at position 30: within the first prompt, behind the second."""
    return mass.at[:, 1, 30].set(jnp.nan)


def test_scores_that_are_not_numbers_are_refused():
    for wrap in (lambda p: p, lambda p: CriticalKV(base=p), lambda p: AdaKV(base=p)):
        with pytest.raises(ValueError, match=r"scores='NaN': Given\(.* gave rows of layers \[0, 1, 2\] what is not"):
            prefilled(Given(torn), wrap=wrap)
    # Padding may hold anything.
    policy = policy_of(Given(torn))
    assert jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(1, (25,)), policy=policy).kept.max() == 20


def test_what_is_not_a_number_comes_last():
    scores = jnp.asarray([[[3.0, jnp.nan, -jnp.inf, -jnp.nan, 1.0]]])
    keys = jaxkv.policies.topk.sortable(scores)
    assert top(keys, jnp.asarray([[2]]))[0, 0].tolist() == [True, False, False, False, True]


def test_scorers_without_a_hash_are_refused():
    @dataclasses.dataclass
    class Loose(Scorer):
        observe = KeyNorm.observe

    with pytest.raises(TypeError, match=r"scorer=Loose: programs are kept by it .*frozen dataclass"):
        policy_of(Loose())


def test_a_scorer_need_not_be_derived():
    class Plain:
        queries, sums, rank, observe = 0, False, None, KeyNorm.observe

        def scores(self, mass, length):
            return mass

    kept, _, _ = tiny.run(tiny.tiny(GQA), tiny.prompts(1, (40,)), policy_of(Plain()))
    other, _, _ = tiny.run(tiny.tiny(GQA), tiny.prompts(1, (40,)), policy_of(KeyNorm()))
    assert tiny.kept(kept) == tiny.kept(other)
    with pytest.raises(TypeError, match="scorer=Silent: it says nothing of rows: write its method `observe`"):
        policy_of(type("Silent", (Scorer,), {})())


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


@pytest.mark.parametrize(
    "rank, merge, message",
    [
        (Odd(start=lambda k: k[..., 0, 0]), None, r"Odd\.begin=float32\[2, 2\]: give one float32 for each new row"),
        (Odd(start=lambda k: jnp.zeros(k.shape[:3], int)), None, r"Odd\.begin=int32\[2, 2, 1\]: give one float32"),
        (Odd(order=lambda score: score[0]), None, r"Odd\.rank=float32\[2, 21\]: give one float32 for each row = "),
        (Odd(order=lambda score: score > 0), None, r"Odd\.rank=bool\["),
        (Odd(decay=1.5), None, r"rank\.decay=1\.5: give a share"),
        (Odd(), Strange(all=lambda k, v: k), r"Strange\.merge=.*: return Merged\(k, v, tau\)"),
        (Odd(), Strange(all=lambda k, v: Merged(k[:, :1], v, None)), r"Strange\.merge\.k=float32\[2, 1, 64, 8\]"),
        (Odd(), Strange(one=lambda goes, row: goes), r"Strange\.merge_one=.*: return Joined\(joins, k, v, tau\)"),
        (Odd(), Strange(one=lambda goes, row: Joined(row.k, None, None, None)), r"Strange\.merge_one\.joins=float32"),
        (
            Odd(),
            Strange(one=lambda goes, row: Joined(goes, row.k[0], None, None)),
            r"Strange\.merge_one\.k=float32\[2, 8",
        ),
        (Odd(), Telling(all=lambda k, v: Merged(k, v, None)), r"Telling\.merge\.tau=NoneType: give one float32"),
        (
            Odd(),
            Telling(one=lambda goes, row: Joined(goes, None, None, None)),
            r"Telling\.merge_one\.tau=NoneType: give one float32 for each threshold",
        ),
        (
            Odd(),
            type("Mute", (Merger,), {"compares": ("k",), "merge": Strange.merge})(),
            "merge=Mute: write its method",
        ),
        (
            Odd(),
            type("Twice", (Strange,), {"compares": ("k", "v"), "merge_one": twice})(),
            "merge=.*Twice.*: two of its",
        ),
        (Odd(), type("Both", (Strange,), {"compares": ("q",)})(), r"merge\.compares=\('q',\): give"),
    ],
)
def test_ranks_and_mergers_that_give_something_else(rank, merge, message):
    with pytest.raises((ValueError, TypeError), match=message):
        evicting(rank, merge)


def test_rows_of_no_rank_go_first():
    # Were they never to go, segments would grow over one another.
    out = evicting(Odd(order=lambda score: jnp.where(score > jnp.float32(0.5), jnp.nan, score)))
    assert (out.cache.kept == 20).all()


@pytest.mark.parametrize("queries", (None, "1", [], {}, Decimal("NaN"), -1, True))
def test_a_scorer_that_reads_no_number_of_queries_is_refused(queries):
    class Odd(KeyNorm):
        pass

    Odd.queries = queries
    with pytest.raises(TypeError, match=r"scorer\.queries=.*: give a number of last queries, 0 or more"):
        Policy(budget=64, scorer=Odd())


@pytest.mark.parametrize("decay", (Decimal("0.5"), Fraction(1, 2), 1.5, "1"))
def test_a_rank_that_decays_by_no_float_is_refused(decay):
    class Odd(ByAge):
        pass

    Odd.decay = decay
    with pytest.raises(ValueError, match=r"evict\.decay=.*: give a share between 0 and 1|rank\.decay"):
        Policy(budget=64, scorer=KeyNorm(), evict=Odd())


@dataclasses.dataclass(frozen=True)
class FromTheEnd(Scorer):
    """The first rows for a number of one kind, the last for its equal of another."""

    way: int | float = 1

    def observe(self, seen):
        position = jnp.arange(seen.k.shape[2], dtype=jnp.float32)
        signed = position if isinstance(self.way, float) else -position
        return jnp.broadcast_to(signed, seen.k.shape[:3])


def test_scorers_that_compare_equal_share_no_programs():
    model, ids = tiny.tiny(GQA), tiny.prompts(5, (40,))
    assert FromTheEnd(way=1) == FromTheEnd(way=1.0)
    kept = []
    for way in (1, 1.0):
        policy = Policy(budget=4, scorer=FromTheEnd(way=way))
        cache = jaxkv.prefill(model, ids, policy=policy)
        kept.append([layer[0][0] for layer in tiny.kept(cache)])
    assert kept == [[[0, 1, 2, 3]] * GQA.layers, [[36, 37, 38, 39]] * GQA.layers]
