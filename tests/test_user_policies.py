"""Policies that users write: what is missing, misspelt, in vain or of the wrong kind is refused by name."""

import copy
import dataclasses

import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv import AdaKV, Keep, Merge, Method, Policy, SnapKV
from jaxkv.engine.plan import plan_prefill
from jaxkv.policies import (
    AdaptiveHeads,
    ByAge,
    EntropyLayers,
    KeyNorm,
    LoadedReads,
    Parts,
    Scorer,
    SharedHeads,
    UniformHeads,
    Wrapper,
)

GQA = tiny.MODELS["gqa3"]
pytestmark = pytest.mark.usefixtures("as_users_call")


def policy_of(scorer=KeyNorm(), **parts):  # noqa: B008  a value
    """A user's policy whose class makes these parts, and its instance."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(Method):
        def parts(self):
            return self.compose(scorer=scorer, **parts)

    return Mine(budget=20)


def test_what_users_may_write():
    policy = policy_of(keep=Keep(sinks=np.int64(3)))
    kept, _, _ = tiny.run(tiny.tiny(GQA), tiny.prompts(1, (40,)), policy)
    assert all({0, 1, 2} <= set(head) for layer in tiny.kept(kept) for head in layer[0])
    # Without a class, and the same as with one.
    plain = Policy(budget=20, scorer=KeyNorm(), keep=Keep(sinks=3))
    other, _, _ = tiny.run(tiny.tiny(GQA), tiny.prompts(1, (40,)), plain)
    assert tiny.kept(other) == tiny.kept(kept) and plain.parts() == policy.parts()
    assert AdaKV(base=plain).parts().keep == Keep(sinks=3)
    assert Policy(budget=0.5, scorer=KeyNorm(), every=8).parts().every == 8
    spans = Policy(budget=20, scorer=KeyNorm(), keep=Keep(protect=((0, 3),)))
    assert spans.protect == ((0, 3),) and dataclasses.replace(spans) == spans
    with pytest.raises(ValueError, match="has spans: give them in one place"):
        dataclasses.replace(spans, protect=((0, 4),))


READS = jaxkv.OmniKV(budget=8, filter_layers=(1,)).parts().read


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"scorer": None}, "budget=20: without a scorer everything is kept: give one"),
        ({"scorrer": KeyNorm()}, "unexpected keyword argument 'scorrer'"),
        ({"kept_first": 4}, "unexpected keyword argument 'kept_first'"),
        ({"scorer": KeyNorm}, r"scorer=KeyNorm: it is a class: give an instance, KeyNorm\(\)"),
        ({"scorer": "attention"}, r"scorer='attention': a scorer has queries, sums, rank, observe, scores, too"),
        ({"keep": 4}, r"keep=4: give Keep\(sinks=4\)"),
        ({"heads": UniformHeads}, "heads=.*: give budgets over heads"),
        ({"layers": None}, "layers=None: give budgets over layers"),
        ({"rolling": "no"}, "rolling='no': give True or False"),
        ({"nested": 1}, "nested=1: give True or False"),
        ({"merge": Merge}, "merge=.*: give Merge"),
        ({"evict": ByAge}, r"rank=ByAge: it is a class: give an instance, ByAge\(\)"),
        ({"evict": "oldest"}, r"rank='oldest': give a rank such as ByAttention\(\)"),
        ({"evict": ByAge(), "rolling": True}, "after=.*rolling positions move in steps"),
        ({"evict": ByAge(), "merge": jaxkv.policies.ValueMerge()}, "merge=.*it folds prompts only"),
        ({"read": 3}, "read=3: give what layers read"),
        ({"read": LoadedReads(resident_layers=1, ahead=0)}, "read=.*are whole prompts: leave the scorer out"),
        ({"read": READS, "evict": ByAge()}, "read=.*of a prompt that stays"),
        ({"read": READS, "rolling": True}, "read=.*leave rolling positions out"),
        ({"rolling": True, "heads": AdaptiveHeads()}, "rolling=True: heads and layers need segments of equal size"),
        ({"rolling": True, "layers": EntropyLayers()}, "rolling=True: heads and layers need segments of equal size"),
        ({"evict": ByAge(), "heads": SharedHeads(), "layers": EntropyLayers()}, "after=.*segments that lie alike"),
        ({"nested": True}, r"nested=True: heads need one set of positions: use SharedHeads\(\)"),
    ],
)
def test_parts_that_cannot_be_meant_are_refused(parts, message):
    with pytest.raises((ValueError, TypeError), match=message):
        policy_of(**parts)


def test_layers_that_look_at_scores_need_some():
    with pytest.raises(ValueError, match="layers=.*look at scores need a scorer"):
        Parts(layers=EntropyLayers())


@pytest.mark.parametrize(
    "keep, message",
    [
        ({"sinks": 1.5}, r"sinks=1\.5: give 0 or more"),
        ({"window": -1}, "window=-1: give 0 or more"),
        ({"recent": 2}, "recent=2: give a share between 0 and 1"),
        ({"protect": (3,)}, r"protect=\(3,\): give spans"),
    ],
)
def test_what_cannot_be_kept_is_refused(keep, message):
    with pytest.raises(ValueError, match=message):
        Keep(**keep)


def test_what_a_class_says_in_vain_is_refused():
    made = dataclasses.dataclass(frozen=True, kw_only=True)
    unnoted = type("Unnoted", (SnapKV,), {"budget": 64})
    unmade = type("Unmade", (SnapKV,), {"__annotations__": {"budget": int}, "budget": 64})
    for cls, message in (
        (made(unnoted), r"Unnoted\.budget: it is no field's default: write `budget: \.\.\. = 64` in the class"),
        (made(type("Kept", (Policy,), {"keep": Keep(sinks=4)})), r"Kept\.keep: it is no field's default: write `keep"),
        (unmade, r"Unmade\.budget: .*@dataclasses\.dataclass\(frozen=True, kw_only=True\) above it"),
        (made(type("Below", (unmade,), {})), r"Unmade\.budget: it is no field's default"),
    ):
        with pytest.raises(TypeError, match=message):
            cls()
    with pytest.raises(TypeError, match=r"Part\.heads: nobody reads it: write `parts`"):
        type("Part", (SnapKV,), {"__annotations__": {"heads": object}, "heads": UniformHeads()})
    noted = made(type("Noted", (SnapKV,), {"__annotations__": {"budget": int}, "budget": 64}))
    assert noted().parts().budget == 64
    ours = made(type("Ours", (Policy,), {"__annotations__": {"scorer": Scorer}, "scorer": KeyNorm()}))
    assert ours(budget=8).parts().scorer == KeyNorm()


def test_a_policy_without_parts_says_so():
    with pytest.raises(ValueError, match="budget=20: without a scorer everything is kept"):
        Policy(budget=20)
    assert Policy().parts().scorer is None
    with pytest.raises(TypeError, match="Nothing: write its method `parts`"):
        type("Nothing", (Method,), {})(budget=20)
    with pytest.raises(TypeError, match=r"Less\.parts\(\)=3: return Parts"):
        type("Less", (Method,), {"parts": lambda self: 3})(budget=20)
    for name in ("scorer", "heads", "keep"):
        with pytest.raises(TypeError, match=rf"Mute\.{name}: nobody reads it: write `parts`"):
            type("Mute", (SnapKV,), {name: property(lambda self: None)})
    with pytest.raises(TypeError, match="Around: write its method `wrap`"):
        type("Around", (Wrapper,), {})(base=SnapKV(budget=40))


# --- names and classes ------------------------------------------------------------------------------------------------


def test_names_and_classes_are_policies_with_their_defaults():
    model, ids = tiny.tiny(GQA), tiny.prompts(1, (40,))
    for policy in ("snapkv", "SnapKV", "snap-kv", np.str_("snapkv"), SnapKV):
        assert jaxkv.prefill(model, ids, policy=policy).policy == SnapKV()
        assert plan_prefill(GQA, policy, [40]).budget.tolist() == [40]
        assert AdaKV(base=policy, budget=64).parts().budget == 64
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
            dataclasses.make_dataclass("Wants", ["rows"], bases=(Method,), frozen=True, kw_only=True),
            "rows must be said",
        ),
    ],
)
def test_what_is_no_policy(policy, message):
    model = tiny.tiny(GQA)
    for call in (
        lambda: jaxkv.prefill(model, [[1, 2]], policy=policy),
        lambda: jaxkv.generate(model, [[1, 2]], policy=policy),
        lambda: plan_prefill(GQA, policy, [2]),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    with pytest.raises((ValueError, TypeError), match=message.replace("policy=", "base=")):
        AdaKV(base=policy)


def test_a_wrapper_of_ones_own_keeps_its_own_parts():
    class Sinking(AdaKV):
        def wrap(self, base):
            base = super().wrap(base)
            return dataclasses.replace(base, keep=dataclasses.replace(base.keep, sinks=6))

    policy = Sinking(base=SnapKV(budget=20, window=8))
    assert policy.parts().keep.counts(np.asarray([40])).sum() == 14
    cache = jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(5, (40,)), policy=policy)
    for layer in tiny.kept(cache):
        assert all({*range(6)} <= set(head) for head in layer[0])


class Mixed:
    """No policy itself; says a part, and a field, of policies derived from it."""

    scorer = KeyNorm()


class Narrow:
    window = 4


def test_what_a_mixin_says_of_a_policy_is_refused_by_its_name():
    with pytest.raises(TypeError, match=r"Mixed\.scorer: nobody reads it: write `parts`"):
        type("Mine", (Mixed, SnapKV), {})
    mine = dataclasses.dataclass(frozen=True, kw_only=True)(type("Mine", (Narrow, SnapKV), {}))
    with pytest.raises(TypeError, match=r"Narrow\.window: it is no field's default: write `window: \.\.\. = 4`"):
        mine(budget=64)


def test_copies_keep_what_a_policy_has_beside_its_fields():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Noted(SnapKV):
        words: tuple = dataclasses.field(default_factory=tuple)

        def __post_init__(self):
            super().__post_init__()
            object.__setattr__(self, "noted", 3)

    policy = Noted(budget=64)
    assert copy.copy(policy).noted == copy.deepcopy(policy).noted == 3 and copy.copy(policy) == policy

    class Worded(Noted):
        words = ("one",)

    with pytest.raises(TypeError, match=r"Worded\.words: it is no field's default"):
        Worded(budget=64)


def test_parts_come_from_any_callable_and_may_have_their_own_budget():
    class Static(Method):
        parts = staticmethod(SnapKV(budget=64).parts)

    class Less(SnapKV):
        def parts(self):
            return self.compose(scorer=KeyNorm(), budget=40)

    class Without(Method):
        parts = None

    assert Static().parts().budget == 64 and Less(budget=64).parts().budget == 40
    with pytest.raises(TypeError, match=r"Without\.parts=None: make it a method that returns Parts"):
        Without()


@pytest.mark.parametrize("layers", (bytearray(b"ab"), memoryview(b"ab"), {0: 4}, "01", 3))
def test_filter_layers_are_a_list_of_numbers(layers):
    with pytest.raises(ValueError, match=r"filter_layers=.*: give one or more layers, ascending"):
        jaxkv.OmniKV(filter_layers=layers)


def test_a_field_may_lose_its_plain_default():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Made(Policy):
        heads: object = dataclasses.field(default_factory=UniformHeads)
        budget: int = dataclasses.field()

    assert Made(budget=20, scorer=KeyNorm()).parts() == Policy(budget=20, scorer=KeyNorm()).parts()
    with pytest.raises(TypeError, match="budget"):
        Made(scorer=KeyNorm())
