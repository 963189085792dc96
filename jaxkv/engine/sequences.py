"""Sequences of a running batch: their arrays, which are copied into and out of slots."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import build_value_error
from jaxkv.cache import CacheArrays, KVCache
from jaxkv.engine.sampling import BatchSampling, Sampler, combine_samplers
from jaxkv.engine.sampling_extras import SamplingExtras
from jaxkv.engine.token_loop import SamplingState
from jaxkv.sharding.mesh import place_dataclass_on_mesh


@jax.tree_util.register_dataclass
@frozen_dataclass
class SequenceArrays:
    """Pytree of B sequences of a running batch: cache arrays, sampling state, sampler's parameters."""

    cache: CacheArrays
    sampling_state: SamplingState
    sampling: BatchSampling


@frozen_dataclass
class PausedSequence:
    """A sequence outside of any slot: its arrays, random key and counters, to be inserted into a slot.

    Attributes:
        arrays: arrays of one sequence; on a mesh, of one per group.
        key: random key for policies that use random numbers in recompression.
        beyond: entries of the fullest segment beyond its limit, per group.
        left: free places behind the windows of sliding-window layers that evict, per group.
        done: True if the sequence samples no more tokens.
        extras: its arrays for penalties, biases and log-probabilities; None if it needs none.
    """

    arrays: SequenceArrays
    key: PRNGKeyArray
    beyond: Int[np.ndarray, " g"]
    left: Int[np.ndarray, " g"]
    done: bool
    extras: SamplingExtras | None = None


def create_sequences(
    cache: KVCache, new: int, sampling: Sampler, ends: Int[np.ndarray, " n"], key: PRNGKeyArray
) -> SequenceArrays:
    """Return `SequenceArrays` of a cache with logits; all get one `Sampling`, key, end ids and limit of `new` tokens.

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
    logits = cache.logits
    batch = cache.seen.shape[0]
    if logits is None:
        raise build_value_error("cache", "without logits", "give a cache from prefill or extend")
    sampling_state = SamplingState(
        logits=logits,
        done=jnp.asarray(np.zeros(batch, bool)),
        left=jnp.asarray(np.full(batch, new, np.int32)),
        key=jnp.broadcast_to(key, (batch,)),
        row=jnp.asarray(np.zeros(batch, np.int32)),
        ends=jnp.asarray(np.tile(ends, (batch, 1))),
    )
    sequences = SequenceArrays(
        cache=cache.arrays,
        sampling_state=sampling_state,
        sampling=combine_samplers([sampling] * batch),
    )
    return place_dataclass_on_mesh(sequences, cache.axes)
