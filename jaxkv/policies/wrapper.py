"""`Wrapper` and `Reader`, bases of policies built on another one: the base's parts, some of them replaced."""

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
    """Raises ValueError if a field of `Policy`, outside `but`, has neither its default nor the base policy's value."""
    for name, default in _SHARED.items():
        mine = getattr(policy, name)
        its = default if base is None else getattr(base, name)
        same = name in but or alike(mine, default) or alike(mine, its)
        require(same, name, mine, remedy.format(its))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Built(Policy):
    """Base class of policies that may be built on another policy, `base`."""

    base: Policy | type[Policy] | str | None = None

    @functools.cached_property
    def inner(self) -> Policy | None:
        """Base policy as an instance, cached; made of its name or class if so given, None without a base."""
        return None if self.base is None else as_policy(self.base, field="base")

    def for_model(self, layers: int, found: tuple[int, ...] | None) -> Policy:
        """Returns this policy with its base's model-dependent fields filled in, such as a gate's; itself without."""
        its = None if self.inner is None else self.inner.for_model(layers, found)
        return self if its is self.inner else dataclasses.replace(self, base=its)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper(_Built):
    """Base class of policies built on another policy, `base`: a subclass's `wrap` replaces some of its parts.

    Attributes:
        base: the policy whose parts are used, with its budget, spans and behaviour while decoding; or its name or
            class, for one that takes budget and spans from here.
    """

    usual: ClassVar[str] = ""
    # True if entries that go one by one, after the prompt, cannot be chosen as this policy does.
    once: ClassVar[bool] = False

    @functools.cached_property
    def inner(self) -> Policy:
        """Base policy as an instance, cached; if a name, class or default, made with this policy's shared fields."""
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
        remedy = "entries that go one by one are chosen by their rank alone: give mode='prefill'"
        require(not (self.once and inner.composed.evicts), "base", inner, remedy)
        self.check_base(inner, inner.composed)
        check_shared(self, inner, "the base says {!r}: give it there only")

    def check_base(self, base: Policy, parts: Parts) -> None:
        """Hook in which subclasses raise ValueError for base policies that they cannot wrap; does nothing here.

        Args:
            base: the base policy.
            parts: its parts.
        """

    def competing(
        self, given: AdaptiveHeads | ProtectedHeads | None
    ) -> AdaptiveHeads | ProtectedHeads:
        """Head budgets that compete, those given or `AdaptiveHeads` of this policy's fields `alpha` and `capacity`.

        ValueError if both say a share or a capacity.
        """
        if given is None:
            return self.part(AdaptiveHeads)
        for name in ("alpha", "capacity"):
            mine = getattr(self, name)
            same = mine in (getattr(type(self), name), getattr(given, name, mine))
            require(same, name, mine, f"heads have their own, {given!r}: give it there only")
        return given

    def with_heads(self, base: Parts, heads: HeadBudgets) -> Parts:
        """Base's parts with these budgets of heads, within its stages; ValueError if its heads have some already."""
        free = isinstance(inner_budgets(base.heads), UniformHeads)
        remedy = "its heads choose in a way of their own: give SnapKV(), say"
        require(free, "base", self.inner, remedy)
        return base.replace(heads=within_stages(base.heads, heads))

    def with_layers(self, base: Parts, layers: LayerBudgets) -> Parts:
        """Base's parts with these budgets of layers; ValueError if its layers have some already."""
        remedy = "its layers have budgets of their own already"
        require(base.layers == UniformLayers(), "base", self.inner, remedy)
        return base.replace(layers=layers)

    def wrap(self, base: Parts) -> Parts:
        """Abstract: returns the base's `Parts` with some replaced; TypeError where a subclass does not override it.

        Args:
            base: the base policy's parts.

        Returns:
            This policy's parts.
        """
        raise TypeError(
            f"{type(self).__name__}: write its method `wrap`, which returns base.replace(...)"
        )

    def parts(self) -> Parts:
        """Returns the base policy's `Parts`, changed by this policy's `wrap`."""
        return self.wrap(self.inner.composed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader(_Built):
    """Base class of policies that read a few entries at each token: of all entries, or of those that a policy `base` keeps.

    A subclass names its reads, `read_by`. Its budget is one of entries read.

    Attributes:
        base: a policy (or its name or class) that compresses the prompt first, and then appends.
    """

    # Made of this policy's fields.
    read_by: ClassVar[type[Reads]]

    def _check(self) -> None:
        base = self.inner
        if base is not None:
            _require_drops(base)
        own = ("budget", "store") if base is None else ("budget",)
        check_shared(self, base, "it drops nothing: give it to the base, if any", but=own)

    def parts(self) -> Parts:
        """Returns the base's `Parts` (or keep-all `Parts`) with reads of this policy's fields."""
        base = Parts(store=store_class(self.store)) if self.inner is None else self.inner.composed
        remedy = "tokens are chosen of entries that stay where they are: give a policy without rolling positions"
        require(not base.rolling, "base", self.base, remedy)
        return base.replace(read=self.part(self.read_by, budget=self.budget))


def _require_drops(base: Policy) -> None:
    """Raises ValueError unless a base policy drops entries, and reads all that it keeps."""
    parts = base.composed
    remedy = "give a policy that drops entries; what reads a few goes around it: OmniKV(base=...)"
    require(parts.drops and parts.read.everything, "base", base, remedy)


def with_budget(policy: Policy, budget: Budget) -> Policy:
    """Copy of the policy that keeps `budget` entries, set in its base if it has one; unchanged if it takes no budget."""
    if policy.composed.budget is None:
        return policy
    if isinstance(policy, Reader) and policy.inner is not None:
        # Its own budget is one of entries read.
        return dataclasses.replace(policy, base=with_budget(policy.inner, budget))
    if isinstance(policy, Wrapper) and isinstance(policy.base, Policy):
        return dataclasses.replace(policy, budget=None, base=with_budget(policy.base, budget))
    return dataclasses.replace(policy, budget=budget)
