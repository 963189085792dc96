"""The one door to attention. Named implementations stand behind it; `xla` runs everywhere.

Three shapes of the same sum are needed: `causal` (prefill, and new rows among themselves), `over_pool` (queries
against cached segments) and `merge` (both by log-sum-exp). `window_mass` looks at the probabilities themselves.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.attention import xla

IMPLEMENTATION = "xla"


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


def over_pool(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B P D"],
    v: Float[Array, "B P D"],
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    *,
    form: xla.Form,
) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R"]]:
    """Attention of R queries per kv head against the whole of that head's segment.

    Args:
        q: rotated queries; R folds the group and, for several tokens, their number.
        k: pool rows, rotated keys.
        v: pool rows, finite everywhere.
        start: first row of each segment.
        length: rows of each segment; 0 gives output 0 and lse -inf.
        form: how segments lie in the pool, which decides the formulation (`xla.form_of`).

    Returns:
        The output in q's dtype and the natural log-sum-exp of the scaled logits, float32.
    """
    return xla.over_pool(q, k, v, start, length, form=form)


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


__all__ = ["IMPLEMENTATION", "causal", "merge", "over_pool", "window_mass"]
