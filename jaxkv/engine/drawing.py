"""Tokens drawn on top of a cache, a block of them at a time."""

import dataclasses
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv._errors import require
from jaxkv.cache import KVCache
from jaxkv.cache.bank import Traffic
from jaxkv.engine import loop, staged
from jaxkv.engine.growth import make_room, steps_that_fit
from jaxkv.engine.spec import Spec
from jaxkv.models.decoder import Flat
from jaxkv.policies.reading import Reading
from jaxkv.sampling import Sampling
from jaxkv.sharding.mesh import host, place


class Drawing:
    """Draws tokens on top of a cache, and makes room where there is none. It owns the cache, whose buffers it writes.

    Attributes:
        left: tokens still to be drawn of those it was made for.
        size: tokens that one call of `draw` draws at most.
    """

    def __init__(
        self,
        flat: Flat,
        cache: KVCache,
        logits: Float[Array, "B V"],
        *,
        spec: Spec,
        sampling: Sampling,
        eos: tuple[int, ...],
        key: PRNGKeyArray,
        new: int,
        size: int,
        traffic: Traffic,
    ):
        """Takes the cache over, and compiles the loop.

        Args:
            flat: the decoder's parameters.
            cache: none of whose sequences is due; consumed.
            logits: of each sequence's next token.
            spec: what is static.
            sampling: how to draw.
            eos: ids that end a sequence.
            key: for the sampling, and for policies that draw when they compress again.
            new: tokens that will be drawn, for which room is made.
            size: tokens that one call draws at most.
            traffic: counts transfers.
        """
        self.left, self.size = new, size
        self._flat, self._spec, self._key, self._sampling = flat, spec, key, sampling
        self._batch, self._padding = cache.batch, cache.padding
        # What fills a mesh's groups draws nothing.
        done = self._placed(np.zeros(self._batch, bool), others=True)
        # -2 is no token: drawing then ends by its steps alone.
        self._draw = loop.draw_of(logits, done, key, np.asarray(sorted(set(eos)) or [-2], np.int32), axes=spec.axes)
        decode: Any = loop.decode
        if cache.bank is not None:
            decode = partial(staged.decode, bank=cache.bank, traffic=traffic)
        self._decode = partial(decode, spec=spec, sampling=sampling, size=size)
        self._running: loop.Running
        self._taken_back = False
        self._begin(cache)
        # A run of no steps compiles and changes nothing.
        self._running, self._draw, _, _ = self._decode(flat, self._running, self._draw, 0)
        self._begin(self._settled())

    def _begin(self, cache: KVCache) -> None:
        self._cache, self._running = cache, loop.begin(cache.arrays, spec=self._spec, size=self.size)
        # Rows drawn since the last settling, and steps before the next.
        self._held, self._fit = 0, steps_that_fit(cache)

    def _settled(self) -> KVCache:
        return dataclasses.replace(self._cache, arrays=loop.settle(self._running, spec=self._spec))

    @property
    def final(self) -> bool:
        """True if drawing changes older rows, by eviction or scores, so that tokens cannot be taken back."""
        return self._spec.evicts or self._spec.scored

    @property
    def reading(self) -> Reading | None:
        """Which layers read what; None if all read everything."""
        return self._spec.reading

    @property
    def done(self) -> Bool[np.ndarray, " B"]:
        """Which sequences have ended."""
        return host(self._draw.done)[: self._batch]

    def draw(self, steps: int) -> Int[np.ndarray, "B n"]:
        """Draws tokens.

        Args:
            steps: how many per sequence at most; fewer where they do not fit, or all sequences end.

        Returns:
            The tokens, -1 behind a sequence's end.

        Raises:
            ValueError: if the sampling gives an id outside of the vocabulary.
        """
        steps = min(steps, self.size)
        if self._fit < 1 or self._held + steps > self.size:
            full, cache = self._fit < 1, self._settled()
            self._begin(make_room(self._flat, cache, max(1, self.left), key=self._key) if full else cache)
        steps = min(steps, self._fit)
        if steps < 1:
            raise RuntimeError(f"no room for a token after making some: a defect of jaxkv ({self._cache.policy})")
        self._running, self._draw, drawn, count = self._decode(self._flat, self._running, self._draw, steps)
        tokens, ran, vocab = host(drawn)[: self._batch], int(host(count)), self._spec.config.vocab
        inside = bool((tokens < vocab).all())
        require(inside, "sampling", self._sampling, f"it gave an id outside of [0, {vocab})")
        self.left, self._held, self._fit = self.left - ran, self._held + ran, self._fit - ran
        return tokens[:, :ran]

    def take_back(self, tokens: Int[np.ndarray, " B"]) -> None:
        """Forgets the last tokens of some sequences, none of them older than the last `draw`; end these sequences then.

        Args:
            tokens: how many of each.
        """
        # The token that ends a sequence is drawn but never becomes a row.
        rows = tokens - ((tokens > 0) & self.done)
        if rows.any():
            self._taken_back = True
            self._running = self._running.rewound(self._placed(rows.astype(np.int32), others=0))

    def end(self, which: Bool[np.ndarray, " B"]) -> None:
        """Ends sequences.

        Args:
            which: those.
        """
        self._draw = dataclasses.replace(self._draw, done=self._draw.done | self._placed(which, others=True))

    def _placed(self, of_each: np.ndarray, *, others: Any) -> Array:
        """Numbers of the sequences that draw on the devices, and another one for those that fill a mesh's groups."""
        return place(np.pad(of_each, (0, self._padding), constant_values=others), "B", self._spec.axes)

    def close(self) -> KVCache:
        """The cache with all that was drawn, and the logits of what comes next; the drawing is over.

        Without logits where tokens were taken back: nothing is known of what would come in their place.
        """
        return dataclasses.replace(self._settled(), logits=None if self._taken_back else self._draw.logits)
