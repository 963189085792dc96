"""`PolicyWrapper` and `SparseReadPolicy`, bases of policies that replace some parts of another policy."""

import dataclasses
import functools
from typing import Any, ClassVar

from jaxkv._checks import is_strictly_equal
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cache.stores import Store
from jaxkv.models.config import ModelConfig
from jaxkv.policies.checks import Budget, get_store_class
from jaxkv.policies.head_budgets import (
    AdaptiveHeads,
    HeadBudgets,
    ProtectedHeads,
    UniformHeads,
    replace_inner_budgets,
    unwrap_head_budgets,
)
from jaxkv.policies.layer_budgets import LayerBudgets, UniformLayers
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.reads import AttentionReads
from jaxkv.policies.registry import resolve_policy

_SHARED = {field.name: field.default for field in dataclasses.fields(Policy) if field.init}


def collect_given_fields(policy: Policy) -> dict[str, Any]:
    """Return a dict of the fields shared by all policies, such as budget and store, that differ from their defaults."""
    return {
        name: getattr(policy, name)
        for name, default in _SHARED.items()
        if not is_strictly_equal(getattr(policy, name), default)
    }


def reject_conflicting_fields(
    policy: Policy, base: Policy | None, remedy: str, *, but: tuple[str, ...] = ()
) -> None:
    """Raise ValueError if a field of `Policy`, outside `but`, has neither its default nor the base policy's value."""
    for name, default in _SHARED.items():
        mine = getattr(policy, name)
        its = default if base is None else getattr(base, name)
        same = name in but or is_strictly_equal(mine, default) or is_strictly_equal(mine, its)
        require(same, name, mine, remedy.format(its))


@frozen_dataclass
class _DerivedPolicy(Policy):
    """Base class of policies built on another policy, `base`."""

    base: Policy | type[Policy] | str | None = None

    @functools.cached_property
    def base_policy(self) -> Policy | None:
        """Base policy as an instance, created from its name or class if necessary; None without a base."""
        return None if self.base is None else resolve_policy(self.base, field="base")

    def fill_model_fields(self, config: ModelConfig, found: tuple[int, ...] | None) -> Policy:
        """Return the policy with its base's model-dependent fields, such as filter layers, set; itself if unchanged."""
        its = (
            None if self.base_policy is None else self.base_policy.fill_model_fields(config, found)
        )
        return self if its is self.base_policy else dataclasses.replace(self, base=its)


@frozen_dataclass
class PolicyWrapper(_DerivedPolicy):
    """Base class of policies built on another policy, `base`: `replace_base_parts` replaces some of its parts.

    Attributes:
        base: the policy to build on, with its budget, protected spans and decoding; or its name or class, with the
            budget and spans given here.
    """

    usual: ClassVar[str] = ""
    # True if this policy's choice does not extend to evictions of single entries after the prompt.
    once: ClassVar[bool] = False

    @functools.cached_property
    def base_policy(self) -> Policy:
        """Base policy as an instance; a name, class or default `usual` is created with this policy's shared fields."""
        return resolve_policy(
            self.usual if self.base is None else self.base,
            field="base",
            options=collect_given_fields(self),
        )

    def _check_fields(self) -> None:
        inner = self.base_policy
        _require_compressing_base(inner)
        remedy = "it evicts single entries, by their rank alone: give it mode='prefill'"
        require(not (self.once and inner.composed.evicts_while_decoding), "base", inner, remedy)
        self.check_base_policy(inner, inner.composed)
        reject_conflicting_fields(self, inner, "the base has {!r}: set it in the base only")

    def check_base_policy(self, base: Policy, parts: Parts) -> None:
        """Raise ValueError for a base policy that this one cannot wrap; runs at construction, empty unless overridden.

        Args:
            base: the base policy.
            parts: its parts.
        """

    def resolve_adaptive_heads(
        self, given: AdaptiveHeads | ProtectedHeads | None
    ) -> AdaptiveHeads | ProtectedHeads:
        """Return `given`, or if None `AdaptiveHeads` of the policy's `alpha`, `capacity`; ValueError if these conflict.

        ValueError if both set a share or a capacity.
        """
        if given is None:
            return self.create_part(AdaptiveHeads)
        for name in ("alpha", "capacity"):
            mine = getattr(self, name)
            same = mine in (getattr(type(self), name), getattr(given, name, mine))
            require(same, name, mine, f"heads={given!r} sets it, too: give it there only")
        return given

    def replace_head_budgets(self, base: Parts, heads: HeadBudgets) -> Parts:
        """Return the base's `Parts` with innermost head budgets `heads`; ValueError unless uniform before."""
        free = isinstance(unwrap_head_budgets(base.heads), UniformHeads)
        remedy = "its heads have budgets of their own: give SnapKV(), for example"
        require(free, "base", self.base_policy, remedy)
        return base.replace(heads=replace_inner_budgets(base.heads, heads))

    def replace_layer_budgets(self, base: Parts, layers: LayerBudgets) -> Parts:
        """Return the base's `Parts` with these layer budgets; ValueError unless the base's are `UniformLayers()`."""
        remedy = "its layers have budgets of their own: give a base with UniformLayers()"
        require(base.layers == UniformLayers(), "base", self.base_policy, remedy)
        return base.replace(layers=layers)

    def replace_base_parts(self, base: Parts) -> Parts:
        """Return the base policy's `Parts` with some replaced; TypeError unless a subclass overrides it.

        Args:
            base: the base policy's parts.

        Returns:
            This policy's parts.
        """
        raise TypeError(
            f"{type(self).__name__}: no `wrap`. Write the method: return base.replace(...)"
        )

    def build_policy_parts(self) -> Parts:
        """Return the base policy's `Parts`, changed by this policy's `replace_base_parts`."""
        return self.replace_base_parts(self.base_policy.composed)


