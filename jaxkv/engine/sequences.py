"""Sequences of a running batch: their arrays, which are copied into slots and out again."""

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
    """Arrays of B sequences in slots: cache, sampling state, sampler."""

    cache: Cache
    sampling_state: SamplingState
    sampling: BatchSampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paused:
    """A sequence outside of any slot (its arrays, random key, whether it is done), to be inserted into a slot.

    Arrays are of one sequence, on a mesh of one in each group, for each of which `beyond` counts entries of its fullest
    segment beyond the limit, and `left` entries that are free behind each window of sliding-window layers that slide. `key` is for
    policies that use random numbers when they recompress; `done` if it samples no more.
    """

    arrays: Sequences
    key: PRNGKeyArray
    beyond: Int[np.ndarray, " g"]
    left: Int[np.ndarray, " g"]
    done: bool


def sequences_of(
    cache: KVCache, new: int, sampling: Sampler, ends: Int[np.ndarray, " n"], key: PRNGKeyArray
) -> Sequences:
    """Makes `Sequences` for slots from a cache; all sample up to `new` tokens with the same sampler, key and end ids.

    `ends` are padded with -2, which is no id.

    Raises:
        ValueError: for a cache without logits.
        TypeError: for a user's own sampler.
    """
    logits, batch = cache.logits, cache.seen.shape[0]
    if logits is None:
        raise invalid("cache", "without logits", "give what prefill or extend returned")
    sampling_state = SamplingState(
        logits=logits,
        done=jnp.asarray(np.zeros(batch, bool)),
        left=jnp.asarray(np.full(batch, new, np.int32)),
        key=jnp.broadcast_to(key, (batch,)),
        row=jnp.asarray(np.zeros(batch, np.int32)),
        ends=jnp.asarray(np.tile(ends, (batch, 1))),
    )
    made = Sequences(
        cache=cache.arrays,
        sampling_state=sampling_state,
        sampling=batch_sampling([sampling] * batch),
    )
    return settle_down(made, cache.axes)
