"""Sequences of a running batch: their arrays, which are copied into and out of slots."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from jaxkv._errors import invalid
from jaxkv.cache import Cache, KVCache
from jaxkv.engine.sampling import BatchSampling, Sampler, batch_sampling
from jaxkv.engine.token_loop import SamplingState
from jaxkv.sharding.mesh import settle_down


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """Arrays of B sequences: cache, sampling state, sampler."""

    cache: Cache
    sampling_state: SamplingState
    sampling: BatchSampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paused:
    """A sequence outside of any slot, to be inserted into a slot.

    Attributes:
        arrays: arrays of one sequence; on a mesh, of one per group.
        key: random key for policies that use random numbers in recompression.
        beyond: entries of the fullest segment beyond its limit, per group.
        left: free places behind the windows of sliding-window layers that evict, per group.
        done: True if the sequence samples no more tokens.
    """

    arrays: Sequences
    key: PRNGKeyArray
    beyond: Int[np.ndarray, " g"]
    left: Int[np.ndarray, " g"]
    done: bool


def sequences_of(
    cache: KVCache, new: int, sampling: Sampler, ends: Int[np.ndarray, " n"], key: PRNGKeyArray
) -> Sequences:
    """Return `Sequences` for slots from a cache; all have the same sampler, key, end ids and limit of `new` tokens.

    Args:
        cache: cache with logits.
        new: maximum number of tokens to sample.
        sampling: sampler of all sequences.
        ends: ids that end a sequence, padded with -2, which is no id.
        key: random key.

    Returns:
        The arrays, on the cache's devices.

    Raises:
        ValueError: for a cache without logits.
        TypeError: for a custom sampler.
    """
    logits, batch = cache.logits, cache.seen.shape[0]
    if logits is None:
        raise invalid("cache", "without logits", "give a cache from prefill or extend")
    sampling_state = SamplingState(
        logits=logits,
        done=jnp.asarray(np.zeros(batch, bool)),
        left=jnp.asarray(np.full(batch, new, np.int32)),
        key=jnp.broadcast_to(key, (batch,)),
        row=jnp.asarray(np.zeros(batch, np.int32)),
        ends=jnp.asarray(np.tile(ends, (batch, 1))),
    )
    sequences = Sequences(
        cache=cache.arrays,
        sampling_state=sampling_state,
        sampling=batch_sampling([sampling] * batch),
    )
    return settle_down(sequences, cache.axes)
