"""Extras of the token loop: arrays for penalties, biases and token masks, and log-probabilities of sampled tokens.

The plain loop, which most requests run, has None in their place, and no further cost.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.engine.sampling import MOST_LOGPROBS, Sampler, get_settings, needs_extras
from jaxkv.sharding.mesh import ShardingMesh, copy_to_host, place_dataclass_on_mesh

# Bits of a word of a token mask.
_BITS = 32
# Ids and log-probabilities of a token and of the likeliest ones in its place, its own first.
ScoredToken = tuple[list[int], list[Any]]


@jax.tree_util.register_dataclass
@frozen_dataclass
class SampledLogprobs:
    """Log-probabilities of n sampled tokens per sequence: first the token's own, then those of the likeliest tokens.

    Attributes:
        ids: token ids; ties of the likeliest lowest id first.
        values: log-probabilities, natural logarithms.
    """

    ids: Int[Array | np.ndarray, "B n k"]
    values: Float[Array | np.ndarray, "B n k"]


def score_tokens(logits: Float[Array, "B V"], token: Int[Array, " B"]) -> SampledLogprobs:
    """Return the `SampledLogprobs` of one token per sequence by its logits."""
    top = lax.top_k(logits, min(MOST_LOGPROBS, logits.shape[1]))[1]
    ids = jnp.concatenate([token[:, None], top], axis=1)
    values = jnp.take_along_axis(jax.nn.log_softmax(logits), ids, axis=1)
    return SampledLogprobs(ids=ids[:, None], values=values[:, None])


def concatenate_logprobs(blocks: Iterable[Any]) -> Any:
    """Concatenate blocks of `SampledLogprobs` along the tokens, as numpy arrays, without None; None if none is left."""
    found = [jax.tree.map(copy_to_host, each) for each in blocks if each]
    return jax.tree.map(lambda *each: np.concatenate(each, axis=1), *found) if found else None


@jax.tree_util.register_dataclass
@frozen_dataclass
class SamplingExtras:
    """Extras of a batch: arrays of the `Sampling` fields that need the tokens so far, or have a number per token id.

    The vocabulary is `v`, not V: every device of a mesh holds all of it.

    Attributes:
        counts: how often each answer contains each token.
        in_prompt: mask of tokens in each prompt.
        bias: numbers to add to logits.
        allowed: mask of tokens to sample from, 32 per word, lowest bit first.
        penalties: `repetition_penalty`, `presence_penalty`, `frequency_penalty`.
        scored: mask of sequences with log-probabilities.
    """

    counts: Int[Array, "B v"]
    in_prompt: Bool[Array, "B v"]
    bias: Float[Array, "B v"]
    allowed: UInt32[Array, "B w"]
    penalties: Float[Array, "B 3"]
    scored: Bool[Array, " B"]

    def process_logits(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Return logits with biases added, then penalties applied, then minus infinity for tokens not allowed.

        The order is that of transformers and vLLM. It matters: the penalty of repetition is a factor.
        """
        counts, (ratio, presence, frequency) = self.counts, jnp.split(self.penalties, 3, axis=1)
        logits = logits + self.bias
        repeated = jnp.where(logits > 0, logits / ratio, logits * ratio)
        logits = jnp.where((counts > 0) | self.in_prompt, repeated, logits)
        logits = logits - frequency * counts.astype(jnp.float32)
        logits = jnp.where(counts > 0, logits - presence, logits)
        bits = self.allowed[:, :, None] >> jnp.arange(_BITS, dtype=jnp.uint32) & 1
        allowed = bits.reshape(len(bits), -1)[:, : logits.shape[1]] > 0
        return jnp.where(allowed, logits, -jnp.inf)

    def count_and_score(
        self, token: Int[Array, " B"], sampled: Bool[Array, " B"], logits: Float[Array, "B V"]
    ) -> tuple["SamplingExtras", SampledLogprobs]:
        """Return the extras with a token per sequence counted where `sampled`, and its `SampledLogprobs`.

        Log-probabilities are those of the unprocessed logits; zeros if no sequence is scored.
        """
        at = self.counts.at[jnp.arange(len(token)), token]
        counts = at.add(sampled.astype(jnp.int32), mode="drop")
        logprobs = lax.cond(
            self.scored.any(), lambda: score_tokens(logits, token), lambda: self.create_logprobs(1)
        )
        return dataclasses.replace(self, counts=counts), logprobs

    def create_logprobs(self, size: int) -> SampledLogprobs:
        """Return `SampledLogprobs` of `size` tokens per sequence: zeros."""
        batch, vocab = self.counts.shape
        shape = batch, size, 1 + min(MOST_LOGPROBS, vocab)
        return SampledLogprobs(ids=jnp.zeros(shape, jnp.int32), values=jnp.zeros(shape))


def create_extras(
    sampling: Sampler,
    prompts: Sequence[Sequence[int]],
    *,
    batch: int,
    vocab: int,
    axes: ShardingMesh | None,
    always: bool = False,
) -> SamplingExtras | None:
    """Return the extras of `batch` sequences, on their mesh; None if the sampler needs none, unless `always`.

    `prompts` are the known token ids before each answer; missing ones are empty.
    """
    if not (always or needs_extras(sampling)):
        return None
    given, in_prompt = get_settings(sampling), np.zeros((batch, vocab), bool)
    for row, ids in enumerate(prompts):
        in_prompt[row, list(ids)] = True
    bias = np.zeros((batch, vocab), np.float32)
    for token, number in dict(given.logit_bias).items():
        bias[:, token] = number
    penalties = given.repetition_penalty, given.presence_penalty, given.frequency_penalty
    made = SamplingExtras(
        counts=jnp.zeros((batch, vocab), jnp.int32),
        in_prompt=jnp.asarray(in_prompt),
        bias=jnp.asarray(bias),
        allowed=jnp.asarray(np.full((batch, -(-vocab // _BITS)), 2**_BITS - 1, np.uint32)),
        penalties=jnp.asarray(np.full((batch, 3), penalties, np.float32)),
        scored=jnp.full((batch,), given.logprobs is not None),
    )
    return place_dataclass_on_mesh(made, axes)
