"""Samplers that draw the next token from logits: callable frozen dataclasses.

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
from jaxkv.policies.topk import kth_largest, sortable


@runtime_checkable
class Sampling(Protocol):
    """Protocol of samplers: callables that draw one token id per sequence from logits.

    Any hashable callable with this signature is a sampler; it is compiled into the decoding loop.
    """

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Draws a token id for each sequence from its float32 logits and random key."""


class Sampler:
    """Base class of jaxkv's samplers: dataclasses that are pytrees with their numbers as leaves.

    Subclasses by users are compiled in as static values instead, since they may need Python numbers.
    """

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if cls.__module__ == __name__:
            jax.tree_util.register_pytree_node(
                cls, _numbers, lambda _, numbers: _of_numbers(cls, numbers)
            )


def _numbers(sampler: Any) -> tuple[tuple[Any, ...], None]:
    """Flattens a sampler to its numbers, in 32 bits, as pytree leaves."""
    return tuple(
        _narrow(getattr(sampler, field.name)) for field in dataclasses.fields(sampler)
    ), None


def _of_numbers(cls: Any, numbers: Iterable[Any]) -> Any:
    # Bypasses __init__, whose checks cannot run on traced values.
    """Rebuilds a sampler of class `cls` from its numbers, which may be traced, without validation."""
    sampler = object.__new__(cls)
    for field, number in zip(dataclasses.fields(cls), numbers, strict=True):
        object.__setattr__(sampler, field.name, number)
    return sampler


def _narrow(value: Any) -> Any:
    """Number as numpy int32, at most 2**31 - 1, or as float32; arrays are returned unchanged."""
    if isinstance(value, int):
        return np.int32(min(value, np.iinfo(np.int32).max))
    if isinstance(value, float):
        with np.errstate(over="ignore", under="ignore"):
            return np.float32(value)
    return value


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Compiled:
    """Wrapper that makes a user's sampler a static pytree, compiled into the decoding loop."""

    draw: Any

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Any:
        """Calls the user's sampler with logits and keys; returns its token ids."""
        return self.draw(logits, keys)


def argument(sampling: Sampling) -> Any:
    """A sampler as a pytree for jitted functions: jaxkv's own with numbers as leaves, users' as static values."""
    return sampling if type(sampling).__module__ == __name__ else _Compiled(sampling)


# Tokens of a block of the vocabulary: about the square root of usual sizes.
_BLOCK = 256


def _sampled(key: Key[Array, ""], logits: Float[Array, " V"]) -> Int[Array, ""]:
    """Token id `i32[]` sampled from softmax(logits): first a block of the vocabulary by its sum, then a token of it.

    Two blocks of random numbers do for a vocabulary. A float32 Gumbel variate of the mode "low" is never above 16.6, so
    that tokens of probability 1e-7 would come too seldom.
    """
    size = min(_BLOCK, logits.size)
    blocks = jnp.pad(logits, (0, -logits.size % size), constant_values=-jnp.inf).reshape(-1, size)
    of_block, of_token = jax.random.split(key)
    block = jax.random.categorical(of_block, jax.nn.logsumexp(blocks, axis=-1), mode="high")
    token = jax.random.categorical(of_token, blocks[block], mode="high")
    return (block * size + token).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Greedy(Sampler):
    """Sampler that picks the likeliest token; ties go to the lowest id."""

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Token ids `i32[B]` with the largest logit of each sequence; the keys are unused."""
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Temperature(Sampler):
    """Sampler from softmax(logits / temperature) over all tokens.

    Attributes:
        temperature: positive number that logits are divided by; outside [1.2e-38, 8.5e37], the nearest of these.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        remedy = "give a positive number; Greedy() is the limit at 0"
        _checks.field(self, "temperature", _checks.real, remedy, open_low=True)

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Token ids `i32[B]` sampled from softmax(logits / temperature), after `cut` has masked logits."""
        # `cut` comes first: a division by an extreme temperature makes all logits equal.
        return jax.vmap(_sampled)(keys, self.divided(self.cut(logits)))

    def divided(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Logits relative to the largest one, divided by the temperature: 0 and below, never NaN."""
        return (logits - logits.max(axis=-1, keepdims=True)) / self.divisor

    @property
    def divisor(self) -> Float[Array, "..."]:
        """Temperature within normal float32 numbers that have an inverse: XLA takes smaller ones for 0."""
        least = jnp.finfo(jnp.float32).tiny
        return jnp.clip(_narrow(self.temperature), least, 1 / least)

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Logits, not yet divided, with excluded tokens' set to minus infinity; this base class excludes none."""
        return logits


