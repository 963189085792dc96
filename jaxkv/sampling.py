"""How the next token is drawn from logits: frozen dataclasses, one call each."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxkv._errors import require


@runtime_checkable
class Sampling(Protocol):
    """Draws one token per sequence."""

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Draws from float32 logits with one key per sequence."""


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The likeliest token; ties go to the lowest id."""

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """The argmax; keys are not looked at."""
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperature:
    """The whole distribution, sharpened (below 1) or flattened (above)."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        require(
            self.temperature > 0, "temperature", self.temperature, "give a positive number; Greedy() is the limit at 0"
        )

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Draws from softmax(logits / temperature)."""
        scaled = logits / self.temperature
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
        require(isinstance(self.k, int) and self.k >= 1, "k", self.k, "draw from at least 1 token")

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Keeps the k largest, and all tied with the last of them."""
        least = jax.lax.top_k(logits, min(self.k, logits.shape[-1]))[0][:, -1:]
        return jnp.where(logits >= least, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopP(Temperature):
    """Nucleus sampling: the smallest set of likeliest tokens that holds probability p (arXiv:1904.09751)."""

    p: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.p <= 1, "p", self.p, "give a probability in (0, 1]")

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
        require(0 < self.p <= 1, "p", self.p, "give a share of the likeliest token's probability in (0, 1]")

    def cut(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Keeps tokens within log(p) of the largest logit."""
        return jnp.where(logits >= logits.max(axis=-1, keepdims=True) + jnp.log(self.p), logits, -jnp.inf)
