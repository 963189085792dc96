"""The one door to attention. Named implementations stand behind it; `xla` runs everywhere.

The same sum is needed in several shapes: `causal` (one sequence, block by block) and `prompts` (a batch at once) for
prefill, `over_pool` (queries against cached segments), and `merge` (two of them by log-sum-exp). `window_mass` looks at
the probabilities themselves.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.attention import xla
from jaxkv.attention.choice import KERNELS, Chosen, Implementation, choose, named


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
    implementation: Implementation,
) -> Float[Array, "B K G S D"]:
    """Causal attention of a batch of whole prompts, padded on the right.

    Args:
        q: rotated queries.
        k: rotated keys.
        v: values, finite everywhere.
        length: tokens of each prompt; what padding's queries give is anything finite.
        implementation: what computes it.

    Returns:
        The output in q's dtype.
    """
    if implementation in KERNELS:
        kernels, interpret = _kernels(implementation)
        return kernels.flash(q, k, v, jnp.zeros_like(length), length, interpret=interpret)[0]
    if implementation is Implementation.CUDNN:
        batch, heads, group, slots, dim = q.shape
        by_token = lambda a: jnp.swapaxes(a.reshape(batch, -1, slots, dim), 1, 2)  # noqa: E731
        out = jax.nn.dot_product_attention(
            by_token(q),
            by_token(k),
            by_token(v),
            is_causal=True,
            query_seq_lengths=length,
            key_value_seq_lengths=length,
            implementation="cudnn",
        )
        out = jnp.swapaxes(out, 1, 2).reshape(q.shape)
        real = jnp.arange(slots, dtype=jnp.int32) < length[:, None]
        return jnp.where(real[:, None, None, :, None], out, 0)
    return lax.map(lambda row: xla.causal(row[0], row[1], row[2], jnp.int32(0))[0], (q, k, v))


def over_pool(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B P D"],
    v: Float[Array, "B P D"],
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    *,
    form: xla.Form,
    implementation: Implementation = Implementation.XLA,
) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R"]]:
    """Attention of R queries per kv head against the whole of that head's segment.

    Args:
        q: rotated queries; R folds the group and, for several tokens, their number.
        k: pool rows, rotated keys.
        v: pool rows, finite everywhere.
        start: first row of each segment.
        length: rows of each segment; 0 gives output 0 and lse -inf.
        form: how segments lie in the pool, which decides the formulation in XLA.
        implementation: what computes it.

    Returns:
        The output in q's dtype and the natural log-sum-exp of the scaled logits, float32.
    """
    if implementation in KERNELS:
        kernels, interpret = _kernels(implementation)
        return kernels.attend(q, k, v, start, length, interpret=interpret)
    return xla.over_pool(q, k, v, start, length, form=form)


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
        implementation: one of the kernels; elsewhere, and for other reductions, there is `window_mass`.

    Returns:
        The sums, float32.
    """
    kernels, interpret = _kernels(implementation)
    # Keys stand in for values, which nobody looks at: the log-sum-exp of a few queries is cheap to have once more.
    _, lse = kernels.flash(q, k, k, first, length, interpret=interpret)
    return kernels.column_sums(q, k, lse, first, length, interpret=interpret)


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
        kernels, interpret = _kernels(implementation)
        return kernels.compact(k, v, source, interpret=interpret)
    batch, heads, slots, dim = k.shape
    real = source >= 0
    at = jnp.where(real, source, 0)[..., None]
    take = lambda a: jnp.where(  # noqa: E731
        real[..., None], jnp.take_along_axis(a.reshape(batch, heads * slots, dim), at, axis=1), 0
    )
    return take(k), take(v), jnp.where(real, source % slots, -1)


def _kernels(implementation: Implementation):
    # Pallas takes half a second and tens of megabytes to import, which nobody pays who does not use it.
    import pallas_kernels

    return pallas_kernels, implementation is Implementation.INTERPRETED


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
        other: output over the second set, which must not be empty.
        other_lse: its log-sum-exp.

    Returns:
        The output over both sets, in out's dtype.
    """
    share = jax.nn.sigmoid(lse - other_lse)[..., None]
    joined = out.astype(jnp.float32) * share + other.astype(jnp.float32) * (1 - share)
    return joined.astype(out.dtype)


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
    return xla.window_mass(q, k, positions, reduce)


__all__ = [
    "KERNELS",
    "Chosen",
    "Implementation",
    "causal",
    "choose",
    "merge",
    "named",
    "over_pool",
    "packed",
    "prompts",
    "window_mass",
    "window_sums",
]
