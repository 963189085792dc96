"""Policies and scorers that users write: what is missing, misspelt or of the wrong kind is said, by name."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv import AdaKV, CriticalKV, Policy, SnapKV
from jaxkv.policies import Scorer, UniformHeads
from jaxkv.policies.scorers import KeyNorm, WindowAttention
from jaxkv.policies.select import top

GQA = tiny.MODELS["gqa3"]
pytestmark = pytest.mark.usefixtures("as_users_call")


def policy_of(**members):
    """A user's policy whose class says these things, and its instance."""
    cls = type("Mine", (Policy,), {"__module__": "mine", **members})
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)(budget=20)


def part(value):
    return property(lambda self: value)


def test_what_users_may_write():
    scorer = KeyNorm()
    assert policy_of(scorer=part(scorer)).kept_first == 0
    # As plain attributes, too; with numbers of numpy's; and with helpers of their own.
    policy = policy_of(scorer=scorer, kept_first=np.int64(3), head_norms=lambda self: 1, score=lambda self: 2)
    kept, _, _ = tiny.run(tiny.tiny(GQA), tiny.prompts(1, (40,)), policy)
    assert all({0, 1, 2} <= set(head) for layer in tiny.kept(kept) for head in layer[0])

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class WithField(Policy):
        budget: int | float | None = 20
        scorer: Scorer = WindowAttention(window=4)
        kept_last: int = 4

    assert WithField().needs.queries == 4 and WithField(kept_last=5) != WithField()


@pytest.mark.parametrize(
    "members, message",
    [
        ({}, "budget=20: Mine has no scorer, and so keeps everything: override `scorer`"),
        ({"scorrer": part(KeyNorm())}, r"Mine\.scorrer: no part of a policy.*`scorer` was meant"),
        ({"scorer": part(KeyNorm()), "kept_frst": part(4)}, r"Mine\.kept_frst: .*`kept_first` was meant"),
        ({"scorer": part(KeyNorm()), "evict": part(True)}, r"Mine\.evict: .*`evicts` was meant"),
        ({"scorer": lambda self: KeyNorm()}, r"Mine\.scorer: it is a method: write @property above it"),
        ({"scorer": part(KeyNorm())} | {"evicts": lambda self: False}, r"Mine\.evicts: it is a method: write @prop"),
        ({"scorer": part(KeyNorm())} | {"kept_first": lambda self: 4}, r"Mine\.kept_first: it is a method"),
        ({"scorer": part(KeyNorm())} | {"recents": part(3)}, r"Mine\.recents: a method with arguments is wanted"),
        ({"scorer": part(KeyNorm)}, r"Mine\.scorer=KeyNorm: it is a class: give an instance, KeyNorm\(\)"),
        ({"scorer": part("attention")}, r"Mine\.scorer='attention': a scorer has queries, sums, carry, mass, scores"),
        ({"scorer": part(KeyNorm()), "kept_last": part(1.5)}, r"Mine\.kept_last=1\.5: give a number of rows"),
        ({"scorer": part(KeyNorm()), "kept_last": part(-1)}, r"Mine\.kept_last=-1: give a number of rows"),
        ({"scorer": part(KeyNorm()), "heads": part(UniformHeads)}, r"Mine\.heads=.*: give budgets over heads"),
        ({"scorer": part(KeyNorm()), "layers": part(None)}, r"Mine\.layers=None: give budgets over layers"),
        ({"scorer": part(KeyNorm()), "recent_share": part(2)}, r"Mine\.recent_share=2: give a share from 0 to 1"),
        ({"scorer": part(KeyNorm()), "rolling": part("no")}, r"Mine\.rolling='no': give True or False"),
    ],
)
def test_parts_that_would_do_nothing_are_refused(members, message):
    with pytest.raises((ValueError, TypeError), match=message):
        policy_of(**members)


def test_a_policy_without_a_scorer_says_so():
    with pytest.raises(ValueError, match="budget=20: Policy has no scorer"):
        Policy(budget=20)
    assert Policy().scorer is None


# --- scorers ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Given:
    """A scorer whose mass is made of the keys' norms by a function."""

    change: object

    queries = 0
    sums = False
    carry = None

    def mass(self, seen):
        return self.change(KeyNorm().mass(seen))

    def scores(self, mass, length):
        return mass


def prefilled(scorer, **wraps):
    policy = policy_of(scorer=part(scorer))
    return jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(1, (40, 25)), policy=wraps.get("wrap", lambda p: p)(policy))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda mass: mass[:, :1], r"Given\.mass=float32\[2, 1, 64\]: give one float32 .*\[B, K, S\] = \[2, 2, 64\]"),
        (lambda mass: mass[..., 0], r"Given\.mass=float32\[2, 2\]: "),
        (lambda mass: mass.astype(jnp.bfloat16), r"Given\.mass=bfloat16\[2, 2, 64\]: give one float32"),
        (lambda mass: mass > 0, r"Given\.mass=bool\[2, 2, 64\]: "),
        (lambda mass: None, r"Given\.mass=NoneType: give one float32"),
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
    policy = policy_of(scorer=part(Given(torn)))
    assert jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(1, (25,)), policy=policy).kept.max() == 20


