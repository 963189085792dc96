"""What follows the prompt: rows are only added, one goes for each that comes, or all are chosen anew from time to time.

A `Rank` says how a row's score goes on meanwhile, and which row is the weakest.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv._errors import require
from jaxkv._values import ENDLESS, Value, count, flag, real
from jaxkv.policies.checks import checked


@runtime_checkable
class Rank(Protocol):
    """How a row's score goes on while tokens are drawn, and what rows are compared by: the lowest rank goes.

    Subclass it in a frozen dataclass and override what differs. The rows of a prompt begin with what the scorer's
    `observe` gave them; at each new token a score becomes `decay * score` plus the attention that the row receives.
    """

    @property
    def scored(self) -> bool:
        """Whether each row has a score at all; without one, `rank` is given zeros."""
        return True

    @property
    def decay(self) -> float | None:
        """What is left of a score when a new token comes, from 0 to 1, before that token's attention is added.

        None for scores that attention does not change: they stay as they began.
        """
        return None

    def begin(self, k: Float[Array, "B K N D"], v: Float[Array, "B K N D"]) -> Float[Array, "B K N"]:
        """The float32 score that new rows begin with, before any attention to them; 0 unless said otherwise."""
        return jnp.zeros(k.shape[:3], jnp.float32)

    def rank(self, score: Float[Array, "..."], age: Int[Array, "..."]) -> Float[Array, "..."]:
        """What rows are compared by, float32 of the scores' shape: the lowest goes first.

        Args:
            score: as it has become.
            age: tokens since the row's own, that one included.
        """
        return score


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByAttention(Rank, Value):
    """The row that received the least attention goes.

    Attributes:
        decay: what of older attention still counts at each new token: 1 adds it all up (H2O), 0 forgets it (TOVA).
        mean: divide by the number of queries that could see the row (RoCo), so that early rows have no advantage.
    """

    decay: float = 1.0
    mean: bool = False

    def __post_init__(self) -> None:
        real(self, "decay", "give a share between 0 and 1: 1 forgets nothing", low=0, high=1)
        flag(self, "mean")

    def rank(self, score: Float[Array, "..."], age: Int[Array, "..."]) -> Float[Array, "..."]:
        """The attention received, or that for each query that could see the row."""
        return score / jnp.maximum(age, 1).astype(jnp.float32) if self.mean else score


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByAge(Rank, Value):
    """The oldest row goes."""

    @property
    def scored(self) -> bool:
        """A row's position says enough."""
        return False

    def rank(self, score: Float[Array, "..."], age: Int[Array, "..."]) -> Float[Array, "..."]:
        """Minus the age."""
        return -age.astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Append(Value):
    """New rows join those that were kept, and none goes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evict(Value):
    """Every new row beyond the budget costs the weakest one.

    Attributes:
        rank: which row that is.
    """

    rank: Rank

    def __post_init__(self) -> None:
        check_rank("rank", self.rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Again(Value):
    """The policy chooses anew, over prompt and answer in order of position.

    Attributes:
        every: after so many more tokens: the cache never holds more than the budget and this many rows.
        rank: how scores have gone on until then; None asks the scorer again, with the last queries it needs.
    """

    every: int
    rank: Rank | None = None

    def __post_init__(self) -> None:
        count(self, "every", 1, "give a number of tokens, at least 1")
        object.__setattr__(self, "every", min(self.every, ENDLESS))
        if self.rank is not None:
            check_rank("rank", self.rank)


After = Append | Evict | Again


def ranked(rank: Rank, score: Float[Array, "..."], age: Int[Array, "..."]) -> Float[Array, "..."]:
    """What rows are compared by, checked.

    Args:
        rank: the policy's.
        score: of each row.
        age: of each row; its axes of one stand for any number.

    Returns:
        float32 of the rows' shape; what is not a number goes first.

    Raises:
        TypeError: for a rank of another shape or dtype.
    """
    shape = jnp.broadcast_shapes(score.shape, age.shape)
    given = rank.rank(jnp.broadcast_to(score, shape), jnp.broadcast_to(age, shape))
    ranks = checked(rank, "rank", given, shape, "row")
    return jnp.where(jnp.isnan(ranks), -jnp.inf, ranks)


def check_rank(label: str, rank: object) -> None:
    """Refuses what is no rank.

    Args:
        label: what to call it.
        rank: what was given.

    Raises:
        TypeError: naming what it lacks.
    """
    if isinstance(rank, type):
        raise TypeError(f"{label}={rank.__name__}: it is a class: give an instance, {rank.__name__}()")
    if not isinstance(rank, Rank):
        raise TypeError(f"{label}={rank!r}: give a rank such as ByAttention(), or a subclass of jaxkv.policies.Rank")
    decay = rank.decay
    number = decay is None or (isinstance(decay, (int, float)) and not isinstance(decay, bool) and 0 <= decay <= 1)
    require(number, f"{label}.decay", decay, "give a share between 0 and 1, or None where attention changes nothing")
