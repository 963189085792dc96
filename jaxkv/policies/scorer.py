"""`Scorer`, base of scorers of a layer's entries; `Needs`, what they declare; `ScorerInputs`, what they receive."""

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
from jaxkv._checks import (
    require_hashable,
    require_instance,
    validate_bool,
    validate_enum,
    validate_field,
    validate_int,
)
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention import Implementation, LogitShaping
from jaxkv.models.config import ModelConfig
from jaxkv.policies.gates import Gate
from jaxkv.policies.query_statistics import QueryStatistics
from jaxkv.policies.rank import ByNewScores, Rank
from jaxkv.sharding.mesh import ShardingMesh

# A number per entry; higher is kept.
Scores = Float[Array, "B K S"]


class GroupReduce(enum.Enum):
    """Enum of how the scores of a kv head's query heads are reduced to one score per entry: MEAN or MAX."""

    MEAN = "mean"
    MAX = "max"


class ReplayWeighting(enum.Enum):
    """Enum of what multiplies attention in a second pass: NONE, VALUES (KVzip+) or GRADIENTS (KVgrad).

    VALUES: the L2 norm of the value at the layer's output, over that of the query token's normed hidden state.
    GRADIENTS: the same norm of the value, times that of the gradient of half the top layer's summed squares, by the
    query token's hidden state after attention.
    """

    NONE = "none"
    VALUES = "values"
    GRADIENTS = "gradients"


@frozen_dataclass
class FutureQuerySettings:
    """Config of `QueryMoments`: skipped first tokens, positions after the text for RoPE, covariance or mean only.

    Attributes:
        skip: number of first tokens left out of the statistics.
        positions: number of positions after the text over which the rotation (RoPE) is averaged.
        covariance: compute the covariance as well as the mean.
    """

    skip: int = 0
    positions: int = 512
    covariance: bool = True

    def __post_init__(self) -> None:
        validate_field(self, "skip", validate_int, "give 0 or more first tokens", least=0)
        validate_field(self, "positions", validate_int, "average over at least 1 position")
        validate_field(self, "covariance", validate_bool)


@frozen_dataclass
class QueryPairSettings:
    """Config of `QueryPairs`: the model's statistics of queries; None takes those of the queries of `Needs.queries`."""

    statistics: QueryStatistics | None = None


@frozen_dataclass
class PromptReplay:
    """Config of KVzip's second pass over the prompt, on its full cache: chunk, sink and tail sizes, texts, weighting.

    The model repeats the prompt chunk by chunk. Only the attention that entries receive is kept of this pass.

    Attributes:
        chunk: tokens of the prompt in each chunk.
        sinks: first tokens of the prompt, which compete for attention with the entries of every chunk.
        tail: last tokens of the previous chunk, inserted between `following` and `closing`.
        first: text before the first chunk, or its token ids.
        following: text before each later chunk, or its token ids.
        closing: text between these and the chunk, or its token ids; None for the end of the user's turn and the start
            of the answer in the model's chat template, or a line break without a template.
        weighting: what multiplies attention.
    """

    chunk: int = 2048
    sinks: int = 4
    tail: int = 8
    first: str | tuple[int, ...] = "\n\nRepeat the previous context exactly."
    following: str | tuple[int, ...] = (
        "\n\nRepeat the part of the previous context exactly, starting with"
    )
    closing: str | tuple[int, ...] | None = None
    weighting: ReplayWeighting = ReplayWeighting.NONE

    def __post_init__(self) -> None:
        validate_field(self, "chunk", validate_int, "give chunks of at least 1 token")
        validate_field(self, "sinks", validate_int, "give 0 or more first tokens", least=0)
        validate_field(self, "tail", validate_int, "repeat 0 or more tokens", least=0)
        validate_field(self, "weighting", validate_enum, ReplayWeighting)
        for name in ("first", "following", "closing"):
            given = getattr(self, name)
            if isinstance(given, str) or (name == "closing" and given is None):
                continue
            remedy = "give text, or token ids, 0 or more"
            require_instance(name, given, (list, tuple, np.ndarray), remedy)
            ids = tuple(validate_int(name, each, remedy, least=0) for each in given)
            object.__setattr__(self, name, ids)

    @property
    def runs_backwards(self) -> bool:
        """True if each chunk also runs backwards through the layers, for gradients."""
        return self.weighting is ReplayWeighting.GRADIENTS


