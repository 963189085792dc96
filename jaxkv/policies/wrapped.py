"""What policies share that change one part of another policy: all its other parts are taken as they are."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar

from jaxkv._errors import require
from jaxkv._values import typed
from jaxkv.policies.base import Policy
from jaxkv.policies.protocol import Needs, Upkeep
from jaxkv.policies.select import together

# What follows from other parts, and must follow from this policy's own; and what no base can have.
_OWN = frozenset(("form", "needs", "upkeep", "parts", "for_model", "reading"))
_SHARED = {field.name: field.default for field in dataclasses.fields(Policy)}


def takes_the_rest_from_base(cls: type[Policy]) -> type[Policy]:
    """Gives a class every part of a policy that it does not define, from `inner`, or `Policy`'s where that is None.

    No part is named here, so none can be forgotten.

    Args:
        cls: has an attribute `inner`, a policy or None.

    Returns:
        The class.
    """
    for name, member in vars(Policy).items():
        public = not name.startswith("_") and name not in _OWN and name not in vars(cls)
        if public and isinstance(member, property):
            setattr(cls, name, _property_of_base(name, member))
        elif public and isinstance(member, types.FunctionType):
            setattr(cls, name, _method_of_base(name, member))
    return cls


def _property_of_base(name: str, own: property) -> property:
    def get(self: Any) -> Any:
        return own.__get__(self) if self.inner is None else getattr(self.inner, name)

    return property(get, doc=own.__doc__)


def _method_of_base(name: str, own: types.FunctionType) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        # What follows from parts follows from this policy's own, unless the base has another way.
        if self.inner is None or getattr(type(self.inner), name) is own:
            return own(self, *args, **options)
        return getattr(self.inner, name)(*args, **options)

    return call


def check_shared(policy: Policy, inner: Policy | None) -> None:
    """Refuses a field of every policy that a wrapper and its base give in two ways.

    Args:
        policy: the wrapper.
        inner: its base.

    Raises:
        ValueError: naming the field and what the base says.
    """
    for name, default in _SHARED.items():
        mine = getattr(policy, name)
        its = default if inner is None else getattr(inner.settings, name)
        same = typed(mine) in (typed(default), typed(its))
        require(same, name, mine, f"the base says {its!r}: give it there only")


def base_of(policy: Policy, base: Any) -> Policy:
    """The policy that a wrapper's `base` stands for.

    Args:
        policy: the wrapper; what it gives of the fields of every policy goes to a base that is only named.
        base: a policy, the name of one, or its class.

    Returns:
        The base.

    Raises:
        ValueError: for a name that is not known.
        TypeError: for anything else.
    """
    # Here, because the registry knows all policies, wrappers among them.
    from jaxkv.policies.registry import as_policy

    given = {name: getattr(policy, name) for name in _SHARED}
    options = {name: value for name, value in given.items() if typed(value) != typed(_SHARED[name])}
    return as_policy(base, field="base", options=options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapped(Policy):
    """Another policy's budget, scores and layers; subclasses choose among its rows in their own way.

    Attributes:
        base: the policy whose parts are used, with budget, spans and what goes on while decoding; or its name or class,
            for one that takes those from here.
    """

    base: Policy | type[Policy] | str | None = None

    usual: ClassVar[str] = ""

    @functools.cached_property
    def inner(self) -> Policy:
        """The base, or the usual one."""
        if self.base is None and not self.usual:
            raise TypeError(f"base=None: {type(self).__name__} is built on a policy: give one")
        return base_of(self, self.usual if self.base is None else self.base)

    def _check_given(self) -> None:
        super()._check_given()
        inner, remedy = self.inner, "give a policy that drops rows; what reads a few goes around it: OmniKV(base=...)"
        require(inner.scorer is not None and type(inner).reading is Policy.reading, "base", inner, remedy)
        self._check(inner)
        check_shared(self, inner)

    def _check(self, base: Policy) -> None:
        """Refuses bases that this policy cannot work on."""

    def meaning(self) -> dict[str, Any]:
        """The base as it is, however it was given."""
        return super().meaning() | dict.fromkeys(_SHARED) | {"base": self.inner}

    @property
    def needs(self) -> Needs:
        """The base's needs, and what the heads look at."""
        return dataclasses.replace(self.inner.needs, norms=self.heads.needs_norms)

    @property
    def upkeep(self) -> Upkeep | None:
        """The base's, for these heads."""
        its = self.inner.upkeep
        return None if its is None else dataclasses.replace(its, together=together(self.heads))

    def for_model(self, layers: int, found: tuple[int, ...] | None) -> Policy:
        """This policy on the base that the model makes of its own."""
        its = self.inner.for_model(layers, found)
        return self if its is self.inner else dataclasses.replace(self, base=its)


takes_the_rest_from_base(Wrapped)
