"""`DecodeLoop`: samples tokens on top of a cache, block by block, and makes headroom when needed."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxkv._errors import require
from jaxkv.cache import KVCache
from jaxkv.cache.host_store import HostStoreLoader, TransferCounter
from jaxkv.engine import token_loop
from jaxkv.engine.headroom import count_steps_until_full, make_headroom
from jaxkv.engine.lengths import tokens_per_call
from jaxkv.engine.sampling import Sampler, make_end_id_table
from jaxkv.engine.sampling_extras import create_extras
from jaxkv.engine.spec import DecodeSpec
from jaxkv.models.split_decoder import SplitDecoder
from jaxkv.policies.reads import LayerReadConfig
from jaxkv.sharding.mesh import copy_to_host, place_host_array


class DecodeLoop:
    """Loop that samples tokens in blocks on a cache that it owns, and recompresses or enlarges full pools.

    Attributes:
        left: number of tokens left to sample.
        size: maximum number of tokens per call of `sample_tokens`.
        logprobs: `SampledLogprobs` of the tokens that `sample_tokens` last returned, on the host; None without extras.
    """

    def __init__(
        self,
        flat: SplitDecoder,
        cache: KVCache,
        *,
        spec: DecodeSpec,
        sampling: Sampler,
        eos: tuple[int, ...],
        key: PRNGKeyArray,
        new: int,
        traffic: TransferCounter,
        prompts: Sequence[Sequence[int]] = (),
    ):
        """Take over a cache with logits (donated), and compile any loop for up to `new` tokens.

        No sequence may be due for recompression. `eos` are the ids that end a sequence. `key` is for sampling, and for
        policies that use random numbers in recompression. `traffic` counts transfers from host memory. `prompts` are
        the known token ids before each answer.
        """
        self.left = new
        self.size = tokens_per_call(new)
        self._flat = flat
        self._spec = spec
        self._key = key
        self._sampling = sampling
        self._batch = cache.batch
        self._padding = cache.padding
        # Padding sequences, which fill up a mesh's groups, sample nothing.
        done = self._place_sequence_values(np.zeros(self._batch, bool), padding=True)
        assert cache.logits is not None
        ends = make_end_id_table(sampling, eos)
        state = token_loop.create_sampling_state(cache.logits, done, key, ends, axes=spec.axes)
        extras = create_extras(
            sampling, prompts, batch=len(done), vocab=spec.config.vocab, axes=spec.axes
        )
        self._sampling_state = dataclasses.replace(state, extras=extras)
        self.logprobs = None
        self._decode = partial(token_loop.decode, spec=spec, sampling=sampling, size=self.size)
        self._taken_back = False
        self._cache = cache
        self._loader = HostStoreLoader.create_host_loader(cache.host_store, traffic)
        # A run of 0 steps compiles a loop and changes nothing.
        self._run_sampling_steps(0)
        self._fit = count_steps_until_full(self._cache)

    def _run_sampling_steps(self, steps: int) -> tuple[Array, Array, Any]:
        """Sample up to `steps` tokens, update cache and state; return arrays: ids, number of steps, logprobs."""
        arrays, self._sampling_state, *sampled = self._decode(
            self._flat, self._cache.arrays, self._sampling_state, steps, loader=self._loader
        )
        self._cache = dataclasses.replace(self._cache, arrays=arrays)
        return tuple(sampled)

    @property
    def is_rollback_impossible(self) -> bool:
        """True if sampling evicts entries, updates their scores or a state, so that tokens cannot be rolled back."""
        scored = self._spec.ongoing.evicts or self._spec.uses_attention_scores
        return scored or bool(self._cache.arrays.states)

    @property
    def sparse_attention_config(self) -> LayerReadConfig:
        """`LayerReadConfig` of a decode loop: which layers filter, are sparse, or are offloaded."""
        return self._spec.reading

    @property
    def ended_sequences(self) -> Bool[np.ndarray, " B"]:
        """Mask `bool[B]`, on the host, of a decode loop's sequences that have ended."""
        return copy_to_host(self._sampling_state.done)[: self._batch]

    def sample_tokens(self, steps: int) -> Int[np.ndarray, "B n"]:
        """Make headroom if none is left; sample up to `steps` ids per sequence; return them `[B, n]`, -1 after an end.

        n is less than `steps` if the free places are used up or all sequences end. Raise ValueError for a sampler that
        returns an id outside the vocabulary.
        """
        steps = min(steps, self.size)
        if self._fit < 1:
            more = max(1, self.left)
            self._cache = make_headroom(self._flat, self._cache, more, key=self._key)
            self._fit = count_steps_until_full(self._cache)
        steps = min(steps, self._fit)
        if steps < 1:
            raise RuntimeError(
                f"no headroom for a token after recompression. Report this as a bug of jaxkv ({self._cache.policy})."
            )
        sampled, count, logprobs = self._run_sampling_steps(steps)
        tokens = copy_to_host(sampled)[: self._batch]
        ran = int(copy_to_host(count))
        vocab = self._spec.config.vocab
        inside = bool((tokens < vocab).all())
        require(
            inside, "sampling", self._sampling, f"an id outside of [0, {vocab}): return valid ids"
        )
        self.left = self.left - ran
        self._fit = self._fit - ran
        self.logprobs = jax.tree.map(lambda each: copy_to_host(each)[: self._batch, :ran], logprobs)
        return tokens[:, :ran]

    def roll_back_tokens(self, tokens: Int[np.ndarray, " B"]) -> None:
        """Remove the entries of the last `tokens[b]` tokens that `sample_tokens` last returned for sequence b.

        The caller must end these sequences afterwards.
        """
        if not tokens.any():
            return
        # The token that ends a sequence adds no entry.
        rows = tokens - ((tokens > 0) & self.ended_sequences)
        if rows.any():
            self._taken_back = True
            # Entries after a stop string are the last of their segments: nothing is evicted between two checks.
            removed = self._place_sequence_values(rows.astype(np.int32), padding=0)
            tables = self._cache.tables
            length = tables.length - removed[None, :, None]
            seen = tables.seen - removed
            self._cache = self._cache.replace_arrays(length=length, seen=seen)

    def end_sequences(self, which: Bool[np.ndarray, " B"]) -> None:
        """Mark the sequences in the mask `which` as ended: they sample no more tokens."""
        # Streams call this at every token, so avoid transfers of an empty mask.
        if which.any():
            self._sampling_state = dataclasses.replace(
                self._sampling_state,
                done=self._sampling_state.done | self._place_sequence_values(which, padding=True),
            )

    def _place_sequence_values(self, of_each: np.ndarray, *, padding: Any) -> Array:
        """Return a device array of one number per sequence, with `padding` for sequences that fill up a mesh."""
        return place_host_array(
            np.pad(of_each, (0, self._padding), constant_values=padding), "B", self._spec.axes
        )

    def finish_sampling(self) -> KVCache:
        """Return the loop's `KVCache` with new entries; `logits` are the next token's, None if some were rolled back.

        Its `logits` are None if tokens were taken back, because their successors are unknown.
        """
        logits = None if self._taken_back else self._sampling_state.logits
        return dataclasses.replace(self._cache, logits=logits)
