"""What a decoder's configuration is made of: checked numbers, RoPE variants, mixtures of experts."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

from jaxkv._errors import require
from jaxkv._values import FARTHEST


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """Takes an integer of any library's kind as Python's own; a boolean is none, nor is 4.0."""
    sound = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    remedy = f"give {'a positive integer' if least else 'an integer'} from {least} to {FARTHEST}"
    require(sound and least <= int(value) <= FARTHEST, name, value, remedy)
    return int(value)


def real(name: str, value: Any, remedy: str = "give a positive, finite number") -> float:
    """Takes a positive, finite number as a Python float."""
    sound = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # A Python integer may be too large for a float.
    require(sound and 0 < value < 1e38, name, value, remedy)
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Takes true or false."""
    require(isinstance(value, bool), name, value, "give true or false")
    return bool(value)


# By the type that a field is declared with.
READERS: dict[Any, Callable[..., Any]] = {"int": whole, "float": real, "float | None": real, "bool": flag}
_REMEDIES = {
    "theta": "give a positive base, 10000.0 for Llama 1 and 2",
    "factor": "give a scaling factor of at least 1",
}


def check_numbers(value: Any) -> None:
    """Keeps a dataclass' numbers, numpy's say, as Python's own of the same value: configs are compared and hashed."""
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if field.type in READERS and not (given is None and field.default is None):
            remedy = {"remedy": _REMEDIES[field.name]} if field.name in _REMEDIES else {}
            object.__setattr__(value, field.name, READERS[field.type](field.name, given, **remedy))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding, the unscaled kind.

    Attributes:
        theta: base of the geometric progression of wavelengths.
    """

    theta: float = 10_000.0

    def __post_init__(self) -> None:
        check_numbers(self)
        factor = getattr(self, "factor", 1.0)
        require(factor >= 1, "factor", factor, _REMEDIES["factor"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """Position interpolation: positions divided by `factor` (arXiv:2306.15595)."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope(Rope):
    """Llama 3.1's scaling: long wavelengths stretched by `factor`, short ones kept, a ramp between them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = f"give a value above low_freq_factor={self.low_freq_factor}"
        require(self.high_freq_factor > self.low_freq_factor, "high_freq_factor", self.high_freq_factor, remedy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnRope(Rope):
    """YaRN: interpolation by parts and an attention temperature (arXiv:2309.00071)."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.beta_fast > self.beta_slow, "beta_fast", self.beta_fast, f"give a value above {self.beta_slow=}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What one layer is besides its weights: layers of equal specs share compiled programs.

    Attributes:
        rope: the rotary embedding of its queries and keys.
        scale: factor on products of queries and keys; None for 1 / sqrt(D).
    """

    rope: Rope = Rope()
    scale: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self)
        require(isinstance(self.rope, Rope), "rope", self.rope, "give a Rope, such as Rope(theta=10000.0)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The MLPs of a mixture, of which each token is taken through a few.

    Attributes:
        count: X, experts in every block.
        chosen: how many a token is taken through, those of the highest probability.
        normalised: the chosen ones' probabilities are divided by their sum.
    """

    count: int
    chosen: int
    normalised: bool = True

    def __post_init__(self) -> None:
        check_numbers(self)
        require(self.chosen <= self.count, "chosen", self.chosen, f"a block has {self.count} experts: choose no more")