def test_what_is_not_a_number_comes_last():
    scores = jnp.asarray([[[3.0, jnp.nan, -jnp.inf, -jnp.nan, 1.0]]])
    keys = jaxkv.policies.select.sortable(scores)
    assert top(keys, jnp.asarray([[2]]))[0, 0].tolist() == [True, False, False, False, True]


def test_scorers_without_a_hash_are_refused():
    @dataclasses.dataclass
    class Loose:
        queries: int = 0
        sums: bool = False
        carry: None = None

        mass, scores = KeyNorm.mass, KeyNorm.scores

    with pytest.raises(TypeError, match=r"Mine\.scorer=Loose: programs are kept by it .*frozen dataclass"):
        policy_of(scorer=part(Loose()))


# --- names and classes ------------------------------------------------------------------------------------------------


def test_names_and_classes_are_policies_with_their_defaults():
    model, ids = tiny.tiny(GQA), tiny.prompts(1, (40,))
    for policy in ("snapkv", "SnapKV", "snap-kv", np.str_("snapkv"), SnapKV):
        assert jaxkv.prefill(model, ids, policy=policy).policy == SnapKV()
        assert jaxkv.plan(GQA, policy, [40]).budget.tolist() == [40]
        assert AdaKV(base=policy, budget=64).settings.budget == 64
    for policy in (None, "full", "FullKV", jaxkv.FullKV):
        out = jaxkv.generate(model, ids[0], policy=policy, max_new_tokens=1)
        assert out.cache.policy == jaxkv.FullKV()
    cache = jaxkv.prefill(model, ids, policy="knorm")
    assert jaxkv.generate(model, [[1]], cache=cache, policy=jaxkv.KNorm, max_new_tokens=1).stats.new_tokens == 1


@pytest.mark.parametrize(
    "policy, message",
    [
        ("snapvk", "policy='snapvk': no such policy; known policies: full, .*did you mean snapkv"),
        ("", "policy='': no such policy; known policies"),
        (3, "policy=int: give a policy such as SnapKV"),
        ({"budget": 3}, "policy=dict: give a policy such as SnapKV"),
        (dict, "policy=type: give a policy such as SnapKV"),
        (
            dataclasses.make_dataclass("Wants", ["rows"], bases=(Policy,), frozen=True, kw_only=True),
            "rows must be said",
        ),
    ],
)
def test_what_is_no_policy(policy, message):
    model = tiny.tiny(GQA)
    for call in (
        lambda: jaxkv.prefill(model, [[1, 2]], policy=policy),
        lambda: jaxkv.generate(model, [[1, 2]], policy=policy),
        lambda: jaxkv.plan(GQA, policy, [2]),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    with pytest.raises((ValueError, TypeError), match=message.replace("policy=", "base=")):
        AdaKV(base=policy)


@dataclasses.dataclass(frozen=True)
class FromTheEnd:
    """The first rows for a number of one kind, the last for its equal of another."""

    way: int | float = 1
    queries = 0
    sums = False
    carry = None

    def mass(self, seen):
        position = jnp.arange(seen.k.shape[2], dtype=jnp.float32)
        signed = position if isinstance(self.way, float) else -position
        return jnp.broadcast_to(signed, seen.k.shape[:3])

    def scores(self, mass, length):
        return mass


class Scored(Policy):
    """A policy around a scorer of one's own."""

    way = 1

    @property
    def scorer(self):
        return FromTheEnd(way=self.way)


def test_scorers_that_compare_equal_share_no_programs():
    model, ids = tiny.tiny(GQA), tiny.prompts(5, (40,))
    assert FromTheEnd(way=1) == FromTheEnd(way=1.0)
    kept = []
    for way in (1, 1.0):
        policy = type("Mine", (Scored,), {"way": way})(budget=4)
        cache = jaxkv.prefill(model, ids, policy=policy)
        kept.append([layer[0][0] for layer in tiny.kept(cache)])
    assert kept == [[[0, 1, 2, 3]] * GQA.layers, [[36, 37, 38, 39]] * GQA.layers]


def test_a_wrapper_of_ones_own_keeps_its_own_parts():
    class Sinking(AdaKV):
        @property
        def kept_first(self):
            return 6

    policy = Sinking(base=SnapKV(budget=20, window=8))
    assert policy.forced(np.asarray([40]), 64).sum() == 14
    cache = jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(5, (40,)), policy=policy)
    for layer in tiny.kept(cache):
        assert all({*range(6)} <= set(head) for head in layer[0])