@dataclasses.dataclass(frozen=True)
class TopK(Temperature):
    """Sampler among the k likeliest tokens, with a temperature.

    Attributes:
        k: number of tokens, at least 1.
    """

    temperature: float = dataclasses.field(default=1.0, kw_only=True)
    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.field(self, "k", _checks.whole, "draw from at least 1 token")

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Logits with those below the k-th largest set to minus infinity; ties with the k-th are kept."""
        keys = sortable(logits)
        k = jnp.minimum(jnp.asarray(self.k, jnp.int32), logits.shape[-1])
        return jnp.where(keys >= kth_largest(keys, k.reshape(-1)), logits, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class TopP(Temperature):
    """Nucleus sampler: draws among the fewest likeliest tokens that together hold probability p (arXiv:1904.09751).

    Attributes:
        p: probability in (0, 1].
    """

    temperature: float = dataclasses.field(default=1.0, kw_only=True)
    p: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.field(
            self, "p", _checks.real, "give a probability in (0, 1]", high=1.0, open_low=True
        )

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Logits outside the fewest likeliest tokens that reach probability p set to minus infinity; ties are kept."""
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(self.divided(ordered), axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # At p = 1 rare tokens stay, whose probability is lost in a sum near 1; the likeliest stays if p rounds to 0.
        kept = (before < self.p) | (before == 0) | (self.p == 1)
        least = jnp.where(kept, ordered, jnp.inf).min(axis=-1, keepdims=True)
        return jnp.where(logits >= least, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class MinP(Temperature):
    """Sampler among the tokens at least p times as likely as the likeliest one (arXiv:2407.01082).

    Attributes:
        p: share of the likeliest token's probability, in (0, 1].
    """

    temperature: float = dataclasses.field(default=1.0, kw_only=True)
    p: float

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "give a share of the likeliest token's probability in (0, 1]"
        _checks.field(self, "p", _checks.real, remedy, high=1.0, open_low=True)

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Logits with those below the largest one plus temperature * log(p) set to minus infinity."""
        least = logits.max(axis=-1, keepdims=True) + self.divisor * jnp.log(self.p)
        return jnp.where(logits >= least, logits, -jnp.inf)


# Samplers that sequences of one batch can have; their index is `Mixed.kind`.
_KINDS: tuple[type, ...] = (Greedy, Temperature, TopK, TopP, MinP)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed:
    """One sampler per sequence of a batch, stored as arrays, so that every mix of jaxkv's samplers is one program.

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
        """Draws token ids `i32[B]`, each sequence's by its own sampler; runs only the samplers that are used."""
        token = nothing = Greedy()(logits, keys)
        numbers = {"temperature": self.temperature, "k": self.k, "p": self.p}
        for kind, sampler in enumerate(_KINDS[1:], start=1):
            own = _of_numbers(
                sampler, [numbers[field.name][:, None] for field in dataclasses.fields(sampler)]
            )
            mine = self.kind == kind
            drawn = lax.cond(mine.any(), own.__call__, lambda *_: nothing, logits, keys)
            token = jnp.where(mine, drawn, token)
        return token


def mixed(samplers: Iterable[Sampling]) -> Mixed:
    """Combines one of jaxkv's samplers per sequence into a `Mixed`; TypeError for users' samplers."""
    given = list(samplers)
    for sampler in given:
        if type(sampler) not in _KINDS:
            raise TypeError(
                f"sampling={sampler}: slots draw by jaxkv's own samplers: give one of them"
            )

    def array(name: str, default: int | float, dtype: Any) -> Array:
        return jnp.asarray(
            np.asarray([_narrow(getattr(each, name, default)) for each in given], dtype)
        )

    return Mixed(
        kind=jnp.asarray(np.asarray([_KINDS.index(type(each)) for each in given], np.int32)),
        temperature=array("temperature", 1.0, np.float32),
        k=array("k", 1, np.int32),
        p=array("p", 1.0, np.float32),
    )
