"""The one door to attention. Named implementations stand behind it; `xla` runs everywhere.

The same sum is needed in several shapes: `causal` (one sequence, block by block) and `prompts` (a batch at once) for
prefill, `over_pool` (queries against cached segments), and `merge` (two of them by log-sum-exp). `window_mass` looks at
the probabilities themselves.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention import columns, cudnn, xla
from jaxkv.attention.choice import (
    KERNELS,
    PREFILL_ONLY,
    Implementation,
    Implementations,
    capability_of,
    choose,
    named,
    over_rows,
)
from jaxkv.attention.columns import Received
from jaxkv.attention.kernels import dealt, kernels_of, mosaic_kernels, token_over_pool


def causal(
    q: Float[Array, "K G T D"],
    k: Float[Array, "K S D"],
    v: Float[Array, "K S D"],
    first: Int[Array, ""],
) -> tuple[Float[Array, "K G T D"], Float[Array, "K G T"]]:
    """Causal attention of T consecutive queries of one sequence against its keys.

    Args:
        q: rotated queries at positions first .. first + T; T divides S.
        k: rotated keys at positions 0 .. S; what lies past the queries is not read as more than zero weight.
        v: values, finite everywhere.
        first: position of the first query, a multiple of T.

    Returns:
        The output in q's dtype and the natural log-sum-exp of the scaled logits, float32.
    """
    return xla.causal(q, k, v, first)


def prompts(
    q: Float[Array, "B K G S D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    length: Int[Array, " B"],
    *,
    sums: bool = False,
    implementation: Implementation,
) -> tuple[Float[Array, "B K G S D"], Float[Array, "B K G S"] | None]:
    """Causal attention of a batch of whole prompts, padded on the right.

    Args:
        q: rotated queries.
        k: rotated keys.
        v: values, finite everywhere.
        length: tokens of each prompt; what padding's queries give is anything finite.
        sums: also say how much attention each key receives from all queries.
        implementation: what computes it.

    Returns:
        The output in q's dtype, and the sums over queries, float32, or None.
    """
    if implementation is not Implementation.XLA:
        kernels, interpret = kernels_of(implementation)
        first = jnp.zeros_like(length)
        if implementation is Implementation.CUDNN:
            out, lse = cudnn.causal(q, k, v, length, lse=sums)
        elif implementation is Implementation.MOSAIC:
            out, lse = mosaic_kernels().flash(q, k, v, first, length)
        else:
            out, lse = kernels.flash(q, k, v, first, length, interpret=interpret)
        if not sums:
            return out, None
        return out, kernels.column_sums(q, k, lse, first, length, per_query_head=True, interpret=interpret)

    def one(row):
        out, lse = xla.causal(row[0], row[1], row[2], jnp.int32(0))
        if not sums:
            return out, None
        counts = jnp.arange(q.shape[3], dtype=jnp.int32) < row[3]
        return out, columns.column_sums(row[0], row[1], jnp.where(counts, lse, jnp.inf), jnp.int32(0))

    return lax.map(one, (q, k, v, length))


def column_sums(
    q: Float[Array, "K G T D"],
    k: Float[Array, "K S D"],
    lse: Float[Array, "K G T"],
    first: Int[Array, ""],
) -> Float[Array, "K G S"]:
    """Attention that T consecutive queries of one sequence pay to each key, in blocks: memory is O(S), never T x S.

    Args:
        q: rotated queries at positions first .. first + T; T divides S.
        k: rotated keys at positions 0 .. S.
        lse: from `causal`; +inf for queries that do not count.
        first: position of the first query, a multiple of T.

    Returns:
        Sums of probabilities over the queries, float32.
    """
    return columns.column_sums(q, k, lse, first)


def over_pool(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B P D"],
    v: Float[Array, "B P D"],
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    *,
    walk: xla.Walk,
    implementation: Implementation = Implementation.XLA,
) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R"]]:
    """Attention of R queries per kv head against the whole of that head's segment.

    Args:
        q: rotated queries; R folds the group and, for several tokens, their number.
        k: pool rows, rotated keys.
        v: pool rows, finite everywhere.
        start: first row of each segment.
        length: rows of each segment; 0 gives output 0 and lse -inf.
        walk: how rows are reached, which decides the formulation in XLA.
        implementation: what computes it.

    Returns:
        The output in q's dtype and the natural log-sum-exp of the scaled logits, float32.
    """
    if implementation in KERNELS:
        kernels, interpret = kernels_of(implementation)
        return kernels.attend(q, k, v, start, length, interpret=interpret)
    return xla.over_pool(q, k, v, start, length, walk=walk)


def over_pool_scored(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B P D"],
    v: Float[Array, "B P D"],
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    score: Float[Array, "B P"],
    counts: Bool[Array, " B"],
    *,
    walk: xla.Walk,
    widest: int | None = None,
    other: Float[Array, "B K D"] | None = None,
    implementation: Implementation = Implementation.XLA,
) -> tuple[Float[Array, "B K R D"], Float[Array, "B P"] | Received]:
    """`over_pool`, and each row's score with the attention that it received added: the mean over the R queries.

    Args:
        q: as for `over_pool`; R is the group.
        k: pool rows, rotated keys.
        v: pool rows.
        start: first row of each segment.
        length: rows of each segment.
        score: what rows have received so far.
        counts: sequences whose queries are to be counted.
        walk: how rows are reached.
        widest: the most rows a segment of a shared pool can have, if that is known: then XLA reads keys once, and
            kernels keep logits of no more.
        other: one more row per segment to multiply with the keys where they are read once.
        implementation: what computes it.

    Returns:
        The output, and the scores; where keys are read once, what `add_received` makes them of.
    """
    if implementation in KERNELS:
        kernels, interpret = kernels_of(implementation)
        widest = k.shape[1] // q.shape[1] if walk is xla.Walk.STRIDES else widest
        options = {"score": score, "counts": counts, "widest": widest, "interpret": interpret}
        out, _, score = kernels.attend(q, k, v, start, length, **options)
        return out, score
    if walk is xla.Walk.WINDOWS and widest is not None:
        return columns.walk_scored(q, k, v, start, length, widest=widest, other=other)
    out, lse = xla.over_pool(q, k, v, start, length, walk=walk)
    lse = jnp.where(counts[:, None, None], lse, jnp.inf)
    return out, columns.pool_sums(q, k, lse, start, length, score, walk=walk, weight=1 / q.shape[2])


def add_received(
    score: Float[Array, "B P"], received: Received, start: Int[Array, "B K"], counts: Bool[Array, " B"]
) -> Float[Array, "B P"]:
    """The second half of `over_pool_scored`, which need not happen before anything else goes on.

    Args:
        score: what rows have received so far.
        received: from the first half.
        start: first row of each segment.
        counts: sequences whose queries are to be counted.

    Returns:
        The scores.
    """
    return columns.add_received(score, received, start, counts)


def pool_sums(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B P D"],
    lse: Float[Array, "B K R"],
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    score: Float[Array, "B P"],
    *,
    walk: xla.Walk,
    weight: float,
) -> Float[Array, "B P"]:
    """Adds the attention of a few queries, whose log-sum-exp over everything they see is known, to each row's score.

    Args:
        q: rotated queries; R folds the group and their number.
        k: pool rows, rotated keys.
        lse: log-sum-exp of each query over the pool and whatever else it sees; +inf for queries that do not count.
        start: first row of each segment.
        length: rows of each segment.
        score: what rows have received so far.
        walk: how rows are reached.
        weight: what each query counts.

    Returns:
        The scores.
    """
    return columns.pool_sums(q, k, lse, start, length, score, walk=walk, weight=weight)


def window_sums(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    first: Int[Array, " B"],
    length: Int[Array, " B"],
    *,
    implementation: Implementation,
) -> Float[Array, "B K S"]:
    """Attention probabilities of the last queries over all keys, summed over them: mean over the group.

    Args:
        q: rotated queries of the observation window.
        k: rotated keys at positions 0 .. S.
        first: position of each sequence's first query; negative ones do not exist (a prompt shorter than w).
        length: tokens of each prompt.
        implementation: what computes attention, XLA excepted: there, and for other reductions, there is `window_mass`.

    Returns:
        The sums, float32.
    """
    kernels, interpret = kernels_of(implementation)
    return kernels.window_sums(q, k, first, length, interpret=interpret)


def packed(
    k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], source: Int[Array, "B P"], *, implementation: Implementation
) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"], Int[Array, "B P"]]:
    """One layer's chosen rows, gathered in one pass.

    Args:
        k: keys as the pool stores them.
        v: values.
        source: head * S + position of each pool row; -1 where there is none.
        implementation: what gathers; cuDNN's place is taken by the kernels.

    Returns:
        Keys, values and positions of the pool; rows without a source are 0, 0 and -1.
    """
    if implementation is not Implementation.XLA:
        kernels, interpret = kernels_of(implementation)
        return kernels.compact(k, v, source, interpret=interpret)
    batch, heads, slots, dim = k.shape
    real = source >= 0
    at = jnp.where(real, source, 0)[..., None]
    take = lambda a: jnp.where(  # noqa: E731
        real[..., None], jnp.take_along_axis(a.reshape(batch, heads * slots, dim), at, axis=1), 0
    )
    return take(k), take(v), jnp.where(real, source % slots, -1)


def merge(
    out: Float[Array, "*n D"],
    lse: Float[Array, "*n"],
    other: Float[Array, "*n D"],
    other_lse: Float[Array, "*n"],
) -> Float[Array, "*n D"]:
    """Joins attention over two disjoint sets of keys: each part weighs as its share of the softmax's sum.

    Args:
        out: output over the first set, any float dtype.
        lse: its log-sum-exp, float32; -inf for an empty set.
        other: output over the second set; not both are empty.
        other_lse: its log-sum-exp.

    Returns:
        The output over both sets, in out's dtype.
    """
    share = jax.nn.sigmoid(lse - other_lse)[..., None]
    joined = out.astype(jnp.float32) * share + other.astype(jnp.float32) * (1 - share)
    return joined.astype(out.dtype)


def merge_with_lse(
    out: Float[Array, "*n D"],
    lse: Float[Array, "*n"],
    other: Float[Array, "*n D"],
    other_lse: Float[Array, "*n"],
) -> tuple[Float[Array, "*n D"], Float[Array, "*n"]]:
    """`merge` where both sets may be empty, with the log-sum-exp over both.

    Args:
        out: as for `merge`.
        lse: its log-sum-exp.
        other: as for `merge`.
        other_lse: its log-sum-exp.

    Returns:
        The output, and its log-sum-exp, -inf where both sets are empty.
    """
    both = jnp.logaddexp(lse, other_lse)
    nothing = jnp.isneginf(both)
    first, second = jnp.where(nothing, 0.0, lse), jnp.where(nothing, 0.0, other_lse)
    return merge(out, first, other, second), both


def probabilities(
    q: Float[Array, "G w D"], k: Float[Array, "S D"], position: Int[Array, " w"]
) -> Float[Array, "G w S"]:
    """Attention probabilities of a few queries of one kv head over all its keys.

    Args:
        q: rotated queries.
        k: rotated keys at positions 0 .. S.
        position: of each query; what a negative one pays, which does not exist, means nothing.

    Returns:
        The probabilities, float32; 0 behind the query.
    """
    return columns.probabilities(q, k, position)


def window_mass(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    reduce: Callable[[Float[Array, "G w S"], Int[Array, " w"]], Float[Array, " S"]],
) -> Float[Array, "B K S"]:
    """Attention probabilities of a few queries over all keys, reduced per kv head before they pile up.

    Args:
        q: rotated queries of the observation window.
        k: rotated keys at positions 0 .. S.
        positions: position of each query; negative marks a row that does not exist (a prompt shorter than w).
        reduce: takes one kv head's float32 probabilities `[G, w, S]` and its queries' positions to scores `[S]`.

    Returns:
        The reduced scores, float32.
    """
    return columns.window_mass(q, k, positions, reduce)


__all__ = [
    "KERNELS",
    "PREFILL_ONLY",
    "Implementations",
    "Implementation",
    "Received",
    "add_received",
    "capability_of",
    "causal",
    "choose",
    "column_sums",
    "dealt",
    "merge",
    "merge_with_lse",
    "named",
    "over_pool",
    "over_pool_scored",
    "over_rows",
    "packed",
    "pool_sums",
    "probabilities",
    "prompts",
    "token_over_pool",
    "window_mass",
    "window_sums",
]
