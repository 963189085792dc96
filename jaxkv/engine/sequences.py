"""Sequences of a running batch: their arrays, which are copied into slots and out again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from jaxkv._errors import refusal
from jaxkv.cache import Cache, KVCache
from jaxkv.engine.loop import Draw
from jaxkv.engine.sampling import Mixed, Sampler, mixed
from jaxkv.sharding.mesh import settle_down


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """Arrays of B sequences in slots: cache, sampling state, sampler."""

    cache: Cache
    draw: Draw
    sampling: Mixed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paused:
    """A sequence outside of any slot (its arrays, random key, whether it is done), to be inserted into a slot.

    Arrays are of one sequence, on a mesh of one in each group, for each of which `beyond` counts rows of its fullest
    segment beyond the limit, and `left` rows that are free behind each window of window layers that slide. `key` is for
    policies that draw when they compress again; `done` if it draws no more.
    """

    arrays: Sequences
    key: PRNGKeyArray
    beyond: Int[np.ndarray, " g"]
    left: Int[np.ndarray, " g"]
    done: bool


def sequences_of(
    cache: KVCache, new: int, sampling: Sampler, ends: Int[np.ndarray, " n"], key: PRNGKeyArray
) -> Sequences:
    """Makes `Sequences` for slots from a cache; all draw up to `new` tokens with the same sampler, key and end ids.

    `ends` are padded with -2, which is no id.

    Raises:
        ValueError: for a cache without logits.
        TypeError: for a user's own sampler.
    """
    logits, batch = cache.logits, cache.seen.shape[0]
    if logits is None:
        raise refusal("cache", "without logits", "give what prefill or extend returned")
    draw = Draw(
        logits=logits,
        done=jnp.asarray(np.zeros(batch, bool)),
        left=jnp.asarray(np.full(batch, new, np.int32)),
        key=jnp.broadcast_to(key, (batch,)),
        row=jnp.asarray(np.zeros(batch, np.int32)),
        ends=jnp.asarray(np.tile(ends, (batch, 1))),
    )
    made = Sequences(cache=cache.arrays, draw=draw, sampling=mixed([sampling] * batch))
    return settle_down(made, cache.axes)
