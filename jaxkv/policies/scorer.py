"""`Scorer`, the base of what scores a layer's rows; `Observed`, its view of the layer; `Needs`, what prefill adds."""

import dataclasses
import enum
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxkv import attention
from jaxkv._checks import choice, field, flag, instance, static, whole
from jaxkv.attention import Implementation, Shaping
from jaxkv.models.config import ModelConfig
from jaxkv.policies.gates import Gate
from jaxkv.policies.rank import Anew, Rank
from jaxkv.sharding.mesh import Axes


class GroupReduce(enum.Enum):
    """Enum of how query heads' scores are reduced to their kv head's score: MEAN or MAX."""

    MEAN = "mean"
    MAX = "max"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FutureQueries:
    """Config of query statistics for positions after the text: tokens skipped, positions averaged, covariance or not.

    Attributes:
        skip: number of first tokens left out of the statistics.
        positions: number of positions after the text over which the rotation (RoPE) is averaged.
        covariance: compute the covariance as well as the mean.
    """

    skip: int = 0
    positions: int = 512
    covariance: bool = True

    def __post_init__(self) -> None:
        field(self, "skip", whole, "give 0 or more first tokens", least=0)
        field(self, "positions", whole, "average over at least 1 position")
        field(self, "covariance", flag)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """Config of KVzip's second pass over the prompt, on its full cache: chunk length, sinks, texts between, weighting.

    The prompt is read again in chunks; nothing that the pass computes stays but the attention that rows receive.

    Attributes:
        chunk: tokens of the prompt in each chunk.
        sinks: first rows of the prompt that compete for attention with those of every chunk.
        tail: last tokens of the chunk before, which are read between `following` and `closing`.
        first: text before the first chunk, or its token ids.
        following: text before each later chunk, or its token ids.
        closing: text between these and the chunk, or its token ids; None for the end of the user's turn and the
            opening of the answer in the model's chat template, a line break without one.
        weighted: multiply attention by the L2 norm of the value at the layer's output, and divide it by that of the
            query token's normed hidden state (KVzip+).
    """

    chunk: int = 2048
    sinks: int = 4
    tail: int = 8
    first: str | tuple[int, ...] = "\n\nRepeat the previous context exactly."
    following: str | tuple[int, ...] = (
        "\n\nRepeat the part of the previous context exactly, starting with"
    )
    closing: str | tuple[int, ...] | None = None
    weighted: bool = False

    def __post_init__(self) -> None:
        field(self, "chunk", whole, "read at least 1 token at a time")
        field(self, "sinks", whole, "give 0 or more first tokens", least=0)
        field(self, "tail", whole, "repeat 0 or more tokens", least=0)
        field(self, "weighted", flag)
        for name in ("first", "following", "closing"):
            given = getattr(self, name)
            if isinstance(given, str) or (name == "closing" and given is None):
                continue
            remedy = "give text, or token ids, 0 or more"
            instance(name, given, (list, tuple, np.ndarray), remedy)
            ids = tuple(whole(name, each, remedy, least=0) for each in given)
            object.__setattr__(self, name, ids)


