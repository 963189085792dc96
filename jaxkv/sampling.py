"""How the next token is drawn from logits: frozen dataclasses, one call each.

Their numbers are arguments of the compiled loop, not part of it: ten temperatures are one program.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from jaxkv._values import Value, count, real
from jaxkv.policies.topk import kth_largest, sortable


@runtime_checkable
class Sampling(Protocol):
    """Draws one token per sequence. Anything hashable that can be called so will do; it is compiled into the loop."""

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Draws from float32 logits with one key per sequence."""


class Sampler:
    """What jaxkv's own samplers share: dataclasses of numbers, which are leaves.

    Classes that users derive are compiled in as they are: theirs may need Python's own numbers.
    """

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if cls.__module__ == __name__:
            jax.tree_util.register_pytree_node(cls, _numbers, lambda _, numbers: _of_numbers(cls, numbers))


def _numbers(sampler: Any) -> tuple[tuple[Any, ...], None]:
    return tuple(_narrow(getattr(sampler, field.name)) for field in dataclasses.fields(sampler)), None


def _of_numbers(cls: Any, numbers: Iterable[Any]) -> Any:
    # Not through __init__: what is traced cannot be checked.
    sampler = object.__new__(cls)
    for field, number in zip(dataclasses.fields(cls), numbers, strict=True):
        object.__setattr__(sampler, field.name, number)
    return sampler


def _narrow(value: Any) -> Any:
    """A number in 32 bits, whatever the process is set to, and no larger than fits; arrays as they are."""
    if isinstance(value, int):
        return np.int32(min(value, np.iinfo(np.int32).max))
    if isinstance(value, float):
        with np.errstate(over="ignore", under="ignore"):
            return np.float32(value)
    return value


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Compiled(Value):
    """A sampler of somebody else's, compiled into the loop."""

    draw: Any

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Any:
        """What the wrapped sampler draws; that it lies in the vocabulary is checked where it is used."""
        return self.draw(logits, keys)


def argument(sampling: Sampling) -> Any:
    """A sampler as compiled functions take it.

    Args:
        sampling: any.

    Returns:
        A pytree: numbers of jaxkv's own samplers are leaves, other samplers are static.
    """
    return sampling if type(sampling).__module__ == __name__ else _Compiled(sampling)


@dataclasses.dataclass(frozen=True)
class Greedy(Sampler):
    """The likeliest token; ties go to the lowest id."""

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """The argmax; keys are not looked at."""
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperature(Sampler):
    """The whole distribution, sharpened (below 1) or flattened (above)."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        remedy = "give a positive number; Greedy() is the limit at 0"
        real(self, "temperature", remedy, low=0, high=math.inf, above=True)

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Draws from softmax(logits / temperature)."""
        # Below the likeliest, so that no temperature overflows: at the smallest only the likeliest are left.
        below = logits - logits.max(axis=-1, keepdims=True)
        scaled = jnp.where(below == 0, 0.0, below / self.temperature)
        return jax.vmap(jax.random.categorical)(keys, self.cut(scaled)).astype(jnp.int32)

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Removes tokens that must not be drawn, by setting them to minus infinity."""
        return logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Temperature):
    """The k likeliest tokens."""

    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        count(self, "k", 1, "draw from at least 1 token")

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Keeps the k largest, and all tied with the last of them."""
        keys = sortable(logits)
        k = jnp.minimum(jnp.asarray(self.k, jnp.int32), logits.shape[-1])
        return jnp.where(keys >= kth_largest(keys, k.reshape(-1)), logits, -jnp.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopP(Temperature):
    """Nucleus sampling: the smallest set of likeliest tokens that holds probability p (arXiv:1904.09751)."""

    p: float

    def __post_init__(self) -> None:
        super().__post_init__()
        real(self, "p", "give a probability in (0, 1]", low=0, high=1, above=True)

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Keeps tokens before which less than p has been gathered."""
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(ordered, axis=-1)
        least = jnp.where(before < self.p, ordered, jnp.inf).min(axis=-1, keepdims=True)
        return jnp.where(logits >= least, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinP(Temperature):
    """Tokens at least p times as likely as the likeliest (arXiv:2407.01082)."""

    p: float

    def __post_init__(self) -> None:
        super().__post_init__()
        real(self, "p", "give a share of the likeliest token's probability in (0, 1]", low=0, high=1, above=True)

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Keeps tokens within log(p) of the largest logit."""
        return jnp.where(logits >= logits.max(axis=-1, keepdims=True) + jnp.log(self.p), logits, -jnp.inf)


# What each sequence of a batch can be drawn by: their place is the kind.
_KINDS: tuple[type, ...] = (Greedy, Temperature, TopK, TopP, MinP)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed:
    """A sampler for each sequence of a batch: jaxkv's own ones, told by arrays, so that any mix is one program.

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
        """Draws each sequence's token as its own sampler does; samplers that nobody has are not run."""
        token = nothing = Greedy()(logits, keys)
        numbers = {"temperature": self.temperature, "k": self.k, "p": self.p}
        for kind, sampler in enumerate(_KINDS[1:], start=1):
            own = _of_numbers(sampler, [numbers[field.name][:, None] for field in dataclasses.fields(sampler)])
            mine = self.kind == kind
            drawn = lax.cond(mine.any(), own.__call__, lambda *_: nothing, logits, keys)
            token = jnp.where(mine, drawn, token)
        return token


def mixed(samplers: Iterable[Sampling]) -> Mixed:
    """One sampler for each sequence as arrays.

    Args:
        samplers: jaxkv's own, one per sequence.

    Returns:
        The sampler of the batch.

    Raises:
        TypeError: for a user's own sampler, which no number tells.
    """
    given = list(samplers)
    for sampler in given:
        if type(sampler) not in _KINDS:
            raise TypeError(f"sampling={sampler}: slots draw by jaxkv's own samplers: give one of them")
    of = lambda name, other, dtype: jnp.asarray(  # noqa: E731
        np.asarray([_narrow(getattr(each, name, other)) for each in given], dtype)
    )
    return Mixed(
        kind=jnp.asarray(np.asarray([_KINDS.index(type(each)) for each in given], np.int32)),
        temperature=of("temperature", 1.0, np.float32),
        k=of("k", 1, np.int32),
        p=of("p", 1.0, np.float32),
    )
