"""`Scorer`, the base of what scores a layer's entries; `Needs`, what it reads; `Observed`, where it finds that."""

import dataclasses
import enum
from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv import attention
from jaxkv._checks import choice, field, flag, instance, static, whole
from jaxkv.attention import Implementation, Shaping
from jaxkv.models.config import ModelConfig
from jaxkv.policies.gates import Gate
from jaxkv.policies.rank import Anew, Rank
from jaxkv.sharding.mesh import Axes

# A number per row and kv head of each sequence; higher is kept.
Scores = Float[Array, "B K S"]


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

    The prompt is read again in chunks; nothing that the pass computes stays but the attention that entries receive.

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryMoments:
    """Pytree of float32 mean and covariance of each query head's queries, as if rotated to positions after the text.

    Attributes:
        mean: `f32[B, K, G, D]`.
        covariance: `f32[B, K, G, D, D]`, divided by the number of queries; None if it was not asked for.
    """

    mean: Float[Array, "B K G D"]
    covariance: Float[Array, "B K G D D"] | None


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

    def tokens(self, padded_len: int) -> int:
        """Number of tokens of a block: `size`, or at most the padded prompt's length minus `first`, unless `zeros`."""
        return self.size if self.zeros else min(self.size, max(1, padded_len - self.first))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """Config of what a scorer reads beside keys and values; `Observed` has it as an attribute of the same name.

    Attributes:
        queries: w, for `[B, K, G, w, D]` rotated queries of the last w tokens of each sequence; 0 for none.
        sums: `f32[B, K, G, S]` attention that each key receives from all queries.
        norms: `f32[B, K, S]` L1 norms of values seen through the output projection, mean of the group; beside them
            `seen.norm_totals`, `f32[B, K | 1, S]`, their sum over all kv heads that hold the entry's position.
        unrotated: `[B, K, S, D]` keys before RoPE.
        hidden: `[B, S, E]` hidden states that enter the layer's attention, after its norm.
        moments: settings of `QueryMoments`, the mean and covariance of queries as if after the text; None for none.
        replay: settings of a second pass over the prompt: `f32[B, K, S]`, the largest attention that any of its queries
            paid the entry, 0 for the first `sinks` entries; None for none.
        blocks: settings of `f32[B, K, G, S]`, the attention that each key receives from all queries of its block; None
            for none.
        gate: a trained gate, of which the layer's weights are read; None for none.
    """

    queries: int = 0
    sums: bool = False
    norms: bool = False
    unrotated: bool = False
    hidden: bool = False
    moments: FutureQueries | None = None
    replay: Replay | None = None
    blocks: BlockAttention | None = None
    gate: Gate | None = None

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of what is asked for, each a key of `Observed.extras`."""
        names = (each.name for each in dataclasses.fields(self))
        return tuple(name for name in names if getattr(self, name))

    @property
    def query_heads(self) -> bool:
        """True if what is read depends on query heads, which several devices of a mesh may share."""
        return bool(self.queries or self.sums or self.moments or self.replay or self.blocks)


class Extras(TypedDict, total=False):
    """Extras by their names in `Needs`, with shapes, by which arrays are placed on a mesh."""

    queries: Float[Array, "B K G w D"]
    sums: Float[Array, "B K G S"]
    norms: Float[Array, "B K S"]
    norm_totals: Float[Array, "B #K S"]  # noqa: F821
    unrotated: Float[Array, "B K S D"]
    hidden: Float[Array, "B S E"]
    moments: QueryMoments
    replay: Float[Array, "B K S"]
    blocks: Float[Array, "B K G S"]
    gate: Any


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("q_positions", "k", "v", "length", "layer", "key", "extras", "sink_logits"),
    ],
    meta_fields=["softcap", "implementation", "axes", "group_axes"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """Pytree input of `Scorer.observe`: one layer of right-padded prompts, and what the scorer's `Needs` asked for.

    Attributes:
        q_positions: `i32[B, w]` positions of the last w tokens, w being `Needs.queries`; negative where a prompt is
            shorter.
        k: `[B, K, S, D]` rotated keys.
        v: `[B, K, S, D]` values.
        length: `i32[B]` tokens of each sequence.
        layer: `i32[]` index of the layer.
        key: random key of this call, if the scorer uses random numbers.
        extras: what was asked for, by the names of `Needs`; `seen.sums` reads `seen.extras["sums"]`.
        sink_logits: `[B, K, G]` learned logits that take part in the layer's softmax without a value; None for none.
        softcap: c, if the layer's attention has c * tanh(logits / c) in place of its logits; None if not.
        implementation: of attention: `Implementation.XLA` or a kernel library.
        axes: mesh axes whose devices have K of the kv heads, and G of the query heads of each; None where all are
            here, or each kv head comes as a sequence of its own.
        group_axes: mesh axes whose devices share the query heads of a kv head, also where `axes` is None.
    """

    q_positions: Int[Array, "B w"]
    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    length: Int[Array, " B"]
    layer: Int[Array, ""]
    key: PRNGKeyArray
    extras: Extras = dataclasses.field(default_factory=Extras)
    sink_logits: Float[Array, "B K G"] | None = None
    softcap: float | None = None
    implementation: Implementation = Implementation.XLA
    axes: Axes | None = None
    group_axes: Axes | None = None

    def __getattr__(self, name: str) -> Any:
        """Extra of this name in `Needs`; AttributeError if it was not asked for, or no cache remembers it."""
        extras: Any = self.__dict__.get("extras", {})
        if name not in extras:
            there = f"give the scorer needs = Needs({name}=...); a cache recompressed has less"
            raise AttributeError(f"seen.{name}: not asked for, or not there: {there}")
        return extras[name]

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
            self.queries,
            self.k,
            self.q_positions,
            reduce,
            *of_heads,
            shaping=self.shaping,
        )

    def between(self, first: int = 0, last: int = 0) -> Bool[Array, "B 1 S"]:
        """Mask of the entries of each sequence but its `first` first and its `last` last ones, and padding."""
        index = self.index
        inside = index < (self.length - last)[:, None, None]
        return inside & (index >= first) if first else inside

    @property
    def index(self) -> Int[Array, " S"]:
        """Positions `i32[S]` of the entries."""
        return jnp.arange(self.k.shape[2], dtype=jnp.int32)

    @property
    def shaping(self) -> Shaping:
        """`Shaping` of the layer's attention logits, for each sequence."""
        return Shaping(softcap=self.softcap, sink_logits=self.sink_logits)


