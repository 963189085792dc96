"""Policies are values: fields hold what was given, types tell numbers apart, a replaced field makes another policy."""

import dataclasses
import enum
import pickle

import jax
import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv import (
    D2O,
    H2O,
    AdaKV,
    CaM,
    CriticalKV,
    KNorm,
    LocalWindow,
    OmniKV,
    Policy,
    SnapKV,
)
from jaxkv._checks import format_non_default_fields
from jaxkv.cache import Int4Store
from jaxkv.engine.plan import plan_prefill
from jaxkv.policies import (
    AdaptiveHeads,
    EvictionMode,
    LinearLayers,
    MaxPool,
    Merge,
    OfficialVarianceLayers,
    ProtectedHeads,
    ReadAll,
    Recompress,
    SharedHeads,
    VarianceLayers,
)
from jaxkv.policies.checks import EntryBudget
from jaxkv.policies.folding import (
    MergeDecision,
    MergeMetric,
    MergeWeights,
    ThresholdScope,
    ValueMerge,
)
from jaxkv.policies.registry import POLICIES
from jaxkv.policies.scorer import Scorer
from jaxkv.policies.unseen import KeyNorm

GQA = tiny.MODELS["gqa3"]
pytestmark = pytest.mark.usefixtures("as_users_call")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a user's policy."""

    share: int | float = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parted(Scorer):
    """A user's scorer."""

    part: Part
    numbers: tuple

    def score_entries(self, seen):
        return KeyNorm().score_entries(seen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(Policy):
    """A user's policy."""

    budget: int | float | None = 20
    create_part: Part = Part()
    numbers: tuple = (1, 2)

    def build_policy_parts(self):
        return self.compose(scorer=Parted(part=self.create_part, numbers=self.numbers))


# --- equality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one, other",
    [
        (LocalWindow(budget=1), LocalWindow(budget=1.0)),
        (AdaKV(base=KNorm(budget=1)), AdaKV(base=KNorm(budget=1.0))),
        (KNorm(budget=20), LocalWindow(budget=20)),
    ],
    ids=format_non_default_fields,
)
def test_budgets_of_another_type_make_another_policy(one, other):
    assert one != other and one.composed != other.composed and len({one, other}) == 2
    assert one == dataclasses.replace(one) and hash(one) == hash(pickle.loads(pickle.dumps(one)))
    assert jax.jit(lambda policy: repr(policy) and 0, static_argnums=0)(one) == 0


def test_what_only_looks_different_is_the_same():
    # Where a number can mean one thing only, 1 and 1.0 are the same policy: the field holds a float.
    for one, other in (
        (AdaKV(budget=64, alpha=1), AdaKV(budget=64, alpha=1.0)),
        (LinearLayers(beta=20), LinearLayers(beta=20.0)),
        (H2O(mode="prefill", recent=0), H2O(mode=EvictionMode.PREFILL, recent=0.0)),
        (OmniKV(mem=1, filter_layers=[2, 8]), OmniKV(mem=1.0, filter_layers=(2, 8))),
        (Merge(beta=1, metric="value"), Merge(beta=1.0, metric=MergeMetric.VALUE)),
    ):
        assert one == other and hash(one) == hash(other) and repr(one) == repr(other)


def test_one_row_and_all_of_them_share_no_sizes():
    model, ids, cls = tiny.tiny(GQA), tiny.prompts(1, (24,)), H2O
    for budget, rows in ((1, 1), (1.0, 24), (1, 1)):
        policy = cls(budget=budget)
        assert all(rows <= each <= 32 for each in plan_prefill(GQA, policy, [24]).capacity)
        assert tiny.run(model, ids, policy)[0].kept.tolist() == np.full((3, 1, 2), rows).tolist()


# --- replacing a field ------------------------------------------------------------------------------------------------


def other_values(policy, name):
    """Values that some policy may have in this field."""
    value = getattr(policy, name)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, enum.Enum):
        return list(type(value))
    known = {
        "budget": [32, 0.5, 1.0, np.int64(40)],
        "protect": [((0, 3),), [(1, 2)]],
        "every": [7],
        "merge": [Merge(), None],
        "base": [KNorm(budget=30), "snapkv", SnapKV],
        "heads": [ProtectedHeads(), AdaptiveHeads(alpha=0.5), None],
        "layers": [LinearLayers(), VarianceLayers()],
        "min_budget": ["clamp"],
        "store": ["int8", Int4Store],
        "pooling": [MaxPool(3)],
        "filter_layers": [(1,), None],
    }
    if isinstance(value, float):
        return known.get(name, []) + [0.25, 1, np.float32(0.75)]
    if isinstance(value, int):
        return known.get(name, []) + [value + 1, np.int32(value + 2)]
    return known.get(name, [])


POLICY_OF_EACH = {
    **{name: cls() for name, cls in POLICIES.items() if name not in ("omnikv", "full")},
    "omnikv of a model": OmniKV(filter_layers=(0,)),
    "omnikv over a base": OmniKV(filter_layers=(0,), base=SnapKV(budget=20, window=8)),
    "d2o official": D2O(official=True),
    "adakv, named": AdaKV(base="pyramidkv", budget=64),
}


