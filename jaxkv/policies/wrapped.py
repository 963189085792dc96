"""What policies share that change one part of another policy."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from jaxkv._errors import require
from jaxkv.policies.base import Policy
from jaxkv.policies.budgets import LayerBudgets
from jaxkv.policies.protocol import Scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapped(Policy):
    """Another policy's budget, scores and layers; subclasses choose among its rows in their own way.

    Attributes:
        base: the policy whose parts are used; budgets, spans and what goes on while decoding are given there.
    """

    base: Policy | None = None

    def __post_init__(self) -> None:
        if self.base is None:
            object.__setattr__(self, "base", self._default())
        base, remedy = self._base, "give a policy that drops rows; what reads a few goes around it: OmniKV(base=...)"
        require(base.scorer is not None and type(base).reading is Policy.reading, "base", base, remedy)
        self._check(base)
        defaults = {field.name: field.default for field in dataclasses.fields(Policy)}
        for name, default in defaults.items():
            mine, its = getattr(self, name), getattr(self._base, name)
            require(mine in (default, its), name, mine, f"the base says {its!r}: give it there only")
            object.__setattr__(self, name, its)
        super().__post_init__()

    def _default(self) -> Policy:
        """The base when none is given."""
        raise TypeError(f"{type(self).__name__} needs a base")

    def _check(self, base: Policy) -> None:
        """Refuses bases that this policy cannot work on."""

    @property
    def _base(self) -> Policy:
        assert self.base is not None
        return self.base

    @property
    def kept_first(self) -> int:
        """The base's sinks."""
        return self._base.kept_first

    @property
    def kept_last(self) -> int:
        """The base's window."""
        return self._base.kept_last

    @property
    def scorer(self) -> Scorer | None:
        """The base's scorer."""
        return self._base.scorer

    @property
    def layers(self) -> LayerBudgets:
        """The base's layer budgets."""
        return self._base.layers

    @property
    def recent_share(self) -> float:
        """The base's share of recent rows."""
        return self._base.recent_share

    @property
    def evicts(self) -> bool:
        """As the base does."""
        return self._base.evicts

    def recents(
        self,
        rows: Int[np.ndarray, "L B"],
        length: Int[np.ndarray, " B"],
        forced: Int[np.ndarray, " B"],
        weights: Float[np.ndarray, "L B"] | None = None,
    ) -> Int[np.ndarray, "L B"]:
        """The base's."""
        return self._base.recents(rows, length, forced, weights)