@jax.tree_util.register_dataclass
@frozen_dataclass
class QueryMoments:
    """Pytree of each query head's query mean and optional covariance, float32, with RoPE of positions after the text.

    Attributes:
        mean: `f32[B, K, G, D]`.
        covariance: `f32[B, K, G, D, D]`, divided by the number of queries; None if not requested.
    """

    mean: Float[Array, "B K G D"]
    covariance: Float[Array, "B K G D D"] | None


@jax.tree_util.register_dataclass
@frozen_dataclass
class QueryPairs:
    """Pytree of each query head's expected query after the text, and how far queries exceed it in each channel pair.

    Channel pairs (i, i + D/2) are those that RoPE rotates together.

    Attributes:
        mean: `f32[B, K, G, D]` mean query, with the mean RoPE of positions after the text.
        excess: `f32[B, K, G, D/2]` mean norm of each pair less the norm of its mean, times RoPE's attention factor.
    """

    mean: Float[Array, "B K G D"]
    excess: Float[Array, "B K G half"]


@frozen_dataclass
class BlockAttention:
    """Config of non-causal attention within blocks of a prompt; scorers receive its sum for each key.

    Attributes:
        size: tokens per block.
        first: number of first tokens outside all blocks.
        last: number of last tokens outside all blocks.
        zeros: kvpress' arithmetic: logits are not divided, and short blocks are padded by logits of 0.
    """

    size: int = 256
    first: int = 0
    last: int = 0
    zeros: bool = False

    def __post_init__(self) -> None:
        validate_field(self, "size", validate_int, "give blocks of at least 1 token")
        validate_field(self, "first", validate_int, "give 0 or more first tokens", least=0)
        validate_field(self, "last", validate_int, "give 0 or more last tokens", least=0)
        validate_field(self, "zeros", validate_bool)

    def compute_block_size(self, padded_len: int) -> int:
        """Return the tokens per block: `size`, limited to the padded prompt without `first` tokens, unless `zeros`."""
        return self.size if self.zeros else min(self.size, max(1, padded_len - self.first))


@frozen_dataclass
class Needs:
    """Inputs that a scorer needs in addition to keys and values; `ScorerInputs` has each under the same name.

    Attributes:
        queries: w, for `[B, K, G, w, D]` rotated queries of the last w tokens of each sequence; 0 for none.
        references: r, for `[B, K, G, r, D]` rotated queries of r tokens spread evenly over each sequence; 0 for none.
            With `replay`, of the tokens that repeat these, at positions after the sequence.
        sums: `f32[B, K, G, S]` attention that each key receives from all queries.
        norms: `f32[B, K, S]` L1 norms of values after the output projection, averaged over the group; in addition
            `seen.norm_totals`, `f32[B, K | 1, S]`, their sum over all kv heads that hold the entry's position.
        unrotated: `[B, K, S, D]` keys before RoPE.
        hidden: `[B, S, E]` hidden states that enter the layer's attention, after its norm.
        moments: settings of `QueryMoments`, mean and covariance of queries rotated to after the text; None for none.
        pairs: settings of `QueryPairs`, mean queries and norms of channel pairs (TriAttention); None for none.
        replay: settings of a second pass over the prompt: `f32[B, K, S]`, the largest attention of any of its queries
            to the entry, 0 for the first `sinks` entries; None for none.
        blocks: settings of `f32[B, K, G, S]`, the attention that each key receives from all queries of its block; None
            for none.
        gate: a trained gate, whose weights for the layer are provided; None for none.
    """

    queries: int = 0
    references: int = 0
    sums: bool = False
    norms: bool = False
    unrotated: bool = False
    hidden: bool = False
    moments: FutureQuerySettings | None = None
    pairs: QueryPairSettings | None = None
    replay: PromptReplay | None = None
    blocks: BlockAttention | None = None
    gate: Gate | None = None

    @property
    def requested_inputs(self) -> tuple[str, ...]:
        """Names of the needed inputs, each a key of `ScorerInputs.extras`."""
        names = (each.name for each in dataclasses.fields(self))
        return tuple(name for name in names if getattr(self, name))

    @property
    def uses_query_heads(self) -> bool:
        """True if inputs from a group's query heads are requested, such as queries, sums, moments or pairs."""
        observed = (self.queries, self.references, self.sums, self.moments, self.pairs)
        return any(observed) or bool(self.replay or self.blocks)