@partial(
    jax.tree_util.register_dataclass, data_fields=["mean", "covariance"], meta_fields=["asked"]
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryMoments:
    """Pytree of float32 mean and covariance of each query head's queries, as if rotated to positions after the text.

    Attributes:
        mean: `f32[B, K, G, D]`.
        covariance: `f32[B, K, G, D, D]`, divided by the number of queries; None if it was not asked for.
        asked: the settings that they were computed with.
    """

    mean: Float[Array, "B K G D"]
    covariance: Float[Array, "B K G D D"] | None
    asked: FutureQueries


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockAttention:
    """Config of attention within blocks of a prompt, not causal: block size, and first and last tokens in no block.

    Attributes:
        size: tokens of a block.
        first: number of first tokens that belong to no block.
        last: number of last tokens that belong to no block.
        zeros: kvpress' arithmetic: logits are not divided, and a block of fewer tokens is filled by logits of 0.
    """

    size: int = 256
    first: int = 0
    last: int = 0
    zeros: bool = False

    def __post_init__(self) -> None:
        field(self, "size", whole, "give blocks of at least 1 token")
        field(self, "first", whole, "give 0 or more first tokens", least=0)
        field(self, "last", whole, "give 0 or more last tokens", least=0)
        field(self, "zeros", flag)

    def tokens(self, slots: int) -> int:
        """Number of tokens of a block: `size`, or at most the padded prompt's length minus `first`, unless `zeros`."""
        return self.size if self.zeros else min(self.size, max(1, slots - self.first))


@partial(jax.tree_util.register_dataclass, data_fields=["sums"], meta_fields=["asked"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSums:
    """Pytree of attention `f32[B, K, G, S]` that each key receives from all queries of its block, with its settings."""

    sums: Float[Array, "B K G S"]
    asked: BlockAttention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """Config of extras that prefill computes per layer for scorers: last queries, attention sums, norms, moments.

    Attributes:
        queries: w, the last rotated queries of each sequence.
        sums: the attention each key receives from all queries.
        norms: L1 norms of values seen through the output projection.
        unrotated: keys before RoPE.
        future: settings of the `QueryMoments` to compute.
        replay: settings of a second pass over the prompt; None for none.
        blocks: settings of the `BlockSums` to compute.
        hidden: the hidden states that enter the layer's attention, after its norm.
    """

    queries: int = 0
    sums: bool = False
    norms: bool = False
    unrotated: bool = False
    future: tuple[FutureQueries, ...] = ()
    replay: Replay | None = None
    blocks: tuple[BlockAttention, ...] = ()
    hidden: bool = False


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("q", "q_positions", "k", "v", "length", "layer", "key", "sums", "norms", "norm_totals"),
        *("moments", "replayed", "blocks", "unrotated", "hidden", "gate", "sink_logits"),
    ],
    meta_fields=["softcap", "implementation", "axes", "group_axes"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """Pytree input of `Scorer.observe`: one layer's keys, values, last queries and extras for right-padded prompts.

    Attributes:
        q: `[B, K, G, w, D]` rotated queries of the last w tokens of each sequence; w is the scorer's `queries`.
        q_positions: `i32[B, w]` their positions; negative where the prompt is shorter than w.
        k: `[B, K, S, D]` rotated keys.
        v: `[B, K, S, D]` values.
        length: `i32[B]` tokens of each sequence.
        layer: `i32[]` index of the layer.
        key: random key of this call, if the scorer draws numbers.
        sums: `f32[B, K, G, S]` attention each key receives from all queries, if the policy needs it.
        norms: `f32[B, K, S]` L1 norms of values seen through the output projection, mean of the group, if needed.
        norm_totals: `f32[B, K | 1, S]` sum of `norms` over all kv heads that hold the row's position, likewise.
        moments: mean and covariance of the queries as they would be rotated after the text, if the scorer needs them.
        replayed: `f32[B, K, S]` largest attention that any query of the second pass paid the row, 0 for the first
            `sinks` rows, if the scorer needs it.
        blocks: attention that each key receives from all queries of its block, if the scorer needs it.
        unrotated: `[B, K, S, D]` keys before RoPE, likewise.
        hidden: `[B, S, E]` hidden states that enter the layer's attention, after its norm, if the scorer has a gate.
        gate: weights of this layer of the scorer's gate, likewise.
        sink_logits: `[B, K, G]` learned logits that take part in the layer's softmax without a value; None for none.
        softcap: c, if the layer's attention has c * tanh(logits / c) in place of its logits; None if not.
        implementation: of attention: `Implementation.XLA` or a kernel library.
        axes: mesh axes whose devices have K of the kv heads, and G of the query heads of each; None where all are
            here, or each kv head comes as a sequence of its own.
        group_axes: mesh axes whose devices share the query heads of a kv head, also where `axes` is None.
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
    norm_totals: Float[Array, "B #K S"] | None = None  # noqa: F821
    moments: QueryMoments | None = None
    replayed: Float[Array, "B K S"] | None = None
    blocks: BlockSums | None = None
    unrotated: Float[Array, "B K S D"] | None = None
    hidden: Float[Array, "B S E"] | None = None
    gate: Any = None
    sink_logits: Float[Array, "B K G"] | None = None
    softcap: float | None = None
    implementation: Implementation = Implementation.XLA
    axes: Axes | None = None
    group_axes: Axes | None = None

    def window_mass(self, reduce: Callable[..., Array], *of_heads: Array) -> Array:
        """Statistic `[B, K, ...]` of the last queries' attention: `attention.window_mass` with the layer's softmax.

        Args:
            reduce: from one kv head's probabilities `[G, w, S]`, the queries' positions and what `of_heads` holds for
                the head, to its statistic.
            *of_heads: arrays `[B, K, ...]`.

        Returns:
            The statistic.
        """
        return attention.window_mass(
            self.q,
            self.k,
            self.q_positions,
            reduce,
            *of_heads,
            shaping=self.shaping,
        )

    @property
    def shaping(self) -> Shaping:
        """What the layer's attention does to its logits, for each sequence."""
        return Shaping(softcap=self.softcap, sink_logits=self.sink_logits)


class Scorer:
    """Base of what scores how much each cache row matters, per kv head: rows of higher scores are kept.

    Subclass it in a frozen dataclass and write `observe`:

    ```python
    @dataclasses.dataclass(frozen=True)
    class KeyNorm(Scorer):
        def observe(self, seen):
            return -jnp.linalg.norm(seen.k.astype(jnp.float32), axis=-1)
    ```

    On a mesh it is called on every device, for the heads that lie there: a scorer that looks at each head alone needs
    no change. One that looks at other heads, or draws numbers, finds the mesh in `seen.axes`:
    `gathered(x, "K", 1, seen.axes)`, of jaxkv.sharding.collectives, brings the numbers of all kv heads, `own` takes the
    device's of them.
    """

    @property
    def queries(self) -> int:
        """Number w of each sequence's last queries that `observe` reads; 0 for none."""
        return 0

    @property
    def sums(self) -> bool:
        """True if `observe` reads `seen.sums`, the attention that rows receive from all queries."""
        return False

    @property
    def norms(self) -> bool:
        """True if `observe` reads `seen.norms`, the norms of values seen through the output projection."""
        return False

    @property
    def future(self) -> FutureQueries | None:
        """Settings of the `QueryMoments` that `observe` reads; None if it reads none."""
        return None

    @property
    def replay(self) -> Replay | None:
        """Settings of the second pass over the prompt whose attention `observe` reads; None if it reads none."""
        return None

    @property
    def blocks(self) -> BlockAttention | None:
        """Settings of the `BlockSums` that `observe` reads at prefill, with keys before RoPE; None if it reads none."""
        return None

    @property
    def gate(self) -> Gate | None:
        """Trained gate whose weights (`seen.gate`) `observe` reads beside hidden states; None by default."""
        return None

    @property
    def group(self) -> GroupReduce | str:
        """`GroupReduce` or its value: how a kv head's query heads are reduced in `observe`, and over devices; MEAN."""
        return GroupReduce.MEAN

    @property
    def draws(self) -> bool:
        """True if `observe` draws random numbers from `seen.key`."""
        return False

    @property
    def looks_at_end(self) -> bool:
        """True if scores follow the attention of a prompt's last queries; by default, if `queries` is above 0.

        `jaxkv.prefill` then warns of documents whose question comes later: it may lack rows. A scorer that looks at
        these queries and keeps other rows nonetheless, by their worst case say, overrides this property.
        """
        return bool(self.queries)

    @property
    def two_stages(self) -> bool:
        """True if the scorer has a `first_stage`, whose rows stay before all others."""
        return False

    @property
    def compares_keys(self) -> bool:
        """True if `observe` compares each key with all others, which plans count."""
        return False

    @property
    def model_layers(self) -> int | None:
        """Number of layers of the model that the scorer was made for; None for one that fits any."""
        return None

    @property
    def rank(self) -> Rank:
        """`Rank` by which scores change while decoding; `Anew()`, the default, computes them at each compression."""
        return Anew()

    def observe(self, seen: Observed) -> Float[Array, "B K S"]:
        """Float32 observations `[B, K, S]` of rows, such as attention received; `scores` turns them into scores.

        Args:
            seen: the layer; fields that no property asks for may be None. Rows past a length may hold anything.

        Returns:
            A number for each row; rows past a sequence's length may get anything.
        """
        raise NotImplementedError

    def first_stage(self, seen: Observed) -> Int[Array, "B K S"]:
        """Ranks `i32[B, K, S]` in their head of the rows of the first stage, S for other rows; where `two_stages`.

        At most as many as a head's even part.
        """
        raise TypeError(
            f"{type(self).__name__} says it has two stages: write its method `first_stage`"
        )

    def require_fits(self, config: ModelConfig) -> None:
        """Raises ValueError for a model that this is not made for; passes by default."""

    def scores(
        self, observed: Float[Array, "B K S"], length: Int[Array, " B"]
    ) -> Float[Array, "B K S"]:
        """Float32 scores `[B, K, S]` by which rows are kept, higher first; the observations by default.

        Args:
            observed: from `observe`.
            length: tokens of each sequence.

        Returns:
            The scores. A prompt whose rows get NaN is refused; where a cache is compressed again, such rows come last.
        """
        return observed


def sees_query_heads(scorer: Scorer) -> bool:
    """True if a scorer's observations depend on query heads, which several devices of a mesh may share."""
    return bool(scorer.queries or scorer.sums or scorer.future or scorer.replay or scorer.blocks)


def check_scorer(label: str, scorer: Any) -> None:
    """Raises TypeError or ValueError unless `scorer` is an instance of `Scorer` with a hash and `observe`."""
    instance(label, scorer, Scorer, "give an instance of a subclass of jaxkv.policies.Scorer")
    if type(scorer).observe is Scorer.observe:
        raise TypeError(f"{label}={scorer!r}: it says nothing of rows: write its method `observe`")
    whole(f"{label}.queries", scorer.queries, least=0)
    choice(f"{label}.group", scorer.group, GroupReduce)
    static(label, scorer)
