"""Sequences of a running batch: everything that belongs to each, so that it can join, leave and be put aside."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from jaxkv._errors import require
from jaxkv.cache import Cache, KVCache
from jaxkv.engine.loop import Draw
from jaxkv.sampling import Mixed, Sampling, mixed
from jaxkv.sharding.mesh import settle_down


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """Arrays of some sequences: their cache, how each is sampled, and how many rows wait beside its pools.

    Attributes:
        cache: pools, where their rows lie, and what the policy remembers.
        draw: logits, random key, end tokens and tokens left of each.
        sampling: the sampler of each.
        written: `i32[B]` rows of the tails that each has, where the program keeps tails.
    """

    cache: Cache
    draw: Draw
    sampling: Mixed
    written: Int[jax.Array, " B"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paused:
    """A sequence outside of any slot, to be inserted into one: fresh from a prompt, or taken out of a slot.

    Attributes:
        arrays: on a mesh of one sequence in each group.
        key: for policies that draw when they compress again.
        beyond: `i64[g]` rows that its fullest segment holds beyond its limit, of the sequence in each group.
        done: it has drawn all it may.
    """

    arrays: Sequences
    key: PRNGKeyArray
    beyond: Int[np.ndarray, " g"]
    done: bool


def sequences_of(
    cache: KVCache, new: int, sampling: Sampling, ends: Int[np.ndarray, " n"], key: PRNGKeyArray
) -> Sequences:
    """The arrays of a cache's sequences, all of which are drawn alike.

    Args:
        cache: with logits.
        new: tokens that each may draw.
        sampling: one of jaxkv's own samplers.
        ends: ids that end each, -2 for none.
        key: random key of each.

    Returns:
        The arrays, on the devices of the cache.

    Raises:
        ValueError: for a cache without logits.
        TypeError: for a user's own sampler.
    """
    logits, batch = cache.logits, cache.seen.shape[0]
    require(logits is not None, "cache", "without logits", "give what prefill or extend returned")
    assert logits is not None
    draw = Draw(
        logits=logits,
        done=jnp.asarray(np.zeros(batch, bool)),
        left=jnp.asarray(np.full(batch, new, np.int32)),
        key=jnp.broadcast_to(key, (batch,)),
        row=jnp.asarray(np.zeros(batch, np.int32)),
        ends=jnp.asarray(np.tile(ends, (batch, 1))),
    )
    written, alike = jnp.asarray(np.zeros(batch, np.int32)), mixed([sampling] * batch)
    made = Sequences(cache=cache.arrays, draw=draw, sampling=alike, written=written)
    return settle_down(made, cache.axes)