class ExtraInputs(TypedDict, total=False):
    """TypedDict of a scorer's extra inputs by their names in `Needs`; the shapes determine their sharding."""

    queries: Float[Array, "B K G w D"]
    references: Float[Array, "B K G r D"]
    sums: Float[Array, "B K G S"]
    norms: Float[Array, "B K S"]
    norm_totals: Float[Array, "B #K S"]  # noqa: F821
    unrotated: Float[Array, "B K S D"]
    hidden: Float[Array, "B S E"]
    moments: QueryMoments
    pairs: QueryPairs
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
@frozen_dataclass
class ScorerInputs:
    """Pytree input of `Scorer.score_entries`: one layer of right-padded prompts, with the inputs of `Needs`.

    Attributes:
        q_positions: `i32[B, w]` positions of the last w tokens, w being `Needs.queries`; negative before the start of
            a shorter prompt.
        k: `[B, K, S, D]` rotated keys.
        v: `[B, K, S, D]` values.
        length: `i32[B]` tokens of each sequence.
        layer: `i32[]` index of the layer.
        key: random key of this call, if the scorer uses random numbers.
        extras: requested inputs by their names in `Needs`; `seen.sums` is `seen.extras["sums"]`.
        sink_logits: `[B, K, G]` learned logits in the layer's softmax, without a value; None for none.
        softcap: c, if attention logits become c * tanh(logits / c); None if not.
        implementation: of attention: `Implementation.XLA` or a kernel library.
        axes: mesh axes over which the K kv heads, and the G query heads of each, are sharded; None if one device has
            them all, or each kv head is a sequence of its own.
        group_axes: mesh axes over which the query heads of a kv head are sharded, also if `axes` is None.
    """

    q_positions: Int[Array, "B w"]
    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    length: Int[Array, " B"]
    layer: Int[Array, ""]
    key: PRNGKeyArray
    extras: ExtraInputs = dataclasses.field(default_factory=ExtraInputs)
    sink_logits: Float[Array, "B K G"] | None = None
    softcap: float | None = None
    implementation: Implementation = Implementation.XLA
    axes: ShardingMesh | None = None
    group_axes: ShardingMesh | None = None

    def __getattr__(self, name: str) -> Any:
        """Return the extra input of this name in `Needs`; AttributeError if not requested or not available."""
        extras: Any = self.__dict__.get("extras", {})
        if name not in extras:
            remedy = f"give the scorer needs = Needs({name}=...); recompression provides fewer"
            raise AttributeError(f"seen.{name}: not among the requested inputs: {remedy}")
        return extras[name]

    def reduce_window_attention(self, reduce: Callable[..., Array], *of_heads: Array) -> Array:
        """Return `reduce` of each kv head's attention probabilities of the last queries, stacked to `[B, K, ...]`.

        Args:
            reduce: function from one kv head's probabilities `[G, w, S]`, the queries' positions and the head's slices
                of `of_heads` to its statistic.
            *of_heads: arrays `[B, K, ...]`.

        Returns:
            The statistic.
        """
        return attention.reduce_window_attention(
            self.queries,
            self.k,
            self.q_positions,
            reduce,
            *of_heads,
            shaping=self.attention_shaping,
        )

    def mask_entries_between(self, first: int = 0, last: int = 0) -> Bool[Array, "B 1 S"]:
        """Return the mask `[B, 1, S]`: False for padding, `first` first and `last` last entries, else True."""
        index = self.entry_positions
        inside = index < (self.length - last)[:, None, None]
        return inside & (index >= first) if first else inside

    @property
    def entry_positions(self) -> Int[Array, " S"]:
        """Positions of the entries in the padded prompt, `i32[S]`: 0 to S - 1."""
        return jnp.arange(self.k.shape[2], dtype=jnp.int32)

    @property
    def attention_shaping(self) -> LogitShaping:
        """`LogitShaping` of the layer's attention logits: softcap, and sink logits `[B, K, G]`."""
        return LogitShaping(softcap=self.softcap, sink_logits=self.sink_logits)


