"""Tokens sampled on top of a cache, a block of them at a time, with room made on the way."""

import dataclasses
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxkv._errors import require
from jaxkv.cache import KVCache
from jaxkv.cache.host_store import Loader, Traffic
from jaxkv.engine import token_loop
from jaxkv.engine.headroom import make_headroom, steps_that_fit
from jaxkv.engine.lengths import tokens_per_call
from jaxkv.engine.sampling import Sampler
from jaxkv.engine.spec import Spec
from jaxkv.models.decoder import Flat
from jaxkv.policies.reads import Reading
from jaxkv.sharding.mesh import host, place


class DecodeLoop:
    """Samples blocks of tokens on a cache that it owns; full pools are recompressed, or made larger.

    Attributes:
        left: tokens still to be sampled of those it was made for.
        size: tokens that one call of `sample` samples at most.
    """

    def __init__(
        self,
        flat: Flat,
        cache: KVCache,
        *,
        spec: Spec,
        sampling: Sampler,
        eos: tuple[int, ...],
        key: PRNGKeyArray,
        new: int,
        traffic: Traffic,
    ):
        """Makes a `DecodeLoop`: takes over a cache with logits (donated) and compiles the loop for `new` tokens.

        No sequence of the cache may be due to be recompressed. `eos` are the ids that end a sequence; `key` is for
        the sampling, and for policies that use random numbers when they recompress; `traffic` counts transfers from host memory.
        """
        self.left, self.size = new, tokens_per_call(new)
        self._flat, self._spec, self._key, self._sampling = flat, spec, key, sampling
        self._batch, self._padding = cache.batch, cache.padding
        # Padding sequences, which fill a mesh's groups, sample nothing.
        done = self._placed(np.zeros(self._batch, bool), padding=True)
        assert cache.logits is not None
        # -2 is no token: sampling then ends by its steps alone.
        ends = np.asarray(sorted(set(eos)) or [-2], np.int32)
        self._sampling_state = token_loop.first_sampling_state(
            cache.logits, done, key, ends, axes=spec.axes
        )
        self._decode = partial(token_loop.decode, spec=spec, sampling=sampling, size=self.size)
        self._taken_back, self._cache = False, cache
        self._loader = Loader.of(cache.host_store, traffic)
        # A run of no steps compiles and changes nothing.
        self._run(0)
        self._fit = steps_that_fit(self._cache)

    def _run(self, steps: int) -> tuple[Array, Array]:
        """Samples up to `steps` tokens; returns their ids, and the number of steps run."""
        arrays, self._sampling_state, sampled, ran = self._decode(
            self._flat, self._cache.arrays, self._sampling_state, steps, loader=self._loader
        )
        self._cache = dataclasses.replace(self._cache, arrays=arrays)
        return sampled, ran

    @property
    def final(self) -> bool:
        """True if sampling evicts entries or updates their scores, so that sampled tokens cannot be rolled back."""
        return self._spec.ongoing.evicts or self._spec.scored

    @property
    def reading(self) -> Reading:
        """Config of sparse reads (filter, sparse and offloaded layers); None if every layer reads all entries."""
        return self._spec.reading

    @property
    def done(self) -> Bool[np.ndarray, " B"]:
        """Mask of sequences that have ended, on the host."""
        return host(self._sampling_state.done)[: self._batch]

    def sample(self, steps: int) -> Int[np.ndarray, "B n"]:
        """Samples up to `steps` token ids `[B, n]`, -1 after a sequence's end; n < `steps` if entries do not fit or all end.

        A sampler that gives an id outside of the vocabulary is rejected with a ValueError.
        """
        steps = min(steps, self.size)
        if self._fit < 1:
            more = max(1, self.left)
            self._cache = make_headroom(self._flat, self._cache, more, key=self._key)
            self._fit = steps_that_fit(self._cache)
        steps = min(steps, self._fit)
        if steps < 1:
            raise RuntimeError(
                f"no room for a token after making some: a defect of jaxkv ({self._cache.policy})"
            )
        sampled, count = self._run(steps)
        tokens, ran, vocab = host(sampled)[: self._batch], int(host(count)), self._spec.config.vocab
        inside = bool((tokens < vocab).all())
        require(inside, "sampling", self._sampling, f"it gave an id outside of [0, {vocab})")
        self.left, self._fit = self.left - ran, self._fit - ran
        return tokens[:, :ran]

    def take_back(self, tokens: Int[np.ndarray, " B"]) -> None:
        """Drops the entries of the last `tokens[b]` tokens that the last `sample` drew for sequence b, which must end then.

        The caller ends these sequences afterwards.
        """
        if not tokens.any():
            return
        # The token that ends a sequence is sampled but never becomes an entry.
        rows = tokens - ((tokens > 0) & self.done)
        if rows.any():
            self._taken_back = True
            # Entries behind a stop string are the last ones of their segments: none is dropped between two reads.
            gone, tables = self._placed(rows.astype(np.int32), padding=0), self._cache.tables
            length, seen = tables.length - gone[None, :, None], tables.seen - gone
            self._cache = self._cache.updated(length=length, seen=seen)

    def end(self, which: Bool[np.ndarray, " B"]) -> None:
        """Ends the sequences that the mask `which` selects: they sample no more tokens."""
        # Streams call this at every token: nothing is sent to the device for nothing.
        if which.any():
            self._sampling_state = dataclasses.replace(
                self._sampling_state,
                done=self._sampling_state.done | self._placed(which, padding=True),
            )

    def _placed(self, of_each: np.ndarray, *, padding: Any) -> Array:
        """Device array of a host array of one number per sequence, with `padding` for sequences that fill a mesh."""
        return place(
            np.pad(of_each, (0, self._padding), constant_values=padding), "B", self._spec.axes
        )

    def close(self) -> KVCache:
        """Ends the sampling; returns the `KVCache` with all entries sampled, its `logits` None if tokens were taken back.

        Which tokens would follow those that were taken back is not known.
        """
        logits = None if self._taken_back else self._sampling_state.logits
        return dataclasses.replace(self._cache, logits=logits)
