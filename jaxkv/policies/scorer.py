"""The protocol Scorer: what scoring may see of a layer, what it asks for, and what it gives."""

import dataclasses
import enum
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxkv._values import Value, count, flag, is_whole
from jaxkv.attention import Implementation
from jaxkv.policies.rank import Rank
from jaxkv.sharding.mesh import Axes


class GroupReduce(enum.Enum):
    """How a kv head's score follows from those of the query heads it serves."""

    MEAN = "mean"
    MAX = "max"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FutureQueries(Value):
    """Statistics of a text's queries that a scorer asks for: the queries rotated as they would be after the text.

    Attributes:
        skip: number of first tokens left out of the statistics.
        positions: number of positions after the text over which the rotation (RoPE) is averaged.
        covariance: compute the covariance as well as the mean.
    """

    skip: int = 0
    positions: int = 512
    covariance: bool = True

    def __post_init__(self) -> None:
        count(self, "skip", 0, "give 0 or more first tokens")
        count(self, "positions", 1, "average over at least 1 position")
        flag(self, "covariance")


@partial(jax.tree_util.register_dataclass, data_fields=["mean", "covariance"], meta_fields=["asked"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryMoments:
    """Mean and covariance of each query head's queries, rotated to the positions after the text; float32.

    Attributes:
        mean: `f32[B, K, G, D]`.
        covariance: `f32[B, K, G, D, D]`, divided by the number of queries; None if it was not asked for.
        asked: the settings that they were computed with.
    """

    mean: Float[Array, "B K G D"]
    covariance: Float[Array, "B K G D D"] | None
    asked: FutureQueries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """What a policy asks of a layer's prefill beyond keys and values; only that is computed.

    Attributes:
        queries: w, the last rotated queries of each sequence.
        sums: the attention each key receives from all queries.
        norms: L1 norms of values seen through the output projection.
        unrotated: keys before RoPE.
        future: settings of `QueryMoments` to compute, one set of moments for each.
    """

    queries: int = 0
    sums: bool = False
    norms: bool = False
    unrotated: bool = False
    future: tuple[FutureQueries, ...] = ()


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "q_positions", "k", "v", "length", "layer", "key", "sums", "norms", "norm_totals", "moments"],
    meta_fields=["implementation", "axes", "group_axes"],
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
        norms: `f32[B, K, S]` L1 norms of values seen through the output projection, mean over the group, if the scorer
            needs them.
        norm_totals: `f32[B, K | 1, S]` sum of `norms` over all kv heads that hold the row's position, likewise.
        moments: mean and covariance of the queries as they would be rotated after the text, if the scorer needs them.
        implementation: what computes attention.
        axes: of the mesh whose devices have K of the kv heads, and G of the query heads of each; None where all are
            here, or each kv head comes as a sequence of its own.
        group_axes: of the mesh whose devices share the query heads of a kv head, also where `axes` is None.
    """

    q: Float[Array, "B K G w D"]
    q_positions: Int[Array, "B w"]
    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    length: Int[Array, " B"]
    layer: Int[Array, ""]
    key: PRNGKeyArray
    sums: Float[Array, "B K G S"] | None = None
    norms: Float[Array, "B K S"] | None = None
    norm_totals: Float[Array, "B #K S"] | None = None
    moments: QueryMoments | None = None
    implementation: Implementation = Implementation.XLA
    axes: Axes | None = None
    group_axes: Axes | None = None


@runtime_checkable
class Scorer(Protocol):
    """Says how much each row matters, per kv head.

    Subclass it in a frozen dataclass; `observe` is all that has to be written:

    ```python
    @dataclasses.dataclass(frozen=True)
    class KeyNorm(Scorer):
        def observe(self, seen):
            return -jnp.linalg.norm(seen.k.astype(jnp.float32), axis=-1)
    ```

    On a mesh it is asked on every device, for the heads that lie there: what it says of a head is what it would say
    elsewhere, as long as it looks at that head alone. One that looks at others, or draws numbers, finds in `seen.axes`
    where it is: `gathered(x, "K", 1, seen.axes)`, of jaxkv.sharding.collectives, brings the numbers of all kv heads,
    `own` takes the device's of them.
    """

    @property
    def queries(self) -> int:
        """How many of each sequence's last queries `Observed` must carry, w; 0 for none."""
        return 0

    @property
    def sums(self) -> bool:
        """Whether `Observed` must carry the attention that rows receive from all queries."""
        return False

    @property
    def norms(self) -> bool:
        """True if `Observed` must carry the norms of values at the layer's output."""
        return False

    @property
    def future(self) -> FutureQueries | None:
        """Settings of the `QueryMoments` that `Observed` must carry; None for none."""
        return None

    @property
    def group(self) -> GroupReduce | str:
        """How `observe` reduces the query heads of a kv head, which may lie on several devices: "mean" or "max"."""
        return GroupReduce.MEAN

    @property
    def draws(self) -> bool:
        """Whether `observe` looks at the random key."""
        return False

    @property
    def looks_at_end(self) -> bool:
        """True if scores follow what the prompt's last queries attend to, so that a later question may find nothing.

        `jaxkv.prefill` then warns of documents whose question is still to come. A scorer that looks at these queries
        and keeps other rows nonetheless, by their worst case say, overrides it.
        """
        return self.queries > 0

    @property
    def rank(self) -> Rank | None:
        """How scores go on while tokens are drawn; None where the scorer must be asked again."""
        return None

    def observe(self, seen: Observed) -> Float[Array, "B K S"]:
        """What was observed of every row, float32. Rows past a sequence's length may hold anything."""
        ...

    def scores(self, observed: Float[Array, "B K S"], length: Int[Array, " B"]) -> Float[Array, "B K S"]:
        """Scores by which rows are chosen, higher stays; from what was observed, smoothed or as it is.

        float32. A prompt whose rows get what is not a number is refused; where a cache is compressed again, such rows
        come last.
        """
        return observed


def group_of(scorer: Scorer) -> GroupReduce:
    """How a scorer reduces query heads; the mean, if it is derived from nothing and does not say."""
    return GroupReduce(getattr(scorer, "group", GroupReduce.MEAN))


def looks_at_end(scorer: Scorer) -> bool:
    """`scorer.looks_at_end`; for a scorer derived from nothing that lacks it, whether it asks for last queries."""
    return getattr(scorer, "looks_at_end", scorer.queries > 0)


def sees_query_heads(scorer: Scorer) -> bool:
    """True if a scorer's result depends on query heads, which several devices of a mesh may share."""
    return bool(scorer.queries or scorer.sums or future_of(scorer))


def norms_of(scorer: Scorer) -> bool:
    """True if a scorer reads norms of values; False if it is derived from nothing and does not say."""
    return getattr(scorer, "norms", False)


def future_of(scorer: Scorer) -> FutureQueries | None:
    """Settings of the `QueryMoments` that a scorer reads; None if it is derived from nothing and does not say."""
    return getattr(scorer, "future", None)


def check_scorer(label: str, scorer: Any) -> None:
    """Refuses what is no scorer.

    Args:
        label: what to call it.
        scorer: what a policy gave; None is allowed.

    Raises:
        TypeError: naming what it lacks.
    """
    if scorer is None:
        return
    if isinstance(scorer, type):
        raise TypeError(f"{label}={scorer.__name__}: it is a class: give an instance, {scorer.__name__}()")
    missing = [each for each in ("queries", "sums", "rank", "observe", "scores") if not hasattr(scorer, each)]
    if missing:
        remedy = f"a scorer has {', '.join(missing)}, too: subclass jaxkv.policies.Scorer"
        raise TypeError(f"{label}={scorer!r}: {remedy}")
    if type(scorer) is Scorer or getattr(type(scorer), "observe", None) is Scorer.observe:
        raise TypeError(f"{label}={type(scorer).__name__}: it says nothing of rows: write its method `observe`")
    for name, fits, wanted in (
        ("queries", is_whole, "a number of last queries, 0 or more"),
        ("sums", lambda value: isinstance(value, bool), "True or False"),
        ("rank", lambda value: value is None or isinstance(value, Rank), "a Rank, or None"),
        ("observe", callable, "a method"),
        ("scores", callable, "a method"),
    ):
        value = getattr(scorer, name)
        if not fits(value):
            raise TypeError(f"{label}.{name}={value!r}: give {wanted}")
    for name in ("draws", "norms", "looks_at_end"):
        value = getattr(scorer, name, False)
        if not isinstance(value, bool):
            raise TypeError(f"{label}.{name}={value!r}: give True or False")
    if not isinstance(future_of(scorer), (FutureQueries, type(None))):
        raise TypeError(f"{label}.future={scorer.future!r}: give FutureQueries(...), or None")
    try:
        group_of(scorer)
    except ValueError:
        raise TypeError(f"{label}.group={scorer.group!r}: give GroupReduce.MEAN or GroupReduce.MAX") from None
    try:
        hash(scorer)
    except TypeError as error:
        remedy = f"programs are kept by it ({error}): make it a frozen dataclass of numbers and tuples"
        raise TypeError(f"{label}={type(scorer).__name__}: {remedy}") from None