class Scorer:
    """Base of scorers, which score the entries of each kv head: entries of higher scores are kept.

    Subclass it in a frozen dataclass and write `score_entries`:

    ```python
    @dataclasses.dataclass(frozen=True)
    class KeyNorm(Scorer):
        def score_entries(self, seen):
            return -jnp.linalg.norm(seen.k.astype(jnp.float32), axis=-1)
    ```

    Request inputs other than keys and values by `needs`; `seen` has each under the same name:

    ```python
    @dataclasses.dataclass(frozen=True)
    class Received(Scorer):
        needs: ClassVar[Needs] = Needs(sums=True)

        def score_entries(self, seen):
            return seen.sums.mean(axis=2)
    ```

    On a mesh, `score_entries` runs on every device, for the device's heads: a scorer that treats each head alone needs
    no change. A scorer that compares heads, or uses random numbers, finds the mesh axes in `seen.axes`. The functions
    of jaxkv.sharding.collectives help: `all_gather_shards(x, "K", 1, seen.axes)` all-gathers the numbers of all kv
    heads, `slice_own_shard` selects the device's.
    """

    @property
    def needs(self) -> Needs:
        """`Needs` of the scorer: inputs in addition to keys and values, such as last queries; none by default."""
        return Needs()

    @property
    def group(self) -> GroupReduce | str:
        """`GroupReduce`, or its value: how a kv head's query heads are reduced, also over devices; MEAN by default."""
        return GroupReduce.MEAN

    @property
    def uses_random_key(self) -> bool:
        """True if the scorer uses random numbers, from `seen.key`; False by default."""
        return False

    @property
    def follows_last_queries(self) -> bool:
        """True if scores follow the attention of a prompt's last queries; by default, if `needs.queries` is not 0.

        `jaxkv.prefill` then warns for documents whose questions come later: entries that they need may be evicted.
        Override this for a scorer that uses these queries but keeps other entries, for example by their worst case.
        """
        return bool(self.needs.queries)

    @property
    def has_first_stage(self) -> bool:
        """True if the scorer has a first stage of entries, kept before all others; False by default."""
        return False

    @property
    def compares_keys(self) -> bool:
        """True if the scorer compares each key with all others, so that plans add memory; False by default."""
        return False

    @property
    def model_layer_count(self) -> int | None:
        """Number of layers of the model that the scorer belongs to; None, the default, for any model."""
        return None

    @property
    def eviction_rank(self) -> Rank:
        """`Rank` by which scores change while decoding; by default `ByNewScores()`, which scores again."""
        return ByNewScores()

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return float32 raw scores `[B, K, S]` of entries, such as attention received; subclasses implement it.

        Args:
            seen: the layer, with the inputs of `needs`. Entries past a length are arbitrary.

        Returns:
            A number for each entry; arbitrary past a sequence's length.
        """
        raise NotImplementedError

    def rank_first_stage(self, seen: ScorerInputs) -> Int[Array, "B K S"]:
        """Return int32 ranks `[B, K, S]` of a head's first-stage entries, S for all others; TypeError by default.

        Called if `has_first_stage`. The first stage has at most a head's even share of the layer budget.
        """
        raise TypeError(
            f"{type(self).__name__} has `has_first_stage` without `rank_first_stage`: write the method"
        )

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError if the model does not fit this scorer; by default every model fits."""

    def finalise_scores(self, observed: Scores, length: Int[Array, " B"]) -> Scores:
        """Return final float32 scores `[B, K, S]` from raw ones, for example pooled; by default unchanged.

        Args:
            observed: from `score_entries`.
            length: tokens of each sequence.

        Returns:
            The scores. A prompt with NaN scores is rejected; in recompression NaN ranks last.
        """
        return observed


def compute_reference_positions(length: Int[Array, " B"], count: int) -> Int[Array, "B r"]:
    """Return the positions of `Needs.references` queries: `count` of them, spread evenly over each sequence."""
    return jnp.arange(count, dtype=jnp.int32) * length[:, None] // count


def check_scorer(label: str, scorer: Any) -> None:
    """Raise TypeError or ValueError unless `scorer` is a hashable `Scorer` with valid needs, group, `score_entries`."""
    require_instance(
        label, scorer, Scorer, "give an instance of a subclass of jaxkv.policies.Scorer"
    )
    if type(scorer).score_entries is Scorer.score_entries:
        raise TypeError(f"{label}={scorer!r}: no scores without `score_entries`: write the method")
    needs = require_instance(
        f"{label}.needs", scorer.needs, Needs, "give Needs(queries=32), for example"
    )
    validate_int(f"{label}.needs.queries", needs.queries, least=0)
    validate_enum(f"{label}.group", scorer.group, GroupReduce)
    require_hashable(label, scorer)
