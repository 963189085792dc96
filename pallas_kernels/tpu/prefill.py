"""Causal attention of complete prompts for TPUs, by JAX's splash attention kernel."""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import _compat_tpu as tpu

# Maximum queries per block, keys per block and keys per product: the largest that divide the prompt are used.
QUERIES = 1024
KEYS = 2048
_AT_ONCE = 512
# Maximum tokens of all prompts whose log-sum-exps are computed together, or one prompt's.
_TOKENS = 32768
# Minimum block: a register's lanes.
_LEAST = 128


def supports_prompt(slots: int, dtype: jax.typing.DTypeLike) -> bool:
    """True if the TPU kernel supports prompts of `slots` tokens with padding: a multiple of 128, in bfloat16.

    Products of float32 numbers are rounded to bfloat16.
    """
    return jnp.dtype(dtype) == jnp.bfloat16 and slots % _LEAST == 0


def flash(
    q: Array,
    k: Array,
    v: Array,
    *,
    lse: bool,
    softcap: float | None = None,
    window: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """Compute causal attention of right-padded prompts, on a TPU; return output and log-sum-exp (None unless `lse`).

    Padding needs no mask: no query sees a later key.

    Args:
        q: `bf16[B, K, G, S, D]` rotated queries; S is a multiple of 128.
        k: `bf16[B, K, S, D]` rotated keys.
        v: `bf16[B, K, S, D]` values, finite everywhere.
        lse: True to return the log-sum-exp.
        softcap: c, which maps scaled logits to c * tanh(logits / c); None for none.
        window: sliding window in tokens, the query's own included; None for all.
        interpret: True runs on any device, for tests.

    Returns:
        The output like q, and `f32[B, K, G, S]` natural log-sum-exp of the scaled logits, or None.
    """
    batch, heads, group, slots, dim = q.shape
    queries, keys = (_choose_block_size(slots, most) for most in (QUERIES, KEYS))
    run = tpu.make_splash_attention(
        heads * group,
        slots,
        blocks=(queries, keys, min(keys, _AT_ONCE)),
        lse=lse,
        softcap=softcap,
        window=window,
        interpret=interpret,
    )

    def attend_within_prompt(of):
        """Scale a prompt's queries by 1 / sqrt(D) and compute its causal attention; return output and log-sum-exp."""
        scaled = (of[0].astype(jnp.float32) / math.sqrt(dim)).astype(q.dtype)
        return run(scaled.reshape(heads * group, slots, dim), *of[1:])

    if lse:
        # The kernel returns 128 copies of each number, so prompts of 32,768 tokens run one at a time.
        out, total = lax.map(
            attend_within_prompt, (q, k, v), batch_size=count_batched_tokens(batch, slots) // slots
        )
    else:
        out, total = jax.vmap(attend_within_prompt)((q, k, v))
    return out.reshape(q.shape), None if total is None else total.reshape(q.shape[:-1])


def count_batched_tokens(prompts: int, slots: int) -> int:
    """Return how many tokens are processed together if log-sum-exps are returned: up to 32,768, or one prompt's."""
    return slots * max(1, min(prompts, _TOKENS // slots))


def _choose_block_size(slots: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides the padded length `slots`."""
    return min(most, slots & -slots)
