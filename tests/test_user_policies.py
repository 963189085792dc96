"""Policies that users write, by their classes, parts, names and mixins."""

import dataclasses

import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv import AdaKV, CustomPolicy, Policy, SnapKV
from jaxkv.engine.plan import plan_prefill
from jaxkv.policies import (
    Keep,
    KeyNorm,
    Scorer,
)
from jaxkv.policies.checks import EntryBudget

GQA = tiny.MODELS["gqa3"]
pytestmark = pytest.mark.usefixtures("as_users_call")


def policy_of(scorer=KeyNorm(), **parts):  # noqa: B008  a value
    """A user's policy whose class makes these parts, and its instance."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(Policy):
        def build_policy_parts(self):
            return self.compose(scorer=scorer, **parts)

    return Mine(budget=20)


def test_what_users_may_write():
    policy = policy_of(keep=Keep(sinks=np.int64(3)))
    kept, _, _ = tiny.run(tiny.tiny(GQA), tiny.prompts(1, (40,)), policy)
    assert all({0, 1, 2} <= set(head) for layer in tiny.kept(kept) for head in layer[0])
    # Without a class, and the same as with one.
    plain = CustomPolicy(budget=20, scorer=KeyNorm(), keep=Keep(sinks=3))
    other, _, _ = tiny.run(tiny.tiny(GQA), tiny.prompts(1, (40,)), plain)
    assert (
        tiny.kept(other) == tiny.kept(kept)
        and plain.build_policy_parts() == policy.build_policy_parts()
    )
    assert AdaKV(base=plain).build_policy_parts().keep == Keep(sinks=3)
    assert (
        CustomPolicy(budget=0.5, scorer=KeyNorm(), every=8)
        .build_policy_parts()
        .recompression_interval
        == 8
    )
    spans = CustomPolicy(budget=20, scorer=KeyNorm(), keep=Keep(protect=((0, 3),)))
    assert (
        spans.build_policy_parts().keep.protect == ((0, 3),) and dataclasses.replace(spans) == spans
    )
    both = dataclasses.replace(spans, protect=((7, 9),))
    assert both.build_policy_parts().keep.protect == ((0, 3), (7, 9))


def test_what_a_class_says_as_a_field_counts():
    made = dataclasses.dataclass(frozen=True, kw_only=True)
    noted = made(type("Noted", (SnapKV,), {"__annotations__": {"budget": int}, "budget": 64}))
    assert noted().composed.budget == EntryBudget(64)
    ours = made(
        type("Ours", (CustomPolicy,), {"__annotations__": {"scorer": Scorer}, "scorer": KeyNorm()})
    )
    assert ours(budget=8).build_policy_parts().scorer == KeyNorm()
    assert not CustomPolicy().build_policy_parts().compresses_prompts


# --- names and classes ------------------------------------------------------------------------------------------------


def test_names_and_classes_are_policies_with_their_defaults():
    model, ids = tiny.tiny(GQA), tiny.prompts(1, (40,))
    for policy in ("snapkv", "SnapKV", "snap-kv", np.str_("snapkv"), SnapKV):
        assert jaxkv.prefill(model, ids, policy=policy).policy == SnapKV()
        assert plan_prefill(GQA, policy, [40]).budget.tolist() == [40]
        assert AdaKV(base=policy, budget=64).composed.budget == EntryBudget(64)
    for policy in (None, "full", "FullKV", jaxkv.FullKV):
        out = jaxkv.generate(model, ids[0], policy=policy, max_new_tokens=1)
        assert out.cache.policy == jaxkv.FullKV()
    cache = jaxkv.prefill(model, ids, policy="knorm")
    assert (
        jaxkv.generate(
            model, [[1]], cache=cache, policy=jaxkv.KNorm, max_new_tokens=1
        ).stats.new_tokens
        == 1
    )


def test_a_wrapper_of_ones_own_keeps_its_own_parts():
    class Sinking(AdaKV):
        def replace_base_parts(self, base):
            base = super().replace_base_parts(base)
            return base.replace(keep=dataclasses.replace(base.keep, sinks=6))

    policy = Sinking(base=SnapKV(budget=20, window=8))
    assert policy.build_policy_parts().keep.count_always_kept(np.asarray([40])).sum() == 14
    cache = jaxkv.prefill(tiny.tiny(GQA), tiny.prompts(5, (40,)), policy=policy)
    for layer in tiny.kept(cache):
        assert all({*range(6)} <= set(head) for head in layer[0])


def test_parts_come_from_any_callable_and_may_have_their_own_budget():
    class Static(Policy):
        build_policy_parts = staticmethod(SnapKV(budget=64).build_policy_parts)

    class Less(SnapKV):
        def build_policy_parts(self):
            return self.compose(scorer=KeyNorm(), budget=40)

    assert Static().composed.budget == EntryBudget(64)
    assert Less(budget=64).composed.budget == EntryBudget(40)
