"""Entries transformed by a Hadamard matrix, keys less their mean: 4 bits an element then lose a fifth of what they lose.

The matrix is orthonormal: a transformed query times a transformed key is the query times the key, and a sum of
transformed values is the transformed sum of values. A vector taken off all keys of a head moves all logits of a query
by one number, which no softmax sees. So attention, and scores made of it, stay what they are, while no channel outlies
the others any more (QuaRot, arXiv:2404.00456, transforms cached entries as well).
"""

from functools import cache

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.policies.parts import Parts
from jaxkv.sharding.mesh import Axes
from jaxkv.sharding.sharded_program import sharded_jit

# Tokens of a prompt's end whose keys' mean is taken off: rotary embeddings turn means with the position, and near entries
# are attended to most. And zeros that count as keys in it: few tokens say little about the keys to come.
_LAST, _PRIOR = 1024, 16


def transforms(parts: Parts) -> bool:
    """True if the cache of a policy holds transformed entries: its store asks for it, and nothing compares keys.

    Keys before RoPE, keys that mergers compare and bounds of pages stay as they are.
    """
    plainly = parts.merge is None and parts.read.everything and not parts.rolling
    return parts.store.transformed and plainly


@cache
def hadamard_matrix(dim: int) -> Float[np.ndarray, "D D"]:
    """Orthonormal, symmetric matrix: blocks of Hadamard's, as large as the largest power of 2 that divides `dim`."""
    size, block = dim & -dim, np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(dim // size), block / np.sqrt(size)).astype(np.float32)


def transformed(x: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
    """Vectors times the Hadamard matrix, which is its own inverse; in float32, returned in their dtype."""
    matrix = jnp.asarray(hadamard_matrix(x.shape[-1]))
    return jnp.matmul(x.astype(jnp.float32), matrix, precision=lax.Precision.HIGHEST).astype(
        x.dtype
    )


def stored_keys(
    k: Float[Array, "B K N D"], centre: Float[Array, "B K D"]
) -> Float[Array, "B K N D"]:
    """Keys as the cache holds them: less their head's `centre`, and transformed; in the keys' dtype."""
    return transformed(k.astype(jnp.float32) - centre[:, :, None]).astype(k.dtype)


def keys_of(
    stored: Float[Array, "B K N D"], centre: Float[Array, "B K D"]
) -> Float[Array, "B K N D"]:
    """Keys that `stored_keys` made into stored ones; in their dtype."""
    return (transformed(stored.astype(jnp.float32)) + centre[:, :, None]).astype(stored.dtype)


@sharded_jit(static=("axes",))
def centre_of(
    k: Float[Array, "B K S D"], length: Int[Array, " B"], *, axes: Axes | None = None
) -> Float[Array, "B K D"]:
    """Compiled: float32 mean of each kv head's keys over a prompt's last 1,024 tokens, and over 16 zeros."""
    position = jnp.arange(k.shape[2], dtype=jnp.int32)
    last = (position < length[:, None]) & (position >= length[:, None] - _LAST)
    total = jnp.where(last[:, None, :, None], k.astype(jnp.float32), 0).sum(axis=2)
    return total / (jnp.minimum(length, _LAST)[:, None, None] + _PRIOR).astype(jnp.float32)


@sharded_jit(static=("axes",))
def transformed_rows(
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    centre: Float[Array, "B K D"],
    *,
    axes: Axes | None,
) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]:
    """Compiled: a layer's keys by `stored_keys`, and values transformed, before they are packed."""
    return stored_keys(k, centre), transformed(v)
