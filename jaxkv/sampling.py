"""Samplers that draw the next token from logits: frozen dataclasses that are called.

Their numbers are arguments of the compiled loop, not part of it: ten temperatures are one program.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from jaxkv import _checks
from jaxkv._values import Value
from jaxkv.policies.topk import kth_largest, sortable


@runtime_checkable
class Sampling(Protocol):
    """Protocol of samplers, which draw one token per sequence.

    Any hashable callable of this signature is one; it is compiled into the loop.
    """

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Draws token ids from float32 logits, with one key per sequence."""


class Sampler:
    """Base of jaxkv's own samplers: dataclasses whose numbers are pytree leaves.

    Classes that users derive are compiled in as static values: theirs may need Python's own numbers.
    """

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if cls.__module__ == __name__:
            jax.tree_util.register_pytree_node(cls, _numbers, lambda _, numbers: _of_numbers(cls, numbers))


def _numbers(sampler: Any) -> tuple[tuple[Any, ...], None]:
    """Numbers of a sampler in 32 bits, as pytree leaves."""
    return tuple(_narrow(getattr(sampler, field.name)) for field in dataclasses.fields(sampler)), None


def _of_numbers(cls: Any, numbers: Iterable[Any]) -> Any:
    # Not through __init__: what is traced cannot be checked.
    """Sampler of a class with these numbers, which may be traced."""
    sampler = object.__new__(cls)
    for field, number in zip(dataclasses.fields(cls), numbers, strict=True):
        object.__setattr__(sampler, field.name, number)
    return sampler


def _narrow(value: Any) -> Any:
    """Python number as a 32-bit one, clipped where it is larger; arrays as they are."""
    if isinstance(value, int):
        return np.int32(min(value, np.iinfo(np.int32).max))
    if isinstance(value, float):
        with np.errstate(over="ignore", under="ignore"):
            return np.float32(value)
    return value


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Compiled(Value):
    """A user's sampler as a static pytree, compiled into the loop."""

    draw: Any

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Any:
        """Calls the sampler; the loop checks that ids lie in the vocabulary."""
        return self.draw(logits, keys)


def argument(sampling: Sampling) -> Any:
    """A sampler as a pytree for compiled functions: jaxkv's own with numbers as leaves, others static."""
    return sampling if type(sampling).__module__ == __name__ else _Compiled(sampling)


@dataclasses.dataclass(frozen=True)
class Greedy(Sampler):
    """Draws the likeliest token; ties go to the lowest id."""

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Argmax of the logits; keys are not used."""
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperature(Sampler):
    """Draws from the whole distribution, sharpened by a temperature below 1, flattened above.

    Attributes:
        temperature: positive number that logits are divided by.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        remedy = "give a positive number; Greedy() is the limit at 0"
        _checks.field(self, "temperature", _checks.real, remedy, open_low=True)

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Draws from softmax(logits / temperature)."""
        # Below the likeliest, so that no temperature overflows: at the smallest only the likeliest are left.
        below = logits - logits.max(axis=-1, keepdims=True)
        scaled = jnp.where(below == 0, 0.0, below / self.temperature)
        return jax.vmap(jax.random.categorical)(keys, self.cut(scaled)).astype(jnp.int32)

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Logits with those of tokens that must not be drawn set to minus infinity."""
        return logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Temperature):
    """Draws among the k likeliest tokens.

    Attributes:
        k: number of tokens, at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.field(self, "k", _checks.whole, "draw from at least 1 token")

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Keeps the k largest logits, and all tied with the last of them."""
        keys = sortable(logits)
        k = jnp.minimum(jnp.asarray(self.k, jnp.int32), logits.shape[-1])
        return jnp.where(keys >= kth_largest(keys, k.reshape(-1)), logits, -jnp.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopP(Temperature):
    """Nucleus sampling: draws among the fewest likeliest tokens that hold probability p (arXiv:1904.09751).

    Attributes:
        p: probability in (0, 1].
    """

    p: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.field(self, "p", _checks.real, "give a probability in (0, 1]", high=1.0, open_low=True)

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Keeps tokens before which, in descending order, less than p has been gathered."""
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(ordered, axis=-1)
        least = jnp.where(before < self.p, ordered, jnp.inf).min(axis=-1, keepdims=True)
        return jnp.where(logits >= least, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinP(Temperature):
    """Draws among tokens at least p times as likely as the likeliest (arXiv:2407.01082).

    Attributes:
        p: share of the likeliest token's probability, in (0, 1].
    """

    p: float

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "give a share of the likeliest token's probability in (0, 1]"
        _checks.field(self, "p", _checks.real, remedy, high=1.0, open_low=True)

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Keeps logits of at least the largest one plus log(p)."""
        return jnp.where(logits >= logits.max(axis=-1, keepdims=True) + jnp.log(self.p), logits, -jnp.inf)


# Samplers that sequences of one batch can have; their index is `Mixed.kind`.
_KINDS: tuple[type, ...] = (Greedy, Temperature, TopK, TopP, MinP)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed:
    """A sampler for each sequence of a batch, as arrays, so that any mix of jaxkv's own samplers is one program.

    Attributes:
        kind: `i32[B]` 0 for Greedy, then Temperature, TopK, TopP and MinP.
        temperature: `f32[B]`.
        k: `i32[B]` of TopK.
        p: `f32[B]` of TopP and MinP.
    """

    kind: Int[Array, " B"]
    temperature: Float[Array, " B"]
    k: Int[Array, " B"]
    p: Float[Array, " B"]

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Draws each sequence's token by its own sampler; samplers that no sequence has are not run."""
        token = nothing = Greedy()(logits, keys)
        numbers = {"temperature": self.temperature, "k": self.k, "p": self.p}
        for kind, sampler in enumerate(_KINDS[1:], start=1):
            own = _of_numbers(sampler, [numbers[field.name][:, None] for field in dataclasses.fields(sampler)])
            mine = self.kind == kind
            drawn = lax.cond(mine.any(), own.__call__, lambda *_: nothing, logits, keys)
            token = jnp.where(mine, drawn, token)
        return token


def mixed(samplers: Iterable[Sampling]) -> Mixed:
    """Samplers of a batch's sequences, jaxkv's own, as one `Mixed`; others are refused by a TypeError."""
    given = list(samplers)
    for sampler in given:
        if type(sampler) not in _KINDS:
            raise TypeError(f"sampling={sampler}: slots draw by jaxkv's own samplers: give one of them")

    def array(name: str, default: int | float, dtype: Any) -> Array:
        return jnp.asarray(np.asarray([_narrow(getattr(each, name, default)) for each in given], dtype))

    return Mixed(
        kind=jnp.asarray(np.asarray([_KINDS.index(type(each)) for each in given], np.int32)),
        temperature=array("temperature", 1.0, np.float32),
        k=array("k", 1, np.int32),
        p=array("p", 1.0, np.float32),
    )