@frozen_dataclass
class SparseReadPolicy(_DerivedPolicy):
    """Base class of policies that attend to few entries per token, of all entries or of those that `base` keeps.

    A subclass sets its reads, `read_by`. The budget is the number of entries to attend to.

    Attributes:
        base: a policy (or its name or class) that compresses the prompt first, and then appends.
    """

    # The reads' class; its fields are this policy's.
    read_by: ClassVar[type[AttentionReads]]

    def _check_fields(self) -> None:
        base = self.base_policy
        if base is not None:
            _require_compressing_base(base)
        own = ("budget", "store") if base is None else ("budget",)
        reject_conflicting_fields(
            self, base, "only a base evicts entries: set it in the base", but=own
        )

    def build_policy_parts(self) -> Parts:
        """Return the base's `Parts`, or without a base those of all entries, with reads of class `read_by`."""
        base = (
            Parts(store=get_store_class(self.store))
            if self.base_policy is None
            else self.base_policy.composed
        )
        remedy = "choosing tokens needs kept entries that do not move: give a base without rolling positions"
        require(not base.rolling, "base", self.base, remedy)
        return base.replace(read=self.create_part(self.read_by, budget=self.budget))


def _require_compressing_base(base: Policy) -> None:
    """Raise ValueError unless a base policy evicts entries, and attends to all that it keeps."""
    parts = base.composed
    remedy = "it evicts nothing, or reads few entries: give SnapKV(), OmniKV(base=...) around all"
    require(parts.compresses_prompts and parts.read.reads_all_entries, "base", base, remedy)


def replace_policy_budget(policy: Policy, budget: Budget) -> Policy:
    """Return a copy of the policy with this budget of kept entries, set in the base that has it; unchanged if none."""
    if policy.composed.budget is None:
        return policy
    if isinstance(policy, SparseReadPolicy) and policy.base_policy is not None:
        # A reader's own budget counts entries to attend to.
        return dataclasses.replace(policy, base=replace_policy_budget(policy.base_policy, budget))
    if isinstance(policy, PolicyWrapper) and isinstance(policy.base, Policy):
        return dataclasses.replace(
            policy, budget=None, base=replace_policy_budget(policy.base, budget)
        )
    return dataclasses.replace(policy, budget=budget)


def replace_policy_store(policy: Policy, store: type[Store]) -> Policy:
    """Return a copy of the policy with this store, set in the policy that it is built on, too."""
    if isinstance(policy, _DerivedPolicy) and policy.base_policy is not None:
        base = replace_policy_store(policy.base_policy, store)
        return dataclasses.replace(policy, store=store, base=base)
    return dataclasses.replace(policy, store=store)
