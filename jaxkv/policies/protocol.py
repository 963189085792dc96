"""What a policy and the model say to each other: what scoring may see, and what goes on after the prompt."""

import dataclasses
import enum
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv._values import ENDLESS, FARTHEST, Value
from jaxkv.attention import Implementation
from jaxkv.policies.merging import Merger

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a policy was asked for, as the engine reads it: a wrapper's are its base's, a preset's are the preset's.

    Attributes:
        budget: as in `Policy`; a number of rows that no text has is cut to one that no text has.
        min_budget: as in `Policy`.
        protect: as in `Policy`, cut to where positions end.
        every: as in `Policy`.
        merge: as in `Policy`.
    """

    budget: int | float | None
    min_budget: str
    protect: tuple[Span, ...]
    every: int | None
    merge: Merger | None

    def __post_init__(self) -> None:
        if isinstance(self.budget, int):
            object.__setattr__(self, "budget", min(self.budget, ENDLESS))
        if self.every is not None:
            object.__setattr__(self, "every", min(self.every, ENDLESS))
        cut = lambda edge: max(-FARTHEST, min(edge, FARTHEST))  # noqa: E731
        object.__setattr__(self, "protect", tuple((cut(start), cut(stop)) for start, stop in self.protect))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """What a policy asks of a layer's prefill beyond keys and values; only that is computed.

    Attributes:
        queries: w, the last rotated queries of each sequence.
        sums: the attention each key receives from all queries.
        norms: L1 norms of values seen through the output projection.
        unrotated: keys before RoPE.
    """

    queries: int = 0
    sums: bool = False
    norms: bool = False
    unrotated: bool = False


class Carry(enum.Enum):
    """How a row's score goes on while tokens are drawn.

    SUM: the attention it received, added up. MEAN: the same, divided by the queries that could see it. LAST: the last
    token's attention. AGE: nothing to carry; the oldest row is the weakest.
    """

    SUM = "sum"
    MEAN = "mean"
    LAST = "last"
    AGE = "age"

    def ranked(self, score: Float[Array, "..."], age: Int[Array, "..."]) -> Float[Array, "..."]:
        """What rows are compared by: their score, and how many queries could see them."""
        match self:
            case Carry.MEAN:
                return score / jnp.maximum(age, 1).astype(jnp.float32)
            case Carry.AGE:
                return -age.astype(jnp.float32)
        return score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Upkeep(Value):
    """What a policy does to its cache after the prompt; static in decode programs.

    Attributes:
        evicts: after each token, segments above their limit lose the weakest row.
        carry: how scores go on, or None where they are computed anew at each re-run.
        scored: a score per row is kept.
        together: all kv heads of a layer drop the same row.
        sinks: first positions that are never dropped.
        protect: spans of the prompt that are never dropped.
        merge: what becomes of dropped rows.
        ring: last queries to remember, for scorers that are asked again.
    """

    evicts: bool
    carry: Carry | None
    scored: bool
    together: bool
    sinks: int
    protect: tuple[Span, ...]
    merge: Merger | None
    ring: int

    def protected(self, pos: Int[Array, "..."], prompt: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Sinks and protected spans among rows of these positions, for prompts of these lengths."""
        mask = pos < self.sinks
        for start, stop in self.protect:
            first, last = (jnp.where(jnp.asarray(edge) < 0, prompt + edge, edge) for edge in (start, stop))
            # A span is the prompt's: what is drawn behind a short one is no part of it.
            mask = mask | ((pos >= first) & (pos < last) & (pos < prompt))
        return mask


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "q_positions", "k", "v", "length", "layer", "key", "sums"],
    meta_fields=["implementation"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """What a scorer may look at: one layer of a prompt, padding on the right.

    Attributes:
        q: `[B, K, G, w, D]` rotated queries of the last w tokens of each sequence; w is the scorer's `queries`.
        q_positions: `i32[B, w]` their positions; negative where the prompt is shorter than w.
        k: `[B, K, S, D]` rotated keys.
        v: `[B, K, S, D]` values.
        length: `i32[B]` tokens of each sequence.
        layer: `i32[]` index of the layer.
        key: random key of this call.
        sums: `f32[B, K, G, S]` attention each key receives from all queries, if the policy needs it.
        implementation: what computes attention.
    """

    q: Float[Array, "B K G w D"]
    q_positions: Int[Array, "B w"]
    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    length: Int[Array, " B"]
    layer: Int[Array, ""]
    key: PRNGKeyArray
    sums: Float[Array, "B K G S"] | None = None
    implementation: Implementation = Implementation.XLA


@runtime_checkable
class Scorer(Protocol):
    """Says how much each row matters, per kv head.

    Attributes:
        queries: how many of each sequence's last queries `Observed` must carry; 0 for none.
        sums: whether it must carry the attention received from all queries.
        carry: how scores go on while tokens are drawn; None if they must be computed anew.
    """

    @property
    def queries(self) -> int:
        """Last queries needed, w."""

    @property
    def sums(self) -> bool:
        """Whether sums over all queries are needed."""

    @property
    def carry(self) -> Carry | None:
        """How scores go on."""

    def mass(self, seen: Observed) -> Float[Array, "B K S"]:
        """What was observed of every row. Rows past a sequence's length may hold anything."""

    def scores(self, mass: Float[Array, "B K S"], length: Int[Array, " B"]) -> Float[Array, "B K S"]:
        """Scores by which rows are chosen, higher stays; from the mass, smoothed or as it is.

        float32. A prompt whose rows get what is not a number is refused; where a cache is compressed again, such rows
        come last.
        """


def checked(scorer: Scorer, method: str, given: Any, rows: Float[Array, "B K S D"]) -> Float[Array, "B K S"]:
    """What a scorer gave, if it is what scorers give; while a program is traced, so that it costs nothing.

    Args:
        scorer: whose it is.
        method: of which method.
        given: what it returned.
        rows: the keys that it was asked about.

    Returns:
        The same.

    Raises:
        TypeError: naming the scorer, what it gave and what is wanted.
    """
    wanted = rows.shape[:3]
    shape, dtype = getattr(given, "shape", None), getattr(given, "dtype", None)
    if shape != wanted or dtype != jnp.float32:
        gave = type(given).__name__ if shape is None else f"{dtype}{list(shape)}"
        remedy = f"give one float32 for each kv head and row, [B, K, S] = {list(wanted)}"
        raise TypeError(f"{type(scorer).__name__}.{method}={gave}: {remedy}")
    return given
