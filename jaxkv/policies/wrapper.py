"""`Wrapper` and `Reader`, bases of policies built on another policy: its parts, some of them replaced."""

import dataclasses
import functools
from typing import ClassVar

from jaxkv._checks import alike
from jaxkv._errors import require
from jaxkv.policies.checks import Budget, store_class
from jaxkv.policies.head_budgets import (
    AdaptiveHeads,
    HeadBudgets,
    ProtectedHeads,
    UniformHeads,
    inner_budgets,
    within_stages,
)
from jaxkv.policies.layer_budgets import LayerBudgets, UniformLayers
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.reads import Reads
from jaxkv.policies.registry import as_policy

_SHARED = {field.name: field.default for field in dataclasses.fields(Policy) if field.init}


def check_shared(
    policy: Policy, base: Policy | None, remedy: str, *, but: tuple[str, ...] = ()
) -> None:
    """Raise ValueError if a field of `Policy`, outside `but`, has neither its default nor the base policy's value."""
    for name, default in _SHARED.items():
        mine = getattr(policy, name)
        its = default if base is None else getattr(base, name)
        same = name in but or alike(mine, default) or alike(mine, its)
        require(same, name, mine, remedy.format(its))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Built(Policy):
    """Base class of policies built on another policy, `base`."""

    base: Policy | type[Policy] | str | None = None

    @functools.cached_property
    def inner(self) -> Policy | None:
        """Base policy as an instance, created from its name or class if necessary; None without a base."""
        return None if self.base is None else as_policy(self.base, field="base")

    def for_model(self, layers: int, found: tuple[int, ...] | None) -> Policy:
        """Return the policy with its base's model-dependent fields filled in, such as filter layers."""
        its = None if self.inner is None else self.inner.for_model(layers, found)
        return self if its is self.inner else dataclasses.replace(self, base=its)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper(_Built):
    """Base class of policies built on another policy, `base`: a subclass's `wrap` replaces some of its parts.

    Attributes:
        base: the policy to build on, with its budget, protected spans and decoding; or its name or class, with the
            budget and spans given here.
    """

    usual: ClassVar[str] = ""
    # True if this policy's choice does not extend to evictions of single entries after the prompt.
    once: ClassVar[bool] = False

    @functools.cached_property
    def inner(self) -> Policy:
        """Base policy as an instance; a name, class or default is created with this policy's shared fields."""
        options = {
            name: getattr(self, name)
            for name, default in _SHARED.items()
            if not alike(getattr(self, name), default)
        }
        return as_policy(
            self.usual if self.base is None else self.base, field="base", options=options
        )

    def _check(self) -> None:
        inner = self.inner
        _require_drops(inner)
        remedy = "it evicts single entries, by their rank alone: give it mode='prefill'"
        require(not (self.once and inner.composed.evicts), "base", inner, remedy)
        self.check_base(inner, inner.composed)
        check_shared(self, inner, "the base has {!r}: set it in the base only")

    def check_base(self, base: Policy, parts: Parts) -> None:
        """Raise ValueError for base policies that this policy cannot wrap; a hook for subclasses, empty here.

        Args:
            base: the base policy.
            parts: its parts.
        """

    def competing(
        self, given: AdaptiveHeads | ProtectedHeads | None
    ) -> AdaptiveHeads | ProtectedHeads:
        """Return `given`, or `AdaptiveHeads` of this policy's fields `alpha` and `capacity`.

        ValueError if both set a share or a capacity.
        """
        if given is None:
            return self.part(AdaptiveHeads)
        for name in ("alpha", "capacity"):
            mine = getattr(self, name)
            same = mine in (getattr(type(self), name), getattr(given, name, mine))
            require(same, name, mine, f"heads={given!r} sets it, too: give it there only")
        return given

    def with_heads(self, base: Parts, heads: HeadBudgets) -> Parts:
        """Return the base's parts with these head budgets, inside its stages; ValueError if it has others already."""
        free = isinstance(inner_budgets(base.heads), UniformHeads)
        remedy = "its heads have budgets of their own: give SnapKV(), for example"
        require(free, "base", self.inner, remedy)
        return base.replace(heads=within_stages(base.heads, heads))

    def with_layers(self, base: Parts, layers: LayerBudgets) -> Parts:
        """Return the base's parts with these layer budgets; ValueError if it has others already."""
        remedy = "its layers have budgets of their own: give a base with UniformLayers()"
        require(base.layers == UniformLayers(), "base", self.inner, remedy)
        return base.replace(layers=layers)

    def wrap(self, base: Parts) -> Parts:
        """Return the base's `Parts` with some replaced; TypeError unless a subclass overrides it.

        Args:
            base: the base policy's parts.

        Returns:
            This policy's parts.
        """
        raise TypeError(
            f"{type(self).__name__}: no `wrap`. Write the method: return base.replace(...)"
        )

    def parts(self) -> Parts:
        """Return the base policy's `Parts`, changed by this policy's `wrap`."""
        return self.wrap(self.inner.composed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader(_Built):
    """Base class of policies that attend to few entries per token, of all entries or of those that `base` keeps.

    A subclass sets its reads, `read_by`. The budget is the number of entries to attend to.

    Attributes:
        base: a policy (or its name or class) that compresses the prompt first, and then appends.
    """

    # The reads' class; its fields are this policy's.
    read_by: ClassVar[type[Reads]]

    def _check(self) -> None:
        base = self.inner
        if base is not None:
            _require_drops(base)
        own = ("budget", "store") if base is None else ("budget",)
        check_shared(self, base, "only a base evicts entries: set it in the base", but=own)

    def parts(self) -> Parts:
        """Return the base's `Parts`, or those of all entries, with reads of this policy's fields."""
        base = Parts(store=store_class(self.store)) if self.inner is None else self.inner.composed
        remedy = "choosing tokens needs kept entries that do not move: give a base without rolling positions"
        require(not base.rolling, "base", self.base, remedy)
        return base.replace(read=self.part(self.read_by, budget=self.budget))


def _require_drops(base: Policy) -> None:
    """Raise ValueError unless a base policy evicts entries, and attends to all that it keeps."""
    parts = base.composed
    remedy = "it evicts nothing, or reads few entries: give SnapKV(), OmniKV(base=...) around all"
    require(parts.drops and parts.read.everything, "base", base, remedy)


def with_budget(policy: Policy, budget: Budget) -> Policy:
    """Return a copy of the policy, or of its base, with this budget of kept entries; unchanged without a budget."""
    if policy.composed.budget is None:
        return policy
    if isinstance(policy, Reader) and policy.inner is not None:
        # A reader's own budget counts entries to attend to.
        return dataclasses.replace(policy, base=with_budget(policy.inner, budget))
    if isinstance(policy, Wrapper) and isinstance(policy.base, Policy):
        return dataclasses.replace(policy, budget=None, base=with_budget(policy.base, budget))
    return dataclasses.replace(policy, budget=budget)