class Scorer:
    """Base of what scores how much each cache row matters, per kv head: entries of higher scores are kept.

    Subclass it in a frozen dataclass and write `observe`:

    ```python
    @dataclasses.dataclass(frozen=True)
    class KeyNorm(Scorer):
        def observe(self, seen):
            return -jnp.linalg.norm(seen.k.astype(jnp.float32), axis=-1)
    ```

    What it reads beside keys and values it asks for by `needs`, and finds under the same name:

    ```python
    @dataclasses.dataclass(frozen=True)
    class Received(Scorer):
        needs: ClassVar[Needs] = Needs(sums=True)

        def observe(self, seen):
            return seen.sums.mean(axis=2)
    ```

    On a mesh it is called on every device, for the heads that lie there: a scorer that looks at each head alone needs
    no change. One that looks at other heads, or uses random numbers, finds the mesh in `seen.axes`:
    `gathered(x, "K", 1, seen.axes)`, of jaxkv.sharding.collectives, brings the numbers of all kv heads, `own` takes the
    device's of them.
    """

    @property
    def needs(self) -> Needs:
        """Inputs that `observe` reads beside keys and values, such as last queries, as `Needs`; none by default."""
        return Needs()

    @property
    def group(self) -> GroupReduce | str:
        """`GroupReduce` or its value: how a kv head's query heads are reduced in `observe`, and over devices; MEAN."""
        return GroupReduce.MEAN

    @property
    def uses_key(self) -> bool:
        """True if `observe` uses random numbers from `seen.key`."""
        return False

    @property
    def looks_at_end(self) -> bool:
        """True if scores follow the attention of a prompt's last queries; by default, if `needs.queries` is above 0.

        `jaxkv.prefill` then warns of documents whose question comes later: it may lack entries. A scorer that looks at
        these queries and keeps other entries nonetheless, by their worst case say, overrides this property.
        """
        return bool(self.needs.queries)

    @property
    def two_stages(self) -> bool:
        """True if the scorer has a `first_stage`, whose entries stay before all others."""
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

    def observe(self, seen: Observed) -> Scores:
        """Float32 observations `[B, K, S]` of entries, such as attention received; `scores` turns them into scores.

        Args:
            seen: the layer, with what `needs` asked for. Entries past a length may hold anything.

        Returns:
            A number for each entry; entries past a sequence's length may get anything.
        """
        raise NotImplementedError

    def first_stage(self, seen: Observed) -> Int[Array, "B K S"]:
        """Ranks `i32[B, K, S]` in their head of the entries of the first stage, S for other entries; where `two_stages`.

        At most as many as a head's even part.
        """
        raise TypeError(
            f"{type(self).__name__} says it has two stages: write its method `first_stage`"
        )

    def require_fits(self, config: ModelConfig) -> None:
        """Raises ValueError for a model that this is not made for; passes by default."""

    def scores(self, observed: Scores, length: Int[Array, " B"]) -> Scores:
        """Float32 scores `[B, K, S]` by which entries are kept, higher first; the observations by default.

        Args:
            observed: from `observe`.
            length: tokens of each sequence.

        Returns:
            The scores. A prompt whose entries get NaN is rejected; where a cache is recompressed, such entries come last.
        """
        return observed


def check_scorer(label: str, scorer: Any) -> None:
    """Raises TypeError or ValueError unless `scorer` is an instance of `Scorer` with a hash and `observe`."""
    instance(label, scorer, Scorer, "give an instance of a subclass of jaxkv.policies.Scorer")
    if type(scorer).observe is Scorer.observe:
        raise TypeError(
            f"{label}={scorer!r}: it says nothing of entries: write its method `observe`"
        )
    needs = instance(f"{label}.needs", scorer.needs, Needs, "give Needs(queries=32), say")
    whole(f"{label}.needs.queries", needs.queries, least=0)
    choice(f"{label}.group", scorer.group, GroupReduce)
    static(label, scorer)
