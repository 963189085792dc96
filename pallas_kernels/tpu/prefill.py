"""Causal attention of whole prompts for TPUs, by the splash attention kernel that comes with JAX."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tpu import _compat as tpu

# Queries and keys of a block, and keys multiplied at once, at most: the largest that divide the prompt are taken.
QUERIES, KEYS, _AT_ONCE = 1024, 2048, 512
# Tokens of all prompts whose log-sum-exp are made at once, at most, or one prompt's.
_TOKENS = 32768
# Least block: a register's lanes.
_LEAST = 128


def takes(slots: int, dtype: jax.typing.DTypeLike) -> bool:
    """True if the kernel takes prompts padded to `slots` tokens: whole blocks, of bfloat16.

    Its products of float32 numbers are rounded to bfloat16.
    """
    return jnp.dtype(dtype) == jnp.bfloat16 and slots % _LEAST == 0


def flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    lse: bool,
    softcap: float | None = None,
    window: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Causal attention of right-padded prompts; returns output and log-sum-exp (None unless `lse`).

    Padding needs no mask: no query sees a later key.

    Args:
        q: `bf16[B, K, G, S, D]` rotated queries; S is a multiple of 128.
        k: `bf16[B, K, S, D]` rotated keys.
        v: `bf16[B, K, S, D]` values, finite everywhere.
        lse: True to return the log-sum-exp, too.
        softcap: of the scaled logits, which become softcap * tanh(logits / softcap); None for none.
        window: number of last keys that a query attends to, its own included; None for all.
        interpret: run on any device, to check it.

    Returns:
        The output like q, and `f32[B, K, G, S]` natural log-sum-exp of the scaled logits, or None.
    """
    batch, heads, group, slots, dim = q.shape
    queries, keys = (_block(slots, most) for most in (QUERIES, KEYS))
    run = tpu.splash(
        heads * group,
        slots,
        blocks=(queries, keys, min(keys, _AT_ONCE)),
        lse=lse,
        softcap=softcap,
        window=window,
        interpret=interpret,
    )

    def one(of):
        """Mapped over prompts: attention of one."""
        scaled = (of[0].astype(jnp.float32) / math.sqrt(dim)).astype(q.dtype)
        return run(scaled.reshape(heads * group, slots, dim), *of[1:])

    if lse:
        # The kernel gives 128 copies of each number: of prompts of 32,768 tokens, one at a time.
        out, total = lax.map(one, (q, k, v), batch_size=tokens_at_once(batch, slots) // slots)
    else:
        out, total = jax.vmap(one)((q, k, v))
    return out.reshape(q.shape), None if total is None else total.reshape(q.shape[:-1])


def tokens_at_once(prompts: int, slots: int) -> int:
    """Tokens of the prompts whose log-sum-exp are computed together: `_TOKENS` at most, or one prompt's."""
    return slots * max(1, min(prompts, _TOKENS // slots))


def _block(slots: int, most: int) -> int:
    """Largest power of two up to `most` that divides `slots`."""
    return min(most, slots & -slots)
