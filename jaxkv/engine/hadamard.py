"""Hadamard transform of entries, with keys less their mean: it reduces the loss of 4-bit quantisation to a fifth.

The matrix is orthonormal: a transformed query times a transformed key equals the query times the key, and a sum of
transformed values is the transformed sum of values. A vector subtracted from all keys of a head shifts all logits of a
query by one number, which the softmax ignores. Attention and its scores are therefore unchanged, while no channel
dominates the others (QuaRot, arXiv:2404.00456, also transforms cached entries).
"""

from functools import cache

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.policies.parts import Parts
from jaxkv.sharding.mesh import ShardingMesh
from jaxkv.sharding.sharded_program import sharded_jit

# Number of last prompt tokens whose mean key is subtracted: rotary embeddings turn means with position, and near
# entries are attended to most. And zeros that count as keys in the mean, as few tokens say little about later keys.
_LAST = 1024
_PRIOR = 16


def uses_hadamard(parts: Parts) -> bool:
    """Return True if a policy's cache holds Hadamard-transformed entries: its store asks, and no part needs plain keys.

    Keys before RoPE, keys that mergers compare, and bounds of pages are not transformed.
    """
    keys = parts.merge is None or parts.merge.reference_count > 0
    plainly = keys and parts.read.reads_all_entries and not parts.rolling
    return parts.store.transformed and plainly


@cache
def hadamard_matrix(dim: int) -> Float[np.ndarray, "D D"]:
    """Return a symmetric orthonormal `f32[D, D]`: diagonal Hadamard blocks of the largest power of 2 that divides D."""
    size = dim & -dim
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(dim // size), block / np.sqrt(size)).astype(np.float32)


def apply_hadamard(x: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
    """Multiply vectors along the last axis by the Hadamard matrix, its own inverse, in float32; keep their dtype."""
    matrix = jnp.asarray(hadamard_matrix(x.shape[-1]))
    return jnp.matmul(x.astype(jnp.float32), matrix, precision=lax.Precision.HIGHEST).astype(
        x.dtype
    )


def centre_and_transform_keys(
    k: Float[Array, "B K N D"], centre: Float[Array, "B K D"]
) -> Float[Array, "B K N D"]:
    """Return keys as stored in the cache: less their head's `centre`, Hadamard-transformed, in the keys' dtype."""
    return apply_hadamard(k.astype(jnp.float32) - centre[:, :, None]).astype(k.dtype)


def restore_original_keys(
    stored: Float[Array, "B K N D"], centre: Float[Array, "B K D"]
) -> Float[Array, "B K N D"]:
    """Return original keys from stored ones: undo the Hadamard transform, then add the head's `centre`."""
    return (apply_hadamard(stored.astype(jnp.float32)) + centre[:, :, None]).astype(stored.dtype)


@sharded_jit(static=("axes",))
def compute_mean_key(
    k: Float[Array, "B K S D"], length: Int[Array, " B"], *, axes: ShardingMesh | None = None
) -> Float[Array, "B K D"]:
    """Compiled: return each kv head's float32 mean key `[B, K, D]` over a prompt's last 1,024 tokens and 16 zeros."""
    position = jnp.arange(k.shape[2], dtype=jnp.int32)
    last = (position < length[:, None]) & (position >= length[:, None] - _LAST)
    total = jnp.where(last[:, None, :, None], k.astype(jnp.float32), 0).sum(axis=2)
    return total / (jnp.minimum(length, _LAST)[:, None, None] + _PRIOR).astype(jnp.float32)


@sharded_jit(static=("axes",))
def apply_hadamard_to_entries(
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    centre: Float[Array, "B K D"],
    *,
    axes: ShardingMesh | None,
) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]:
    """Compiled: return a layer's keys, centred and Hadamard-transformed, and values, transformed, before packing."""
    return centre_and_transform_keys(k, centre), apply_hadamard(v)