@pytest.mark.parametrize("name", POLICY_OF_EACH)
def test_replacing_a_field_is_saying_another_thing_at_first(name):
    policy = POLICY_OF_EACH[name]
    fields = [field.name for field in dataclasses.fields(policy) if field.init]
    given = {field: getattr(policy, field) for field in fields}
    made = 0
    for field in fields:
        same = dataclasses.replace(policy, **{field: given[field]})
        assert (
            same == policy
            and hash(same) == hash(policy)
            and same.build_policy_parts() == policy.build_policy_parts()
        )
        for value in other_values(policy, field):
            try:
                other = dataclasses.replace(policy, **{field: value})
            except ValueError as error:
                assert "=" in str(error)
                continue
            fresh = type(policy)(**{**given, field: value})
            assert other == fresh and other.build_policy_parts() == fresh.build_policy_parts()
            # And back: nothing of it sticks.
            assert dataclasses.replace(other, **{field: given[field]}) == policy
            made += 1
    assert made >= len(fields) // 3


def test_what_follows_from_a_field_follows_its_replacement():
    ada = AdaKV(base=SnapKV(budget=48), alpha=0.0)
    assert dataclasses.replace(ada, alpha=1.0).build_policy_parts().heads == AdaptiveHeads(
        alpha=1.0
    )
    assert dataclasses.replace(AdaKV(budget=48), budget=64).composed.budget == EntryBudget(64)
    assert dataclasses.replace(ada, base=KNorm(budget=9)).composed.budget == EntryBudget(9)
    official = D2O(official=True)
    assert official.build_policy_parts().merge == Merge(
        beta=0.5,
        weights=MergeWeights.SCATTER_MEAN,
        scope=ThresholdScope.LAYER,
        decision=MergeDecision.SHARED_POSITION,
    )
    assert (
        official.build_policy_parts().layers == OfficialVarianceLayers()
        and official.build_policy_parts().keep.recent == 0.5
    )
    plain = dataclasses.replace(official, official=False)
    assert (
        plain == D2O()
        and plain.build_policy_parts() == D2O().build_policy_parts()
        and plain.build_policy_parts().merge == Merge()
    )
    cam = dataclasses.replace(CaM(window=8), window=16, start=0.5)
    assert cam.build_policy_parts().merge == ValueMerge(window=16, start=0.5)
    omni = dataclasses.replace(OmniKV(filter_layers=(0,)), mem=0.5)
    assert omni.build_policy_parts().read.mem == 0.5
    found = OmniKV(base=SnapKV(budget=40)).fill_model_fields(GQA, (0,))
    assert dataclasses.replace(found, base=SnapKV(budget=50)).composed.budget == EntryBudget(50)


def test_two_ways_of_saying_one_thing():
    merge = Merge(beta=0.5, weights="scatter_mean", scope="layer", decision="shared_position")
    for one, *others in (
        (
            AdaKV(budget=64),
            AdaKV(base=SnapKV(budget=64)),
            AdaKV(base="snapkv", budget=64),
            AdaKV(base=SnapKV, budget=64),
        ),
        (AdaKV(alpha=0.5), AdaKV(heads=AdaptiveHeads(alpha=0.5))),
        (CriticalKV(budget=64), CriticalKV(base=SnapKV(budget=64), budget=64)),
        (
            D2O(official=True),
            D2O(official=True, recent=0.5, merge=merge, layers=OfficialVarianceLayers()),
        ),
        (CaM(), CaM(merge=ValueMerge())),
        (OmniKV(), OmniKV(budget=1024)),
        (OmniKV(base="knorm"), OmniKV(base=KNorm())),
    ):
        assert all(one.composed == other.composed for other in others)
    model = tiny.tiny(GQA)
    cache = jaxkv.prefill(model, tiny.prompts(1, (40,))[0], policy=AdaKV(budget=32))
    for policy in (AdaKV(base=SnapKV(budget=32)), AdaKV(base="snapkv", budget=np.int16(32))):
        jaxkv.generate(model, [1, 2], cache=cache, policy=policy, max_new_tokens=1)
    with pytest.raises(ValueError, match="omit policy"):
        jaxkv.generate(model, [1, 2], cache=cache, policy=AdaKV(budget=33), max_new_tokens=1)


# --- wrappers ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unusual(SnapKV):
    """Every part is another than a policy's usual one."""

    rolling: bool = True

    def build_policy_parts(self):
        parts = super().build_policy_parts()
        keep = dataclasses.replace(parts.keep, sinks=3, recent=0.25)
        after = Recompress(every=5) if self.rolling else parts.after
        read, layers = ReadAll(rolling=self.rolling), LinearLayers(beta=3)
        return parts.replace(keep=keep, layers=layers, heads=SharedHeads(), read=read, after=after)


def fields_of(parts):
    """All fields of a policy's parts, those of its selection by their names."""
    return vars(parts) | vars(parts.select) | {"select": type(parts.select)}


@pytest.mark.parametrize(
    "wrapped",
    [
        CriticalKV(base=Unusual(budget=40, protect=((4, 9),), min_budget="clamp")),
        # It takes no base with rolling positions.
        OmniKV(filter_layers=(0,), base=Unusual(budget=40, rolling=False)),
    ],
    ids=format_non_default_fields,
)
def test_a_wrapper_has_every_part_of_its_base(wrapped):
    mine, its = wrapped.build_policy_parts(), wrapped.base.build_policy_parts()
    own = "read" if isinstance(wrapped, OmniKV) else "heads"
    mine, its, usual = map(fields_of, (mine, its, SnapKV(budget=40).build_policy_parts()))
    assert {name for name in its | mine if mine[name] != its[name]} == {own}
    assert {"keep", "layers", "heads"} <= {name for name in its if its[name] != usual[name]}
